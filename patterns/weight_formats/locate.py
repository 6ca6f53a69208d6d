"""Where the entries of a scale or zero lie over W: one parameter's blocks, read off probes.

Base-16 digits of an entry's index (base-8 where the parameter is an exponent) are written into it;
what W moves by says which digit each element took, and so which entry.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.weight_formats.probe import Prober, Reduced
from qinductor.patterns.weight_formats.rows import Demand
from qinductor.regions import FLOAT8, FLOATS, INTEGER, Region, describe


class MoreRows(Exception):
    """The probed rows end before the parameter's first block does."""


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """A scale or zero tensor of the region and how its entries lie over W.

    at        index of its node in `Region.nodes`
    dtype     narrowest dtype that the region converts it to
    shape     of the whole tensor
    bn, bk    block of W that shares an entry
    step, base  the entry of block (i, j) of the first expert, counted in row-major order, is
                base[j] + i * step
    jump      from an entry to that of the same block of the next expert
    sign      -1 where the region adds what the format subtracts
    how       what a scale does: "*" or "/" of W, or "^": W is multiplied by 2 to its power; "+" of
              a zero
    order     position -> column of W, where blocks are of permuted columns; else None
    """

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    bn: int
    bk: int
    step: int
    base: torch.Tensor
    jump: int
    sign: int = 1
    how: str = "*"
    order: torch.Tensor | None = None

    def narrowed(self, value: torch.Tensor) -> torch.Tensor:
        """The parameter's values in `dtype`; in int16 where that holds wider integers."""
        if self.how == "^":
            value = torch.exp2(value.double())
        value = value.to(self.dtype)
        if self.dtype not in (torch.int32, torch.int64):
            return value
        narrow = value.to(torch.int16)
        return narrow if torch.equal(narrow.to(self.dtype), value) else value

    def gather(self, value: torch.Tensor, n: int, expert: int) -> torch.Tensor:
        """The grid [ceil(n / bn), ceil(k / bk)] of an expert's entries, of `narrowed` values."""
        at = self.base + torch.arange(-(-n // self.bn))[:, None] * self.step + expert * self.jump
        entries = value.reshape(-1)[at.to(value.device)]
        if self.sign != 1 and entries.dtype.itemsize == 1:  # -z of uint8 would wrap
            entries = entries.to(torch.bfloat16 if entries.is_floating_point() else torch.int16)
        return entries * self.sign if self.sign != 1 else entries


def carriers_of(levels: Sequence[torch.Tensor]) -> list[int]:
    """The fewest fills such that no element of W is 0 for all of them."""
    for size in range(1, len(levels) + 1):
        for chosen in itertools.combinations(range(len(levels)), size):
            if torch.stack([levels[i] != 0 for i in chosen]).any(0).all():
                return list(chosen)
    raise Refused("an element of W is 0 for all codes that were tried")


def factor(
    probe: Prober, carriers: Sequence[int], levels: Sequence[torch.Tensor], how: str
) -> Callable[[Mapping[Node, torch.Tensor]], torch.Tensor]:
    """Given values of a scale -> the digit that each element was scaled by."""

    def digit(given: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        found = torch.zeros_like(levels[0])
        for i in reversed(carriers):
            value = probe(probe.fills[i], given)
            ratio = levels[i] / value if how == "/" else value / levels[i]
            found = torch.where(levels[i] != 0, ratio, found)
        return found.log2() if how == "^" else found - 1

    return digit


def located(
    reduced: Reduced,
    probe: Prober,
    node: Node,
    digit: Callable[[Mapping[Node, torch.Tensor]], torch.Tensor],
    how: str,
) -> Parameter:
    """Which entry of a parameter each element uses, read digit by digit."""
    bits = 3 if how == "^" else 4  # 2 to the 15th overflows fp16
    offset, base = int(how in "*/"), 1 << bits
    held, region = probe.values[node], reduced.region
    flat = torch.arange(held.numel()).view(held.shape)
    index = torch.zeros(probe.rows, region.shape[1], dtype=torch.int64)
    for place in range(max(1, math.ceil(math.log(held.numel(), base)))):
        fill = ((flat >> bits * place & base - 1) + offset).to(held.dtype)
        read = digit({node: fill}).round()
        wrong = ~((read >= 0) & (read < base))
        index += torch.where(wrong, held.numel(), read).long() << bits * place
    if (index >= held.numel()).any():
        raise Refused(f"the entries of {describe(node)} cannot be told apart in W")
    shape = tuple(int(size) for size in node.meta["val"].shape)
    if math.prod(shape) >= math.prod(region.shape):
        index = _first_equal(reduced, probe, node, index)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    at = torch.zeros_like(index)
    for axis, stride in enumerate(strides):  # from the taken part to the whole tensor
        inner = math.prod(held.shape[axis + 1 :])
        at += index // inner % held.shape[axis] * stride
    demand = probe.function.demand.get(node)
    try:
        bn, bk, step, jump, order = _blocks(at, describe(node), math.prod(shape), region, demand)
    except Refused:
        if (digit({node: probe.like(node, base - 1 + offset)}).round() != base - 1).any():
            raise Refused(f"W must be in proportion to {describe(node)}; it is not") from None
        raise
    dtypes = [d for d in reduced.chains[node] if d.is_floating_point] or [held.dtype]
    narrowest = held.dtype if held.dtype in INTEGER else min(dtypes, key=lambda d: d.itemsize)
    if how == "^":
        narrowest = torch.bfloat16 if region.dtype is torch.bfloat16 else torch.float32
    entries = (at[0] if order is None else at[0, order])[::bk]
    where = region.nodes.index(node)
    return Parameter(where, narrowest, shape, bn, bk, step, entries, jump, how=how, order=order)


def is_broadcast(reduced: Reduced, probe: Prober, node: Node) -> bool:
    """Whether a parameter as large as W was computed from a smaller one, broadcast before that."""
    values = _recomputed(reduced, probe, node)
    table = torch.stack([value.reshape(len(value), -1) for value in values])
    distinct = len(_firsts(table, 1).unique()) * len(_firsts(table, 2).unique())
    return 2 * distinct <= values[0].numel()


def _first_equal(reduced: Reduced, probe: Prober, node: Node, index: torch.Tensor) -> torch.Tensor:
    """Entries [n, k] of a parameter as large as W, each replaced by the first that is equal to it
    whatever the tensors behind them hold: rows and columns that are equal use the same entries."""
    values = [value.flatten() for value in _recomputed(reduced, probe, node)]
    table = torch.stack([value[index] for value in values])
    return index[_firsts(table, 1)][:, _firsts(table, 2)]


def _firsts(table: torch.Tensor, axis: int) -> torch.Tensor:
    """For each part along an axis, the first part that equals it."""
    parts = table.movedim(axis, 0).reshape(table.shape[axis], -1)
    found, inverse = parts.unique(dim=0, return_inverse=True)
    places = torch.arange(len(inverse))
    first = places.new_full((len(found),), len(inverse))
    return first.scatter_reduce_(0, inverse, places, "amin")[inverse]


def _recomputed(reduced: Reduced, probe: Prober, node: Node) -> list[torch.Tensor]:
    """The probed part of a parameter for random values of the tensors behind it; indices and what
    is shifted by keep theirs."""
    seeded = torch.Generator().manual_seed(1)

    def random(leaf: torch.Tensor) -> torch.Tensor:
        value = torch.rand(leaf.shape, generator=seeded) * (120 if leaf.dtype in INTEGER else 8)
        return (value + 0.5).to(leaf.device).to(leaf.dtype)

    free, amounts = [], reduced.amounts()
    for at, leaf in reduced.leaves.items():
        if leaf.dtype in (*FLOATS, *FLOAT8, *INTEGER) and at not in amounts:
            with contextlib.suppress(RuntimeError, IndexError):
                reduced.computed([node], {at: random(leaf)})
                free.append(at)
    values = []
    for _ in range(3):
        (value,) = reduced.computed([node], {at: random(reduced.leaves[at]) for at in free})
        values.append(probe.function.take(node, value).double().cpu())
    return values


def _blocks(
    at: torch.Tensor, name: str, entries: int, region: Region, demand: Demand
) -> tuple[int, int, int, int, torch.Tensor | None]:
    """(bn, bk, step, jump, order) of the entries at[rows, k], which are whole experts."""
    n, k = region.shape[0] // region.experts, region.shape[1]
    order, bk = None, _even(at[0])
    if not bk:
        order = at[0].argsort(stable=True)
        at = at[:, order]
        bk = _even(at[0])
    if not bk or (at != at[:, torch.arange(k) // bk * bk]).any():
        raise Refused(
            f"the entries of {name} must serve equally many columns each; "
            f"{len(at[0].unique())} of them are spread over {k} columns"
        )
    along_n = (at[:n, 0] != at[0, 0]).nonzero()
    if not len(along_n) and len(at) < n and demand is not None:
        raise MoreRows
    bn = int(along_n[0]) if len(along_n) else n
    step = int(at[bn, 0] - at[0, 0]) if len(along_n) else 0
    jump = int(at[n, 0] - at[0, 0]) if len(at) > n else 0
    rows = torch.arange(len(at))
    other = (at != at[0] + (rows % n // bn * step + rows // n * jump)[:, None]).nonzero()
    if len(other):
        row, column = other[0].tolist()
        raise Refused(
            f"the entries of {name} must change along N in equal blocks; with blocks of {bn}, "
            f"row {row} at k = {column} has another entry"
        )
    if bn == 1 and bk == 1 and n > 1 and k > 1:
        if len(at) < n and entries < math.prod(region.shape):  # they come again further down
            raise MoreRows
        raise Refused(f"{name} has one entry for each element, so it is no scale of a block")
    return bn, bk, step, jump, order


def _even(entries: torch.Tensor) -> int:
    """Elements in each of the equal blocks that have an entry of their own; 0 if there are none."""
    change = (entries != entries[0]).nonzero()
    size = int(change[0]) if len(change) else len(entries)
    starts = entries[::size]
    equal = torch.equal(starts.repeat_interleave(size)[: len(entries)], entries)
    return size if equal and len(starts.unique()) == len(starts) else 0
