"""`tune` and `bench` of products of codes, on a CPU at tiny shapes; times are made up."""

import pytest

import qinductor
from qinductor import bench, tables
from qinductor.__main__ import main
from qinductor.errors import OptionError
from qinductor.formats import contract_of, op_of
from qinductor.kernels.scaled_matmul import SCALED_MATMUL
from qinductor.kernels.scaled_matmul_cases import INT8, case
from qinductor.tune import Tuner, plain

qinductor.load()
CPU = "A CPU, 1 thread"
WORDS = {
    "fp8-tensor": "float8_e4m3fn tensor scale fp32 x float8_e4m3fn[256,512] tensor scale fp32",
    "fp8-row-fast-fp16": "float8_e4m3fn token scale fp32 x float8_e4m3fn[256,512] channel scale "
    "fp32 -> fp16 fast sums",
    "fp8-block128": "float8_e4m3fn group-128 scale fp32 x float8_e4m3fn[256,512] block-128x128",
    "fp8-block32": "float8_e4m3fn group-32 scale fp32 x float8_e4m3fn[256,512] block-32x32",
    "int8-row": "int8 token scale fp32 x int8[256,512] channel scale fp32 -> bf16",
    "w4a8-fp8-g128": "float8_e4m3fn token scale fp32 x int4[256,512] group-128 scale fp32",
    "w4a8-int8-channel-fp32": "int8 token scale fp32 x int4[256,512] channel scale fp32 -> fp32",
}


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(tables, "device", lambda target: CPU if target == "cpu" else None)
    tables.load.cache_clear()


def clock(calls, device):
    """A timer that calls once."""
    calls[0]()
    return 5.0


@pytest.mark.parametrize("word", WORDS)
def test_formats(word):
    contract = contract_of(word, 256, 512)
    assert op_of(contract) is SCALED_MATMUL and contract.summary.startswith(WORDS[word])


@pytest.mark.parametrize("word", ["fp8", "fp8-row-slow", "w4a8-g128", "int8-rows", "fp8-block0"])
def test_no_formats(word):
    with pytest.raises(OptionError, match="fp8-row, fp8-block<N>"):
        contract_of(word, 64, 64)


def test_families():
    """A bias has no entry of its own; a scale for each row is one, whatever K is."""
    row = case("int8", 1, 64, 128, 1, 128, INT8, bias=INT8).contract
    text, n, k = tables.family(row)
    assert (n, k) == (64, 128) and "group=K" in text and "bias" not in text
    assert text == tables.family(contract_of("int8-row", 256, 512))[0]
    assert text != tables.family(case("int8", 1, 64, 256, 1, 256, INT8, group=128).contract)[0]
    assert plain(row).bias is None


@pytest.mark.parametrize("word", WORDS)
def test_measured_here_and_planned_by(word, tmp_path, monkeypatch):
    contract = contract_of(word, 64, 128)
    tuner = Tuner("cpu", tmp_path, timer=clock)
    assert tuner.tune(contract, [1, 64], float("inf"), False)
    assert not tuner.wrong and tuner.kept == 2
    key = tables.key("scaled_matmul", contract)
    rows = tables.read(tuner.path)[key]["us"]
    assert set(rows) == {"1", "64"} and set(rows["1"]) == set(tuner.limits(contract))
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(tables, "own", lambda: tmp_path)
    plan = SCALED_MATMUL.plan(contract, "cpu", 1)
    assert plan.rung == "tuned here" and len(plan.steps) == 1


def test_bench(capsys):
    result = bench.measured(contract_of("int8-row", 64, 128), [1, 8], "cpu", timer=clock)
    assert set(result.us) >= {"aten.int_mm", "aten.mm_in_blocks", "qinductor"}
    assert result.us["qinductor"] == {1: 5.0, 8: 5.0} and not result.us["stock Inductor"]
    assert main(["bench", "scaled_matmul", "--format", "int4-g32", "--device", "cpu"]) == 2
    assert "int4-g32 is a format of dequant_matmul, not of scaled_matmul" in capsys.readouterr().err


def test_tune_by_words(tmp_path, capsys):
    words = ["--formats", "fp8-block32,int8-row", "--shapes", "64x128", "--m", "1"]
    assert main(["tune", *words, "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert "2 rows were measured" in capsys.readouterr().out
