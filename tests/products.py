"""What tests of products share: plans of one route, inputs, the oracle, capture in a graph."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from qinductor.contracts import dequantize, difference
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, DequantMatmul, Operands
from qinductor.op import INFINITE, Plan, split
from qinductor.testing import OUTPUTS, product_oracle


def only(route: str) -> Plan:
    """A plan in which one provider, in one config, runs every M."""
    return Plan(((INFINITE, route),))


def direct(
    route: str, contract: DequantMatmul, x: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """What a provider gives, called without the dispatcher."""
    name, config = split(route)
    more = {} if config is None else {"config": config}
    return DEQUANT_MATMUL.providers[name].run(contract, x, tensors, **more)


def packed(plan: Plan, contract: DequantMatmul, source: Any) -> list[torch.Tensor]:
    """The packed tensors, in the operator's order."""
    found = plan.pack(DEQUANT_MATMUL, contract, source)
    return [found[name] for name in plan.operands(DEQUANT_MATMUL, contract)]


def call(
    x: torch.Tensor, tensors: Sequence[torch.Tensor], contract: DequantMatmul, plan: Plan
) -> torch.Tensor:
    """The operator as a compiled graph calls it."""
    return torch.ops.qinductor.dequant_matmul(x, tensors, str(contract), str(plan))


def activations(contract: DequantMatmul, m: int, device: str = "cpu") -> list[torch.Tensor]:
    """As many x of m rows as an error must be measured over."""
    g = torch.Generator().manual_seed(m)
    count = -(-OUTPUTS // (m * contract.weight.n))
    return [
        torch.randn(m, contract.weight.k, generator=g).to(contract.x).to(device)
        for _ in range(count)
    ]


def hold(
    contract: DequantMatmul, ours: list[torch.Tensor], xs: list[torch.Tensor], source: Operands
) -> None:
    """Our products to the oracle, against the graph's own operations run by eager."""
    weight = source.weight
    w = dequantize(weight)
    eager = [linear(x, w, source.bias) for x in xs]
    if source.output_scale is not None:
        eager = [out * source.output_scale for out in eager]
    product_oracle(
        torch.cat(ours), torch.cat(eager), torch.cat(xs), w, source.bias, source.output_scale
    )


def check(out: torch.Tensor, contract: DequantMatmul, m: int) -> None:
    assert out.shape == (m, contract.weight.n) and out.dtype == contract.out
    assert out.is_contiguous()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def on(source: Operands, device: str) -> Operands:
    """The operands on another device."""

    def moved(value: Any) -> Any:
        held = {n: t.to(device) for n, t in vars(value).items() if isinstance(t, torch.Tensor)}
        return dataclasses.replace(value, **held)

    return dataclasses.replace(moved(source), weight=moved(source.weight))


def replays(
    contract: DequantMatmul, plan: Plan, tensors: list[torch.Tensor], x: torch.Tensor
) -> None:
    """Captured once, replayed with other inputs into poisoned memory."""
    held, graph = x.clone(), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(held, tensors, contract, plan)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = call(held, tensors, contract, plan)
    for factor in (1, -2, 0.5):
        held.copy_(x * factor)
        out.fill_(float("nan"))
        graph.replay()
        assert not difference(out, call(x * factor, tensors, contract, plan))
