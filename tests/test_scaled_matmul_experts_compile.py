"""Products of rows sorted by expert compiled for GPUs that are not here."""

import pytest

from qinductor.kernels import scaled_matmul_triton_groups_checks as checks
from qinductor.kernels import scaled_matmul_triton_groups_kernels as kernels
from qinductor.kernels.scaled_matmul_triton_tiles import of_groups

ALL = dict(kernels.compile_checks())
SOME = ("block128 m16", "int8 row m16", "w4 fp8 tensor m16", "w4 fp8 group128 m128", "sum_groups")
FEW = [name for name in ALL if any(part in name for part in SOME)]


def test_the_checks_have_names_of_their_own_and_every_target():
    assert len(ALL) == len(kernels.compile_checks())
    for target in ("sm_80", "sm_89", "sm_90", "sm_100"):
        for kernel in ("grouped fp8", "grouped int8", "grouped w4"):
            assert any(n.startswith(kernel) and n.endswith(target) for n in ALL), (kernel, target)


@pytest.mark.parametrize("name", FEW)
def test_compiled(name):
    ALL[name]()


@pytest.mark.parametrize("name", ["fp8 row", "fp8 block128", "int8 row"])
@pytest.mark.parametrize("mean", [1, 300])
def test_every_tile_compiles(name, mean):
    contract = checks.FORMATS[name].contract
    for config in of_groups(contract, mean):
        checks.held(contract, 90, str(config))


def test_tiles_of_weights_are_fetched_by_descriptors():
    contract = checks.FORMATS["fp8 block128"].contract
    made = checks.build(contract, 90, "m16.n64.k128.s0.w4.p3.swap.tma", parts=True)
    assert "cp.async.bulk.tensor" in made.ptx and "async_tma_copy" in made.ttgir
