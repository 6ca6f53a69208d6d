"""Reading a weight off its region, and the proof: the format's reference equals it bit for bit."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from qinductor.contracts import FLOAT_CODES, INT_CODES, QuantizedWeight, WeightFormat, dequantize
from qinductor.errors import Refused
from qinductor.identify import Parameter, Reduced, Structure
from qinductor.regions import Region, evaluate

STRIP = 64  # rows on which candidates are compared before the winner is proved on the whole
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read(region: Region, structure: Structure, leaves: Sequence[torch.Tensor]) -> QuantizedWeight:
    """The weight that the region makes of these leaves, proved bitwise equal to its format.

    Two whole evaluations: W itself, and W with unit scales, whose values are the codes, unpacked
    and in place. Refused with the nearest format, the first difference and both values.
    """
    reduced = Reduced(region, region.nodes[structure.code])
    real = reduced.real(leaves)
    parameters = {
        region.nodes[p.at]: p for p in (structure.scale, structure.zero) if p is not None
    }
    given = dict(real)
    for node, parameter in parameters.items():
        neutral = 1.0 if parameter is structure.scale else 0.0
        given[node] = torch.full(
            real[node].shape, neutral, dtype=torch.float32, device=real[node].device
        ).to(real[node].dtype)
    (unit,) = evaluate(reduced.nodes, given, [region.output])
    name, codes = _codes(region.oriented(unit), real[reduced.code].dtype, structure)
    grids = _common(structure, {p: real[node] for node, p in parameters.items()}, region.shape)
    bn, bk, scale, zero = grids
    value = region(leaves)
    nearest = ""
    for form in _candidates(region, structure, name, bn, bk, scale, zero):
        rows = min(max(STRIP // bn, 1) * bn, form.n)
        blocks = -(-rows // bn)
        strip = dequantize(form, codes[:rows], _head(scale, blocks), _head(zero, blocks))
        nearest = difference(strip, value[:rows]) or difference(
            dequantize(form, codes, scale, zero), value
        )
        if not nearest:
            return QuantizedWeight(form, codes, scale, zero)
        nearest = f"{form.codes} {form.granularity} {form.arithmetic} in {form.compute}: {nearest}"
    raise Refused(f"the region is not bitwise equal to its nearest format, {nearest}")


def difference(ours: torch.Tensor, region: torch.Tensor) -> str:
    """Empty where the bit patterns are equal, else the first place and both values."""
    if ours.shape != region.shape or ours.dtype != region.dtype:
        return (
            f"the reference is {ours.dtype}{list(ours.shape)}, "
            f"the region {region.dtype}{list(region.shape)}"
        )
    bits = _INTEGER_OF_SIZE[ours.dtype.itemsize]
    other = ours.contiguous().view(bits) != region.contiguous().view(bits)
    count = int(other.sum())
    if not count:
        return ""
    place = [int(i) for i in torch.unravel_index(other.flatten().int().argmax(), other.shape)]
    at = ",".join(map(str, place))
    return (
        f"W[{at}] is {float(ours[tuple(place)])!r} in the reference and "
        f"{float(region[tuple(place)])!r} in the region ({count} of {other.numel()} differ)"
    )


def _codes(
    unit: torch.Tensor, dtype: torch.dtype, structure: Structure
) -> tuple[str, torch.Tensor]:
    """(code type, codes) from W with unit scales."""
    name = str(dtype).removeprefix("torch.")
    if name in FLOAT_CODES:
        return name, unit.to(torch.float32).to(dtype).contiguous()
    whole = unit.to(torch.float32)
    low, high = (float(whole.min()), float(whole.max())) if whole.numel() else (0.0, 0.0)
    if not (-128 <= low and high <= 255 and high - low <= 255) or (whole != whole.round()).any():
        odd = whole[whole != whole.round()]
        raise Refused(
            "codes must be whole numbers of 8 bits; under unit scales W "
            + (f"has {float(odd[0])!r}" if odd.numel() else f"runs from {low:g} to {high:g}")
        )
    for name in ("int4", "uint4") if structure.signed or structure.bits > 4 else ("uint4", "int4"):
        if INT_CODES[name][0] <= low and high <= INT_CODES[name][1]:
            return name, whole.to(torch.int8).contiguous()
    name = "int8" if high <= 127 else "uint8"
    if low < INT_CODES[name][0]:
        raise Refused(f"codes must fit int8 or uint8; they run from {low:g} to {high:g}")
    return name, whole.to(getattr(torch, name)).contiguous()


def _common(
    structure: Structure, values: dict[Parameter, torch.Tensor], shape: tuple[int, int]
) -> tuple[int, int, torch.Tensor | None, torch.Tensor | None]:
    """(bn, bk, scale grid, zero grid) on the finer of the two grids."""
    n, k = shape
    if not values:
        return n, k, None, None
    bn, bk = (min(getattr(p, side) for p in values) for side in ("bn", "bk"))
    grids = {}
    for parameter, value in values.items():
        for ours, theirs, size in ((parameter.bn, bn, n), (parameter.bk, bk, k)):
            if ours % theirs and ours != size:
                raise Refused(f"scale and zero have blocks of {ours} and {theirs} along one axis")
        grid = parameter.gather(value, n)
        rows = torch.arange(-(-n // bn)) * bn // parameter.bn
        columns = torch.arange(-(-k // bk)) * bk // parameter.bk
        grids[parameter] = grid[rows][:, columns].contiguous()
    scale = grids[structure.scale] if structure.scale else None
    return bn, bk, scale, grids[structure.zero] if structure.zero else None


def _candidates(
    region: Region, structure: Structure, codes: str, bn: int, bk: int,
    scale: torch.Tensor | None, zero: torch.Tensor | None,
) -> Iterator[WeightFormat]:  # fmt: skip
    base = WeightFormat(
        codes=codes, n=region.shape[0], k=region.shape[1], bn=bn, bk=bk, arithmetic="q",
        scale=scale.dtype if scale is not None else None,
        zero=zero.dtype if zero is not None else None,
        inner=region.dtype, compute=region.dtype, dtype=region.dtype,
    )  # fmt: skip
    dtypes = structure.dtypes
    # Where z is an integer, q - z is exact in every dtype here, so one is enough.
    inner = dtypes if zero is not None and zero.is_floating_point() else (None,)
    for arithmetic, compute, within in itertools.product(structure.arithmetics, dtypes, inner):
        yield dataclasses.replace(
            base, arithmetic=arithmetic, compute=compute, inner=within or compute
        )


def _head(tensor: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:count]
