"""Blocks of experts as transformers computes them, in two forms, dequantised in the graph."""

from typing import Any

import pytest
import torch
import transformers
from models import BF16, Random, nibbles

import qinductor
from qinductor.testing import rewritten

moe = pytest.importorskip("transformers.integrations.moe")
H, INNER, E = 128, 64, 4
FORMS = {"grouped_mm": "dequant_grouped_matmul", "batched_mm": "dequant_gathered_bmm"}


class Experts(torch.nn.Module):
    """Experts in 4 bits by groups of 32, or in FP8 by blocks of 32 x 32, with the gate of another
    module; [E, N, K], or [E, K, N] with biases as GPT-OSS has them."""

    _is_expert_parallel = has_post_expert_norm = False
    has_gate = True

    def __init__(self, other: torch.nn.Module, form: str, bits: int, turned: bool) -> None:
        super().__init__()
        self.form, self.bits, self.is_transposed, self.has_bias = form, bits, turned, turned
        self.num_experts, self._apply_gate = E, other._apply_gate
        self.act_fn = getattr(other, "act_fn", None)
        self.alpha, self.limit = getattr(other, "alpha", None), getattr(other, "limit", None)
        random = Random(5)
        for name, n, k in (("gate_up", 2 * INNER, H), ("down", H, INNER)):
            self.register_buffer(f"{name}_proj_bias", random.normal(E, n) / 8 if turned else None)
            if bits == 4:
                self.register_buffer(name, random.integers(0, 256, E * n, k // 2))
                self.register_buffer(f"{name}_scale", random.scales(E, n, k // 32))
            else:
                self.register_buffer(name, random.float8(E, n, k))
                self.register_buffer(f"{name}_scale", random.scales(E, n // 32, k // 32).float())

    def weight(self, name: str) -> torch.Tensor:
        codes, scale = getattr(self, name), getattr(self, f"{name}_scale")
        if self.bits == 4:
            w = (nibbles(codes).to(BF16) - 8).view(*scale.shape, 32) * scale[..., None]
            w = w.flatten(-2)
        else:
            blocks = codes.float().unflatten(2, (-1, 32)).unflatten(1, (-1, 32))
            w = (blocks * scale[:, :, None, :, None]).flatten(3).flatten(1, 2).to(BF16)
        return w.mT if self.is_transposed else w

    gate_up_proj = property(lambda self: self.weight("gate_up"))
    down_proj = property(lambda self: self.weight("down"))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        forward: Any = getattr(moe, f"{self.form}_experts_forward")
        return forward(self, x, ids, weights)


def block(kind: str, form: str, bits: int) -> torch.nn.Module:
    sizes: dict[str, Any] = {"hidden_size": H, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        sizes |= {"moe_intermediate_size": INNER, "num_experts": E, "norm_topk_prob": True}
        config, name = transformers.Qwen3MoeConfig(**sizes), "Qwen3MoeSparseMoeBlock"
    elif kind == "deepseek_v3":
        sizes |= {"moe_intermediate_size": INNER, "n_routed_experts": E, "n_group": 2}
        sizes |= {"topk_group": 1, "n_shared_experts": 1}
        config, name = transformers.DeepseekV3Config(**sizes), "DeepseekV3MoE"
    else:
        sizes |= {"intermediate_size": INNER, "num_local_experts": E}
        config, name = transformers.GptOssConfig(**sizes), "GptOssMLP"
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=[name])
    torch.manual_seed(0)
    made = getattr(module, name)(config).to(BF16).eval().requires_grad_(False)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for buffer in made.buffers():
        torch.nn.init.zeros_(buffer)
    made.experts = Experts(made.experts, form, bits, turned=kind == "gpt_oss")
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("kind", "bits"), [("qwen3_moe", 4), ("qwen3_moe", 8), ("deepseek_v3", 8), ("gpt_oss", 4)]
)
def test_both_products_of_the_experts_are_lowered(kind, bits, form):
    """For one token and many."""
    torch._dynamo.reset()
    made = block(kind, form, bits)
    graph = rewritten(lambda: made, Random(0).normal(1, 5, H)).after
    assert graph.count(f"qinductor.{FORMS[form]}.default") == 2
    served = torch.compile(made, backend="qinductor", dynamic=True)
    for tokens in (1, 5, 33):
        x = Random(tokens).normal(1, tokens, H)
        with torch.no_grad():
            (ours, *_), (eager, *_) = (_tuple(f(x)) for f in (served, made))
        # Routers round alike: the same experts are weighted.
        error = (ours.float() - eager.float()).norm() / eager.float().norm()
        assert error < 0.02, f"{tokens} tokens: {error}"
    for report in qinductor.reports():
        experts = [site for site in report.sites if site.pattern == "dequant_matmul"]
        assert [site.lowered for site in experts] == [True, True], str(report)
        assert all(f"{E} experts" in site.contract for site in experts)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
