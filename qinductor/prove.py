"""Reading a weight off its region, and the proof: the format's reference equals it bit for bit."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from qinductor.contracts import (
    FLOAT_CODES,
    code_range,
    QuantizedWeight,
    WeightFormat,
    dequantize,
    difference,
)
from qinductor.errors import Refused
from qinductor.identify import Parameter, Structure
from qinductor.probe import Reduced
from qinductor.regions import Region, evaluate

STRIP = 64  # rows on which candidates are compared before the winner is proved on the whole


def read(region: Region, structure: Structure, leaves: Sequence[torch.Tensor]) -> QuantizedWeight:
    """The weight that the region makes of these leaves, proved bitwise equal to its format.

    Two whole evaluations: W itself, and W with unit scales, whose values are the codes, unpacked
    and in place. Refused with the nearest format, the first difference and both values.
    """
    reduced = Reduced(region, region.nodes[structure.code])
    real = reduced.real(leaves)
    parameters = {region.nodes[p.at]: p for p in (structure.scale, structure.zero) if p is not None}
    given = dict(real)
    for node, parameter in parameters.items():
        neutral = 1.0 if parameter is structure.scale else 0.0
        given[node] = torch.full(
            real[node].shape, neutral, dtype=torch.float32, device=real[node].device
        ).to(real[node].dtype)
    (unit,) = evaluate(reduced.nodes, given, [region.output])
    name, codes = _codes(region.oriented(unit), real[reduced.code].dtype, structure)
    bn, bk, scale, zero = _common(
        structure, {p: real[node] for node, p in parameters.items()}, region.shape
    )
    value = region(leaves)
    nearest = ""
    for weight in _candidates(region, structure, name, bn, bk, codes, scale, zero):
        nearest = _differs(weight, value)
        if not nearest:
            return weight
    raise Refused(f"the region is not bitwise equal to its nearest format, {nearest}")


def _differs(weight: QuantizedWeight, value: torch.Tensor) -> str:
    """Empty if the reference equals the region, else where it does not; a strip is tried first."""
    form = weight.format
    rows = min(max(STRIP // form.bn, 1) * form.bn, form.n)
    for part in (rows, form.n):
        found = difference(dequantize(weight.rows(0, part)), value[:part])
        if found:
            return f"{form.codes} {form.granularity} {form.arithmetic} in {form.compute}: {found}"
    return ""


def _codes(
    unit: torch.Tensor, dtype: torch.dtype, structure: Structure
) -> tuple[str, torch.Tensor]:
    """(code type, codes) from W with unit scales."""
    name = str(dtype).removeprefix("torch.")
    if name in FLOAT_CODES:
        return name, unit.to(torch.float32).to(dtype).contiguous()
    whole = unit.to(torch.float32)
    if (whole != whole.round()).any():
        odd = whole[whole != whole.round()]
        raise Refused(f"codes must be whole numbers; under unit scales W has {float(odd[0])!r}")
    name = _code_type(whole, structure.signed)
    return name, whole.to(base_storage(name)).contiguous()


def _code_type(codes: torch.Tensor, signed: bool) -> str:
    """The narrowest integer code type that holds these codes; `signed` decides between two."""
    low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
    narrow = ("int4", "uint4") if signed else ("uint4", "int4")
    for name in (*narrow, "int8", "uint8"):
        smallest, largest = code_range(name)
        if smallest <= low and high <= largest:
            return name
    raise Refused(f"codes must fit int8 or uint8; they run from {low} to {high}")


def base_storage(name: str) -> torch.dtype:
    return torch.int8 if name.startswith("int") else torch.uint8


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
    region: Region, structure: Structure, name: str, bn: int, bk: int,
    codes: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
) -> Iterator[QuantizedWeight]:  # fmt: skip
    """Weights to compare with the region; those without a zero first, where it is one number."""
    n, k = region.shape
    base = WeightFormat(
        name, n, k, bn, bk, "q", None if scale is None else scale.dtype, None,
        region.dtype, region.dtype, region.dtype,
    )  # fmt: skip
    if zero is not None and structure.arithmetics[0] != "q*s+z":
        folded = _without_zero(codes, zero, structure.signed)
        if folded is not None:
            arithmetic = {"q-z": "q", "(q-z)/s": "q/s"}.get(structure.arithmetics[0], "q*s")
            form = dataclasses.replace(base, codes=folded[0], arithmetic=arithmetic)
            for compute in structure.dtypes:
                form = dataclasses.replace(form, compute=compute, inner=compute)
                yield QuantizedWeight(form, folded[1], scale, None)
    # Where z is an integer, q - z is exact in every dtype here, so one is enough.
    inner = structure.dtypes if zero is not None and zero.is_floating_point() else (None,)
    for arithmetic, compute, within in itertools.product(
        structure.arithmetics, structure.dtypes, inner
    ):
        form = dataclasses.replace(
            base, arithmetic=arithmetic, compute=compute, inner=within or compute,
            zero=None if zero is None else zero.dtype,
        )  # fmt: skip
        yield QuantizedWeight(form, codes, scale, zero)


def _without_zero(
    codes: torch.Tensor, zero: torch.Tensor, signed: bool
) -> tuple[str, torch.Tensor] | None:
    """(code type, codes with the zero subtracted) where all zeros are one whole number."""
    first = float(zero.flatten()[0]) if zero.numel() else 0.0
    if not first.is_integer() or abs(first) > 255 or bool((zero != zero.flatten()[0]).any()):
        return None
    if codes.dtype.is_floating_point:
        return None
    moved = codes.to(torch.int16) - int(first)
    try:
        name = _code_type(moved, signed or first > 0)
    except Refused:
        return None
    return name, moved.to(base_storage(name))
