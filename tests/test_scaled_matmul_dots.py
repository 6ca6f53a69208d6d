"""cute.scaled_dots without a GPU: what it takes, its configs, and its code: as it is compiled, and
what its PTX computes."""

import dataclasses

import ptx
import pytest
import torch

import qinductor
from qinductor import dispatch
from qinductor.contracts import difference
from qinductor.kernels import cute_cache, fallback
from qinductor.kernels import scaled_matmul_dots as family
from qinductor.kernels import scaled_matmul_dots_checks as checks
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, reference
from qinductor.kernels.scaled_matmul_cases import (
    ASYMMETRIC,
    BF16,
    CASES,
    E5M2,
    E8M0,
    EXPERTS,
    FP8,
    FP16,
    FP32,
    INT8,
    WIDE8,
    case,
)
from qinductor.kernels.scaled_matmul_cute_checks import FORMATS
from qinductor.kernels.scaled_matmul_cute_form import SHARED
from qinductor.kernels.scaled_matmul_dots_form import Config, form_of
from qinductor.op import GRID, Op, split

qinductor.load()
DOTS, MMA = (SCALED_MATMUL.providers[f"cute.scaled_{name}"] for name in ("dots", "mma"))
TAKEN = [chosen.contract for chosen in CASES if DOTS.why_not(chosen.contract) is None]
MISSING = cute_cache.missing()  # which tests of plans do without
compiles = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
FEW = (1, 2, 3, 4, 5, 8, 16, 17, 512)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (case(FP8, 1, 33, 64, 1, 64), "W is 33x64; it takes N in multiples of 8"),
        (case(FP8, 1, 64, 72, 1, 72), "and K of 16"),
        (case("int4", 1, 64, 64, 1, 64), "float8_e4m3fn times int4"),
        (case(FP8, 1, 64, 64, 1, 64, group=16), "16 columns share a scale"),
        (case(FP8, 1, 64, 256, 1, 128), "1 rows of W share a scale"),
        (case(FP8, 1, 64, 64, 1, 64, out=torch.float64), "the result is fp64"),
        (ASYMMETRIC[0], "a has zero points"),
        (EXPERTS[0], "there are 3 experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_refused(chosen, reason):
    assert reason in DOTS.why_not(chosen.contract)


def test_it_takes_what_wgmma_takes_and_results_in_float32():
    for chosen in (*CASES, *ASYMMETRIC, *EXPERTS, *FORMATS.values()):
        assert DOTS.why_not(chosen.contract) == MMA.why_not(chosen.contract)
    wide = case(FP8, 1, 64, 64, 1, 64, out=FP32).contract
    assert DOTS.why_not(wide) is None and "fp32" in MMA.why_not(wide)
    assert len(TAKEN) >= 15
    assert DOTS.runs_on("sm_90") and not DOTS.runs_on("sm_100") and not DOTS.runs_on("cpu")


def test_one_kernel_for_fast_sums_and_others():
    fast, slow = (case(FP8, 1, 64, 256, 1, 256, fast=fast).contract for fast in (True, False))
    assert form_of(fast) == form_of(slow) and form_of(fast).step == 0
    assert form_of(case(FP8, 1, 64, 256, 128, 128, group=64).contract).step == 64


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("r8.q8.w8.a4.s1.b2", "16 or 32 rows"),
        ("r16.q3.w8.a4.s1.b2", "8 or 16 of a"),
        ("r16.q8.w17.a1.s1.b1", "1 to 16 warps"),
        ("r16.q8.w8.a0.s1.b2", "lines ahead"),
        ("r16.q8.w8.a4.s3.b2", "1, 2, 4 or 8 parts"),
        ("r16.q8.w8.a4.s1.b0", "0 programs"),
        ("r16.q1.w16.a1.s1.b5", "5 programs of 512 threads"),
        ("r16.q8.w8.a5.s1.b2", "2 programs take"),
        ("p64.q8.t12.c1.s1.b2.swap", "no config of cute.scaled_dots"),
    ],
)
def test_configs_that_are_none(text, fault):
    with pytest.raises(ValueError, match=fault):
        Config.parse(text)


def test_forms_that_a_config_does_not_take():
    whole, blocks = (FORMATS[name].contract for name in ("fp8 row", "fp8 block32"))
    for text, why in (
        ("r16.q16.w8.a2.s1.b1", "four tiles of columns"),
        ("r16.q8.w8.a4.s1.b2", "scales in shared memory"),
        ("r16.q8.w8.a2.s1.b3", "registers"),
    ):
        config = Config.parse(text)
        assert config.takes(form_of(whole)) and not config.takes(form_of(blocks)), why


def resized(contract, n, k):
    """The contract of another weight."""
    w = contract.weight
    bn, bk = n if w.bn == w.n else w.bn, k if w.bk == w.k else w.bk
    weight = dataclasses.replace(w, n=n, k=k, bn=bn, bk=bk)
    group = k if contract.group == w.k else contract.group
    return dataclasses.replace(contract, weight=weight, group=group)


@pytest.mark.parametrize("contract", TAKEN, ids=lambda contract: contract.summary)
def test_configs(contract):
    w = contract.weight
    shapes = (w.n, w.k), (28672, 4096), (4096, 14336), (2112, 7168), (576, 7168), (24576, 1536)
    for wide in (resized(contract, *shape) for shape in shapes):
        for m in (*FEW, *GRID):
            texts = DOTS.configs(wide, m)
            assert texts and len(set(texts)) == len(texts) <= 16
            for text in texts:
                config = Config.parse(text)
                assert str(config) == text and config.takes(form_of(wide))
                assert config.blocks * config.shared(form_of(wide)) <= SHARED
                assert config.q >= min(m, 8)
            assert family.heuristic(wide, m) == Config.parse(texts[0])


@pytest.mark.parametrize(
    ("n", "k", "m", "config"),
    [
        (4096, 4096, 1, "r16.q1.w8.a4.s1.b2"),  # a program has one tile, all of it on its way
        (28672, 4096, 3, "r16.q4.w8.a5.s1.b2"),
        (2112, 7168, 1, "r16.q1.w8.a7.s1.b1"),
        (576, 7168, 8, "r16.q8.w8.a2.s4.b2"),
        (24576, 1536, 1, "r16.q1.w4.a6.s1.b4"),
        (4096, 14336, 16, "r16.q16.w8.a2.s1.b2"),
    ],
)
def test_first_choices(n, k, m, config):
    assert str(family.heuristic(case(FP8, 1, n, k, 1, k).contract, m)) == config


def test_not_chosen_before_it_is_measured(monkeypatch):
    monkeypatch.setattr(cute_cache, "missing", lambda: None)
    for fast in (True, False):
        contract = case(FP8, 1, 4096, 4096, 1, 4096, fast=fast).contract
        for m in (1, 4, 8, 64, 4096):
            dispatch._planned.cache_clear()  # what is installed is in no key
            (route,) = [route for _, route in Op.plan(SCALED_MATMUL, contract, "sm_90", m).steps]
            assert split(route)[0] != DOTS.name
    dispatch._planned.cache_clear()


def test_seconds_grow_with_the_reads_of_w():
    spent = DOTS.seconds(case(FP8, 1, 4096, 4096, 1, 4096).contract)
    rates = {qinductor.rates.BANDWIDTH: 4.2e12}
    few, more, many = (float(spent.subs({qinductor.rates.M: m, **rates})) for m in (1, 8, 16))
    assert few < more < 1.1 * few and many > 1.5 * more


@pytest.fixture
def alone(monkeypatch):
    """Only Triton's provider is asked in our place, and gives what it was given."""
    seen = []
    other = SCALED_MATMUL.providers["triton.scaled_mma"]
    monkeypatch.setattr(fallback, "_broken", set())
    monkeypatch.setattr(fallback, "others", lambda *given: (other,))
    monkeypatch.setattr(other, "run", lambda *given: seen.append(given) or given[2])
    family.prepared.cache_clear()
    yield seen
    family.prepared.cache_clear()


def test_another_provider_runs_where_no_kernel_can_be_made(monkeypatch, alone):
    def broken(form, config, early):
        raise ImportError("libcute_dsl_runtime.so: cannot open shared object file")

    chosen = next(chosen for chosen in CASES if chosen.contract == TAKEN[0])
    contract, (a, scale, source) = chosen.contract, chosen.make()
    monkeypatch.setattr(family, "kernel", broken)
    given = contract, (a, scale), list(DOTS.pack(contract, source).values())
    with pytest.warns(UserWarning, match="scaled_dots.* cannot run: ImportError: libcute"):
        DOTS.run(*given)
    with pytest.warns(UserWarning, match="another runs instead"):  # not with what is not packed
        assert DOTS.direct(contract, (a, scale), source, None, None) is None
    assert len(alone) == 1 and alone[0][:2] == given[:2]


def test_w_is_early_only_if_it_is_a_packed_one_that_is_not_copied(monkeypatch, alone):
    asked = []

    def prepared(contract, config, device, early):
        asked.append(early)

    prepared.cache_clear = lambda: None
    monkeypatch.setattr(family, "prepared", prepared)
    chosen = case(FP8, 2, 64, 64, 1, 64)
    a, scale, source = chosen.make()
    packed = list(DOTS.pack(chosen.contract, source).values())
    DOTS.run(chosen.contract, (a, scale), packed)
    DOTS.direct(chosen.contract, (a, scale), source, None, None)
    beside = torch.empty(64 * 64 + 1, dtype=a.dtype)[1:].view(64, 64)
    copied = DOTS.run(chosen.contract, (a, scale), [beside, *packed[1:]])
    assert asked == [True, False, False] and copied[0].data_ptr() % 16 == 0
    strided = dataclasses.replace(source, weight=dataclasses.replace(source.weight, codes=beside))
    assert DOTS.direct(chosen.contract, (a, scale), strided, None, None) is None


@compiles
@pytest.mark.parametrize(("name", "m"), [("fp8 row fast", 1), ("fp8 block32", 8), ("int8 row", 4)])
def test_compiled(name, m):
    contract = FORMATS[name].contract
    for early in (True, False):
        checks.held(contract, str(family.heuristic(contract, m)), early)


@compiles
def test_every_fault_is_found():
    contract, text = FORMATS["e5m2 row"].contract, "r16.q8.w4.a4.s2.b2"
    code, config = checks.build(contract, text), Config.parse(text)
    assert not checks.faults(code, contract, config)
    for old, new, fault in (
        ("m16n8k16", "m16n8k8", "no products m16n8k16"),
        ("e4m3x2", "", "codes of W are not made float16 from e4m3"),
        ("e5m2x2", "", "codes of a are not made float16 from e5m2"),
        ("cp.async.cg", "cp.async.ca", "not fetched 16 bytes at a time"),
        ("griddepcontrol.wait", "", "W is fetched before"),
        ("ld.shared::cluster", "", "parts of sums are not read"),
    ):
        changed = dataclasses.replace(code, ptx=code.ptx.replace(old, new))
        assert fault in checks.faults(changed, contract, config)
    assert "W is fetched before" in checks.faults(code, contract, config, early=False)
    assert "8 bytes spill" in checks.faults(dataclasses.replace(code, stack=8), contract, config)
    assert "256 registers of 255" in checks.faults(
        dataclasses.replace(code, registers=256), contract, config
    )


# (case, config, rows of a, programs at once): edges of tiles, lines, warps, parts of K, tiles that
# one program has in turn.
EMULATED = [
    (case(FP8, 1, 40, 400, 1, 400, bias=BF16), "r16.q1.w2.a2.s1.b1", 1, 2),
    (case(FP8, 1, 40, 400, 1, 400, E5M2, out=FP16, bias=FP32), "r16.q8.w2.a3.s1.b1", 8, 1),
    (case(WIDE8, 1, 40, 400, 40, 400, group=0, weight_scale=BF16), "r32.q2.w4.a1.s1.b1", 2, 9),
    (case(FP8, 1, 24, 1040, 1, 1040, out=FP32), "r16.q4.w8.a2.s2.b1", 5, 9),
    (case(FP8, 1, 40, 528, 1, 528, weight_scale=None), "r16.q16.w2.a2.s1.b1", 17, 9),
    (case(FP8, 1, 136, 400, 128, 128, group=128), "r16.q1.w2.a2.s1.b1", 1, 3),
    (
        case(FP8, 1, 136, 400, 128, 128, group=128, scale=E8M0, weight_scale=BF16),
        "r32.q4.w3.a2.s2.b1", 3, 9,
    ),
    (case(FP8, 1, 72, 400, 128, 128, group=64), "r16.q16.w2.a2.s1.b1", 13, 2),
    (case(FP8, 1, 40, 384, 1, 384, group=32, scale=FP16), "r16.q2.w2.a2.s1.b1", 2, 9),
    (case(FP8, 1, 104, 384, 96, 96), "r16.q8.w2.a2.s1.b1", 6, 4),
    (
        case(FP8, 1, 40, 368, 32, 32, group=32, scale=E8M0, weight_scale=E8M0, bias=BF16),
        "r16.q8.w2.a2.s1.b1", 8, 2,
    ),
    (case(FP8, 1, 72, 368, 32, 32, group=32), "r32.q4.w2.a2.s2.b1", 3, 9),
    (case("int8", 1, 40, 400, 1, 400, INT8, group=0), "r32.q1.w4.a5.s4.b1", 1, 9),
    (case("int8", 1, 40, 400, 1, 400, INT8, out=FP32, bias=BF16), "r16.q8.w2.a2.s1.b1", 6, 2),
    (case("int8", 1, 72, 400, 64, 64, INT8, group=64), "r32.q2.w2.a2.s1.b1", 2, 2),
    (case("int8", 1, 40, 400, 32, 32, INT8, group=32, out=FP32), "r16.q8.w2.a2.s1.b1", 8, 9),
]  # fmt: skip


@compiles
@pytest.mark.parametrize(
    ("chosen", "text", "m", "programs"), EMULATED,
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_what_the_ptx_computes(chosen, text, m, programs):
    contract, config = chosen.contract, Config.parse(text)
    assert DOTS.why_not(contract) is None and config.takes(form_of(contract))
    a, scale, source = dataclasses.replace(chosen, m=m).make(exact=True)
    scales = (scale if contract.group else scale.reshape(1), source.weight.scale)
    scales = tuple(t.view(torch.uint8) if t is not None and t.itemsize == 1 else t for t in scales)
    given = [(a, True), (scales[0], False), (source.weight.codes, True), (scales[1], False)]
    given = [pair for pair in [*given, (source.bias, True)] if pair[0] is not None]
    tiles = -(-contract.weight.n // config.rows)
    grid = tiles * config.split if config.split > 1 else min(tiles, programs), -(-m // config.q)
    out = torch.full((m, contract.weight.n), float("nan"), dtype=contract.out)
    code = checks.build(contract, text).ptx
    found, copied = ptx.run(code, given, out, grid, config.threads, config.split)
    assert not difference(found, reference(contract, a, scale, source))
    slabs = grid[1]  # each reads W once; a is read once for each tile but for the first lines
    assert slabs * source.weight.codes.nbytes <= copied < slabs * 3 * source.weight.codes.nbytes
