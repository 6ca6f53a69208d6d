"""Activation quantisers: codes and scales of y, what the source makes of the inputs.

| tensor   | shape                                          | dtype                               |
|----------|------------------------------------------------|-------------------------------------|
| inputs   | by source: x [..., K] or [..., 2 K]; gate, up  | `x`, rows contiguous                |
|          | [..., K] each; x, residual [..., K]; then      |                                     |
|          | norm weight [K]; then scale [1] if static      |                                     |
| codes    | [..., K], contiguous                           | `codes`                             |
| scale    | [..., K / group]; [1] of a whole tensor        | `scale`; int32: four to a word      |
| zero     | as scale; only if asymmetric                   | `zero`                              |
| sum      | [..., K]; only with a residual                 | `x`                                 |

Every operation rounds as the contract says: the oracle is eager, `round="eager"`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import sympy
import torch

from qinductor.contracts import Hashed, parse, render, short
from qinductor.op import LIBRARY, M, Op, Plan, Route, Spec, Specification, op

FP32 = torch.float32


def _silu(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(FP32)
    return (wide / (torch.exp(-wide) + 1)).to(x.dtype)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(FP32)
    return (wide * 0.5 * (torch.erf(wide * math.sqrt(0.5)) + 1)).to(x.dtype)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(FP32)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return (wide * 0.5 * (torch.tanh(inner) + 1)).to(x.dtype)


# name -> activation of the gate, rounded once to the dtype of the gate; of "x*sigmoid" and "relu2"
# each operation is. The formulas are CUDA's and Inductor's; of those on a CPU, torch's gelu in 16
# bits differs in 1 % of its values and silu in float32 in 4 %.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _silu,
    "x*sigmoid": lambda x: x * torch.sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": lambda x: torch.relu(x).square(),
}
GATES, NORMS = ("", "halves", "swapped", "two"), ("", "rms", "add+rms")
POWERS = ("", "up", "down", "nearest", "log2_up")
QUOTIENTS = ("x/s", "x*(1/s)", "x*(q/a)", "x*s")
LAYOUTS = ("row", "column", "column_padded")


@dataclasses.dataclass(frozen=True)
class Source(Hashed):
    """y[..., k], what is quantised.

    activation  key of `ACTIVATIONS`, or "": y = activation(x), or activation(gate) * up
    gate        "": there is none; "halves": gate and up are halves of one tensor, the gate first;
                "swapped": the gate second; "two": two tensors, gate and up
    limit       clamp: gate <= limit and -limit <= up <= limit; None for no clamp
    inner       dtype that the activation is rounded to before it is multiplied
    norm        "": none; "rms": y = round(x * rsqrt(mean(x^2) + eps)) * weight, up to the rounding
                in float32, then in the dtype of x; "add+rms": of x + residual, which is a result
    eps         of the norm
    y           dtype that y is rounded to before it is quantised
    """

    y: torch.dtype
    activation: str = ""
    gate: str = ""
    limit: float | None = None
    inner: torch.dtype | None = None
    norm: str = ""
    eps: float | None = None

    __hash__ = Hashed.__hash__


@dataclasses.dataclass(frozen=True)
class Quantize(Hashed):
    """codes = round(y / s), s from the largest |y| of each group; or from all y, or given.

    k         columns of y
    x         dtype of the inputs
    codes     float8_e4m3fn, float8_e5m2, int8 or uint8
    group     elements along k that share a scale: k where each row has one; 0: the whole tensor
    scale     dtype of s as stored; uint8: its exponent in float32, with the bias, what follows cut
              off; int32: four of these to a word, the first in the lowest byte, 0 where is no group
    qmax      s = amax / qmax; of an asymmetric one (max(y, 0) - min(y, 0)) / qmax
    static    whether s is given
    compute   dtype of the arithmetic that makes s, each operation rounded in it
    inverse   s is amax * (1 / qmax), multiplied in float32 (as CUDA does for amax / a number)
    blank     amax where it is not above 0 (0, or nan); None: it stays
    least     amax is no smaller than this; None for no bound
    floor     s is no smaller than this, then no larger than `most`; None for no bound
    empty     s where it would be 0; None: it stays 0
    power     "": s as it is; s becomes a power of two: "up" the next one, "down" the one before,
              "nearest"; "log2_up": exp2(ceil(log2(s))), which in float32 leaves an s barely above
              a power where it is
    quotient  "x/s"; "x*(1/s)"; "x*(q/a)", q = qmax and a = amax; "x*s", s is given inverted
    inner     dtype of the quotient and of what follows up to the codes
    guard     where s is 0, or its floor, 1/s is taken as 0: zeros have codes 0, and not nan
    plus      0 is added to the quotient, which makes -0 of a float code 0
    truncate  integers are rounded toward 0, and not to nearest even
    low, high clamp of the quotient; None for no clamp
    zero      dtype of the zero point z, codes = round(y / s) + z; None if symmetric
    layout    strides of s as [M, G], or of its words: "row" (G, 1); "column" (1, M);
              "column_padded" (1, M rounded up to 4)
    """

    k: int
    x: torch.dtype
    source: Source
    codes: torch.dtype
    group: int
    scale: torch.dtype
    qmax: float
    compute: torch.dtype
    inner: torch.dtype
    low: float | None
    high: float | None
    static: bool = False
    inverse: bool = False
    blank: float | None = None
    least: float | None = None
    floor: float | None = None
    most: float | None = None
    empty: float | None = None
    power: str = ""
    quotient: str = "x/s"
    guard: bool = False
    plus: bool = False
    truncate: bool = False
    zero: torch.dtype | None = None
    layout: str = "row"

    __hash__ = Hashed.__hash__

    def __post_init__(self) -> None:
        for name, value, known in (
            ("activation", self.source.activation, ("", *ACTIVATIONS)),
            ("gate", self.source.gate, GATES), ("norm", self.source.norm, NORMS),
            ("power", self.power, POWERS),
            ("quotient", self.quotient, QUOTIENTS),
            ("layout", self.layout, LAYOUTS),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"no {name}: {value!r}; wanted one of {known}")
        if self.group and self.k % self.group:
            raise ValueError(f"k is {self.k}; wanted a multiple of the group, {self.group}")

    def __str__(self) -> str:
        return render(self)

    @property
    def groups(self) -> int:
        """Scales of a row; 1 of a whole tensor."""
        return self.k // self.group if self.group else 1

    @property
    def columns(self) -> int:
        """Elements of a row of the scale as stored: the groups, or their words."""
        return -(-self.groups // 4) if self.scale is torch.int32 else self.groups

    @property
    def granularity(self) -> str:
        """The usual name of the group: tensor, token or group-<size>."""
        return {0: "tensor", self.k: "token"}.get(self.group, f"group-{self.group}")

    @property
    def summary(self) -> str:
        """The contract as the report prints it, in the field's terms."""
        source = self.source
        made = [source.norm, source.activation, "*" if source.gate else "", f"[{self.k}]"]
        words = [
            f"{short(self.x)} {' '.join(filter(None, made))} -> {short(self.codes)}",
            "static" if self.static else "dynamic",
            f"{self.granularity} scale {short(self.scale)}",
            f"power of two {self.power}" if self.power else "",
            f"zero {short(self.zero)}" if self.zero else "",
            "" if self.layout == "row" else self.layout,
        ]
        return " ".join(filter(None, words))

    @property
    def residual(self) -> bool:
        """Whether x + residual is a result."""
        return self.source.norm == "add+rms"


def value(contract: Quantize, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """(y,) or, with a residual, (y, sum): what is quantised."""
    source, (x, *others) = contract.source, inputs
    results: tuple[torch.Tensor, ...] = ()
    if source.norm:
        assert source.eps is not None
        if contract.residual:
            x = x + others.pop(0)
            results = (x,)
        wide = x.to(FP32)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + source.eps)
        x = others[0] * (wide * scale).to(x.dtype)
    if source.gate == "two":
        gate, up = x, others[0]
    elif source.gate:
        gate, up = x.chunk(2, -1)[:: -1 if source.gate == "swapped" else 1]
    else:
        gate, up = x, None
    if source.limit is not None:
        gate = gate.clamp(max=source.limit)
        up = None if up is None else up.clamp(-source.limit, source.limit)
    if source.activation:
        if source.inner != contract.x:  # the activation is computed, and kept, in float32
            gate, up = gate.to(source.inner), up if up is None else up.to(source.inner)
        gate = ACTIVATIONS[source.activation](gate)
    y = gate if up is None else gate * up
    return y.to(source.y), *results


def power_of_two(s: torch.Tensor, how: str) -> torch.Tensor:
    """The power of two that takes the place of a scale s > 0; 0, inf and nan stay."""
    if how == "log2_up":
        return torch.exp2(torch.ceil(torch.log2(s)))
    mantissa, exponent = torch.frexp(s)  # 0.5 <= mantissa < 1
    above = {"up": mantissa > 0.5, "down": mantissa > 1, "nearest": mantissa > math.sqrt(0.5)}[how]
    found = torch.ldexp(torch.ones_like(s), exponent - 1 + above.to(exponent.dtype))
    return torch.where((s == 0) | ~s.isfinite(), s, found)


def _span(y: torch.Tensor) -> torch.Tensor:
    return y.amax(-1).clamp_min(0) - y.amin(-1).clamp_max(0)


def scales(contract: Quantize, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(s, amax) of the last axis of y, in float32 where the contract computes in it."""
    c = contract
    amax = (y.abs().amax(-1) if c.zero is None else _span(y.to(c.compute))).to(c.compute)
    amax = amax if c.blank is None else torch.where(amax > 0, amax, c.blank)
    amax = amax if c.least is None else amax.clamp_min(c.least)
    if c.inverse:
        s = (amax.to(FP32) * torch.tensor(1 / c.qmax, dtype=FP32)).to(c.compute)
    else:  # by a tensor: by a number eager would multiply with 1 / qmax on a GPU
        s = (amax.to(FP32) / torch.full_like(amax, c.qmax, dtype=FP32)).to(c.compute)
    s = s if c.floor is None else s.clamp_min(c.floor)
    s = s if c.most is None else s.clamp_max(c.most)
    s = s if c.empty is None else torch.where(s == 0, c.empty, s)
    return (power_of_two(s, c.power) if c.power else s), amax


def quantised(
    contract: Quantize, y: torch.Tensor, s: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes, zero or None) of y for scales that broadcast with it."""
    c = contract
    wide, s = y.to(c.inner), s.to(c.inner)
    if c.quotient == "x/s":
        v = wide / s
    elif c.quotient == "x*(1/s)":
        inverse = s.reciprocal()
        v = wide * (torch.where(s <= (c.floor or 0), 0, inverse) if c.guard else inverse)
    elif c.quotient == "x*s":
        v = wide * s
    else:
        v = wide * (torch.tensor(c.qmax, dtype=c.inner) / amax.to(c.inner))
    v = v + 0 if c.plus else v
    zero = None
    if c.zero is not None:
        assert c.low is not None and c.high is not None
        low = y.amin(-1, keepdim=True).clamp_max(0).to(c.inner)
        zero = (c.low - torch.round(low / s)).clamp(c.low, c.high)
        v = torch.round(v) + zero
    elif not c.codes.is_floating_point and not c.truncate:
        v = torch.round(v)
    v = v.clamp(c.low, c.high) if c.low is not None else v
    return v.to(c.codes), zero


def stored(contract: Quantize, s: torch.Tensor) -> torch.Tensor:
    """Scales [..., G] in the dtype of the contract, [..., G / 4] where that is of words."""
    if contract.scale not in (torch.uint8, torch.int32):
        return s.to(contract.scale)
    exponents = (s.to(FP32).contiguous().view(torch.int32) >> 23).to(torch.uint8)
    wide = torch.nn.functional.pad(exponents, (0, -s.shape[-1] % 4))
    return exponents if contract.scale is torch.uint8 else wide.view(torch.int32)


def laid_out(contract: Quantize, s: torch.Tensor) -> torch.Tensor:
    """Scales [..., G] in the dtype and the layout of the contract."""
    s = stored(contract, s)
    if contract.layout == "row" or not contract.group:
        return s.contiguous()
    flat = s.reshape(-1, s.shape[-1])
    m, g = flat.shape
    pad = 0 if contract.layout == "column" else -m % 4
    held = flat.new_zeros((g, m + pad)).t()[:m]
    held.copy_(flat)
    return held.unflatten(0, s.shape[:-1]) if s.dim() != 2 else held


def reference(contract: Quantize, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[codes, scale, (zero), (sum)], in plain torch: the specification."""
    c = contract
    y, *results = value(c, inputs[: len(inputs) - c.static])
    grouped = y.unflatten(-1, (-1, c.group)) if c.group else y.reshape(1, -1)
    amax = grouped.new_zeros(())
    if c.static:
        s = inputs[-1].reshape(-1).clone()  # no result may be an input
    else:
        s, amax = scales(c, grouped)
    codes, zero = quantised(c, grouped, s[..., None], amax[..., None])
    found = [codes.reshape(y.shape).contiguous(), laid_out(c, s)]
    if c.zero is not None and zero is not None:
        found.append(zero.squeeze(-1).to(c.zero).contiguous())
    return [*found, *(result.contiguous() for result in results)]


def cost(contract: Quantize) -> dict[str, sympy.Expr]:
    """Bytes that must move and floating-point operations, in M rows of y."""
    c = contract
    read = c.k * c.x.itemsize * (2 if c.source.gate or c.residual else 1)
    write = c.k * c.codes.itemsize + c.columns * c.scale.itemsize
    write += c.k * c.x.itemsize if c.residual else 0
    return {"bytes": M * (read + write), "flops": 8 * M * c.k}


QUANTIZE = op(Op("quantize", Quantize, reference, cost))

LIBRARY.define(
    "quantize(Tensor[] inputs, str contract, str plan) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


@torch.library.impl(LIBRARY, "quantize", "CompositeExplicitAutograd")
def quantize(inputs: Sequence[torch.Tensor], contract: str, plan: str) -> list[torch.Tensor]:
    """[codes, scale, (zero), (sum)] of the inputs; `contract` and `plan` are printed values."""
    form, routes = _prepared(contract, plan)
    rows = math.prod(inputs[0].shape[:-1])
    for route in routes:
        if rows <= route.limit:
            found: list[torch.Tensor] = route.run(form, inputs, ())
            return found
    raise RuntimeError(f"quantize: the plan {plan} has no provider for M = {rows}")


@functools.cache
def _prepared(contract: str, plan: str) -> tuple[Quantize, tuple[Route, ...]]:
    form = parse(Quantize, contract)
    return form, Plan.parse(plan).routes(QUANTIZE, form)


@torch.library.register_fake("qinductor::quantize", lib=LIBRARY)
def _(inputs: Sequence[torch.Tensor], contract: str, plan: str) -> list[torch.Tensor]:
    return results(parse(Quantize, contract), inputs)


def results(contract: Quantize, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Empty tensors for the results, with their strides."""
    c, x = contract, inputs[0]
    lead = x.shape[:-1]
    found = [x.new_empty((*lead, c.k), dtype=c.codes)]
    if not c.group:
        found.append(x.new_empty((1,), dtype=c.scale))
    elif c.layout == "row":
        found.append(x.new_empty((*lead, c.columns), dtype=c.scale))
    else:
        m = math.prod(lead)
        wide = m if c.layout == "column" else (m + 3) // 4 * 4
        held = x.new_empty((c.columns, wide), dtype=c.scale).t().narrow(0, 0, m)
        found.append(held.unflatten(0, lead) if len(lead) != 1 else held)
    if c.zero is not None:
        found.append(torch.empty_like(found[1], dtype=c.zero))
    return [*found, x.new_empty(x.shape)] if c.residual else found


class Reference(Specification):
    """The specification itself."""

    def operands(self, contract: Quantize) -> dict[str, Spec]:
        return {}

    def pack(self, contract: Quantize, source: None) -> dict[str, torch.Tensor]:
        return {}

    def run(
        self, contract: Quantize, inputs: Sequence[torch.Tensor], packed: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        return reference(contract, inputs)


QUANTIZE.register(Reference())
