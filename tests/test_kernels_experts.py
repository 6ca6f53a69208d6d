"""Products of experts: each expert's rows are what the plain product makes of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import qinductor
from qinductor.contracts import dequantize, difference
from qinductor.errors import Refused
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, Case, DequantMatmul, Operands
from qinductor.kernels.dequant_matmul_experts import CASES
from qinductor.op import INFINITE, M, Plan, single
from qinductor.testing import OUTPUTS, product_oracle

qinductor.load()
BF16, FP32 = torch.bfloat16, torch.float32
named = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
ops = torch.ops.qinductor


def prepared(chosen: Case, plan: Plan | None = None) -> tuple[list[Operands], Plan, list[Any]]:
    """(operands of each expert, plan, packed tensors)."""
    contract = chosen.contract
    plan = plan or DEQUANT_MATMUL.plan(contract, "cpu", None)
    sources = [chosen.make(expert)[1] for expert in range(contract.experts)]
    packed = plan.pack(DEQUANT_MATMUL, contract, sources)
    return sources, plan, [packed[name] for name in plan.operands(DEQUANT_MATMUL, contract)]


def alone(
    contract: DequantMatmul, plan: Plan, tensors: Sequence[torch.Tensor], expert: int, x: Any
) -> torch.Tensor:
    """What the plain product makes of these rows."""
    one = [tensor[expert] for tensor in tensors]
    return ops.dequant_matmul(x, one, str(single(contract)[0]), str(plan))


def rows(contract: DequantMatmul, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, contract.weight.k).to(contract.x)


@named
def test_bmm_is_each_experts_own_product(case):
    contract = case.contract
    sources, plan, tensors = prepared(case)
    e, n = contract.experts, contract.weight.n
    borders = {m for limit, _ in plan.steps for m in (limit, limit + 1) if m < INFINITE}
    for m in sorted({0, 1, case.m} | borders):
        x = rows(contract, e, m)
        out = ops.dequant_bmm(x, tensors, str(contract), str(plan))
        assert out.shape == (e, m, n) and out.dtype == contract.out and out.is_contiguous()
        for i in range(e):
            assert not difference(out[i], alone(contract, plan, tensors, i, x[i]))
    x = rows(contract, e, -(-OUTPUTS // n))
    out = ops.dequant_bmm(x.mT.contiguous().mT, tensors, str(contract), str(plan))
    for i, source in enumerate(sources):
        w = dequantize(source.weight)
        bias, scale = source.bias, source.output_scale
        eager = torch.nn.functional.linear(x[i], w, bias if scale is None else None)
        if scale is not None:
            eager = eager * scale if bias is None else eager * scale + bias
        product_oracle(out[i], eager, x[i], w, bias, scale)


@named
@pytest.mark.parametrize("sizes", [(3, 5, 2, 7), (0, 4, 0, 1), (9, 0, 0, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("past", [0, 3])
def test_grouped_is_each_groups_own_product(case, sizes, past):
    contract = case.contract
    _, plan, tensors = prepared(case)
    sizes = sizes[: contract.experts]
    ends = torch.tensor(sizes).cumsum(0).int()
    x = rows(contract, sum(sizes) + past)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    try:
        out = ops.dequant_grouped_matmul(x, ends, tensors, str(contract), str(plan))
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.shape == (len(x), contract.weight.n) and out.dtype == contract.out
    assert out.is_contiguous() and not out[sum(sizes) :].any()
    parts = zip(out[: sum(sizes)].split(sizes), x[: sum(sizes)].split(sizes), strict=True)
    for i, (ours, part) in enumerate(parts):
        assert not difference(ours, alone(contract, plan, tensors, i, part))


@named
@pytest.mark.parametrize("ids", [[0], [1, 0, 1, 1, -1, 0], [], [0] * 9])
def test_gathered_is_each_batchs_own_product(case, ids):
    contract = case.contract
    _, plan, tensors = prepared(case)
    whose = torch.tensor(ids, dtype=torch.int64) % contract.experts
    if -1 in ids:
        whose[ids.index(-1)] -= contract.experts
    for m in (0, 1, 3):
        x = rows(contract, len(ids), m)
        out = ops.dequant_gathered_bmm(x, whose, tensors, str(contract), str(plan))
        assert out.shape == (len(ids), m, contract.weight.n) and out.is_contiguous()
        for i, expert in enumerate(whose.tolist()):
            part = x[whose % contract.experts == expert % contract.experts].flatten(0, 1)
            all_of_it = alone(contract, plan, tensors, expert % contract.experts, part)
            place = (whose[:i] % contract.experts == expert % contract.experts).sum() * m
            assert not difference(out[i], all_of_it[place : place + m])


def test_an_id_out_of_range_is_an_error():
    contract = CASES[0].contract
    _, plan, tensors = prepared(CASES[0])
    for wrong in (4, -5):
        with pytest.raises(IndexError, match="ids must be from -4 to 3"):
            ids = torch.tensor([0, wrong])
            ops.dequant_gathered_bmm(rows(contract, 2, 1), ids, tensors, str(contract), str(plan))


def test_grouped_is_atens_product():
    """Where aten has one: no bias, rows of a multiple of 16 bytes."""
    contract = CASES[0].contract
    sources, plan, tensors = prepared(CASES[0])
    ends = torch.tensor([40, 40, 90, 128], dtype=torch.int32)
    x = rows(contract, 128)
    w = torch.stack([dequantize(source.weight) for source in sources])
    eager = torch._grouped_mm(x, w.mT, offs=ends)
    ours = ops.dequant_grouped_matmul(x, ends, tensors, str(contract), str(plan))
    assert ours.stride() == eager.stride()
    for i, span in ((0, slice(0, 40)), (2, slice(40, 90)), (3, slice(90, 128))):
        held = x[span].repeat(2, 1)
        pairs = ours[span].repeat(2, 1), eager[span].repeat(2, 1)
        product_oracle(*pairs, held, w[i])


@pytest.mark.parametrize("ends", [[2, 9], [5, 2], [-1, 3], [0, 0]])
def test_offsets_that_are_wrong_leave_no_memory_unwritten(ends):
    contract = CASES[2].contract
    _, plan, tensors = prepared(CASES[2])
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        offsets = torch.tensor(ends, dtype=torch.int32)
        x = rows(contract, 6)
        out = ops.dequant_grouped_matmul(x, offsets, tensors, str(contract), str(plan))
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.isfinite().all()


@named
def test_compiled_with_dynamic_sizes(case):
    contract = case.contract
    _, plan, tensors = prepared(case)
    texts = str(contract), str(plan)

    @torch.compile(fullgraph=True, dynamic=True)
    def both(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = ops.dequant_grouped_matmul(x.flatten(0, 1), ends, tensors, *texts)
        return ops.dequant_bmm(x, tensors, *texts).mT, flat.relu()

    e = contract.experts
    for m in (5, 3):
        x, ends = rows(contract, e, m), torch.arange(1, e + 1).int() * m
        batched, flat = both(x, ends)
        want = ops.dequant_bmm(x, tensors, *texts)
        assert not difference(batched.mT, want)
        assert not difference(flat, want.flatten(0, 1).relu())


# Plans ----------------------------------------------------------------------------------------


def test_packed_tensors_are_stacked_and_each_experts_own_rows_choose():
    contract = CASES[0].contract
    sources, plan, tensors = prepared(CASES[0])
    names = [name for _, name in plan.steps]
    assert names == ["aten.int4pack_mm", "onednn.dequant_strips"]
    operands = plan.operands(DEQUANT_MATMUL, contract)
    one, experts = single(contract)
    assert experts == 4 and one == dataclasses.replace(contract, experts=0)
    for i, source in enumerate(sources):
        packed = plan.pack(DEQUANT_MATMUL, one, source)
        for tensor, (name, (shape, _)) in zip(tensors, operands.items(), strict=True):
            assert shape == (4, *packed[name].shape)
            assert not difference(tensor[i], packed[name])
    with pytest.raises(ValueError, match="dequant_matmul has 4 experts; got 3 weights"):
        plan.pack(DEQUANT_MATMUL, contract, sources[:3])


def test_rows_beyond_the_plan_are_an_error():
    contract, plan = CASES[0].contract, Plan(((5, "aten.int4pack_mm"),))
    _, _, tensors = prepared(CASES[0], plan)
    with pytest.raises(RuntimeError, match=r"the plan has no provider for M = 6"):
        ops.dequant_bmm(rows(contract, 4, 6), tensors, str(contract), str(plan))


@pytest.mark.parametrize("m", [1, 16, 1024, None])
def test_experts_on_cuda(m):
    """Only by providers that read where groups end on the device, which a CUDA graph captures."""
    for chosen in CASES:
        if chosen.contract.x is FP32:
            with pytest.raises(Refused, match="there are 3 experts; it takes one weight"):
                DEQUANT_MATMUL.plan(chosen.contract, "sm_90", m)
            continue
        plan = DEQUANT_MATMUL.plan(chosen.contract, "sm_90", m)
        assert all(hasattr(found, "grouped") for found in plan.providers(DEQUANT_MATMUL))


def test_cost_reads_every_expert():
    contract = CASES[0].contract
    one, experts = single(contract)
    ours, alone = (DEQUANT_MATMUL.cost(c) for c in (contract, one))
    assert ours["bytes"].subs(M, 0) == experts * alone["bytes"].subs(M, 0)
    assert ours["flops"] == alone["flops"]  # M counts the rows of all


# Flattened weights ----------------------------------------------------------------------------
