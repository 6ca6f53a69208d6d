"""Rows of transformers 5: its own dequantisers in front of products, and models in bf16."""

import dataclasses
import importlib
from unittest import mock

import torch
from table import (
    BF16,
    DEEP,
    DENSE,
    FP32,
    OPAQUE,
    OUTSIDE,
    ROUTER,
    Case,
    K,
    Made,
    N,
    Wide,
    deep,
    exponents,
    flat,
    float8,
    leave,
    lower,
    octets,
    partial,
    scales,
    tokens,
)
from torch.nn.functional import linear


class Dequantised(torch.nn.Module):
    """`weight(self)` makes W of the buffers; then a linear."""

    def __init__(self, weight, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight(self))


def gguf(kind: int, size: int) -> Made:
    """Blocks of 32 codes behind their scale in fp16, all bytes of one tensor."""
    from transformers.integrations.gguf.dequant import dequantize

    blocks = octets(N * K // 32, size)
    blocks[:, :2] = scales(len(blocks), 1, dtype=torch.float16).view(torch.uint8)
    module = Dequantised(lambda m: dequantize(m.blocks, kind, BF16).view(N, K), blocks=blocks)
    return Made(module, flat())


def fp8_blocks() -> Made:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    loader = Fp8Dequantize(None)
    module = Dequantised(
        lambda m: loader._dequantize_one(m.codes, m.scales, BF16),
        codes=float8(K, K), scales=scales(2, 2, dtype=FP32),
    )  # fmt: skip
    return Made(module, flat())


def bitnet() -> Made:
    """Ternary codes, four a byte along N; x is quantised to int8, and its scale comes after."""
    from transformers.integrations.bitnet import BitLinear

    module = BitLinear(K, N, bias=False, dtype=BF16).eval()
    fields = torch.randint(0, 3, (4, *module.weight.shape), dtype=torch.uint8)
    module.weight.copy_(sum(field << 2 * i for i, field in enumerate(fields)))
    module.weight_scale.copy_(scales(1) * 50)
    # Its two decorated methods compile themselves, with stock Inductor, wherever they are called.
    for name in ("activation_quant", "post_quant_process"):
        method = getattr(BitLinear, name)._torchdynamo_orig_callable
        setattr(module, name, method.__get__(module))
    return Made(module, deep(), DEEP)


def mxfp4_batched() -> Made:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    class Batched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("blocks", octets(4, N, K // 32, 16))
            self.register_buffer("scales", exponents(4, N, K // 32))

        def forward(self, x):
            return torch.bmm(x, convert_moe_packed_tensors(self.blocks, self.scales))

    return Made(Batched(), lambda m: (torch.randn(4, m, K, dtype=BF16),), DEEP)


def gpt_oss(quantised: bool) -> Made:
    """The router and the experts of gpt-oss, whose weights are [E, K, N]."""
    from transformers import GptOssConfig
    from transformers.integrations.moe import grouped_mm_experts_forward
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = GptOssConfig(
        hidden_size=K, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2
    )

    class Experts(torch.nn.Module):
        has_gate = has_bias = is_transposed = True
        _is_expert_parallel = has_post_expert_norm = False
        num_experts, alpha, limit = 4, 1.702, 7.0

        def __init__(self, other):
            super().__init__()
            self.register_buffer("gate_up", octets(4, 256, K // 32, 16))
            self.register_buffer("gate_up_scales", exponents(4, 256, K // 32) - 6)
            self.register_buffer("down", octets(4, K, 4, 16))
            self.register_buffer("down_scales", exponents(4, K, 4) - 6)
            self.gate_up_proj_bias = other.gate_up_proj_bias
            self.down_proj_bias = other.down_proj_bias
            self._apply_gate = other._apply_gate

        @property
        def gate_up_proj(self):
            return convert_moe_packed_tensors(self.gate_up, self.gate_up_scales)

        @property
        def down_proj(self):
            return convert_moe_packed_tensors(self.down, self.down_scales)

        def forward(self, x, index, weights):
            return grouped_mm_experts_forward(self, x, index, weights)

    made = block("gpt_oss", "GptOssMLP", config, "grouped_mm")
    if not quantised:
        return made
    router = made.module.router
    made.module.experts = experts = Experts(made.module.experts)

    def exact(x):  # the same experts for each token: the router rounds
        x = x.reshape(-1, K)
        _, weights, index = router(x)
        with Wide():
            return experts(x, index, weights).view(2, -1, K), weights

    return dataclasses.replace(made, exact=exact)


def config_of(name: str, **settings):
    return getattr(importlib.import_module("transformers"), name)(**settings)


def block(
    family: str, name: str, config, experts: str | None = None, dtype: torch.dtype = BF16, args=None
) -> Made:
    """One part of a model, with random weights."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if experts is not None:
        config._experts_implementation = experts
    made = getattr(module, name)(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return Made(made.to(dtype).eval(), args or deep(dtype=dtype), DEEP)


def model(name: str, config: str, grouped: bool = False, **settings) -> Made:
    """A whole model of one or two layers."""
    form = config_of(
        config, hidden_size=K, vocab_size=512, max_position_embeddings=128, use_cache=False,
        **settings,
    )  # fmt: skip
    made = getattr(importlib.import_module("transformers"), name)(form).to(BF16).eval()
    if grouped:
        made.set_experts_implementation("grouped_mm")
    return Made(made, tokens, DEEP)


def fp8_kernels(**kernels) -> mock._patch:
    """Stand-ins for the kernels of finegrained_fp8, which come from a hub."""
    from transformers.integrations import finegrained_fp8

    names = ("matmul", "batched_matmul", "grouped_matmul")
    made = finegrained_fp8.FineGrainedFP8(**{name: kernels.get(name) for name in names})
    return mock.patch.multiple(
        finegrained_fp8, _FINEGRAINED_FP8=made, _load_finegrained_fp8_kernel=lambda: None
    )


@torch.library.custom_op("sweep::fp8_matmul", mutates_args=())
def fp8_matmul(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(*x.shape[:-1], w.shape[0])


@fp8_matmul.register_fake
def _(x, w, s):
    return x.new_empty(*x.shape[:-1], w.shape[0])


def fp8_linear(n: int, block: tuple[int, int] | None, scheme: str = "dynamic") -> Made:
    from transformers.integrations import finegrained_fp8

    part = finegrained_fp8.FP8Linear(K, n, block_size=block, activation_scheme=scheme)
    part.weight.data = float8(n, K)
    part.weight_scale_inv.data = scales(*part.weight_scale_inv.shape, dtype=FP32)
    if scheme == "static":
        part.activation_scale.data = torch.tensor(0.02)
    kernels = fp8_kernels(matmul=lambda x, w, s, *more, **named: fp8_matmul(x, w, s))
    return Made(part.eval(), deep(), DEEP, inside=kernels)


def scaled_product() -> Made:
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear

    part = CompressedTensorsFP8Linear(K, N, has_bias=True).eval().requires_grad_(False)
    part.weight.data = float8(N, K)
    part.bias.data = torch.randn(N, dtype=BF16)
    part.weight_scale.data = scales(1, N, dtype=FP32)
    return Made(part, deep(), DEEP)


QWEN = {"hidden_size": K, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "hidden_size": K, "moe_intermediate_size": 128, "n_routed_experts": 16, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
HEADS = {
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
}


def qwen(experts: str, dtype: torch.dtype = BF16) -> Made:
    config = config_of("Qwen3MoeConfig", norm_topk_prob=True, **QWEN)
    return block("qwen3_moe", "Qwen3MoeSparseMoeBlock", config, experts, dtype)


def mixtral() -> Made:
    config = config_of(
        "MixtralConfig", hidden_size=K, intermediate_size=K, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    return block("mixtral", "MixtralSparseMoeBlock", config, "eager")


def deepseek(name: str) -> Made:
    return block("deepseek_v3", name, config_of("DeepseekV3Config", **DEEPSEEK), "grouped_mm")


PICKED = "top 2 of 4, softmax in fp32, -> bf16"
GROUPED = "sigmoid in fp32, top 4 of 16, 2 of 4 groups by top2, bias for the choice"

CASES: tuple[Case, ...] = (
    lower("transformers/gguf_q4_0_dequant", partial(gguf, 2, 18), "int4[128,256] group-32",
          symbolic=True, needs=("transformers>=5.24",)),
    lower("transformers/gguf_q8_0_dequant", partial(gguf, 8, 34), "int8[128,256] group-32"),
    lower("transformers/hf_fp8_block_loader_dequant", fp8_blocks,
          "float8_e4m3fn[256,256] block-128x128 scale fp32"),
    lower("transformers/bitnet_bitlinear", bitnet, "2[128,256]", casts=True,
          reasons=("the sums must be multiplied by one scale of x",),
          codes=("no scale of the family is the region's",),
          needs=("torch>=2.13",)),  # 2.11 leaves out roundings of x whatever it is told
    lower("transformers/gpt_oss_mxfp4_dequant_batched", mxfp4_batched,
          "float4_e2m1fn[", "group-32", symbolic=True),
    lower("transformers/gpt_oss_mxfp4_moe_grouped_mm", partial(gpt_oss, True),
          "float4_e2m1fn[", "group-32", lowered=2, routers=(PICKED,)),
    leave("transformers/gpt_oss_block_grouped_mm", DENSE, partial(gpt_oss, False),
          routers=(PICKED,)),
    leave("transformers/qwen3_moe_block_grouped_mm", DENSE, partial(qwen, "grouped_mm"),
          routers=("softmax in fp32, top 2 of 8, normalised, -> bf16",)),
    leave("transformers/qwen3_moe_block_grouped_mm_fp32", DENSE,
          partial(qwen, "grouped_mm", FP32),
          routers=("softmax in fp32, top 2 of 8, normalised, -> fp32",)),
    leave("transformers/qwen3_moe_block_eager", f"{DENSE}; {OUTSIDE}", partial(qwen, "eager"),
          routers=("softmax in fp32, top 2 of 8, normalised, -> bf16",)),
    leave("transformers/mixtral_block_eager", f"{DENSE}; {OUTSIDE}", mixtral,
          routers=("softmax in fp32, top 2 of 4, normalised, -> fp32",)),
    leave("transformers/deepseek_v3_moe_grouped_mm", DENSE, partial(deepseek, "DeepseekV3MoE"),
          routers=(f"{GROUPED}, normalised, * 2.5, -> fp32",)),
    leave("transformers/deepseek_v3_router", ROUTER, partial(deepseek, "DeepseekV3TopkRouter"),
          routers=(f"fp32 logits, {GROUPED}, normalised, * 2.5, -> fp32",)),
    leave("transformers/llama_causal_lm_bf16", DENSE,
          partial(model, "LlamaForCausalLM", "LlamaConfig", **HEADS)),
    leave("transformers/qwen3_causal_lm_bf16", DENSE,
          partial(model, "Qwen3ForCausalLM", "Qwen3Config", head_dim=64, **HEADS)),
    leave("transformers/qwen3_moe_causal_lm_grouped_mm", DENSE,
          partial(model, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", grouped=True, head_dim=64,
                  moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, **HEADS),
          routers=("softmax in fp32, top 2 of 8, -> bf16",)),
    leave("transformers/deepseek_v3_causal_lm", DENSE,
          partial(model, "DeepseekV3ForCausalLM", "DeepseekV3Config", grouped=True,
                  intermediate_size=K, moe_intermediate_size=128, num_hidden_layers=2,
                  first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4,
                  n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
                  n_shared_experts=1, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32,
                  qk_rope_head_dim=16, v_head_dim=32),
          routers=("sigmoid in fp32, top 2 of 8, 1 of 2 groups by top2, bias for the choice",)),
    lower("transformers/hf_compressed_tensors_fp8_linear", scaled_product,
          "float8_e4m3fn token scale fp32 x float8_e4m3fn[128,256] channel scale fp32 -> bf16",
          "+bias",
          symbolic=True, casts=True, needs=("torch>=2.13",),
          codes=("bf16 [256] -> float8_e4m3fn dynamic token scale fp32",)),
    leave("transformers/hf_fp8_linear_block_dynamic", OPAQUE,
          partial(fp8_linear, K, (128, 128))),
    leave("transformers/hf_fp8_linear_tensor_static", OPAQUE,
          partial(fp8_linear, N, None, "static")),
    leave("transformers/hf_fp8_experts_eager", f"{OPAQUE}; {OUTSIDE}"),
    leave("transformers/hf_fp8_experts_grouped", OPAQUE),
)  # fmt: skip
