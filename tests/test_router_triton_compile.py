"""The Triton family of routers compiled for GPUs that are not here, and that its checks can
fail."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorder import Recorder

from qinductor.kernels import router_triton as family
from qinductor.kernels import router_triton_checks as checks
from qinductor.kernels import router_triton_kernels as kernels
from qinductor.kernels.router_cases import CASES, MODELS

ALL = dict(kernels.compile_checks())
FEW = [
    name
    for name in ALL
    if name.startswith(("product n2", "product n16.k512.s7", "sum_parts", "select of sums"))
    or name == "select deepseek v2 sm_90"
]


def test_the_checks_have_names_of_their_own_and_every_target():
    assert len(ALL) == len(kernels.compile_checks())
    for target in ("sm_80", "sm_90", "sm_100"):
        for kernel in ("product", "sum_parts", "select"):
            assert any(n.startswith(kernel) and n.endswith(target) for n in ALL), (kernel, target)


@pytest.mark.parametrize("name", FEW)
def test_compiled(name):
    ALL[name]()


@pytest.mark.parametrize("m", [1, 4, 8, 16, 64])
def test_every_config_compiles(m):
    for config in family.product_configs(256, 7168, True, m):
        checks.held("product", 90, config=config, m=m)


def test_registers_that_do_not_suffice_are_found():
    with pytest.raises(RuntimeError, match=r"sm_90: \d+ bytes spill"):
        checks.held("product", 90, config="n8.k4096.s1.w4", m=4)


@pytest.mark.parametrize(
    ("kernel", "field", "old", "new", "fault"),
    [
        ("product", "spills", 0, 8, "8 bytes spill"),
        ("product", "ptx", "ld.global.v4", "ld.global.v2", "loads are not of 16 bytes"),
        ("product", "ptx", "ret;", "mma.sync ret;", "tensor cores"),
        ("select", "ptx", "div.rn.f32", "div.full.f32", "a quotient is not rounded"),
        ("select", "ptx", "div.rn.f32", "div.approx.f32", "a quotient is not rounded"),
        ("select", "ptx", "sub.rn.f32", "sub.rn.ftz.f32", "subnormal numbers become 0"),
        ("select", "ptx", "redux.sync", "shfl.sync", "not found in one instruction"),
    ],
)
def test_faults_are_found(kernel, field, old, new, fault):
    contract = MODELS["qwen3"] if kernel == "select" else None
    config = "n2.k1024.s1.w4" if kernel == "product" else ""
    made = checks.build(kernel, 90, contract, config)
    experts = 0 if contract is None else contract.n
    assert not checks.faults(kernel, made, config, experts)
    held = getattr(made, field)
    changed = new if field == "spills" else held.replace(old, new)
    assert changed != held
    assert fault in checks.faults(
        kernel, dataclasses.replace(made, **{field: changed}), config, experts
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_checked_is_what_is_launched(case, monkeypatch):
    """A launch of the selection, and one of the product before it; the same constants and options,
    and an argument for every parameter."""
    recorder, compiled = Recorder("product", "sum_parts", "select"), {}

    def note(function: Any, types: Any, constants: Any, target: int, **options: Any) -> Any:
        compiled[function.__name__] = list(function.arg_names), types, constants, options
        return SimpleNamespace()

    monkeypatch.setattr(checks, "compiled", note)
    monkeypatch.setattr(family, "device", lambda: recorder)
    c, inputs = case.contract, case.inputs()
    config = ""
    if c.hidden:
        config = family.Fused().configs(c, case.m)[0]
        family.Fused().run(c, inputs, (), config)
        x = torch.empty(3, 7168, dtype=torch.bfloat16)
        out = torch.empty(3, 256)
        family.launch_product(
            x, x.expand(256, 3, 7168)[:, 0], None, family.Config.parse("n16.k512.s7.w8.p3"), out
        )
    else:
        family.Select().run(c, inputs, ())
    wanted = ["product", "select", "product", "sum_parts"] if c.hidden else ["select"]
    assert [name for name, *_ in recorder.calls] == wanted
    for kernel, arguments, keywords in recorder.calls[:2]:
        weight = c.weight or torch.bfloat16
        checks.build(kernel, 80, c, config, k=c.hidden, m=case.m, weight=weight)
        names, types, constants, options = compiled[kernel]
        assert len(arguments) + len(constants) == len(names)
        assert set(constants) == set(names) & set(keywords)
        for constant in set(constants) - {"LIB", "SPLIT", "PARTS"}:  # of a GPU; of the parts
            assert constants[constant] == keywords[constant], constant
        assert options == {o: keywords[o] for o in options}
        for name, given in zip(names, arguments, strict=False):
            assert isinstance(given, torch.Tensor) == types[name].startswith("*"), name
            fixed = name.startswith(("x_", "bias", "out", "logit_bias")) and kernel == "product"
            if isinstance(given, torch.Tensor) and not fixed:
                assert types[name] == checks.POINTERS[given.dtype], name
