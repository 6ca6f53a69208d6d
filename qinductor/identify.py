"""Identification of a weight region: probes that reveal its codes, scales, zeros and blocks.

Nothing here knows a library or a packing. Everything that does not depend on the codes is computed
first; its narrowest form (before it is broadcast) is a *parameter*. The region, as a function of
codes and parameters, is then run on probes: with a few fills of the codes and every parameter 1,
doubling a scale doubles the step from one fill to another, and counting up a zero moves W by one.
Which entry of a parameter an element uses is read by writing base-16 digits of the entry's index
into it. What the codes are is read off W later, under unit scales (`prove.read`).
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.probe import Prober, Reduced, descendants, told_apart
from qinductor.regions import CODED, FLOAT8, FLOATS, INTEGER, VIEWS, Region, aten, describe
from qinductor.rows import Demand

ROW_COUNTS = (32, 256)  # rows to probe on: enough for groups, enough for two blocks of 128
SCALES = 2  # that a format has at most
SAMPLE = 1 << 16  # elements in which the values of codes are counted
NEAR = 0.05  # of a ratio of steps: they are rounded, and what is concluded is proved later


class MoreRows(Exception):
    """The probed rows end before the parameter's first block does."""


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """A scale or zero tensor of the region and how its entries lie over W.

    at        index of its node in `Region.nodes`
    dtype     narrowest dtype that the region converts it to
    shape     of the whole tensor
    bn, bk    block of W that shares an entry
    step, base  the entry of block (i, j), counted in row-major order, is base[j] + i * step
    sign      -1 where the region adds what the format subtracts
    how       what a scale does: "*" or "/" of W, or "^": W is multiplied by 2 to its power
    order     position -> column of W, where blocks are of permuted columns; else None
    """

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    bn: int
    bk: int
    step: int
    base: torch.Tensor
    sign: int = 1
    how: str = "*"
    order: torch.Tensor | None = None

    def gather(self, value: torch.Tensor, n: int) -> torch.Tensor:
        """The grid [ceil(n / bn), ceil(k / bk)] of entries, in `dtype`."""
        at = self.base + torch.arange(-(-n // self.bn))[:, None] * self.step
        entries = value.reshape(-1)[at.to(value.device)]
        if self.how == "^":
            entries = torch.exp2(entries.double())
        entries = entries.to(self.dtype)
        if self.sign != 1 and entries.dtype in (torch.uint8, torch.int8):
            entries = entries.to(torch.int16)  # -z of uint8 would wrap
        return entries * self.sign if self.sign != 1 else entries


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """What probing found; shared by regions of equal signature, proved anew for each weight.

    code          index of the node that holds the codes
    density       bits of the code tensor for each element of W
    reach         smallest and largest W for the codes tried, under unit scales; None if one of them
                  was no whole number
    scales, zero  the parameters
    zero_moves    what a zero does: "inside" (q - z), or "outside" where it is added after scaling
    dtypes        dtypes in which the region computes
    evaluations   how many runs on probes this took
    """

    code: int
    density: float
    reach: tuple[float, float] | None
    scales: tuple[Parameter, ...]
    zero: Parameter | None
    zero_moves: str
    dtypes: tuple[torch.dtype, ...]
    evaluations: int


def identify(region: Region, leaves: Sequence[torch.Tensor]) -> Structure:
    """The structure of a region, or Refused with the reason of its likeliest code tensor."""
    holders = sorted(
        (*region.inputs, *region.constants),
        key=lambda n: -n.meta["val"].numel() * n.meta["val"].itemsize,
    )
    found = list(dict.fromkeys(code for node in holders for code in _codes_in(node, region)))
    if not found:
        raise Refused(
            f"no tensor holds codes: wanted integers or float8 with at least a bit for each of "
            f"{region.shape[0]}x{region.shape[1]} elements, found "
            f"{', '.join(describe(node) for node in region.inputs) or 'no tensor'}"
        )
    reasons, spent = [], 0
    for code in found:
        reduced = Reduced(region, code, leaves)
        for rows in (*ROW_COUNTS, region.shape[0]):
            if rows != region.shape[0] and 2 * rows > region.shape[0]:
                continue
            prober = Prober(reduced, rows, spent)
            try:
                return _structure(reduced, prober)
            except MoreRows:  # never of the whole, so it is no reason
                continue
            except Refused as refusal:
                reasons.append(f"codes in {describe(code)}: {refusal.reason}")
                break
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                first = str(error).strip().partition("\n")[0]
                reasons.append(f"probing {describe(code)}: {type(error).__name__}: {first}")
                break
            finally:
                spent = prober.evaluations
    raise Refused(reasons[0])


def _codes_in(node: Node, region: Region) -> Iterator[Node]:
    """The tensor, or parts of it that the region takes apart, as far as they may hold codes."""
    value = node.meta["val"]
    elements = region.shape[0] * region.shape[1]
    if value.dtype not in CODED or value.numel() * value.itemsize * 8 < elements:
        return
    parts = [user for user in node.users if _takes_apart(user)]
    if len(node.users) != 1 or not parts:
        yield node  # else all that the region makes of it is one part or view
    for part in parts:
        yield from _codes_in(part, region)


def _takes_apart(node: Node) -> bool:
    if node.target is aten.view.dtype:
        return node.args[1] in FLOAT8
    return node.target in VIEWS or node.target in (aten.select.int, aten.slice.Tensor)


def _structure(reduced: Reduced, probe: Prober) -> Structure:
    scales, zero = _roles(reduced, probe)
    levels = probe.settle({} if zero is None else {zero: probe.like(zero, 0)})
    _check_distinct(probe, levels)
    carriers = _carriers(probe, levels)
    found = tuple(
        _located(reduced, probe, node, _factor(probe, carriers, levels, how), how)
        for node, how in scales
    )
    zero_parameter, moves = None, ""
    if zero is not None:
        unit, moves = _unit(probe, zero, scales)

        def moved(fill: Mapping[Node, torch.Tensor]) -> torch.Tensor:
            return (probe(probe.fills[0], fill) - levels[0]) / unit

        zero_parameter = _located(reduced, probe, zero, moved, "+")
        sign = int(unit if moves == "outside" else -unit)
        zero_parameter = dataclasses.replace(zero_parameter, sign=sign)
    region = reduced.region
    dependent = descendants(region.nodes, {reduced.code})
    computing = [n.meta["val"].dtype for n in region.nodes if n in dependent]
    return Structure(
        code=region.nodes.index(reduced.code),
        density=probe.density,
        reach=_reach(levels),
        scales=found,
        zero=zero_parameter,
        zero_moves=moves,
        dtypes=tuple(dict.fromkeys([region.dtype, *(d for d in computing if _computes(d))])),
        evaluations=probe.evaluations,
    )


def _roles(reduced: Reduced, probe: Prober) -> tuple[list[tuple[Node, str]], Node | None]:
    """(scales and how each acts, the zero); leaves scales at 1 and the zero as it is."""
    elements = reduced.region.shape[0] * reduced.region.shape[1]
    floats = [n for n in reduced.chains if probe.values[n].is_floating_point()]
    # Integers as many as elements are more bits of the codes.
    whole = [
        n for n in reduced.chains
        if probe.values[n].dtype in INTEGER and n.meta["val"].numel() < elements
    ]  # fmt: skip
    start = _apart(probe, probe.settle({node: probe.like(node, 1) for node in floats}))
    zeros = [n for n in whole if _counts(probe, n, start)]
    scales: list[tuple[Node, str]] = []
    for node in (n for n in whole if n not in zeros):
        one, three = (_with(probe, node, value, len(start)) for value in (1, 3))
        if one is None or three is None:
            continue  # an index, which keeps its real value
        slope = _steps(three, start) / _steps(one, start)
        scales.extend((node, how) for how, factor in (("*", 3), ("^", 4)) if _near(slope, factor))
    probe.given.update({n: probe.like(n, _neutral(how)) for n, how in scales})
    if scales:
        start = [probe(fill, {}) for fill in probe.fills[: len(start)]]
    for node in floats:
        values = _with(probe, node, 2, len(start)) or start
        slope = _steps(values, start) / _steps(start, start)
        if _near(slope, 2) or _near(slope, 0.5):
            scales.append((node, "*" if _near(slope, 2) else "/"))
        elif not _near(slope, 1):
            odd = slope[(slope - 1).abs() > NEAR].flatten()
            raise Refused(
                f"doubling {describe(node)} must double, halve or keep W's step from code to code; "
                f"it makes it {float(odd[0]):g} times as large"
            )
        elif values[0].ne(start[0]).any():
            zeros.append(node)
    for what, found, most in (("scale", [n for n, _ in scales], SCALES), ("zero", zeros, 1)):
        if len(found) > most:
            raise Refused(
                f"wanted at most {most} {what}{'s' * (most > 1)}, found {len(found)}: "
                f"{' and '.join(map(describe, found))}"
            )
    return scales, next(iter(zeros), None)


def _neutral(how: str) -> int:
    """The value of a scale that leaves W as it is."""
    return 0 if how == "^" else 1


def _apart(probe: Prober, start: list[torch.Tensor]) -> list[torch.Tensor]:
    """W for the first fills, sorted such that these tell all elements' codes apart."""
    apart = told_apart(start)
    if not apart:
        flat = torch.stack([start[0] == other for other in start]).all(0).nonzero()
        n, k = flat[0].tolist()
        raise Refused(
            f"W must depend on its codes everywhere; W[{n},{k}] is {float(start[0][n, k]):g} for "
            "all that were tried"
        )
    others = [i for i in range(len(start)) if i not in apart]
    probe.fills = [probe.fills[i] for i in [*apart, *others]]
    return [start[i] for i in apart]


def _check_distinct(probe: Prober, levels: Sequence[torch.Tensor]) -> None:
    """Refused if W takes more values than codes of their size can have."""
    most = 1 << min(8, math.ceil(probe.density))
    for level in levels:
        found = len(level.flatten()[:SAMPLE].unique())
        if found > most:
            raise Refused(
                f"under unit scales W takes {found} values and more; codes of "
                f"{min(8.0, probe.density):g} bits have at most {most}"
            )


def _with(probe: Prober, node: Node, value: float, fills: int) -> list[torch.Tensor] | None:
    """W for the first fills with one parameter at a value; None if the region does not take it."""
    try:
        return [probe(fill, {node: probe.like(node, value)}) for fill in probe.fills[:fills]]
    except (RuntimeError, IndexError):
        return None


def _steps(values: Sequence[torch.Tensor], start: Sequence[torch.Tensor]) -> torch.Tensor:
    """For each element, the step between the first fill and the next at which W differed."""
    step = values[-1] - values[0]
    for value, at_start in zip(values[-2:0:-1], start[-2:0:-1], strict=True):
        step = torch.where(at_start != start[0], value - values[0], step)
    return step


def _near(slope: torch.Tensor, factor: float) -> bool:
    return bool(((slope / factor - 1).abs() < NEAR).all())


def _counts(probe: Prober, node: Node, start: Sequence[torch.Tensor]) -> bool:
    """Whether adding to an integer parameter moves W, by the same everywhere and for all codes."""
    held = probe.values[node]
    if held.numel() and int(held.max()) > torch.iinfo(held.dtype).max - 2:
        held = held.clamp(max=torch.iinfo(held.dtype).max - 2)
        start = [probe(fill, {node: held}) for fill in probe.fills[:2]]
    try:
        one = probe(probe.fills[0], {node: held + 1}) - start[0]
        first = one.flatten()[0]
        if first == 0 or (one != first).any():
            return False
        return bool((probe(probe.fills[1], {node: held + 2}) - start[1] == 2 * first).all())
    except (RuntimeError, IndexError):  # an index keeps its real value
        return False


def _unit(probe: Prober, zero: Node, scales: Sequence[tuple[Node, str]]) -> tuple[float, str]:
    """(what W moves by for a zero of 1, whether it does so "inside" or "outside" of the scales)."""
    moves = []
    for value in (1, 2):
        factor = {"*": value, "/": 1 / value, "^": value - 1}
        given = {node: probe.like(node, factor[how]) for node, how in scales}
        fill = probe.fills[0]
        start, end = (probe(fill, {**given, zero: probe.like(zero, z)}) for z in (0, 1))
        move = (end - start).flatten()
        if (move != move[0]).any():
            raise Refused(
                "a zero of 1 must move W by the same everywhere; it moves by "
                f"{[float(v) for v in move.unique()[:3]]}"
            )
        moves.append(float(move[0]))
    if abs(moves[0]) != 1:
        raise Refused(f"a zero of 1 must move W by 1 where the scale is 1; it moves by {moves[0]}")
    inside = moves[1] == moves[0] * 2 ** len(scales)
    if not inside and moves[1] != moves[0]:
        raise Refused("a zero that some of the scales multiply and others do not is not supported")
    return moves[0], "outside" if scales and not inside else "inside"


def _carriers(probe: Prober, levels: Sequence[torch.Tensor]) -> list[int]:
    """The fewest fills such that no element of W is 0 for all of them."""
    for size in range(1, len(levels) + 1):
        for chosen in itertools.combinations(range(len(levels)), size):
            if torch.stack([levels[i] != 0 for i in chosen]).any(0).all():
                return list(chosen)
    raise Refused("an element of W is 0 for all codes that were tried")


def _factor(
    probe: Prober, carriers: Sequence[int], levels: Sequence[torch.Tensor], how: str
) -> Callable[[Mapping[Node, torch.Tensor]], torch.Tensor]:
    """Given values of a scale -> the digit that each element was scaled by."""

    def digit(given: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        found = torch.zeros_like(levels[0])
        for i in reversed(carriers):
            value = probe(probe.fills[i], given)
            factor = levels[i] / value if how == "/" else value / levels[i]
            found = torch.where(levels[i] != 0, factor, found)
        return found.log2() if how == "^" else found - 1

    return digit


def _reach(levels: Sequence[torch.Tensor]) -> tuple[float, float] | None:
    if any((level != level.round()).any() for level in levels):
        return None
    return min(float(v.min()) for v in levels), max(float(v.max()) for v in levels)


def _located(
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
        if not ((read >= 0) & (read < base)).all():
            raise Refused(f"the entries of {describe(node)} cannot be told apart in W")
        index += read.long() << bits * place
    if (index >= held.numel()).any():
        raise Refused(f"the entries of {describe(node)} cannot be told apart in W")
    shape = tuple(int(size) for size in node.meta["val"].shape)
    if math.prod(shape) >= math.prod(region.shape):
        index = _first_equal(reduced, probe, node)[index]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    at = torch.zeros_like(index)
    for axis, stride in enumerate(strides):  # from the taken part to the whole tensor
        inner = math.prod(held.shape[axis + 1 :])
        at += index // inner % held.shape[axis] * stride
    demand = probe.function.demand.get(node)
    bn, bk, step, order = _blocks(at, describe(node), probe.rows, region.shape, demand)
    dtypes = [d for d in reduced.chains[node] if d.is_floating_point] or [held.dtype]
    narrowest = held.dtype if held.dtype in INTEGER else min(dtypes, key=lambda d: d.itemsize)
    if how == "^":
        narrowest = torch.bfloat16 if region.dtype is torch.bfloat16 else torch.float32
    entries = (at[0] if order is None else at[0, order])[::bk]
    where = region.nodes.index(node)
    return Parameter(where, narrowest, shape, bn, bk, step, entries, how=how, order=order)


def _first_equal(reduced: Reduced, probe: Prober, node: Node) -> torch.Tensor:
    """For each entry of a parameter as large as W, the first that is computed from the same.

    It was broadcast before it was computed, so entries that are equal whatever the tensors behind
    it hold are one entry.
    """
    seeded = torch.Generator().manual_seed(1)
    for among in ((*FLOAT8, *FLOATS, *INTEGER), FLOATS):  # an index must keep its values
        values = []
        with contextlib.suppress(RuntimeError, IndexError):
            for _ in range(3):
                value = reduced.computed(node, functools.partial(_random, among, seeded))
                values.append(probe.function.take(node, value).flatten().double().cpu())
            found, inverse = torch.stack(values, 1).unique(dim=0, return_inverse=True)
            places = torch.arange(len(inverse))
            first = places.new_full((len(found),), len(inverse))
            return first.scatter_reduce_(0, inverse, places, "amin")[inverse]
    return torch.arange(probe.values[node].numel())


def _random(
    among: Sequence[torch.dtype], seeded: torch.Generator, tensor: torch.Tensor
) -> torch.Tensor:
    """Random values for a tensor of these dtypes; the tensor itself if it has another."""
    if tensor.dtype not in among:
        return tensor
    value = torch.rand(tensor.shape, generator=seeded)
    value = value * 120 if tensor.dtype in INTEGER else value * 8 + 0.5
    return value.to(tensor.device).to(tensor.dtype)


def _blocks(
    at: torch.Tensor, name: str, rows: int, shape: tuple[int, int], demand: Demand
) -> tuple[int, int, int, torch.Tensor | None]:
    """(bn, bk, step, order) of the entries at[n, k]."""
    n, k = shape
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
    along_n = (at[:, 0] != at[0, 0]).nonzero()
    if not len(along_n) and rows < n and demand is not None:
        raise MoreRows
    bn = int(along_n[0]) if len(along_n) else n
    step = int(at[bn, 0] - at[0, 0]) if len(along_n) else 0
    other = (at != at[0] + (torch.arange(rows) // bn * step)[:, None]).nonzero()
    if len(other):
        row, column = other[0].tolist()
        raise Refused(
            f"the entries of {name} must change along N in equal blocks; with blocks of {bn}, "
            f"row {row} at k = {column} has another entry"
        )
    if bn == 1 and bk == 1 and n > 1 and k > 1:
        raise Refused(f"{name} has one entry for each element, so it is no scale of a block")
    return bn, bk, step, order


def _even(entries: torch.Tensor) -> int:
    """Elements in each of the equal blocks that have an entry of their own; 0 if there are none."""
    change = (entries != entries[0]).nonzero()
    size = int(change[0]) if len(change) else len(entries)
    starts = entries[::size]
    equal = torch.equal(starts.repeat_interleave(size)[: len(entries)], entries)
    return size if equal and len(starts.unique()) == len(starts) else 0


def _computes(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, *FLOATS)
