"""Routers: the specification against routers spelled out in torch, ties, the operator."""

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import linear, softmax, softplus

import qinductor
from qinductor.contracts import parse
from qinductor.kernels import router as family
from qinductor.kernels import router_cases as cases
from qinductor.kernels.router import ROUTER, Router, cost, reference, results
from qinductor.kernels.router_cases import BF16, CASES, FP16, FP32, contract, of_product
from qinductor.op import INFINITE, M

qinductor.load()
BY_NAME = {case.name: case for case in CASES}


# Routers as models write them ------------------------------------------------------------------


def deepseek_v3(x, w, bias, groups, kept, k, scale):
    scores = linear(x.float(), w.float()).sigmoid()
    choice = scores + bias
    by_group = choice.view(-1, groups, choice.shape[-1] // groups)
    best = by_group.topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(best).scatter_(1, best.topk(kept, dim=-1, sorted=False)[1], 1)
    mask = mask.unsqueeze(-1).expand_as(by_group).reshape(choice.shape)
    indices = choice.masked_fill(~mask.bool(), -math.inf).topk(k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, indices)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scale, indices


def mixtral(x, w, k):
    p = softmax(linear(x, w).float(), dim=-1)
    weights, indices = torch.topk(p, k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), indices


def qwen3(x, w, k):
    weights, indices = mixtral(x, w, k)
    return weights.to(x.dtype), indices


def gpt_oss(x, w, bias, k):
    top, indices = torch.topk(linear(x, w, bias), k, dim=-1)
    return softmax(top, dim=-1, dtype=top.dtype), indices


def kimi_k2(x, w, bias, k, scale):
    scores = linear(x.float(), w.float()).sigmoid()
    indices = torch.topk(scores + bias, k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, indices)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, indices


def deepseek_v4(x, w, bias, k, scale):
    scores = softplus(linear(x.float(), w.float())).sqrt()
    indices = (scores + bias).topk(k, dim=-1)[1]
    weights = scores.gather(1, indices)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, indices


def deepseek_v2(x, w, groups, kept, k, scale):
    scores = linear(x.float(), w.float()).softmax(dim=-1, dtype=FP32)
    best = scores.view(len(x), groups, -1).max(dim=-1).values
    mask = torch.zeros_like(best).scatter_(1, torch.topk(best, kept, sorted=False)[1], 1)
    mask = mask[..., None].expand(len(x), groups, scores.shape[1] // groups).reshape(len(x), -1)
    weights, indices = torch.topk(scores.masked_fill(~mask.bool(), 0.0), k, sorted=False)
    return weights * scale, indices


def ernie(x, w, bias, k):
    p = softmax(linear(x.float(), w.float()), dim=-1)
    indices = (p + bias).topk(k)[1]
    weights = p.gather(-1, indices)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12), indices


G = torch.Generator().manual_seed(0)
B256, B384, B64, B32 = (torch.randn(n, generator=G) / 8 for n in (256, 384, 64, 32))
FIELDS = cases.DEEPSEEK
SPELLED = {
    "deepseek v3": (
        contract(256, 8, **FIELDS), B256, lambda x, w, b: deepseek_v3(x, w, b, 8, 4, 8, 2.5)
    ),
    "kimi k2": (
        contract(384, 8, **cases.KIMI), B384, lambda x, w, b: kimi_k2(x, w, b, 8, 2.827)
    ),
    "deepseek v4": (
        contract(256, 6, **(cases.KIMI | {"score": "sqrt_softplus", "scale": 1.5})), B256,
        lambda x, w, b: deepseek_v4(x, w, b, 6, 1.5),
    ),
    "deepseek v2": (
        cases.MODELS["deepseek v2"], None, lambda x, w, b: deepseek_v2(x, w, 8, 3, 6, 16.0)
    ),
    "mixtral": (cases.MODELS["mixtral"], None, lambda x, w, b: mixtral(x, w, 2)),
    "qwen3": (cases.MODELS["qwen3"], None, lambda x, w, b: qwen3(x, w, 8)),
    "gpt oss": (
        contract(32, 4, BF16, **cases.GPT_OSS),
        B32.to(BF16), lambda x, w, b: gpt_oss(x, w, b, 4),
    ),
    "ernie": (cases.MODELS["ernie"], B64, lambda x, w, b: ernie(x, w, b, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_as_models_write_it(name):
    """Whose logits are exact: products of a few whole numbers. Random ones have no ties that
    matter; of those that are in the dtype of x there are some, so bf16 logits are drawn apart."""
    chosen, bias, spelled = SPELLED[name]
    chosen = of_product(chosen, 64)
    if name == "gpt oss":
        chosen = dataclasses.replace(chosen, logit_bias=BF16)
    w = torch.randint(-4, 5, (chosen.n, 64), generator=G).to(BF16) / 16
    x = torch.randint(-4, 5, (200, 64), generator=G).to(BF16) / 2
    inputs = [x, w, *([] if bias is None else [bias])]
    weights, indices = reference(chosen, inputs)
    wanted, places = spelled(x, w, bias)
    assert (weights.dtype, indices.dtype) == (wanted.dtype, torch.int64)
    choice = chosen_by(chosen, inputs)
    clear = border(choice, chosen)
    assert clear.float().mean() > 0.1  # where no tie decides
    ours, order = indices[clear].sort(-1)
    theirs, other = places[clear].sort(-1)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(
        weights[clear].gather(-1, order), wanted[clear].gather(-1, other), rtol=1e-6, atol=0
    )


def chosen_by(c: Router, inputs):
    """What the experts of each token are chosen by, before groups."""
    logits = family.product(c, inputs)
    scores = logits.to(c.compute)
    scores = family.SCORES[c.score](scores) if c.order == "score-select" else scores
    return scores + inputs[-1] if c.bias is not None else scores


def border(choice: torch.Tensor, c: Router) -> torch.Tensor:
    """Rows in which the k-th and the next expert, and such groups, differ."""
    if c.groups > 1:
        grouped = choice.unflatten(-1, (c.groups, -1))
        best = grouped.topk(2).values.sum(-1) if c.group_score == "top2" else grouped.amax(-1)
        top = best.sort(-1, descending=True)
        clear = top.values[:, c.kept - 1] != top.values[:, c.kept]
        keep = torch.zeros_like(best).scatter(1, top.indices[:, : c.kept], 1).bool()
        choice = grouped.masked_fill(~keep[..., None], c.masked).flatten(-2)
    else:
        clear = torch.ones(len(choice), dtype=torch.bool)
    top = choice.sort(-1, descending=True).values
    return clear & (top[:, c.k - 1] != top[:, c.k])


# The order of equal and of special numbers ------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_ties_nan_and_zeros(dtype):
    inf, nan = math.inf, math.nan
    for row, wanted in (
        ([1, 2, 2, 1, 2], [1, 2, 4, 0]),
        ([-inf, nan, inf, nan, 5], [1, 3, 2, 4]),
        ([-0.0, 0.0, -0.0, 0.0], [1, 3, 0, 2]),
        ([-inf] * 5, [0, 1, 2, 3]),
        ([-1e-7, -2e-7, 0.0, 1e-7], [3, 2, 0, 1]),
        ([-nan, nan, 1, inf], [0, 1, 3, 2]),
    ):
        chosen = contract(len(row), 4, dtype, score="none", compute=dtype)
        _, indices = reference(chosen, [torch.tensor([row], dtype=dtype)])
        assert indices.tolist() == [wanted], row


def test_groups_of_ties():
    row = torch.tensor([[1.0, 3, 2, 2, 3, 1, 0, 9]])
    base = contract(8, 2, score="none", groups=4, kept=2)
    for fields, wanted in (
        ({}, [7, 1]),
        ({"group_score": "top2"}, [7, 1]),  # sums 4, 4, 4, 9
        ({"kept": 1}, [7, 6]),
        ({"kept": 1, "k": 3}, [7, 6, 0]),
        ({"kept": 1, "k": 3, "masked": 0.0}, [7, 0, 1]),
        ({"kept": 1, "k": 3, "masked": 5.0}, [7, 0, 1]),
    ):
        _, indices = reference(dataclasses.replace(base, **fields), [row])
        assert indices.tolist() == [wanted], fields


def test_a_masked_expert_has_its_score_or_the_mask():
    row = torch.tensor([[1.0, 2, 7, 8]])
    base = contract(4, 3, score="none", groups=2, masked=0.0)
    for taken, wanted in (("scores", [8, 7, 1]), ("choice", [8, 7, 0])):
        weights, _ = reference(dataclasses.replace(base, taken=taken), [row])
        assert weights.tolist() == [wanted]


# The contract and the operator ------------------------------------------------------------------


def test_each_field_has_a_case_that_differs_in_it():
    held = [case.contract for case in CASES]
    for field in dataclasses.fields(Router):
        assert len({getattr(each, field.name) for each in held}) > 1, field.name
    for name, known in (
        ("score", family.SCORES), ("order", family.ORDERS), ("taken", family.TAKEN),
        ("group_score", family.GROUP_SCORES), ("normalised", family.NORMS),
    ):  # fmt: skip
        assert {getattr(each, name) for each in held} == set(known)
    assert len(BY_NAME) == len(CASES)


CHANGES = {
    "k": 3, "compute": BF16, "out": BF16, "score": "sigmoid", "order": "select-score",
    "scores": BF16, "bias": FP32, "groups": 3, "kept": 2, "group_score": "top2", "masked": 0.25,
    "taken": "choice", "inner": BF16, "normalised": "s+eps", "epsilon": 0.5, "scale": 3.0,
    "indices": torch.int32,
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_of_the_choice_changes_the_results(field):
    base = {"groups": 6, "normalised": "max(s,eps)", "epsilon": 0.1, "scale": 2.5, "k": 4}
    if field in ("taken", "masked"):
        base |= {"k": 9, "taken": "scores" if field == "taken" else "choice"}
    chosen = contract(**{"n": 24, **base})
    other = dataclasses.replace(chosen, **{field: CHANGES[field]})
    g = torch.Generator().manual_seed(0)
    x, bias = torch.randn(40, 24, generator=g), torch.randn(24, generator=g)
    first = reference(chosen, [x])
    second = reference(other, [x, bias] if field == "bias" else [x])
    pairs = zip(first, second, strict=True)
    assert not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "fields", [{"logits": BF16}, {"logit_bias": BF16}, {"logits": FP16, "logit_bias": FP32}]
)
def test_logits_are_rounded_once(fields):
    chosen = dataclasses.replace(of_product(contract(24, 4), 64, FP32, FP32), **fields)
    g = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*shape, generator=g) for shape in ((40, 64), (24, 64), (24,)))
    if chosen.logit_bias is None:
        found, wanted = family.product(chosen, [x, w]), x.double() @ w.double().t()
    else:
        bias = bias.to(chosen.logit_bias)
        found = family.product(chosen, [x, w, bias])
        wanted = x.double() @ w.double().t() + bias.double()
    assert found.dtype is chosen.logits
    torch.testing.assert_close(found, wanted.float().to(chosen.logits), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"score": "tanh"}, "no score: 'tanh'"),
        ({"order": "select"}, "no order"),
        ({"group_score": "mean"}, "no group score"),
        ({"normalised": "s"}, "no norm"),
        ({"taken": "both"}, "no kind of weights"),
        ({"k": 9}, "k is 9; wanted 1 to the 8 experts"),
        ({"k": 0}, "k is 0"),
        ({"groups": 3}, "3 groups of 8 experts"),
        ({"groups": 0}, "0 groups"),
        ({"groups": 8, "group_score": "top2"}, "8 groups of 8 experts"),
        ({"groups": 2, "kept": 3}, "3 groups are kept"),
        ({"hidden": 8}, "a product has a hidden size"),
        ({"x": BF16, "weight": BF16}, "a product has a hidden size"),
        ({"weight": BF16}, "a product has a hidden size"),
        ({"hidden": 8, "x": BF16}, "a product has a hidden size"),
        ({"logit_bias": BF16}, "a bias of the product, and no product"),
    ],
)
def test_what_is_no_contract(fields, text):
    with pytest.raises(ValueError, match=text):
        contract(**{"n": 8, "k": 2, **fields})


@pytest.mark.parametrize("name", BY_NAME)
def test_the_text_of_a_contract_is_the_contract(name):
    chosen = BY_NAME[name].contract
    assert parse(Router, str(chosen)) == chosen and " " in chosen.summary
    assert f"top {chosen.k} of {chosen.n}" in chosen.summary


def test_cost():
    c = of_product(contract(256, 8), 7168)
    spent = cost(c)
    assert spent["bytes"] == 256 * 7168 * 2 + M * (7168 * 2 + 8 * 12)
    assert spent["flops"] == M * (2 * 256 * 7168 + 256 * 16)
    assert cost(contract(256, 8))["bytes"] == M * (256 * 4 + 8 * 12)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_operator(name):
    case = BY_NAME[name]
    plan = f"{INFINITE}:reference"
    for inputs in (case.inputs(), case.hostile()):
        found = torch.ops.qinductor.router(inputs, str(case.contract), plan)
        for ours, want, like in zip(
            found, reference(case.contract, inputs), results(case.contract, inputs), strict=True
        ):
            assert torch.equal(ours.nan_to_num(7), want.nan_to_num(7))
            assert (ours.dtype, ours.shape) == (like.dtype, like.shape) and ours.is_contiguous()
        c, indices = case.contract, found[1]
        assert indices.min() >= 0 and indices.max() < c.n
        assert (indices.sort(-1).values.diff(dim=-1) > 0).all()  # no expert twice


def test_no_tokens_and_more_axes():
    for case in (BY_NAME["qwen3 product"], BY_NAME["deepseek v3"]):
        plan = f"{INFINITE}:reference"
        x, *others = case.inputs(m=6)
        flat = torch.ops.qinductor.router([x, *others], str(case.contract), plan)
        cube = torch.ops.qinductor.router(
            [x.unflatten(0, (2, 3)), *others], str(case.contract), plan
        )
        none = torch.ops.qinductor.router([x[:0], *others], str(case.contract), plan)
        for a, b, c in zip(flat, cube, none, strict=True):
            assert torch.equal(a, b) and c.shape == (0, case.contract.k) and c.dtype == a.dtype


def test_a_plan_that_ends_too_early():
    case = BY_NAME["qwen3"]
    with pytest.raises(RuntimeError, match="no provider for M = 6"):
        torch.ops.qinductor.router(case.inputs(), str(case.contract), "5:reference")


@pytest.mark.parametrize("name", ["deepseek v3", "qwen3 product", "gpt oss product", "all chosen"])
def test_opcheck(name):
    case = BY_NAME[name]
    arguments = case.inputs(), str(case.contract), f"{INFINITE}:reference"
    torch.library.opcheck(torch.ops.qinductor.router.default, arguments)


def test_the_reference_is_registered_first():
    assert next(iter(ROUTER.providers)) == "reference"
