"""Identification of a weight region: probes that reveal its codes, scales, zeros and blocks.

Nothing here knows a library or a packing. Everything that does not depend on the codes is computed
first; its narrowest form (before it is broadcast) is a *parameter*. The region, as a function of
codes and parameters, is then run on probes: with a few fills of the codes and every parameter 1,
doubling a scale doubles the step from one fill to another, and counting up a zero moves W by one.
Which entry of a parameter an element uses is read by writing base-16 digits of the entry's index
into it. What the codes are is read off W later, under unit scales (`prove.read`).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.failures import FAILURES, said
from qinductor.patterns.weight_formats.inner import codes_within, whole_codes
from qinductor.patterns.weight_formats.locate import (
    MoreRows,
    Parameter,
    carriers_of,
    factor,
    is_broadcast,
    located,
)
from qinductor.patterns.weight_formats.probe import SAMPLE, Prober, Reduced, descendants, told_apart
from qinductor.regions import (
    CASTS,
    CODED,
    FLOAT8,
    FLOATS,
    HALVES,
    INTEGER,
    VIEWS,
    Region,
    aten,
    describe,
)

ROW_COUNTS = (32, 256)  # rows to probe on: enough for groups, enough for two blocks of 128
SCALES = 2  # that a format has at most
FUSED = {aten.addcmul.default, aten.addcdiv.default}
NEAR = 0.05  # of a ratio of steps: they are rounded, and what is concluded is proved later


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """What probing found; shared by regions of equal signature, proved anew for each weight.

    code          index of the node that holds the codes
    density       bits for each element of W in the tensors that hold the codes
    reach         smallest and largest W for the codes tried, under unit scales; None if one of them
                  was no whole number
    scales, zero  the parameters
    zero_moves    what a zero does: "inside" (q - z), or "outside" where it is added after scaling;
                  "" where there is none
    dtypes        dtypes in which the region computes
    signed_zeros  whether zeros of W may be negative, as those of codes in floats are; the format's
                  are not, and no product differs
    evaluations   how many runs on probes this took
    """

    code: int
    density: float
    reach: tuple[float, float] | None
    scales: tuple[Parameter, ...]
    zero: Parameter | None
    zero_moves: str
    dtypes: tuple[torch.dtype, ...]
    signed_zeros: bool
    evaluations: int


def identify(region: Region, leaves: Sequence[torch.Tensor]) -> Structure:
    """The structure of a region, or Refused with the reason of its likeliest code tensor."""
    holders = sorted(
        (*region.inputs, *region.constants),
        key=lambda n: (n.meta["val"].dtype is torch.bool, -n.meta["val"].nbytes),  # or a mask
    )
    inner = codes_within(region.nodes, math.prod(region.shape), region.constants)
    stored = (code for node in holders for code in _codes_in(node, region))
    found = list(dict.fromkeys([*stored, *inner]))
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
            except FAILURES as error:
                reasons.append(f"probing {describe(code)}: {said(error)}")
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
    density = probe.density([*filter(None, [zero]), *(node for node, _ in scales)])
    _check_distinct(density, levels)
    carriers = carriers_of(levels)
    found = tuple(
        located(reduced, probe, node, factor(probe, carriers, levels, how), how)
        for node, how in scales
    )
    zero_parameter, moves = None, ""
    if zero is not None:
        unit, moves = _unit(probe, zero, scales)

        def moved(fill: Mapping[Node, torch.Tensor]) -> torch.Tensor:
            return (probe(probe.fills[0], fill) - levels[0]) / unit

        zero_parameter = located(reduced, probe, zero, moved, "+")
        sign = int(unit if moves == "outside" else -unit)
        zero_parameter = dataclasses.replace(zero_parameter, sign=sign)
    region = reduced.region
    dependent = descendants(region.nodes, {reduced.code})
    inner = [n for n in region.nodes if n in dependent]
    dtypes = [*(n.meta["val"].dtype for n in inner), *(torch.float32 for n in inner if _wide(n))]
    own = whole_codes(reduced.code, region)
    if own is not None:
        density = math.log2(own.high - own.low + 1)
    computing = [dtype for dtype in dtypes if dtype in (torch.float64, *FLOATS)]
    return Structure(
        code=region.nodes.index(reduced.code),
        density=density,
        reach=_reach(levels) if own is None else (own.low, own.high),
        scales=found,
        zero=zero_parameter,
        zero_moves=moves,
        dtypes=tuple(dict.fromkeys([region.dtype, *computing])),
        signed_zeros=own is not None,
        evaluations=probe.evaluations,
    )


def _roles(reduced: Reduced, probe: Prober) -> tuple[list[tuple[Node, str]], Node | None]:
    """(scales and how each acts, the zero); leaves scales at 1 and the zero as it is."""
    elements = reduced.region.shape[0] * reduced.region.shape[1]
    floats = [n for n in reduced.chains if probe.values[n].is_floating_point()]
    whole = [n for n in reduced.chains if probe.values[n].dtype in INTEGER]
    start = _apart(probe, {node: probe.like(node, 1) for node in floats})
    zeros = [n for n in whole if _counts(probe, n, start)]
    for node in [n for n in zeros if n.meta["val"].numel() >= elements]:
        if not is_broadcast(reduced, probe, node):  # it holds more bits of the codes
            zeros.remove(node)
    scales: list[tuple[Node, str]] = []
    for node in (n for n in whole if n not in zeros):
        given = probe.like(node, 1), probe.mixed(node, 3)
        one, more = (_with(probe, node, value, len(start)) for value in given)
        if one is None or more is None:
            continue  # an index, which keeps its real value
        slope = _steps(more, start) / _steps(one, start)
        kinds = {"*": (3, 4), "^": (4, 8)}  # neither, if W takes several entries at one place
        scales.extend((node, how) for how, factors in kinds.items() if _near(slope, *factors))
    probe.given.update({n: probe.like(n, how != "^") for n, how in scales})
    if scales:
        start = [probe(fill, {}) for fill in probe.fills[: len(start)]]
        others = {*whole} - {*zeros, *(n for n, _ in scales)}
        zeros += [n for n in whole if n in others and _counts(probe, n, start)]
    for node in floats:
        values = _with(probe, node, probe.like(node, 2), len(start)) or start
        slope = _steps(values, start) / _steps(start, start)
        if _near(slope, 2) or _near(slope, 0.5):
            scales.append((node, "*" if _near(slope, 2) else "/"))
        elif not _near(slope, 1):
            odd = slope[~_each_near(slope, 0.5, 1, 2)].unique().tolist() or slope.unique().tolist()
            raise Refused(
                f"doubling {describe(node)} must double, halve or keep W's step from code to code; "
                f"it makes it {' and '.join(f'{v:g}' for v in odd[:3])} times as large"
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


def _apart(probe: Prober, given: dict[Node, torch.Tensor]) -> list[torch.Tensor]:
    """W for the first fills, sorted such that these tell all elements' codes apart."""
    start = probe.settle(given)
    if not probe.parameters:
        _check_distinct(probe.density([]), start)
    own, usual = len(start), probe.fills
    if not told_apart(start):
        probe.fills = probe.spare
        start += probe.settle({})
        probe.fills = usual + probe.fills
    # Smallest first: what a zero adds is lost beside large values in 16 bits.
    apart = sorted(told_apart(start), key=lambda i: float(start[i].abs().max()))
    if not apart:
        n, k = torch.stack([start[0] == other for other in start]).all(0).nonzero()[0].tolist()
        raise Refused(
            f"W must depend on its codes everywhere; W[{n},{k}] is {float(start[0][n, k]):g} for "
            "all that were tried"
        )
    others = [i for i in range(own) if i not in apart]
    probe.fills = [probe.fills[i] for i in [*apart, *others]]
    return [start[i] for i in apart]


def _check_distinct(density: float, levels: Sequence[torch.Tensor]) -> None:
    """Refused if W takes more values than codes of their size can have."""
    most = 1 << min(8, math.ceil(density))
    for level in levels:
        found = len(level.flatten()[:SAMPLE].unique())
        if found > most:
            raise Refused(
                f"under unit scales W takes {found} values and more; "
                f"{min(8.0, density):g} bits an element tell at most {most} apart"
            )


def _with(probe: Prober, node: Node, value: torch.Tensor, fills: int) -> list[torch.Tensor] | None:
    """W for the first fills with one parameter at a value; None if the region does not take it."""
    try:
        return [probe(fill, {node: value}) for fill in probe.fills[:fills]]
    except (RuntimeError, IndexError):
        return None


def _steps(values: Sequence[torch.Tensor], start: Sequence[torch.Tensor]) -> torch.Tensor:
    """For each element, the step between the first fill and the next at which W differed."""
    step = values[-1] - values[0]
    for value, at_start in zip(values[-2:0:-1], start[-2:0:-1], strict=True):
        step = torch.where(at_start != start[0], value - values[0], step)
    return step


def _each_near(slope: torch.Tensor, *factors: float) -> torch.Tensor:
    return torch.stack([(slope / factor - 1).abs() < NEAR for factor in factors]).any(0)


def _near(slope: torch.Tensor, *factors: float) -> bool:
    return bool(_each_near(slope, *factors).all())


def _counts(probe: Prober, node: Node, start: Sequence[torch.Tensor]) -> bool:
    """Whether adding to an integer parameter moves W, each place by one entry and for all codes."""
    held = probe.values[node]
    if held.numel() and int(held.max()) > torch.iinfo(held.dtype).max - 2:
        held = held.clamp(max=torch.iinfo(held.dtype).max - 2)
        start = [probe(fill, {node: held}) for fill in probe.fills[:2]]
    try:
        one = probe(probe.fills[0], {node: held + 1}) - start[0]
        first = one.flatten()[0]
        if not _near(one / first, 1):
            return False
        move = probe(probe.fills[1], {node: held + probe.mixed(node, 1)}) - start[1]
        return _near(move / first, 1, 2)
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
        if ((move - move[0]).abs() > NEAR).any():
            raise Refused(
                "a zero of 1 must move W by the same everywhere; it moves by "
                f"{[float(v) for v in move.unique()[:3]]}"
            )
        first = float(move[0])
        moves.append(round(first) if abs(first - round(first)) < NEAR else first)
    if abs(moves[0]) != 1:
        raise Refused(f"a zero of 1 must move W by 1 where the scale is 1; it moves by {moves[0]}")
    inside = moves[1] == moves[0] * 2 ** len(scales)
    if not inside and moves[1] != moves[0]:
        raise Refused("a zero that some of the scales multiply and others do not is not supported")
    return moves[0], "outside" if scales and not inside else "inside"


def _reach(levels: Sequence[torch.Tensor]) -> tuple[float, float] | None:
    if any((level != level.round()).any() for level in levels):
        return None
    return min(float(v.min()) for v in levels), max(float(v.max()) for v in levels)


def _wide(node: Node) -> bool:
    """Whether an operator that gives 16 bits computes in float32 what is not rounded in between."""
    value = node.meta["val"]
    if value.dtype not in HALVES or node.target in CASTS:
        return False
    given = [source.meta["val"] for source in node.all_input_nodes]
    # A number of a wider type is taken as it is.
    number = any(v.dim() == 0 and v.dtype in (torch.float32, torch.float64) for v in given)
    return number or node.target in FUSED
