"""qinductor::scaled_grouped_matmul, scaled_bmm: codes of experts' rows times their weights' codes.

The contract is a `ScaledMatmul` of E experts: its weight is the format of each, [N, K]. What a
provider packs for one weight is stacked, [E, ...]. A provider that has `batched` and `grouped`
takes all experts at once and reads on the device where their rows end (its config is that of their
mean number); with any other each expert runs on what the plan has for its own number of rows.

| tensor                   | shape                                 | dtype                         |
|--------------------------|---------------------------------------|-------------------------------|
| scaled_grouped_matmul: a | [T, K], sorted by expert              | as the contract says          |
| scale                    | [T, K / group], any strides; or [1]   | as the contract says          |
| offsets                  | [E], ascending                        | int32: where each expert ends |
| result                   | [T, N], contiguous                    | as the contract says; rows    |
|                          |                                       | past the last offset are 0    |
| scaled_bmm: a            | [E, M, K]                             | as the contract says          |
| scale                    | [E, M, K / group], or [1]             | as the contract says          |
| result                   | [E, M, N], contiguous                 | as the contract says          |
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from qinductor.contracts import parse
from qinductor.kernels import fallback
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, ScaledMatmul
from qinductor.op import LIBRARY, Plan, Route, single

_TAIL = "Tensor[] packed, str contract, str plan) -> Tensor"
for schema in (
    f"scaled_grouped_matmul(Tensor a, Tensor scale, Tensor offsets, {_TAIL}",
    f"scaled_bmm(Tensor a, Tensor scale, {_TAIL}",
):
    LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))


@torch.library.impl(LIBRARY, "scaled_grouped_matmul", "CompositeExplicitAutograd")
def scaled_grouped_matmul(
    a: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    packed: Sequence[torch.Tensor],
    contract: str,
    plan: str,
) -> torch.Tensor:
    """a[T, K], sorted by expert, times the weight of each row's expert: [T, N]."""
    form, one, routes = _prepared(contract, plan)
    if not a.shape[0]:
        return a.new_empty((0, form.weight.n), dtype=form.out)
    offsets = offsets.contiguous()
    # Else the offsets would be waited for, and a CUDA graph could not be captured.
    on_device = [route for route in routes if hasattr(route.provider, "grouped")]
    if on_device:
        mean = -(-a.shape[0] // form.experts)
        route = next((r for r in on_device if mean <= r.limit), on_device[-1])
        provider: Any = route.provider
        operands = [packed[i] for i in route.take]
        call = functools.partial(provider.grouped, one, (a, scale), offsets, operands, route.config)
        found: torch.Tensor | None = fallback.tried(SCALED_MATMUL, provider, form, call)
        if found is not None:
            return found
    out = a.new_empty((a.shape[0], form.weight.n), dtype=form.out)
    start = last = 0
    for expert, end in enumerate(offsets.tolist()):
        end = max(0, min(end, a.shape[0]))
        if start < end:
            route = _route(routes, end - start)
            s = scale[start:end] if form.group else scale
            operands = [packed[i][expert] for i in route.take]
            given = a[start:end], s
            out[start:end] = fallback.run(SCALED_MATMUL, route, one, given, operands)
        start, last = end, max(last, end)
    out[last:] = 0
    return out


@torch.library.impl(LIBRARY, "scaled_bmm", "CompositeExplicitAutograd")
def scaled_bmm(
    a: torch.Tensor,
    scale: torch.Tensor,
    packed: Sequence[torch.Tensor],
    contract: str,
    plan: str,
) -> torch.Tensor:
    """a[E, M, K] times each expert's weight: [E, M, N]."""
    form, one, routes = _prepared(contract, plan)
    experts, m, _ = a.shape
    out = a.new_empty((experts, m, form.weight.n), dtype=form.out)
    if not m:
        return out
    route = _route(routes, m)
    if (batched := getattr(route.provider, "batched", None)) is not None:
        operands = [packed[i] for i in route.take]
        call = functools.partial(batched, one, (a, scale), operands, route.config)
        found: torch.Tensor | None = fallback.tried(SCALED_MATMUL, route.provider, form, call)
        if found is not None:
            return found
    for expert in range(experts):
        s = scale[expert] if form.group else scale
        operands = [packed[i][expert] for i in route.take]
        out[expert] = fallback.run(SCALED_MATMUL, route, one, (a[expert], s), operands)
    return out


@functools.cache
def _prepared(contract: str, plan: str) -> tuple[ScaledMatmul, ScaledMatmul, tuple[Route, ...]]:
    """The contract, that of one expert, and the plan's routes."""
    form = parse(ScaledMatmul, contract)
    if not form.experts or form.zero is not None:
        raise ValueError(f"it takes experts, without zero points of a; got {form.summary}")
    return form, single(form)[0], Plan.parse(plan).routes(SCALED_MATMUL, form)


def _route(routes: tuple[Route, ...], m: int) -> Route:
    for route in routes:
        if m <= route.limit:
            return route
    raise RuntimeError(f"the plan has no provider for M = {m}")


@torch.library.register_fake("qinductor::scaled_grouped_matmul", lib=LIBRARY)
def _(
    a: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    packed: Sequence[torch.Tensor],
    contract: str,
    plan: str,
) -> torch.Tensor:
    form = parse(ScaledMatmul, contract)
    return a.new_empty((a.shape[0], form.weight.n), dtype=form.out)


@torch.library.register_fake("qinductor::scaled_bmm", lib=LIBRARY)
def _(
    a: torch.Tensor, scale: torch.Tensor, packed: Sequence[torch.Tensor], contract: str, plan: str
) -> torch.Tensor:
    form = parse(ScaledMatmul, contract)
    return a.new_empty((form.experts, a.shape[1], form.weight.n), dtype=form.out)
