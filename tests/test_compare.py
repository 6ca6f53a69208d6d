"""`python -m qinductor compare` on a CPU at tiny shapes, with peers and times that are made up."""

import importlib.util
import json
import operator
import sys
import types
import warnings

import pytest
import torch

import qinductor
from qinductor import cells, compare, peers, tables, timing, trial, tune
from qinductor.__main__ import main
from qinductor.bench import nearest
from qinductor.cells import CHOSEN, CUTE, SCALED, Cell, Key, Page
from qinductor.errors import QinductorError
from qinductor.formats import contract_of
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Operands, reference
from qinductor.kernels.scaled_matmul_cases import Case
from qinductor.tune import Tuner

qinductor.load()
CPU = "A CPU, 1 thread"
WORD, SHAPE = "int8-row", "64x128"
INT8 = contract_of(WORD, 64, 128)
KEY = Key(WORD, SHAPE, 4)
OURS = ["aten.int_mm", "aten.mm_in_blocks"]


@pytest.fixture(autouse=True)
def cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "device", lambda target: CPU if target == "cpu" else None)
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path / "cache"))
    tables.load.cache_clear()


class Fake(peers.Common):
    """The reference as a peer; `how` it goes wrong."""

    def __init__(self, name, how=""):
        self.name, self.how, self.calls = name, how, []

    def missing(self):
        return f"{self.name} is not installed" if self.how == "missing" else None

    def version(self):
        return "1.2"

    def why_not(self, contract):
        return "it takes no int8" if self.how == "why_not" else None

    def pack(self, contract, source):
        return [source.weight.codes, source.weight.scale]

    def arrange(self, contract, x):
        return list(x)

    def run(self, contract, given, packed):
        self.calls.append(given[0].shape[0])
        if self.how == "raises":
            raise RuntimeError("no kernel\nfor this")
        weight = trial.ScaledWeight(SCALED_MATMUL, contract, "cpu").source.weight
        out = reference(contract, *given, Operands(weight))
        return out * 1.1 if self.how == "wrong" else out


class Clock:
    """A timer that calls once and answers in turn from a list, then with the last."""

    def __init__(self, *us):
        self.us, self.count = list(us), 0

    def __call__(self, calls, device):
        assert device == "cpu" and len(calls) >= 2
        calls[-1]()
        self.count += 1
        return self.us.pop(0) if len(self.us) > 1 else self.us[0]


@pytest.fixture
def fakes(monkeypatch):
    def use(*others):
        monkeypatch.setattr(peers, "ALL", {other.name: other for other in others})
        return others

    return use


def comparison(path, clock, others=(), **more):
    tuner = Tuner("cpu", tables.own())
    return compare.Comparison(Page(path, tuner.name, tuner.target), tuner, others, clock, **more)


# What is measured -----------------------------------------------------------------------------


def test_a_cell_has_ours_and_others_and_what_the_dispatcher_picks(fakes, tmp_path):
    others = fakes(Fake("good"), Fake("bad", "wrong"), Fake("broken", "raises"),
                   Fake("absent", "missing"), Fake("picky", "why_not"))  # fmt: skip
    clock = Clock(10.0, 20.0, 8.0)
    made = comparison(tmp_path / "p.json", clock, others)
    line = made.measure(WORD, SHAPE, 4, {})
    cell = made.page.cells[KEY]
    assert list(cell.us) == [*OURS, CHOSEN, "good"] and clock.count == 3
    assert cell.us[CHOSEN] == cell.us[cell.routes[CHOSEN].partition("@")[0]], "not timed again"
    assert cell.us["good"] == 8.0 and cell.peers() == {"good": 8.0}
    assert cell.ratio(CHOSEN) == cell.us[CHOSEN] / 8.0 and cell.ratio(CUTE) is None
    assert cell.notes["bad"].startswith("failed: AssertionError: rms error")
    assert cell.notes["broken"] == "failed: RuntimeError: no kernel"
    assert cell.notes["absent"] == "absent is not installed"
    assert cell.notes["picky"] == "it takes no int8"
    assert "best peer good 8.0" in line and "broken failed: RuntimeError: no kernel" in line
    assert made.page.versions == dict.fromkeys(["good", "bad", "broken", "picky"], "1.2")


def test_without_peers(fakes, tmp_path):
    fakes()
    made = comparison(None, Clock(10.0))
    assert made.measure(WORD, SHAPE, 4, {}) == f"{WORD} {SHAPE} M=4: dispatcher 10.0"
    made.page.save()  # nowhere
    assert "nothing to compare" in cells.means(made.page.cells)


def test_a_peer_is_judged_by_the_operands_as_it_rounds_them(fakes):
    class Rounds(Fake):
        def seen(self, source, contract):
            self.source = source
            weight = trial.dataclasses.replace(source.weight, scale=source.weight.scale * 2)
            return trial.dataclasses.replace(source, weight=weight)

        def run(self, contract, given, packed):
            weight = trial.dataclasses.replace(self.source.weight, scale=packed[1])
            return reference(contract, *given, Operands(weight))

    (peer,) = fakes(Rounds("rounds"))
    made = comparison(None, Clock(10.0), [peer])
    made.measure(WORD, SHAPE, 4, {})
    assert made.page.cells[KEY].us["rounds"] == 10.0
    peer.seen = lambda source, contract: source  # now its result has another scale
    peer.pack = lambda contract, source: [source.weight.codes, source.weight.scale * 2]
    made.measure(WORD, SHAPE, 8, {})
    assert "failed" in made.page.cells[KEY._replace(m=8)].notes["rounds"]


def test_a_provider_that_another_had_to_stand_in_for_has_no_time(monkeypatch, fakes):
    fakes()
    provider = SCALED_MATMUL.providers["aten.int_mm"]
    run = type(provider).run

    def warned(self, *args):
        warnings.warn("aten.int_mm cannot be made: no; another runs instead", stacklevel=2)
        return run(self, *args)

    monkeypatch.setattr(type(provider), "run", warned)
    made = comparison(None, Clock(10.0))
    made.measure(WORD, SHAPE, 4, {})
    cell = made.page.cells[KEY]
    assert "runs instead" in cell.notes["aten.int_mm"] and "aten.int_mm" not in cell.us


def test_goes_on_from_a_file(fakes, tmp_path):
    good, late = fakes(Fake("good"), Fake("late", "missing"))
    path = tmp_path / "p.json"
    first = comparison(path, Clock(10.0), [good, late])
    first.run([(WORD, SHAPE)], [4], None)
    late.how, clock = "", Clock(7.0)
    again = comparison(path, clock, [good, late])
    again.run([(WORD, SHAPE)], [4], None)
    cell = again.page.cells[KEY]
    assert clock.count == 1 and cell.us["late"] == 7.0 and not cell.notes
    assert cell.us["good"] == 10.0 and Page(path).cells == again.page.cells
    clock = Clock(3.0)
    comparison(path, clock, [good, late]).run([(WORD, SHAPE)], [4], None)
    assert not clock.count
    again = comparison(path, Clock(3.0), [good, late], again=True)
    again.run([(WORD, SHAPE)], [4], None)
    assert again.page.cells[KEY].us == dict.fromkeys([*OURS, CHOSEN], 3.0) | {
        "good": 10.0,
        "late": 7.0,
    }
    key, times = tables.key("scaled_matmul", INT8), {4: {"aten.mm_in_blocks": 1.0}}
    file = tables.own() / tables.file_of(CPU)
    tune.merge(file, CPU, key, {}, times)
    clock = Clock(3.0)
    tuned = comparison(path, clock, [good, late])
    tuned.run([(WORD, SHAPE)], [4], None)
    cell = tuned.page.cells[KEY]
    assert cell.routes[CHOSEN] == "aten.mm_in_blocks" and not clock.count
    assert cell.us[CHOSEN] == cell.us["aten.mm_in_blocks"]
    assert nearest(
        tables.load(CPU, tables.own()).find("scaled_matmul", INT8, {"aten.mm_in_blocks": 1}), 4
    )


def test_what_failed_is_not_tried_again(fakes, tmp_path):
    (broken,) = fakes(Fake("broken", "raises"))
    for _ in range(2):
        comparison(tmp_path / "p.json", Clock(10.0), [broken]).run([(WORD, SHAPE)], [4], None)
    assert broken.calls == [4]


def test_a_lost_device_is_said_after_the_note_is_kept(fakes, tmp_path, monkeypatch):
    (broken,) = fakes(Fake("broken", "raises"))
    made = comparison(tmp_path / "p.json", Clock(10.0), [broken])

    def lost():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    made.device = "cuda"
    with pytest.raises(compare.Lost, match="lost after broken; run the command again: an illegal"):
        made._time(made.page.cells.setdefault(KEY, Cell()), "broken", 4,
                   {"weight": trial.ScaledWeight(SCALED_MATMUL, INT8, "cpu")},
                   lambda weight: compare.theirs(weight, broken), "broken", INT8)  # fmt: skip
    assert Page(tmp_path / "p.json").cells[KEY].notes["broken"] == "failed: RuntimeError: no kernel"


def test_prepared_runs_each_once_whatever_happens(fakes, monkeypatch):
    good, broken = fakes(Fake("good"), Fake("broken", "raises"))
    for peer in (good, broken):
        compare.prepared(WORD, SHAPE, [("", 1), ("", 4)], peer.name, "cpu")
        assert peer.calls == [1, 4]
    ran = []
    monkeypatch.setattr(compare, "blank", lambda op, contract, *rest: ran.append(rest))
    compare.prepared(WORD, SHAPE, [("aten.int_mm", 1)], None, "cpu")
    assert ran == [("aten.int_mm", 1, "cpu")]
    tasks = []
    monkeypatch.setattr(compare, "spread", lambda function, given, jobs: tasks.extend(given))
    comparison(None, Clock(1.0), [good, broken]).prepare([WORD], [SHAPE], [1, 4], 3)
    assert [task[3] for task in tasks] == [None, "good", "broken"]
    assert {route for route, _ in tasks[0][2]} == set(OURS)


# What is made of cells ------------------------------------------------------------------------


def cell(cute=None, chosen=None, **others):
    us = {CUTE: cute, CHOSEN: chosen, **others}
    return Cell({name: time for name, time in us.items() if time is not None})


@pytest.fixture
def page(fakes):
    fakes(Fake("torch"), Fake("deep_gemm"))
    made = Page(None, "NVIDIA H200", "sm_90")
    made.cells = {
        Key("fp8-row-fast", "64x128", 1): cell(2.0, 1.0, torch=4.0, deep_gemm=2.0),
        Key("fp8-row-fast", "64x128", 16): cell(9.0, 4.0, torch=2.0),
        Key("fp8-row-fast", "32x64", 1): cell(3.0, 3.0),
        Key("int8-row", "64x128", 1): cell(None, 123.4),
    }
    made.cells[Key("int8-row", "64x128", 1)].notes = {"torch": "it takes no int8"}
    return made


def test_means(page):
    lines = cells.means(page.cells).splitlines()
    assert lines[1:] == [
        "format | whose | all | worst | M=1 | M=16",
        # (2/2 * 9/2)^1/2 and (1/2 * 4/2)^1/2; a cell without peers is in no mean
        "fp8-row-fast | cute.scaled_mma | 2.121 of 2 | 4.50 64x128 M=16 | 1.00 | 4.50",
        "fp8-row-fast | dispatcher | 1.000 of 2 | 2.00 64x128 M=16 | 0.50 | 2.00",
        "int8-row | cute.scaled_mma | nothing to compare",
        "int8-row | dispatcher | nothing to compare",
        "no time in 1 cells: torch: it takes no int8",
    ]


def test_the_table(page):
    page.versions = {"torch": "2.11"}
    page.head["torch"], page.head["triton"] = "2.11", "3.6"
    floors = dict.fromkeys(page.cells, 0.5)
    assert cells.table(page, page.cells, floors).splitlines() == [
        "NVIDIA H200, torch 2.11, triton 3.6; torch 2.11; microseconds",
        "",
        "`fp8-row-fast`: dispatcher / cute.scaled_mma / torch / deep_gemm / floor",
        "",
        "| N x K | 1 | 16 |",
        "|---|---|---|",
        "| 64 x 128 | 1.0 / 2.0 / 4.0 / 2.0 / 0.5 | 4.0 / 9.0 / 2.0 / - / 0.5 |",
        "| 32 x 64 | 3.0 / 3.0 / - / - / 0.5 | - / - / - / - / - |",
        "",
        "`int8-row`: dispatcher / floor",
        "",
        "| N x K | 1 | 16 |",
        "|---|---|---|",
        "| 64 x 128 | 123 / 0.5 | - / - |",
    ]


def test_published_figures_are_scaled_by_what_is_measured_here(fakes):
    fakes(Fake("deep_gemm"))
    blocks, small = cells.BLOCKS, cells.SMALL_BLOCKS
    figures = {
        blocks: {"a": {"1": (10.0, "DeepGEMM"), "4": (10.0, "humming"), "16": (10.0, "DeepGEMM")}},
        small: {"a": {"1": (20.0, "DeepGEMM"), "4": (20.0, "DeepGEMM")}},
    }
    measured = {
        Key(blocks, "a", 1): cell(deep_gemm=11.0),
        Key(blocks, "a", 4): cell(deep_gemm=30.0),  # the figure is another's
        Key(blocks, "a", 16): cell(deep_gemm=13.0),
    }
    asked = {Key(small, "a", m): cell(5.0) for m in (1, 4, 16)}
    found = cells.scaled(asked, measured, figures)
    assert found[Key(small, "a", 1)].us == {CUTE: 5.0, SCALED: 22.0}
    assert found[Key(small, "a", 4)].us == {CUTE: 5.0, SCALED: 24.0}, "by the median of 1.1, 1.3"
    assert found[Key(small, "a", 16)].us == {CUTE: 5.0}, "nothing was published"
    assert found[Key(small, "a", 1)].ratio(CUTE) == 5.0 / 22.0
    assert all(SCALED not in each.us for each in asked.values()), "it is not measured"
    assert cells.scaled(asked, {}, figures) == asked
    assert cells.scaled(measured, measured, figures) == measured


def test_the_figures_that_are_kept():
    figures = cells.published(None, "NVIDIA H200")
    rows = {str(m) for m in (1, 4, 16, 64, 128, 512, 4096)}
    for word in (cells.BLOCKS, cells.SMALL_BLOCKS):
        assert len(figures[word]) >= 8
        for row in figures[word].values():
            assert set(row) <= rows and all(us > 1 for us, _ in row.values())
    assert cells.published(None, "NVIDIA H100") == {} == cells.published(None, None)


def test_the_floor():
    """of 28672 x 4096 codes at M = 1, and of as many products as tensor cores do at M = 4096"""
    contract = contract_of("fp8-tensor-fast", 28672, 4096)
    assert compare.floor(contract, 1, "sm_90") == pytest.approx(28672 * 4096 / 4.2e6, rel=0.01)
    at = 2 * 4096 * 28672 * 4096 / 1630e6
    assert compare.floor(contract, 4096, "sm_90") == pytest.approx(at, rel=0.01)
    assert compare.floor(contract, 1, "cpu") is None


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_plot(page, tmp_path):
    cells.plot(page, page.cells, str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": {}}', "null"])
def test_a_file_that_is_none(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(QinductorError, match=r"p\.json holds no comparison"):
        Page(path, CPU, "cpu")
    with pytest.raises(QinductorError, match="holds no published figures"):
        cells.published(path, CPU)
    assert path.read_text() == text


def test_a_file_of_another_device(tmp_path):
    path = tmp_path / "p.json"
    Page(path, "NVIDIA H200", "sm_90").save()
    with pytest.raises(QinductorError, match="NVIDIA H200.*name another file"):
        Page(path, CPU, "cpu")
    assert Page(path).head["device"] == "NVIDIA H200", "to be shown anywhere"


# The command ----------------------------------------------------------------------------------

COMMAND = ["compare", "--device", "cpu", "--shapes", SHAPE, "--formats", WORD]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timing, "COLD", 1)
    monkeypatch.setattr(timing, "WINDOW", 1e-9)


def test_the_command(tmp_path, capsys, quick, fakes):
    fakes(Fake("good"), Fake("absent", "missing"))
    files = [str(tmp_path / name) for name in ("p.json", "t.md")]
    command = [
        *COMMAND,
        "--m",
        "1,4",
        "--peers",
        "good,absent",
        "--json",
        files[0],
        "--table",
        files[1],
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.count(f"{WORD} {SHAPE} M=") == 2 and f"{WORD} | dispatcher | " in out
    assert "no time in 2 cells: absent: absent is not installed" in out
    assert (tmp_path / "t.md").read_text().count("| 64 x 128 |") == 1
    held = json.loads((tmp_path / "p.json").read_text())
    assert list(held["cells"]) == [f"{WORD} {SHAPE} 1", f"{WORD} {SHAPE} 4"]
    assert held["device"] == CPU and held["peers"] == {"good": "1.2"}
    assert main([*command, "--show"]) == 0
    assert f"{WORD} {SHAPE} M=" not in (out := capsys.readouterr().out) and "| dispatcher |" in out


def test_the_command_interrupted(tmp_path, capsys, monkeypatch, fakes):
    (peer,) = fakes(Fake("good"))
    left = [4]

    def timer(calls, device):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(timing, "microseconds", timer)
    command = [*COMMAND, "--m", "1,4", "--peers", "good", "--json", str(tmp_path / "p.json")]
    assert main(command) == 130
    assert "interrupted: the same command goes on" in capsys.readouterr().out
    assert list(Page(tmp_path / "p.json").cells) == [Key(WORD, SHAPE, 1)]
    left[0], asked = 3, len(peer.calls)
    assert main(command) == 0 and set(peer.calls[asked:]) == {4} and left[0] == 0


def test_the_command_s_budget(capsys, fakes):
    fakes()
    assert main([*COMMAND, "--peers", "", "--budget", "-1"]) == 0
    assert "the budget is used up: the same command goes on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--peers", "torch,cutlass"],
            "no peer: cutlass; wanted torch,sgl_kernel,deep_gemm,humming",
        ),
        (["--formats", "int4-g128"], "int4-g128 is a format of dequant_matmul; wanted fp8-row"),
        (["--formats", "fp8-q"], "no format: 'fp8-q'"),
        (["--shapes", "64"], "no shape: '64'"),
        (["--m", "0"], "no list of M: '0'"),
        (["--show"], "--show needs a --json FILE that was measured"),
        (["--published", "/dev/null", "--budget", "-1"], "/dev/null holds no published figures"),
    ],
)
def test_bad_input(capsys, arguments, says):
    assert main([*COMMAND, *arguments]) == 2
    assert f"error: {says}" in capsys.readouterr().err


def test_a_plot_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(compare, "Comparison", lambda *args: pytest.fail("measured first"))
    assert main([*COMMAND, "--plot", "out.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


# Trials in general ----------------------------------------------------------------------------


def test_processes_of_their_own():
    assert trial.spread(operator.truediv, [(1, 1), (1, 0), (2, 1)], 1) == 1


@pytest.mark.parametrize("word", ["int8-row", "fp8-block128", "w4a8-fp8-g32", "int4-g32"])
def test_routes_run_on_memory_as_it_is(word, monkeypatch):
    contract = contract_of(word, 64, 128)
    op = tune.op_of(contract)
    for name in Tuner("cpu", tables.own()).limits(contract):
        provider, ran = op.providers[name], []
        monkeypatch.setattr(
            provider, "run", lambda *args, ran=ran, **more: ran.append((args, more)), raising=False
        )
        trial.blank(op, contract, f"{name}@x", 3, "cpu")
        (held, x, packed), more = ran[0]
        assert held == contract and more == {"config": "x"}
        real = trial.weight_of(op, contract, "cpu").x(3)
        pairs = zip(x, real, strict=True) if isinstance(x, list) else [(x, real)]
        assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
        wanted = list(provider.operands(contract).values())
        assert [(tuple(t.shape), t.dtype) for t in packed] == wanted
        monkeypatch.undo()


def test_tune_prepares_and_measures_the_first_configs(tmp_path, capsys, monkeypatch):
    tasks = []
    monkeypatch.setattr(tune, "spread", lambda function, given, jobs: tasks.extend(given) or 0)
    provider = SCALED_MATMUL.providers["aten.int_mm"]
    monkeypatch.setattr(type(provider), "configs", lambda *args: ["a", "b", "c"], raising=False)
    run = type(provider).run
    seen = []

    def configured(self, contract, inputs, packed, config):
        seen.append(config)
        return run(self, contract, inputs, packed)

    monkeypatch.setattr(type(provider), "run", configured)
    monkeypatch.setattr(timing, "microseconds", lambda calls, device: 1.0)
    command = ["tune", "--device", "cpu", "--shapes", SHAPE, "--formats", WORD, "--m", "1,4"]
    assert main([*command, "--out", str(tmp_path), "--configs", "2", "--jobs", "5"]) == 0
    routes = {task[2] for task in tasks}
    assert routes == {"aten.int_mm@a", "aten.int_mm@b", "aten.mm_in_blocks"} and len(tasks) == 6
    assert {task[2] for task in tasks[:3]} == routes, "what others need, too, is compiled first"
    assert set(seen) == {"a", "b"} and "ran 6 routes in 5 processes" in capsys.readouterr().out


def test_configs_of_a_provider(tmp_path, capsys):
    assert tune.most_of("") == {} and tune.most_of("3") == {"": 3}
    assert tune.most_of("triton.scaled_mma=3,2") == {"triton.scaled_mma": 3, "": 2}
    made = Tuner("cpu", tmp_path, most={"cute.scaled_mma": 2, "": 1})
    contract = contract_of("fp8-row", 4096, 4096)
    asked = [made.tried(SCALED_MATMUL, n, contract, 16) for n in (CUTE, "triton.scaled_mma")]
    assert list(map(len, asked)) == [2, 1]
    for wrong in ("0", "x", "nobody=3", "triton.scaled_mma=", "3,,x=1"):
        assert main(["tune", "--configs", wrong, "--out", str(tmp_path)]) == 2
        assert "error: no --configs: " in capsys.readouterr().err


def test_x_is_drawn_once_for_an_m(monkeypatch):
    weight = trial.ScaledWeight(SCALED_MATMUL, INT8, "cpu")
    first = weight.x(4)
    assert weight.x(4) is first and weight.x(4, 1) is not first
    assert not torch.equal(weight.x(4, 1)[0], first[0])
    weight.x(8)
    assert weight.x(4) is not first and torch.equal(weight.x(4)[0], first[0])


def test_what_is_judged_by_is_known_of_these_rows_alone():
    weight = trial.ScaledWeight(SCALED_MATMUL, INT8, "cpu")
    for m in (4, 40, 64):  # as many rows of the last two are judged
        weight.check("aten.int_mm", m)
        with pytest.raises(AssertionError, match="rms error"):
            weight.holds(
                lambda x: weight.function("aten.int_mm")[0](x, weight.packed["aten.int_mm"]) * 1.1,
                m,
            )


# The libraries' layouts -----------------------------------------------------------------------


def operands(word, m, n=256, k=512):
    contract = contract_of(word, n, k)
    a, scale, source = Case("", m, contract).make()
    if contract.group:
        scale = scale.t().contiguous().t()
    return contract, [a, scale], source


@pytest.fixture(scope="module")
def library():
    """sgl-kernel's operators, which hold what its C++ code holds."""
    made = torch.library.Library("sgl_kernel", "FRAGMENT")
    given = "Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype"

    def checked(a, b, sa, sb):
        assert a.stride(1) == 1 and b.stride(0) == 1 and b.stride(1) % 16 == 0
        assert sa.dtype == sb.dtype == torch.float32

    def rows(a, b, sa, sb, out, bias):
        checked(a, b, sa, sb)
        assert sa.is_contiguous() and sb.is_contiguous()
        assert sa.numel() == a.shape[0] and sb.numel() == b.shape[1]
        return (a.double() @ b.double() * sa.view(-1, 1) * sb.view(1, -1)).to(out)

    def blocks(a, b, sa, sb, out):
        checked(a, b, sa, sb)
        assert sa.shape == (a.shape[0], a.shape[1] // 128)
        assert sa.stride(0) == 1 or sa.is_contiguous() and sa.shape[0] == 1
        assert sb.shape == (b.shape[0] // 128, b.shape[1] // 128) and sb.stride(0) == 1
        wide = b.double() * sb.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (a.double() * sa.repeat_interleave(128, 1) @ wide).to(out)

    for name, more, function in (
        ("fp8_scaled_mm", ", Tensor? bias", rows),
        ("int8_scaled_mm", ", Tensor? bias", rows),
        ("fp8_blockwise_scaled_mm", "", blocks),
    ):
        made.define(f"{name}({given}{more}) -> Tensor")
        made.impl(name, function, "CPU")
    yield made
    made._destroy()


@pytest.mark.parametrize("m", [1, 6, 16])
@pytest.mark.parametrize("word", ["fp8-row-fast", "int8-row", "fp8-block128"])
def test_sgl_kernel(library, word, m):
    contract, x, source = operands(word, m)
    peer = peers.SglKernel()
    assert peer.why_not(contract) is None
    out = peer.run(contract, peer.arrange(contract, x), peer.pack(contract, source))
    torch.testing.assert_close(out, reference(contract, *x, source), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("word", "n", "k", "why"),
    [
        ("fp8-tensor", 256, 512, "it takes scales of rows"),
        ("fp8-block32", 256, 512, "it takes scales of rows"),
        ("w4a8-fp8-channel", 256, 512, "it takes scales of rows"),
        ("fp8-row-fp32", 256, 512, "it takes float8_e4m3fn and int8"),
        ("fp8-block128", 2112, 512, "W is 2112x512; it takes multiples of 128 and 128"),
        ("int8-row", 12, 512, "W is 12x512; it takes multiples of 8 and 16"),
    ],
)
def test_sgl_kernel_does_not_take(word, n, k, why):
    assert why in (peers.SglKernel().why_not(contract_of(word, n, k)) or "")


def test_where_sgl_kernel_is_looked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    monkeypatch.delenv(peers.LIBRARY, raising=False)
    assert "sgl-kernel is not installed" in peers.SglKernel().missing()
    monkeypatch.setenv(peers.LIBRARY, "/nowhere/common_ops.so")
    reason = peers.SglKernel().missing()
    assert reason.startswith("/nowhere/common_ops.so (QINDUCTOR_SGL_KERNEL) cannot be loaded: ")


@pytest.mark.parametrize("m", [1, 6, 16])
def test_deep_gemm(monkeypatch, m):
    def gemm(a, b, d):
        (codes, sa), (w, sw) = a, b
        assert sa.shape == (m, 4) and sa.stride() == (1, -(-m // 4) * 4), "aligned for TMA"
        assert sw.is_contiguous() and sw.shape == (2, 4) and d.is_contiguous()
        wide = w.double() * sw.repeat_interleave(128, 0).repeat_interleave(128, 1)
        d.copy_(codes.double() * sa.repeat_interleave(128, 1) @ wide.t())

    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace(fp8_gemm_nt=gemm))
    contract, x, source = operands("fp8-block128", m)
    peer = peers.DeepGemm()
    assert peer.missing() is None and peer.why_not(contract) is None
    given, packed = peer.arrange(contract, x), peer.pack(contract, source)
    for call in timing.rotated(lambda *args: peer.run(contract, *args), given, packed)[:2]:
        want = reference(contract, *x, source)
        torch.testing.assert_close(call(), want, rtol=0.01, atol=0.01)
    for word in ("fp8-row", "fp8-block32", "int8-row", "fp8-block128-fp16"):
        assert peer.why_not(contract_of(word, 256, 512)), word
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert peers.DeepGemm().missing() == "DeepGEMM is not installed (no module deep_gemm)"


def test_torch(monkeypatch):
    peer = peers.Torch()
    contract, x, source = operands("fp8-block128", 6)
    padded, scale = peer.arrange(contract, x)
    assert padded.shape == (8, 512) and scale.shape == (8, 4) and scale.stride() == (1, 8)
    assert torch.equal(scale[:6], x[1]) and torch.equal(padded.float()[:6], x[0].float())
    contract, x, source = operands("fp8-row-fast", 6)
    assert peer.arrange(contract, x)[0] is x[0] and peer.why_not(contract) is None
    assert (
        peer.why_not(contract_of("int8-row", 256, 512))
        == "int8 times int8; it takes float8 with float8"
    )
    packed = peer.pack(contract, source)
    assert [tuple(t.shape) for t in packed] == [(256, 512), (1, 256)]


def test_humming_does_not_take():
    peer = peers.Humming()
    for word in ("fp8-tensor-fast", "fp8-row-fast", "fp8-block128"):
        assert peer.why_not(contract_of(word, 4096, 4096)) is None
    for word, n in (
        ("fp8-block32", 4096),
        ("int8-row", 4096),
        ("fp8-block128", 2112),
        ("fp8-row-fp32", 4096),
    ):
        assert peer.why_not(contract_of(word, n, 4096)), word
    contract, _, source = operands("fp8-row", 1)
    seen = peer.seen(source, contract).weight.scale
    assert torch.equal(seen, source.weight.scale.bfloat16().float())
    assert not torch.equal(seen, source.weight.scale)
