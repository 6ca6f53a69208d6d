"""Products of experts' codes on a GPU: bitwise on exact data, to the oracle, captured, replayed."""

import pytest
import torch
from experts import E, Experts, H
from models import Random
from products import poisoned
from scaled_products import on, only

import qinductor
from qinductor.contracts import difference
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Operands, ScaledMatmul, reference
from qinductor.kernels.scaled_matmul_cases import (
    BF16,
    EXPERTS,
    FP8,
    FP16,
    FP32,
    INT8,
    Case,
    activation,
    case,
    wide,
)
from qinductor.kernels.scaled_matmul_triton_tiles import of_groups
from qinductor.op import Plan, single
from qinductor.testing import product_oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")
qinductor.load()
ops = torch.ops.qinductor
TRITON = "triton.scaled_mma"
LARGE = (
    case(FP8, 1, 1024, 2048, 1024, 2048, group=0, experts=8),
    case(FP8, 1, 1040, 2048, 1, 2048, experts=8),
    case(FP8, 1, 1024, 2048, 1, 2048, fast=True, experts=8),
    case(FP8, 1, 1152, 2048, 128, 128, group=128, experts=8),
    case(FP8, 1, 1024, 2048, 32, 32, group=32, experts=8),
    case(FP8, 1, 1000, 2080, 1, 32, group=32, out=FP16, experts=8),
    case("int8", 1, 1024, 2048, 1, 2048, INT8, experts=8),
    case("int8", 1, 1024, 2048, 1, 128, INT8, group=128, out=FP32, experts=8),
    case("int4", 1, 1024, 2048, 1, 128, group=0, experts=8),
    case("int4", 1, 1096, 2048, 1, 128, group=128, weight_scale=BF16, experts=8),
    case("int4", 1, 1024, 2048, 1, 32, INT8, experts=8),
)
SIZES = (
    (1, 0, 3, 2, 0, 7, 1, 1),
    (0, 0, 300, 0, 0, 0, 0, 0),
    (40, 3, 64, 17, 0, 130, 1, 9),
    (0, 0, 0, 0, 0, 0, 0, 0),
)
chosen_large = pytest.mark.parametrize("chosen", LARGE, ids=lambda chosen: chosen.name)
means = pytest.mark.parametrize("mean", [1, 20, 40, 300])


def prepared(
    chosen: Case, plan: Plan, exact: bool = False
) -> tuple[list[Operands], list[torch.Tensor], tuple[str, str]]:
    """(operands of each expert, packed tensors, texts)."""
    contract = chosen.contract
    made = [chosen.make(expert, exact)[2] for expert in range(contract.experts)]
    sources = [on(source, "cuda") for source in made]
    packed = plan.pack(SCALED_MATMUL, contract, sources)
    tensors = [packed[name] for name in plan.operands(SCALED_MATMUL, contract)]
    return sources, tensors, (str(contract), str(plan))


def rows(
    contract: ScaledMatmul, count: int, exact: bool = False, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    a, scale = activation(contract, count, seed, exact)
    return a.cuda(), scale.cuda()


def judge(
    chosen: Case, sources: list[Operands], out: torch.Tensor, a: torch.Tensor, scale: torch.Tensor,
    sizes: tuple[int, ...], exact: bool,
) -> None:  # fmt: skip
    """Every expert's rows bit for bit, or to the oracle; zeros behind the last."""
    one, start = single(chosen.contract)[0], 0
    for source, size in zip(sources, sizes, strict=True):
        own = slice(start, start + size)
        s = scale[own] if one.group else scale
        if exact:
            assert not difference(out[own], reference(one, a[own], s, source))
        elif size * one.weight.n >= 1 << 14:
            x, y = wide(one, a[own], s, source)
            eager = (x.float() @ y.float().T).to(one.out)
            product_oracle(out[own], eager, x, y)
        start += size
    assert not out[start:].any()


@chosen_large
@means
def test_bitwise_on_exact_data(chosen, mean):
    configs = of_groups(chosen.contract, mean)
    for config in configs if chosen is LARGE[3] else configs[:1]:
        plan = only(f"{TRITON}@{config}")
        sources, tensors, texts = prepared(chosen, plan, exact=True)
        for sizes, past in zip(SIZES, (0, 5, 20, 3), strict=True):
            a, scale = rows(chosen.contract, sum(sizes) + past, exact=True)
            ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
            with poisoned():
                out = ops.scaled_grouped_matmul(a, scale, ends, tensors, *texts)
            judge(chosen, sources, out, a, scale, sizes, exact=True)


@pytest.mark.parametrize("chosen", EXPERTS, ids=lambda chosen: chosen.name)
def test_cases_bitwise_on_exact_data(chosen):
    target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    plan = SCALED_MATMUL.plan(chosen.contract, target, None)
    assert all(hasattr(provider, "grouped") for provider in plan.providers(SCALED_MATMUL))
    sources, tensors, texts = prepared(chosen, plan, exact=True)
    for given in SIZES:
        sizes = given[: len(sources)]
        a, scale = rows(chosen.contract, sum(sizes) + 2, exact=True)
        ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
        with poisoned():
            out = ops.scaled_grouped_matmul(a, scale, ends, tensors, *texts)
        judge(chosen, sources, out, a, scale, sizes, exact=True)


@chosen_large
@pytest.mark.parametrize("mean", [20, 300])
def test_to_the_oracle(chosen, mean):
    plan = only(f"{TRITON}@{of_groups(chosen.contract, mean)[0]}")
    sources, tensors, texts = prepared(chosen, plan)
    sizes = (130, 0, 64, 20, 17, 300, 0, 33)
    a, scale = rows(chosen.contract, sum(sizes))
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    out = ops.scaled_grouped_matmul(a, scale, ends, tensors, *texts)
    judge(chosen, sources, out, a, scale, sizes, exact=False)


@chosen_large
@means
def test_captured_and_replayed_with_other_offsets(chosen, mean):
    plan = only(f"{TRITON}@{of_groups(chosen.contract, mean)[0]}")
    sources, tensors, texts = prepared(chosen, plan, exact=True)
    count = 310
    a, scale = rows(chosen.contract, count, exact=True)
    ends = torch.zeros(len(sources), dtype=torch.int32, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.scaled_grouped_matmul(a, scale, ends, tensors, *texts)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = ops.scaled_grouped_matmul(a, scale, ends, tensors, *texts)
    for i, sizes in enumerate(SIZES):
        x, s = rows(chosen.contract, count, exact=True, seed=i)
        a.copy_(x)
        scale.copy_(s)
        ends.copy_(torch.tensor(sizes, device="cuda").cumsum(0))
        out.fill_(float("nan"))
        graph.replay()
        judge(chosen, sources, out, a, scale, sizes, exact=True)


@chosen_large
def test_bmm(chosen):
    contract = chosen.contract
    plan = only(f"{TRITON}@{of_groups(contract, 5)[0]}")
    sources, tensors, texts = prepared(chosen, plan, exact=True)
    e = len(sources)
    a, scale = rows(contract, 5 * e, exact=True)
    held = scale.view(e, 5, -1) if contract.group else scale
    out = ops.scaled_bmm(a.view(e, 5, -1), held, tensors, *texts)
    judge(chosen, sources, out.flatten(0, 1), a, scale, (5,) * e, exact=True)


@pytest.mark.parametrize("ends", [[2, 9], [5, 2], [-1, 3], [0, 0], [9, 9]])
def test_offsets_that_are_wrong_leave_no_memory_unwritten(ends):
    chosen = case(FP8, 1, 256, 512, 128, 128, group=128, experts=2)
    plan = only(f"{TRITON}@{of_groups(chosen.contract, 1)[0]}")
    _, tensors, texts = prepared(chosen, plan)
    a, scale = rows(chosen.contract, 6)
    with poisoned():
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        out = ops.scaled_grouped_matmul(a, scale, offsets, tensors, *texts)
    assert out.isfinite().all()


def test_no_rows():
    chosen = LARGE[0]
    plan = only(f"{TRITON}@{of_groups(chosen.contract, 1)[0]}")
    _, tensors, texts = prepared(chosen, plan)
    a, scale = rows(chosen.contract, 0)
    ends = torch.zeros(8, dtype=torch.int32, device="cuda")
    assert ops.scaled_grouped_matmul(a, scale, ends, tensors, *texts).shape == (0, 1024)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="eager's own grouped product needs compute capability 9.0",
)
def test_a_block_of_experts_compiled_and_captured():
    """Both products, and the quantisers between them; other offsets and rows under replay."""
    model = Experts().cuda()
    options = {"inductor": {"emulate_precision_casts": True}}
    run = torch.compile(model, backend="qinductor", options=options)
    x, ends = Random(1).normal(96, H).cuda(), torch.zeros(E, dtype=torch.int32, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run(x, ends)
        torch.cuda.current_stream().wait_stream(stream)
        sites = qinductor.last_report().sites
        lowered = [site for site in sites if site.lowered and site.pattern == "scaled_matmul"]
        assert len(lowered) == 2, sites
        with torch.cuda.graph(graph):
            out = run(x, ends)
        for seed, sizes in enumerate(((32, 32, 32), (96, 0, 0), (1, 0, 95), (5, 90, 1))):
            x.copy_(Random(seed).normal(96, H))
            ends.copy_(torch.tensor(sizes).cumsum(0))
            out.fill_(float("nan"))
            graph.replay()
            eager = model(x, ends).float()
            # A last bit of the first product moves codes of the second by up to a sixteenth.
            assert (out.float() - eager).norm() < 0.04 * eager.norm()
