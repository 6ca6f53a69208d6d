"""triton.scaled_mma compiled for GPUs that are not here, and that its checks can fail."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorder import Recorder

from qinductor.kernels import scaled_matmul_triton as family
from qinductor.kernels import scaled_matmul_triton_checks as checks
from qinductor.kernels import scaled_matmul_triton_kernels as kernels
from qinductor.kernels.scaled_matmul_cases import ASYMMETRIC, CASES, zeros
from qinductor.kernels.scaled_matmul_triton_form import E8M0, four
from qinductor.kernels.scaled_matmul_triton_tiles import tiles

ALL = dict(kernels.compile_checks())
SOME = ("sm_80", "block128 m16", "int8 row m16", "w4 fp8 group128 m16")
FEW = [name for name in ALL if any(part in name for part in SOME)]
CONFIG = "m16.n64.k128.s1.w4.p3.swap"


def test_the_checks_have_names_of_their_own_and_every_target():
    assert len(ALL) == len(kernels.compile_checks())
    for target in ("sm_80", "sm_90", "sm_100"):
        for kernel in ("product fp8", "product int8", "product w4", "sum_parts"):
            assert any(n.startswith(kernel) and n.endswith(target) for n in ALL), (kernel, target)


@pytest.mark.parametrize("name", FEW)
def test_compiled(name):
    ALL[name]()


@pytest.mark.parametrize("name", ["fp8 row", "fp8 row fast", "fp8 block32", "w4 fp8 group128"])
def test_tiles_of_many_rows_compile_without_spills(name):
    contract = checks.FORMATS[name].contract
    for config in tiles(contract, 300):
        checks.held("product", contract, 90, str(config))


@pytest.mark.parametrize("name", ["fp8 row", "int8 row"])
def test_tiles_are_fetched_by_descriptors(name):
    made = checks.build("product", checks.FORMATS[name].contract, 90, CONFIG + ".tma")
    assert "cp.async.bulk.tensor" in made.ptx and "async_tma_copy" in made.ttgir


def test_a_product_that_is_not_waited_for_is_found():
    """Without the use of the sums Triton writes W's registers while the product reads them."""
    contract = dataclasses.replace(checks.FORMATS["w4 fp8 channel"].contract, fast=True)
    made = checks.build("product", contract, 90, CONFIG, asm=False)
    faults = checks.faults(made, contract, 90)
    assert "may still run when its operand is overwritten" in faults


def test_registers_and_shared_memory_that_do_not_suffice_are_found():
    contract = checks.FORMATS["fp8 block128"].contract
    with pytest.raises(RuntimeError, match=r"sm_90: \d+ bytes spill"):
        checks.held("product", contract, 90, "m128.n256.k128.s1.w8.p3")
    made = checks.build("product", contract, 90, CONFIG)
    large = dataclasses.replace(made, shared=1 << 20)
    assert "1048576 bytes of shared memory of 232448" in checks.faults(large, contract, 90)


@pytest.mark.parametrize(
    ("name", "field", "old", "new", "fault"),
    [
        ("w4 fp8 group128", "ttgir", "pendings = 0", "pendings = 1", "may still run"),
        ("fp8 row", "ttgir", "ttng.warp_group_dot_wait", "tt.load", "waited for"),
        ("fp8 row", "ttgir", "async_copy_global_to_local", "copy", "waited for"),
        ("w4 int8 group128", "ptx", "wgmma.fence", "shfl.sync.idx ; wgmma.fence", "W moves"),
        ("fp8 row", "ptx", "wgmma.mma_async", "mma.sync", "no wgmma.mma_async"),
    ],
)
def test_every_fault_is_found(name, field, old, new, fault):
    contract = checks.FORMATS[name].contract
    made = checks.build("product", contract, 90, CONFIG)
    assert not checks.faults(made, contract, 90)
    text = getattr(made, field)
    changed = text.replace(old, new)
    assert changed != text
    assert fault in checks.faults(dataclasses.replace(made, **{field: changed}), contract, 90)


ONES = {"sa_row", "z_row"}  # strides that the checks take for 1


@pytest.mark.parametrize("chosen", [*CASES, *ASYMMETRIC], ids=lambda chosen: chosen.name)
def test_what_is_checked_is_what_is_launched(chosen, monkeypatch):
    """The same constants and options, and an argument of its type for every parameter."""
    recorder, compiled = Recorder("product", "sum_parts"), {}

    def note(function: Any, types: Any, constants: Any, target: int, **options: Any) -> Any:
        compiled[function.__name__] = function.arg_names, types, constants, options
        return SimpleNamespace()

    monkeypatch.setattr(checks, "compiled", note)
    contract, (a, scale, source) = chosen.contract, chosen.make()
    config = family.Config.parse("m16.n64.k64.s2.w4.p2.swap.tma")
    given = family.PROVIDER.pack(contract, source)
    (zero,) = zeros(contract, chosen.m) or (None,)
    family.launch(contract, a, scale, given, config, kernels=recorder, zero=zero)
    tma = recorder.last["product"][1]["TMA"]
    for kernel in ("product", "sum_parts"):
        text = str(dataclasses.replace(config, tma=tma))
        checks.build(kernel, contract, 90, text)
        arguments, keywords = recorder.last[kernel]
        names, types, constants, options = compiled[kernel]
        assert len(arguments) + len(set(constants) - ONES) == len(names)
        assert set(constants) - ONES == set(names) & set(keywords)
        for constant in set(constants) - {*ONES, "EVEN_K", "PARTS", "PDL"}:
            assert constants[constant] == keywords[constant], constant
        assert options == {o: keywords[o] for o in options}
        for name, value in zip(names, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                held = "u8" if value.dtype is torch.uint8 else checks.TYPES[value.dtype]
                assert types[name].partition(":")[0] == f"*{held}", name
    assert not tma or not four(contract)
    assert E8M0 not in {t.dtype for t in recorder.last["product"][0] if hasattr(t, "dtype")}
