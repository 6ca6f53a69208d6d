"""The Triton family of activation quantisers compiled for GPUs that are not here, and that its
checks can fail."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorder import Recorder

from qinductor.kernels import quantize_cases as cases
from qinductor.kernels import quantize_triton as family
from qinductor.kernels import quantize_triton_checks as checks
from qinductor.kernels import quantize_triton_kernels as kernels
from qinductor.kernels import quantize_triton_numbers as numbers
from qinductor.kernels.quantize import results

ALL = dict([*kernels.compile_checks(), *numbers.compile_checks()])
FEW = [
    name
    for name in ALL
    if name.startswith(("quantise group v2", "extremes", "quantise token of"))
    or "silu" in name
    and "m4096" in name
]


def test_the_checks_have_names_of_their_own_and_every_target():
    assert len(ALL) == len([*kernels.compile_checks(), *numbers.compile_checks()])
    for target in ("sm_80", "sm_90", "sm_100"):
        for kernel in ("quantise", "extremes"):
            assert any(n.startswith(kernel) and n.endswith(target) for n in ALL), (kernel, target)


@pytest.mark.parametrize("name", FEW)
def test_compiled(name):
    ALL[name]()


def test_registers_that_do_not_suffice_are_found():
    with pytest.raises(RuntimeError, match=r"sm_90: \d+ bytes spill"):
        checks.held("quantise", cases.contract(7168, group=7168), 90, "r4.c8192.w2")


@pytest.mark.parametrize(
    ("target", "field", "old", "new", "fault"),
    [
        (90, "spills", 0, 8, "8 bytes spill"),
        (90, "ptx", "ld.global.v4", "ld.global.v2", "no load of 16 bytes"),
        (90, "ptx", "st.global.v4", "st.global.v2", "no store of 16 bytes"),
        (90, "ptx", "div.rn.f32", "div.approx.f32", "a quotient is not rounded"),
        (90, "ptx", "div.rn.f32", "div.full.f32", "a quotient is not rounded"),
        (90, "ptx", "mul.rn.f32", "mul.rn.ftz.f32", "subnormal numbers become 0"),
        (90, "ptx", "mul.rn.f32", "fma.rn.f32", "are rounded once"),
        (90, "ptx", "cvt.rn.satfinite", "cvt.rn", "converted by software"),
        (80, "ptx", "ret;", "cvt.rn.satfinite.e4m3x2.f32 ret;", "sm_80 has no float8"),
    ],
)
def test_faults_are_found(target, field, old, new, fault):
    contract = cases.contract(512, **cases.V2)
    made = checks.build("quantise", contract, target, "r1.c512.w1")
    assert not checks.faults(made, contract, target)
    held = getattr(made, field)
    changed = new if field == "spills" else held.replace(old, new)
    assert changed != held
    assert fault in checks.faults(dataclasses.replace(made, **{field: changed}), contract, target)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_what_is_checked_is_what_is_launched(case, monkeypatch):
    """One launch; two where the scale is that of the whole tensor. The same constants and options,
    and an argument for every parameter."""
    recorder, compiled = Recorder("extremes", "quantise"), {}

    def note(function: Any, types: Any, constants: Any, target: int, **options: Any) -> Any:
        compiled[function.__name__] = list(function.arg_names), types, constants, options
        return SimpleNamespace()

    monkeypatch.setattr(checks, "compiled", note)
    contract, inputs = case.contract, case.inputs()
    config = family.candidates(contract, case.m)[0]
    found = results(contract, inputs)
    family.launch(contract, inputs, found, kernels=recorder)
    dynamic = not contract.group and not contract.static
    assert [name for name, *_ in recorder.calls] == ["extremes"] * dynamic + ["quantise"]
    for kernel, arguments, keywords in recorder.calls:
        checks.build(kernel, contract, 80, config)
        names, types, constants, options = compiled[kernel]
        assert len(arguments) + len(constants) == len(names)
        assert set(constants) == set(names) & set(keywords)
        free = {"LIB"}  # of a GPU
        for constant in set(constants) - free:
            assert constants[constant] == keywords[constant], constant
        assert options == {o: keywords[o] for o in options}
        for name, given in zip(names, arguments, strict=False):
            assert isinstance(given, torch.Tensor) == types[name].startswith("*"), name
            if isinstance(given, torch.Tensor):
                assert types[name] == checks.POINTERS[given.dtype], name
