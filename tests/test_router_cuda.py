"""The Triton family of routers on a GPU: the experts that torch chooses there."""

import dataclasses
import math

import pytest
import torch
from products import poisoned
from routed import FUSED, SELECT, call, declared, hold, wrong
from torch.nn.functional import linear, softmax, softplus

from qinductor.kernels import router_cases as cases
from qinductor.kernels import router_triton as family
from qinductor.kernels.router import product, reference
from qinductor.kernels.router_cases import BF16, CASES, FP32, contract, of_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")
BY_NAME = {case.name: case for case in CASES}
PRODUCTS = [name for name, case in BY_NAME.items() if case.contract.hidden]
MILLION = 1 << 20


# As torch has it: the choice of each contract spelled out with torch.topk and torch.softmax -------


def scored(c, x):
    if c.score == "softmax":
        return softmax(x, -1)
    if c.score == "sqrt_softplus":
        return softplus(x).sqrt()
    return x.sigmoid() if c.score == "sigmoid" else x


def eager(c, logits, bias=None):
    """(weights, indices, scores) by torch's own operations."""
    scores = logits.to(c.compute)
    scores = scored(c, scores).to(c.ordered) if c.order == "score-select" else scores
    choice = scores if bias is None else (scores + bias).to(c.ordered)
    if c.groups > 1:
        grouped = choice.unflatten(-1, (c.groups, -1))
        best = grouped.topk(2).values.sum(-1) if c.group_score == "top2" else grouped.amax(-1)
        keep = torch.zeros_like(best).scatter_(1, best.topk(c.kept, sorted=False).indices, 1)
        choice = grouped.masked_fill(~keep.bool()[..., None], c.masked).flatten(-2)
    indices = choice.topk(c.k, dim=-1, sorted=False).indices
    weights = (choice if c.taken == "choice" else scores).gather(-1, indices)
    if c.order == "select-score":
        weights = scored(c, weights)
    if c.inner is not None:
        weights = weights.to(c.inner)
    if c.normalised:
        total = weights.sum(-1, keepdim=True)
        bounded = c.normalised == "max(s,eps)"
        weights = weights / (total.clamp_min(c.epsilon) if bounded else total + c.epsilon)
    return (weights * c.scale).to(c.out), indices


def sets_are_equal(c, found, wanted):
    """The same experts, ties included, and of each the same weight but for its last bits."""
    ours, order = found[1].long().sort(-1)
    theirs, other = wanted[1].sort(-1)
    rows = (ours != theirs).any(-1).nonzero().flatten().tolist()
    assert not rows, f"{len(rows)} rows; {rows[0]}: {ours[rows[0]]} {theirs[rows[0]]}"
    step = 8 * max(torch.finfo(d).eps for d in (c.compute, c.ordered, c.inner or FP32, c.out))
    torch.testing.assert_close(
        found[0].gather(-1, order).float(), wanted[0].gather(-1, other).float(),
        rtol=step, atol=1e-37, equal_nan=True,
    )  # fmt: skip


def rows_of(kind, n, count, dtype, g):
    """Random, tied and adversarial logits [count, n]."""
    x = torch.randn(count, n, generator=g, device="cuda")
    if kind == "random":
        return (x * 3).to(dtype)
    if kind == "spread":
        power = torch.randint(-20, 8, (count, 1), generator=g, device="cuda")
        return (x * torch.exp2(power.float())).to(dtype)
    if kind == "tied":
        step = torch.randint(0, 4, (count, 1), generator=g, device="cuda")
        return ((x * torch.exp2(step.float())).round() / 4).to(dtype)
    if kind == "beside":  # numbers that are a few units in the last place apart
        near = torch.randint(-6, 7, (count, n), generator=g, device="cuda").float()
        return (1 + near * torch.finfo(dtype).eps).to(dtype)
    values = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 2.0**-140, -(2.0**-149), 3e38, -3e38, 90.0, -95.0, -100.0, 20.0,
         math.inf, -math.inf, math.nan], device="cuda",
    )  # fmt: skip
    pick = torch.randint(len(values), (count, n), generator=g, device="cuda")
    few = torch.randint(1, len(values) + 1, (count, 1), generator=g, device="cuda")
    return values[pick % few].to(dtype)


KINDS = ("random", "spread", "tied", "beside", "hostile")
GIVEN = [name for name, case in BY_NAME.items() if not case.contract.hidden]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GIVEN)
def test_the_sets_that_torch_chooses(name, kind):
    c = BY_NAME[name].contract
    g = torch.Generator("cuda").manual_seed(0)
    logits = rows_of(kind, c.n, 20000, c.logits, g)
    if c.groups > 1 and c.order == "select-score":  # torch's amax of 0 and -0 is either
        logits = logits + 0
    bias = None
    if c.bias is not None:
        bias = (torch.randn(c.n, generator=g, device="cuda") / 8).to(c.bias)
    inputs = [logits] if bias is None else [logits, bias]
    with poisoned():
        found = call(c, inputs, "triton.select")
    declared(c, inputs, found)
    sets_are_equal(c, found, eager(c, logits, bias))


@pytest.mark.parametrize("name", ["deepseek v3", "kimi k2", "deepseek v4", "deepseek v2", "mixtral",
                                  "qwen3", "gpt oss", "ernie"])  # fmt: skip
def test_a_million_rows(name):
    c = BY_NAME[name].contract
    g = torch.Generator("cuda").manual_seed(1)
    part = MILLION // (4 * len(KINDS))
    bias = None if c.bias is None else torch.randn(c.n, generator=g, device="cuda") / 8
    for _ in range(4):
        for kind in KINDS:
            logits = rows_of(kind, c.n, part, c.logits, g)
            found = call(c, [logits] if bias is None else [logits, bias], "triton.select")
            sets_are_equal(c, found, eager(c, logits, bias))


@pytest.mark.parametrize("warps", ["w1", "w2", "w4"])
@pytest.mark.parametrize("name", GIVEN)
def test_as_the_specification_has_them(name, warps):
    """In the order of the specification, whose softmax is summed in another order."""
    case = BY_NAME[name]
    for inputs in (case.inputs(device="cuda"), case.hostile("cuda")):
        with poisoned():
            found = call(case.contract, inputs, f"triton.select@{warps}")
        declared(case.contract, inputs, found)
        if case.contract.score != "softmax":
            hold(case.contract, inputs, found)
        first = call(case.contract, inputs, "triton.select@w1")
        assert torch.equal(found[1], first[1])


# Products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_exact_sums(name):
    case = BY_NAME[name]
    c = case.contract
    for m in (1, 2, 3, 4, 7, 8, 12, 16, 17, 64, 300):
        inputs = case.inputs(device="cuda", m=m)
        logits = product(c, inputs)
        bias = inputs[-1] if c.bias is not None else None
        before = [tensor.clone() for tensor in inputs]
        routes = ["triton.select", *(["triton.router"] * (m <= FUSED.limit(c)))]
        for route in routes:
            with poisoned():
                found = call(c, inputs, route)
            declared(c, inputs, found)
            sets_are_equal(c, found, eager(c, logits, bias))
        for held, old in zip(inputs, before, strict=True):
            assert torch.equal(held, old), "an input is changed"


@pytest.mark.parametrize("m", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("name", ["deepseek v3 product", "gpt oss product", "fp32 product"])
def test_every_config(name, m):
    case = BY_NAME[name]
    c, inputs = case.contract, case.inputs(device="cuda", m=m)
    if m > FUSED.limit(c):
        return
    wanted = reference(c, inputs)
    for config in FUSED.configs(c, m):
        with poisoned():
            found = call(c, inputs, f"triton.router@{config}")
        assert not wrong(c, found, wanted), config


@pytest.mark.parametrize("n", [256, 384, 2112])
@pytest.mark.parametrize("m", [1, 4, 8, 16, 64, 300])
def test_random_products_are_as_exact_as_float32_s(n, m):
    """To the product's oracle: rms error 1.5 times eager's, the largest twice."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(m, 7168, generator=g, device="cuda").to(BF16)
    w = torch.randn(n, 7168, generator=g, device="cuda").to(BF16)
    exact, before = x.double() @ w.double().t(), linear(x.float(), w.float())
    least = torch.finfo(FP32).eps * exact.abs().max() / 8
    made = [family.long_sums(x, w).sum(0)]
    configs = family.product_configs(n, 7168, True, m) if m <= family.FEW else ()
    for config in configs if n == 256 else configs[:3]:
        out = torch.empty(m, n, device="cuda")
        made.append(family.launch_product(x, w, None, family.Config.parse(config), out))
    for found in made:
        ours, theirs = found - exact, before - exact
        assert ours.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt() + least
        assert ours.abs().max() <= 2 * theirs.abs().max() + least


@pytest.mark.parametrize("m", [1, 16])
def test_sums_are_the_same_every_time(m):
    case = BY_NAME["kimi k2 product"]
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(m, 7168, generator=g, device="cuda").to(BF16)
    w = torch.randn(384, 7168, generator=g, device="cuda").to(BF16)
    for config in FUSED.configs(case.contract, m)[:5]:
        first = family.launch_product(x, w, None, family.Config.parse(config))
        for _ in range(20):
            again = family.launch_product(x, w, None, family.Config.parse(config))
            assert torch.equal(first, again), config


# Graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PRODUCTS, "deepseek v3", "gpt oss"])
def test_captured_and_replayed_with_other_inputs(name):
    """Several calls in one graph, each launched while the one before may still run."""
    case = BY_NAME[name]
    c = case.contract
    routes = ["triton.select", *(["triton.router"] if c.hidden else [])]
    for route in routes:
        sets = [case.inputs(seed, "cuda") for seed in range(4)]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(c, sets[0], route)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            found = [call(c, inputs, route) for inputs in sets]
        for seed in (10, 20, 30):
            for i, inputs in enumerate(sets):
                for held, other in zip(inputs, case.inputs(seed + i, "cuda"), strict=True):
                    held.copy_(other)
            for weights, indices in found:
                weights.fill_(math.nan)
                indices.fill_(-1)
            graph.replay()
            for inputs, ours in zip(sets, found, strict=True):
                again = call(c, inputs, route)
                assert torch.equal(ours[1], again[1])
                assert torch.equal(ours[0], again[0])


def test_what_is_written_just_before_is_read():
    """The product waits for the launch before it, though it may start while that still runs."""
    case = BY_NAME["deepseek v3 product"]
    c = case.contract
    x, w, bias = case.inputs(device="cuda", m=4)
    other = case.inputs(5, "cuda", m=4)[0]
    wanted = [call(c, [tokens, w, bias], "triton.router") for tokens in (x, other)]
    held = torch.empty_like(x)
    for _ in range(50):
        for tokens, want in zip((x, other), wanted, strict=True):
            held.copy_(tokens)
            found = call(c, [held, w, bias], "triton.router")
            assert torch.equal(found[1], want[1]) and torch.equal(found[0], want[0])


@pytest.mark.parametrize("before", ["copy", "memset", "kernel", "two streams"])
def test_captured_behind_anything(before):
    """What comes before it in a graph: a copy of memory, a filling of it, a kernel, two streams
    that join."""
    case = BY_NAME["kimi k2 product"]
    c = case.contract
    x, w, bias = case.inputs(device="cuda", m=4)
    held, other = torch.zeros_like(x), torch.zeros_like(x)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    call(c, [x, w, bias], "triton.router")
    with torch.cuda.graph(graph):
        if before == "copy":
            held.copy_(x)
        elif before == "memset":
            held.copy_(x)
            other.zero_()
        elif before == "kernel":
            torch.add(x, other, out=held)
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.add(x, other, out=held)
            other.mul_(2)
            torch.cuda.current_stream().wait_stream(side)
        found = call(c, [held, w, bias], "triton.router")
        after = held.zero_()
    for seed in range(20):
        x.copy_(case.inputs(seed, "cuda", m=4)[0])
        graph.replay()
        wanted = call(c, [x, w, bias], "triton.router")
        assert torch.equal(found[1], wanted[1]) and torch.equal(found[0], wanted[0])
        assert not after.any()


def test_many_tokens():
    c = of_product(contract(64, 6, score="sigmoid"), 256)
    case = cases.Case("", 1, c)
    inputs = case.inputs(device="cuda", m=70000)
    found = call(c, inputs, "triton.select")
    sets_are_equal(c, found, eager(c, product(c, inputs)))
    given = dataclasses.replace(c, hidden=0, x=None, weight=None)
    assert SELECT.why_not(given) is None
