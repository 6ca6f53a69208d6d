"""Products of experts' codes: each expert's rows are what the plain product makes of them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import interpreted
import pytest
import torch
from products import poisoned
from scaled_products import many, only
from torch._dynamo.testing import CompileCounterWithBackend

import qinductor
from qinductor.contracts import difference
from qinductor.errors import Refused
from qinductor.kernels import scaled_matmul_triton_groups as family
from qinductor.kernels import scaled_matmul_triton_tiles as tiles
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Operands, ScaledMatmul, reference
from qinductor.kernels.scaled_matmul_cases import (
    BF16,
    EXPERTS,
    FP8,
    INT8,
    Case,
    activation,
    case,
    eager,
    wide,
)
from qinductor.op import INFINITE, M, Plan, single
from qinductor.testing import product_oracle

qinductor.load()
ops = torch.ops.qinductor
named = pytest.mark.parametrize("chosen", EXPERTS, ids=lambda chosen: chosen.name)
SIZES = [(3, 5, 2, 7), (0, 4, 0, 1), (19, 0, 0, 0), (0, 0, 0, 0), (1, 40, 17, 2)]
CONFIGS = (
    "m16.n64.k128.s0.w4.p3.swap",
    "m32.n128.k128.s1.w4.p3.swap.tma",
    "m128.n64.k64.s3.w4.p4.swap.tma",
    "m64.n128.k128.s1.w8.p3",
)
INTERPRETED = {
    "rows": case(FP8, 1, 72, 288, 1, 288, bias=BF16, experts=4),
    "tensor": case(FP8, 1, 72, 288, 72, 288, group=0, experts=4),
    "blocks": case(FP8, 1, 136, 256, 128, 128, group=128, experts=4),
    "blocks of 32": case(FP8, 1, 72, 160, 32, 32, group=32, experts=4),
    "int8": case("int8", 1, 72, 288, 1, 288, INT8, experts=4),
    "nibbles": case("int4", 1, 72, 320, 1, 64, group=0, experts=4),
}


@pytest.fixture(scope="module")
def device() -> Iterator[None]:
    with interpreted.device(family):
        yield


def prepared(
    chosen: Case, plan: Plan | None = None, exact: bool = False
) -> tuple[list[Operands], Plan, list[Any]]:
    """(operands of each expert, plan, packed tensors)."""
    contract = chosen.contract
    plan = plan or SCALED_MATMUL.plan(contract, "cpu", None)
    sources = [chosen.make(expert, exact)[2] for expert in range(contract.experts)]
    packed = plan.pack(SCALED_MATMUL, contract, sources)
    return sources, plan, [packed[name] for name in plan.operands(SCALED_MATMUL, contract)]


def part(contract: ScaledMatmul, scale: torch.Tensor, rows: slice) -> torch.Tensor:
    return scale[rows] if contract.group else scale


def alone(
    contract: ScaledMatmul, plan: Plan, tensors: Sequence[torch.Tensor], expert: int, a: Any, s: Any
) -> torch.Tensor:
    """What the plain product makes of these rows."""
    one = [tensor[expert] for tensor in tensors]
    return ops.scaled_matmul(a, s, one, str(single(contract)[0]), str(plan))


def wanted(
    contract: ScaledMatmul, a: torch.Tensor, scale: torch.Tensor, ends: torch.Tensor, sources: Any
) -> torch.Tensor:
    """The reference of each expert's rows; zeros past the last offset."""
    out = torch.zeros(len(a), contract.weight.n, dtype=contract.out)
    start = 0
    for end, source in zip(ends.tolist(), sources, strict=True):
        rows = slice(start, end)
        out[rows] = reference(contract, a[rows], part(contract, scale, rows), source)
        start = end
    return out


@named
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("past", [0, 3])
def test_grouped_is_each_groups_own_product(chosen, sizes, past):
    contract = chosen.contract
    _, plan, tensors = prepared(chosen)
    sizes = sizes[: contract.experts]
    ends, total = torch.tensor(sizes).cumsum(0).int(), sum(sizes)
    a, scale = activation(contract, total + past)
    with poisoned():
        out = ops.scaled_grouped_matmul(a, scale, ends, tensors, str(contract), str(plan))
    assert out.shape == (total + past, contract.weight.n) and out.dtype == contract.out
    assert out.is_contiguous() and not out[total:].any()
    start = 0
    for i, size in enumerate(sizes):
        rows = slice(start, start + size)
        one = alone(contract, plan, tensors, i, a[rows], part(contract, scale, rows))
        assert not difference(out[rows], one)
        start += size


@named
@pytest.mark.parametrize("m", [0, 1, 5])
def test_bmm_is_each_experts_own_product(chosen, m):
    contract = chosen.contract
    _, plan, tensors = prepared(chosen)
    e = contract.experts
    a, scale = activation(contract, e * m)
    held = scale.reshape(e, m, -1 if m else scale.shape[-1]) if contract.group else scale
    out = ops.scaled_bmm(
        a.view(e, m, -1 if m else a.shape[1]), held, tensors, str(contract), str(plan)
    )
    assert out.shape == (e, m, contract.weight.n) and out.dtype == contract.out
    for i in range(e):
        rows = slice(i * m, (i + 1) * m)
        one = alone(contract, plan, tensors, i, a[rows], part(contract, scale, rows))
        assert not difference(out[i], one)


@named
def test_grouped_to_the_oracle(chosen):
    contract = chosen.contract
    sources, plan, tensors = prepared(chosen)
    rows = many(contract)
    ends = torch.arange(1, contract.experts + 1).mul(rows).int()
    a, scale = activation(contract, rows * contract.experts)
    out = ops.scaled_grouped_matmul(a, scale, ends, tensors, str(contract), str(plan))
    one, _ = single(contract)
    for i, source in enumerate(sources):
        own = slice(i * rows, (i + 1) * rows)
        s = part(contract, scale, own)
        product_oracle(out[own], eager(one, a[own], s, source), *wide(one, a[own], s, source))


@pytest.mark.parametrize("ends", [[2, 9], [5, 2], [-1, 3], [0, 0]])
def test_offsets_that_are_wrong_leave_no_memory_unwritten(ends):
    chosen = case("int8", 3, 48, 128, 1, 128, INT8, experts=2)
    contract = chosen.contract
    _, plan, tensors = prepared(chosen)
    a, scale = activation(contract, 6)
    with poisoned():
        offsets = torch.tensor(ends, dtype=torch.int32)
        out = ops.scaled_grouped_matmul(a, scale, offsets, tensors, str(contract), str(plan))
    assert out.isfinite().all()


@named
def test_compiled_with_dynamic_sizes(chosen):
    contract = chosen.contract
    _, plan, tensors = prepared(chosen)
    counter = CompileCounterWithBackend("inductor")
    texts = str(contract), str(plan)

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def compiled(a: Any, scale: Any, ends: Any) -> torch.Tensor:
        return ops.scaled_grouped_matmul(a, scale, ends, tensors, *texts).relu()

    for rows in (5, 9, 12):
        a, scale = activation(contract, rows)
        ends = torch.linspace(2, rows, contract.experts).int()
        want = ops.scaled_grouped_matmul(a, scale, ends, tensors, *texts).relu()
        assert not difference(compiled(a, scale, ends), want)
    assert counter.frame_count == 1


@named
def test_opcheck(chosen):
    contract = chosen.contract
    _, plan, tensors = prepared(chosen)
    e, (a, scale) = contract.experts, activation(contract, chosen.m * contract.experts)
    ends = torch.arange(1, e + 1).mul(chosen.m).int()
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if contract.a is INT8:
        tests.append("test_schema")  # compares inputs by torch.allclose, which float8 has not
    rest = tensors, str(contract), str(plan)
    grouped = a, scale, ends, *rest
    torch.library.opcheck(ops.scaled_grouped_matmul.default, grouped, test_utils=tests)
    held = scale.view(e, chosen.m, -1) if contract.group else scale
    batched = a.view(e, chosen.m, -1), held, *rest
    torch.library.opcheck(ops.scaled_bmm.default, batched, test_utils=tests)


def test_what_is_no_product_of_experts_is_an_error():
    plain = case(FP8, 3, 64, 128, 1, 128).contract
    plan = Plan(((INFINITE, "reference"),))
    with pytest.raises(ValueError, match="it takes experts, without zero points of a; got"):
        ops.scaled_grouped_matmul(
            *activation(plain, 3), torch.tensor([3], dtype=torch.int32), [], str(plain), str(plan)
        )


def test_zero_points_of_experts_are_refused():
    contract = case("int8", 3, 64, 128, 1, 128, INT8, zero=INT8, experts=3).contract
    with pytest.raises(
        Refused, match="there are 3 experts and zero points; it takes experts without"
    ):
        SCALED_MATMUL.plan(contract, "sm_90", None)


def test_on_a_gpu_no_provider_reads_the_offsets_on_the_host():
    for chosen in EXPERTS:
        for target in ("sm_80", "sm_90", "sm_100"):
            if SCALED_MATMUL.providers["triton.scaled_mma"].why_not(chosen.contract) is None:
                plan = SCALED_MATMUL.plan(chosen.contract, target, None)
                assert all(hasattr(p, "grouped") for p in plan.providers(SCALED_MATMUL))


def test_cost_reads_every_weight():
    one = case(FP8, 1, 64, 128, 1, 128).contract
    more = dataclasses.replace(one, experts=5)
    cost, single_cost = (SCALED_MATMUL.cost(c) for c in (more, one))
    weight = 64 * 128 + 64 * 4
    assert (cost["bytes"] - single_cost["bytes"]).subs(M, 3) == 4 * weight
    assert cost["flops"] == single_cost["flops"]
    assert "5 experts of" in more.summary and "experts" not in one.summary


def test_configs_of_groups():
    """Their text is read back; parts of K fill the device where few rows would not."""
    for chosen in INTERPRETED.values():
        contract = chosen.contract
        for mean in (1, 20, 60, 500):
            configs = tiles.of_groups(contract, mean)
            assert [tiles.Config.parse(str(config)) for config in configs] == list(configs)
            assert [str(c) for c in configs] == list(tiles.candidates(contract, mean))
            assert all(config.shared(contract) <= tiles.SHARED for config in configs)
    config = tiles.Config.parse("m16.n128.k128.s0.w4.p4.swap.tma")
    assert tiles.parts_of(config, 8, 256, 4096, 7168) == 2  # 8 x 32 tiles are 256 programs
    assert tiles.parts_of(config, 32, 32, 4096, 7168) == 1
    assert tiles.parts_of(config, 1, 8, 256, 7168) == 8  # of 7 steps each
    assert tiles.parts_of(config, 1, 8, 256, 512) == 1
    forced = tiles.Config.parse("m16.n128.k128.s4.w4.p4.swap")
    assert tiles.parts_of(forced, 4096, 8, 4096, 7168) == 4
    assert tiles.parts_of(forced, 4096, 8, 4096, 256) == 2


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_kernel_bitwise_on_exact_data(name, config, device):
    chosen = INTERPRETED[name]
    contract = chosen.contract
    sources, plan, tensors = prepared(chosen, only(f"triton.scaled_mma@{config}"), exact=True)
    for sizes, past in (((3, 0, 9, 1), 2), ((0, 70, 0, 2), 0), ((0, 0, 0, 0), 3)):
        ends = torch.tensor(sizes).cumsum(0).int()
        a, scale = activation(contract, sum(sizes) + past, exact=True)
        with poisoned():
            out = ops.scaled_grouped_matmul(a, scale, ends, tensors, str(contract), str(plan))
        assert not difference(out, wanted(contract, a, scale, ends, sources))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_kernel_of_a_batch_bitwise_on_exact_data(name, config, device):
    chosen = INTERPRETED[name]
    contract, e = chosen.contract, 4
    sources, plan, tensors = prepared(chosen, only(f"triton.scaled_mma@{config}"), exact=True)
    for m in (1, 5, 33):
        a, scale = activation(contract, e * m, exact=True)
        ends = torch.arange(1, e + 1) * m
        held = scale.view(e, m, -1) if contract.group else scale
        with poisoned():
            out = ops.scaled_bmm(a.view(e, m, -1), held, tensors, str(contract), str(plan))
        want = wanted(contract, a, scale, ends, sources)
        assert not difference(out.flatten(0, 1), want)


@named
def test_the_kernel_to_the_oracle(chosen, device):
    contract, provider = chosen.contract, SCALED_MATMUL.providers["triton.scaled_mma"]
    if (reason := provider.why_not(contract)) is not None:
        pytest.skip(reason)
    rows = many(contract)
    config = provider.configs(contract, rows)[0]
    sources, plan, tensors = prepared(chosen, only(f"triton.scaled_mma@{config}"))
    ends = torch.arange(1, contract.experts + 1).mul(rows).int()
    a, scale = activation(contract, rows * contract.experts)
    out = ops.scaled_grouped_matmul(a, scale, ends, tensors, str(contract), str(plan))
    one, _ = single(contract)
    for i, source in enumerate(sources):
        own = slice(i * rows, (i + 1) * rows)
        s = part(contract, scale, own)
        product_oracle(out[own], eager(one, a[own], s, source), *wide(one, a[own], s, source))
