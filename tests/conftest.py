"""Every test starts clean: nothing compiled, no compile cache, no table of measured times, one
thread, one seed."""

import logging
import os
import tempfile

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import qinductor
from qinductor import tables

# Pytest listens to loggers that do not propagate; then torch writes out every graph, for nothing.
logging.getLogger("torch.__trace").propagate = True

# Plans must not depend on the machine, and its own tables must not be written to.
os.environ["QINDUCTOR_CACHE"] = tempfile.mkdtemp()


@pytest.fixture(autouse=True)
def clean_state(monkeypatch, tmp_path):
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "device", lambda target: None)
    torch._dynamo.reset()
    qinductor.reports().clear()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = inductor_config.save_config()  # torchao's int8 sets some for the process
    caches_off = inductor_config.patch(fx_graph_cache=False)
    with caches_off, functorch_config.patch(enable_autograd_cache=False):
        yield
    inductor_config.load_config(settings)
