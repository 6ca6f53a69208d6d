"""qinductor::dequant_bmm, dequant_gathered_bmm, dequant_grouped_matmul: experts' rows and weights.

The contract is a `DequantMatmul` of E experts: its weight is the format of each, [N, K]. What a
provider packs for one weight is stacked, [E, ...], and every expert runs on the provider that the
plan has for its own number of rows; a provider may also take all of them at once, `batched` and
`grouped` (for the mean number of rows). Biases and product scales are per expert, [E, N].

| tensor                    | shape                | dtype                                      |
|---------------------------|----------------------|--------------------------------------------|
| dequant_bmm: x, result    | [E, M, K], [E, M, N] | as the contract says; contiguous           |
| dequant_gathered_bmm: x   | [B, M, K]            | as the contract says                       |
| ids                       | [B]                  | int32, int64: whose weight, -E <= id < E   |
| result                    | [B, M, N]            | as the contract says; contiguous           |
| dequant_grouped_matmul: x | [T, K]               | as the contract says; sorted by expert     |
| offsets                   | [E], ascending       | int32: where the rows of each expert end   |
| result                    | [T, N], contiguous   | as the contract says; rows past the last   |
|                           |                      | offset are 0 (undefined in aten's)         |
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from qinductor.contracts import parse
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, NVFP4, DequantMatmul, case
from qinductor.kernels.sgl_moe_rows import grouped_by, rows_of
from qinductor.op import LIBRARY, Plan, Route, single

for schema in (
    "dequant_bmm(Tensor x, Tensor[] packed, str contract, str plan) -> Tensor",
    "dequant_gathered_bmm(Tensor x, Tensor ids, Tensor[] packed, str contract, str plan) -> Tensor",
    "dequant_grouped_matmul(Tensor x, Tensor offsets, Tensor[] packed, str contract, str plan) "
    "-> Tensor",
):
    LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))


@torch.library.impl(LIBRARY, "dequant_bmm", "CompositeExplicitAutograd")
def dequant_bmm(
    x: torch.Tensor, packed: Sequence[torch.Tensor], contract: str, plan: str
) -> torch.Tensor:
    """x[E, M, K] times each expert's weight: [E, M, N]."""
    form, one, routes = _prepared(contract, plan)
    out = x.new_empty((form.experts, x.shape[1], form.weight.n), dtype=form.out)
    if not x.shape[1]:
        return out
    route = _route(routes, x.shape[1])
    if (batched := getattr(route.provider, "batched", None)) is not None:
        stacked: torch.Tensor = batched(one, x, [packed[i] for i in route.take], route.config)
        return stacked
    for expert in range(form.experts):
        out[expert] = route.run(one, x[expert], [packed[i][expert] for i in route.take])
    return out


@torch.library.impl(LIBRARY, "dequant_gathered_bmm", "CompositeExplicitAutograd")
def dequant_gathered_bmm(
    x: torch.Tensor, ids: torch.Tensor, packed: Sequence[torch.Tensor], contract: str, plan: str
) -> torch.Tensor:
    """x[B, M, K] times the weight of each batch's expert: [B, M, N].

    Only experts that are chosen are read. Errors: IndexError for an id out of range, on a CPU."""
    form, _, _ = _prepared(contract, plan)
    batches, m, k = x.shape
    if not batches * m:
        return x.new_empty((batches, m, form.weight.n), dtype=form.out)
    if x.is_cpu and not -form.experts <= int(ids.min()) <= int(ids.max()) < form.experts:
        raise IndexError(f"ids must be from {-form.experts} to {form.experts - 1}; got {ids}")
    ids = ids.remainder(form.experts).to(torch.int32)
    ends, entries, slots = grouped_by(ids if m == 1 else ids.repeat_interleave(m), form.experts)
    rows = rows_of(x.reshape(-1, k).contiguous(), entries)
    rows = dequant_grouped_matmul(rows, ends, packed, contract, plan)
    return rows_of(rows, slots).view(batches, m, form.weight.n)


@torch.library.impl(LIBRARY, "dequant_grouped_matmul", "CompositeExplicitAutograd")
def dequant_grouped_matmul(
    x: torch.Tensor,
    offsets: torch.Tensor,
    packed: Sequence[torch.Tensor],
    contract: str,
    plan: str,
) -> torch.Tensor:
    """x[T, K], sorted by expert, times the weight of each row's expert: [T, N]."""
    form, one, routes = _prepared(contract, plan)
    if not x.shape[0]:
        return x.new_empty((0, form.weight.n), dtype=form.out)
    offsets = offsets.contiguous()
    # Where the rows of each expert end is known on the device alone: a provider that reads it there
    # waits for nothing, and can be captured in a CUDA graph.
    on_device = [route for route in routes if hasattr(route.provider, "grouped")]
    if on_device:
        mean = -(-x.shape[0] // form.experts)
        route = next((r for r in on_device if mean <= r.limit), on_device[-1])
        provider: Any = route.provider
        operands = [packed[i] for i in route.take]
        sorted_out: torch.Tensor = provider.grouped(one, x, offsets, operands, route.config)
        return sorted_out
    out = x.new_empty((x.shape[0], form.weight.n), dtype=form.out)
    start = last = 0
    for expert, end in enumerate(offsets.tolist()):
        end = max(0, min(end, x.shape[0]))
        if start < end:
            route = _route(routes, end - start)
            operands = [packed[i][expert] for i in route.take]
            out[start:end] = route.run(one, x[start:end], operands)
        start, last = end, max(last, end)
    out[last:] = 0
    return out


@functools.cache
def _prepared(contract: str, plan: str) -> tuple[DequantMatmul, DequantMatmul, tuple[Route, ...]]:
    """The contract, that of one expert, and the plan's routes."""
    form = parse(DequantMatmul, contract)
    return form, single(form)[0], Plan.parse(plan).routes(DEQUANT_MATMUL, form)


def _route(routes: tuple[Route, ...], m: int) -> Route:
    for route in routes:
        if m <= route.limit:
            return route
    raise RuntimeError(f"the plan has no provider for M = {m}")


@torch.library.register_fake("qinductor::dequant_bmm", lib=LIBRARY)
def _(x: torch.Tensor, packed: Sequence[torch.Tensor], contract: str, plan: str) -> torch.Tensor:
    form = parse(DequantMatmul, contract)
    return x.new_empty((form.experts, x.shape[1], form.weight.n), dtype=form.out)


@torch.library.register_fake("qinductor::dequant_gathered_bmm", lib=LIBRARY)
def _(
    x: torch.Tensor, ids: torch.Tensor, packed: Sequence[torch.Tensor], contract: str, plan: str
) -> torch.Tensor:
    form = parse(DequantMatmul, contract)
    return x.new_empty((x.shape[0], x.shape[1], form.weight.n), dtype=form.out)


@torch.library.register_fake("qinductor::dequant_grouped_matmul", lib=LIBRARY)
def _(
    x: torch.Tensor,
    offsets: torch.Tensor,
    packed: Sequence[torch.Tensor],
    contract: str,
    plan: str,
) -> torch.Tensor:
    form = parse(DequantMatmul, contract)
    return x.new_empty((x.shape[0], form.weight.n), dtype=form.out)


CASES = (
    case("int4", 3, 64, 256, 1, 64, experts=4),
    case("int8", 20, 48, 64, 1, 64, torch.float32, experts=3, bias=True),
    case("int8", 2, 32, 64, 1, 64, arithmetic="q", output_scale=True, bias=True, experts=2),
    case("float8_e4m3fn", 5, 64, 128, 64, 128, experts=1),
    case("int3", 4, 20, 96, 1, 32, experts=2),
    case("float4_e2m1fn", 2, 32, 64, 1, 16, arithmetic="q*s*t", experts=3, **NVFP4),
    case(
        "uint4", 6, 32, 64, 1, 32, arithmetic="(q-z)*s", zero=torch.int8, permuted=True, experts=2
    ),
)
