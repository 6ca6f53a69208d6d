"""The Triton family interpreted on a CPU: W bitwise the specification's, products to the oracle."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import interpreted
import pytest
import torch
from products import activations, call, check, hold, only, packed, poisoned
from triton_cases import CONFIGS, CORNERS, CUBLAS, MMA, SMALL, STACKED, TAKEN, fitting

import qinductor
from qinductor.contracts import QuantizedWeight, dequantize, difference
from qinductor.kernels import dequant_matmul_triton as family
from qinductor.kernels.dequant_matmul import Case, case
from qinductor.op import single
from qinductor.testing import OUTPUTS

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
qinductor.load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
named = pytest.mark.parametrize("chosen", TAKEN, ids=lambda chosen: chosen.name)


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with interpreted.device():
        yield


def columns(weight: QuantizedWeight) -> torch.Tensor:
    """W as it is packed."""
    w = dequantize(weight)
    return w if weight.order is None else w[:, weight.order]


def many(chosen: Case) -> int:
    """Rows that make enough outputs for an error to be measured."""
    return -(-OUTPUTS // chosen.contract.weight.n)


def test_the_corners_are_taken():
    assert {chosen.name: MMA.why_not(chosen.contract) for chosen in CORNERS} == dict.fromkeys(
        chosen.name for chosen in CORNERS
    )
    assert len(TAKEN) - len(CORNERS) >= 25


@named
def test_packed_as_declared_and_bitwise_w(chosen):
    contract, (_, source) = chosen.contract, chosen.make()
    held = MMA.pack(contract, source)
    assert list(held) == list(MMA.operands(contract)) == list(CUBLAS.operands(contract))
    for name, (shape, dtype) in MMA.operands(contract).items():
        found = held[name]
        assert (tuple(found.shape), found.dtype) == (shape, dtype) and found.is_contiguous(), name
    w, n = columns(source.weight), contract.weight.n
    with poisoned():
        assert not difference(family.dense(contract, held, 0, n), w)
    if n > 64:
        assert not difference(family.dense(contract, held, 64, n - 64), w[64:])


@named
def test_products(chosen):
    contract, (_, source) = chosen.contract, chosen.make()
    x = torch.cat(activations(contract, many(chosen)))
    tensors = packed(only("triton.mma"), contract, source)
    before = [tensor.clone() for tensor in tensors]
    with poisoned():
        out = call(x, tensors, contract, only(f"triton.mma@{MMA.configs(contract, len(x))[0]}"))
    check(out, contract, len(x))
    hold(contract, [out], [x], source)
    for tensor, old in zip(tensors, before, strict=True):
        assert not difference(tensor, old), "a packed tensor was written to"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", SMALL)
def test_every_config_gives_the_product(name, config):
    """And a row's result is the same whatever rows are beside it."""
    chosen = SMALL[name]
    contract, (_, source) = chosen.contract, chosen.make()
    plan = only(f"triton.mma@{fitting(config, contract)}")
    tensors = packed(plan, contract, source)
    x = torch.cat(activations(contract, many(chosen)))
    with poisoned():
        out = call(x, tensors, contract, plan)
        hold(contract, [out], [x], source)
        for m in (1, 17):
            few = call(x[:m], tensors, contract, plan)
            check(few, contract, m)
            assert not difference(few, out[:m])
    check(call(x[:0], tensors, contract, plan), contract, 0)


@pytest.mark.parametrize("name", SMALL)
def test_x_that_is_not_contiguous(name):
    chosen = SMALL[name]
    contract, (_, source) = chosen.contract, chosen.make()
    tensors, plan = packed(only("triton.mma"), contract, source), only("triton.mma@" + CONFIGS[0])
    x, k = activations(contract, 10)[0], contract.weight.k
    for laid in (
        torch.cat([x, x[:, :3]], 1)[:, :k],  # an odd stride between rows
        torch.cat([x[:, :3], x], 1)[:, 3:],  # and rows that begin at no multiple of 16 bytes
        x.repeat_interleave(2, 0)[::2],
        x.t().contiguous().t(),
        x[:1].expand(10, k),
    ):
        assert not laid.is_contiguous()
        expected = call(laid.clone(memory_format=torch.contiguous_format), tensors, contract, plan)
        assert not difference(call(laid, tensors, contract, plan), expected)


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_written_out_and_multiplied(name, strip, monkeypatch):
    chosen = SMALL[name]
    if strip:
        chosen = dataclasses.replace(chosen, contract=_rows(chosen, 300))
        monkeypatch.setattr(family, "WORKSPACE", 2 * 128 * chosen.contract.weight.k)
    contract, (_, source) = chosen.contract, chosen.make()
    tensors = packed(only("triton.dequant_cublas"), contract, source)
    x = torch.cat(activations(contract, many(chosen)))
    with poisoned():
        out = call(x, tensors, contract, only("triton.dequant_cublas"))
    check(out, contract, len(x))
    hold(contract, [out], [x], source)


def _rows(chosen: Case, n: int) -> Any:
    weight = dataclasses.replace(chosen.contract.weight, n=n)
    return dataclasses.replace(chosen.contract, weight=weight)


# Experts --------------------------------------------------------------------------------------

stacked = pytest.mark.parametrize("chosen", STACKED, ids=lambda chosen: chosen.name)
ops = torch.ops.qinductor


def experts(chosen: Case, route: str) -> tuple[list[torch.Tensor], tuple[str, str], Any]:
    """(packed tensors, printed contract and plan, the product of one expert's rows alone)."""
    contract, plan = chosen.contract, only(route)
    sources = [chosen.make(expert)[1] for expert in range(contract.experts)]
    tensors = packed(plan, contract, sources)

    def alone(expert: int, x: torch.Tensor) -> torch.Tensor:
        return call(x, [tensor[expert] for tensor in tensors], single(contract)[0], plan)

    return tensors, (str(contract), str(plan)), alone


def rows(chosen: Case, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, chosen.contract.weight.k).to(chosen.contract.x)


@stacked
@pytest.mark.parametrize("route", ["triton.mma@" + CONFIGS[0], "triton.mma@m32.n64.k256.s3.w4.p2"])
def test_bmm(chosen, route):
    tensors, texts, alone = experts(chosen, route)
    e = chosen.contract.experts
    for m in (0, 1, 19):
        x = rows(chosen, e, m)
        with poisoned():
            out = ops.dequant_bmm(x, tensors, *texts)
        assert out.shape == (e, m, chosen.contract.weight.n) and out.is_contiguous()
        for i in range(e):
            assert not difference(out[i], alone(i, x[i]))
    turned = rows(chosen, 5, e).transpose(0, 1)
    out = ops.dequant_bmm(turned, tensors, *texts)
    assert not difference(out, ops.dequant_bmm(turned.contiguous(), tensors, *texts))


SIZES = ((3, 5, 2, 7), (0, 4, 0, 1), (40, 0, 0, 1), (0, 0, 0, 0), (0, 1, 33, 0), (70, 20, 9, 33))
# Tiles of more than 16 rows are halved where an expert has few.
ROUTES = [CONFIGS[0], "m32.n64.k256.s3.w4.p2", "m64.n64.k256.s2.w4.p2", "m128.n64.k256.s1.w8.p2"]


@stacked
@pytest.mark.parametrize("route", ["triton.mma@" + config for config in ROUTES])
def test_grouped(chosen, route):
    tensors, texts, alone = experts(chosen, route)
    for sizes, past in zip(SIZES, (0, 3, 20, 2, 1, 0), strict=True):
        grouped(chosen, sizes[: chosen.contract.experts], past, tensors, texts, alone)
    empty = rows(chosen, 0)
    ends = torch.zeros(chosen.contract.experts, dtype=torch.int32)
    out = ops.dequant_grouped_matmul(empty, ends, tensors, *texts)
    assert out.shape == (0, chosen.contract.weight.n)


def grouped(
    chosen: Case, sizes: Sequence[int], past: int, tensors: Any, texts: Any, alone: Any
) -> None:
    x, ends = rows(chosen, sum(sizes) + past), torch.tensor(sizes).cumsum(0).int()
    with poisoned():
        out = ops.dequant_grouped_matmul(x, ends, tensors, *texts)
    assert out.shape == (len(x), chosen.contract.weight.n) and out.is_contiguous()
    assert not out[sum(sizes) :].any(), "rows past the last offset belong to no expert"
    start = 0
    for i, size in enumerate(sizes):
        assert not difference(out[start : start + size], alone(i, x[start : start + size]))
        start += size


@stacked
def test_written_out_and_multiplied_in_groups(chosen):
    tensors, texts, _ = experts(chosen, "triton.dequant_cublas")
    ours, plan, _ = experts(chosen, "triton.mma@" + CONFIGS[0])
    sizes = (70, 0, 90, 60)[: chosen.contract.experts]
    x, ends = rows(chosen, sum(sizes) + 3), torch.tensor(sizes).cumsum(0).int()
    out = ops.dequant_grouped_matmul(x, ends, tensors, *texts)
    assert not out[sum(sizes) :].any() and out.is_contiguous()
    start = 0
    for i, size in enumerate(sizes):
        part = x[start : start + size]
        count = -(-OUTPUTS // (max(size, 1) * chosen.contract.weight.n))
        if size:
            source, held = chosen.make(i)[1], out[start : start + size]
            hold(single(chosen.contract)[0], [held] * count, [part] * count, source)
        start += size


@pytest.mark.parametrize("ends", [[2, 9], [5, 2], [-1, 3], [0, 0], [9, 9]])
def test_offsets_that_are_wrong_leave_no_memory_unwritten(ends):
    chosen = next(c for c in STACKED if c.contract.weight.k == 384)
    tensors, texts, _ = experts(chosen, "triton.mma@m16.n64.k256.s3.w4.p3")
    with poisoned():
        offsets = torch.tensor(ends, dtype=torch.int32)
        out = ops.dequant_grouped_matmul(rows(chosen, 6), offsets, tensors, *texts)
    assert out.isfinite().all()


def test_columns_past_k_are_finite_where_w_is():
    """They are multiplied by 0: a code of their own would be -8 * 9000, infinite in fp16."""
    chosen = case("int4", 2, 64, 192, 1, 64, FP16)
    contract, (x, source) = chosen.contract, chosen.make()
    codes = source.weight.codes.clamp(min=-7)
    scale = torch.full_like(source.weight.scale, 9000.0)
    source = dataclasses.replace(
        source, weight=dataclasses.replace(source.weight, codes=codes, scale=scale)
    )
    x = x / 9000
    out = call(x, packed(only(MMA.name), contract, source), contract, only(MMA.name))
    assert out.isfinite().all() and dequantize(source.weight).isfinite().all()


def test_no_rows_for_any_expert():
    chosen = next(c for c in STACKED if not c.contract.bias)
    contract = chosen.contract
    sources = [Case("", 1, single(contract)[0]).make(i)[1] for i in range(contract.experts)]
    plan = only(MMA.name)
    held = plan.pack(qinductor.kernels.dequant_matmul.DEQUANT_MATMUL, contract, sources)
    x = torch.zeros(0, contract.weight.k, dtype=contract.x)
    offsets = torch.zeros(contract.experts, dtype=torch.int32)
    out = torch.ops.qinductor.dequant_grouped_matmul(
        x, offsets, list(held.values()), str(contract), str(plan)
    )
    assert out.shape == (0, contract.weight.n)
