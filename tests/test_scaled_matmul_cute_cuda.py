"""cute.scaled_mma on a Hopper GPU: bitwise on exact data, to the oracle, captured, replayed."""

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
    case,
)
from qinductor.kernels.scaled_matmul_cute import heuristic
from qinductor.kernels.scaled_matmul_cute_form import Config, form_of

qinductor.load()
CUTE = SCALED_MATMUL.providers["cute.scaled_mma"]


def lacking() -> str | None:
    """What this machine lacks."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a GPU of sm_90 to run"
    return CUTE.missing()


pytestmark = [
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
    pytest.mark.filterwarnings("error:qinductor. cute.scaled_mma"),  # another provider would run
]
TAKEN = [chosen for chosen in CASES if CUTE.why_not(chosen.contract) is None]
LARGE = (
    case(FP8, 1, 1024, 4096, 1024, 4096, group=0, fast=True),
    case(FP8, 1, 1040, 4112, 1, 4112, bias=BF16),
    case(FP8, 1, 1000, 4096, 1, 4096, fast=True, out=FP16, bias=FP32),
    case(FP8, 1, 1024, 4096, 1, 4096, E5M2),
    case(FP8, 1, 1096, 4096, 128, 128, group=128),
    case(FP8, 1, 1096, 2128, 128, 128, group=128, out=FP16, bias=FP16),
    case(FP8, 1, 1000, 2080, 32, 32, group=32),
    case(FP8, 1, 1032, 2880, 32, 32, group=32, scale=E8M0, weight_scale=E8M0),
    case(FP8, 1, 576, 1024, 128, 128, group=64),
    case("int8", 1, 1048, 4096, 1, 4096, INT8, out=FP16, bias=FP16),
    case("int8", 1, 1024, 2064, 1, 2064, INT8, group=0, out=FP32),
    case("int8", 1, 1024, 4096, 128, 128, INT8, group=128, out=FP32),
)
M = (1, 7, 17, 64, 100, 300, 700)
# N x K of models, each width on either side; blocks of 32 as upstream tests them, and with a last
# group of 16 columns.
WIDTHS = (
    (2560, 7168), (3584, 288), (5120, 576), (6144, 2560), (7168, 3584), (576, 5120), (288, 6144),
)  # fmt: skip
FEW = ((8, 32), (40, 96), (72, 160), (96, 224), (32, 2048), (1000, 2064), (64, 48))
KINDS = {
    "rows": lambda n, k: case(FP8, 1, n, k, 1, k, fast=True),
    "blocks of 128": lambda n, k: case(FP8, 1, n, k, 128, 128, group=128),
    "blocks of 32": lambda n, k: case(FP8, 1, n, k, 32, 32, group=32),
    "int8": lambda n, k: case("int8", 1, n, k, 1, k, INT8, bias=BF16),
}
AT_WIDTHS = [(kind, n, k) for kind in KINDS for n, k in WIDTHS]
AT_WIDTHS += [("blocks of 32", n, k) for n, k in FEW]
# Beside a contract's own: clusters, parts of K, programs that share a multiprocessor.
CONFIGS = (
    "p64.q8.t4.c1.s8.b1.swap",
    "p128.q32.t4.c1.s2.b1.swap",
    "p64.q64.t4.c1.s4.b1.swap",
    "p64.q16.t3.c2.s1.b2.swap",
    "p128.q128.t3.c1.s2.b1",
    "p128.q64.t4.c4.s1.b1",
    "p64.q128.t3.c2.s1.b1",
)
chosen = pytest.mark.parametrize("chosen", LARGE, ids=lambda chosen: chosen.name)


def routes(contract) -> list[str]:
    """Our provider in its own configs, and in some for every contract."""
    own = [str(heuristic(contract, m)) for m in M]
    form = form_of(contract)
    some = [text for text in CONFIGS if Config.parse(text).takes(form)]
    return [f"{CUTE.name}@{config}" for config in dict.fromkeys([*own, *some])]


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


@pytest.mark.parametrize(("kind", "n", "k"), AT_WIDTHS)
def test_widths_of_models(kind, n, k):
    """By the provider's own choices."""
    chosen, plan = KINDS[kind](n, k), only(CUTE.name)
    contract, (a, scale, source) = chosen.contract, made(chosen, 130, True, "cuda")
    tensors = packed(plan, contract, source)
    want = reference(contract, a, scale, source)
    for m in (1, 5, 17, 100, 130):
        with poisoned():
            out = call(a[:m], scale[:m], tensors, contract, plan)
        assert not difference(out, want[:m]), m


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
    contract, (a, scale, source) = chosen.contract, made(chosen, 300, False, "cuda")
    for route in routes(contract):
        plan = only(route)
        tensors = packed(plan, contract, source)
        first = call(a, scale, tensors, contract, plan)
        for _ in range(20):
            assert not difference(call(a, scale, tensors, contract, plan), first), route
        for m in (1, 17, 130):
            rows = scale[:m] if contract.group else scale
            part = call(a[:m], rows, tensors, contract, plan)
            assert not difference(part, first[:m]), (route, m)


@chosen
def test_captured_and_replayed_with_other_inputs(chosen):
    contract = chosen.contract
    for route in routes(contract):
        plan = only(route)
        for m in (1, 17, 300):
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
