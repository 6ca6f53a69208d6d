"""`python -m qinductor tune` and `bench`, on a CPU at tiny shapes; times are mostly made up."""

import importlib.util
import json
import multiprocessing
import os
import re
import sys
import types

import pytest
import torch

import qinductor
from qinductor import bench, tables, timing, trial, tune
from qinductor.__main__ import main
from qinductor.errors import OptionError, QinductorError
from qinductor.formats import contract_of, rows_of, shape_of
from qinductor.kernels.dequant_matmul import (
    DEQUANT_MATMUL,
    Case,
    DequantMatmul,
    Reference,
    case,
    reference,
)
from qinductor.op import INFINITE, Op
from qinductor.tune import Tuner, found_in, merge, versions

qinductor.load()
INT4 = case("int4", 1, 64, 128, 1, 32).contract
CPU = "A CPU, 1 thread"


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(tables, "device", lambda target: CPU if target == "cpu" else None)
    tables.load.cache_clear()


class Tiled(Reference):
    """The reference as a provider with configs; `bad` ones give a wrong result or fail."""

    name, reference = "tiled", False
    wanted = ("t8", "t16", "t32")

    def runs_on(self, target):
        return target == "cpu"

    def configs(self, contract, m):
        return list(self.wanted)

    def run(self, contract, x, packed, config):
        asked.append((self.name, config, x.shape[0]))
        out = super().run(contract, x, packed)
        if config == "wrong":
            out[-1, -1] += 1
        if config == "fails":
            raise RuntimeError("out of shared memory")
        return out


class Plain(Reference):
    """The reference as a provider without configs, for few rows."""

    name, reference = "plain", False

    def limit(self, contract, dense=False):
        return 4

    def run(self, contract, x, packed):
        asked.append((self.name, None, x.shape[0]))
        return super().run(contract, x, packed)


asked: list[tuple[str, str | None, int]] = []  # (provider, config, M) of every call


class Clock:
    """A timer that calls once and answers from {config: microseconds}, 5 for others."""

    def __init__(self, stop_after=INFINITE, **us):
        self.us, self.timed, self.left = us, [], stop_after

    def __call__(self, calls, device):
        assert device == "cpu" and len(calls) >= 2
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        calls[-1]()
        last = asked[-1] if asked else ("", None, 0)
        self.timed.append(last)
        return self.us.get(last[1], 5.0)


def tuner(folder, timer, *providers):
    op = Op("fake", DequantMatmul, reference, DEQUANT_MATMUL.cost, DEQUANT_MATMUL.weight)
    for provider in (Reference(), *(providers or (Tiled(), Plain()))):
        op.register(provider)
    return Tuner("cpu", folder, op, timer)


def times(made, contract=INT4):
    """{M: row} in the file."""
    return tables.read(made.path)[tables.key("fake", contract)]["us"]


NEVER = float("inf")


# What is measured -----------------------------------------------------------------------------


def test_the_best_of_each_provider_is_kept(tmp_path):
    made = tuner(tmp_path, Clock(t8=4.0, t16=3.0, t32=3.5))
    assert made.tune(INT4, [1, 8], NEVER, False)
    assert times(made) == {"1": {"tiled@t16": 3.0, "plain": 5.0}, "8": {"tiled@t16": 3.0}}
    assert made.kept == 2 and not made.wrong
    entry = tables.read(made.path)[tables.key("fake", INT4)]
    assert entry["versions"]["torch"] == torch.__version__
    assert (entry["versions"]["tiled"], entry["versions"]["plain"]) == (1, 1)
    assert json.loads(made.path.read_text())["device"] == CPU
    assert made.path.name == "A_CPU_1_thread.json"


def test_a_hopeless_config_is_not_tried_again_unless_it_is_the_choice(tmp_path):
    class Moving(Tiled):
        def configs(self, contract, m):
            return ["t8", "t16", "t32"] if m < 16 else ["t32", "t8", "t16"]

    clock = Clock(t8=2.0, t16=2.01 * tune.HOPELESS, t32=9.0)
    tuner(tmp_path, clock, Moving()).tune(INT4, [1, 2, 16], NEVER, False)
    tried = {m: [config for _, config, rows in clock.timed if rows == m] for m in (1, 2, 16)}
    assert tried == {1: ["t8", "t16", "t32"], 2: ["t8"], 16: ["t32", "t8"]}
    edge = 2.0 * tune.HOPELESS  # not yet hopeless
    clock = Clock(t8=2.0, t16=edge, t32=edge)
    tuner(tmp_path / "b", clock, Tiled()).tune(INT4, [1, 2], NEVER, False)
    assert len(clock.timed) == 6


def test_a_slow_provider_is_tried_at_every_m(tmp_path):
    """It may be the best at a larger one."""
    clock = Clock(t8=500.0, t16=900.0, t32=500.0)
    made = tuner(tmp_path, clock)
    made.tune(INT4, [1, 2, 4], NEVER, False)
    assert all(set(row) == {"tiled@t8", "plain"} for row in times(made).values())


@pytest.mark.parametrize("bad, said", [("wrong", "AssertionError: "), ("fails", "out of shared")])
def test_a_bad_config_is_dropped_and_said(tmp_path, capsys, monkeypatch, bad, said):
    monkeypatch.setattr(Tiled, "wanted", ("t8", bad))
    made = tuner(tmp_path, Clock(t8=4.0, **{bad: 1.0}), Tiled())
    assert made.tune(INT4, [1, 64], NEVER, False)
    assert times(made) == {"1": {"tiled@t8": 4.0}, "64": {"tiled@t8": 4.0}}
    assert len(made.wrong) == 2 and f"tiled@{bad} at M=64" in made.wrong[1]
    err = capsys.readouterr().err
    assert f"DROPPED tiled@{bad} at M=1 of" in err and said in err


def test_only_the_first_and_last_rows_are_judged(tmp_path):
    """At many rows a float64 product of all would take longer than what is measured."""
    weight = trial.Weight(DEQUANT_MATMUL, INT4, "cpu")
    weight.check("onednn.dequant_strips", 500)
    real = DEQUANT_MATMUL.providers["onednn.dequant_strips"]

    def off_at(row):
        def run(contract, x, packed):
            out = real.run(contract, x, packed)
            out[row] += 1
            return out

        return types.SimpleNamespace(run=run, pack=real.pack, operands=real.operands)

    for row in (0, 15, -16, -1):
        weight.op = types.SimpleNamespace(providers={"off": off_at(row)})
        with pytest.raises(AssertionError, match="rms error"):
            weight.check("off", 500)


def test_weights_that_a_provider_refuses_are_passed_over(tmp_path):
    class Picky(Plain):
        def pack(self, contract, source):
            raise qinductor.errors.Refused("not these")

    made = tuner(tmp_path, Clock(), Tiled(), Picky())
    assert made.tune(INT4, [1], NEVER, False)
    assert times(made) == {"1": {"tiled@t8": 5.0}} and not made.wrong


# Interrupted and resumed ----------------------------------------------------------------------


def test_what_is_measured_is_not_measured_again(tmp_path):
    tuner(tmp_path, Clock()).tune(INT4, [1, 2], NEVER, False)
    clock = Clock()
    made = tuner(tmp_path, clock)
    made.tune(INT4, [1, 2, 4], NEVER, False)
    assert {m for *_, m in clock.timed} == {4} and list(times(made)) == ["1", "2", "4"]
    clock = Clock(t8=1.0)
    again = tuner(tmp_path, clock)
    again.tune(INT4, [2], NEVER, True)
    assert times(again)["2"]["tiled@t8"] == 1.0 and times(again)["1"]["tiled@t8"] == 5.0


def test_another_version_is_measured_again(tmp_path):
    tuner(tmp_path, Clock()).tune(INT4, [1, 2], NEVER, False)

    class Newer(Tiled):
        version = 2

    clock = Clock()
    made = tuner(tmp_path, clock, Newer(), Plain())
    made.tune(INT4, [1], NEVER, False)
    assert clock.timed and list(times(made)) == ["1"], "rows of the old version are dropped"
    assert versions(made.op, {"tiled": 1})["tiled"] == 2


def test_an_interrupted_run_keeps_what_it_has(tmp_path):
    made = tuner(tmp_path, Clock(stop_after=9), Tiled())
    with pytest.raises(KeyboardInterrupt):
        made.tune(INT4, [1, 2, 4, 8], NEVER, False)
    assert list(times(made)) == ["1", "2", "4"] and made.kept == 3
    clock = Clock()
    resumed = tuner(tmp_path, clock, Tiled())
    resumed.tune(INT4, [1, 2, 4, 8], NEVER, False)
    assert {m for *_, m in clock.timed} == {8} and list(times(resumed)) == ["1", "2", "4", "8"]


def test_the_budget(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])

    def timer(calls, device):
        now[0] += 10
        return 1.0

    made = tuner(tmp_path, timer, Plain())
    assert made.tune(INT4, [1, 2, 4], 15.0, False) is False
    assert list(times(made)) == ["1", "2"]


# Files ----------------------------------------------------------------------------------------


def write(path, writer):
    for m in range(20):
        merge(path, CPU, f"fake {writer}x1 a=b", {"v": 1}, {m: {"r": 1.0 + m}})
        merge(path, CPU, "fake 9x9 shared=yes", {"v": 1}, {100 * writer + m: {"r": 1.0}})


def test_writers_do_not_lose_each_other_s_rows(tmp_path):
    path = tmp_path / "deep" / "t.json"
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write, args=(path, writer)) for writer in range(1, 5)]
    for process in writers:
        process.start()
    while any(process.is_alive() for process in writers):
        if path.exists():
            json.loads(path.read_text())  # whole at any time
    for process in writers:
        process.join()
        assert process.exitcode == 0
    entries = tables.read(path)
    assert all(len(entries[f"fake {writer}x1 a=b"]["us"]) == 20 for writer in range(1, 5))
    assert len(entries["fake 9x9 shared=yes"]["us"]) == 80
    assert {file.name for file in path.parent.iterdir()} == {"t.json", "t.lock"}


@pytest.mark.parametrize("where", ["dump", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_table(tmp_path, monkeypatch, where, error):
    path = tmp_path / "t.json"
    merge(path, CPU, "fake 1x1 a=b", {}, {1: {"r": 1.0}})
    before = path.read_bytes()

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(tune.json if where == "dump" else tune.os, where, fails)
    with pytest.raises(type(error)):
        merge(path, CPU, "fake 1x1 a=b", {}, {2: {"r": 2.0}})
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"t.json", "t.lock"}


def test_a_corrupt_table_is_replaced(tmp_path, caplog):
    path = tmp_path / "t.json"
    path.write_text("{")
    merge(path, CPU, "fake 1x1 a=b", {}, {1: {"r": 1.0}})
    assert list(tables.read(path)) == ["fake 1x1 a=b"] and "ignored" in caplog.text
    assert (tmp_path / "t.bad").read_text() == "{"


def test_what_was_measured_is_planned_by_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path))
    made = tuner(tables.own(), Clock(t16=1.0))
    assert made.op.plan(INT4, "cpu", 2).rung == "limits"
    made.tune(INT4, [2], NEVER, False)
    plan = made.op.plan(INT4, "cpu", 2)
    assert (plan.rung, plan.steps) == ("tuned here", ((INFINITE, "tiled@t16"),))


# The command ----------------------------------------------------------------------------------

ON_CPU = ["--device", "cpu"]  # the names of CPU providers are asserted, also beside a GPU
TINY = [*ON_CPU, "--shapes", "64x128,32x64", "--formats", "int4-g32", "--m", "1,16"]


@pytest.fixture
def quick(monkeypatch):
    """Times are short, not made up."""
    monkeypatch.setattr(timing, "COLD", 1)
    monkeypatch.setattr(timing, "WINDOW", 1e-9)


def test_tune(tmp_path, capsys, quick):
    command = ["tune", *TINY, "--out", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    path = tmp_path / "A_CPU_1_thread.json"
    assert f"4 rows were measured and kept in {path}" in out
    entries = tables.read(path)
    assert [name.split()[1] for name in entries] == ["64x128", "32x64"]
    for entry in entries.values():
        wanted = {"onednn.dequant_strips", "onednn.dense"}
        assert set(entry["us"]["1"]) == wanted | {"aten.int4pack_mm"}
        assert set(entry["us"]["16"]) == wanted
    assert main(command) == 0 and "0 rows were measured" in capsys.readouterr().out
    assert main([*command, "--again"]) == 0 and "4 rows were" in capsys.readouterr().out


def test_tune_without_tqdm(tmp_path, capsys, quick, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["tune", *TINY, "--out", str(tmp_path)]) == 0
    lines = [row for row in capsys.readouterr().out.splitlines() if re.search(r"M=\d+: \S+ ", row)]
    assert len(lines) == 4


def test_tune_interrupted(tmp_path, capsys, monkeypatch):
    left = [4]

    def timer(calls, device):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(timing, "microseconds", timer)
    command = ["tune", *TINY, "--out", str(tmp_path)]
    assert main(command) == 130
    path = tmp_path / "A_CPU_1_thread.json"
    assert f"interrupted; 1 rows were measured and kept in {path}" in capsys.readouterr().out
    left[0] = 100
    assert main(command) == 0 and "3 rows were measured" in capsys.readouterr().out


def test_tune_with_a_wrong_provider(tmp_path, capsys, monkeypatch, quick):
    monkeypatch.setattr(Tiled, "wanted", ("t8", "wrong"))
    monkeypatch.setitem(DEQUANT_MATMUL.providers, "tiled", Tiled())
    assert main(["tune", *TINY, "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("WRONG: tiled@wrong at M=") == 4 and "4 rows were" in captured.out


def test_tune_s_budget(tmp_path, capsys, quick):
    command = ["tune", *TINY, "--out", str(tmp_path), "--budget", "1e-9"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "the budget is used up: the same command goes on" in out and "0 rows were" in out


FACTORY = """
import torch
from test_dispatch import Int4

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Int4(64, 128), Int4(128, 64), Int4(64, 128)
        self.bias = torch.nn.Parameter(torch.ones(64).bfloat16())

    def forward(self, x):
        scale = self.c.scale.repeat_interleave(32, 1)
        w = self.c.codes.bfloat16() * scale
        return torch.nn.functional.linear(self.b(self.a(x)), w, self.bias)

def factory():
    return Two(), (torch.ones(2, 128).bfloat16(),), {}

def dense():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),), {}
"""


def test_tune_a_model(tmp_path, capsys, monkeypatch, quick):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    file = tmp_path / "model.py"
    file.write_text(FACTORY)
    assert main(["tune", f"{file}:factory", *ON_CPU, "--m", "1", "--out", str(tmp_path)]) == 0
    assert "2 weights on A CPU" in capsys.readouterr().out
    sizes = [name.split()[1] for name in tables.read(tmp_path / "A_CPU_1_thread.json")]
    assert sizes == ["64x128", "128x64"], "with a bias or without: one entry"
    assert main(["tune", f"{file}:dense", "--out", str(tmp_path)]) == 2
    assert "error: nothing to tune in this model" in capsys.readouterr().err


def test_contracts_of_experts_are_tuned_as_one_weight():
    asked_for = case("int4", 1, 64, 128, 1, 32, experts=4, bias=True).contract

    def explained(module):
        DEQUANT_MATMUL.plan(asked_for, "cpu", None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qinductor, "explain", explained)
        assert found_in(DEQUANT_MATMUL, "module", (), {}) == [INT4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--formats", "int4-q"], "no format: 'int4-q'; wanted mxfp4, nvfp4, or CODES-BLOCK"),
        (["--shapes", "64"], "no shape: '64'; wanted NxK"),
        (["--m", "1,x"], "no list of M: '1,x'"),
        (["--m", "3"], "the dispatcher knows M of [1, 2, 4, "),
        (["--out", "/dev/null/no", *TINY], "cannot write /dev/null/no/A_CPU_1_thread.json"),
        (["missing.py:f"], "wanted FILE.py:FACTORY with an existing file"),
    ],
)
def test_bad_input(capsys, quick, arguments, says):
    assert main(["tune", *arguments]) == 2
    assert f"error: {says}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU can")
def test_no_gpu(capsys):
    assert main(["tune", "--device", "cuda"]) == 2
    assert "no CUDA device is here; wanted --device cpu" in capsys.readouterr().err


# Formats --------------------------------------------------------------------------------------

E2M1 = "float4_e2m1fn[256,512]"


@pytest.mark.parametrize(
    ("word", "summary"),
    [
        ("int4-g128", "bf16 x int4[256,512] group-128 scale bf16 q*s"),
        ("uint4-g64-zp", "bf16 x uint4[256,512] group-64 scale bf16 zero int8 (q-z)*s"),
        ("uint4-g64-zp-fp16", "fp16 x uint4[256,512] group-64 scale fp16 zero int8 (q-z)*s"),
        ("int8-channel", "bf16 x int8[256,512] channel scale bf16 q*s"),
        ("int8-tensor-fp32", "fp32 x int8[256,512] tensor scale fp32 q*s"),
        ("fp8_e4m3-block128", "bf16 x float8_e4m3fn[256,512] block-128x128 scale bf16 q*s"),
        ("fp8_e5m2-channel", "bf16 x float8_e5m2[256,512] channel scale bf16 q*s"),
        ("nf4-g64", "bf16 x table4[256,512] group-64 scale bf16 table bf16 q*s"),
        ("mxfp4", f"bf16 x {E2M1} group-32 scale float8_e8m0fnu q*s"),
        ("nvfp4", f"bf16 x {E2M1} group-16 scale float8_e4m3fn row scale fp32 q*s*t"),
        ("int3-g32", "bf16 x int3[256,512] group-32 scale bf16 q*s"),
    ],
)  # fmt: skip
def test_formats(word, summary):
    contract = contract_of(word, 256, 512)
    assert contract.summary == summary
    x, source = Case("", 2, contract).make()
    out = reference(contract, x, source)
    assert out.shape == (2, 256) and out.isfinite().all()


@pytest.mark.parametrize(
    "word",
    ["", "int4", "int9-g32", "int4-g", "int4-g0", "int4-g32-z", "fp8_e4m3-g32-zp", "mxfp4-g32",
     "int4-g32-zp-bf8", "g32", "int4-block", "-g32"],
)  # fmt: skip
def test_no_formats(word):
    with pytest.raises(OptionError) as caught:
        contract_of(word, 64, 64)
    for valid in ("mxfp4", "nf4", "uint4", "g<K>", "channel", "zp", "fp16"):
        assert valid in str(caught.value)


def test_shapes_and_rows():
    assert shape_of("28672x4096") == (28672, 4096) and rows_of("16,1,16") == [1, 16]
    for word in ("0x4", "4x", "4*4", "4x4x4"):
        with pytest.raises(OptionError, match="wanted NxK"):
            shape_of(word)
    for word in ("", "0", "1,,2", "-1", "1 2"):
        with pytest.raises(OptionError, match="wanted such as 1,2,16"):
            rows_of(word)


# Timing ---------------------------------------------------------------------------------------


def test_operands_rotate():
    seen = []
    x, packed = torch.ones(4), [torch.ones(2), torch.zeros(3)]
    calls = timing.rotated(lambda x, packed: seen.append((x, packed)), x, packed)
    assert len(calls) == timing.MOST
    for call in calls:
        call()
    assert len({given[0].data_ptr() for given in seen}) == len(calls)
    assert all(torch.equal(a, b) for _, held in seen for a, b in zip(held, packed, strict=True))
    assert timing.copies(1 << 40) == 2 and timing.copies(100 << 20) == 3 and timing.copies(0) == 64


def test_the_clock(monkeypatch):
    """Calls that take 1, 2 and 3 ms, of which the first round takes much longer."""
    now, rounds = [0.0], [0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call_of(seconds):
        def call():
            rounds[0] += 1
            now[0] += 1.0 if rounds[0] <= 3 else seconds

        return call

    calls = [call_of(seconds) for seconds in (1e-3, 2e-3, 3e-3)]
    assert timing.microseconds(calls, "cpu") == pytest.approx(2000)


# The benchmark --------------------------------------------------------------------------------

BENCH = ["bench", "dequant_matmul", *ON_CPU, "--shape", "64x128", "--m", "1,16"]


def test_bench(tmp_path, capsys, quick):
    path = tmp_path / "out.json"
    assert main([*BENCH, "--format", "uint4-g32-zp", "--json", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    data = json.loads(path.read_text())
    names = ["onednn.dequant_strips", "onednn.dense", "qinductor", bench.STOCK, bench.DENSE]
    assert list(data["us"]) == names
    assert all(us > 0 for row in data["us"].values() for us in row.values())
    assert all(list(row) == ["1", "16"] for row in data["us"].values())
    assert data["device"] == CPU and data["torch"] == torch.__version__ and not data["floor"]
    assert data["routes"] == dict.fromkeys(["1", "16"], "onednn.dequant_strips")
    assert f"on {CPU}; torch {torch.__version__}, triton " in out[0]
    table = out[2:8]
    assert [row.split("  ")[0] for row in table] == ["M", *names]
    assert len({len(row) for row in table}) == 1, "aligned"
    assert out[8:] == ["qinductor (limits):", "  from M=1: onednn.dequant_strips"]


def test_bench_of_a_provider_with_configs(quick, monkeypatch, tmp_path):
    """Its best measured config is run, else its own choice; M beyond a limit is left out."""
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setitem(DEQUANT_MATMUL.providers, "tiled", Tiled())
    monkeypatch.setitem(DEQUANT_MATMUL.providers, "plain", Plain())
    asked.clear()
    result = bench.measured(INT4, [1, 8], "cpu", timer=Clock())
    assert {config for name, config, _ in asked if name == "tiled"} == {"t8"}
    assert list(result.us["plain"]) == [1] and list(result.us["tiled"]) == [1, 8]
    key, rows = tables.key("dequant_matmul", INT4), {8: {"tiled@t32": 1.0, "onednn.dense": 2.0}}
    merge(tables.own() / tables.file_of(CPU), CPU, key, {}, rows)
    asked.clear()
    result = bench.measured(INT4, [8], "cpu", timer=Clock())
    assert {config for name, config, _ in asked if name == "tiled"} == {"t32"}
    assert result.routes == {8: "tiled@t32"}
    assert result.rung == "tuned here for M 4 to 16, else limits"
    assert "  from M=8: tiled t32" in bench.text(result).splitlines()


@pytest.mark.parametrize(
    "word", ["int4-g32", "uint4-g32-zp", "int8-channel", "fp8_e4m3-block32", "nf4-g32", "nvfp4"]
)
def test_stock_computes_the_same(word, monkeypatch):
    """What is compared with must be right, and read two 4-bit codes from a byte."""
    monkeypatch.setattr(timing, "COLD", 1)
    contract = contract_of(word, 64, 128)
    weight = trial.Weight(DEQUANT_MATMUL, contract, "cpu")
    x = weight.x(3)
    first, second = bench._stock(weight, x)
    want = torch.nn.functional.linear(x, weight.w)
    for call in (first, second):
        assert torch.allclose(call(), want, rtol=0.02, atol=0.02 * float(want.abs().max()))
    _, codes, *_ = first.__defaults__[0]
    assert codes.nbytes == 64 * 128 * contract.weight.bits // 8


def result(**more):
    us = {"a": {1: 2.0, 16: 30.0}, "few": {1: 12.5}, "qinductor": {1: 2.0, 16: 28.25}}
    given = {"floor": {1: 1.0, 16: 20.0}, "routes": {1: "a@n8", 16: "a@n8"}, "rung": "heuristic"}
    return bench.Result("NVIDIA H200", "a contract", us, **{**given, **more})


def test_the_table_of_a_benchmark():
    lines = bench.text(result()).splitlines()
    assert lines[1] == "us (ratio to the floor), operands in no cache"
    assert lines[2:] == [
        "M                     1           16",
        "a            2.0 (2.00)  30.0 (1.50)",
        "few        12.5 (12.50)            -",
        "qinductor    2.0 (2.00)  28.2 (1.41)",
        "floor        1.0 (1.00)  20.0 (1.00)",
        "qinductor (heuristic):",
        "  from M=1: a n8",
    ]


def test_a_plot_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "measured", lambda *args: pytest.fail("measured first"))
    assert main([*BENCH, "--plot", str(tmp_path / "out.png")]) == 2
    err = capsys.readouterr().err
    assert err == "error: --plot needs matplotlib: pip install 'qinductor[bench]'\n"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_plot(tmp_path):
    bench.plot(result(), str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_operators_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "router"])
    assert stop.value.code == 2 and "dequant_matmul" in capsys.readouterr().err


def test_errors_are_of_ours():
    assert issubclass(OptionError, QinductorError)
