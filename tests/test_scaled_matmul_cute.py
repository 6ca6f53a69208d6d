"""cute.scaled_mma without a GPU: what it takes, its configs, and its code as it is compiled."""

import dataclasses
import subprocess
import sys

import pytest
import torch

import qinductor
from qinductor import dispatch
from qinductor.kernels import cute_cache
from qinductor.kernels import scaled_matmul_cute as family
from qinductor.kernels import scaled_matmul_cute_checks as checks
from qinductor.kernels.scaled_matmul import SCALED_MATMUL
from qinductor.kernels.scaled_matmul_cases import (
    ASYMMETRIC,
    BF16,
    CASES,
    E5M2,
    E8M0,
    FP8,
    FP16,
    FP32,
    INT8,
    case,
)
from qinductor.kernels.scaled_matmul_cute_form import ALL, SHARED, Config, Form, form_of
from qinductor.op import GRID, Op, split

qinductor.load()
CUTE = SCALED_MATMUL.providers["cute.scaled_mma"]
TAKEN = [chosen.contract for chosen in CASES if CUTE.why_not(chosen.contract) is None]
MISSING = cute_cache.missing  # which tests of plans do without
compiles = pytest.mark.skipif(MISSING() is not None, reason=str(MISSING()))


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (case(FP8, 1, 33, 64, 1, 64), "W is 33x64; it takes N in multiples of 8"),
        (case(FP8, 1, 64, 72, 1, 72), "and K of 16"),
        (case(FP8, 1, 64, 64, 1, 64, out=FP32), "tensor cores keep 14 bits"),
        (case(FP8, 1, 64, 64, 1, 64, scale=torch.float64), "scales are fp64 and fp32"),
        (case(FP8, 1, 64, 64, 1, 64, bias=torch.float64), "the bias fp64"),
        (case("int4", 1, 64, 64, 1, 64), "float8_e4m3fn times int4"),
        (case("int8", 1, 64, 64, 1, 64), "float8_e4m3fn times int8"),
        (case(FP8, 1, 64, 64, 1, 64, INT8), "int8 times float8_e4m3fn"),
        (case(FP8, 1, 64, 64, 1, 64, group=16), "16 columns share a scale"),
        (case(FP8, 1, 64, 256, 1, 128), "1 rows of W share a scale"),
        (case(FP8, 1, 64, 256, 16, 128), "16 rows of W share a scale"),
        (case(FP8, 1, 64, 256, 32, 256), "32 rows of W share a scale"),
        (case("int8", 1, 64, 131072, 1, 131072, INT8), "sums are int32"),
        (ASYMMETRIC[0], "a has zero points"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_refused(chosen, reason):
    assert reason in CUTE.why_not(chosen.contract)


def test_taken():
    assert len(TAKEN) >= 15
    formats = [chosen.contract for chosen in checks.FORMATS.values() if not chosen.contract.experts]
    for contract in formats:
        assert CUTE.why_not(contract) is None
    assert CUTE.runs_on("sm_90") and not CUTE.runs_on("sm_100") and not CUTE.runs_on("cpu")


def test_missing_is_a_sentence(monkeypatch):
    monkeypatch.setattr(cute_cache.importlib.util, "find_spec", lambda name: None)
    MISSING.cache_clear()
    monkeypatch.setattr(cute_cache, "missing", MISSING)
    assert "pip install nvidia-cutlass-dsl" in CUTE.missing()
    MISSING.cache_clear()


@compiles
@pytest.mark.parametrize("version", ["3.9.1", "4.7.0", "of an unknown version"])
def test_a_compiler_that_is_too_old(version, monkeypatch):
    MISSING.cache_clear()
    monkeypatch.setattr(cute_cache, "_version", lambda: version)
    assert MISSING() == f"CuTe DSL is {version}; wanted 4.8 or newer"
    MISSING.cache_clear()


def test_loading_imports_no_compiler():
    script = "import sys, qinductor; qinductor.load(); print('cutlass' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert child.stdout.splitlines()[-1:] == ["False"], child.stderr


@pytest.mark.parametrize(
    ("chosen", "form"),
    [
        (
            case(FP8, 1, 64, 256, 64, 256, group=0, fast=True),
            Form("float8_e4m3fn", "float8_e4m3fn", "bf16", "", 0, "tensor", "tensor"),
        ),
        (
            case(FP8, 1, 64, 256, 1, 256, E5M2, bias=BF16, out=FP16),
            Form("float8_e5m2", "float8_e4m3fn", "fp16", "bf16", 128, "row", "row"),
        ),
        (
            case(FP8, 1, 64, 256, 128, 128, group=64),
            Form(
                "float8_e4m3fn", "float8_e4m3fn", "bf16", "", 64, "group", "grid", group=64,
                bn=ALL, bk=128,
            ),
        ),
        (
            case("int8", 1, 64, 256, 32, 32, INT8, scale=E8M0, weight_scale=E8M0, group=32),
            Form(
                "int8", "int8", "bf16", "", 32, "group", "grid", "float8_e8m0fnu",
                "float8_e8m0fnu", 32, 32, 32,
            ),
        ),
        (
            case("int8", 1, 64, 256, 1, 256, INT8, weight_scale=None, out=FP32),
            Form("int8", "int8", "fp32", "", 0, "row", "", sw=""),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_forms(chosen, form):
    assert form_of(chosen.contract) == form


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("p96.q64.t4.c1.s1.b1", "p is 64"),
        ("p64.q16.t4.c1.s1.b0.swap", "a program at least"),
        ("p64.q12.t4.c1.s1.b1.swap", "q a multiple of 8"),
        ("p64.q264.t4.c1.s1.b1.swap", "up to 256"),
        ("p64.q24.t4.c1.s1.b1", "without swap"),
        ("p64.q64.t4.c2.s2.b1", "parts of K"),
        ("p64.q8.t4.c2.s1.b1.swap", "of 8 rows and more"),
        ("p64.q96.t4.c3.s1.b1", "1, 2 or 4 programs"),
        ("p128.q256.t2.c1.s2.b1", "must fit into the pipeline"),
        ("p128.q256.t5.c1.s1.b1", "5 stages take"),
        ("p128.q128.t4.c1.s1.b2", "4 stages take"),
        ("m64.n64", "no config of cute.scaled_mma"),
    ],
)
def test_configs_that_are_none(text, fault):
    with pytest.raises(ValueError, match=fault):
        Config.parse(text)


@pytest.mark.parametrize("contract", TAKEN, ids=lambda contract: contract.summary)
def test_configs(contract):
    w = contract.weight
    for n, k in ((w.n, w.k), (28672, 4096), (4096, 14336)):
        bn, bk = n if w.bn == w.n else w.bn, k if w.bk == w.k else w.bk
        weight = dataclasses.replace(w, n=n, k=k, bn=bn, bk=bk)
        wide = dataclasses.replace(contract, weight=weight)
        if contract.group == w.k:
            wide = dataclasses.replace(wide, group=k)
        for m in GRID:
            texts = CUTE.configs(wide, m)
            assert texts and len(set(texts)) == len(texts)
            for text in texts:
                config = Config.parse(text)
                assert str(config) == text and config.takes(form_of(wide))
                assert config.blocks * config.shared <= SHARED
            assert family.heuristic(wide, m) == Config.parse(texts[0])


@pytest.mark.parametrize(
    ("n", "k", "m", "config"),
    [
        (4096, 4096, 1, "p64.q8.t12.c1.s2.b2.swap"),
        (28672, 4096, 64, "p128.q64.t8.c1.s1.b1.swap"),
        (1024, 8192, 1, "p64.q8.t12.c1.s8.b2.swap"),
        (4096, 4096, 128, "p64.q64.t6.c1.s1.b2"),
        (28672, 4096, 128, "p128.q128.t6.c1.s1.b1"),
        (28672, 4096, 4096, "p128.q256.t4.c2.s1.b1"),
    ],
)
def test_first_choices(n, k, m, config):
    contract = case(FP8, 1, n, k, 1, k, fast=True).contract
    assert str(family.heuristic(contract, m)) == config


def test_chosen_where_it_is_installed(monkeypatch):
    fast, slow = (case(FP8, 1, 4096, 4096, 1, 4096, fast=f).contract for f in (True, False))
    tensor = case(FP8, 1, 4096, 4096, 4096, 4096, group=0, fast=True).contract

    def chosen(contract, m):
        dispatch._planned.cache_clear()  # what is installed is in no key
        (route,) = [route for _, route in Op.plan(SCALED_MATMUL, contract, "sm_90", m).steps]
        return split(route)[0]

    assert chosen(fast, 1) == "triton.scaled_mma"
    monkeypatch.setattr(cute_cache, "missing", lambda: None)
    assert {chosen(fast, m) for m in (1, 16, 64, 128, 4096)} == {CUTE.name}
    assert {chosen(slow, m) for m in (1, 16, 64, 128, 4096)} == {CUTE.name}
    assert chosen(tensor, 512) == "aten.scaled_mm"
    dispatch._planned.cache_clear()


@compiles
@pytest.mark.parametrize(("name", "m"), [("fp8 row fast", 1), ("fp8 block32", 64)])
def test_compiled(name, m):
    contract = checks.FORMATS[name].contract
    checks.held(contract, str(family.heuristic(contract, m)))


@pytest.mark.parametrize("bn", [32, 64, 96, 160, 192, 256])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_blocks_of_any_multiple_of_32_have_a_config(bn, group):
    contract = case(FP8, 1, 5 * bn, 2048, bn, 128, group=group).contract
    assert CUTE.why_not(contract) is None
    for m in (1, 17, 64, 128, 200, 512, 4096):
        configs = [Config.parse(text) for text in CUTE.configs(contract, m)]
        assert configs and all(config.takes(form_of(contract)) for config in configs)


def test_scales_need_a_stage_for_each_warp_that_fetches_them():
    row, block = (checks.FORMATS[name].contract for name in ("fp8 row", "fp8 block128"))
    takes = [Config.parse("p128.q128.t2.c1.s1.b1").takes(form_of(c)) for c in (row, block)]
    assert takes == [True, False]


@compiles
def test_every_fault_is_found():
    contract, text = checks.FORMATS["fp8 row"].contract, "p128.q128.t4.c2.s1.b1"
    code, config = checks.build(contract, text), Config.parse(text)
    assert not checks.faults(code, contract, config)
    for old, new, fault in (
        ("m64n128k32", "m64n64k32", "products are"),
        ("cp.async.bulk.tensor.2d", "ld", "not fetched by TMA"),
        ("multicast::cluster", "", "for other programs"),
        ("setmaxnreg", "", "registers are not shared out"),
    ):
        changed = dataclasses.replace(code, ptx=code.ptx.replace(old, new))
        assert fault in checks.faults(changed, contract, config)
    assert "8 bytes spill" in checks.faults(dataclasses.replace(code, stack=8), contract, config)
    assert "200 registers of 168" in checks.faults(
        dataclasses.replace(code, registers=200), contract, config
    )
    slow = checks.build(contract, "p256.q128.t4.c2.s1.b1")  # which `takes` refuses for that
    assert "are serialized" in checks.faults(slow, contract, config)
    assert not Config.parse("p256.q128.t4.c2.s1.b1").takes(form_of(contract))
    parts = dataclasses.replace(config, cluster=1, split=2)
    assert "parts of sums" in checks.faults(code, contract, parts)


@compiles
def test_a_library_is_kept_and_loaded(monkeypatch, tmp_path):
    made = []

    def build():
        made.append(1)
        contract = checks.FORMATS["int8 row"].contract
        config = Config.parse("p64.q8.t4.c1.s1.b1.swap")
        return family.device().compiled(form_of(contract), config)

    monkeypatch.setattr(cute_cache.disk, "folder", lambda: tmp_path)
    for _ in range(2):
        kernel = cute_cache.kernel("a name", build)
        with pytest.raises(ValueError, match="device_type=cuda"):
            codes = torch.zeros(16, 16, dtype=INT8)
            kernel(codes, torch.ones(16, 1), codes, torch.ones(16, 1), None, codes.float(), 132, 0)
    assert len(made) == 1 and cute_cache.place("a name").exists()
    assert cute_cache.place("a name") != cute_cache.place("another")
    monkeypatch.setattr(cute_cache.disk, "folder", lambda: None)
    cute_cache.kernel("a name", build)
    assert len(made) == 2


def test_what_cannot_be_kept_is_used_all_the_same(monkeypatch, tmp_path):
    class Built:
        def export_to_c(self, path, function_name):
            raise OSError("no space left on device")

    monkeypatch.setattr(cute_cache.disk, "folder", lambda: tmp_path)
    built = Built()
    assert cute_cache.kernel("a name", lambda: built) is built
    assert list((tmp_path / "cute").iterdir()) == []
