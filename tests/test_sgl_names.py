"""The names of sgl-kernel: found in `qinductor.kernels` when asked for, and not before."""

import subprocess
import sys
from pathlib import Path

import pytest

import qinductor.kernels as sgl_kernel

ROOT = Path(__file__).parents[1]
NAMES = (
    "bmm_fp8",
    "cutlass_w4a8_moe_mm",
    "dsv3_fused_a_gemm",
    "dsv3_router_gemm",
    "fp8_blockwise_scaled_mm",
    "fp8_gemm_nt",
    "fp8_scaled_mm",
    "get_cutlass_w4a8_moe_mm_data",
    "int8_scaled_mm",
    "sgl_per_tensor_quant_fp8",
    "sgl_per_token_group_quant_8bit",
    "sgl_per_token_group_quant_fp8",
    "sgl_per_token_group_quant_int8",
    "sgl_per_token_quant_fp8",
    "shuffle_rows",
)
LAZY = """
import sys
import qinductor.kernels as sgl_kernel
assert set(NAMES) <= set(dir(sgl_kernel))
loaded = [name for name in sys.modules if name.startswith("qinductor.kernels.")]
assert not loaded, loaded
from qinductor.kernels import fp8_gemm_nt
assert sgl_kernel.fp8_gemm_nt is fp8_gemm_nt and callable(fp8_gemm_nt)
"""
TOP_LEVEL = """
import sys
import kernels
import transformers
assert not hasattr(kernels, "get_kernel")
assert not [name for name in sys.modules if name.startswith(("kernels.", "qinductor.kernels"))]
from qinductor import kernels as ours
assert kernels.fp8_gemm_nt is ours.fp8_gemm_nt
"""


def test_names():
    assert set(NAMES) <= set(dir(sgl_kernel))
    for name in NAMES:
        function = getattr(sgl_kernel, name)
        assert callable(function) and function.__doc__
    assert sgl_kernel.sgl_per_token_group_quant_fp8 is sgl_kernel.sgl_per_token_group_quant_8bit
    assert sgl_kernel.sgl_per_token_group_quant_int8 is sgl_kernel.sgl_per_token_group_quant_8bit
    with pytest.raises(AttributeError, match="module 'qinductor.kernels' has no attribute 'gemm'"):
        sgl_kernel.gemm  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'gemm'"):
        from qinductor.kernels import gemm  # noqa: F401


@pytest.mark.parametrize("program", [LAZY, TOP_LEVEL], ids=["lazy", "top level"])
def test_in_a_process_of_its_own(program):
    if program is TOP_LEVEL:
        pytest.importorskip("transformers", reason="it is what imports a package `kernels`")
    child = subprocess.run(
        [sys.executable, "-c", f"NAMES = {NAMES!r}\n{program}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
