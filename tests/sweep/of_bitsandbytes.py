"""Rows of bitsandbytes 0.50: its own operators take the packed codes, so nothing is lowered."""

import torch
from table import (
    BF16,
    BREAK,
    FP32,
    MLP,
    OPAQUE,
    Case,
    K,
    Made,
    N,
    flat,
    leave,
    partial,
    plain_layer,
)


def nf4(n: int = N, k: int = K, double: bool = False, repack: bool = False) -> torch.nn.Module:
    import bitsandbytes

    part = bitsandbytes.nn.Linear4bit(
        k, n, bias=False, compute_dtype=BF16, compress_statistics=double, quant_type="nf4"
    )
    part.load_state_dict(plain_layer(n, k).state_dict())
    part.to("cpu")
    part.support_avx512bf16_for_cpu = repack  # False: the path that a GPU takes too
    return part.eval().requires_grad_(False)


def layer(dtype: torch.dtype = BF16, **settings) -> Made:
    return Made(nf4(**settings), flat(dtype=dtype))


def int8(threshold: float) -> Made:
    import bitsandbytes

    part = bitsandbytes.nn.Linear8bitLt(K, N, bias=False, has_fp16_weights=False,
                                        threshold=threshold)  # fmt: skip
    part.load_state_dict(plain_layer(N, K, dtype=FP32).state_dict())
    part.to("cpu")
    return Made(part.eval().requires_grad_(False), flat(dtype=FP32))


GEMM = f"{OPAQUE}: gemm_4bit"

CASES: tuple[Case, ...] = (
    leave("bitsandbytes/nf4", GEMM, layer),
    leave("bitsandbytes/nf4_single_token", GEMM, layer, rows=1),
    leave("bitsandbytes/nf4_fp32_input", GEMM, partial(layer, FP32)),
    leave("bitsandbytes/mlp_nf4", GEMM,
          lambda: Made(MLP(partial(nf4, double=True)), flat())),
    leave("bitsandbytes/nf4_cpu_repack", f"{OPAQUE}: gemv_4bit, on a weight that it repacks itself",
          partial(layer, repack=True)),
    leave("bitsandbytes/llm_int8", f"{OPAQUE}: int8_scaled_mm; {BREAK}", partial(int8, 6.0)),
    leave("bitsandbytes/llm_int8_no_threshold", f"{OPAQUE}: int8_scaled_mm", partial(int8, 0.0)),
)  # fmt: skip
