"""cute.scaled_dots on a Hopper GPU: bitwise on exact data, to the oracle, captured, replayed."""

import dataclasses

import pytest
import torch
from products import poisoned
from scaled_products import call, check, hold, layouts, made, many, only, packed

import qinductor
from qinductor.contracts import difference
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, reference
from qinductor.kernels.scaled_matmul_cases import (
    BF16,
    CASES,
    E5M2,
    E8M0,
    FP8,
    FP16,
    FP32,
    INT8,
    WIDE8,
    case,
)
from qinductor.kernels.scaled_matmul_dots import candidates
from qinductor.kernels.scaled_matmul_dots_form import Config, form_of

qinductor.load()
DOTS = SCALED_MATMUL.providers["cute.scaled_dots"]


def lacking() -> str | None:
    """What this machine lacks."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a GPU of sm_90 to run"
    return DOTS.missing()


pytestmark = [
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
    pytest.mark.filterwarnings("error:qinductor. cute.scaled_dots"),  # another would run
]
TAKEN = [chosen for chosen in CASES if DOTS.why_not(chosen.contract) is None]
LARGE = (
    case(FP8, 1, 4096, 4096, 4096, 4096, group=0, fast=True),
    case(FP8, 1, 2112, 7168, 1, 7168, bias=BF16),
    case(FP8, 1, 1040, 4112, 1, 4112, out=FP32),
    case(WIDE8, 1, 1000, 1536, 1, 1536, E5M2, out=FP16, bias=FP32),
    case(FP8, 1, 1096, 4096, 128, 128, group=128),
    case(FP8, 1, 576, 7168, 128, 128, group=64, scale=BF16, weight_scale=FP16),
    case(FP8, 1, 1032, 2880, 32, 32, group=32),
    case(FP8, 1, 1032, 2080, 32, 32, group=32, scale=E8M0, weight_scale=E8M0, bias=BF16),
    case("int8", 1, 1048, 4096, 1, 4096, INT8, out=FP16, bias=FP16),
    case("int8", 1, 1024, 2064, 128, 128, INT8, group=128, out=FP32),
)
M = (1, 2, 3, 4, 5, 8, 13, 40)
# Beside a contract's own: parts of K, more rows, many programs and few.
CONFIGS = ("r32.q2.w4.a2.s8.b1", "r16.q8.w16.a1.s2.b1", "r16.q4.w1.a1.s1.b1", "r32.q1.w8.a2.s1.b1")
chosen = pytest.mark.parametrize("chosen", LARGE, ids=lambda chosen: chosen.name)


def routes(contract) -> list[str]:
    """Our provider in its own configs, and in some for every contract."""
    own = [candidates(contract, m)[0] for m in M]
    form = form_of(contract)
    some = [text for text in CONFIGS if Config.parse(text).takes(form)]
    return [f"{DOTS.name}@{config}" for config in dict.fromkeys([*own, *some])]


@pytest.mark.parametrize("chosen", [*TAKEN, *LARGE], ids=lambda chosen: chosen.name)
def test_products(chosen):
    contract = chosen.contract
    for route in routes(contract):
        plan = only(route)
        for m in M:
            for data in (True, False):
                a, scale, source = made(chosen, max(m, 1 if data else many(contract)), data, "cuda")
                tensors = packed(plan, contract, source)
                before = [tensor.clone() for tensor in tensors]
                with poisoned():
                    out = call(a, scale, tensors, contract, plan)
                check(out, contract, len(a))
                if data:
                    want = reference(contract, a, scale, source)
                    assert not difference(out, want), (route, m)
                else:
                    hold(contract, out, a, scale, source)
                for tensor, old in zip(tensors, before, strict=True):
                    assert not difference(tensor, old), "a packed tensor was written to"


@chosen
def test_every_config_that_is_measured(chosen):
    contract = chosen.contract
    for m in (1, 8):
        a, scale, source = made(chosen, m, True, "cuda")
        want = reference(contract, a, scale, source)
        for text in candidates(contract, m):
            plan = only(f"{DOTS.name}@{text}")
            with poisoned():
                out = call(a, scale, packed(plan, contract, source), contract, plan)
            assert not difference(out, want), (text, m)


@chosen
def test_strides(chosen):
    contract, (a, scale, source) = chosen.contract, made(chosen, 20, True, "cuda")
    for route in routes(contract):
        plan = only(route)
        tensors = packed(plan, contract, source)
        want = call(a, scale, tensors, contract, plan)
        for layout, (x, s) in layouts(a, scale).items():
            assert not difference(call(x, s, tensors, contract, plan), want), (route, layout)


@chosen
def test_a_row_s_result_does_not_depend_on_the_others(chosen):
    """Nor on when it is computed: a race would show in one of many runs."""
    contract, (a, scale, source) = chosen.contract, made(chosen, 40, False, "cuda")
    for route in routes(contract):
        plan = only(route)
        tensors = packed(plan, contract, source)
        first = call(a, scale, tensors, contract, plan)
        for _ in range(50):
            assert not difference(call(a, scale, tensors, contract, plan), first), route
        for m in (1, 3, 8, 9):
            rows = scale[:m] if contract.group else scale
            part = call(a[:m], rows, tensors, contract, plan)
            assert not difference(part, first[:m]), (route, m)


@chosen
def test_captured_and_replayed_with_other_inputs(chosen):
    contract = chosen.contract
    for route in routes(contract):
        plan = only(route)
        for m in (1, 5, 8):
            a, scale, source = made(chosen, m, False, "cuda")
            tensors = packed(plan, contract, source)
            held, scales, graph = a.clone(), scale.clone(), torch.cuda.CUDAGraph()
            call(held, scales, tensors, contract, plan)  # compiles
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = call(held, scales, tensors, contract, plan)
            for seed in (1, 2):
                a, scale, _ = dataclasses.replace(chosen, m=m).make(seed)
                held.copy_(a)
                scales.copy_(scale)
                out.fill_(float("nan"))
                graph.replay()
                want = call(held, scales, tensors, contract, plan)
                assert not difference(out, want), (route, m)


@chosen
def test_weights_that_the_kernel_in_front_writes(chosen):
    """`direct` waits for them."""
    contract, (a, scale, source) = chosen.contract, made(chosen, 2, True, "cuda")
    codes = source.weight.codes
    other = codes.flip(0).contiguous()
    sources = [
        dataclasses.replace(source, weight=dataclasses.replace(source.weight, codes=held))
        for held in (codes, other)
    ]
    wants = [reference(contract, a, scale, one) for one in sources]
    scratch = torch.empty_like(codes.view(torch.uint8))
    weight = dataclasses.replace(source.weight, codes=scratch.view(codes.dtype))
    fresh = dataclasses.replace(source, weight=weight)
    DOTS.direct(contract, (a, scale), fresh, None, None)  # compiles
    for _ in range(20):
        for held, want in zip((codes, other), wants, strict=True):
            torch.add(held.view(torch.uint8), 0, out=scratch)  # a kernel, not a copy
            out = torch.full_like(want, float("nan"))
            assert DOTS.direct(contract, (a, scale), fresh, None, out) is out
            assert not difference(out, want)


@chosen
def test_a_chain_in_one_graph(chosen):
    """Activations that the kernel in front writes are waited for, whatever was fetched early."""
    contract, plan = chosen.contract, only(DOTS.name)
    a, scale, source = made(chosen, 4, True, "cuda")
    tensors, raw = packed(plan, contract, source), a.view(torch.uint8)
    held = torch.zeros_like(raw)
    call(held.view(a.dtype), scale, tensors, contract, plan)
    torch.cuda.synchronize()
    graph, outs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for flipped in (False, True, False):
            torch.add(raw.flip(0) if flipped else raw, 0, out=held)
            outs.append(call(held.view(a.dtype), scale, tensors, contract, plan))
    for _ in range(10):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out, x in zip(outs, (a, raw.flip(0).view(a.dtype), a), strict=True):
            assert not difference(out, reference(contract, x, scale, source))
