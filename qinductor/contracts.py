"""Contracts: frozen values that say what a subgraph computes; also the report and the compile key.

A contract prints as one line of `field=value` words and `parse` reads that line back, because the
operator in a compiled (and cached) graph carries its contract as a string argument.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")

FLOAT_CODES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    )
}
# Codebooks with a name of their own: the value of each code.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODEBOOKS = {"float4_e2m1fn": (*_E2M1, *(-value for value in _E2M1))}
_INTEGER_CODES = re.compile(r"(u?int)([1-8])")
_TABLE_CODES = re.compile(r"table([1-8])")
# How codes q, scales s and t and zero z make a weight; the order decides the rounding.
_ARITHMETIC = re.compile(r"(\(q-z\)|q-z$|q)((?:[*/]s)?(?:[*/]t)?|[*/]t[*/]s)(\+z|-z\*s)?")

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
    """A quantised weight W[n, k] = arithmetic(q[n, k], s[n // bn, j], z[n // bn, j], t[n]).

    j = k // bk, or position[k] // bk where columns are permuted (act-order).

    codes       type of q: "int1" to "int8", "uint1" to "uint8", a key of `FLOAT_CODES`, a key of
                `CODEBOOKS`, or "table1" to "table8": q is an entry of a table of 2^bits values
    n, k        output and input features of the product that W feeds
    bn, bk      elements along n and along k that share one scale; the last block may be ragged
    arithmetic  q, q-z or (q-z), then *s or /s, *t or /t in the order they are applied, then +z or
                -z*s; such as "(q-z)*s" or "q*s/t"
    scale, zero dtypes in which s and z are stored; None where the arithmetic has none
    inner       dtype in which q - z is computed
    compute     dtype of every other operation, each rounded in it
    dtype       dtype of W, converted from `compute`
    outer       dtype of t, a second scale, one for each row; None where there is none
    table       dtype of the table's entries; None where q is no entry of a table
    permuted    whether blocks along k hold columns in another order than W's (act-order)
    Errors: ValueError for codes or an arithmetic that do not exist.
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
    outer: torch.dtype | None = None
    table: torch.dtype | None = None
    permuted: bool = False

    def __post_init__(self) -> None:
        if _ARITHMETIC.fullmatch(self.arithmetic) is None:
            raise ValueError(f"no arithmetic: {self.arithmetic!r}; wanted such as '(q-z)*s/t'")
        named = self.codes in FLOAT_CODES or self.codes in CODEBOOKS
        if not named and not any(p.fullmatch(self.codes) for p in (_INTEGER_CODES, _TABLE_CODES)):
            raise ValueError(f"no code type: {self.codes!r}")

    @property
    def grid(self) -> tuple[int, int]:
        """Shape of s and of z: the number of blocks along n and along k."""
        return -(-self.n // self.bn), -(-self.k // self.bk)

    @property
    def bits(self) -> int:
        """Bits that one packed code takes."""
        if self.codes in CODEBOOKS:
            return (len(CODEBOOKS[self.codes]) - 1).bit_length()
        return 8 if self.codes in FLOAT_CODES else int(self.codes[-1])

    @property
    def storage(self) -> torch.dtype:
        """dtype that holds one code an element: int8 for signed integers, else uint8 or float8."""
        if self.codes in FLOAT_CODES:
            return FLOAT_CODES[self.codes]
        return torch.int8 if self.codes.startswith("int") else torch.uint8

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


def code_range(codes: str) -> tuple[int, int] | None:
    """(smallest, largest code) of an integer code type; None for floats and codebooks."""
    match = _INTEGER_CODES.fullmatch(codes)
    if match is None:
        return None
    bits = int(match[2])
    return (0, (1 << bits) - 1) if match[1] == "uint" else (-1 << bits - 1, (1 << bits - 1) - 1)


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
        if value == field.default:  # `parse` knows it
            continue
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
        elif name not in words and field.default is not dataclasses.MISSING:
            values[field.name] = field.default
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
    if kind in (float, float | None):
        return float(text)
    if kind is bool and text in ("True", "False"):
        return text == "True"
    dtype = getattr(torch, text, None)
    if kind not in (int, bool) and isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"{name}={text} cannot be read as {kind}")


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight that was proved to be what its format says.

    codes        [n, k], one code an element, in `format.storage`
    scale, zero  shape `format.grid`, in the dtypes that the format names; or None
    outer        [n], the second scale; or None
    table        [2^bits], the value of each code; or None
    order        int64[k]; j -> the column of W that stands at position j, blocks are of positions;
                 or None where columns are not permuted
    """

    format: WeightFormat
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    outer: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def rows(self, start: int, count: int) -> "QuantizedWeight":
        """These rows alone; they start at the border of a block, or lie in one."""
        form, blocks = self.format, slice(start // self.format.bn, None)
        count = min(count, form.n - start)
        grids = [
            t if t is None else t[blocks][: -(-count // form.bn)] for t in (self.scale, self.zero)
        ]
        return dataclasses.replace(
            self,
            format=dataclasses.replace(form, n=count, bn=min(form.bn, count)),
            codes=self.codes[start : start + count],
            scale=grids[0],
            zero=grids[1],
            outer=None if self.outer is None else self.outer[start : start + count],
        )


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """W[n, k] in `format.dtype`: the specification of a weight format."""
    form, codes = weight.format, weight.codes
    if weight.order is not None:
        codes = codes[:, weight.order]
    q = decoded(form, codes, weight.table)
    named = {"s": weight.scale, "z": weight.zero}
    values = {
        name: by_row(form, grid, form.n).repeat_interleave(form.bk, 1)[:, : form.k]
        for name, grid in named.items()
        if grid is not None
    }
    if weight.outer is not None:
        values["t"] = weight.outer[:, None]
    w = arithmetic(form, q, values)
    return w if weight.order is None else w[:, weight.order.argsort()]


def decoded(form: WeightFormat, codes: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """The values of codes; integers and float8 are their own."""
    if form.codes in CODEBOOKS:
        table = codebook(form.codes, codes.device)
    return codes if table is None else looked_up(table, codes)


def looked_up(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """table[places]: 6.7 ns an element, where the brackets take 28 (one thread of a Xeon, torch
    2.13, other work on the machine)."""
    return table.index_select(0, places.flatten().int()).view(places.shape)


@functools.cache  # or it would be copied from the host while a CUDA graph is captured
def codebook(name: str, device: torch.device) -> torch.Tensor:
    """The values of a named codebook's codes, float32."""
    return torch.tensor(CODEBOOKS[name], device=device)


def by_row(form: WeightFormat, grid: torch.Tensor, rows: int) -> torch.Tensor:
    """A scale or zero grid with each row of blocks repeated for the rows of W it serves."""
    return grid if form.bn == 1 else grid.repeat_interleave(form.bn, 0)[:rows]


def arithmetic(
    form: WeightFormat, q: torch.Tensor, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """What `form.arithmetic` says, on tensors s, z and t that broadcast; every operation rounds."""
    match = _ARITHMETIC.fullmatch(form.arithmetic)
    assert match is not None  # the format checked it
    head, scales, tail = match.groups()
    if head != "q":
        q = q.to(form.inner) - values["z"].to(form.inner)
    w = q.to(form.compute)
    for step, name in zip(scales[::2], scales[1::2], strict=True):
        value = values[name].to(form.compute)
        w = w / value if step == "/" else w * value
    if tail == "+z":
        w = w + values["z"].to(form.compute)
    elif tail:
        w = w - values["z"].to(form.compute) * values["s"].to(form.compute)
    return w.to(form.dtype)


def difference(ours: torch.Tensor, region: torch.Tensor) -> str:
    """Empty where the bit patterns are equal, else the first place and both values."""
    if ours.shape != region.shape or ours.dtype != region.dtype:
        return (
            f"the reference is {ours.dtype}{list(ours.shape)}, "
            f"the region {region.dtype}{list(region.shape)}"
        )
    bits = _INTEGER_OF_SIZE[ours.dtype.itemsize]
    ours_bits, region_bits = (t.contiguous().view(bits) for t in (ours, region))
    if torch.equal(ours_bits, region_bits):
        return ""
    other = ours_bits != region_bits
    count = int(other.sum())
    place = [int(i) for i in torch.unravel_index(other.flatten().int().argmax(), other.shape)]
    at = ",".join(map(str, place))
    return (
        f"W[{at}] is {float(ours[tuple(place)])!r} in the reference and "
        f"{float(region[tuple(place)])!r} in the region ({count} of {other.numel()} differ)"
    )
