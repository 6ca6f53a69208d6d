"""Weights of several contracts in one Dynamo graph: a compiled variant for each, four at most."""

import dataclasses
import gc
import threading
import weakref

import pytest
import torch

import qinductor
from qinductor import backend
from qinductor.errors import Refused
from qinductor.op import OPS
from qinductor.runtime import VARIANTS
from qinductor.weights import RESTLESS

N, K, GROUP = 64, 64, 32
X = torch.randn(4, K, generator=torch.Generator().manual_seed(1))
EAGER_REST = {"inductor": {"fallback_by_default": True}}
REQUIRE = {"patterns": {"dequant_matmul": "require"}}

# One class and one graph, yet a contract for each of these.
FOUR = {"low": 0, "high": 16}
EIGHT = {"low": -100, "high": 100}
ZEROS = {"low": 0, "high": 16, "zeros": True}
EIGHT_ZEROS = {"low": -100, "high": 100, "zeros": True}
UNSIGNED = {"low": 0, "high": 16, "zero": 0.0}
CONTRACTS = (FOUR, EIGHT, ZEROS, EIGHT_ZEROS, UNSIGNED)


class Linear(torch.nn.Module):
    """x . W^T with W = (codes - zero) * scale in groups; all zeros are 8 unless `zeros` is True."""

    def __init__(self, seed=0, low=0, high=16, zeros=False, zero=8.0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        codes = torch.randint(low, high, (N, K), generator=g, dtype=torch.int8)
        given = torch.randint(0, 16, (N, K // GROUP), generator=g).float()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", torch.rand(N, K // GROUP, generator=g) * 0.02 + 0.01)
        self.register_buffer("zero", given if zeros else torch.full_like(given, zero))

    def weight(self, dtype=torch.float32):
        scale, zero = self.scale.to(dtype)[:, :, None], self.zero.to(dtype)[:, :, None]
        return ((self.codes.view(N, -1, GROUP).to(dtype) - zero) * scale).view(N, K)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight(x.dtype))


@pytest.fixture
def products(monkeypatch):
    """The contract of each fused product that ran."""
    qinductor.load()
    found = []
    for provider in OPS["dequant_matmul"].providers.values():

        def spy(contract, x, packed, run=provider.run):
            found.append(contract)
            return run(contract, x, packed)

        monkeypatch.setattr(provider, "run", spy)
    return found


@pytest.fixture
def compiles(monkeypatch):
    """The calls of Inductor's inner compile by ours: one a variant."""
    found = []

    def inner(*args, real=backend.compile_fx_inner, **kwargs):
        found.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_fx_inner", inner)
    return found


@pytest.fixture
def packs(monkeypatch):
    """The weights that were packed at run time; one with a NaN is of no format."""
    (pattern,) = (type(p) for p in qinductor.load() if p.name == "dequant_matmul")
    found = []

    def lower(self, node, scope, planner, real=pattern.lower):
        lowering = real(self, node, scope, planner)
        check([scope.value(leaf) for leaf in lowering.leaves])

        def pack(leaves):
            found.append(leaves)
            check(leaves)
            return lowering.pack(leaves)

        return dataclasses.replace(lowering, pack=pack)

    def check(leaves):
        if any(leaf.float().isnan().any() for leaf in leaves):
            raise Refused("a weight with a NaN is of no format")

    monkeypatch.setattr(pattern, "lower", lower)
    return found


def spoilt(model):
    """The model with a weight that no contract fits, see `packs`."""
    model.scale[3, 1] = float("nan")
    return model


def compiled(model, **options):
    return torch.compile(model, backend="qinductor", **options)


def check(run, model, products, x=X, fused=1):
    """`run` gives eager's result, and `fused` fused products ran on the way."""
    products.clear()
    out, expected = run(x), model(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=0.01 * float(expected.abs().max()))
    assert len(products) == fused


def test_a_layer_of_another_contract_gets_a_variant(products, compiles):
    models = [Linear(1, **FOUR), Linear(2, **EIGHT)]
    runs = [compiled(model) for model in models]
    for _ in range(3):
        for run, model in zip(runs, models, strict=True):
            check(run, model, products)
    assert len(compiles) == 2
    (report,) = qinductor.reports()
    assert (report.variants, report.lowered) == (2, 2)
    assert [site.variant for site in report.sites] == [1, 2]
    assert "int4[64,64]" in report.sites[0].contract and "int8[64,64]" in report.sites[1].contract
    (note,) = report.notes
    assert note.startswith("variant 2 was compiled at run time:") and "compiled for" in note
    assert "(1 graph, 2 variants; " in str(report) and " (variant 2)  " in str(report)


def test_layers_that_take_turns_are_neither_packed_nor_compiled_again(products, compiles, packs):
    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            kinds = [FOUR, EIGHT] * 8
            self.layers = torch.nn.ModuleList(Linear(i, **kind) for i, kind in enumerate(kinds))
            for layer in self.layers:
                layer.compile(backend="qinductor")

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Stack()
    model(X)
    compiles.clear(), packs.clear(), products.clear()
    for _ in range(5):
        out = model(X)
    assert (len(compiles), len(packs), len(products)) == (0, 0, 5 * 16)
    assert {contract.weight.codes for contract in products} == {"int4", "int8"}
    x = X
    for layer in model.layers:
        x = x @ layer.weight().t()
    torch.testing.assert_close(out, x, rtol=1e-3, atol=1e-3 * float(x.abs().max()))


def test_the_fifth_contract_runs_on_stock_inductor(products, compiles):
    models = [Linear(i, **kind) for i, kind in enumerate(CONTRACTS)]
    runs = [compiled(model) for model in models]
    for _ in range(3):
        for i, (run, model) in enumerate(zip(runs, models, strict=True)):
            check(run, model, products, fused=int(i < VARIANTS))
    assert len(compiles) == VARIANTS == 4
    (report,) = qinductor.reports()
    assert (report.variants, report.lowered) == (4, 4)
    assert len({site.contract for site in report.sites}) == 4
    limit, last = report.notes[3:]
    assert limit == "4 variants of a graph are compiled at most"
    assert last.startswith("at run time, not lowered: ") and "compiled for" in last
    models[4].load_state_dict(models[1].state_dict())
    check(runs[4], models[4], products)


def test_a_weight_of_no_format_is_compiled_for_once(products, compiles, packs):
    model, other = Linear(1), spoilt(Linear(2))
    run, unfused = compiled(model, options=EAGER_REST), compiled(other, options=EAGER_REST)
    check(run, model, products)
    for i in range(4):
        products.clear()
        torch.testing.assert_close(unfused(X), other(X), equal_nan=True)
        assert not products
        assert (len(compiles), len(packs)) == (2, 1), f"call {i} tried again"
        check(run, model, products)
    report = qinductor.last_report()
    assert (report.variants, report.lowered) == (2, 1)
    assert "is of no format" in report.sites[1].reason
    assert "at run time, not lowered" in report.notes[-1]
    other.load_state_dict(Linear(3).state_dict())
    check(unfused, other, products)


@pytest.mark.parametrize("kind", [EIGHT, ZEROS], ids=["codes", "zeros"])
def test_m_stays_symbolic_in_a_variant(products, compiles, kind):
    model, other = Linear(1), Linear(2, **kind)
    run, second = compiled(model, dynamic=True), compiled(other, dynamic=True)
    check(run, model, products)
    for m in (3, 2, 17, 40, 5):
        x = torch.randn(m, K)
        check(second, other, products, x)
        check(run, model, products, x)
    assert len(compiles) == 2
    (report,) = qinductor.reports()
    assert report.lowered == 2


def test_what_a_variant_assumes_of_sizes_is_looked_at_in_every_call(
    products, compiles, monkeypatch
):
    """Here the second compile takes for granted that M is below 10."""
    model, other = Linear(1), Linear(2, **EIGHT)
    run, second = compiled(model, dynamic=True), compiled(other, dynamic=True)
    check(run, model, products)
    match = backend.Matching._match

    def assuming(self, graph, blocked):
        values = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
        (m,) = [value for value in values if isinstance(value, torch.SymInt)]
        assert m < 10
        return match(self, graph, blocked)

    monkeypatch.setattr(backend.Matching, "_match", assuming)
    check(second, other, products, torch.randn(3, K))
    check(second, other, products, torch.randn(9, K))
    check(second, other, products, torch.randn(10, K), fused=0)
    check(second, other, products, torch.randn(8, K))
    assert len(compiles) == 2


def test_a_weight_that_comes_to_have_another_contract(products, compiles):
    model = Linear(1)
    states = [Linear(2, **kind).state_dict() for kind in (FOUR, EIGHT, ZEROS)]
    run = compiled(model)
    for _ in range(3):
        for state in states:
            model.load_state_dict(state)
            for _ in range(2):
                check(run, model, products)
    assert len(compiles) == 3


def test_the_variant_that_lowers_most_is_taken(products, packs):
    class Two(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.first, self.second = Linear(seed), Linear(seed + 1)

        def forward(self, x):
            return self.second(self.first(x))

    good, odd, also = Two(1), Two(3), Two(5)
    spoilt(odd.second)
    runs = [compiled(model, options=EAGER_REST) for model in (good, odd, also)]
    check(runs[0], good, products, fused=2)
    for _ in range(2):
        products.clear()
        torch.testing.assert_close(runs[1](X), odd(X), equal_nan=True)
        assert len(products) == 1
    for _ in range(2):
        check(runs[2], also, products, fused=2)
    assert qinductor.last_report().variants == 2


def test_under_require_a_weight_of_no_format_raises(products, packs):
    model, other = Linear(1), spoilt(Linear(2))
    run, odd = (compiled(m, options={**REQUIRE, **EAGER_REST}) for m in (model, other))
    check(run, model, products)
    for _ in range(2):
        with pytest.raises(qinductor.RequiredPatternError, match="is of no format"):
            odd(X)
    check(run, model, products)


def test_under_require_a_variant_is_compiled(products):
    model, other = Linear(1), Linear(2, **EIGHT)
    for each in (model, other):
        check(compiled(each, options=REQUIRE), each, products)


def test_an_error_in_a_later_compile_runs_unfused(products, monkeypatch):
    model, other = Linear(1), Linear(2, **EIGHT)
    run, second = compiled(model), compiled(other)
    check(run, model, products)

    def fails(*args, **kwargs):
        raise ZeroDivisionError("a slip of ours")

    monkeypatch.setattr(backend, "compile_fx", fails)
    for _ in range(2):
        check(second, other, products, fused=0)
    check(run, model, products)
    assert "a slip of ours" in str(qinductor.last_report())


def test_threads_compile_one_variant(products, compiles):
    model, others = Linear(1), [Linear(i, **EIGHT) for i in range(4)]
    run, runs = compiled(model), [compiled(other) for other in others]
    run(X)
    expected, wrong = [other(X) for other in others], []
    start = threading.Barrier(len(others))

    def work(i):
        start.wait()
        for _ in range(30):
            if not torch.allclose(runs[i](X), expected[i], atol=1e-3):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(compiles) == 2


def test_the_weights_of_a_variant_die_with_their_model():
    model, other = Linear(1), Linear(2, **EIGHT)
    run, second = compiled(model), compiled(other)
    run(X), second(X), second(X)
    assert qinductor.last_report().variants == 2
    leaves = [weakref.ref(buffer) for buffer in other.buffers()]
    del other, second
    gc.collect()
    assert [leaf() for leaf in leaves] == [None] * 3
    torch.testing.assert_close(run(X), model(X))


@pytest.mark.parametrize("what", ["int8", "int4"])
def test_variants_of_tensor_subclasses(products, compiles, what):
    ao = pytest.importorskip("torchao.quantization")
    models = []
    for high in (8, 100):
        layer = torch.nn.Sequential(torch.nn.Linear(K, N, dtype=torch.bfloat16))
        if what == "int4":
            config = ao.IntxWeightOnlyConfig(
                weight_dtype=torch.int4, granularity=ao.PerGroup(GROUP)
            )
        else:
            config = ao.Int8WeightOnlyConfig()
        ao.quantize_(layer.requires_grad_(False), config)
        codes = torch.randint(-8, high, (N, K), dtype=torch.int8)
        layer[0].weight.qdata.copy_(codes)
        models.append(layer)
    runs = [compiled(model) for model in models]
    for _ in range(3):
        for run, model in zip(runs, models, strict=True):
            check(run, model, products, X.bfloat16())
    assert len(compiles) == 2
    assert [s.contract.split()[2].split("[")[0] for s in qinductor.last_report().sites] == [
        "int4", "int8"
    ]  # fmt: skip


def test_a_call_that_runs_unfused_leaves_no_arguments_behind(packs):
    model, other = Linear(1), spoilt(Linear(2))
    run, unfused = compiled(model, options=EAGER_REST), compiled(other, options=EAGER_REST)
    run(X), unfused(X), unfused(X)
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, K)
        kept = weakref.ref(x)
        unfused(x)
        del x
        assert kept() is None
    finally:
        gc.enable()


def test_unfit_weights_that_change_on_every_call_are_demoted(products, compiles, packs):
    model, other = Linear(1), spoilt(Linear(2))
    run, unfused = compiled(model, options=EAGER_REST), compiled(other, options=EAGER_REST)
    check(run, model, products)
    tried = []
    for _ in range(3 * RESTLESS):
        other.zero.add_(1)
        packs.clear()
        torch.testing.assert_close(unfused(X), other(X), equal_nan=True)
        tried.append(len(packs))
    assert tried[-RESTLESS:] == [0] * RESTLESS, "it still packs on every call"
    assert len(compiles) <= VARIANTS
