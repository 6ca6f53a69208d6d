"""A product of codes without a graph: weights as they are, by the dispatcher's plan."""

import functools
import importlib
from collections.abc import Sequence

import torch

from qinductor.contracts import QuantizedWeight
from qinductor.errors import Refused
from qinductor.kernels import fallback
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Operands, ScaledMatmul
from qinductor.op import INFINITE, Plan, Provider, Route


def scaled_product(
    contract: ScaledMatmul,
    a: torch.Tensor,
    scale: torch.Tensor,
    codes: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a[M, K] times W^T: [M, N], in `out` if it is given (rows contiguous, any distance apart).

    codes         [N, K] of 8 bits, rows contiguous: read where they are, never packed
    weight_scale  the grid of the contract's blocks, any strides; None if it has none
    What no provider of this device takes, or can run, is computed by the reference. Errors:
    ValueError for codes of fewer bits, and for an activation with zero points."""
    w, m = contract.weight, a.shape[0]
    if contract.zero is not None:
        raise ValueError(f"{contract.summary}: no zero points are taken here")
    if w.bits != 8:
        raise ValueError(f"codes are {w.codes}; wanted 8 bits, others must be packed")
    if m == 0:
        return a.new_empty((0, w.n), dtype=contract.out) if out is None else out
    route = next(route for route in _routes(contract, a.device) if m <= route.limit)
    source = Operands(QuantizedWeight(w, codes, weight_scale), bias)
    inputs = a, scale

    def by(provider: Provider, config: str | None = None) -> torch.Tensor | None:
        call = functools.partial(_product, provider, contract, inputs, source, config, out)
        return fallback.tried(SCALED_MATMUL, provider, contract, call)

    found = by(route.provider, route.config)
    if found is None:
        name, target = route.provider.name, fallback.target_of(a.device)
        others = fallback.others(SCALED_MATMUL, name, contract, target)
        found = next((f for f in map(by, others) if f is not None), None)
    assert found is not None  # the reference is among them, and raises
    return found


def _product(
    provider: Provider,
    contract: ScaledMatmul,
    inputs: Sequence[torch.Tensor],
    source: Operands,
    config: str | None,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """By one provider, of a weight that is read where it is if it can be."""
    direct = getattr(provider, "direct", None)
    if direct is not None:
        return direct(contract, inputs, source, config, out)  # type: ignore[no-any-return]
    packed = provider.pack(contract, source)
    given = [packed[name] for name in provider.operands(contract)]
    more = {} if config is None else {"config": config}
    found: torch.Tensor = provider.run(contract, inputs, given, **more)
    return found if out is None else out.copy_(found)


@functools.lru_cache(4096)
def _routes(contract: ScaledMatmul, device: torch.device) -> tuple[Route, ...]:
    """What runs which M on a device; as it was planned at the first call."""
    target = fallback.target_of(device)
    for provider in ("torch", "triton", "cute"):  # they register when they are imported
        importlib.import_module(f"qinductor.kernels.scaled_matmul_{provider}")
    try:
        plan = SCALED_MATMUL.plan(contract, target, None)
    except Refused:
        plan = Plan(((INFINITE, SCALED_MATMUL.specification.name),))
    return plan.routes(SCALED_MATMUL, contract)
