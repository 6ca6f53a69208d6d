"""Reading a weight off its region, and the proof: the format's reference equals it bit for bit."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from qinductor.contracts import (
    CODEBOOKS,
    FLOAT_CODES,
    QuantizedWeight,
    WeightFormat,
    code_range,
    codebook,
    dequantize,
    difference,
    looked_up,
)
from qinductor.errors import Refused
from qinductor.patterns.weight_formats.identify import Structure
from qinductor.patterns.weight_formats.locate import Parameter
from qinductor.patterns.weight_formats.probe import Reduced
from qinductor.regions import Region, evaluate

STRIP = 64  # rows on which candidates are compared before the winner is proved on the whole
WORDS = (2, 4, 8)  # bits of a code that has a word of its own, by the values found
SAMPLE = 1 << 18  # elements in which the entries of a codebook are looked for first


def read(
    region: Region, structure: Structure, leaves: Sequence[torch.Tensor]
) -> list[QuantizedWeight]:
    """The weight that the region makes of these leaves, proved bitwise equal to its format; one for
    each expert, all of one format, where the region is a stack of them.

    Two whole evaluations: W itself, and W with unit scales, whose values are the codes, unpacked
    and in place; a third where entries of a codebook are rounded. Refused with the nearest format,
    the first difference and both values.
    """
    reduced = Reduced(region, region.nodes[structure.code], leaves)
    real = reduced.real()
    parameters = [*structure.scales, *([structure.zero] if structure.zero else [])]
    values = {p: p.narrowed(real[region.nodes[p.at]]) for p in parameters}
    grids = [_grids(structure, values, region, expert) for expert in range(region.experts)]
    value = _compared(region(leaves), structure)
    nearest = ""
    # Entries of a codebook are to be what they are before they are scaled: not rounded to 16 bits,
    # unless, which is tried next, the region rounds what it computes them from.
    for widen in dict.fromkeys((structure.reach is None, False)):
        try:
            unit = _compared(region.oriented(_unit(reduced, real, structure, widen)), structure)
        except RuntimeError:  # an operator that takes equal dtypes alone
            continue
        coded = _coded(unit, real[reduced.code].dtype, structure)
        for weights in _candidates(region, structure, coded, grids):
            nearest = _differs(weights, value, structure)
            if not nearest:
                return weights
    raise Refused(f"the region is not bitwise equal to its nearest format, {nearest}")


def _unit(
    reduced: Reduced, real: dict[torch.fx.Node, torch.Tensor], structure: Structure, widen: bool
) -> torch.Tensor:
    """W with every scale 1 and every zero 0."""
    given = dict(real)
    for parameter in (*structure.scales, structure.zero):
        if parameter is not None:
            node = reduced.region.nodes[parameter.at]
            none = parameter is structure.zero or parameter.how == "^"
            neutral = torch.zeros_like if none else torch.ones_like
            given[node] = neutral(real[node].float()).to(real[node].dtype)
    return evaluate(reduced.nodes, given, [reduced.region.output], widen)[0]


def _compared(value: torch.Tensor, structure: Structure) -> torch.Tensor:
    """A value with zeros as they are compared: none is negative where the codes are floats."""
    return value + 0 if structure.signed_zeros else value


def _differs(weights: Sequence[QuantizedWeight], value: torch.Tensor, structure: Structure) -> str:
    """Empty if the reference equals the region, else where it does not; a strip is tried first."""
    form = weights[0].format
    strip = min(max(STRIP // form.bn, 1) * form.bn, form.n)
    parts = [(weights[0].rows(0, strip), value[:strip])]
    parts += zip(weights, value.split(form.n), strict=True)
    for expert, (weight, part) in enumerate(parts, -1):
        found = difference(_compared(dequantize(weight), structure), part)
        if found:
            which = f" expert {expert}" if len(weights) > 1 and expert > 0 else ""
            arithmetic = f"{form.arithmetic} in {form.compute}"
            return f"{form.codes} {form.granularity} {arithmetic}{which}: {found}"
    return ""


@dataclasses.dataclass(frozen=True, eq=False)
class _Coded:
    """Codes [n, k] of a type, with the table of what they stand for."""

    name: str
    codes: torch.Tensor
    table: torch.Tensor | None = None


def _coded(unit: torch.Tensor, dtype: torch.dtype, structure: Structure) -> _Coded:
    """The codes, from W with unit scales."""
    name = str(dtype).removeprefix("torch.")
    if name in FLOAT_CODES:
        return _Coded(name, unit.to(torch.float32).to(dtype).contiguous())
    whole = unit.to(torch.float32)
    exact = (whole == whole.round()) & ~(torch.signbit(whole) & (whole == 0))
    if structure.reach is not None and bool(exact.all()):
        low, high = map(float, whole.aminmax())
        # Other weights of the kind may use codes that this one does not; but not at more bits.
        wide = min(low, structure.reach[0]), max(high, structure.reach[1])
        signed = structure.reach[0] < 0
        packed = structure.density < 8  # else a code has a word of its own
        widths = range(1, math.ceil(structure.density) + 1) if packed else WORDS
        for limits in [wide, (low, high)] if packed else [(low, high)]:
            coded = _integers(whole, limits, widths, signed)
            if coded is not None:
                return coded
    return _codebook(whole, structure)


def _integers(
    values: torch.Tensor, limits: tuple[float, float], widths: Iterable[int], signed: bool
) -> _Coded | None:
    """Whole numbers as codes of the narrowest type that holds the limits; None if none does."""
    for bits in widths:
        for name in ("int", "uint") if signed else ("uint", "int"):
            smallest, largest = code_range(f"{name}{bits}") or (0, 0)
            if smallest <= limits[0] and limits[1] <= largest:
                storage = torch.int8 if name == "int" else torch.uint8
                return _Coded(f"{name}{bits}", values.to(storage).contiguous())
    return None


def _codebook(unit: torch.Tensor, structure: Structure) -> _Coded:
    """Codes as places in the sorted table of values that W takes under unit scales."""
    keys = _sortable(unit)
    found = keys.flatten()[:SAMPLE].unique()
    places = _places(found, keys)
    if places is None:
        found = keys.unique()
        places = _places(found, keys)
    if places is None:
        raise Refused(
            f"under unit scales W takes {len(found)} values and more; codes have at most 256"
        )
    for name, entries in CODEBOOKS.items():
        book, order = _sortable(codebook(name, unit.device)).sort()
        known = _places(book, found)
        # A table of as many values as there are may take fewer bits.
        if known is not None and len(entries) <= 2 ** max(structure.density, 1):
            codes = order.to(torch.uint8)[known.int()]
            return _Coded(name, looked_up(codes, places))
    bits = max(1, (len(found) - 1).bit_length())
    if structure.density >= 8:
        bits = next(word for word in WORDS if word >= bits)
    else:
        bits = max(bits, int(structure.density))
    table = torch.zeros(1 << bits, dtype=torch.float32, device=unit.device)
    table[: len(found)] = _values(found)
    return _Coded(f"table{bits}", places, table)


def _sortable(values: torch.Tensor) -> torch.Tensor:
    """int32 keys in the order of float32 values, -0.0 before 0.0."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _values(keys: torch.Tensor) -> torch.Tensor:
    """The float32 values of `_sortable` keys."""
    return torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)


def _places(book: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    """uint8: the place of each key in a sorted book; None if one is not there or it is too long."""
    if len(book) > 256:
        return None
    tops, flat = (book >> 16) + (1 << 15), keys.flatten()
    if len(tops.unique()) == len(book):  # as much of a key as a bf16 has: ten times faster
        place = torch.zeros(1 << 16, dtype=torch.uint8, device=book.device)
        place[tops] = torch.arange(len(book), dtype=torch.uint8, device=book.device)
        at = place.index_select(0, (flat >> 16) + (1 << 15))
    else:
        at = torch.bucketize(flat, book, out_int32=True).clamp_(max=len(book) - 1).to(torch.uint8)
    at = at.view(keys.shape)
    return at if torch.equal(looked_up(book, at), keys) else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Grids:
    """Scales and zeros of a weight on one grid of blocks; `steps` are the orders to scale in."""

    bn: int
    bk: int
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    outer: torch.Tensor | None
    order: torch.Tensor | None
    steps: tuple[str, ...]


def _grids(
    structure: Structure, values: dict[Parameter, torch.Tensor], region: Region, expert: int
) -> _Grids:
    n, k = region.shape[0] // region.experts, region.shape[1]
    inner, outer = _inner_and_outer(structure.scales, k)
    blocked = [p for p in (inner, structure.zero) if p is not None]
    bn = min((p.bn for p in blocked), default=n)
    bk = min((p.bk for p in blocked), default=k)
    orders = [p.order for p in blocked if p.order is not None]
    for parameter in blocked:
        for ours, theirs, size in ((parameter.bn, bn, n), (parameter.bk, bk, k)):
            if ours % theirs and ours != size:
                raise Refused(f"scale and zero have blocks of {ours} and {theirs} along one axis")
        known = parameter.order if parameter.order is not None or parameter.bk == k else None
        if orders and parameter.bk != k and (known is None or not torch.equal(known, orders[0])):
            raise Refused("scale and zero group the columns of W differently")

    def grid(parameter: Parameter | None) -> torch.Tensor | None:
        if parameter is None:
            return None
        found = parameter.gather(values[parameter], n, expert)
        rows = torch.arange(-(-n // bn)) * bn // parameter.bn
        columns = torch.arange(-(-k // bk)) * bk // parameter.bk
        return found[rows][:, columns].contiguous()

    second = None
    if outer is not None:
        second = outer.gather(values[outer], n, expert)[:, 0].repeat_interleave(outer.bn)[:n]
    named = [(p, name) for p, name in ((inner, "s"), (outer, "t")) if p is not None]
    steps = tuple(
        "".join(("/" if p.how == "/" else "*") + name for p, name in order)
        for order in itertools.permutations(named)
    )
    device = next(iter(values.values())).device if values else None
    order = orders[0].to(device) if orders else None
    return _Grids(bn, bk, grid(inner), grid(structure.zero), second, order, steps)


def _inner_and_outer(
    scales: Sequence[Parameter], k: int
) -> tuple[Parameter | None, Parameter | None]:
    """(the scale of blocks, a second one that is the same along each row)."""
    if len(scales) < 2:
        return (scales[0] if scales else None), None
    inner, outer = sorted(scales, key=lambda p: (p.bk == k, p.bn))
    if outer.bk != k:
        raise Refused("one of two scales must be the same along K; both change along it")
    return inner, outer


def _candidates(
    region: Region, structure: Structure, coded: _Coded, grids: Sequence[_Grids]
) -> Iterator[list[QuantizedWeight]]:
    """Weights to compare with the region, one for each expert; those without a zero first, where it
    is one number."""
    one = grids[0]
    dtypes = {
        name: None if tensor is None else tensor.dtype
        for name, tensor in (("scale", one.scale), ("outer", one.outer), ("table", coded.table))
    }
    base = WeightFormat(
        codes=coded.name, n=region.shape[0] // len(grids), k=region.shape[1], bn=one.bn, bk=one.bk,
        arithmetic="q", zero=None, inner=region.dtype, compute=region.dtype, dtype=region.dtype,
        permuted=one.order is not None, **dtypes,
    )  # fmt: skip

    def weights(form: WeightFormat, codes: torch.Tensor) -> list[QuantizedWeight]:
        return [
            QuantizedWeight(
                form, part, grid.scale, None if form.zero is None else grid.zero, grid.outer,
                coded.table, grid.order,
            )
            for part, grid in zip(codes.split(base.n), grids, strict=True)
        ]  # fmt: skip

    inside = structure.zero_moves == "inside"
    zero = None if one.zero is None else torch.stack([g.zero for g in grids if g.zero is not None])
    folded = None
    if zero is not None and (inside or not bool((zero != 0).any())):
        folded = _without_zero(coded, zero)
    if folded is not None:
        for steps, compute in itertools.product(one.steps, structure.dtypes):
            form = dataclasses.replace(
                base, codes=folded.name, arithmetic="q" + steps, compute=compute, inner=compute
            )
            yield weights(form, folded.codes)
    # Where z is an integer, q - z is exact in every dtype here, so one is enough.
    within = structure.dtypes if zero is not None and zero.is_floating_point() else (None,)
    for arithmetic, compute, inner in itertools.product(
        _arithmetics(one, inside), structure.dtypes, within
    ):
        form = dataclasses.replace(
            base, arithmetic=arithmetic, compute=compute, inner=inner or compute,
            zero=None if zero is None else zero.dtype,
        )  # fmt: skip
        yield weights(form, coded.codes)


def _arithmetics(grids: _Grids, inside: bool) -> Iterator[str]:
    """What may be done with codes, scales and the zero, in the order to try."""
    for steps in grids.steps:
        if grids.zero is None:
            yield "q" + steps
        elif not inside:
            yield f"q{steps}+z"
        else:
            yield f"(q-z){steps}" if steps else "q-z"


def _without_zero(coded: _Coded, zero: torch.Tensor) -> _Coded | None:
    """The codes with the zero subtracted, where all zeros are one whole number and the codes take
    no more bits for it."""
    first = float(zero.flatten()[0]) if zero.numel() else 0.0
    if not first.is_integer() or abs(first) > 255 or bool((zero != zero.flatten()[0]).any()):
        return None
    limits = code_range(coded.name)
    if limits is None:
        return None
    bits = int(coded.name[-1])
    moved = coded.codes.to(torch.int16) - int(first)
    low, high = (limits[0] - first, limits[1] - first) if bits < 8 else map(float, moved.aminmax())
    return _integers(moved, (low, high), WORDS if bits == 8 else [bits], low < 0)
