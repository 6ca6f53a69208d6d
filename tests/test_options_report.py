"""Options are checked where they are given; a report reads as text and as data."""

import dataclasses
import json
import re
import threading

import pytest
import torch

import qinductor
from qinductor.errors import OptionError, QinductorError
from qinductor.options import MODES, SETTINGS, TARGETS, Options
from qinductor.report import KEPT, Report, Site, joined, last_report, remember, reports


def test_defaults():
    options = Options.of(None, None)
    assert options == Options() == Options.of({}, None)
    assert (options.patterns, options.inductor) == ((), ())
    assert (options.mode, options.target) == (None, None)
    assert options.setting("dequant_matmul", "on") == "on"


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_pattern_s_setting(setting):
    options = Options(patterns={"router": setting})
    assert options.setting("router", "on") == setting
    assert options.setting("dequant_matmul", "off") == "off"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", TARGETS)
def test_modes_and_targets(mode, target):
    options = Options.of({"mode": mode, "target": target}, None)
    assert (options.mode, options.target) == (mode, target)


def test_of_joins_the_mode_of_torch_compile():
    assert Options.of(None, "lite").mode == "lite"
    assert Options.of(Options(target="cpu"), "lite") == Options(target="cpu", mode="lite")
    given = Options(mode="default")
    assert Options.of(given, None) is given


@pytest.mark.parametrize(
    ("given", "nearest"),
    [({"pattern": {}}, "patterns"), ({"Mode": "lite"}, "mode"), ({"tagret": "cpu"}, "target")],
)
def test_an_unknown_option_names_the_nearest_known_one(given, nearest):
    with pytest.raises(OptionError) as caught:
        Options.of(given, None)
    (name,) = given
    assert f"unknown option {name!r}; did you mean {nearest!r}?" in str(caught.value)
    assert "known: patterns, mode, target, dense, weights, packed, cuda" in str(caught.value)


def test_an_unknown_pattern_names_the_nearest_known_one():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(OptionError, match="unknown pattern 'dequant_mm'; did you mean 'dequant_ma"):
        qinductor.explain(model, torch.ones(1, 4), options={"patterns": {"dequant_mm": "on"}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"patterns": {"router": "yes"}}, ["patterns['router']", "'yes'", "on, off, require"]),
        ({"patterns": {"router": True}}, ["patterns['router']", "True", "on, off, require"]),
        ({"patterns": {"router": None}}, ["patterns['router']", "None", "on, off, require"]),
        ({"patterns": "router"}, ["patterns must be a dict", "'router'"]),
        ({"patterns": 3}, ["patterns must be a dict", "3"]),
        ({"mode": "fast"}, ["mode", "'fast'", "reduce-overhead", "lite"]),
        ({"target": "sm_70"}, ["target", "'sm_70'", "sm_80", "cpu"]),
        ({"target": "cuda"}, ["target", "'cuda'", "sm_90"]),
        ({"packed": "always"}, ["packed", "'always'", "memory, disk"]),
        ({"inductor": 1}, ["inductor must be a dict", "1"]),
    ],
)
def test_a_bad_value_is_shown_with_what_is_wanted(given, words):
    with pytest.raises(OptionError) as caught:
        Options.of(given, None)
    assert all(word in str(caught.value) for word in words), caught.value
    assert isinstance(caught.value, (QinductorError, ValueError))


@pytest.mark.parametrize("given", [3, True, "patterns", ["patterns"], object()])
def test_options_that_are_no_dict(given):
    with pytest.raises(OptionError, match="options must be a dict, got"):
        Options.of(given, None)


@pytest.mark.parametrize(
    "given", [{"patterns": {1: "on", "router": "on"}}, {"inductor": {1: 2, "a": 3}}]
)
def test_names_that_are_no_strings(given):
    with pytest.raises(OptionError, match="1"):
        Options.of(given, None)


def test_frozen_hashable_and_printed():
    one = Options(patterns={"b": "off", "a": "on"}, inductor={"y": 1, "x": False})
    two = Options(patterns={"a": "on", "b": "off"}, inductor={"x": False, "y": 1})
    assert one == two and hash(one) == hash(two) and str(one) == str(two)
    assert Options(mode="lite") != Options(mode="default")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.mode = "lite"
    assert dataclasses.replace(one, mode="lite").patterns == one.patterns
    assert "'off'" in str(one)


def test_what_the_caller_changes_later_is_not_seen():
    patterns = {"router": "on"}
    options = Options(patterns=patterns)
    patterns["router"] = "off"
    assert options.setting("router", "require") == "on"


def sample() -> Report:
    lowered = Site(
        "layers.0.proj model.py:7", "dequant_matmul", lowered=True, contract="bf16 x int4[8,32]",
        provider="aten.int4pack_mm (M <= 16)", cost={"bytes": "144*M", "flops": "512*M"},
        evaluations=(13, 2),
    )  # fmt: skip
    left = Site("head", "dequant_matmul", reason="groups have 24 of K = 32; it takes 32")
    return Report("sm_90", [lowered, left], 0.25, 3_000_000, 1_000_000, notes=["a note"])


def test_a_report_as_text():
    head, columns, *rows, note = str(sample()).splitlines()
    assert head == (
        "qinductor: 1 of 2 sites lowered for sm_90 (1 graph; matching 0.25 s; "
        "packed weights 3.00 MB, of them dense 1.00 MB)"
    )
    assert re.split(r"  +", columns) == ["where", "pattern", "contract", "lowered to, or why not"]
    assert re.split(r"  +", rows[0])[3] == "aten.int4pack_mm (M <= 16)"
    reason = "NOT LOWERED: groups have 24 of K = 32; it takes 32"
    assert re.split(r"  +", rows[1]) == ["head", "dequant_matmul", "-", reason]
    starts = [line.index(word) for line, word in zip(rows, ("aten", "NOT"), strict=True)]
    assert len({columns.index("lowered"), *starts}) == 1, "the columns are not aligned"
    assert note == "a note"


def test_an_empty_report_has_no_table():
    assert str(Report()).splitlines() == [
        "qinductor: 0 of 0 sites lowered for cpu (1 graph; matching 0.00 s; "
        "packed weights 0.00 MB, of them dense 0.00 MB)"
    ]


def test_a_report_as_data():
    data = sample().to_dict()
    assert data["lowered"] == 1 and data["target"] == "sm_90" and data["notes"] == ["a note"]
    assert [site["lowered"] for site in data["sites"]] == [True, False]
    assert data["sites"][0]["evaluations"] == (13, 2)
    assert data["sites"][1]["reason"].startswith("groups have 24")
    assert set(data) == {field.name for field in dataclasses.fields(Report)} | {"lowered"}
    assert json.loads(json.dumps(data))["sites"][0]["cost"] == {"bytes": "144*M", "flops": "512*M"}
    data["sites"].clear()
    assert len(sample().sites) == 2


def test_joined_reports():
    both = joined([sample(), sample()])
    assert (both.graphs, both.lowered, len(both.sites), both.target) == (2, 2, 4, "sm_90")
    assert both.matching_seconds == 0.5
    assert (both.packed_bytes, both.dense_bytes) == (6_000_000, 2_000_000)
    assert both.notes == ["a note", "a note"]
    assert "2 of 4 sites lowered for sm_90 (2 graphs;" in str(both)
    one = sample()
    assert joined([one]) is one
    assert (joined([]).graphs, joined([]).target, joined([]).sites) == (0, "cpu", [])


def test_reports_are_kept_by_thread_and_not_for_ever():
    seen = []

    def other() -> None:
        seen.append(last_report())
        for i in range(KEPT + 2):
            remember(Report(graphs=i))
        seen.extend([last_report().graphs, len(reports()), reports()[0].graphs])

    before = last_report()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [None, KEPT + 1, KEPT, 2]
    assert last_report() is before
