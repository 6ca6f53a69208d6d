"""Rows of optimum-quanto 0.2.7."""

import types

import torch
from table import (
    BF16,
    DEEP,
    FP16,
    FP32,
    MLP,
    OPAQUE,
    Case,
    K,
    Made,
    N,
    deep,
    flat,
    leave,
    lower,
    partial,
    plain_layer,
    spread,
)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    mask = (1 << bits) - 1
    return torch.cat([packed >> place & mask for place in range(0, 8, bits)])


def quantised(module: torch.nn.Module, weights: str, dtype: torch.dtype) -> torch.nn.Module:
    from optimum import quanto
    from optimum.quanto.library.extensions import cpp

    # In place of the library's C++, which takes half a minute to build.
    cpp.ext._lib = types.SimpleNamespace(unpack=unpack)
    module = module.to(dtype).eval().requires_grad_(False)
    spread(module)
    quanto.quantize(module, weights=getattr(quanto, weights))
    quanto.freeze(module)
    return module


def layer(weights: str, bias: bool = False, dtype: torch.dtype = BF16) -> Made:
    module = quantised(torch.nn.Sequential(plain_layer(N, K, bias)), weights, dtype)
    return Made(module, deep(dtype=dtype), DEEP)


def calibrated() -> Made:
    from optimum import quanto

    module = torch.nn.Sequential(plain_layer(N, K)).eval().requires_grad_(False)
    quanto.quantize(module, weights=quanto.qint8, activations=quanto.qint8)
    with quanto.Calibration():
        module(torch.randn(32, K, dtype=BF16))
    quanto.freeze(module)
    return Made(module, flat())


TORCH = "quanto takes torch's int4 kernel for CPUs, which takes the codes"

CASES: tuple[Case, ...] = (
    lower("optimum_quanto/qint4_weight_fp16", partial(layer, "qint4", dtype=FP16),
          "uint4[128,256] group-128 scale fp16 zero fp16", symbolic=True),
    lower("optimum_quanto/qint2_weight", partial(layer, "qint2"),
          "uint2[128,256] group-128 scale bf16 zero bf16", symbolic=True),
    leave("optimum_quanto/qint4_weight", f"{OPAQUE}: {TORCH}", partial(layer, "qint4")),
    leave("optimum_quanto/qint4_weight_bias", f"{OPAQUE}: {TORCH}",
          partial(layer, "qint4", bias=True)),
    leave("optimum_quanto/mlp_qint4", f"{OPAQUE}: {TORCH}",
          lambda: Made(quantised(MLP(plain_layer), "qint4", BF16), flat())),
    leave("optimum_quanto/qint8_weight", f"{OPAQUE}: qbytes_mm", partial(layer, "qint8")),
    leave("optimum_quanto/qint8_weight_bias_fp32", f"{OPAQUE}: qbytes_mm",
          partial(layer, "qint8", bias=True, dtype=FP32)),
    leave("optimum_quanto/qfloat8_weight", f"{OPAQUE}: qbytes_mm",
          partial(layer, "qfloat8_e4m3fn")),
    leave("optimum_quanto/qint8_weight_qint8_act", f"{OPAQUE}: qbytes_mm", calibrated,
          codes=("a quantiser must be written in torch's operators",)),
)  # fmt: skip
