"""Routers as libraries and people write them: m has the weight w and maybe biases, x is [T, H]."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from routers import BF16, FP32, N
from torch.nn.functional import linear, normalize, softmax, softplus

Results = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Spelling:
    """function(module, x); the dtypes of its biases; the fields of its contract that are not those
    of a plain one: logits in bf16, softmax in fp32, top 4."""

    function: Callable[..., Any]
    buffers: dict[str, torch.dtype]
    fields: dict[str, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Biases that move the choice, exact in every dtype and far from ties."""
        return {name: torch.randperm(N).to(dtype) / 64 for name, dtype in self.buffers.items()}


SPELLINGS: dict[str, Spelling] = {}


def spelling(buffers: dict[str, torch.dtype] | None = None, **fields: Any) -> Callable[..., Any]:
    """Adds a function to the table."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        SPELLINGS[function.__name__] = Spelling(function, buffers or {}, fields)
        return function

    return add


B32, B16 = {"b": FP32}, {"b": BF16}
WIDE = {"logits": FP32}
NORMAL = {"normalised": "s+eps"}
DEEPSEEK = {
    **WIDE, **NORMAL, "score": "sigmoid", "groups": 4, "kept": 2, "group_score": "top2",
    "epsilon": 1e-20, "scale": 2.5,
}  # fmt: skip


def wide(m: Any, x: torch.Tensor) -> torch.Tensor:
    return linear(x.float(), m.w.float())


def normal(weights: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
    return weights / (weights.sum(-1, keepdim=True) + eps)


def kept(choice: torch.Tensor, best: torch.Tensor, groups: int, mask: float) -> torch.Tensor:
    """The choice with what is not in the two best groups masked."""
    at = torch.topk(best, k=2, dim=-1, sorted=False)[1]
    keep = torch.zeros_like(best).scatter_(1, at, 1)
    keep = keep.unsqueeze(-1).expand(-1, groups, N // groups).reshape(-1, N)
    return choice.masked_fill(torch.bitwise_not(keep.bool()), mask)


@spelling(**NORMAL, out=BF16)
def mixtral(m: Any, x: torch.Tensor) -> Results:
    """Also Qwen3, OLMoE and MiniMax."""
    weights, indices = torch.topk(softmax(linear(x, m.w), dim=-1, dtype=FP32), 4, dim=-1)
    weights /= weights.sum(-1, keepdim=True)
    return weights.to(x.dtype), indices


@spelling(out=FP32)
def not_normalised(m: Any, x: torch.Tensor) -> Results:
    """Jamba; Qwen2 by its configuration."""
    return torch.topk(softmax(linear(x, m.w), dim=-1, dtype=FP32), 4, dim=-1)


@spelling(**WIDE, **NORMAL, out=BF16)
def hunyuan(m: Any, x: torch.Tensor) -> Results:
    weights, indices = torch.topk(softmax(wide(m, x), dim=1), 4)
    return normal(weights).to(x.dtype), indices


@spelling(**NORMAL, out=BF16, hidden=0)
def returns_logits(m: Any, x: torch.Tensor) -> Results:
    logits = linear(x, m.w)
    weights, indices = torch.topk(softmax(logits, dim=-1, dtype=FP32), 4, dim=-1)
    return logits, normal(weights).to(x.dtype), indices


@spelling(**WIDE, out=FP32, hidden=0)
def returns_scores(m: Any, x: torch.Tensor) -> Results:
    scores = softmax(wide(m, x), dim=-1)
    return scores, *torch.topk(scores, 4)


@spelling(B32, **DEEPSEEK)
def deepseek_v3(m: Any, x: torch.Tensor) -> Results:
    scores = wide(m, x).sigmoid()
    choice = scores + m.b
    best = choice.view(-1, 4, N // 4).topk(2, dim=-1)[0].sum(-1)
    indices = torch.topk(kept(choice, best, 4, float("-inf")), k=4, dim=-1, sorted=False)[1]
    return normal(scores.gather(1, indices), 1e-20) * 2.5, indices


@spelling(B16, **DEEPSEEK, masked=0.0)
def glm_4(m: Any, x: torch.Tensor) -> Results:
    scores = wide(m, x).sigmoid()
    choice = scores.view(-1, N) + m.b.unsqueeze(0)
    best = choice.view(-1, 4, N // 4).topk(2, dim=-1)[0].sum(dim=-1)
    indices = torch.topk(kept(choice, best, 4, 0.0), k=4, dim=-1, sorted=False)[1]
    return normal(scores.gather(1, indices), 1e-20) * 2.5, indices


@spelling(**WIDE, groups=4, kept=2, masked=0.0, taken="choice", scale=16.0)
def deepseek_v2(m: Any, x: torch.Tensor) -> Results:
    scores = wide(m, x).softmax(dim=-1, dtype=FP32)
    best = scores.view(x.shape[0], 4, -1).max(dim=-1).values
    weights, indices = torch.topk(kept(scores, best, 4, 0.0), k=4, dim=-1, sorted=False)
    return weights * 16.0, indices


@spelling(B32, **NORMAL, score="sigmoid", compute=BF16, scores=FP32, inner=BF16, groups=4, kept=2,
          group_score="top2", out=BF16, indices=torch.int32)  # fmt: skip
def vllm_grouped_topk(m: Any, x: torch.Tensor) -> Results:
    """Scores in bf16, their choice in float32."""
    scores = linear(x, m.w).sigmoid()
    choice = scores + m.b.unsqueeze(0)
    best = choice.view(x.shape[0], 4, -1).topk(2, dim=-1)[0].sum(dim=-1)
    indices = torch.topk(kept(choice, best, 4, float("-inf")), k=4, dim=-1, sorted=False)[1]
    return normal(scores.gather(1, indices)).to(FP32), indices.to(torch.int32)


@spelling({"c": BF16}, order="select-score", logit_bias=BF16, out=BF16)
def gpt_oss(m: Any, x: torch.Tensor) -> Results:
    values, indices = torch.topk(linear(x, m.w, m.c), 4, dim=-1)
    return softmax(values, dim=1, dtype=values.dtype), indices


@spelling(order="select-score", out=BF16)
def granite(m: Any, x: torch.Tensor) -> Results:
    """Also Mistral's own code."""
    values, indices = linear(x, m.w).float().topk(4, dim=1)
    return torch.softmax(values, dim=1).type_as(x), indices


@spelling(B32, **WIDE, **NORMAL, score="sigmoid", epsilon=1e-20, scale=2.5)
def megatron(m: Any, x: torch.Tensor) -> Results:
    """Whose weights go to all experts' places."""
    logits = wide(m, x)
    scores = torch.sigmoid(logits.float()).type_as(logits)
    indices = torch.topk(scores + m.b, k=4, dim=1)[1]
    weights = normal(torch.gather(scores, dim=1, index=indices).type_as(logits), 1e-20) * 2.5
    placed = torch.zeros_like(logits).scatter(1, indices, weights)
    return placed, torch.zeros_like(logits).int().scatter(1, indices, 1).bool()


@spelling(score="none", k=1, out=BF16)
def llama_4(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The scores are made of all experts' places."""
    logits = linear(x, m.w)
    values, indices = torch.topk(logits, 1, dim=1)
    placed = torch.full_like(logits, float("-inf")).scatter_(1, indices, values)
    return torch.sigmoid(placed.float()).to(x.dtype)


@spelling(score="sigmoid", order="select-score", k=1, indices=torch.int32)
def vllm_llama_4(m: Any, x: torch.Tensor) -> Results:
    values, indices = torch.topk(linear(x, m.w), 1, dim=-1)
    return torch.sigmoid(values.float()), indices.to(torch.int32)


@spelling(**NORMAL, out=BF16)
def dbrx(m: Any, x: torch.Tensor) -> Results:
    weights, indices = torch.topk(linear(x, m.w).softmax(dim=-1, dtype=FP32), 4, dim=-1)
    return (weights / torch.norm(weights, p=1, dim=-1, keepdim=True)).to(x.dtype), indices


@spelling(**NORMAL, out=BF16)
def normalize_1(m: Any, x: torch.Tensor) -> Results:
    weights, indices = torch.topk(linear(x, m.w).softmax(dim=-1, dtype=FP32), 4, dim=-1)
    return normalize(weights, p=1.0, dim=-1, eps=0.0).to(x.dtype), indices


@spelling(B32, **WIDE, score="sigmoid", normalised="max(s,eps)", epsilon=1e-6, out=BF16)
def clamped(m: Any, x: torch.Tensor) -> Results:
    """As Ernie does behind its softmax."""
    scores = wide(m, x).sigmoid()
    indices = torch.topk(scores + m.b.squeeze(), 4, dim=-1)[1]
    weights = torch.gather(scores, dim=-1, index=indices)
    return (weights / torch.clamp(weights.sum(-1, keepdim=True), min=1e-6)).to(x.dtype), indices


@spelling(B32, **WIDE, **NORMAL, score="sqrt_softplus", epsilon=1e-20, scale=1.5)
def deepseek_v4(m: Any, x: torch.Tensor) -> Results:
    scores = softplus(wide(m, x)).sqrt()
    indices = (scores + m.b).topk(4, dim=-1)[1]
    return normal(scores.gather(1, indices), 1e-20) * 1.5, indices


@spelling(**NORMAL, scores=BF16, out=BF16)
def softmax_in_bf16(m: Any, x: torch.Tensor) -> Results:
    """Scores, their sum and the quotient are rounded."""
    weights, indices = torch.softmax(linear(x, m.w), -1).topk(4)
    return normal(weights), indices


@spelling(**NORMAL, score="sigmoid", scores=BF16, out=BF16)
def sigmoid_in_bf16(m: Any, x: torch.Tensor) -> Results:
    weights, indices = torch.sigmoid(linear(x, m.w)).topk(4)
    return normal(weights), indices


@spelling(**NORMAL, scores=BF16, out=BF16)
def rounded_then_picked(m: Any, x: torch.Tensor) -> Results:
    weights, indices = torch.softmax(linear(x, m.w).float(), -1).to(x.dtype).topk(4)
    return normal(weights), indices


@spelling(**NORMAL)
def both_dtypes(m: Any, x: torch.Tensor) -> Results:
    """What is rounded comes from what is not."""
    weights, indices = torch.softmax(linear(x, m.w).float(), -1).topk(4)
    weights = normal(weights)
    return weights, weights.to(x.dtype), indices


@spelling()
def both_kinds(m: Any, x: torch.Tensor) -> Results:
    """What is normalised comes from what is not."""
    weights, indices = torch.softmax(linear(x, m.w).float(), -1).topk(4)
    return weights, normal(weights), indices


@spelling(B32, **WIDE, **NORMAL, score="sigmoid", taken="choice")
def bias_in_the_weights(m: Any, x: torch.Tensor) -> Results:
    weights, indices = (torch.sigmoid(wide(m, x)) + m.b).topk(4)
    return normal(weights), indices


@spelling(B32, order="select-score")
def bias_of_the_logits(m: Any, x: torch.Tensor) -> Results:
    """For the choice alone."""
    logits = linear(x, m.w).float()
    indices = (logits + m.b).topk(4)[1]
    return torch.softmax(logits.gather(1, indices), -1), indices


@spelling({"c": FP32}, **WIDE, logit_bias=FP32)
def bias_after_the_product(m: Any, x: torch.Tensor) -> Results:
    return torch.softmax(wide(m, x) + m.c, -1).topk(4)


@spelling({"c": BF16}, hidden=0)
def bias_after_rounding(m: Any, x: torch.Tensor) -> Results:
    """Which rounds twice: the product stays the graph's."""
    return torch.softmax((linear(x, m.w) + m.c).float(), -1).topk(4)


@spelling()
def rounded_product(m: Any, x: torch.Tensor) -> Results:
    """In float32, rounded once."""
    return torch.softmax(wide(m, x).to(BF16).float(), -1).topk(4)


@spelling(k=1)
def one_expert(m: Any, x: torch.Tensor) -> Results:
    weights, indices = torch.softmax(linear(x, m.w).float(), -1).topk(1)
    return weights.squeeze(-1), indices.squeeze(-1)


@spelling()
def indices_alone(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(linear(x, m.w).float(), -1).topk(4)[1]


@spelling(**NORMAL)
def weights_alone(m: Any, x: torch.Tensor) -> torch.Tensor:
    return normal(torch.softmax(linear(x, m.w).float(), -1).topk(4)[0])


@spelling(score="sigmoid", hidden=0)
def looked_up(m: Any, x: torch.Tensor) -> Results:
    """The weights are taken by an index: the choice alone is lowered."""
    scores = torch.sigmoid(linear(x, m.w).float())
    indices = scores.topk(4)[1]
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return torch.ops.aten.index.Tensor(scores, [rows, indices]), indices


@spelling(**NORMAL, out=BF16)
def of_rank_three(m: Any, x: torch.Tensor) -> Results:
    return mixtral(m, x.view(2, -1, x.shape[-1]))


@spelling(hidden=0)
def stored_turned(m: Any, x: torch.Tensor) -> Results:
    """The product takes its weight as it is."""
    return torch.softmax((x @ m.w.view(x.shape[1], N)).float(), -1).topk(4)
