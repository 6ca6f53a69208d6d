"""Rows of torchao 0.18."""

import torch
from table import (
    BF16,
    DEEP,
    FP32,
    GPU,
    INTEGER,
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
    tokens,
)


def layer(
    config: str, n: int = N, k: int = K, bias: bool = False, rank: int = 3, **settings
) -> Made:  # fmt: skip
    """One linear under `torchao.quantization.<config>(**settings)`."""
    module = quantised(torch.nn.Sequential(plain_layer(n, k, bias)), config, **settings)
    return Made(module, flat(k)) if rank == 2 else Made(module, deep(k), DEEP)


def quantised(module: torch.nn.Module, config: str, only=None, **settings) -> torch.nn.Module:
    from torchao import quantization

    made = getattr(quantization, config)(**settings)
    quantization.quantize_(module, made, *(() if only is None else (only,)))
    return module


def granularity(name: str, *sizes):
    from torchao.quantization import granularity

    return getattr(granularity, name)(*sizes)


def intx(dynamic: bool = False, zeros: bool = False, bias: bool = False) -> Made:
    """int4 values in int8; x may be quantised to int8 and dequantised again."""
    name = "weight_granularity" if dynamic else "granularity"
    config = "Int8DynamicActivationIntxWeightConfig" if dynamic else "IntxWeightOnlyConfig"
    settings = {"weight_dtype": torch.int4, name: granularity("PerGroup", 32)}
    made = layer(config, bias=bias, **settings)
    if zeros:
        zero = made.module[0].weight.zero_point
        zero.copy_(torch.randint(-8, 8, zero.shape).to(zero.dtype))
    return made


def qkv() -> Made:
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = plain_layer(K, K), plain_layer(K, K)
            self.k, self.v = plain_layer(N, K), plain_layer(N, K)

        def forward(self, x):
            return self.k(x), self.v(x), x + self.o(self.q(x))

    return Made(quantised(Attention(), INT8), deep(), DEEP)


def llama(config: str, **settings) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids).logits

    form = LlamaConfig(
        hidden_size=K, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(form).to(BF16).eval().requires_grad_(False)
    spread(model)
    quantised(
        model, config,
        lambda part, name: isinstance(part, torch.nn.Linear) and "lm_head" not in name, **settings,
    )  # fmt: skip
    return Made(Logits(model), tokens, DEEP)


def nf4() -> Made:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            weight = to_nf4(plain_layer(N, K).weight.detach(), 64, 256)
            self.w = torch.nn.Parameter(weight, requires_grad=False)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.w)

    return Made(Linear(), flat())


def nvfp4_weight_only() -> Made:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from torchao.quantization import quantize_

    module = torch.nn.Sequential(plain_layer(N, K, bias=True))
    quantize_(module, NVFP4WeightOnlyConfig())
    return Made(module, deep(), DEEP)


def mxfp8_emulated() -> Made:
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    module = torch.nn.Sequential(plain_layer(N, K))
    preference = KernelPreference.EMULATED
    quantize_(module, MXDynamicActivationMXWeightConfig(kernel_preference=preference))
    return Made(module, flat())


def pt2e() -> Made:
    """Two linears with a relu, static quantisation: uint8 x by tensor, int8 weights by channel."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    model = torch.nn.Sequential(
        plain_layer(512, K, True, FP32), torch.nn.ReLU(), plain_layer(N, 512, True, FP32)
    )
    x = torch.randn(32, K)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    exported = torch.export.export(model.eval(), (x,)).module()
    prepared = prepare_pt2e(exported, quantizer)
    prepared(x)
    return Made(convert_pt2e(prepared), flat(dtype=FP32))


def fake_quantised() -> Made:
    from torchao import quantization
    from torchao.quantization.qat import QATConfig

    base = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=granularity("PerGroup", 32)
    )
    module = torch.nn.Sequential(plain_layer(N, K))
    quantization.quantize_(module, QATConfig(base, step="prepare"))
    return Made(module.eval(), flat())


def int4_for_cpu() -> Made:
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    module = torch.nn.Sequential(plain_layer(N, K, True))
    weight = Int4OpaqueTensor.from_hp(module[0].weight.data, [1, 64])
    module[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    return Made(module, deep(), DEEP)


def prescaled() -> Made:
    made = layer("Int8DynamicActivationInt8WeightConfig", rank=2)
    made.module[0].weight.act_pre_scale = torch.rand(K, dtype=BF16) + 0.5
    return made


def static() -> Made:
    scale = torch.tensor([[0.02]], dtype=BF16)
    each = [granularity("PerTensor"), granularity("PerRow")]
    return layer("Int8StaticActivationInt8WeightConfig", bias=True, rank=2,
                 act_quant_scale=scale, granularity=each)  # fmt: skip


def float8_x(name: str, bias: bool = False, kind=None) -> Made:
    """float8 x and weights, `_scaled_mm`; the library's check of the GPU is put aside."""
    from unittest import mock

    from torchao.quantization import quant_api
    from torchao.quantization.quantize_.common import KernelPreference

    settings = {"granularity": granularity(name), "kernel_preference": KernelPreference.TORCH}
    passes = mock.patch.multiple(
        quant_api, _check_hardware_support=lambda g: None, is_sm_at_least_89=lambda: True
    )
    with passes:
        config = "Float8DynamicActivationFloat8WeightConfig"
        if kind == "llama":
            return llama(config, **settings)
        if kind == "mlp":
            return Made(quantised(MLP(plain_layer), config, **settings), flat())
        return layer(config, bias=bias, **settings)


def float8_weight(name: str, *sizes: int, bias: bool = False, rank: int = 2) -> Made:
    return layer(
        "Float8WeightOnlyConfig", bias=bias, rank=rank, granularity=granularity(name, *sizes)
    )


INT8 = "Int8WeightOnlyConfig"
X_INT8 = "Int8DynamicActivationInt8WeightConfig"
WITH_ROWS = ("torch>=2.13",)  # whose _scaled_mm on a CPU takes a scale for each row
ROWS = "bf16 [256] -> float8_e4m3fn dynamic token scale fp32"
GATED = "bf16 silu * [512] -> float8_e4m3fn dynamic token scale fp32"
INT8_ROWS = "bf16 [256] -> int8 dynamic token scale fp32"

CASES: tuple[Case, ...] = (
    lower("torchao/int8_weight_only_per_row", partial(layer, INT8),
          "int8[128,256] channel scale bf16 after"),
    lower("torchao/int8_weight_only_per_row_bias", partial(layer, INT8, bias=True),
          "int8[128,256] channel scale bf16 after", symbolic=True),
    lower("torchao/int8_weight_only_llama_qkv", qkv, "int8[", "channel scale bf16 after",
          lowered=4),
    lower("torchao/llama_model_int8_weight_only", partial(llama, INT8),
          "int8[", "channel scale bf16 after", lowered=7),
    lower("torchao/float8_weight_only_per_row", partial(float8_weight, "PerRow", bias=True),
          "float8_e4m3fn[128,256] channel scale fp32"),
    lower("torchao/float8_weight_only_per_tensor", partial(float8_weight, "PerTensor"),
          "float8_e4m3fn[128,256] tensor scale fp32"),
    lower("torchao/float8_weight_only_per_group", partial(float8_weight, "PerGroup", 64),
          "float8_e4m3fn[128,256] group-64 scale fp32", symbolic=True),
    lower("torchao/intx_int4_weight_only_group32", partial(intx, bias=True),
          "int4[128,256] group-32 scale bf16", "+bias", symbolic=True),
    lower("torchao/intx_int4_weight_only_group32, random zeros", partial(intx, zeros=True),
          "int4[128,256] group-32 scale bf16", extra=True),
    lower("torchao/int8_dyn_act_int4_weight_group32", partial(intx, dynamic=True),
          "int4[128,256] group-32 scale bf16", casts=True,
          reasons=("the graph multiplies dequantised operands",),
          codes=("bf16 [256] -> int8 dynamic token scale bf16 zero int8",)),
    lower("torchao/mxfp8_emulated", mxfp8_emulated,
          "float8_e4m3fn group-32 scale bf16 x float8_e4m3fn[128,256] group-32 scale bf16 -> bf16",
          casts=True,
          codes=("bf16 [256] -> float8_e4m3fn dynamic group-32 scale bf16 power of two up",)),
    lower("torchao/nf4_linear", nf4, "table4[128,256] group-64", symbolic=True),
    lower("torchao/nvfp4_weight_only", nvfp4_weight_only, "float4_e2m1fn[128,256] group-16"),
    lower("torchao/pt2e_x86_static_int8", pt2e, "uint8 tensor scale fp32 zero int32 x int8[",
          "channel scale fp32 -> fp32 +bias", lowered=2, casts=True,
          codes=("a quantiser must be written in torch's operators",) * 2),
    lower("torchao/qat_fake_quant_int8_int4", fake_quantised,
          "bf16 x int4[128,256] group-32 scale bf16", symbolic=True, casts=True,
          reasons=("the graph multiplies dequantised operands",)),
    leave("torchao/int4_cpu_opaque", OPAQUE, int4_for_cpu),
    leave("torchao/int4_plain_mslk", f"{OPAQUE}; {GPU}"),
    leave("torchao/int4_tile_packed_to_4d", f"{OPAQUE}; {GPU}"),
    lower("torchao/int8_dyn_act_int8_weight_per_row", partial(layer, X_INT8, bias=True),
          "int8 token scale fp32 x int8[128,256] channel scale fp32 -> bf16 +bias", symbolic=True,
          casts=True,
          codes=(INT8_ROWS,)),
    lower("torchao/int8_dyn_act_int8_weight_per_tensor",
          lambda: layer(X_INT8, bias=True, granularity=granularity("PerTensor")),
          "int8 tensor scale fp32 x int8[128,256] tensor scale fp32 -> bf16 +bias", casts=True,
          codes=("bf16 [256] -> int8 dynamic tensor scale fp32",)),
    lower("torchao/int8_static_act_int8_weight", static,
          "int8 tensor scale bf16 x int8[128,256] channel scale fp32 -> bf16 +bias", casts=True,
          codes=("bf16 [256] -> int8 static tensor scale bf16",)),
    lower("torchao/awq_int4_intx", prescaled,
          "int8 token scale fp32 x int8[128,256] channel scale fp32 -> bf16", casts=True,
          codes=(INT8_ROWS,)),
    lower("torchao/float8_dyn_act_per_row", partial(float8_x, "PerRow"),
          "float8_e4m3fn token scale fp32 x float8_e4m3fn[128,256] channel scale fp32 -> bf16 fast",
          symbolic=True, casts=True, needs=WITH_ROWS,
          codes=(ROWS,)),
    lower("torchao/float8_dyn_act_per_tensor", partial(float8_x, "PerTensor", True),
          "float8_e4m3fn tensor scale fp32 x float8_e4m3fn[128,256] tensor scale fp32 -> bf16 "
          "+bias fast", casts=True,
          codes=("bf16 [256] -> float8_e4m3fn dynamic tensor scale fp32",)),
    lower("torchao/float8_dyn_act_per_row_mlp", partial(float8_x, "PerRow", kind="mlp"),
          "float8_e4m3fn token scale fp32 x", "channel scale fp32 -> bf16 fast", lowered=3,
          casts=True, needs=WITH_ROWS,
          codes=(ROWS, ROWS, GATED)),
    lower("torchao/llama_model_float8_dyn_per_row", partial(float8_x, "PerRow", kind="llama"),
          "float8_e4m3fn token scale fp32 x", "channel scale fp32 -> bf16 fast", lowered=7,
          casts=True, needs=WITH_ROWS,
          codes=(*[ROWS] * 6, GATED)),
    leave("torchao/float8_dyn_act_per_block", f"{OPAQUE}; {GPU}"),
    leave("torchao/blockwise_fp8_linear", f"{INTEGER}; {GPU}"),
    leave("torchao/mxfp8_dyn_act", f"{INTEGER}; {GPU}"),
    leave("torchao/mxfp4_dyn_act", f"{INTEGER}; {GPU}"),
    leave("torchao/nvfp4_dyn_act", f"{INTEGER}; {GPU}"),
)  # fmt: skip
