"""What the Triton family of dequant_matmul takes, how it packs that, and a kernel's constants."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from qinductor.contracts import (
    FLOAT_CODES,
    Hashed,
    WeightFormat,
    by_row,
    code_range,
    short,
)
from qinductor.errors import Refused
from qinductor.kernels import fragments, packing
from qinductor.kernels.dequant_matmul import DequantMatmul, Operands, unchanged
from qinductor.kernels.triton_device import has_triton
from qinductor.op import Spec

NARROW = (torch.bfloat16, torch.float16)
COMPUTED = (*NARROW, torch.float32)
# exponent bias of a float code, and which floats' bits it has
FLOATS = {
    "float4_e2m1fn": (1, "e2m1"),
    "float8_e4m3fn": (7, "e4m3"),
    "float8_e4m3fnuz": (8, "e4m3"),
    "float8_e5m2": (15, "e5m2"),
    "float8_e5m2fnuz": (16, "e5m2"),
}


@dataclasses.dataclass(frozen=True)
class Form(Hashed):
    """What is constant in a kernel for a weight format; dtypes are Triton's.

    w0, w1, w2     widths of the fields of a code, 0 for none
    kind           how a code becomes a number, and `factor`, `addend`: `_value` in the device code
    number         dtype of that number, exact in it
    head ... tail  the arithmetic: "q-z" or "", then one step each, such as "*s"
    inner          dtype of q - z; `scales`, `zeros` those in which scales and zeros are packed
    late           whether the sums of a group are scaled, W is not
    scale, zero, outer   whether there are such
    entries        of the table of each expert
    group          columns that share a scale, a power of two; 0 where a whole row does
    """

    w0: int
    w1: int
    w2: int
    kind: str
    factor: float
    addend: float
    number: Any
    head: str
    step1: str
    step2: str
    tail: str
    inner: Any
    compute: Any
    scales: Any
    zeros: Any
    scale: bool
    zero: bool
    outer: bool
    entries: int
    group: int
    x: Any
    output_scale: bool
    bias: bool
    late: bool

    __hash__ = Hashed.__hash__  # it is hashed at every launch


@functools.cache
def widths(form: WeightFormat) -> tuple[int, ...]:
    """Widths of the fields that a code is packed in, from its highest bits down."""
    return (8,) if form.bits == 8 else tuple(width for width, _, _ in packing.fields(form.bits))


@functools.cache
def group(form: WeightFormat) -> int:
    """Columns that share a packed scale: the largest power of two in bk; 0 where a row shares."""
    return 0 if form.grid[1] == 1 else form.bk & -form.bk


def magic(contract: DequantMatmul) -> int:
    """What a code is added to while it becomes a float; 0 where its bits do not fit beside that."""
    form = contract.weight
    if code_range(form.codes) is None:
        return 0
    return 1024 if contract.x is torch.float16 else 128 if form.bits < 8 else 0


def offset(contract: DequantMatmul) -> int:
    """What the kernel's number of an integer code is too large by, before any addend."""
    low, _ = code_range(contract.weight.codes) or (0, 0)
    return magic(contract) - low


def _steps(form: WeightFormat) -> tuple[str, ...]:
    """The arithmetic as (head, first scale, second scale, tail), "" for what it has not."""
    match = re.fullmatch(r"(\(q-z\)|q-z$|q)([*/][st])?([*/][st])?(\+z|-z\*s)?", form.arithmetic)
    assert match is not None  # the format checked it
    return tuple(part or "" for part in match.groups())


def centred(form: WeightFormat) -> bool:
    """Whether the arithmetic begins with q - z."""
    return _steps(form)[0] != "q"


def whole_zero(form: WeightFormat) -> bool:
    """Whether q - z is a difference of integers, exact where the kernel computes it."""
    return code_range(form.codes) is not None and centred(form) and not _floats(form.zero)


def _floats(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point


def zeros(contract: DequantMatmul) -> torch.dtype:
    """dtype in which zeros are packed."""
    form = contract.weight
    if whole_zero(form):
        return contract.x
    return form.inner if centred(form) else form.compute


def may_be_late(contract: DequantMatmul, columns: int) -> bool:
    """Whether so many columns of W share one scale, which may multiply their sums instead: W is
    not rounded then, and q itself is a number of x's dtype that no product of it overflows."""
    w = contract.weight
    alone = _steps(w)[1:] == ("*s", "", "") and contract.x is torch.bfloat16
    exact = w.table in (None, contract.x) and not (centred(w) and not whole_zero(w))
    return alone and exact and (not group(w) or group(w) % columns == 0)


@functools.cache
def device_form(contract: DequantMatmul, late: bool = False) -> Form:
    """The constants of the kernels for this contract; `late`, as `may_be_late` allows."""
    import triton.language as tl

    named = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    w = contract.weight
    _, step1, step2, tail = _steps(w)
    kind, factor, addend, value = "byte", 1.0, 0.0, contract.x
    if w.codes in FLOATS:
        bias, kind = FLOATS[w.codes]
        factor = 2.0 ** ((127 if contract.x is torch.bfloat16 else 15) - bias)
    elif w.table is not None:
        kind, value = "table", w.table
    else:
        kind = "magic" if magic(contract) else "byte"
        addend = 0.0 if whole_zero(w) else -float(offset(contract))
    w0, w1, w2 = (*widths(w), 0, 0)[:3]
    scales, compute = named[w.compute], named[contract.x if late else w.compute]
    step1 = "" if late else step1
    return Form(
        w0, w1, w2, kind, factor, addend, named[value],
        "q-z" if centred(w) else "", step1, step2, tail,
        named[zeros(contract) if centred(w) else w.compute], compute, scales,
        named[zeros(contract)], w.scale is not None, w.zero is not None, w.outer is not None,
        1 << w.bits, group(w), named[contract.x], contract.output_scale is not None, contract.bias,
        late,
    )  # fmt: skip


class Packed:
    """What the providers share: the contracts that they take, and W's codes in fragments."""

    dense = False
    reference = False

    def runs_on(self, target: str) -> bool:
        return target.startswith("sm_") and int(target[3:]) >= 80  # tensor cores with bf16

    def missing(self) -> str | None:
        return None if has_triton() else "Triton is not installed"

    def why_not(self, contract: DequantMatmul) -> str | None:
        w = contract.weight
        if contract.x not in NARROW:
            return f"x is {short(contract.x)}; it takes bf16 and fp16 (tensor cores would round it)"
        if {contract.out, w.dtype} != {contract.x}:
            return (
                f"x is {short(contract.x)}, W {short(w.dtype)}, the result "
                f"{short(contract.out)}; it takes one dtype"
            )
        if not w.n * w.k:
            return f"W is {w.n}x{w.k}; it takes no empty one"
        if w.compute not in COMPUTED or _floats(w.inner) and w.inner not in COMPUTED:
            return f"W is computed in {short(w.inner)} and {short(w.compute)}; it takes up to fp32"
        if w.table is not None and w.table not in COMPUTED:
            return f"the table is {short(w.table)}; it takes bf16, fp16 and fp32"
        if _floats(w.zero) and not _floats(w.inner):
            return f"a zero {short(w.zero)} is rounded to {short(w.inner)}; it takes integer zeros"
        if centred(w) and code_range(w.codes) is None and not _floats(w.inner):
            return f"{w.codes} less a zero in {short(w.inner)}; it takes integer codes"
        if 0 < group(w) < 16:
            return f"{w.bk} columns share a scale; it takes multiples of 16, or whole rows"
        return None

    def operands(self, contract: DequantMatmul) -> dict[str, Spec]:
        w = contract.weight
        n, k = fragments.padded(w.n, w.k, widths(w))
        groups = -(-k // group(w)) if group(w) else 1
        found: dict[str, Spec] = {
            f"fragments{width}": (fragments.words_shape(n, k, width), torch.int16)
            for width in widths(w)
        }
        if w.scale is not None:
            found["fragments_scale"] = fragments.grid_spec(n, groups, w.compute)
        if w.zero is not None:
            found["fragments_zero"] = fragments.grid_spec(n, groups, zeros(contract))
        if w.outer is not None:
            found["fragments_outer"] = (n,), w.compute
        return {**found, **unchanged(contract)}

    def pack(self, contract: DequantMatmul, source: Operands) -> dict[str, torch.Tensor]:
        w, form = source.weight, contract.weight
        n, k = fragments.padded(form.n, form.k, widths(form))
        _check_codes(contract, source)
        codes = w.codes if w.order is None else w.codes[:, w.order]
        low, _ = code_range(form.codes) or (0, 0)
        codes = codes.view(torch.uint8) if form.codes in FLOAT_CODES else codes
        codes = (codes - low).to(torch.uint8) if low else codes.to(torch.uint8)
        # Columns past K repeat the last one, which is finite where a result is: x is 0 there.
        codes = torch.cat([codes, codes[:, -1:].expand(-1, k - form.k)], 1)
        codes = pad(codes, (0, 0, 0, n - form.n))
        place, tensors = form.bits, {}
        for width in widths(form):
            place -= width
            field = codes >> place & (1 << width) - 1
            tensors[f"fragments{width}"] = fragments.words(field, width)
        if w.scale is not None:
            tensors["fragments_scale"] = self._grid(form, w.scale.to(form.compute), n, k)
        if w.zero is not None:
            zero = w.zero
            if whole_zero(form):
                zero = zero.to(torch.int32) + offset(contract)
            tensors["fragments_zero"] = self._grid(form, zero.to(zeros(contract)), n, k)
        if w.outer is not None:
            tensors["fragments_outer"] = pad(w.outer.to(form.compute), (0, n - form.n), value=1.0)
        for name, tensor in (
            ("table", w.table),
            ("order", w.order),
            ("output_scale", source.output_scale),
            ("bias", source.bias),
        ):
            if tensor is not None:
                tensors[name] = tensor.contiguous()
        return tensors

    def _named(
        self, contract: DequantMatmul, packed: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return dict(zip(_names(self, contract), packed, strict=True))

    def _grid(self, form: WeightFormat, values: torch.Tensor, n: int, k: int) -> torch.Tensor:
        """A grid of blocks as `fragments.grid`, with a value for each row and group of columns."""
        values = by_row(form, values, form.n)
        if group(form):
            starts = torch.arange(0, k, group(form), device=values.device)
            values = values[:, (starts // form.bk).clamp(max=values.shape[1] - 1)]
        rows = torch.arange(n, device=values.device).clamp(max=form.n - 1)
        return fragments.grid(values[rows])


@functools.cache
def _names(provider: Packed, contract: DequantMatmul) -> tuple[str, ...]:
    return tuple(provider.operands(contract))


def _check_codes(contract: DequantMatmul, source: Operands) -> None:
    """Refused for values that the kernels do not compute as the reference does."""
    w, form = source.weight, contract.weight
    if form.codes in FLOAT_CODES and not bool(w.codes.float().isfinite().all()):
        raise Refused("a code is no finite number, which the kernel would take for one")
    if not whole_zero(form) or w.zero is None or not w.zero.numel():
        return
    exact = 256 if contract.x is torch.bfloat16 else 2048
    low, high = (int(v) + offset(contract) for v in (w.zero.min(), w.zero.max()))
    if low < -exact or high > exact:
        least, most = (sign * exact - offset(contract) for sign in (-1, 1))
        raise Refused(
            f"zeros must be from {least} to {most}; they are {w.zero.min()} to {w.zero.max()}"
        )
    least = int(w.codes.min()) - int(w.zero.max())
    most = int(w.codes.max()) - int(w.zero.min())
    if _floats(form.inner):
        bound = {torch.bfloat16: 256, torch.float16: 2048}.get(form.inner, 1 << 24)
        lowest, highest = -bound, bound
    else:
        lowest, highest = torch.iinfo(form.inner).min, torch.iinfo(form.inner).max
    fits = max(lowest, -exact) <= least and most <= min(highest, exact)
    if not fits:
        raise Refused(f"q - z must be exact in {short(form.inner)}; it spans {least} to {most}")
