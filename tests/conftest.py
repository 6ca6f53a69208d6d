"""Every test starts clean: nothing compiled, no compile cache, no table of measured times, one
thread, one seed."""

import logging
import os
import tempfile

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import qinductor
from qinductor import tables
from qinductor.caches import disk
from qinductor.kernels import cute_cache

# Pytest listens to loggers that do not propagate; then torch writes out every graph, for nothing.
logging.getLogger("torch.__trace").propagate = True

# Plans must not depend on the machine, and its own tables must not be written to.
os.environ["QINDUCTOR_CACHE"] = tempfile.mkdtemp()
# What is built of C++ and Triton stays from one run of the tests to the next.
for variable, place in (("TORCHINDUCTOR_CACHE_DIR", "tests"), ("TRITON_CACHE_DIR", "tests/triton")):
    if not disk.is_set_by_user(variable):
        os.environ[variable] = os.path.join(default_cache_dir(), place)


@pytest.fixture(autouse=True)
def clean_state(tmp_path_factory):
    torch._dynamo.reset()
    qinductor.reports().clear()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = inductor_config.save_config()  # torchao's int8 sets some for the process
    caches_off = inductor_config.patch(fx_graph_cache=False)
    untuned = pytest.MonkeyPatch.context()  # not the fixture, which would be undone after ours
    with caches_off, functorch_config.patch(enable_autograd_cache=False), untuned as patch:
        patch.setenv("QINDUCTOR_CACHE", str(tmp_path_factory.getbasetemp() / "no cache"))
        patch.setattr(tables, "device", lambda target: None)
        patch.setattr(cute_cache, "missing", lambda: "CuTe DSL may or may not be installed here")
        yield
    inductor_config.load_config(settings)
