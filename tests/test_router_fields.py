"""For each field of a router's contract: graphs that differ in it alone get another contract, and
what is found of members drawn at random computes what they do, on logits that no probe has.

`spelled` writes every member of the family out in plain torch, without the reference.
"""

import dataclasses
import random

import pytest
import torch
from routers import BF16, FP16, FP32, found

from qinductor.kernels.router import Router, reference
from qinductor.patterns.router_formats.find import INSTEAD

N, ROWS = 24, 64


@dataclasses.dataclass(frozen=True)
class As:
    """How a router is written."""

    logits: torch.dtype = FP32
    k: int = 4
    compute: torch.dtype = FP32
    score: str = "softmax"
    order: str = "score-select"
    scores: torch.dtype | None = None
    bias: torch.dtype | None = None
    groups: int = 1
    kept: int = 1
    group_score: str = "max"
    masked: float = float("-inf")
    taken: str = "scores"
    inner: torch.dtype | None = None
    normalised: str = ""
    epsilon: float = 0.0
    scale: float = 1.0
    out: torch.dtype = FP32


SCORES = {
    "softmax": lambda x: torch.softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    "none": lambda x: x,
}


def topk(x, k):
    return torch.topk(x, k, dim=-1)


def spelled(how: As, pick=topk):
    def router(logits, bias=None):
        x = logits.to(how.compute)
        if how.order == "score-select":
            x = SCORES[how.score](x)
            x = x if how.scores is None else x.to(how.scores)
        choice = x if bias is None else x + bias
        if how.groups > 1:
            groups = choice.unflatten(-1, (how.groups, -1))
            best = groups.amax(-1) if how.group_score == "max" else pick(groups, 2)[0].sum(-1)
            kept = torch.zeros_like(best).scatter(-1, pick(best, how.kept)[1], 1.0)
            lost = (kept == 0).unsqueeze(-1).expand(groups.shape)
            choice = groups.masked_fill(lost, how.masked).flatten(-2)
        values, indices = pick(choice, how.k)
        w = values if how.taken == "choice" else x.gather(-1, indices)
        if how.order == "select-score":
            w = SCORES[how.score](w)
        w = w if how.inner is None else w.to(how.inner)
        total = w.sum(-1, keepdim=True)
        if how.normalised == "s+eps":
            w = w / (total + how.epsilon if how.epsilon else total)
        elif how.normalised:
            w = w / torch.clamp(total, min=how.epsilon)
        w = w * how.scale if how.scale != 1 else w
        return w.to(how.out), indices

    return router


def of(how: As) -> Router:
    """What is found of a member."""
    given = [torch.randn(5, N).to(how.logits)]
    if how.bias is not None:
        given.append(torch.randn(N).to(how.bias))
    return found(spelled(how), *given)


GROUPS = {"groups": 6, "kept": 2}
FIELDS = (
    {},
    {"logits": BF16},
    {"k": 1},
    {"k": N},
    {"logits": BF16, "compute": BF16, "score": "sqrt_softplus", "out": BF16},
    {"logits": FP16},
    {"score": "sigmoid"},
    {"score": "sqrt_softplus"},
    {"score": "none"},
    {"order": "select-score"},
    {"order": "select-score", "score": "sigmoid"},
    {"scores": BF16, "out": BF16},
    {"bias": FP32},
    {"bias": BF16},
    {"bias": FP32, "taken": "choice"},
    {"score": "sigmoid", "bias": FP32},
    {"order": "select-score", "bias": FP32},
    GROUPS,
    {**GROUPS, "kept": 3},
    {**GROUPS, "groups": 4},
    {**GROUPS, "masked": 0.0},
    {**GROUPS, "masked": 0.0, "taken": "choice"},
    {**GROUPS, "masked": -1e9, "k": 10, "bias": FP32, "taken": "choice"},
    {**GROUPS, "masked": 0.0, "bias": FP32},
    {**GROUPS, "group_score": "top2"},
    {"normalised": "s+eps"},
    {"normalised": "s+eps", "scores": BF16, "out": BF16},
    {"normalised": "s+eps", "scores": BF16, "inner": FP32},
    {"score": "sigmoid", "normalised": "s+eps", "epsilon": 1e-20},
    {"score": "sigmoid", "normalised": "s+eps", "epsilon": 1e-9},
    {"score": "sigmoid", "normalised": "max(s,eps)", "epsilon": 1e-12},
    {"score": "sigmoid", "normalised": "max(s,eps)", "epsilon": 1e-3},
    {"scale": 2.5},
    {"scale": 0.125},
    {"scale": 2.5, "out": BF16},
    {"inner": BF16, "scale": 1.7, "out": BF16},
    {"out": BF16},
    {"out": FP16},
)


def name(fields):
    words = [f"{key} {str(value).removeprefix('torch.')}" for key, value in fields.items()]
    return ", ".join(words) or "plain"


@pytest.mark.parametrize("fields", FIELDS, ids=name)
def test_field(fields):
    contract, how = of(As(**fields)), As(**fields)
    same = {f.name: getattr(contract, f.name) for f in dataclasses.fields(how)}
    assert As(**same) == how


def test_no_two_are_one():
    assert len({As(**fields) for fields in FIELDS}) == len(FIELDS)


def drawn(seed: int) -> As:
    """A member; some of its fields make no difference beside the others."""
    r = random.Random(seed)
    logits = r.choice([FP32, BF16, FP16])
    order = r.choice(["score-select"] * 3 + ["select-score"])
    score = r.choice(["softmax", "sigmoid", "sqrt_softplus"])
    bias = r.choice([None, FP32])
    groups = r.choice([1, 1, 3, 4, 6])
    compute = r.choice([FP32, logits])
    return As(
        logits=logits, k=r.choice([1, 2, 4, 6]), compute=compute, score=score, order=order,
        scores=r.choice([None, BF16]) if order == "score-select" and bias is None else None,
        bias=bias if compute is FP32 else None,
        groups=groups, kept=r.randint(1, groups), group_score=r.choice(["max", "top2"]),
        masked=r.choice([float("-inf"), 0.0]),
        taken=r.choice(["scores", "choice"]) if bias or groups > 1 else "scores",
        normalised=r.choice(["", "s+eps", "max(s,eps)"]), epsilon=r.choice([1e-20, 1e-6]),
        scale=r.choice([1.0, 2.5, 16.0]), out=r.choice([FP32, BF16]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_computes_the_same(seed):
    how = drawn(seed)
    contract = of(how)
    written = spelled(how, lambda x, k: INSTEAD[torch.ops.aten.topk.default](x, k))
    torch.manual_seed(seed)
    for size in (0.1, 1.0, 30.0):
        given = [(torch.randn(ROWS, N) * size).to(how.logits)]
        if how.bias is not None:
            given.append(torch.randn(N).to(how.bias))
        weights, indices = reference(contract, given)
        expected, chosen = written(*given)
        assert torch.equal(indices, chosen)
        weights = weights.to(how.out)  # what widens them at the end stays the graph's
        # A softmax of torch's own rounds in another order than its operators do.
        rounded = how.scores or how.compute
        close = 16 * max(torch.finfo(dtype).eps for dtype in (how.out, rounded))
        torch.testing.assert_close(weights, expected, rtol=close, atol=1e-9, equal_nan=True)
