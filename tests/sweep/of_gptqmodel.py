"""Rows of GPTQModel 7.7: its kernels in plain torch."""

import torch
from table import (
    BF16,
    BREAK,
    DEEP,
    FP16,
    Case,
    K,
    Made,
    N,
    deep,
    float8,
    leave,
    lower,
    partial,
    plain_layer,
    scales,
    words,
)


def gptq(
    bits: int = 4, group: int = 64, ordered: bool = True, bias: bool = False, caches: bool = True
) -> Made:
    """`ordered` False: act-order, each column has its own group; `caches` as in eval mode."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    part = TorchLinear(
        bits=bits, group_size=group, sym=True, desc_act=not ordered, in_features=K, out_features=N,
        bias=bias, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    part.qweight, part.qzeros = words(*part.qweight.shape), words(*part.qzeros.shape)
    part.scales = scales(*part.scales.shape, dtype=FP16)
    if not ordered:
        part.g_idx = (torch.randperm(K) // group).to(torch.int32)
    if bias:
        part.bias = torch.randn(N, dtype=FP16)
    part.optimized = True  # it would compile itself
    part.qzero_format(format=2)
    part.post_init()
    part.eval()
    part.training = not caches
    return Made(part, deep(dtype=FP16), DEEP)


def awq() -> Made:
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    part = AwqTorchLinear(
        bits=4, group_size=64, sym=False, desc_act=False, in_features=K, out_features=N,
        bias=False, register_buffers=True,
    )  # fmt: skip
    part.qweight, part.qzeros = words(*part.qweight.shape), words(*part.qzeros.shape)
    part.scales = scales(K // 64, N, dtype=FP16)
    part.post_init()
    return Made(part.eval(), deep(dtype=FP16), DEEP)


def fp8(method: str, n: int = N, bias: bool = False, **settings) -> Made:
    from gptqmodel.nn_modules.qlinear.fp8 import TorchFP8Linear

    part = TorchFP8Linear(
        bits=8, group_size=-1, sym=True, desc_act=False, in_features=K, out_features=n, bias=bias,
        weight_scale_method=method, register_buffers=True, **settings,
    )  # fmt: skip
    part.pack_original(plain_layer(n, K, bias), None, None)
    part.weight = float8(n, K)
    return Made(part.eval().requires_grad_(False), deep(dtype=BF16), DEEP)


APART = "the product must be in the graph of its dequantised weight; a graph break"
CACHED = f"{BREAK}: it caches decoded zeros in eval mode"

CASES: tuple[Case, ...] = (
    lower("gptqmodel/gptq_w4_group64_uncached", partial(gptq, caches=False),
          "fp16 x uint4[128,256] group-64 scale fp16 zero int8 (q-z)*s", symbolic=True),
    lower("gptqmodel/gptq_w4_act_order_uncached",
          partial(gptq, ordered=False, bias=True, caches=False),
          "fp16 x uint4[128,256] group-64 scale fp16 zero int8 (q-z)*s", symbolic=True),
    lower("gptqmodel/gptq_w8_group64_uncached", partial(gptq, 8, caches=False),
          "fp16 x uint8[128,256] group-64 scale fp16 zero int16 (q-z)*s"),
    lower("gptqmodel/gptq_w2_group64, uncached", partial(gptq, 2, caches=False),
          "fp16 x uint2[128,256] group-64 scale fp16 zero", "(q-z)*s", extra=True),
    lower("gptqmodel/gptq_w4_per_channel, uncached", partial(gptq, group=-1, caches=False),
          "fp16 x uint4[128,256] channel scale fp16 zero int8 (q-z)*s", extra=True),
    lower("gptqmodel/gptq_w3_group64", partial(gptq, 3),
          "fp16 x uint3[128,256] group-64 scale fp16 zero", "(q-z)*s", symbolic=True),
    lower("gptqmodel/awq_w4_group64", awq,
          "fp16 x uint4[128,256] group-64 scale fp16 zero int16 (q-z)*s", symbolic=True),
    leave("gptqmodel/gptq_w4_group64", CACHED, gptq, APART),
    leave("gptqmodel/gptq_w4_act_order", CACHED, partial(gptq, ordered=False), APART),
    leave("gptqmodel/gptq_w4_per_channel", CACHED, partial(gptq, group=-1), APART),
    leave("gptqmodel/gptq_w2_group64", CACHED, partial(gptq, 2), APART),
    leave("gptqmodel/gptq_w8_group64", CACHED, partial(gptq, 8), APART),
    leave("gptqmodel/fp8_row_scale", f"{BREAK}: it looks at the scales' values",
          partial(fp8, "row", bias=True), APART),
    leave("gptqmodel/fp8_block_scale", f"{BREAK}: it looks at the scales' values",
          partial(fp8, "block", 256, weight_block_size=(128, 128)), APART),
)  # fmt: skip
