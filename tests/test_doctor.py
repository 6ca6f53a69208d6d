"""`python -m qinductor doctor`: what it finds on this machine, and how each line can fail."""

import importlib.metadata
import json
import types

import pytest
import torch

import qinductor
from qinductor import doctor, tables
from qinductor.__main__ import main
from qinductor.doctor import Line, diagnose, why_not, within
from qinductor.op import OPS


def line(name: str) -> Line:
    (found,) = [line for line in diagnose() if line.name == name]
    return found


def gpu(monkeypatch, target="sm_90"):
    monkeypatch.setattr(doctor, "_gpus", lambda: [("NVIDIA H200", target, 141 << 30)])
    monkeypatch.setattr(qinductor.doctor, "_driver", lambda: "590.48")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def without(monkeypatch, *names):
    """Distributions that are not installed."""
    version = importlib.metadata.version

    def found(name):
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", found)


def test_this_machine_passes(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "machine" and text.endswith("qinductor works here\n")
    assert "FAIL" not in text
    assert all(len(row) <= doctor.WIDTH for row in text.splitlines())
    column = text.splitlines()[1].index("3.")
    assert text.splitlines()[2][column - 1 : column + 1].strip(), "columns are aligned"


def test_as_data(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is True
    assert [Line(**row) for row in found["lines"]] == diagnose()
    names = {row["name"] for row in found["lines"]}
    assert {"python", "system", "cpu", "torch", "triton", "sympy", "entry point", "cache"} <= names


def test_every_provider_has_a_line():
    qinductor.load()
    wanted = [(entry.name, name) for entry in OPS.values() for name in entry.providers]
    assert wanted
    assert [(line.group, line.name) for line in diagnose() if line.group in OPS] == wanted


def test_unknown_arguments_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--all"])
    assert stop.value.code == 2 and "--all" in capsys.readouterr().err


# What can be missing.


@pytest.mark.parametrize("version", ["2.10.0+cpu", "2.15.0", "3.0"])
def test_torch_out_of_range(monkeypatch, capsys, version):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "torch" else real(name)
    )
    assert line("torch") == Line("software", "torch", version, "wanted <2.15,>=2.11", True)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"FAIL  {version}: wanted <2.15,>=2.11" in text
    assert text.endswith("qinductor does not work here: see FAIL\n")


def test_required_software(monkeypatch):
    without(monkeypatch, "sympy")
    assert line("sympy") == Line(
        "software", "sympy", "not installed", "pip install sympy", required=True
    )
    assert main(["doctor"]) == 1


def test_optional_software(monkeypatch):
    without(monkeypatch, "nvidia-cutlass-dsl")
    assert line("nvidia-cutlass-dsl").problem == "pip install 'qinductor[cute]'"
    assert main(["doctor"]) == 0


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    torch._inductor.cpp_builder.cpp_compiler_search.cache_clear()
    found = line("C++ compiler")
    torch._inductor.cpp_builder.cpp_compiler_search.cache_clear()
    assert found.found == "none" and found.required
    assert found.problem == "Inductor compiles its CPU code with one; install g++ or set CXX"


def test_not_registered(monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **given: [])
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is False
    (row,) = [row for row in found["lines"] if row["name"] == "entry point"]
    assert row["found"] == "not registered" and "pip install -e ." in row["problem"]


def test_not_installed_at_all(monkeypatch):
    """Run from a clone: without metadata no range is known."""

    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert line("torch").problem is None


def test_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert line("cache").found == f"{tmp_path} (there)"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert line("cache") == Line(
        "backend", "cache", f"{tmp_path}/a/b (not there yet)", None, required=True
    )
    assert not (tmp_path / "a").exists(), "looking made it"
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert line("cache").problem == f"{tmp_path} cannot be written to"


def test_tables_of_times(monkeypatch, tmp_path):
    gpu(monkeypatch)
    monkeypatch.setenv("QINDUCTOR_CACHE", str(tmp_path))
    assert line("times cpu") == Line("backend", "times cpu", "none: not the current device")
    names = {"cpu": "A CPU", "sm_90": "NVIDIA H200"}
    monkeypatch.setattr(tables, "device", names.get)
    assert line("times cpu").found == (
        "none for A CPU: the providers' limits choose; python -m qinductor tune"
    )
    path = tables.own() / "NVIDIA_H200.json"
    entry = {"versions": {}, "us": {"1": {"a": 1.0}}}
    for folder, keys in ((path.parent, ["op 1x1 a=b"]), (tmp_path / "ours", ["op 2x2 a=b"] * 2)):
        folder.mkdir(parents=True)
        entries = {f"{key}{i}": entry for i, key in enumerate(keys)}
        (folder / path.name).write_text(json.dumps({"device": "NVIDIA H200", "entries": entries}))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "ours")
    tables.load.cache_clear()
    assert line("times sm_90").found == (
        f"weights tuned here: 1 ({path}); tuned for NVIDIA H200: 2"
    )
    tables.load.cache_clear()


# GPUs.


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ({"cuda": None, "hip": None}, "this torch is built without CUDA"),
        ({"cuda": None, "hip": "7.0"}, "this torch is built for HIP 7.0; wanted CUDA"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, version, reason):
    for name, value in version.items():
        monkeypatch.setattr(torch.version, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert line("gpu") == Line("machine", "gpu", "none", reason)
    assert main(["doctor"]) == 0


def test_a_driver_that_is_missing(monkeypatch):
    def init():
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert line("gpu").problem == "Found no NVIDIA driver on your system."
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert line("gpu").problem == "CUDA 13.0 sees no device"


def test_properties_of_gpus(monkeypatch):
    properties = types.SimpleNamespace(name="NVIDIA B200", major=10, minor=0, total_memory=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert doctor._gpus() == [("NVIDIA B200", "sm_100", 5)] * 2


def test_a_gpu(monkeypatch):
    gpu(monkeypatch)
    assert line("gpu 0") == Line(
        "machine", "gpu 0", "NVIDIA H200, sm_90, 141 GiB, CUDA 13.0, driver 590.48"
    )
    assert line("aten.int4pack_mm_cuda").found == "runs on sm_90"
    assert {row.found for row in diagnose() if row.name == "reference"} == {"runs on cpu, sm_90"}


def test_an_old_gpu(monkeypatch):
    gpu(monkeypatch, "sm_75")
    assert line("aten.int4pack_mm_cuda") == Line(
        "dequant_matmul", "aten.int4pack_mm_cuda", "not here",
        "it is for sm_80, sm_90, sm_100; this machine has cpu, sm_75",
    )  # fmt: skip


def test_a_provider_may_say_what_is_missing():
    here = types.SimpleNamespace(runs_on=lambda target: True)
    assert why_not(here, ["cpu"]) is None
    here.missing = lambda: "nvidia-cutlass-dsl is not installed"
    assert why_not(here, ["cpu"]) == "nvidia-cutlass-dsl is not installed"
    nowhere = types.SimpleNamespace(runs_on=lambda target: False)
    assert why_not(nowhere, ["cpu"]) == "it is for no target; this machine has cpu"


@pytest.mark.parametrize(
    ("version", "limits", "inside"),
    [
        ("2.13.0+cpu", ">=2.11,<2.15", True),
        ("2.11.0", ">=2.11,<2.15", True),
        ("2.15.0", ">=2.11,<2.15", False),
        ("2.15.0.dev20260101", ">=2.11,<2.15", False),
        ("2.9", ">=2.11", False),
        ("1.0", "", True),
    ],
)
def test_within(version, limits, inside):
    assert within(version, limits) is inside
