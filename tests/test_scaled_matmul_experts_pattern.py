"""Experts whose weights and activations are both quantised: graphs, results, near misses."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from experts import Experts, H, power_of, quantised
from goldens import Golden, outcome
from models import BF16, FP32, Holder, Random, nibbles

import qinductor
from qinductor.testing import OUTPUTS, product_oracle, rewritten

aten = torch.ops.aten
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
E, N, K = 3, 64, 256
EXACT = {"emulate_precision_casts": True}  # codes are eager's
BY_NAME = {"patterns": {"scaled_matmul_requantised": "on"}, "inductor": EXACT}
SIZES = (70, 0, 66)
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def no_gradients():
    qinductor.load()
    torch._dynamo.reset()
    with torch.no_grad():
        yield


# How activations are quantised, and dequantised ---------------------------------------------------


def by_group(group: int, dtype: torch.dtype = E4M3) -> Callable:
    def made(m: Holder, x: Tensor) -> Tensor:
        q, s = quantised(x, group, dtype, m.powers)
        return (q.float() * s).flatten(-2)

    return made


def by_tensor(m: Holder, x: Tensor) -> Tensor:
    s = x.float().abs().amax() / 448
    s = power_of(s) if m.powers else s
    return (x.float() / s).clamp(-448, 448).to(E4M3).float() * s


def static(m: Holder, x: Tensor) -> Tensor:
    s = power_of(m.a_scale) if m.powers else m.a_scale
    return (x.float() / s).clamp(-448, 448).to(E4M3).float() * s


ACTIVATIONS = {
    "tensor": by_tensor,
    "static": static,
    "token": by_group(K),
    "group-128": by_group(128),
    "group-32": by_group(32),
    "int8 token": by_group(K, INT8),
}


# How weights are dequantised ----------------------------------------------------------------------


def in_blocks(m: Holder) -> Tensor:
    """codes [E, N, K] times scales of blocks."""
    (_, n, k), (_, rows, columns) = m.w.shape, m.s.shape
    w = m.w.float().view(E, rows, n // rows, columns, k // columns)
    return (w * m.s.view(E, rows, 1, columns, 1)).view(E, n, k)


def int4(m: Holder) -> Tensor:
    q = nibbles(m.w.flatten(0, 1)).float().view(E, N, -1, 128) - 8
    return (q * m.s.view(E, N, -1, 1)).view(E, N, K)


WEIGHTS = {
    "tensor": (in_blocks, (1, 1)),
    "row": (in_blocks, (N, 1)),
    "block-64x128": (in_blocks, (1, 2)),
    "block-32x32": (in_blocks, (2, 8)),
    "group-32": (in_blocks, (N, 8)),
    "int8 row": (in_blocks, (N, 1)),
    "int4 group-128": (int4, (N, 2)),
}
PAIRS = [
    ("tensor", "tensor"), ("static", "tensor"), ("token", "row"), ("group-128", "block-64x128"),
    ("group-32", "block-32x32"), ("group-32", "group-32"), ("int8 token", "int8 row"),
    ("static", "int4 group-128"), ("token", "int4 group-128"), ("group-128", "int4 group-128"),
]  # fmt: skip


def grouped(m: Holder, x: Tensor, offsets: Tensor) -> Tensor:
    return torch._grouped_mm(x, m.made(m).to(x.dtype).mT, offs=offsets)


def layer(
    activation: str, weight: str, dtype: torch.dtype = BF16, powers: bool = True,
    product: Callable | None = None,
) -> Holder:  # fmt: skip
    """x[T, K], quantised, times a stack of weights of which each row has its own."""
    made, (rows, columns) = WEIGHTS[weight]
    r = Random()
    if weight == "int4 group-128":
        w = r.integers(0, 256, E, N, K // 2)
    elif weight == "int8 row":
        w = r.integers(-128, 128, E, N, K, dtype=INT8)
    else:
        w = r.float8(E, N, K)
    s = r.scales(E, rows, columns, dtype=FP32)
    s = power_of(s) if powers else s

    def function(m: Holder, x: Tensor, *rest: Tensor) -> Tensor:
        return (product or grouped)(m, ACTIVATIONS[activation](m, x).to(dtype), *rest)

    holder = Holder(function, w=w, s=s, a_scale=torch.tensor(0.01))
    holder.made, holder.powers = made, powers
    return holder


def rows(*sizes: int, dtype: torch.dtype = BF16, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(x[T, K], offsets) of so many rows for each expert."""
    ends = torch.tensor(sizes).cumsum(0).int()
    return Random(seed).normal(sum(sizes), K, dtype=dtype), ends


def lowered() -> list[tuple[str, str]]:
    """(pattern, contract) of the products that were lowered last."""
    sites = qinductor.last_report().sites
    return [(s.pattern, s.contract) for s in sites if s.lowered and "matmul" in s.pattern]


def agree(
    module: Holder, run: Callable, activation: str, x: Tensor, offsets: Tensor, dtype: torch.dtype
) -> None:
    """The compiled result is as near to the product of the rounded operands as eager's."""
    ours, eager = run(x, offsets), module(x, offsets)
    assert (ours.shape, ours.dtype, ours.stride()) == (eager.shape, eager.dtype, eager.stride())
    given = ACTIVATIONS[activation](module, x).to(dtype)
    weights, start = module.made(module).to(dtype), 0
    for w, end in zip(weights, offsets.tolist(), strict=True):
        if (end - start) * N >= OUTPUTS:
            product_oracle(ours[start:end], eager[start:end], given[start:end], w)
        else:
            torch.testing.assert_close(ours[start:end], eager[start:end], rtol=0.02, atol=0.02)
        start = end


@pytest.mark.parametrize(("activation", "weight"), PAIRS)
def test_results(activation: str, weight: str) -> None:
    """One compile over numbers of rows; experts without any."""
    module = layer(activation, weight)
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    for sizes in (SIZES, (2, 7, 1), (0, 0, 80), (80, 0, 0)):
        x, offsets = rows(*sizes)
        torch._dynamo.mark_dynamic(x, 0)
        agree(module, run, activation, x, offsets, BF16)
    ((pattern, contract),) = lowered()
    assert pattern == "scaled_matmul", contract
    kind = activation.removeprefix("int8 ").replace("static", "tensor")
    codes = "int8" if activation.startswith("int8") else "float8_e4m3fn"
    assert contract.startswith(f"3 experts of {codes} {kind} scale fp32 x "), contract
    assert weight.split()[-1].replace("row", "channel") in contract.split(" x ")[1], contract
    assert len(qinductor.reports()) == 1


@pytest.mark.parametrize(("activation", "weight"), PAIRS)
def test_results_in_bf16_by_name(activation: str, weight: str) -> None:
    module = layer(activation, weight, powers=False)
    run = torch.compile(module, backend="qinductor", options=BY_NAME)
    x, offsets = rows(*SIZES)
    ours, eager = run(x, offsets), module(x, offsets)
    torch.testing.assert_close(ours, eager, rtol=0.03, atol=float(eager.abs().max()) * 0.01)
    ((pattern, contract),) = lowered()
    assert pattern == "scaled_matmul_requantised" and "3 experts of" in contract


def test_scales_that_round_are_left_and_the_weights_alone_are_lowered() -> None:
    module = layer("group-128", "block-64x128", powers=False)
    torch.compile(module, backend="qinductor")(*rows(*SIZES))
    first, second = (s for s in qinductor.last_report().sites if "matmul" in s.pattern)
    assert not first.lowered and "rms error" in first.reason
    assert second.lowered and second.pattern == "dequant_matmul"


def test_no_rows_at_all() -> None:
    module = layer("token", "row")
    run = torch.compile(module, backend="qinductor")
    for total in (9, 4):
        x = Random(1).normal(total, K)
        offsets = torch.tensor([0, 0, 0], dtype=torch.int32)
        assert not run(x, offsets).any()  # where aten leaves them as they were
    x, offsets = rows(0, 0, 0)
    assert run(x, offsets).shape == (0, N)


# Batches ------------------------------------------------------------------------------------------


def batched(m: Holder, x: Tensor) -> Tensor:
    return torch.bmm(x, m.made(m).to(x.dtype).mT)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("activation", "weight"), PAIRS)
def test_a_batch_of_weights(activation: str, weight: str, dynamic: bool) -> None:
    module = layer(activation, weight, FP32, False, batched)
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    for m in (64, 5):
        x = Random(m).normal(E, m, K)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 1)
        ours, eager = run(x), module(x)
        assert (ours.shape, ours.stride()) == (eager.shape, eager.stride())
        given, weights = ACTIVATIONS[activation](module, x), module.made(module)
        for i in range(E):
            if m * N >= OUTPUTS:
                product_oracle(ours[i], eager[i], given[i], weights[i])
            else:
                torch.testing.assert_close(ours[i], eager[i], rtol=1e-4, atol=1e-3)
        ((pattern, contract),) = lowered()
        assert pattern == "scaled_matmul" and "3 experts of" in contract, contract


# Rows in the order of experts ---------------------------------------------------------------------


def sorted_first(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    q, s = quantised(x[order], 128)
    return grouped(m, (q.float() * s).flatten(-2).to(BF16), offsets)


def codes_sorted(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    q, s = quantised(x, 128)
    q, s = q.flatten(-2)[order], s.squeeze(-1)[order]
    x = (q.float().view(len(order), -1, 128) * s[..., None]).flatten(-2)
    return grouped(m, x.to(BF16), offsets)


def sorted_last(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    q, s = quantised(x, 128)
    return grouped(m, (q.float() * s).flatten(-2).to(BF16)[order], offsets)


def sorted_twice(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """Tokens, then rows, as transformers has them."""
    q, s = quantised(x, 128)
    return grouped(m, (q.float() * s).flatten(-2).to(BF16)[order.clamp(max=9)][order], offsets)


@pytest.mark.parametrize("order", [sorted_first, codes_sorted, sorted_last, sorted_twice])
def test_rows_are_sorted_before_or_after_they_are_quantised(order: Callable) -> None:
    module = layer("token", "block-64x128")
    module.function = order
    x = Random(1).normal(10, K)
    ids = torch.tensor([0, 9, 3, 3, 1, 2, 5, 8, 7, 6, 4, 0, 1])
    offsets = torch.tensor([2, 2, 13], dtype=torch.int32)
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    torch._dynamo.mark_dynamic(ids, 0)
    ours, eager = run(x, ids, offsets), module(x, ids, offsets)
    torch.testing.assert_close(ours, eager, rtol=0.01, atol=float(eager.abs().max()) * 0.004)
    ((pattern, contract),) = lowered()
    assert pattern == "scaled_matmul" and contract.startswith(
        "3 experts of float8_e4m3fn group-128"
    )


def test_one_scale_is_not_sorted() -> None:
    def function(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        return grouped(m, by_tensor(m, x).to(BF16)[order], offsets)

    module = layer("tensor", "tensor")
    module.function = function
    given = Random(1).normal(10, K), torch.tensor([4, 2, 2, 9]), torch.tensor([1, 3, 4]).int()
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    torch.testing.assert_close(run(*given), module(*given), rtol=0.02, atol=0.02)
    assert lowered()[0][0] == "scaled_matmul"


def in_floats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes that are whole numbers in floats, and their scale, as fake quantisers have them."""
    s = power_of(x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127)
    return torch.round(x.float() / s).clamp(-128, 127), s


def floats_sorted_first(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    q, s = in_floats(x[order])
    return grouped(m, (q * s).to(BF16), offsets)


def floats_codes_sorted(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    q, s = in_floats(x)
    return grouped(m, (q[order] * s[order]).to(BF16), offsets)


def floats_sorted_last(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    q, s = in_floats(x)
    return grouped(m, (q * s).to(BF16)[order], offsets)


@pytest.mark.parametrize(
    "order",
    [floats_sorted_first, floats_codes_sorted, floats_sorted_last],
    ids=lambda f: f.__name__,
)
def test_codes_that_are_whole_numbers_in_floats(order: Callable) -> None:
    module = layer("int8 token", "int8 row")
    module.function = order
    x, ids = Random(1).normal(10, K), torch.tensor([0, 9, 3, 3, 1, 2, 5, 8])
    offsets = torch.tensor([2, 2, 8], dtype=torch.int32)
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    ours, eager = run(x, ids, offsets), module(x, ids, offsets)
    torch.testing.assert_close(ours, eager, rtol=0.01, atol=float(eager.abs().max()) * 0.004)
    ((pattern, contract),) = lowered()
    assert pattern == "scaled_matmul" and contract.startswith("3 experts of int8 token"), contract


def test_weights_that_lie_the_other_way() -> None:
    """[E, K, N], with a scale for each of the N columns."""

    def function(m: Holder, x: Tensor, offsets: Tensor) -> Tensor:
        w = (m.turned.float() * m.s.mT).to(BF16)
        return torch._grouped_mm(by_group(128)(m, x).to(BF16), w, offs=offsets)

    module = layer("group-128", "row")
    module.function = function
    module.register_buffer("turned", module.w.mT.contiguous())
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    agree(module, run, "group-128", *rows(*SIZES), BF16)
    assert lowered()[0][0] == "scaled_matmul"


@pytest.mark.parametrize(("activation", "weight"), PAIRS)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_every_pair_is_one_launch_on_a_gpu(activation: str, weight: str, target: str) -> None:
    found = rewritten(lambda: layer(activation, weight), *rows(2, 0, 3), target=target)
    site = next(s for s in found.report.sites if s.pattern == "scaled_matmul")
    assert site.lowered and site.provider.startswith("triton.scaled_mma@"), site.reason
    assert found.after.count("scaled_grouped_matmul") == 1


# A block of experts -------------------------------------------------------------------------------

TOP = 2


def test_a_block_of_experts_behind_its_router() -> None:
    """Sorted, computed and summed as transformers does it; one compile over numbers of tokens."""
    experts, gate = Experts(), Random(3).normal(E, H)

    def block(x: Tensor) -> Tensor:
        weights, ids = torch.topk((x @ gate.t()).float().softmax(-1), TOP, -1)
        ids = ids.flatten()
        order = ids.argsort(stable=True)
        offsets = torch.histc(ids.float(), E, 0, E - 1).cumsum(0).int()
        y = experts(x[order // TOP], offsets) * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return y[back].view(-1, TOP, H).sum(1).to(BF16)

    run = torch.compile(block, backend="qinductor", options={"inductor": EXACT})
    for tokens in (5, 33):
        x = Random(tokens).normal(tokens, H)
        torch._dynamo.mark_dynamic(x, 0)
        ours, eager = run(x).float(), block(x).float()
        # A last bit of the first product moves codes of the second by up to a sixteenth.
        assert (ours - eager).norm() < 0.04 * eager.norm()
        assert [pattern for pattern, _ in lowered()] == ["scaled_matmul", "scaled_matmul"]


class TestGolden(Golden):
    """What becomes of two products and of the quantisers before them, on a GPU."""

    def test_a_block_of_experts(self) -> None:
        given = Random(1).normal(6, H), torch.tensor([2, 2, 6], dtype=torch.int32)
        found = rewritten(Experts, *given, target="sm_90")
        self.expects(f"{outcome(found.report)}\n{found.after}\n")("""\
---- 4 of 4 lowered
%0: float8_e4m3fn[3, 256, 256]@cuda = placeholder
%1: float32[3, 2, 2]@cuda = placeholder
%2: bfloat16[6, 256]@cuda = placeholder
%3: int32[3]@cuda = placeholder
%4: float8_e4m3fn[3, 256, 128]@cuda = placeholder
%5: float32[3, 2, 1]@cuda = placeholder
%6: float8_e4m3fn[3, 256, 256]@cuda = placeholder packed_codes
%7: float32[3, 2, 2]@cuda = placeholder packed_scale
%8: float8_e4m3fn[3, 256, 128]@cuda = placeholder packed_codes
%9: float32[3, 2, 1]@cuda = placeholder packed_scale
%10: list = qinductor.quantize.default([%2])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=128 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-06 power=up
    triton.quantize
%11: float8_e4m3fn[6, 256]@cuda = getitem(%10, 0)
%12: float8_e4m3fn[6, 2, 128]@cuda = aten.view.default(%11, [6, 2, 128])
%13: float32[6, 2]@cuda = getitem(%10, 1)
%14: float8_e4m3fn[6, 256]@cuda = aten.reshape.default(%12, [-1, 256])
%15: bfloat16[6, 256]@cuda = qinductor.scaled_grouped_matmul.default(%14, %13, %3, [%6, %7])
    weight.codes=float8_e4m3fn weight.n=256 weight.k=256 weight.bn=128 weight.bk=128
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 a=float8_e4m3fn group=128 scale=float32
      out=bfloat16 experts=3
    triton.scaled_mma
%16: list = qinductor.quantize.default([%15])
    k=128 x=bfloat16 source.y=bfloat16 source.activation=silu source.gate=halves
      source.inner=bfloat16 codes=float8_e4m3fn group=128 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-06 power=up
    triton.quantize
%17: float8_e4m3fn[6, 128]@cuda = getitem(%16, 0)
%18: float8_e4m3fn[6, 1, 128]@cuda = aten.view.default(%17, [6, 1, 128])
%19: float32[6, 1]@cuda = getitem(%16, 1)
%20: float8_e4m3fn[6, 128]@cuda = aten.reshape.default(%18, [-1, 128])
%21: bfloat16[6, 256]@cuda = qinductor.scaled_grouped_matmul.default(%20, %19, %3, [%8, %9])
    weight.codes=float8_e4m3fn weight.n=256 weight.k=128 weight.bn=128 weight.bk=128
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 a=float8_e4m3fn group=128 scale=float32
      out=bfloat16 experts=3
    triton.scaled_mma
output [%21]
""")

    def test_rows_that_are_sorted_last(self) -> None:
        def function(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
            x = by_group(128)(m, x).to(BF16)
            return grouped(m, aten.index.Tensor(x, [order]), offsets)

        def module() -> Holder:
            made = layer("token", "row")
            made.function = function
            return made

        given = Random(1).normal(6, K), torch.tensor([2, 0, 4, 4]), torch.tensor([1, 2, 4]).int()
        found = rewritten(module, *given, target="sm_90")
        self.expects(f"{outcome(found.report)}\n{found.after}\n")("""\
---- 2 of 2 lowered
%0: bfloat16[6, 256]@cuda = placeholder
%1: int64[4]@cuda = placeholder
%2: float8_e4m3fn[3, 64, 256]@cuda = placeholder
%3: float32[3, 64, 1]@cuda = placeholder
%4: int32[3]@cuda = placeholder
%5: float8_e4m3fn[3, 64, 256]@cuda = placeholder packed_codes
%6: float32[3, 64, 1]@cuda = placeholder packed_scale
%7: list = qinductor.quantize.default([%0])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=128 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-06 power=up
    triton.quantize
%8: float8_e4m3fn[6, 256]@cuda = getitem(%7, 0)
%9: float8_e4m3fn[6, 2, 128]@cuda = aten.view.default(%8, [6, 2, 128])
%10: float32[6, 2]@cuda = getitem(%7, 1)
%11: float32[4, 2]@cuda = aten.index.Tensor(%10, [%1])
%12: float8_e4m3fn[6, 256]@cuda = aten.reshape.default(%9, [-1, 256])
%13: float8_e4m3fn[4, 256]@cuda = aten.index.Tensor(%12, [%1])
%14: bfloat16[4, 64]@cuda = qinductor.scaled_grouped_matmul.default(%13, %11, %4, [%5, %6])
    weight.codes=float8_e4m3fn weight.n=64 weight.k=256 weight.bn=1 weight.bk=256
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 a=float8_e4m3fn group=128 scale=float32
      out=bfloat16 experts=3
    triton.scaled_mma
output [%14]
""")

    def test_torchs_product_of_codes(self) -> None:
        def function(m: Holder, x: Tensor, offsets: Tensor) -> Tensor:
            q, s = quantised(x, K)
            return torch._scaled_grouped_mm(
                q.flatten(-2), m.w.mT, s.flatten(), m.s.squeeze(-1), offs=offsets,
                out_dtype=BF16, use_fast_accum=True,
            )  # fmt: skip

        def module() -> Holder:
            made = layer("token", "row")
            made.function = function
            return made

        found = rewritten(module, *rows(2, 0, 3), target="sm_90")
        self.expects(f"{outcome(found.report)}\n{found.after}\n")("""\
---- 2 of 2 lowered
%0: bfloat16[5, 256]@cuda = placeholder
%1: float8_e4m3fn[3, 64, 256]@cuda = placeholder
%2: float32[3, 64, 1]@cuda = placeholder
%3: int32[3]@cuda = placeholder
%4: float8_e4m3fn[3, 64, 256]@cuda = placeholder packed_codes
%5: float32[3, 64, 1]@cuda = placeholder packed_scale
%6: list = qinductor.quantize.default([%0])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=256 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-06 power=up
    triton.quantize
%7: float8_e4m3fn[5, 256]@cuda = getitem(%6, 0)
%8: float8_e4m3fn[5, 1, 256]@cuda = aten.view.default(%7, [5, 1, 256])
%9: float32[5, 1]@cuda = getitem(%6, 1)
%10: float8_e4m3fn[5, 256]@cuda = aten.view.default(%8, [5, 256])
%11: bfloat16[5, 64]@cuda = qinductor.scaled_grouped_matmul.default(%10, %9, %3, [%4, %5])
    weight.codes=float8_e4m3fn weight.n=64 weight.k=256 weight.bn=1 weight.bk=256
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 a=float8_e4m3fn group=256 scale=float32
      out=bfloat16 fast=True experts=3
    triton.scaled_mma
output [%11]
""")

    def test_a_batch(self) -> None:
        x = Random(1).normal(E, 4, K)
        make = functools.partial(layer, "group-128", "block-64x128", product=batched)
        found = rewritten(make, x, target="sm_90")
        self.expects(f"{outcome(found.report)}\n{found.after}\n")("""\
---- 2 of 2 lowered
%0: bfloat16[3, 4, 256]@cuda = placeholder
%1: float8_e4m3fn[3, 64, 256]@cuda = placeholder
%2: float32[3, 1, 2]@cuda = placeholder
%3: float8_e4m3fn[3, 64, 256]@cuda = placeholder packed_codes
%4: float32[3, 1, 2]@cuda = placeholder packed_scale
%5: list = qinductor.quantize.default([%0])
    k=256 x=bfloat16 source.y=bfloat16 codes=float8_e4m3fn group=128 scale=float32 qmax=448.0
      compute=float32 inner=float32 low=-448.0 high=448.0 least=1e-06 power=up
    triton.quantize
%6: float8_e4m3fn[3, 4, 256]@cuda = getitem(%5, 0)
%7: float8_e4m3fn[3, 4, 2, 128]@cuda = aten.view.default(%6, [3, 4, 2, 128])
%8: float32[3, 4, 2]@cuda = getitem(%5, 1)
%9: float8_e4m3fn[3, 4, 256]@cuda = aten.reshape.default(%7, [3, -1, 256])
%10: bfloat16[3, 4, 64]@cuda = qinductor.scaled_bmm.default(%9, %8, [%3, %4])
    weight.codes=float8_e4m3fn weight.n=64 weight.k=256 weight.bn=64 weight.bk=128
      weight.arithmetic=q*s weight.scale=float32 weight.zero=None weight.inner=float32
      weight.compute=float32 weight.dtype=float32 a=float8_e4m3fn group=128 scale=float32
      out=bfloat16 experts=3
    triton.scaled_mma
output [%10]
""")


# Near misses --------------------------------------------------------------------------------------


def refused(module: Holder, *given: Tensor, options: Any = None, target: str = "cpu") -> str:
    """The reason of the first product of codes that is left."""
    report = rewritten(lambda: module, *given, options=options, target=target).report
    return next(s.reason for s in report.sites if s.pattern.startswith("scaled_matmul"))


def changed(function: Callable, activation: str = "token", weight: str = "row") -> Holder:
    module = layer(activation, weight)
    module.function = function
    return module


def test_a_scale_for_each_expert() -> None:
    def function(m: Holder, x: Tensor) -> Tensor:
        s = x.float().abs().amax((1, 2), keepdim=True) / 448
        return batched(m, (x.float() / s).to(E4M3).float() * s)

    reason = refused(changed(function), Random(1).normal(E, 4, K))
    assert re.search(r"x must have a scale for each row, group or in all; .*\[3, 1, 1\]", reason)


def test_a_scale_for_each_column() -> None:
    def function(m: Holder, x: Tensor, offsets: Tensor) -> Tensor:
        s = x.float().abs().amax(0, keepdim=True) / 448
        return grouped(m, ((x.float() / s).to(E4M3).float() * s).to(BF16), offsets)

    reason = refused(changed(function), *rows(2, 3, 4))
    assert "x must have a scale for each row, group or in all" in reason


def test_no_offsets() -> None:
    """Of two stacks there are none, and rows of no expert."""

    def function(m: Holder, x: Tensor) -> Tensor:
        return torch._grouped_mm(by_group(K)(m, x).to(BF16), m.made(m).to(BF16).mT)

    reason = refused(changed(function), Random(1).normal(E, 8, K))
    assert reason.startswith("a grouped product must be of x[T, K] with W[E, K, N] and offsets")


def test_a_scale_for_each_column_of_the_weights() -> None:
    def function(m: Holder, x: Tensor, offsets: Tensor) -> Tensor:
        w = m.w.float() * power_of(m.a_scale * m.columns)
        return torch._grouped_mm(by_group(K)(m, x).to(BF16), w.to(BF16).mT, offs=offsets)

    module = changed(function)
    module.register_buffer("columns", Random(4).scales(E, 1, K, dtype=FP32))
    reason = refused(module, *rows(2, 3, 4), target="sm_90")
    assert "1 columns share a scale; it takes multiples of 32, or whole rows" in reason


def test_a_weight_of_two_scales() -> None:
    """What follows the product is one for all experts: it stays."""

    def function(m: Holder, x: Tensor, offsets: Tensor) -> Tensor:
        return grouped(m, by_group(K)(m, x).to(BF16), offsets) * m.s[0, :, 0]

    module = changed(function)
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    x, offsets = rows(*SIZES)
    torch.testing.assert_close(run(x, offsets), module(x, offsets), rtol=0.02, atol=0.02)
    assert len(lowered()) == 1


def test_zero_points() -> None:
    def function(m: Holder, x: Tensor, offsets: Tensor) -> Tensor:
        q, s = quantised(x, K, INT8)
        zero = q.amin(-1, keepdim=True)
        x = ((q.float() - zero.float()) * s).flatten(-2)
        return grouped(m, x.to(BF16), offsets)

    reason = refused(changed(function, "int8 token", "int8 row"), *rows(2, 3, 4))
    assert "there are 3 experts and zero points; it takes experts without" in reason


@pytest.mark.parametrize("sorted_last", [False, True], ids=["codes sorted", "x sorted"])
def test_a_nan_that_int8_codes_would_lose(sorted_last: bool) -> None:
    """A scale that does not depend on x keeps none."""

    def function(m: Holder, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        s = power_of(m.a_scale).expand(len(x), 1)
        q = torch.round(x.float() / s).clamp(-128, 127)
        x = (q * s).to(BF16)[order] if sorted_last else (q[order] * s[order]).to(BF16)
        return grouped(m, x, offsets)

    given = Random(1).normal(6, K), torch.tensor([2, 0, 4, 4]), torch.tensor([1, 2, 4]).int()
    reason = refused(changed(function, "int8 token", "int8 row"), *given)
    assert "int8 codes would lose that" in reason or "are made of no one tensor" in reason, reason


def test_weights_that_are_no_stack_of_codes() -> None:
    """Two operands that vary: no site. A weight for a part of the rows of K: no product of ours."""

    def function(m: Holder, x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(by_group(K)(m, x).to(BF16), y, offs=offsets)

    given = Random(1).normal(4, K), torch.randn(E, K, N).to(BF16), torch.tensor([1, 2, 4]).int()
    report = rewritten(lambda: changed(function), *given).report
    assert not [site for site in report.sites if "matmul" in site.pattern]


def test_rows_that_are_chosen_for_one_weight_are_the_other_familys() -> None:
    def function(m: Holder, x: Tensor, order: Tensor) -> Tensor:
        return by_group(K)(m, x).to(BF16)[order] @ (m.w[0].float() * m.s[0]).to(BF16).mT

    given = Random(1).normal(4, K), torch.tensor([1, 2, 0, 0, 3])
    sites = rewritten(lambda: changed(function), *given).report.sites
    assert [s.pattern for s in sites if "matmul" in s.pattern] == ["dequant_matmul"]


def test_weights_that_are_chosen_are_the_other_familys() -> None:
    def function(m: Holder, x: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(by_group(K)(m, x), m.made(m)[ids].mT)

    given = Random(1).normal(4, 2, K), torch.tensor([1, 2, 0, 0])
    sites = rewritten(lambda: changed(function), *given).report.sites
    assert [s.pattern for s in sites if "matmul" in s.pattern] == ["dequant_matmul"]


def test_one_weight_for_the_whole_batch() -> None:
    def function(m: Holder, x: Tensor) -> Tensor:
        w = m.made(m)[:1].mT
        return torch.bmm(by_group(K)(m, x), w.expand(4, K, N))

    sites = rewritten(lambda: changed(function), Random(1).normal(4, 2, K)).report.sites
    assert [s.pattern for s in sites if "matmul" in s.pattern] == ["dequant_matmul"]


@pytest.mark.parametrize(
    ("activation", "weight"), [("group-128", "block-64x128"), ("int8 token", "int8 row")]
)
def test_codes_are_not_copied(activation: str, weight: str) -> None:
    """8-bit codes of a stack stay in the memory of the model's own."""
    module = layer(activation, weight)
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    agree(module, run, activation, *rows(*SIZES), BF16)
    assert qinductor.last_report().packed_bytes == module.s.nbytes


def test_weights_that_change_are_packed_again() -> None:
    module = layer("group-128", "block-64x128")
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    x, offsets = rows(*SIZES)
    agree(module, run, "group-128", x, offsets, BF16)
    module.s.mul_(2)
    module.w.copy_(Random(9).float8(E, N, K))
    agree(module, run, "group-128", x, offsets, BF16)


def test_torchs_product_of_one_scale_for_all_rows() -> None:
    """Scales that are not those of rows, and views of them that are."""

    def function(m: Holder, x: Tensor, offsets: Tensor) -> Tensor:
        q, s = quantised(x, K)
        scale = m.s.view(-1).narrow(0, 0, N).view(1, N).expand(E, N)
        return aten._scaled_grouped_mm(
            q.flatten(-2), m.w.mT, s.flatten(), scale, offsets, None, None, BF16
        )

    report = rewritten(lambda: changed(function), *rows(2, 3, 4), target="sm_90").report
    site = next(s for s in report.sites if s.pattern == "scaled_matmul")
    assert site.lowered and "channel" in site.contract, site.reason
