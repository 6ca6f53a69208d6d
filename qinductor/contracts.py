"""Contracts: frozen values that say what a subgraph computes; also the report and the compile key.

A contract prints as one line of `field=value` words and `parse` reads that line back, because the
operator in a compiled (and cached) graph carries its contract as a string argument.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Integer code types: name -> (smallest, largest code, bits a packed code takes).
INT_CODES: dict[str, tuple[int, int, int]] = {
    "int4": (-8, 7, 4),
    "uint4": (0, 15, 4),
    "int8": (-128, 127, 8),
    "uint8": (0, 255, 8),
}
FLOAT_CODES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    )
}
# How codes q, scale s and zero z make a weight. The order of operations decides the rounding.
ARITHMETIC = ("q", "q-z", "q*s", "q/s", "(q-z)*s", "(q-z)/s", "q*s-z*s", "q*s+z")

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Hashed:
    """A frozen dataclass that computes its hash once: contracts are looked up at every call."""

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))  # type: ignore

    def __hash__(self) -> int:
        return self._hash


@dataclasses.dataclass(frozen=True)
class WeightFormat(Hashed):
    """A quantised weight W[n, k] = arithmetic(q[n, k], s[n // bn, k // bk], z[n // bn, k // bk]).

    codes       type of q: a key of `INT_CODES` or `FLOAT_CODES`
    n, k        output and input features of the product that W feeds
    bn, bk      elements along n and along k that share one scale; the last block may be ragged
    arithmetic  one of `ARITHMETIC`
    scale, zero dtypes in which s and z are stored; None where the arithmetic has none
    inner       dtype in which q - z is computed
    compute     dtype of every other operation, each rounded in it
    dtype       dtype of W, converted from `compute`
    """

    codes: str
    n: int
    k: int
    bn: int
    bk: int
    arithmetic: str
    scale: torch.dtype | None
    zero: torch.dtype | None
    inner: torch.dtype
    compute: torch.dtype
    dtype: torch.dtype

    @property
    def grid(self) -> tuple[int, int]:
        """Shape of s and of z: the number of blocks along n and along k."""
        return -(-self.n // self.bn), -(-self.k // self.bk)

    @property
    def bits(self) -> int:
        """Bits that one packed code takes."""
        return INT_CODES[self.codes][2] if self.codes in INT_CODES else 8

    @property
    def granularity(self) -> str:
        """The usual name of the block: tensor, channel, group-<bk> or block-<bn>x<bk>."""
        if self.scale is None:
            return "no scale"
        if self.grid == (1, 1):
            return "tensor"
        if self.bn == self.n and self.bk == 1:
            return "input-channel"
        if self.bk == self.k:
            return "channel" if self.bn == 1 else f"block-{self.bn}xK"
        return f"group-{self.bk}" if self.bn == 1 else f"block-{self.bn}x{self.bk}"

    __hash__ = Hashed.__hash__

    def __str__(self) -> str:
        return render(self)


def short(dtype: torch.dtype | None) -> str:
    """`bf16` for torch.bfloat16 and so on; the dtype's own name where no short one is common."""
    name = str(dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}.get(
        name, name
    )


def render(contract: Any, prefix: str = "") -> str:
    """One line of `field=value` words; nested contracts are written with dotted names."""
    words = []
    for field in dataclasses.fields(contract):
        value = getattr(contract, field.name)
        name = prefix + field.name
        if dataclasses.is_dataclass(value):
            words.append(render(value, name + "."))
        elif isinstance(value, torch.dtype):
            words.append(f"{name}={str(value).removeprefix('torch.')}")
        else:
            words.append(f"{name}={value}")
    return " ".join(words)


@functools.cache
def parse(kind: type[T], text: str) -> T:
    """The contract that `render` wrote; ValueError names the word it cannot read."""
    parts = [word.partition("=") for word in text.split(" ")]
    words = {name: value for name, _, value in parts}
    return _build(kind, words, "")


def _build(kind: type[T], words: dict[str, str], prefix: str) -> T:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            values[field.name] = _build(field.type, words, name + ".")  # type: ignore[arg-type]
        elif name not in words:
            raise ValueError(f"a {kind.__name__} needs the field {name!r}, got {sorted(words)}")
        else:
            values[field.name] = _value(field.type, name, words[name])
    return kind(**values)


def _value(kind: Any, name: str, text: str) -> Any:
    if text == "None":
        return None
    if kind is str:
        return text
    if kind is int and text.isdecimal():
        return int(text)
    if kind is bool and text in ("True", "False"):
        return text == "True"
    dtype = getattr(torch, text, None)
    if kind not in (int, bool) and isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"{name}={text} cannot be read as {kind}")


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight that was proved to be what its format says.

    codes        [n, k], one code an element: int8, uint8 or a float8 dtype
    scale, zero  shape `format.grid`, in the dtypes that the format names; or None
    """

    format: WeightFormat
    codes: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None


def dequantize(
    form: WeightFormat,
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
) -> torch.Tensor:
    """W[n, k] in `form.dtype`: the specification of a weight format. The arguments may also be a
    strip of rows that starts at a block border."""
    rows, k = codes.shape
    if k % form.bk == 0:  # whole blocks: broadcast over [rows, blocks, bk]
        w = arithmetic(form, codes.view(rows, -1, form.bk), *(
            None if t is None else by_row(form, t, rows)[:, :, None] for t in (scale, zero)
        ))  # fmt: skip
        return w.view(rows, k)
    return arithmetic(form, codes, *(
        None if t is None else by_row(form, t, rows).repeat_interleave(form.bk, 1)[:, :k]
        for t in (scale, zero)
    ))  # fmt: skip


def by_row(form: WeightFormat, grid: torch.Tensor, rows: int) -> torch.Tensor:
    """A scale or zero grid with each row of blocks repeated for the rows of W it serves."""
    return grid if form.bn == 1 else grid.repeat_interleave(form.bn, 0)[:rows]


def arithmetic(
    form: WeightFormat, q: torch.Tensor, s: torch.Tensor | None, z: torch.Tensor | None
) -> torch.Tensor:
    """What `form.arithmetic` says, on tensors that broadcast; every operation rounds."""
    if z is not None and form.arithmetic.startswith(("(q-z)", "q-z")):
        q = q.to(form.inner) - z.to(form.inner)
    w = q.to(form.compute)
    if s is not None:
        s = s.to(form.compute)
        w = w / s if form.arithmetic.endswith("/s") else w * s
        if z is not None and form.arithmetic.startswith("q*s"):
            z = z.to(form.compute)
            w = w + z if form.arithmetic == "q*s+z" else w - z * s
    return w.to(form.dtype)


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
