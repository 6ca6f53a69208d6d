"""Providers of scaled_matmul on a GPU: bitwise on exact data, to the oracle, captured, replayed."""

import dataclasses

import pytest
import torch
from products import poisoned
from scaled_products import call, check, hold, layouts, made, many, only, packed

import qinductor
from qinductor.contracts import difference
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, reference
from qinductor.kernels.scaled_matmul_cases import (
    ASYMMETRIC,
    BF16,
    CASES,
    E5M2,
    FP8,
    FP16,
    FP32,
    INT8,
    UINT8,
    Case,
    case,
    zeros,
)
from qinductor.kernels.scaled_matmul_direct import scaled_product
from qinductor.op import Op, split

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")
qinductor.load()
TRITON = "triton.scaled_mma"
LARGE = (
    case(FP8, 1, 1024, 4096, 1024, 4096, group=0),
    case(FP8, 1, 1040, 4096, 1, 4096, bias=BF16),
    case(FP8, 1, 1024, 4096, 1, 4096, fast=True),
    case(FP8, 1, 1024, 4096, 1, 4096, E5M2),
    case(FP8, 1, 1152, 4096, 128, 128, group=128),
    case(FP8, 1, 1024, 4096, 1, 128, group=128, out=FP16),
    case(FP8, 1, 1000, 2080, 32, 32, group=32),
    case("int8", 1, 1024, 4096, 1, 4096, INT8, out=FP16, bias=FP16),
    case("int8", 1, 1024, 4096, 1, 128, INT8, group=128, out=FP32),
    case("int4", 1, 1024, 4096, 1, 128),
    case("int4", 1, 1096, 4128, 1, 32, bias=FP32),
    case("int4", 1, 1024, 4096, 1, 128, INT8),
    case("int4", 1, 1024, 4096, 1, 4096, INT8, group=0),
)
LARGE_ASYMMETRIC = (
    case("int8", 1, 1024, 4096, 1, 4096, INT8, zero=INT8),
    case("int8", 1, 1024, 4096, 1, 128, UINT8, group=128, zero=UINT8),
    case("int4", 1, 1024, 4096, 1, 32, INT8, zero=INT8, out=FP32),
    case("int4", 1, 1096, 4128, 1, 32, INT8, group=32, zero=INT8),
)
M = (1, 17, 64, 100, 300)
CONFIGS = (
    "m16.n64.k128.s3.w4.p4.swap",
    "m32.n128.k256.s2.w4.p2.swap.tma",
    "m64.n64.k64.s2.w4.p4",
    "m128.n128.k128.s1.w8.p3.tma",
)


def target() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def routes(contract) -> list[str]:
    """The providers that run here, Triton's in its own configs, and in some for every contract."""
    found = {}
    for name, provider in SCALED_MATMUL.providers.items():
        missing = getattr(provider, "missing", lambda: None)()
        runs = provider.runs_on(target()) and not provider.reference and not missing
        if not runs or provider.why_not(contract):
            continue
        if name != TRITON:
            found[name] = None
            continue
        for config in (*CONFIGS, *(provider.configs(contract, m)[0] for m in M)):
            found[f"{name}@{config}"] = None
    return list(found)


def exact(route: str, contract) -> bool:
    """Whether the result of exact data must be the reference's: cuBLAS has its own last rounding of
    scales and bias."""
    return split(route)[0] in (TRITON, "aten.int_mm") and not contract.fast


@pytest.mark.parametrize("chosen", [*CASES, *LARGE], ids=lambda chosen: chosen.name)
def test_products(chosen):
    contract = chosen.contract
    few = [1, 17, 300] if chosen in CASES else M
    assert routes(contract)
    for route in routes(contract):
        plan = only(route)
        for m in few:
            for data in (True, False):
                a, scale, source = made(chosen, max(m, 1 if data else many(contract)), data, "cuda")
                tensors = packed(plan, contract, source)
                before = [tensor.clone() for tensor in tensors]
                with poisoned():
                    out = call(a, scale, tensors, contract, plan)
                check(out, contract, len(a))
                if data and exact(route, contract):
                    want = reference(contract, a, scale, source)
                    assert not difference(out, want), (route, m)
                elif data:
                    torch.testing.assert_close(out, reference(contract, a, scale, source))
                else:
                    hold(contract, out, a, scale, source)
                for tensor, old in zip(tensors, before, strict=True):
                    assert not difference(tensor, old), "a packed tensor was written to"


@pytest.mark.parametrize("chosen", [*ASYMMETRIC, *LARGE_ASYMMETRIC], ids=lambda chosen: chosen.name)
def test_products_with_zero_points(chosen):
    contract = chosen.contract
    assert routes(contract)
    for route in routes(contract):
        plan = only(route)
        for m in M:
            for data in (True, False):
                a, scale, source = made(chosen, max(m, 1 if data else many(contract)), data, "cuda")
                zero = [z.cuda() for z in zeros(contract, len(a))]
                with poisoned():
                    out = call(a, scale, packed(plan, contract, source), contract, plan, *zero)
                check(out, contract, len(a))
                if data:
                    want = reference(contract, a, scale, source, *zero)
                    assert not difference(out, want), (route, m)
                else:
                    hold(contract, out, a, scale, source, *zero)


@pytest.mark.parametrize("chosen", LARGE, ids=lambda chosen: chosen.name)
def test_strides(chosen):
    contract, (a, scale, source) = chosen.contract, made(chosen, 20, True, "cuda")
    for route in routes(contract):
        plan = only(route)
        tensors = packed(plan, contract, source)
        want = call(a, scale, tensors, contract, plan)
        for layout, (x, s) in layouts(a, scale).items():
            assert not difference(call(x, s, tensors, contract, plan), want), (route, layout)


@pytest.mark.parametrize("chosen", LARGE, ids=lambda chosen: chosen.name)
def test_a_row_s_result_does_not_depend_on_the_others(chosen):
    """Nor on when it is computed: a race would show in one of many runs."""
    contract, (a, scale, source) = chosen.contract, made(chosen, 300, False, "cuda")
    for route in routes(contract):
        if split(route)[0] != TRITON:
            continue
        plan = only(route)
        tensors = packed(plan, contract, source)
        first = call(a, scale, tensors, contract, plan)
        for _ in range(20):
            assert not difference(call(a, scale, tensors, contract, plan), first), route
        for m in (1, 17, 130):
            part = call(a[:m], scale[:m], tensors, contract, plan)
            assert not difference(part, first[:m]), (route, m)


@pytest.mark.parametrize("chosen", LARGE, ids=lambda chosen: chosen.name)
def test_captured_and_replayed_with_other_inputs(chosen):
    contract = chosen.contract
    for route in routes(contract):
        plan = only(route)
        for m in (1, 17, 300):
            a, scale, source = made(chosen, m, False, "cuda")
            tensors = packed(plan, contract, source)
            held, scales, graph = a.clone(), scale.clone(), torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call(held, scales, tensors, contract, plan)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                out = call(held, scales, tensors, contract, plan)
            for seed in (1, 2):
                a, scale, _ = _again(chosen, m, seed)
                held.copy_(a)
                scales.copy_(scale)
                out.fill_(float("nan"))
                graph.replay()
                want = call(held, scales, tensors, contract, plan)
                assert not difference(out, want), (route, m)


def _again(chosen: Case, m: int, seed: int):
    a, scale, source = dataclasses.replace(chosen, m=m).make(seed)
    return a.cuda(), scale.cuda(), source


def test_two_streams_at_once():
    """Sums of parts of K are in memory of each call's own."""
    chosen = LARGE[1]
    contract, plan = chosen.contract, only(f"{TRITON}@{CONFIGS[0]}")
    a, scale, source = made(chosen, 16, False, "cuda")
    tensors = packed(plan, contract, source)
    inputs = [(a, scale), (a.flip(0).contiguous(), scale)]
    expected = [call(*given, tensors, contract, plan) for given in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for given, stream, out in zip(inputs, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                out.append(call(*given, tensors, contract, plan))
    torch.cuda.synchronize()
    for want, out in zip(expected, outs, strict=True):
        for got in out:
            assert not difference(got, want)


@pytest.mark.parametrize("chosen", LARGE[:9], ids=lambda chosen: chosen.name)
def test_weights_as_they_are(chosen):
    """`scaled_product` takes codes that nobody packed, and writes where it is told to."""
    contract = chosen.contract
    for m in (1, 17, 300):
        a, scale, source = made(chosen, m, True, "cuda")
        held = source.weight.scale
        want = reference(contract, a, scale, source)
        given = contract, a, scale, source.weight.codes, held, source.bias
        torch.testing.assert_close(scaled_product(*given), want)
        columns = None if held is None else held.t().contiguous().t()
        wide = want.new_full((m, 2 * contract.weight.n), float("nan"))
        out = wide[:, : contract.weight.n]
        got = scaled_product(*given[:4], columns, source.bias, out=out)
        assert got is out
        torch.testing.assert_close(out, want)
        assert wide[:, contract.weight.n :].isnan().all()


def test_plans_name_who_runs_here():
    for chosen in (*CASES, *LARGE):
        plan = Op.plan(SCALED_MATMUL, chosen.contract, target(), None)
        assert all(not p.reference for p in plan.providers(SCALED_MATMUL)), chosen.name
