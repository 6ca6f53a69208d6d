"""aten.mm_dense: W kept in bf16. Exactness, what is refused, when it is chosen, its bytes."""

import dataclasses
import json
import math

import block32
import pytest
import sympy
import torch
from models import FP32
from scaled_products import made
from served import Recorder

import qinductor
from qinductor import dispatch, tables
from qinductor.contracts import difference
from qinductor.errors import Refused
from qinductor.kernels import cute_cache
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, powers_of_two
from qinductor.kernels.scaled_matmul_cases import (
    BF16,
    E8M0,
    FP8,
    FP16,
    INT8,
    WIDE8,
    case,
    wide,
)
from qinductor.op import GRID, INFINITE, split
from qinductor.serving import cuda
from qinductor.testing import rewritten

qinductor.load()
DENSE = SCALED_MATMUL.providers["aten.mm_dense"]
NATIVE = "triton.scaled_mma"
N, K = 4096, 2048
BLOCK32 = case(FP8, 1, N, K, 32, 32, group=32, powers=True).contract
GPU, TARGET = "NVIDIA Test", "sm_90"


def like(**changes):
    return dataclasses.replace(BLOCK32, **changes)


@pytest.mark.parametrize(
    ("contract", "reason"),
    [
        (like(powers=False), "scales may be no powers of two"),
        (like(out=FP16), "the result is fp16"),
        (like(bias=FP32), "the bias fp32"),
        (like(zero=INT8), "a has zero points"),
        (like(experts=2), "there are 2 experts"),
        (case("int8", 1, 64, 64, 1, 64, INT8, powers=True).contract, "int8 times int8"),
        (case("int4", 1, 64, 64, 1, 64, powers=True).contract, "float8_e4m3fn times int4"),
        (like(weight=dataclasses.replace(BLOCK32.weight, n=0)), f"W is 0x{K}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(contract, reason):
    assert reason in DENSE.why_not(contract)


@pytest.mark.parametrize("scale", [FP32, E8M0], ids=str)
@pytest.mark.parametrize("codes", [FP8, WIDE8])
def test_nothing_but_sums_is_rounded(codes, scale):
    """W is exact, and so is a: of one column the product has one rounding."""
    chosen = case(codes, 5, 72, 304, 32, 32, group=32, powers=True, scale=scale, weight_scale=scale)
    contract, (a, s, source) = chosen.contract, made(chosen, 5, False)
    (w,) = DENSE.pack(contract, source).values()
    x, y = wide(contract, a, s, source)
    assert w.dtype is BF16 and torch.equal(w.double(), y)
    narrow = case(codes, 5, 72, 1, 32, 1, group=1, powers=True, scale=scale).contract
    first = a[:, :1].contiguous(), s[:, :1].contiguous()
    out = DENSE.run(narrow, first, [w[:, :1].contiguous()])
    assert not difference(out, (x[:, :1] @ y[:, :1].t()).float().to(BF16))


def test_scales_that_are_no_powers_are_not_packed():
    chosen = dataclasses.replace(case(FP8, 1, 64, 64, 32, 32, group=32), name="")
    _, _, source = chosen.make()
    with pytest.raises(Refused, match="not exact in bf16"):
        DENSE.pack(like(), source)
    held = source.weight
    far = dataclasses.replace(held, scale=torch.full((2, 2), 2.0**-127))
    with pytest.raises(Refused, match="not exact in bf16"):
        DENSE.pack(like(), dataclasses.replace(source, weight=far))


@pytest.mark.parametrize(
    ("value", "is_power"),
    [(1.0, True), (2.0**-100, True), (2.0**100, True), (2.0**-101, False), (2.0**101, False),
     (0.75, False), (1 + 2.0**-23, False), (0.0, False), (-1.0, False), (math.nan, False),
     (math.inf, False)],
)  # fmt: skip
def test_powers_of_two(value, is_power):
    assert powers_of_two(torch.tensor([[0.5, value]])) is is_power
    assert powers_of_two(None)


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Writes what a device measured: {M: {route: us}}."""
    monkeypatch.setattr(tables, "device", lambda target: GPU if target == TARGET else None)
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path))

    def written(us):
        entry = {"versions": {}, "us": us}
        held = {tables.key(SCALED_MATMUL.name, BLOCK32): entry}
        (tmp_path / "tuned").mkdir(exist_ok=True)
        path = tmp_path / "tuned" / tables.file_of(GPU)
        path.write_text(json.dumps({"device": GPU, "entries": held}))
        tables.load.cache_clear()

    yield written
    tables.load.cache_clear()


def plan(dense=True, contract=BLOCK32):
    return SCALED_MATMUL.plan(contract, TARGET, None, dense)


def rows(native, dense):
    """Times by which the dense weight is `dense` times slower below 512 rows, `native` from there
    on."""
    return {m: {NATIVE: 10.0, DENSE.name: 10.0 * (dense if m < 512 else native)} for m in GRID}


def test_chosen_where_it_was_measured_to_be_faster(table):
    table(rows(native=0.5, dense=2))
    chosen = plan()
    assert {split(route)[0] for limit, route in chosen.steps if limit < 512} == {NATIVE}
    assert chosen.steps[-1] == (INFINITE, DENSE.name)
    size = {
        name: math.prod(shape)
        for name, (shape, _) in chosen.operands(SCALED_MATMUL, BLOCK32).items()
    }
    assert size == {"codes": N * K, "scale": N * K // 1024, "dense": N * K}


@pytest.mark.parametrize("case", ["native is faster", "option off", "other scales"])
def test_no_bytes_where_it_is_skipped(table, case):
    table(rows(native=2 if case == "native is faster" else 0.5, dense=2))
    chosen = plan(
        dense=case != "option off",
        contract=like(powers=False) if case == "other scales" else BLOCK32,
    )
    assert {split(route)[0] for _, route in chosen.steps} == {NATIVE}
    assert "dense" not in chosen.packs(SCALED_MATMUL, BLOCK32)


def test_few_rows_are_not_slower_than_by_triton(table, monkeypatch):
    """Both take the same packed tensors: the faster one runs each M, by however little."""
    cute = SCALED_MATMUL.providers["cute.scaled_mma"]
    monkeypatch.setattr(cute_cache, "missing", lambda: None)
    dispatch._planned.cache_clear()  # what is installed is in no key
    rows = {}
    for m in GRID:
        config = cute.configs(BLOCK32, m)[0]
        rows[m] = {NATIVE: 10.0, f"{cute.name}@{config}": 10.1 if m <= 4 else 9.9}
    table(rows)
    steps = plan().steps
    dispatch._planned.cache_clear()
    few = [route for limit, route in steps if limit <= 5]  # 5: between 4 and 8
    assert {split(route)[0] for route in few} == {NATIVE} and len(few) < len(steps)
    assert {split(route)[0] for _, route in steps[len(few) :]} == {cute.name}


@pytest.mark.parametrize("kernel", ["slow", "fast"])
def test_the_report_counts_it_on_a_gpu(monkeypatch, kernel):
    """Where kernels are estimated to be slower; no byte where one is not."""
    others = [SCALED_MATMUL.providers[name] for name in (NATIVE, "cute.scaled_mma")]
    for provider in others:
        us = sympy.Float(1e3 if kernel == "slow" else 1e-3)
        monkeypatch.setattr(type(provider), "seconds", lambda self, contract, us=us: us * 1e-6)
    dispatch.estimate.cache_clear()
    dispatch._planned.cache_clear()
    x = torch.ones(64, 160, dtype=BF16)
    report = rewritten(block32.layer, x, target=TARGET, options={"dense": True}).report
    dispatch.estimate.cache_clear()
    dispatch._planned.cache_clear()
    (site,) = (site for site in report.sites if site.pattern == "scaled_matmul")
    assert site.lowered and "powers of two" in site.contract
    assert (DENSE.name in site.provider) is (kernel == "slow")
    assert report.dense_bytes == (2 * 64 * 160 if kernel == "slow" else 0)
    kept = 2 * 64 * 160 if kernel == "slow" else 64 * 160 + 4 * 2 * 5
    assert report.packed_bytes == kept


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setitem(cuda.RECORDERS, "cpu", lambda device: Recorder(device, {}))
    yield
    qinductor.release()


@pytest.mark.parametrize("scale", [FP32, E8M0], ids=str)
@pytest.mark.parametrize("dense", [False, True])
def test_warmup_accounts_for_it_and_for_scales(recorded, scale, dense):
    torch._dynamo.reset()
    module = block32.layer(scale=scale)
    served = torch.compile(module, backend="qinductor", options={"dense": dense})
    x = torch.randn(4, 160, generator=torch.Generator().manual_seed(1)).to(BF16)
    account = qinductor.warmup(served, x, batch_sizes=[2, 4], quiet=True)
    report = qinductor.last_report()
    (site,) = (site for site in report.sites if site.pattern == "scaled_matmul")
    assert site.lowered and (DENSE.name in site.provider) is dense
    plain = module.w.numel() + FP32.itemsize * module.s.numel()  # codes and scales
    assert report.dense_bytes == 2 * module.w.numel() * dense
    assert report.packed_bytes == (report.dense_bytes if dense else plain)
    assert account.phases[0].predicted == report.packed_bytes
    for m in (1, 2, 3, 4, 9):
        given = torch.randint(-4, 4, (m, 160), generator=torch.Generator().manual_seed(m)).to(BF16)
        assert not difference(served(given), block32.expected(module, given))


def test_scales_that_become_other_numbers():
    """A new variant of the graph, without a dense weight."""
    torch._dynamo.reset()
    module = block32.layer()
    x = torch.randn(96, 160, generator=torch.Generator().manual_seed(1)).to(BF16)
    run = torch.compile(module, backend="qinductor", options={"dense": True})
    with torch.no_grad():
        run(x)
        module.s = module.s * 0.75
        ours = run(x)
    torch.testing.assert_close(ours, block32.expected(module, x), rtol=0.02, atol=0.02)
    report = qinductor.last_report()
    providers = [s.provider for s in report.sites if s.pattern == "scaled_matmul"]
    assert report.variants == 2 and providers[0] == DENSE.name
    assert DENSE.name not in providers[1]
    assert report.dense_bytes == 2 * module.w.numel()
