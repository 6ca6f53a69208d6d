"""The choice of routes: rungs of the table, the fewest packed copies, estimates; no GPU."""

import dataclasses
import itertools
import json
import logging
import random
import time

import pytest
import sympy
import torch

import qinductor
from qinductor import tables
from qinductor.dispatch import SLACK, able, choose, planned
from qinductor.errors import Refused
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, DequantMatmul, case, reference
from qinductor.op import GRID, INFINITE, Op, Plan
from qinductor.rates import BANDWIDTH, RATES, M, evaluator, rates, roofline
from qinductor.tables import device, family, key

qinductor.load()
GPU, TARGET = "NVIDIA H200", "sm_90"
INT4 = case("int4", 1, 4096, 4096, 1, 128).contract
ZEROS = {"arithmetic": "(q-z)*s", "zero": torch.int8}


class Fake:
    """A provider for sm_90 that packs the tensors it is told to."""

    dense = reference = False

    def __init__(self, name, packs=(), limit=INFINITE, **more):
        self.name, self.packs, self.largest = name, packs or (name,), limit
        vars(self).update(more)

    def runs_on(self, target):
        return target == TARGET

    def why_not(self, contract):
        return None

    def limit(self, contract, dense=False):
        return self.largest

    def operands(self, contract):
        return dict.fromkeys(self.packs, ((contract.weight.n, contract.weight.k), torch.int8))

    def run(self, contract, x, packed, config=None):
        return x


class Tiled(Fake):
    """A provider with configs; one for few rows, one for many is its own choice."""

    def configs(self, contract, m):
        return ["t8", "t64", "old"] if m <= 32 else ["t64", "t8"]


def op_of(*providers):
    """An operator with these providers and the reference."""
    made = Op("fake", DequantMatmul, reference, DEQUANT_MATMUL.cost, DEQUANT_MATMUL.weight)
    for provider in (Fake("reference", reference=True), *providers):
        made.register(provider)
    return made


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A device of which `tmp_path` holds the user's table and tmp_path/shipped what we ship."""
    monkeypatch.setattr(tables, "device", lambda target: GPU if target == TARGET else None)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path))
    tables.load.cache_clear()
    yield tmp_path
    tables.load.cache_clear()


def written(folder, *entries):
    """Writes a table; an entry is (contract, {M: row}, versions)."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {key("fake", entry): {"versions": now, "us": us} for entry, us, now in entries}
    text = json.dumps({"device": GPU, "entries": held})
    (folder / tables.file_of(GPU)).write_text(text)
    tables.load.cache_clear()


def sized(n, k, contract=INT4):
    return dataclasses.replace(contract, weight=dataclasses.replace(contract.weight, n=n, k=k))


def every(row):
    return dict.fromkeys(GRID, row)


# The choice -----------------------------------------------------------------------------------


def random_choice(seed):
    """(rows, packs) as a table might have them; times near one another, tensors shared."""
    draw = random.Random(seed)
    names = [f"p{i}" for i in range(draw.randint(1, 5))]
    tensors = {f"t{i}": draw.choice([10, 100, 100, 1000]) for i in range(4)}
    packs = {name: draw.sample(sorted(tensors), draw.randint(1, 3)) for name in names}
    rows = []
    for _ in range(draw.randint(1, 8)):
        there = draw.sample(names, draw.randint(1, len(names)))
        rows.append({name: draw.choice([1.0, 1.02, 1.04, 1.051, 1.2, 3.0]) for name in there})
    return rows, lambda route: {name: tensors[name] for name in packs[route]}


@pytest.mark.parametrize("seeds", range(0, 400, 100))
def test_no_route_is_slower_than_the_slack_and_no_choice_packs_less(seeds):
    for seed in range(seeds, seeds + 100):
        rows, packs = random_choice(seed)
        chosen = choose(rows, packs)
        for row, route in zip(rows, chosen, strict=True):
            assert row[route] <= SLACK * min(row.values()), seed

        def cost(routes, packs=packs):
            held = {name: size for route in routes for name, size in packs(route).items()}
            return sum(held.values()), len(held)

        good = [[r for r, t in row.items() if t <= SLACK * min(row.values())] for row in rows]
        least = min(map(cost, itertools.product(*good)))
        assert cost(chosen) == least, seed


def test_of_what_is_packed_anyway_the_fastest_is_chosen():
    rows = [{"a": 1.0, "b": 1.04, "c": 1.01}, {"a": 2.0, "b": 1.0}]
    needs = {"a": {"w": 5}, "b": {"v": 5}, "c": {"v": 5}}
    assert choose(rows, needs.__getitem__) == ["c", "b"]
    assert choose([{"a": 1.0, "b": 1.051}, {"a": 2.0, "b": 1.0}], needs.__getitem__) == ["a", "b"]


def test_a_route_is_not_passed_over_for_one_that_packs_more():
    needs = {"a": {"w": 5, "s": 1}, "b": {"w": 5}}
    assert choose([{"a": 1.0, "b": 1.03}], needs.__getitem__) == ["b"]
    assert choose([{"a": 1.0, "b": 1.03}, {"a": 1.0, "b": 2.0}], needs.__getitem__) == ["a", "a"]


# Plans from a table ---------------------------------------------------------------------------


def test_ranges_of_m(gpu):
    times = {m: {"mma@t8": 5.0 + m / 8, "mma@t64": 7.0, "wide": 1000 / m} for m in GRID}
    toy = op_of(Tiled("mma"), Fake("wide"))
    written(gpu / "tuned", (INT4, times, {}))
    plan = toy.plan(INT4, TARGET, None)
    # 16: 7 each, the name decides; from 256 on 1000 / m is least; borders are geometric means
    assert plan.steps == ((11, "mma@t8"), (181, "mma@t64"), (INFINITE, "wide"))
    assert plan.rung == "tuned here"
    t8, t64 = "mma@t8", "mma@t64"
    for m, route in ((1, t8), (11, t8), (12, t64), (181, t64), (182, "wide")):
        assert toy.plan(INT4, TARGET, m).steps == ((INFINITE, route),), m
    assert toy.plan(INT4, TARGET, 100_000).steps == ((INFINITE, "wide"),)


def test_a_border_is_no_further_than_the_limit(gpu):
    toy = op_of(Fake("few", limit=17), Fake("many"))
    written(gpu / "tuned", (INT4, every({"few": 1.0, "many": 9.0}), {}))
    assert toy.plan(INT4, TARGET, None).steps == ((17, "few"), (INFINITE, "many"))
    assert toy.plan(INT4, TARGET, 17).steps == ((17, "few"),)
    assert toy.plan(INT4, TARGET, 18).steps == ((INFINITE, "many"),)


def test_the_reference_runs_only_what_nothing_else_can(gpu):
    toy = op_of(Fake("few", limit=100))
    written(gpu / "tuned", (INT4, every({"few": 9.0, "reference": 1.0}), {}))
    assert toy.plan(INT4, TARGET, None).steps == ((100, "few"), (INFINITE, "reference"))
    with pytest.raises(Refused, match="few: M is 101; it takes up to 100"):
        toy.plan(INT4, TARGET, 101)
    with pytest.raises(Refused, match="no provider for sm_90 takes it: only the reference"):
        op_of().plan(INT4, TARGET, 1)


def test_a_provider_that_misses_something_is_passed_over_with_the_reason(gpu):
    entry = op_of(Fake("here", missing=lambda: None), Fake("lacks", missing=lambda: "no Triton"))
    limits, reasons = able(entry, INT4, TARGET, 1)
    assert "here" in limits and "lacks" not in limits and reasons == ["lacks: no Triton"]


def test_a_dense_provider_only_where_it_is_allowed(gpu):
    toy = op_of(Fake("packed"), Fake("wide", dense=True))
    written(gpu / "tuned", (INT4, every({"packed": 2.0, "wide": 1.0}), {}))
    assert toy.plan(INT4, TARGET, None).steps == ((INFINITE, "packed"),)
    assert toy.plan(INT4, TARGET, None, dense=True).steps == ((INFINITE, "wide"),)


def test_stale_routes_are_skipped(gpu):
    row = {"gone": 1.0, "mma@t16": 1.1, "mma": 1.2, "mma@t8": 5.0, "plain@t8": 1.3, "plain": 6.0}
    written(gpu / "tuned", (INT4, every(row), {}))
    toy = op_of(Tiled("mma"), Fake("plain"))
    assert toy.plan(INT4, TARGET, 4).steps == ((INFINITE, "mma@t8"),)
    # a config that is none at this M gives way to the provider's own choice
    written(gpu / "tuned", (INT4, every({"mma@old": 1.0, "plain": 6.0}), {}))
    steps = toy.plan(INT4, TARGET, None).steps
    assert steps[0] == (45, "mma@old") and steps[-1] == (INFINITE, "mma@t64")


def test_a_provider_of_another_version_is_as_if_not_measured(gpu):
    toy = op_of(Fake("new", version=2), Fake("same", version=7))
    written(gpu / "tuned", (INT4, every({"new": 1.0, "same": 5.0}), {"new": 1, "same": 7}))
    assert toy.plan(INT4, TARGET, None).steps == ((INFINITE, "same"),)
    written(gpu / "tuned", (INT4, every({"new": 1.0, "same": 5.0}), {"new": 2, "same": 7}))
    assert toy.plan(INT4, TARGET, None).steps == ((INFINITE, "new"),)
    written(gpu / "tuned", (INT4, every({"new": 1.0}), {}))  # 1 is meant
    assert toy.plan(INT4, TARGET, None).rung == "heuristic"


def test_rows_that_were_not_measured_are_estimated(gpu):
    slow = {"seconds": lambda contract: sympy.Integer(5)}
    toy = op_of(Fake("slow", **slow), Fake("fast", seconds=lambda contract: sympy.Integer(1)))
    written(gpu / "tuned", (INT4, {m: {"slow": 1.0, "fast": 2.0} for m in (2, 4)}, {}))
    plan = toy.plan(INT4, TARGET, None)
    assert plan.steps == ((11, "slow"), (INFINITE, "fast")), "also for half and twice as many"
    assert plan.rung == "tuned here for M 1 to 8, else heuristic"
    assert toy.plan(INT4, TARGET, 4).rung == "tuned here"
    assert toy.plan(INT4, TARGET, 64).rung == "heuristic"


# Rungs ----------------------------------------------------------------------------------------


def rung(contract, gpu, shipped=(), mine=()):
    toy = op_of(Fake("a"), Fake("b"))
    written(gpu / "shipped", *shipped)
    written(gpu / "tuned", *mine)
    plan = toy.plan(contract, TARGET, None)
    return plan.steps[0][1], plan.rung


A, B = every({"a": 1.0, "b": 2.0}), every({"a": 2.0, "b": 1.0})


def test_the_user_s_times_win_over_those_we_ship(gpu):
    assert rung(INT4, gpu, [(INT4, A, {})]) == ("a", "tuned for NVIDIA H200")
    assert rung(INT4, gpu, [(INT4, A, {})], [(INT4, B, {})]) == ("b", "tuned here")
    assert rung(INT4, gpu, [(INT4, A, {})], [(sized(4096, 8192), B, {})])[0] == "a"


def test_the_user_s_rows_are_laid_over_those_we_ship(gpu):
    toy = op_of(Fake("a"), Fake("b"))
    written(gpu / "shipped", (INT4, A, {}))
    written(gpu / "tuned", (INT4, {1: B[1]}, {}))
    assert toy.plan(INT4, TARGET, None).steps == ((1, "b"), (INFINITE, "a"))


def test_the_nearest_n_and_k_of_the_family(gpu):
    shipped = [(sized(4096, 4096), A, {}), (sized(28672, 4096), B, {})]
    assert rung(sized(5120, 5120), gpu, shipped) == (
        "a",
        "tuned for NVIDIA H200, nearest 4096x4096",
    )
    assert rung(sized(14336, 4096), gpu, shipped)[0] == "b"
    assert rung(sized(4096, 16384), gpu, shipped)[0] == "a", "four times K is near enough"
    assert rung(sized(4096, 16512), gpu, shipped) == ("a", "heuristic")
    assert rung(sized(1000, 4096), gpu, shipped)[1] == "heuristic"


def test_a_kin_family_where_its_own_was_not_measured(gpu):
    zeros = case("uint4", 1, 4096, 4096, 1, 128, **ZEROS).contract
    other = case("uint4", 1, 4096, 4096, 1, 64, **ZEROS).contract
    assert rung(zeros, gpu, [(INT4, B, {})]) == (
        "b", "tuned for NVIDIA H200, nearest 4096x4096 of int4 q*s 128",
    )  # fmt: skip
    # a family that shares more words is nearer than one of the same N and K
    both = [(INT4, B, {}), (sized(8192, 4096, other), A, {})]
    assert rung(zeros, gpu, both)[0] == "a"
    for codes, x in (("int3", torch.bfloat16), ("int4", torch.float16), ("table4", torch.bfloat16)):
        stranger = case(codes, 1, 4096, 4096, 1, 128, x).contract
        assert rung(stranger, gpu, [(INT4, B, {})])[1] == "heuristic", stranger.summary
    e2m1 = case("float4_e2m1fn", 1, 4096, 4096, 1, 32).contract
    nf4 = case("table4", 1, 4096, 4096, 1, 64).contract
    assert "nearest" in rung(e2m1, gpu, [(nf4, B, {})])[1]


def test_an_expert_is_a_weight(gpu):
    experts = dataclasses.replace(INT4, experts=8)
    assert rung(experts, gpu, [(INT4, B, {})]) == ("b", "tuned for NVIDIA H200")
    assert rung(experts, gpu, [(INT4, B, {}), (experts, A, {})])[0] == "a"


def test_families():
    text, n, k = family(case("int8", 1, 256, 512, 1, 512).contract)
    assert (n, k) == (256, 512) and "weight.bk=K" in text and "weight.n" not in text
    assert text == family(case("int8", 1, 64, 128, 1, 128).contract)[0], "both are channels"
    assert text == family(case("int8", 1, 64, 128, 1, 128, bias=True).contract)[0]
    assert text != family(case("int8", 1, 256, 512, 1, 128).contract)[0]
    tensor = family(case("int8", 1, 256, 512, 256, 512).contract)[0]
    assert "weight.bn=N weight.bk=K" in tensor


def test_another_operator_s_times_are_not_read(gpu):
    toy = op_of(Fake("a"), Fake("b"))
    written(gpu / "tuned", (INT4, B, {}))
    path = gpu / "tuned" / tables.file_of(GPU)
    path.write_text(path.read_text().replace('"fake ', '"other '))
    tables.load.cache_clear()
    assert toy.plan(INT4, TARGET, None).rung == "heuristic"


# Files ----------------------------------------------------------------------------------------

CORRUPT = {
    "cut off": '{"device": "NVIDIA H200", "entr',
    "not ours": "[1, 2]",
    "no entries": "{}",
    "entries are a list": '{"entries": [1]}',
    "a key": '{"entries": {"x": {"versions": {}, "us": {}}}}',
    "an M": '{"entries": {"fake 1x1 a=b": {"versions": {}, "us": {"one": {}}}}}',
    "a time": '{"entries": {"fake 1x1 a=b": {"versions": {}, "us": {"1": {"a": -1}}}}}',
    "no time": '{"entries": {"fake 1x1 a=b": {"versions": {}, "us": {"1": {"a": NaN}}}}}',
    "versions": '{"entries": {"fake 1x1 a=b": {"versions": 3, "us": {}}}}',
    "bytes": "\xff\xfe",
}


@pytest.mark.parametrize("text", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_ignored_and_said_once(gpu, caplog, text):
    toy = op_of(Fake("a"), Fake("b"))
    written(gpu / "shipped", (INT4, B, {}))
    path = gpu / "tuned" / tables.file_of(GPU)
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        plan = toy.plan(INT4, TARGET, None)
        tables.load.cache_clear()
        toy.plan(INT4, TARGET, 1)
    assert (plan.steps[0][1], plan.rung) == ("b", "tuned for NVIDIA H200")
    said = [record.getMessage() for record in caplog.records if "no table" in record.getMessage()]
    assert len(said) == 1 and str(path) in said[0]


def test_where_tables_are(monkeypatch, tmp_path):
    monkeypatch.delenv("QINDUCTOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables.own() == tmp_path / "qinductor" / "tuned"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tables.own() == tmp_path / ".cache" / "qinductor" / "tuned"
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path / "q"))
    assert tables.own() == tmp_path / "q" / "tuned"
    assert tables.file_of("NVIDIA H200") == "NVIDIA_H200.json"
    assert tables.file_of("Intel(R) Xeon(R) @ 2.1, 1 thread") == "Intel_R_Xeon_R_2.1_1_thread.json"


def test_the_device(monkeypatch):
    """The real look-up, which the other tests replace."""
    assert device("cpu").endswith(", 1 thread")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda: pytest.fail("initialised CUDA")
    )
    assert device("sm_90") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    assert (device("sm_90"), device("sm_100"), device("xpu")) == (GPU, None, None)


def test_every_shipped_table_can_be_read():
    for path in tables.SHIPPED.glob("*.json"):
        assert tables.read(path), path


# Estimates ------------------------------------------------------------------------------------


def test_rates():
    assert rates("cpu") is None
    assert rates("sm_90") == RATES["sm_90"] == rates("sm_90a"[:5])
    assert rates("sm_89") == RATES["sm_80"] and rates("sm_120") == RATES["sm_100"]
    assert rates("sm_75") == RATES["sm_80"]


def test_a_roofline_is_the_longer_of_both():
    least = evaluator(roofline(DEQUANT_MATMUL.cost(INT4)))
    at = rates(TARGET)
    cost = DEQUANT_MATMUL.cost(INT4)
    for m, bound in ((1, cost["bytes"] / 4.2e12), (8192, cost["flops"] / 790e12)):
        assert least(m, at) == pytest.approx(float(bound.subs(M, m)))


def test_estimates_choose(monkeypatch):
    """Two copies of the weight are read by one, the other adds flops."""
    passes = {"seconds": lambda c: 1e-6 + DEQUANT_MATMUL.cost(c)["bytes"] * 2 / BANDWIDTH}
    steep = {"seconds": lambda c: M * 2e-6}
    plan = op_of(Fake("passes", **passes), Fake("steep", **steep)).plan(INT4, TARGET, None)
    assert [route for _, route in plan.steps] == ["steep", "passes"] and plan.rung == "heuristic"


@pytest.mark.parametrize("n, k", [(4096, 4096), (2112, 7168), (28672, 4096)])
def test_estimates_grow(n, k):
    """With M, and with N and K; and none is below the roofline."""
    at, seen = rates(TARGET), []
    for name in DEQUANT_MATMUL.providers:
        provider = DEQUANT_MATMUL.providers[name]
        small, large = sized(n, k), sized(2 * n, 2 * k)
        if not hasattr(provider, "seconds") or provider.why_not(small) is not None:
            continue
        times, larger = evaluator(provider.seconds(small)), evaluator(provider.seconds(large))
        least = evaluator(roofline(DEQUANT_MATMUL.cost(small)))
        values = [times(m, at) for m in GRID]
        assert values == sorted(values), name
        assert all(larger(m, at) > times(m, at) for m in GRID), name
        assert all(times(m, at) >= 0.99 * least(m, at) for m in GRID), name
        seen.append(name)
    assert "aten.int4pack_mm_cuda" in seen


def test_the_estimate_of_torch_s_int4_kernel():
    """As measured on an H200 (design notes), to within 15 %."""
    provider = DEQUANT_MATMUL.providers["aten.int4pack_mm_cuda"]
    measured = {(4096, 4096): {1: 7.0}, (8192, 28672): {1: 63.8, 16: 268.7, 64: 1039.4},
                (2112, 7168): {1: 7.6, 16: 19.3, 64: 69.4}}  # fmt: skip
    for (n, k), times in measured.items():
        estimate = evaluator(provider.seconds(sized(n, k)))
        for m, us in times.items():
            assert estimate(m, rates(TARGET)) * 1e6 == pytest.approx(us, rel=0.15), (n, k, m)


def test_planning_is_fast_and_done_once(gpu):
    entries = [(sized(256 * i, 4096), A, {}) for i in range(1, 200)]
    written(gpu / "tuned", *entries)
    toy = op_of(Fake("a"), Fake("b"), Tiled("c"), Fake("d", seconds=lambda c: 2 * M / BANDWIDTH))
    toy.plan(sized(4000, 4096), TARGET, None)  # reads the file
    for measured in (True, False):
        start = time.perf_counter()
        for i in range(10):
            shape = (4001 + i, 4096) if measured else (64 + i, 64)
            plan = toy.plan(sized(*shape), TARGET, None)
            assert ("nearest" in plan.rung) is measured
        each = (time.perf_counter() - start) / 10
        assert each < 0.05, "5 ms are meant; this machine may be busy"
    assert toy.plan(sized(*shape), TARGET, None) is plan
    assert planned(toy, sized(*shape), TARGET, None, False) is plan


def test_a_provider_that_comes_later_is_seen(gpu):
    toy = op_of(Fake("a", seconds=lambda c: sympy.Integer(2)))
    assert toy.plan(INT4, TARGET, None).steps == ((INFINITE, "a"),)
    toy.register(Fake("b", seconds=lambda c: sympy.Integer(1)))
    assert toy.plan(INT4, TARGET, None).steps == ((INFINITE, "b"),)


# On a CPU, end to end -------------------------------------------------------------------------


class Int4(torch.nn.Module):
    """A weight of int4 codes in groups, as plain PyTorch has it."""

    def __init__(self, n=64, k=128, g=32):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        codes = torch.randint(-8, 8, (n, k), generator=made, dtype=torch.int8)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", torch.rand(n, k // g, generator=made).bfloat16())

    def forward(self, x):
        scale = self.scale.repeat_interleave(self.codes.shape[1] // self.scale.shape[1], 1)
        return torch.nn.functional.linear(x, self.codes.bfloat16() * scale)


def test_a_table_of_the_cpu_is_used_and_the_report_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "device", lambda target: "A CPU" if target == "cpu" else None)
    module, x = Int4(), torch.randn(4, 128).bfloat16()
    (before,) = qinductor.explain(module, x).sites
    assert (before.provider, before.rung) == ("aten.int4pack_mm (M <= 15)", "limits")
    folder = tables.own()
    folder.mkdir(parents=True)
    contract = case("int4", 1, 64, 128, 1, 32).contract
    row = {"aten.int4pack_mm": 9.0, "onednn.dequant_strips": 4.0, "onednn.dense": 1.0}
    held = {key("dequant_matmul", contract): {"versions": {}, "us": {"4": row}}}
    (folder / "A_CPU.json").write_text(json.dumps({"device": "A CPU", "entries": held}))
    tables.load.cache_clear()
    with torch.no_grad():
        compiled = torch.compile(module, backend="qinductor")
        assert torch.allclose(compiled(x), module(x), rtol=0.05, atol=0.05)
    report = qinductor.last_report()
    (site,) = report.sites
    assert (site.provider, site.rung) == ("onednn.dequant_strips", "tuned here")
    assert "onednn.dequant_strips [tuned here]" in str(report)
    assert report.to_dict()["sites"][0]["rung"] == "tuned here"
    (dynamic,) = qinductor.explain(module, x, dynamic=True).sites
    assert dynamic.provider == "aten.int4pack_mm (M <= 1), onednn.dequant_strips (M > 1)"
    assert dynamic.rung == "tuned here for M 2 to 8, else limits"
    tables.load.cache_clear()


def test_a_golden_graph_reads_no_table(monkeypatch):
    from qinductor.testing import rewritten

    monkeypatch.setattr(tables, "device", lambda target: pytest.fail("looked for a table"))
    found = rewritten(Int4, torch.randn(4, 128).bfloat16())
    assert found.report.sites[0].rung == "limits"


def test_a_golden_graph_names_each_provider_once(monkeypatch):
    from qinductor.testing import rewritten

    plan = Plan(((1, "a@x"), (2, "a@y"), (3, "b"), (INFINITE, "aten.int4pack_mm")))
    monkeypatch.setattr(Plan, "__str__", lambda self: plan_text)
    plan_text = ",".join(f"{limit}:{route}" for limit, route in plan.steps)
    found = rewritten(Int4, torch.randn(4, 128).bfloat16())
    assert "    a, b, aten.int4pack_mm\n" in found.after + "\n"
