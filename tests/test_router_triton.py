"""The Triton family of routers, interpreted on a CPU: the experts of the specification."""

import dataclasses
import re
from collections.abc import Iterator

import interpreted
import pytest
import torch
from products import poisoned
from routed import FUSED, SELECT, call, hold, numpy_scores, wrong

from qinductor.kernels import router_cases as cases
from qinductor.kernels import router_triton as family
from qinductor.kernels.router import ROUTER, reference
from qinductor.kernels.router_cases import BF16, CASES, FP16, FP32, contract, of_product
from qinductor.op import INFINITE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BY_NAME = {case.name: case for case in CASES}
PRODUCTS = [name for name, case in BY_NAME.items() if case.contract.hidden]
SMALL = of_product(contract(19, 4, score="sigmoid", bias=FP32, normalised="s+eps"), 328)
CONFIGS = (
    "n2.k512.s1.w4", "n1.k128.s3.w2.late", "n4.k64.s2.w1", "n2.k64.s6.w2",
    "n16.k128.s1.w4.p2", "n16.k128.s3.w8.p1", "n32.k64.s4.w4.p3", "n64.k512.s1.w4.p1",
    "n8.k128.s2.w8.p3", "n4.k128.s1.w4.p3.late", "n2.k64.s3.w2.p2",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with interpreted.device(family), numpy_scores():
        yield


@pytest.mark.parametrize("name", BY_NAME)
def test_the_experts_of_the_specification(name):
    case = BY_NAME[name]
    assert SELECT.why_not(case.contract) is None
    for inputs in (case.inputs(), case.hostile()):
        before = [tensor.clone() for tensor in inputs]
        with poisoned():
            found = call(case.contract, inputs, "triton.select")
        hold(case.contract, inputs, found)
        for held, old in zip(inputs, before, strict=True):
            assert torch.equal(held.view(torch.uint8), old.view(torch.uint8)), "an input is changed"


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_and_selection(name):
    """Sums of the operands are exact. (`limit` is where it is taken; it runs any M.)"""
    case = BY_NAME[name]
    assert FUSED.why_not(case.contract) is None
    for inputs in (case.inputs(), [t[:9] if i == 0 else t for i, t in enumerate(case.hostile())]):
        with poisoned():
            found = call(case.contract, inputs, "triton.router")
        hold(case.contract, inputs, found)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (config, dtype)
        for dtype in (BF16, FP16, FP32)
        for config in CONFIGS
        if dtype is not FP32 or ".p" not in config  # tensor cores take 16 bits
    ],
)
def test_every_config_and_number_of_tokens(config, dtype):
    chosen = dataclasses.replace(SMALL, x=dtype, weight=dtype)
    case = cases.Case("", 1, chosen)
    for m in (3, 17):
        inputs = case.inputs(m=m)
        with poisoned():
            found = call(chosen, inputs, f"triton.router@{config}")
        hold(chosen, inputs, found)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_product_alone(config, dtype):
    """With and without a bias, in rows of other tensors, whatever the parts."""
    g = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 13, 328), (5, 16, 512), (18, 9, 200), (3, 5, 8)):
        wide = torch.randint(-3, 4, (m, k + 24), generator=g).to(BF16)
        x = wide[:, 8 : 8 + k]
        w = torch.randint(-3, 4, (n, k), generator=g).to(BF16)
        bias = torch.randint(-3, 4, (n,), generator=g).to(dtype)
        for added in (None, bias):
            out = torch.full((m, n + 8), torch.nan, dtype=dtype)[:, :n]
            with poisoned():
                family.launch_product(x, w, added, family.Config.parse(config), out)
            wanted = x.double() @ w.double().t() + (0 if added is None else added.double())
            assert torch.equal(out, wanted.float().to(dtype)), (m, n, k)


def test_random_products_are_as_exact_as_float32_s():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 7168, generator=g).to(BF16), torch.randn(64, 7168, generator=g).to(BF16)
    exact = x.double() @ w.double().t()
    eager = (x.float() @ w.float().t() - exact).abs()
    for config, tokens in (("n16.k512.s7.w8.p3", 16), ("n2.k2048.s1.w8", 1)):
        out = torch.empty(16, 64)
        for first in range(0, 16, tokens):  # the interpreter adds up columns of one token in pairs
            rows = slice(first, first + tokens)
            family.launch_product(x[rows], w, None, family.Config.parse(config), out[rows])
        ours = (out - exact).abs()
        assert ours.square().mean() <= 2 * eager.square().mean() and ours.max() <= 2 * eager.max()


def test_rows_of_other_tensors_and_more_axes():
    case = BY_NAME["qwen3 product"]
    x, w = case.inputs(m=6)
    wide = torch.zeros(6, 2 * x.shape[1], dtype=x.dtype)
    wide[:, ::2] = x
    held = torch.zeros(w.shape[0], w.shape[1] + 16, dtype=w.dtype)
    held[:, 8:-8] = w
    wanted = reference(case.contract, [x, w])
    for given in (
        [wide[:, ::2], w], [x, held[:, 8:-8]], [x.unflatten(0, (2, 3)), w],
        [x, w.t().contiguous().t()],
    ):  # fmt: skip
        for route in ("triton.router", "triton.select"):
            assert not wrong(case.contract, call(case.contract, given, route), wanted)
    case = BY_NAME["deepseek v3"]
    logits, bias = case.inputs()
    apart = torch.stack([bias, bias + 1], 1)[:, 0]
    found = call(case.contract, [logits, apart], "triton.select")
    assert not wrong(case.contract, found, reference(case.contract, [logits, bias]))
    chosen = BY_NAME["qwen3"].contract
    logits = torch.randn(6, 2 * chosen.n).to(BF16)[:, ::2]
    assert not wrong(
        chosen, call(chosen, [logits], "triton.select"), reference(chosen, [logits.contiguous()])
    )


def test_logits_of_every_order_of_ties():
    """Rows of few values: the experts are the first of each."""
    g = torch.Generator().manual_seed(0)
    values = torch.tensor([-torch.inf, -1.0, -0.0, 0.0, 1.0, torch.inf, torch.nan])
    for chosen in (
        contract(33, 7, score="none"),
        contract(24, 5, score="none", groups=6, kept=2, group_score="top2"),
        contract(24, 9, score="none", groups=3, kept=1, masked=0.0),
        contract(40, 6, BF16, order="select-score", compute=BF16),
    ):
        for count in (1, 2, 3, 7):
            pick = values[torch.randperm(7, generator=g)[:count]]
            rows = pick[torch.randint(count, (30, chosen.n), generator=g)].to(chosen.logits)
            hold(chosen, [rows], call(chosen, [rows], "triton.select"))


# The providers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (contract(1025, 4), "4 of 1025 experts; it takes up to 32 of 1024"),
        (contract(256, 33), "33 of 256 experts"),
        (contract(650, 4, groups=65), "65 groups; it takes up to 64"),
        (contract(8, 2, torch.float64), "the logits: fp64"),
        (contract(8, 2, compute=torch.float64), "the scores' arithmetic: fp64"),
        (contract(8, 2, scores=torch.float64), "the scores: fp64"),
        (contract(8, 2, inner=torch.float64), "the weights' arithmetic: fp64"),
        (contract(8, 2, out=torch.float64), "the weights: fp64"),
        (contract(8, 2, bias=torch.float64), "the bias: fp64"),
        (contract(8, 2, indices=torch.int16), "indices are int16"),
        (of_product(contract(8, 2), 8, torch.float64), "x: fp64"),
        (of_product(contract(8, 2), 8, BF16, torch.float64), "the product's weight: fp64"),
        (of_product(contract(8, 2), 8, logit_bias=torch.float64), "the logits' bias: fp64"),
    ],
)
def test_refused(made, text):
    for provider in (SELECT, FUSED):
        reason = provider.why_not(made)
        assert reason is not None
        if made.hidden or provider is SELECT:
            assert re.search(text, reason), reason


def test_given_logits_are_no_product():
    assert FUSED.why_not(contract(8, 2)) == "the logits are given; it makes them"


def test_targets_limits_and_plans():
    assert [t for t in ("cpu", "sm_75", "sm_80", "sm_90", "sm_100") if SELECT.runs_on(t)] == [
        "sm_80", "sm_90", "sm_100"
    ]  # fmt: skip
    chosen = BY_NAME["deepseek v3 product"].contract
    steps = ROUTER.plan(chosen, "sm_90", None).steps
    assert steps[0][1].startswith("triton.router@") and steps[-1][1].startswith("triton.select")
    assert steps[-1][0] == INFINITE
    assert FUSED.limit(chosen) == 64
    assert FUSED.limit(dataclasses.replace(chosen, weight=FP32)) == 16
    given = ROUTER.plan(BY_NAME["deepseek v3"].contract, "sm_90", None)
    assert {route.partition("@")[0] for _, route in given.steps} == {"triton.select"}


@pytest.mark.parametrize("name", PRODUCTS)
def test_configs(name):
    chosen = BY_NAME[name].contract
    for m in (1, 2, 3, 4, 8, 12, 16, 64):
        configs = FUSED.configs(chosen, m)
        assert configs and len(set(configs)) == len(configs)
        for text in configs:
            config = family.Config.parse(text)
            assert str(config) == text
            steps = -(-chosen.hidden // config.bk)
            each = -(-steps // config.split)
            assert -(-steps // each) == config.split  # no part has no columns
            assert config.stages == 0 or config.bk >= 16 * config.warps
            assert config.stages == 0 or family.tensor_cores(chosen.x, chosen.weight)


def test_a_text_that_is_no_config():
    for text in ("", "n1.k512.s1", "n1.k2.s1.w1.p1.x", "n1 k512.s1.w1"):
        with pytest.raises(ValueError, match=r"no config of triton\.router"):
            family.Config.parse(text)
    case = BY_NAME["qwen3"]
    with pytest.raises(ValueError, match=r"no config of triton\.select"):
        SELECT.run(case.contract, case.inputs(), (), "t1")


def test_chunks_of_columns():
    for hidden, wanted in ((7168, 56), (2880, 24), (2048, 16), (1024, 8), (513, 1), (5120, 40),
                           (65536, 64), (12288, 64), (6144, 48), (4096, 32), (64, 1)):  # fmt: skip
        assert family.chunks(hidden) == wanted, hidden
