"""Rows of code as people write it by hand; every module is a function and its buffers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from table import (
    BF16,
    DEEP,
    DENSE,
    E4M3,
    E8M0,
    FP32,
    GPU,
    INTEGER,
    OPAQUE,
    QUANTISER,
    ROUTER,
    Case,
    K,
    Made,
    N,
    deep,
    exponents,
    flat,
    float8,
    leave,
    lower,
    octets,
    partial,
    scales,
)

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


class Module(torch.nn.Module):
    """A function of its buffers and of the arguments."""

    def __init__(self, function: Callable, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *args: torch.Tensor):
        return self.function(self, *args)


def layer(function: Callable, rank: int = 3, **buffers: torch.Tensor) -> Made:
    """A function of x in bf16."""
    module = Module(function, **buffers)
    return Made(module, flat()) if rank == 2 else Made(module, deep(), DEEP)


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


# int4, two codes a byte.


def nibbles(w: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    pair = (w & 0xF, w >> 4)
    return torch.stack(pair[::-1] if high_first else pair, -1).flatten(-2)


def groups(q: torch.Tensor, g: int = 64) -> torch.Tensor:
    return q.unflatten(-1, (-1, g))


def int4(weight: Callable, **buffers: torch.Tensor) -> Made:
    def function(m, x):
        return F.linear(x, weight(m).flatten(-2))

    return layer(function, w=octets(N, K // 2), s=scales(N, K // 64), **buffers)


def low_first() -> Made:
    return int4(lambda m: (groups(nibbles(m.w)).to(BF16) - 8) * m.s[..., None])


def high_first() -> Made:
    return int4(lambda m: (groups(nibbles(m.w, True)).to(BF16) - 8) * m.s[..., None])


def signed_shift() -> Made:
    def weight(m):
        w = m.w.view(torch.int8)
        q = torch.stack(((w << 4) >> 4, w >> 4), -1).flatten(-2)
        return groups(q).to(BF16) * m.s[..., None]

    return int4(weight)


def integer_zero() -> Made:
    def weight(m):
        return (groups(nibbles(m.w)).to(BF16) - m.z.to(BF16)[..., None]) * m.s[..., None]

    return int4(weight, z=torch.randint(0, 16, (N, K // 64), dtype=torch.uint8))


def float_minimum() -> Made:
    def weight(m):
        return groups(nibbles(m.w)).to(BF16) * m.s[..., None] + m.z[..., None]

    return int4(weight, z=torch.randn(N, K // 64, dtype=BF16) * 0.1)


def one_row() -> Made:
    n = 4096

    def function(m, x):
        q = groups(nibbles(m.w)).to(x.dtype) - 8
        return F.linear(x, (q * m.s[..., None]).flatten(-2))

    module = Module(function, w=octets(n, K // 2), s=scales(n, K // 64))
    return Made(module, lambda m: (torch.randn(1, m, K, dtype=BF16),), DEEP)


def lora() -> Made:
    def function(m, x):
        q = groups(nibbles(m.w)).to(x.dtype) - 8
        base = F.linear(x, (q * m.s[..., None]).flatten(-2))
        return base + F.linear(F.linear(x, m.a), m.b) * 2.0

    return layer(
        function, w=octets(N, K // 2), s=scales(N, K // 64),
        a=torch.randn(8, K, dtype=BF16) * 0.1, b=torch.randn(N, 8, dtype=BF16) * 0.1,
    )  # fmt: skip


# int8.


def scale_before() -> Made:
    return layer(
        lambda m, x: F.linear(x, m.w.to(x.dtype) * m.s[:, None]), w=int8(N, K), s=scales(N)
    )


def scale_after() -> Made:
    return layer(lambda m, x: F.linear(x, m.w.to(x.dtype)) * m.s, w=int8(N, K), s=scales(N))


def scale_of_inputs() -> Made:
    return layer(
        lambda m, x: F.linear(x, m.w.to(x.dtype) * m.s[None, :]), w=int8(N, K), s=scales(K)
    )


def stored_transposed() -> Made:
    return layer(lambda m, x: x @ (m.w.to(BF16) * m.s), w=int8(K, N), s=scales(N))


def float32_product() -> Made:
    def function(m, x):
        return (x.float() @ (m.w.float() * m.s[:, None]).t()).to(BF16)

    return layer(function, 2, w=int8(N, K), s=scales(N, dtype=FP32))


def two_users() -> Made:
    def function(m, x, ids):
        w = m.w.to(BF16) * m.s[:, None]
        return F.linear(x, w), F.embedding(ids, w)

    return Made(
        Module(function, w=int8(N, K), s=scales(N)),
        lambda m: (torch.randn(m, K, dtype=BF16), torch.randint(0, N, (m,))),
        ((0, 0), (1, 0)),
    )


# float8.


def repeated_blocks() -> Made:
    def function(m, x):
        s = m.s.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return F.linear(x, (m.w.float() * s).to(x.dtype))

    return layer(function, w=float8(K, K), s=scales(2, 2, dtype=FP32))


def viewed_blocks() -> Made:
    def function(m, x):
        w = m.w.view(2, 128, 2, 128).to(FP32) * m.s[:, None, :, None]
        return F.linear(x, w.view(K, K).to(x.dtype), m.b)

    return layer(function, w=float8(K, K), s=scales(2, 2, dtype=FP32), b=torch.randn(K, dtype=BF16))


def quantised_x() -> Made:
    """x is quantised by groups of 128 and dequantised; the product is fp32."""

    def function(m, x):
        g = x.float().view(x.shape[0], -1, 128)
        s = g.abs().amax(-1, keepdim=True) / 448.0
        q = (g / s).to(E4M3)
        w = m.w.float() * m.s.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return ((q.float() * s).view(x.shape) @ w.t()).to(x.dtype)

    return layer(function, 2, w=float8(K, K), s=scales(2, 2, dtype=FP32))


def viewed_words() -> Made:
    def function(m, x):
        return F.linear(x, m.w.view(E4M3).to(x.dtype)) * m.s

    return layer(function, 2, w=float8(N, K).view(torch.int32), s=scales(N))


def mxfp8() -> Made:
    def function(m, x):
        w = m.w.float().unflatten(-1, (8, 32)) * m.s.float()[..., None]
        return F.linear(x, w.flatten(-2).to(x.dtype))

    return layer(function, 2, w=float8(N, K), s=exponents(N, 8).view(E8M0))


# Codebooks.


def mxfp4() -> Made:
    def function(m, x):
        q = nibbles(m.w).long()
        w = torch.ldexp(m.lut[q].unflatten(-1, (8, 32)), m.s.int()[..., None] - 127)
        return F.linear(x, w.flatten(-2))

    return layer(
        function, 2, w=octets(N, K // 2), s=exponents(N, 8), lut=torch.tensor(E2M1, dtype=BF16)
    )


def nf4() -> Made:
    def function(m, x):
        w = m.lut[nibbles(m.w, True).long()].unflatten(-1, (4, 64)) * m.s[..., None]
        return F.linear(x, w.flatten(-2).to(x.dtype))

    lut = torch.cat([torch.tensor([-1.0, 0.0, 1.0]), torch.rand(13) * 2 - 1]).sort()[0]
    return layer(function, 2, w=octets(N, K // 2), s=scales(N, 4, dtype=FP32), lut=lut)


def nvfp4() -> Made:
    def function(m, x):
        w = m.lut[nibbles(m.w).long()].unflatten(-1, (16, 16)) * (m.s.float() * m.g)[..., None]
        return F.linear(x, w.flatten(-2).to(x.dtype))

    return layer(
        function, 2, w=octets(N, K // 2), s=(torch.rand(N, 16) + 0.1).to(E4M3),
        g=scales(dtype=FP32), lut=torch.tensor(E2M1),
    )  # fmt: skip


# Mixtures of experts.


def gated(gu: torch.Tensor) -> torch.Tensor:
    g, u = gu.chunk(2, -1)
    return F.silu(g) * u


def grouped_experts() -> Made:
    """Tokens are sorted by expert; every expert has as many."""

    def function(m, x, offsets):
        w1 = (m.w1.to(BF16) * m.s1.to(BF16)).transpose(1, 2)
        gu = torch._grouped_mm(x, w1, offs=offsets)
        w2 = (m.w2.to(BF16) * m.s2.to(BF16)).transpose(1, 2)
        return torch._grouped_mm(gated(gu), w2, offs=offsets)

    module = Module(
        function, w1=float8(4, K, K), s1=scales(4, K, 1, dtype=FP32),
        w2=float8(4, K, N), s2=scales(4, K, 1, dtype=FP32),
    )  # fmt: skip

    def args(m):
        ends = torch.arange(1, 5, dtype=torch.int32) * (m // 4)
        return torch.randn(m, K, dtype=BF16), ends

    return Made(module, args)


def routed(experts: int) -> Callable[[int], tuple]:
    def args(m):
        index = torch.rand(m, experts).argsort(-1)[:, :2]
        return torch.randn(m, K, dtype=BF16), index, torch.rand(m, 2, dtype=BF16)

    return args


ROUTED = ((0, 0), (1, 0), (2, 0))


def loop_int4() -> Made:
    def weight(m, e):
        q = torch.stack((m.w[e] & 0xF, m.w[e] >> 4), -1)
        q = groups(q.flatten(-2)).to(BF16) - 8
        return (q * m.s[e][..., None]).flatten(-2)

    def function(m, x, index, weights):
        out = torch.zeros(x.shape[0], N)
        for e in range(2):
            t, k = torch.where(index == e)
            y = F.linear(x[t], weight(m, e))
            out.index_add_(0, t, (y * weights[t, k, None]).float())
        return out.to(BF16)

    module = Module(function, w=octets(2, N, K // 2), s=scales(2, N, K // 64))

    def exact(x, index, weights):
        out = torch.zeros(x.shape[0], N, dtype=torch.float64)
        for e in range(2):
            t, k = torch.where(index == e)
            y = x[t].double() @ weight(module, e).double().T
            out.index_add_(0, t, y * weights[t, k, None])
        return out

    return Made(module, routed(2), ROUTED, exact)


def loop() -> Made:
    def function(m, x, index, weights):
        out = torch.zeros_like(x)
        for e in range(4):
            t, k = torch.where(index == e)
            y = F.linear(gated(F.linear(x[t], m.w1[e])), m.w2[e])
            out.index_add_(0, t, y * weights[t, k, None])
        return out

    w1, w2 = torch.randn(4, K, K, dtype=BF16) * 0.05, torch.randn(4, K, N, dtype=BF16) * 0.05
    return Made(Module(function, w1=w1, w2=w2), routed(4), ROUTED)


def all_experts() -> Made:
    def function(m, x, p):
        y = gated(torch.einsum("tk,enk->etn", x, m.w1))
        return torch.einsum("eto,te->to", torch.einsum("eti,eoi->eto", y, m.w2), p)

    w1, w2 = torch.randn(4, K, K, dtype=BF16) * 0.05, torch.randn(4, K, N, dtype=BF16) * 0.05
    return Made(
        Module(function, w1=w1, w2=w2),
        lambda m: (torch.randn(m, K, dtype=BF16), torch.rand(m, 4, dtype=BF16)),
    )


# What has no dequantised weight.


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x by rows, in e4m3, and its scales."""
    s = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (x.float() / s).clamp(-448, 448).to(E4M3), s


def scaled(q, s, w, t):
    return torch._scaled_mm(q, w.t(), scale_a=s, scale_b=t, out_dtype=BF16)


def scaled_mm() -> Made:
    def function(m, x):
        return scaled(*quantised(x), m.w, m.s)

    return Made(Module(function, w=float8(N, K), s=scales(1, N, dtype=FP32)), flat())


def static_scaled_mm() -> Made:
    def function(m, x):
        q = (x.float() * (1.0 / m.sx)).clamp(-448, 448).to(E4M3)
        return scaled(q, m.sx, m.w, m.sw)

    return Made(
        Module(function, w=float8(N, K), sx=torch.tensor(0.02), sw=scales(dtype=FP32)), flat()
    )


def shared_quantiser() -> Made:
    def function(m, x):
        q, s = quantised(x)
        return tuple(scaled(q, s, w, m.s[:, : w.shape[0]]) for w in (m.q, m.k, m.v))

    return Made(
        Module(
            function, q=float8(K, K), k=float8(N, K), v=float8(N, K), s=scales(1, K, dtype=FP32)
        ),
        flat(),
    )


def integer_product() -> Made:
    def function(m, x):
        s = x.float().abs().amax(-1, keepdim=True).div(127).clamp(min=1e-8)
        q = torch.round(x.float() / s).clamp(-128, 127).to(torch.int8)
        return (torch._int_mm(q, m.w.t()).float() * s * m.s).to(x.dtype)

    return Made(Module(function, w=int8(N, K), s=scales(N, dtype=FP32)), flat())


def torch_int4() -> Made:
    def function(m, x):
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.reshape(-1, K), m.w, 64, m.s)
        return y.reshape(*x.shape[:-1], N)

    codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return Made(Module(function, w=packed, s=scales(4, N, 2)), deep(), DEEP)


def alone(function: Callable, k: int = 2 * K, **buffers: torch.Tensor) -> Made:
    """A function of x that has no product, or one with a dense weight."""
    return Made(Module(lambda m, x: function(m, x), **buffers), flat(k))


def by_groups(h: torch.Tensor, power_of_two: bool):
    t = h.float().view(h.shape[0], -1, 128)
    s = t.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
    s = torch.exp2(torch.ceil(torch.log2(s))) if power_of_two else s
    return (t / s).clamp(-448.0, 448.0).to(E4M3).view(h.shape).float(), s.squeeze(-1)


def int8_rows(m, x):
    h = gated(x).float()
    s = h.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127.0
    return torch.round(h / s).clamp(-128, 127).to(torch.int8), s


def gelu_rows(m, x):
    g, u = x.chunk(2, -1)
    q, s = quantised(F.gelu(g, approximate="tanh") * u)
    return q.float(), s


def norm_rows(m, x):
    h = x.float()
    n = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16) * m.g
    q, s = quantised(n)
    return q.float(), s


def router(function: Callable, weights: torch.dtype = BF16) -> Callable[[], Made]:
    return lambda: Made(
        Module(lambda m, x: function(x, m), w=torch.randn(16, K).to(weights), b=torch.zeros(16)),
        flat(),
    )


def top(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(p, 2, dim=-1)


def normal(picked: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> tuple:
    w, index = picked
    return (w / w.sum(-1, keepdim=True)).to(x.dtype), index


def biased(x: torch.Tensor, m: torch.nn.Module) -> tuple:
    s = torch.sigmoid(F.linear(x.float(), m.w.float()))
    _, index = torch.topk(s + m.b, 4, dim=-1)
    w = s.gather(1, index)
    return w / w.sum(-1, keepdim=True), index


BLOCK = "float8_e4m3fn[256,256] block-128x128 scale fp32"
BY_TOKEN = "bf16 [256] -> float8_e4m3fn dynamic token scale fp32"
BY_GROUP = "bf16 [256] -> float8_e4m3fn dynamic group-128 scale fp32"
CAPTURE = (("capture_dynamic_output_shape_ops", True),)
ROWS = ("torch>=2.13",)  # whose _scaled_mm on a CPU takes a scale for each row

CASES: tuple[Case, ...] = (
    lower("plain_pytorch/decode_m1_int4", one_row, "int4[4096,256] group-64 scale bf16", rows=1),
    lower("plain_pytorch/int4_packed_low_first_sym", low_first, "int4[128,256] group-64 scale bf16",
          symbolic=True),
    lower("plain_pytorch/int4_packed_high_first_sym", high_first, "int4[128,256] group-64"),
    lower("plain_pytorch/int4_packed_signed_shift", signed_shift, "int4[128,256] group-64"),
    lower("plain_pytorch/int4_packed_asym_int_zero", integer_zero,
          "uint4[128,256] group-64 scale bf16 zero uint8 (q-z)*s", symbolic=True),
    lower("plain_pytorch/int4_packed_asym_float_min", float_minimum,
          "uint4[128,256] group-64 scale bf16 zero bf16 q*s+z"),
    lower("plain_pytorch/lora_on_dequant", lora, "int4[128,256] group-64"),
    lower("plain_pytorch/int8_weight_only_scale_before", scale_before,
          "int8[128,256] channel scale bf16"),
    lower("plain_pytorch/int8_weight_only_scale_after", scale_after,
          "int8[128,256] channel scale bf16 after the product", symbolic=True),
    lower("plain_pytorch/int8_weight_only_scale_per_input_channel", scale_of_inputs,
          "int8[128,256] input-channel scale bf16"),
    lower("plain_pytorch/dequant_kn_matmul", stored_transposed, "int8[128,256] channel scale bf16"),
    lower("plain_pytorch/dequant_fp16_accumulate_fp32", float32_product,
          "fp32 x int8[128,256] channel scale fp32"),
    lower("plain_pytorch/dequant_weight_two_users", two_users, "int8[128,256] channel scale bf16"),
    lower("plain_pytorch/fp8_block128_repeat_interleave", repeated_blocks, BLOCK),
    lower("plain_pytorch/fp8_block128_view_broadcast", viewed_blocks, BLOCK, "+bias"),
    lower("plain_pytorch/fp8_block128_act_group_reference", quantised_x,
          "float8_e4m3fn group-128 scale fp32 x " + BLOCK, casts=True,
          codes=(BY_GROUP,)),
    lower("plain_pytorch/fp8_weight_compile_time_unpack_by_view_dtype", viewed_words,
          "float8_e4m3fn[128,256] channel scale bf16 after the product"),
    lower("plain_pytorch/mxfp8_e8m0_dequant", mxfp8, "float8_e4m3fn[128,256] group-32"),
    lower("plain_pytorch/mxfp4_ldexp_dequant", mxfp4, "float4_e2m1fn[128,256] group-32",
          symbolic=True),
    lower("plain_pytorch/nf4_lut_dequant", nf4, "table4[128,256] group-64 scale fp32",
          symbolic=True),
    lower("plain_pytorch/nvfp4_lut_dequant", nvfp4, "float4_e2m1fn[128,256] group-16"),
    lower("plain_pytorch/moe_grouped_mm_fp8_dequant", grouped_experts, "float8_e4m3fn[",
          "channel scale bf16", lowered=2),
    lower("plain_pytorch/moe_loop_index_add_int4", loop_int4,
          "2 experts of int4[128,256] group-64", dynamo=CAPTURE),
    leave("plain_pytorch/moe_loop_index_add", DENSE, loop,
          *("weights of experts must be quantised",) * 2, dynamo=CAPTURE),
    leave("plain_pytorch/moe_dense_all_experts_einsum", DENSE, all_experts),
    leave("plain_pytorch/int4pack_mm_for_cpu", OPAQUE, torch_int4),
    lower("plain_pytorch/int8_w8a8_int_mm", integer_product,
          "int8 token scale fp32 x int8[128,256] channel scale fp32 -> bf16", symbolic=True,
          casts=True,
          codes=("bf16 [256] -> int8 dynamic token scale fp32",)),
    lower("plain_pytorch/fp8_per_token_scaled_mm", scaled_mm,
          "float8_e4m3fn token scale fp32 x float8_e4m3fn[128,256] channel scale fp32 -> bf16",
          symbolic=True, casts=True, needs=ROWS,
          codes=(BY_TOKEN,)),
    lower("plain_pytorch/fp8_per_tensor_static_scaled_mm", static_scaled_mm,
          "float8_e4m3fn tensor scale fp32 x float8_e4m3fn[128,256] tensor scale fp32 -> bf16",
          symbolic=True, casts=True,
          codes=("bf16 [256] -> float8_e4m3fn static tensor scale fp32",)),
    lower("plain_pytorch/fp8_qkv_shared_quant", shared_quantiser,
          "float8_e4m3fn token scale fp32 x float8_e4m3fn[", "channel scale fp32 -> bf16",
          lowered=3, casts=True, needs=ROWS,
          codes=(BY_TOKEN,)),
    leave("plain_pytorch/fp8_block_scaled_mm_v2", GPU),  # see test_scaled_matmul_refused.py
    leave("plain_pytorch/nvfp4_scaled_mm_v2", f"{INTEGER}; {GPU}"),
    leave("plain_pytorch/silu_and_mul_token_group_quant", QUANTISER,
          partial(alone, lambda m, x: by_groups(gated(x), False)),
          codes=("bf16 silu * [256] -> float8_e4m3fn dynamic group-128 scale fp32",)),
    leave("plain_pytorch/silu_and_mul_token_group_quant_ue8m0", QUANTISER,
          partial(alone, lambda m, x: by_groups(gated(x), True)),
          codes=("group-128 scale fp32 power of two up",)),
    leave("plain_pytorch/silu_mul_int8_token_quant", QUANTISER, partial(alone, int8_rows),
          codes=("bf16 silu * [256] -> int8 dynamic token scale fp32",)),
    leave("plain_pytorch/silu_mul_static_quant", QUANTISER,
          partial(alone, lambda m, x: (gated(x).float() * 20).clamp(-448, 448).to(E4M3).float()),
          codes=("bf16 silu * [256] -> float8_e4m3fn static tensor scale fp32",)),
    leave("plain_pytorch/gelu_tanh_mul_token_quant", QUANTISER, partial(alone, gelu_rows),
          codes=("bf16 gelu_tanh * [256] -> float8_e4m3fn dynamic token scale fp32",)),
    leave("plain_pytorch/rmsnorm_residual_token_quant", QUANTISER,
          partial(alone, norm_rows, K, g=torch.ones(K, dtype=BF16)), codes=(BY_TOKEN,)),
    leave("plain_pytorch/router_fp32_softmax_topk", ROUTER,
          router(lambda x, m: normal(top(F.softmax(F.linear(x.float(), m.w.float()), -1)), x)),
          routers=("fp32 logits, softmax in fp32, top 2 of 16, normalised, -> bf16",)),
    leave("plain_pytorch/router_fp32_sigmoid_topk", ROUTER, router(biased),
          routers=("fp32 logits, sigmoid in fp32, top 4 of 16, bias for the choice, normalised",)),
    leave("plain_pytorch/router_fp32_weight_param", ROUTER,
          router(lambda x, m: normal(top(torch.sigmoid(x.float() @ m.w.t())), x), FP32),
          routers=("fp32 logits, sigmoid in fp32, top 2 of 16, normalised, -> bf16",)),
    leave("plain_pytorch/router_bf16_linear_then_float", ROUTER,
          router(lambda x, m: top(F.softmax(F.linear(x, m.w), dim=-1, dtype=FP32))),
          routers=("bf16 logits, softmax in fp32, top 2 of 16, -> fp32",)),
)  # fmt: skip
