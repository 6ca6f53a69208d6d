"""Identification of a weight region: probes that reveal its codes, scales, zeros and blocks.

Nothing here knows a library or a packing. Everything that does not depend on the codes is computed
first; its narrowest form (before it is broadcast) is a *parameter*. The region, as a function of
codes and parameters, is then run on probes: every code equal and every parameter 1 gives one value
everywhere; doubling a scale doubles it; counting up a zero steps it. Which entry of a parameter an
element uses is read by writing base-16 digits of the entry's index into it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.probe import Prober, Reduced, descendants
from qinductor.regions import FLOAT8, INTEGER, Region, aten, describe
from qinductor.rows import Demand

ROW_COUNTS = (32, 256)  # rows to probe on: enough for groups, enough for two blocks of 128


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
    """

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    bn: int
    bk: int
    step: int
    base: torch.Tensor
    sign: int = 1

    def gather(self, value: torch.Tensor, n: int) -> torch.Tensor:
        """The grid [ceil(n / bn), ceil(k / bk)] of entries, in `dtype`."""
        at = self.base + torch.arange(-(-n // self.bn))[:, None] * self.step
        entries = value.reshape(-1)[at.to(value.device)].to(self.dtype)
        if self.sign != 1 and entries.dtype in (torch.uint8, torch.int8):
            entries = entries.to(torch.int16)  # -z of uint8 would wrap
        return entries * self.sign if self.sign != 1 else entries


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """What probing found; shared by regions of equal signature, proved anew for each weight.

    code          index of the node that holds the codes
    bits, signed  of one packed code
    scale, zero   the parameters
    arithmetics   candidates, in the order to try
    dtypes        dtypes in which the region computes
    evaluations   how many runs on probes this took
    """

    code: int
    bits: int
    signed: bool
    scale: Parameter | None
    zero: Parameter | None
    arithmetics: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    evaluations: int


def identify(region: Region, leaves: Sequence[torch.Tensor]) -> Structure:
    """The structure of a region, or Refused with the reason of its likeliest code tensor."""
    found = [node for node in (*region.inputs, *region.constants) if _may_hold_codes(node, region)]
    if not found:
        raise Refused(
            f"no tensor holds codes: wanted integers or float8 with at least 4 bits for each of "
            f"{region.shape[0]}x{region.shape[1]} elements, found "
            f"{', '.join(describe(node) for node in region.inputs) or 'no tensor'}"
        )
    reasons = []
    for code in sorted(found, key=lambda n: -n.meta["val"].numel() * n.meta["val"].itemsize):
        reduced = Reduced(region, _codes_of(code))
        spent = 0
        for rows in (*ROW_COUNTS, region.shape[0]):
            if rows != region.shape[0] and 2 * rows > region.shape[0]:
                continue
            try:
                prober = Prober(reduced, reduced.real(leaves), rows, spent)
                return _structure(reduced, prober)
            except MoreRows:  # never of the whole, so it is no reason
                spent = prober.evaluations
            except Refused as refusal:
                reasons.append(f"codes in {describe(code)}: {refusal.reason}")
                break
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                first = str(error).strip().splitlines()[0] if str(error).strip() else ""
                reasons.append(f"probing {describe(code)}: {type(error).__name__}: {first}")
                break
    raise Refused(reasons[0])


def _structure(reduced: Reduced, probe: Prober) -> Structure:
    scale, zero, divides, given = _roles(reduced, probe)
    levels = [_level(probe, code, given) for code in (0, 1, 2, 4)]
    step = levels[1] - levels[0]
    if step == 0 or levels[2:] != [levels[0] + 2 * step, levels[0] + 4 * step]:
        raise Refused(
            "the response to codes 0, 1, 2, 4 must be a straight line; it is "
            f"{levels} (a codebook?)"
        )
    code = next(c for c in (1, 2, 4) if levels[0] + c * step != 0)
    additive = False
    arithmetics: tuple[str, ...] = ("q/s",) if divides else ("q*s",) if scale else ("q",)
    scale_parameter = zero_parameter = None
    if scale is not None:
        one = probe(code, given)

        def ratio(value: torch.Tensor) -> torch.Tensor:
            return torch.div(one, value) - 1 if divides else torch.div(value, one) - 1

        scale_parameter = _located(reduced, probe, scale, code, given, ratio, 1)
    if zero is not None:
        unit, additive = _unit(probe, zero, scale, code, given)
        start = probe(code, given)
        found = _located(reduced, probe, zero, code, given, lambda w: (w - start) / unit, 0)
        zero_parameter = dataclasses.replace(found, sign=int(unit if additive else -unit))
        if additive and divides:
            raise Refused("a scale that divides, with a minimum that is added, is not supported")
        arithmetics = (
            ("q*s+z",) if additive else ("(q-z)/s",) if divides
            else ("(q-z)*s", "q*s-z*s") if scale else ("q-z",)
        )  # fmt: skip
    region = reduced.region
    dependent = descendants(region.nodes, {reduced.code})
    computing = [n.meta["val"].dtype for n in region.nodes if n in dependent]
    return Structure(
        code=region.nodes.index(reduced.code),
        bits=probe.bits,
        signed=levels[0] < 0,
        scale=scale_parameter,
        zero=zero_parameter,
        arithmetics=arithmetics,
        dtypes=tuple(dict.fromkeys([region.dtype, *(d for d in computing if _computes(d))])),
        evaluations=probe.evaluations,
    )


def _roles(
    reduced: Reduced, probe: Prober
) -> tuple[Node | None, Node | None, bool, dict[Node, torch.Tensor]]:
    """(scale, zero, whether the scale divides, parameters filled with 1 and 0 accordingly)."""
    inputs = list(reduced.chains)
    floats = [n for n in inputs if probe.values[n].is_floating_point()]
    given = {node: probe.like(node, 1) for node in floats}
    zeros = [n for n in inputs if probe.values[n].dtype in INTEGER and _counts(probe, n, given)]
    given.update({node: probe.like(node, 0) for node in zeros})
    low, high = (_level(probe, code, given) for code in (3, 5))
    if low == high:
        raise Refused(
            "W must depend on the codes when the other tensors are filled with ones; it is "
            f"{low:g} for code 3 and for code 5 (a codebook?)"
        )
    scales, divides = [], False
    for node in floats:
        doubled = {**given, node: probe.like(node, 2)}
        lower, higher = (_level(probe, code, doubled) for code in (3, 5))
        slope = (higher - lower) / (high - low)
        if slope in (2, 0.5):
            scales.append(node)
            divides = slope == 0.5
        elif slope != 1:
            raise Refused(
                f"doubling {describe(node)} must double, halve or keep W's step from code to code; "
                f"it makes it {slope:g} times as large"
            )
        elif lower != low:
            zeros.append(node)
    if len(scales) > 1 or len(zeros) > 1:
        names = [describe(node) for node in (scales if len(scales) > 1 else zeros)]
        what = "scale" if len(scales) > 1 else "zero"
        raise Refused(f"wanted at most one {what}, found {len(names)}: {' and '.join(names)}")
    given.update({node: probe.like(node, 0) for node in zeros})
    return next(iter(scales), None), next(iter(zeros), None), divides, given


def _counts(probe: Prober, node: Node, given: Mapping[Node, torch.Tensor]) -> bool:
    """Whether adding 1 and 2 to an integer parameter moves W by equal steps everywhere."""
    held = probe.values[node]
    held = held.clamp(max=torch.iinfo(held.dtype).max - 2)
    start = probe(5, {**given, node: held})
    try:
        one, two = (probe(5, {**given, node: held + i}) - start for i in (1, 2))
    except IndexError:  # an index keeps its real value
        return False
    first = one.flatten()[0]
    return bool(first != 0 and (one == first).all() and (two == 2 * first).all())


def _unit(
    probe: Prober, zero: Node, scale: Node | None, code: int, given: Mapping[Node, torch.Tensor]
) -> tuple[float, bool]:
    """(what W moves by for a zero of 1, whether it does so whatever the scale)."""
    doubled = {**given, scale: probe.like(scale, 2)} if scale is not None else dict(given)
    moves = []
    for values in (given, doubled):
        start = _level(probe, code, values)
        moves.append(_level(probe, code, {**values, zero: probe.like(zero, 1)}) - start)
    if abs(moves[0]) != 1:
        raise Refused(f"a zero of 1 must move W by 1 where the scale is 1; it moves by {moves[0]}")
    return moves[0], scale is not None and moves[0] == moves[1]


def _level(probe: Prober, code: int, given: Mapping[Node, torch.Tensor]) -> float:
    """W for equal codes and parameters: one value, or Refused with two places that differ."""
    value = probe(code, given)
    first = float(value.flatten()[0])
    other = (value != first).nonzero()
    if len(other):
        n, k = other[0].tolist()
        raise Refused(
            f"with equal codes and parameters W must be equal everywhere; for code {code} "
            f"W[0,0] = {first:g} and W[{n},{k}] = {float(value[n, k]):g}"
        )
    return first


def _located(
    reduced: Reduced,
    probe: Prober,
    node: Node,
    code: int,
    given: Mapping[Node, torch.Tensor],
    digit: Callable[[torch.Tensor], torch.Tensor],
    offset: int,
) -> Parameter:
    """Which entry of a parameter each element uses, read digit by digit (base 16)."""
    held = probe.values[node]
    flat = torch.arange(held.numel()).view(held.shape)
    index = torch.zeros(probe.rows, reduced.region.shape[1], dtype=torch.int64)
    for place in range(max(1, math.ceil(math.log(held.numel(), 16)))):
        fill = ((flat >> 4 * place & 15) + offset).to(held.dtype)
        read = digit(probe(code, {**given, node: fill})).round()
        if not ((read >= 0) & (read <= 15)).all():
            raise Refused(f"the entries of {describe(node)} cannot be told apart in W")
        index += read.long() << 4 * place
    if (index >= held.numel()).any():
        raise Refused(f"the entries of {describe(node)} cannot be told apart in W")
    shape = tuple(int(size) for size in node.meta["val"].shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    at = torch.zeros_like(index)
    for axis, stride in enumerate(strides):  # from the taken part to the whole tensor
        inner = math.prod(held.shape[axis + 1 :])
        at += index // inner % held.shape[axis] * stride
    demand = probe.function.demand.get(node)
    bn, bk, step = _blocks(at, describe(node), probe.rows, reduced.region.shape, demand)
    dtypes = [d for d in reduced.chains[node] if d.is_floating_point] or [held.dtype]
    narrowest = held.dtype if held.dtype in INTEGER else min(dtypes, key=lambda d: d.itemsize)
    where = reduced.region.nodes.index(node)
    return Parameter(where, narrowest, shape, bn, bk, step, at[0, ::bk])


def _blocks(
    at: torch.Tensor, name: str, rows: int, shape: tuple[int, int], demand: Demand
) -> tuple[int, int, int]:
    """(bn, bk, step) of the entries at[n, k]."""
    n, k = shape
    along_k = (at[0] != at[0, 0]).nonzero()
    bk = int(along_k[0]) if len(along_k) else k
    other = (at != at[:, torch.arange(k) // bk * bk]).any(0).nonzero()
    if len(other):
        raise Refused(
            f"the entries of {name} must change along K in equal blocks; the first has {bk} "
            f"elements, yet another entry begins at k = {int(other[0])} (act-order?)"
        )
    distinct = len(at[0].unique())
    if bk == 1 and distinct < k:
        raise Refused(
            f"the entries of {name} must change along K in equal blocks; {distinct} of them are "
            f"spread over {k} columns (act-order?)"
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
    return bn, bk, step


def _may_hold_codes(node: Node, region: Region) -> bool:
    value = node.meta["val"]
    if value.dtype not in INTEGER and value.dtype not in FLOAT8:
        return False
    return bool(value.numel() * value.itemsize * 2 >= region.shape[0] * region.shape[1])


def _codes_of(code: Node) -> Node:
    """The part, or the float8 view, of a tensor that is all the region makes of it."""
    while len(code.users) == 1:
        user = next(iter(code.users))
        float8 = user.target is aten.view.dtype and user.args[1] in FLOAT8
        if not float8 and user.target not in (aten.select.int, aten.slice.Tensor):
            break
        code = user
    return code


def _computes(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
