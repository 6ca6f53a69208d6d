"""The Triton family on a GPU: W bitwise, products to the oracle, graphs, streams, experts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from products import activations, call, check, hold, on, only, packed, poisoned, replays
from triton_cases import BF16, CONFIGS, MMA, SMALL, STACKED, TAKEN, fitting

from qinductor.contracts import dequantize, difference
from qinductor.kernels import dequant_matmul_triton as family
from qinductor.kernels.dequant_matmul import case
from qinductor.op import single
from qinductor.testing import OUTPUTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")
ops = torch.ops.qinductor
CUBLAS = "triton.dequant_cublas"
LARGE = (
    case("int4", 1, 4096, 4224, 1, 128),
    case("int3", 1, 1024, 4096, 1, 32),
    case("uint7", 1, 8192, 1024, 1, 64),
    case("table4", 1, 8192, 2048, 1, 64),
    case("float8_e4m3fn", 1, 2048, 4096, 128, 128, bias=True),
)
CHOSEN = [*TAKEN, *SMALL.values(), *LARGE]


def routes(
    contract: Any, configs: Sequence[str] = CONFIGS, own: Sequence[int] = (1, 64, 300)
) -> list[str]:
    """Both providers, the first in these configs and in its own for so many rows."""
    chosen = {fitting(config, contract) for config in configs}
    chosen |= {MMA.configs(contract, m)[0] for m in own}
    return [CUBLAS, *(f"triton.mma@{config}" for config in sorted(chosen))]


@pytest.mark.parametrize("i", range(len(CHOSEN)), ids=lambda i: f"{CHOSEN[i].name} {i}")
def test_products(i):
    contract, source = CHOSEN[i].contract, on(CHOSEN[i].make()[1], "cuda")
    held = MMA.pack(contract, source)
    tensors, w = list(held.values()), dequantize(source.weight)
    w = w if source.weight.order is None else w[:, source.weight.order]
    with poisoned():
        written = family.dense(contract, held, 0, contract.weight.n)
    assert not difference(written.nan_to_num(), w.nan_to_num())  # a NaN may have other bits
    inputs = {m: activations(contract, m, "cuda") for m in (1, 17, 300)}
    before = [tensor.clone() for tensor in tensors]
    few = i < len(TAKEN)  # each is compiled: a second
    some = ([CONFIGS[i % len(CONFIGS)]], (1,)) if few else ()
    for route in routes(contract, *some):
        for m, xs in inputs.items():
            with poisoned():
                ours = [call(x, tensors, contract, only(route)) for x in xs]
            for out in ours:
                check(out, contract, m)
            hold(contract, ours, xs, source)
    for tensor, old in zip(tensors, before, strict=True):
        assert not difference(tensor, old), "a packed tensor was written to"


@pytest.mark.parametrize("name", SMALL)
def test_x_that_is_not_contiguous(name):
    contract, source = SMALL[name].contract, on(SMALL[name].make()[1], "cuda")
    k, tensors = contract.weight.k, list(MMA.pack(contract, source).values())
    layouts = {
        "odd stride": lambda x: torch.cat([x, x[:, :3]], 1)[:, :k],
        "rows that begin anywhere": lambda x: torch.cat([x[:, :3], x], 1)[:, 3:],
        "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
        "transposed": lambda x: x.t().contiguous().t(),
        "one row, expanded": lambda x: x[:1].expand(len(x), k),
    }
    for route in routes(contract):
        for layout, made in layouts.items():
            for x in activations(contract, 20, "cuda"):
                laid = made(x)
                assert not laid.is_contiguous(), layout
                out = call(laid, tensors, contract, only(route))
                held = laid.clone(memory_format=torch.contiguous_format)
                if route == CUBLAS:  # which multiplies otherwise where rows are not aligned
                    count = -(-OUTPUTS // out.numel())
                    hold(contract, [out] * count, [held] * count, source)
                else:
                    assert not difference(out, call(held, tensors, contract, only(route))), layout


@pytest.mark.parametrize("name", SMALL)
def test_captured_and_replayed_with_other_inputs(name):
    contract, source = SMALL[name].contract, on(SMALL[name].make()[1], "cuda")
    tensors = list(MMA.pack(contract, source).values())
    for route in routes(contract):
        for m in (1, 17, 300):
            replays(contract, only(route), tensors, activations(contract, m, "cuda")[0])


@pytest.mark.parametrize("name", SMALL)
def test_a_row_s_result_does_not_depend_on_the_others(name):
    """Nor on when it is computed: a race would show in one of many runs."""
    contract, source = SMALL[name].contract, on(SMALL[name].make()[1], "cuda")
    tensors, x = list(MMA.pack(contract, source).values()), activations(contract, 300, "cuda")[0]
    for route in routes(contract):
        if route == CUBLAS:
            continue
        first = call(x, tensors, contract, only(route))
        for _ in range(30):
            assert not difference(call(x, tensors, contract, only(route)), first)
        for m in (1, 17, 130):
            assert not difference(call(x[:m], tensors, contract, only(route)), first[:m])


@pytest.mark.parametrize("route", ["triton.mma@m16.n64.k128.s4.w4.p3", CUBLAS])
def test_two_streams_at_once(route):
    """Sums of parts of K, and W written out, are in memory of each call's own."""
    contract, source = LARGE[0].contract, on(LARGE[0].make()[1], "cuda")
    tensors, plan = list(MMA.pack(contract, source).values()), only(route)
    xs = [torch.randn(16, contract.weight.k, device="cuda").to(BF16) for _ in range(2)]
    expected = [call(x, tensors, contract, plan) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for x, stream, out in zip(xs, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                out.append(call(x, tensors, contract, plan))
    torch.cuda.synchronize()
    for want, out in zip(expected, outs, strict=True):
        for got in out:
            assert not difference(got, want)


# Experts --------------------------------------------------------------------------------------

stacked = pytest.mark.parametrize("chosen", STACKED, ids=lambda chosen: chosen.name)
EXPERT_ROUTES = (
    CUBLAS,
    "triton.mma@" + CONFIGS[0],
    "triton.mma@m32.n64.k256.s3.w4.p2",
    "triton.mma@m64.n128.k256.s1.w8.p2",
)
by_route = pytest.mark.parametrize("route", EXPERT_ROUTES)
SIZES = ((3, 5, 2, 7), (0, 4, 0, 1), (300, 0, 0, 1), (0, 0, 0, 0), (0, 1, 90, 0), (70, 20, 80, 9))


def prepared(chosen: Any, route: str) -> tuple[list[Any], list[torch.Tensor], tuple[str, str]]:
    contract, plan = chosen.contract, only(route)
    sources = [on(chosen.make(expert)[1], "cuda") for expert in range(contract.experts)]
    return sources, packed(plan, contract, sources), (str(contract), str(plan))


def rows(chosen: Any, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, chosen.contract.weight.k, device="cuda").to(chosen.contract.x)


def judge(chosen: Any, source: Any, out: torch.Tensor, x: torch.Tensor) -> None:
    """One expert's rows to the oracle."""
    if len(x):
        count = -(-OUTPUTS // out.numel())
        hold(single(chosen.contract)[0], [out] * count, [x] * count, source)


def judge_groups(
    chosen: Any, sources: list[Any], out: torch.Tensor, x: torch.Tensor, sizes: Any
) -> None:
    assert not out[sum(sizes) :].any(), "rows past the last offset belong to no expert"
    start = 0
    for source, size in zip(sources, sizes, strict=True):
        judge(chosen, source, out[start : start + size], x[start : start + size])
        start += size


@stacked
@by_route
def test_bmm(chosen, route):
    sources, tensors, texts = prepared(chosen, route)
    for m in (0, 1, 17, 300):
        x = rows(chosen, len(sources), m)
        with poisoned():
            out = ops.dequant_bmm(x, tensors, *texts)
        assert out.shape == (len(sources), m, chosen.contract.weight.n) and out.is_contiguous()
        for i, source in enumerate(sources):
            judge(chosen, source, out[i], x[i])
    x = rows(chosen, 20, len(sources)).transpose(0, 1)
    out = ops.dequant_bmm(x, tensors, *texts)
    for i, source in enumerate(sources):
        judge(chosen, source, out[i], x[i].contiguous())


@stacked
@by_route
def test_grouped(chosen, route):
    sources, tensors, texts = prepared(chosen, route)
    for given, past in zip(SIZES, (0, 3, 20, 2, 1, 0), strict=True):
        sizes = given[: len(sources)]
        x = rows(chosen, sum(sizes) + past)
        ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
        with poisoned():
            out = ops.dequant_grouped_matmul(x, ends, tensors, *texts)
        assert out.shape == (len(x), chosen.contract.weight.n) and out.is_contiguous()
        judge_groups(chosen, sources, out, x, sizes)


@stacked
@by_route
def test_grouped_captured_and_replayed_with_other_offsets(chosen, route):
    sources, tensors, texts = prepared(chosen, route)
    count = 310
    x, ends = rows(chosen, count), torch.zeros(len(sources), dtype=torch.int32, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.dequant_grouped_matmul(x, ends, tensors, *texts)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = ops.dequant_grouped_matmul(x, ends, tensors, *texts)
    for given in SIZES:
        sizes = given[: len(sources)]
        x.copy_(rows(chosen, count))
        ends.copy_(torch.tensor(sizes, device="cuda").cumsum(0))
        out.fill_(float("nan"))
        graph.replay()
        judge_groups(chosen, sources, out, x, sizes)


@pytest.mark.parametrize("ends", [[2, 9], [5, 2], [-1, 3], [0, 0], [9, 9]])
def test_offsets_that_are_wrong_leave_no_memory_unwritten(ends):
    chosen = next(c for c in STACKED if c.contract.weight.k == 384)
    _, tensors, texts = prepared(chosen, EXPERT_ROUTES[2])
    with poisoned():
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        out = ops.dequant_grouped_matmul(rows(chosen, 6), offsets, tensors, *texts)
    assert out.isfinite().all()
