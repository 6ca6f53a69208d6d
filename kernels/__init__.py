"""Kernel families: operators, their references and their providers. Import as `qinductor.kernels`.

Nothing is imported here: run from the repository's root, other libraries take this folder for the
package `kernels` and import it when they look for that. The functions of sgl-kernel's names are
found when they are asked for: `import qinductor.kernels as sgl_kernel`.
"""

import importlib
from typing import Any

_QUANTIZE, _MATMUL = "qinductor.kernels.sgl_quantize", "qinductor.kernels.sgl_matmul"
_ROWS = "qinductor.kernels.sgl_moe_rows"
# name -> module that has it
_FUNCTIONS = {
    "sgl_per_token_group_quant_8bit": _QUANTIZE,
    "sgl_per_token_group_quant_fp8": _QUANTIZE,
    "sgl_per_token_group_quant_int8": _QUANTIZE,
    "sgl_per_tensor_quant_fp8": _QUANTIZE,
    "sgl_per_token_quant_fp8": _QUANTIZE,
    "fp8_scaled_mm": _MATMUL,
    "int8_scaled_mm": _MATMUL,
    "fp8_blockwise_scaled_mm": _MATMUL,
    "bmm_fp8": "qinductor.kernels.sgl_batched",
    "fp8_gemm_nt": "qinductor.kernels.sgl_gemm_nt",
    "shuffle_rows": _ROWS,
    "get_cutlass_w4a8_moe_mm_data": _ROWS,
    "cutlass_w4a8_moe_mm": "qinductor.kernels.sgl_moe_matmul",
    "dsv3_router_gemm": "qinductor.kernels.sgl_router",
    "dsv3_fused_a_gemm": "qinductor.kernels.sgl_router",
}


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_FUNCTIONS[name]), name)
    globals()[name] = found  # looked up once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS})
