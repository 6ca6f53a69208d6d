"""What makes y of its inputs: an activation, times the other half or another tensor."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from qinductor.kernels.quantize import ACTIVATIONS, Quantize, Source, value
from qinductor.patterns.activation_formats.identify import battery, plain
from qinductor.patterns.probe import BITS, Function, numbers, same
from qinductor.regions import HALVES

SAMPLE = 4096  # elements that the family is compared on first
ROWS = 256  # of a run


def source_of(region: Function) -> tuple[int, Source | None, bool]:
    """(runs it took, what makes y of the inputs or None, whether the inputs are turned)."""
    limits = [v for v in numbers(region).bounds if v > 0]
    inputs = [node.meta["val"] for node in region.inputs]
    y = region.outputs[0].meta["val"]
    k, dtype = int(y.shape[-1]), inputs[0].dtype
    widths = [int(v.shape[-1]) for v in inputs]
    gates = {(2 * k,): ("halves", "swapped"), (k,): ("",), (k, k): ("two",)}.get(tuple(widths))
    if gates is None or any(v.dtype != dtype for v in inputs):
        return 0, None, False
    rows = region.rows(ROWS)
    gate, up = _gates(rows, k, dtype), _factors(rows, k, dtype, limits)
    turns = (False, True) if gates != ("",) else (False,)
    runs = 0
    for turned, kind in zip(turns, (*gates, *gates), strict=False):
        parts = [gate, up][:: -1 if turned else 1]
        (wanted,) = region([torch.cat(parts, -1)] if len(gates) == 2 else parts[: len(inputs)])
        runs += 1
        source = _member(kind, limits, gate, up, wanted.reshape(rows, k))
        if source is not None:
            return runs, source, turned and kind == "two"
    return runs, None, False


def _member(
    kind: str,
    limits: Sequence[float],
    gate: torch.Tensor,
    up: torch.Tensor,
    wanted: torch.Tensor,
) -> Source | None:
    """The first member whose value is this on all elements."""
    g, u, w = (t.reshape(-1, 1) for t in (gate, up, wanted))
    some = torch.randperm(len(g), generator=torch.Generator().manual_seed(2))[:SAMPLE]
    for source in _family(kind, limits, gate.dtype, wanted.dtype):
        base = dataclasses.replace(plain(1, gate.dtype, torch.int8, 1, gate.dtype), source=source)
        if _equal(base, g[some], u[some], w[some]) and _equal(base, g, u, w):
            return source
    return None


def _family(kind: str, limits: Sequence[float], x: torch.dtype, y: torch.dtype) -> Iterator[Source]:
    inners = dict.fromkeys((x, torch.float32))
    for activation, inner, limit in itertools.product(ACTIVATIONS, inners, (None, *limits)):
        yield Source(y=y, activation=activation, gate=kind, inner=inner, limit=limit)


def _equal(contract: Quantize, gate: torch.Tensor, up: torch.Tensor, wanted: torch.Tensor) -> bool:
    parts = [gate, up] if contract.source.gate != "swapped" else [up, gate]
    kind = contract.source.gate
    inputs = parts if kind == "two" else [torch.cat(parts, -1)] if kind else [gate]
    return bool(same(value(contract, inputs)[0], wanted).all())


def _gates(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Gates [rows, k]: random ones and, of 16 bits, every value in turns, else hostile ones."""
    seeded = torch.Generator().manual_seed(3)
    drawn = (torch.randn((rows, k), generator=seeded) * 4).to(dtype)
    if dtype in HALVES:
        every = torch.randperm(1 << 16, generator=seeded).to(torch.int32).to(BITS[2]).view(dtype)
        every = every.repeat(-(-rows * k // len(every)))[: rows * k].view(rows, k)
        return torch.where(torch.arange(k) % 2 == 0, drawn, every)
    hostile = battery(rows, k, dtype, [1.0, 88.0, 20.0], 4)
    return torch.where(torch.rand((rows, k), generator=seeded) < 0.7, drawn, hostile)


def _factors(rows: int, k: int, dtype: torch.dtype, limits: Sequence[float]) -> torch.Tensor:
    """What gates are multiplied with [rows, k]: random numbers, and hostile ones."""
    seeded = torch.Generator().manual_seed(5)
    drawn = (torch.randn((rows, k), generator=seeded) * 4).to(dtype)
    hostile = battery(rows, k, dtype, [1.0, *limits], 5)
    return torch.where(torch.rand((rows, k), generator=seeded) < 0.5, drawn, hostile)
