"""Products of one activation, computed as one where that is expected to be faster."""

import dataclasses

import pytest
import torch
from models import Random, grouped, nibbles
from torch.nn.functional import linear

import qinductor
from qinductor.contracts import dequantize
from qinductor.errors import Refused
from qinductor.kernels.dequant_matmul import CASES, DEQUANT_MATMUL, case
from qinductor.kernels.scaled_matmul_cases import CASES as SCALED
from qinductor.op import Op
from qinductor.patterns import dequant_matmul
from qinductor.patterns.siblings import check_tables, joined, joined_contract
from qinductor.testing import product_oracle

BF16, K, G = torch.bfloat16, 128, 32
STRIPS = "onednn.dequant_strips"


class Linear(torch.nn.Module):
    """A weight of packed nibbles, less a zero of 8 and times a scale for each group."""

    def __init__(self, n, seed, g=G, bias=False, k=K):
        super().__init__()
        made = Random(seed)
        self.register_buffer("packed", made.integers(0, 256, n, k // 2))
        self.register_buffer("scale", made.scales(n, k // g))
        self.register_buffer("bias", made.normal(n) if bias else None)

    def weight(self):
        return grouped(nibbles(self.packed).to(BF16) - 8, self.scale)

    def forward(self, x):
        return linear(x, self.weight(), self.bias)


class Attention(torch.nn.Module):
    """q, k and v of one x; `more` takes what q makes."""

    def __init__(self, sizes=(128, 32, 64), groups=(G, G, G), biases=(False,) * 3, seed=0):
        super().__init__()
        self.heads = torch.nn.ModuleList(
            Linear(n, seed + i, g, b)
            for i, (n, g, b) in enumerate(zip(sizes, groups, biases, strict=True))
        )
        self.more = Linear(64, seed + 9, k=sizes[0])

    def forward(self, x):
        return (*(head(x) for head in self.heads), self.more(torch.tanh(self.heads[0](x))))


@pytest.fixture
def timed(monkeypatch):
    """Every product takes as long as any other, where a plan is asked for."""
    known = Op.plan

    def plan(self, contract, target, m, dense=False):
        return dataclasses.replace(known(self, contract, target, m, dense), us=(1.0,))

    monkeypatch.setattr(Op, "plan", plan)


def x_of(*shape):
    return Random(5).normal(*shape, K)


def run(model, x):
    """(results, report) of the compiled model; its results are held to eager's accuracy."""
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="qinductor")
        return compiled, compiled(x), qinductor.last_report()


def hold(model, x, results):
    """Holds q, k and v to eager's accuracy."""
    with torch.no_grad():
        eager = model(x)
    for head, ours, theirs in zip(model.heads, results, eager, strict=False):
        product_oracle(ours, theirs, x, head.weight(), head.bias)
    assert [t.stride() for t in results] == [t.stride() for t in eager]


def together(report):
    return [site.provider.startswith("with ") for site in report.sites if site.lowered]


def test_products_of_one_x_are_one(timed):
    model, x = Attention(), x_of(4, 64)
    _, results, report = run(model, x)
    hold(model, x, results)
    q, k, v, q_again, more = report.sites
    assert (q.provider, more.provider) == (f"{STRIPS}, 4 products of x as one", STRIPS)
    assert [s.provider for s in (k, v, q_again)] == [f"with {q.where}"] * 3
    assert [s.contract.split()[2] for s in (q, k, v)] == [
        "int4[128,128]", "int4[32,128]", "int4[64,128]"
    ]  # fmt: skip


def test_a_sibling_that_no_provider_takes_stops_no_other(timed, monkeypatch):
    known = Op.plan

    def plan(self, contract, target, m, dense=False):
        if contract.weight.n in (32, 128 + 64 + 128):  # k, and the others as one
            raise Refused("none")
        return known(self, contract, target, m, dense)

    monkeypatch.setattr(Op, "plan", plan)
    model, x = Attention(), x_of(4, 64)
    _, results, report = run(model, x)
    hold(model, x, results)
    assert [site.reason for site in report.sites] == [None, "none", None, None, None]
    assert together(report) == [False, False, True, False], "v and q, once q was on its own"


def test_without_times_each_is_alone():
    _, _, report = run(Attention(), x_of(4, 64))
    assert together(report) == [False] * 5


def test_those_that_differ_are_alone(timed):
    model, x = Attention(groups=(G, 2 * G, G), biases=(False, False, True)), x_of(4, 64)
    _, results, report = run(model, x)
    hold(model, x, results)
    assert together(report) == [False, False, False, True, False], "only q twice"


def test_biases_are_put_below_each_other(timed):
    model, x = Attention(biases=(True, True, True)), x_of(256)
    _, results, report = run(model, x)
    hold(model, x, results)
    assert together(report) == [False, True, True, True, False]


def test_another_model_of_the_class_and_changed_weights(timed):
    first, second, x = Attention(), Attention(seed=20), x_of(4, 64)
    compiled, _, _ = run(first, x)
    graphs = len(qinductor.reports())
    with torch.no_grad():
        for key, value in second.state_dict().items():
            first.get_buffer(key).copy_(value)
        hold(first, x, compiled(x))
    assert len(qinductor.reports()) == graphs


def test_symbolic_m(timed):
    model = Attention()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="qinductor", dynamic=True)
        for shape in ((4, 64), (8, 40)):
            hold(model, x_of(*shape), compiled(x_of(*shape)))
    assert together(qinductor.last_report()) == [False, True, True, True, False]


def test_another_x_is_another_product(timed):
    class Two(Attention):
        def forward(self, x):
            q, k, v = self.heads
            return q(x), k(x[:, 1:]), v(x.transpose(0, 1)), q(x)

    _, _, report = run(Two(), x_of(64, 64))
    assert together(report) == [False, False, False, True]


def test_an_x_that_each_product_computes(timed):
    class Scaled(Attention):
        def forward(self, x):
            q, k, v = self.heads
            return q(torch.tanh(x)), k(torch.tanh(x)), v(torch.tanh(-x)), q(torch.tanh(x))

    model, x = Scaled(), x_of(4, 64)
    _, results, report = run(model, x)
    assert together(report) == [False, True, False, True]
    for head, ours, theirs in zip(model.heads, results, model(x), strict=False):
        product_oracle(ours, theirs, torch.tanh(-x if ours is results[2] else x), head.weight())


def test_a_scale_of_the_whole_weight_is_one_of_rows(timed):
    class Whole(Linear):
        def weight(self):
            return (nibbles(self.packed).to(BF16) - 8) * self.scale[0, 0]

    model, x = Attention(), x_of(4, 64)
    for head in model.heads:
        head.__class__ = Whole
    _, results, report = run(model, x)
    hold(model, x, results)
    assert together(report) == [False, True, True, True, False]


def test_freed_weights_are_alone(timed):
    model, x = Attention(), x_of(4, 64)
    with torch.no_grad():
        wanted = model(x)
        compiled = torch.compile(model, backend="qinductor", options={"weights": "replace"})
        compiled(x)
        assert not any(together(qinductor.last_report()))
        assert qinductor.last_report().freed_bytes
        _, results, report = run(model, x)  # which takes them from their packed form
    assert together(report) == [False] * 5
    for ours, eager in zip(results, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.05)


def test_weights_that_change_beside_a_freed_one(timed):
    """Another graph frees q's: then k's and v's are not taken for it when they are packed again."""
    model, x = Attention(sizes=(64, 64, 64)), x_of(4, 64)
    q, k, v = model.heads
    compiled, before, _ = run(model, x)
    with torch.no_grad():
        wanted = v(x)
        torch.compile(q.forward, backend="qinductor", options={"weights": "replace"})(x)
        assert qinductor.last_report().freed_bytes
        k.load_state_dict(v.state_dict())
        results = compiled(x)
    product_oracle(results[1], wanted, x, v.weight())
    assert [torch.equal(a, b) for a, b in zip(results, before, strict=True)] == [
        True, False, True, True
    ]  # fmt: skip


def test_a_sibling_that_raises_stops_no_other(timed, monkeypatch):
    known = dequant_matmul.proved

    def proved(node, scope):
        if node.meta["val"].shape[1] == 32:
            raise KeyError("k")
        return known(node, scope)

    monkeypatch.setattr(dequant_matmul, "proved", proved)
    model, x = Attention(), x_of(4, 64)
    _, results, report = run(model, x)
    hold(model, x, results)
    assert [site.lowered for site in report.sites] == [True, False, True, True, True]
    assert "KeyError" in report.sites[1].reason and together(report) == [False, True, True, False]


WEIGHTS = {
    c.contract: c for c in (*CASES, *SCALED) if not getattr(c.contract, "experts", 0)
}  # fmt: skip


@pytest.mark.parametrize("contract", WEIGHTS, ids=lambda c: c.summary)
def test_the_weights_and_vectors_of_a_whole_are_those_of_its_parts(contract):
    """Of two parts of one size, and of other sizes where blocks along N allow it."""
    w = contract.weight
    for n in (w.n, 2 * w.n):
        blocks = w.bn if w.bn < w.n else n if w.bk == w.k else w.bn
        parts = [contract, at(contract, n, blocks)]
        if w.permuted or any(c.weight.n % c.weight.bn and w.bk < w.k for c in parts):
            with pytest.raises(Refused, match="computed by itself"):
                joined_contract(parts)
            continue
        whole = joined_contract(parts)
        cases = [dataclasses.replace(WEIGHTS[contract], contract=c) for c in parts]
        made = [each.make(seed=i)[-1] for i, each in enumerate(cases)]
        made = [with_table(part, made[0]) for part in made]
        one = joined(made, whole)
        assert whole.weight == one.weight.format and whole.weight.n == w.n + n
        assert torch.equal(
            dequantize(one.weight), torch.cat([dequantize(part.weight) for part in made])
        )
        for name, value in vars(one).items():
            if name != "weight" and value is not None:
                assert torch.equal(value, torch.cat([getattr(part, name) for part in made]))


def at(contract, n, bn):
    return dataclasses.replace(contract, weight=dataclasses.replace(contract.weight, n=n, bn=bn))


def with_table(part, other):
    weight = dataclasses.replace(part.weight, table=other.weight.table)
    return dataclasses.replace(part, weight=weight)


def test_tables_that_differ_are_not_joined():
    chosen = next(c for c in CASES if c.contract.weight.table is not None)
    parts = [chosen.make(seed)[-1] for seed in (0, 1)]
    with pytest.raises(Refused, match="the tables of products"):
        check_tables([part.weight for part in parts])


def test_on_a_gpu_estimates_decide():
    contract = case("int4", 1, 4096, 4096, 1, 128).contract
    wide = dataclasses.replace(contract, weight=dataclasses.replace(contract.weight, n=6144))
    plans = [DEQUANT_MATMUL.plan(c, "sm_90", None) for c in (contract, wide)]
    assert all(len(plan.us) == 15 and min(plan.us) > 0 for plan in plans)
    assert plans[0].us[0] < plans[1].us[0] < 2 * plans[0].us[0]
    assert DEQUANT_MATMUL.plan(contract, "cpu", None).us == ()
    model, options = Attention((1024, 256, 256)), {"target": "sm_90"}
    report = qinductor.explain(model, x_of(1, 1), options=options)
    assert together(report) == [False, True, True, True, False]
