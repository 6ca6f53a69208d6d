"""The Triton family compiled for GPUs that are not here, and that its checks can fail."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorder import Recorder
from triton_cases import SMALL, fitting

from qinductor.kernels import dequant_matmul_triton as family
from qinductor.kernels import dequant_matmul_triton_checks as checks
from qinductor.kernels import dequant_matmul_triton_decode as decode
from qinductor.kernels import dequant_matmul_triton_kernels as kernels

ALL = dict([*kernels.compile_checks(), *decode.compile_checks()])
FEW = [
    name
    for name in ALL
    if any(part in name for part in ("int4 m16", "int8", "sum_parts", "dequantise in fp32"))
]


def test_the_checks_have_names_of_their_own_and_every_target():
    assert len(ALL) == len([*kernels.compile_checks(), *decode.compile_checks()])
    for target in ("sm_80", "sm_90", "sm_100"):
        for kernel in ("product", "product of groups", "sum_parts", "dequantise"):
            assert any(n.startswith(kernel) and n.endswith(target) for n in ALL), (kernel, target)


@pytest.mark.parametrize("name", FEW)
def test_compiled(name):
    ALL[name]()


@pytest.mark.parametrize("config", ["m16.n128.k128.s1.w4.p3", "m128.n128.k64.s1.w8.p4"])
def test_four_programs_of_four_warps_fit_with_rows_of_experts(config):
    """Or two of eight. Where a format takes more registers, nothing is asked of it."""
    chosen, contract = family.Config.parse(config), checks.FORMATS["int4"].contract
    assert family.registers(contract, chosen, False) is None
    assert family.registers(checks.FORMATS["nvfp4"].contract, chosen, True) is None
    assert family.registers(contract, chosen, True) == 128
    assert checks.build("product", contract, 90, config, grouped=True).registers <= 128


def test_a_product_that_is_not_waited_for_is_found():
    """Without the use of the sums Triton writes W's registers while the product reads them."""
    contract = checks.FORMATS["int4"].contract
    made = checks.build("product", contract, 90, "m16.n64.k128.s1.w4.p3", asm=False)
    assert "may still run when its operand is overwritten" in checks.faults(made, 90)


def test_registers_and_shared_memory_that_do_not_suffice_are_found():
    contract = checks.FORMATS["int4"].contract
    with pytest.raises(RuntimeError, match=r"sm_90: \d+ bytes spill"):
        checks.held("product", contract, 90, "m128.n128.k128.s1.w4.p3")
    made = checks.build("product", contract, 90, "m128.n128.k128.s1.w8.p8")
    assert f"{made.shared} bytes of shared memory of 232448" in checks.faults(made, 90)


@pytest.mark.parametrize(
    ("target", "field", "old", "new", "fault"),
    [
        (90, "spills", 0, 8, "8 bytes spill"),
        (90, "ptx", "bar.sync", "fma.rn.f32 ; bar.sync", "are rounded once"),
        (90, "ttgir", "pendings = 0", "pendings = 1", "may still run"),
        (90, "ttgir", "tt.join", "tt.load", "waited for"),
        (90, "ttgir", "async_copy_global_to_local", "copy", "waited for"),
        (90, "ptx", "wgmma.fence", "st.shared.b16 ; wgmma.fence", "W moves"),
        (90, "ptx", "wgmma.fence", "shfl.sync.idx ; wgmma.fence", "W moves"),
        (90, "ptx", "wgmma.fence", "stmatrix.sync ; wgmma.fence", "W moves"),
        (90, "ptx", "wgmma.mma_async", "mma.sync", "no operand of wgmma in registers"),
        (80, "ptx", "mma.sync", "fma", "no tensor core instruction"),
        (100, "ptx", "tcgen05.mma", "fma", "no tensor core instruction"),
    ],
)
def test_every_fault_is_found(target, field, old, new, fault):
    made = checks.build("product", checks.FORMATS["int8"].contract, target, CONFIG)
    assert not checks.faults(made, target)
    text = getattr(made, field)
    changed = new if isinstance(text, int) else text.replace(old, new)
    assert changed != text
    assert fault in checks.faults(dataclasses.replace(made, **{field: changed}), target)


CONFIG = "m16.n64.k128.s1.w4.p3"


def test_a_tile_of_w_from_shared_memory_is_found():
    made = checks.build("product", checks.FORMATS["int8"].contract, 90, CONFIG)
    body = checks.loop(made.ptx)
    assert "wgmma.mma_async" in body and len(body) < len(made.ptx)
    at = body.index("{", body.index("}", body.index("wgmma.mma_async")))
    shared = body[:at] + "%rd1, " + body[body.index("}", at) + 2 :]
    changed = dataclasses.replace(made, ptx=made.ptx.replace(body, shared))
    assert "no operand of wgmma in registers" in checks.faults(changed, 90)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("grouped", [False, True])
def test_what_is_checked_is_what_is_launched(name, grouped, monkeypatch):
    """The same constants and options, and an argument for every parameter."""
    recorder, compiled = Recorder("product", "sum_parts", "dequantise"), {}

    def note(function: Any, types: Any, constants: Any, target: int, **options: Any) -> Any:
        compiled[function.__name__] = set(function.arg_names), constants, options
        return SimpleNamespace()

    monkeypatch.setattr(checks, "compiled", note)
    contract = SMALL[name].contract
    if grouped:  # with these the columns of groups are not cut into parts
        contract = dataclasses.replace(contract, bias=False, output_scale=None)
    w = contract.weight
    config = family.Config.parse(fitting("m16.n64.k128.s2.w4.p2", contract))
    given = {
        held: torch.zeros((2, *shape) if grouped else shape, dtype=dtype)
        for held, (shape, dtype) in family.MMA().operands(contract).items()
    }
    offsets = torch.tensor([2, 5], dtype=torch.int32) if grouped else None
    x = torch.zeros(5, w.k, dtype=contract.x)
    family.launch(contract, x, given, config, offsets, kernels=recorder)
    family.dense(contract, given, 0, w.n, 2 if grouped else 0, kernels=recorder)
    for kernel in ("product", "sum_parts", "dequantise"):
        checks.build(kernel, contract, 80, str(config), grouped)
        arguments, keywords = recorder.last[kernel]
        names, constants, options = compiled[kernel]
        assert len(arguments) + len(constants) == len(names)
        assert set(constants) == names & set(keywords)
        free = {"E", "EP", "EVEN_K", "BK"}  # of the sizes
        for constant in set(constants) - free:
            assert constants[constant] == keywords[constant], constant
        assert options == {o: keywords[o] for o in options}
    k = family.fragments.padded(w.n, w.k, family.widths(w))[1]
    assert recorder.last["product"][1]["BK"] == min(config.bk, k & -k)
