"""Products of quantised activations and quantised weights: codes times codes.

| tensor | shape                                               | dtype                             |
|--------|-----------------------------------------------------|-----------------------------------|
| a      | [M, K], rows contiguous                             | float8_e4m3fn, float8_e5m2, int8, |
|        |                                                     | uint8                             |
| scale  | [M, K / group], any strides; [1] of a whole tensor  | `scale`                           |
| zero   | as scale, or [1]; only if a has zero points         | `zero`                            |
| packed | by provider; `operands` has the plain form          |                                   |
| result | [M, N], contiguous                                  | `out`                             |
"""

import dataclasses
import functools
from collections.abc import Sequence

import sympy
import torch

from qinductor.contracts import Hashed, QuantizedWeight, WeightFormat, parse, render, short
from qinductor.kernels import fallback, packing
from qinductor.op import LIBRARY, M, Op, Plan, Route, Spec, Specification, op

FP32, FP64 = torch.float32, torch.float64


@dataclasses.dataclass(frozen=True)
class ScaledMatmul(Hashed):
    """out[m, n] = sum_k (a[m, k] - z) sa[m, k // group] q[n, k] s[n // bn, k // bk] (+ bias[n]).

    Sums of a block are exact for int8, in float32 for float8; one rounding, to `out`.

    weight  codes int8, float8 or int4; arithmetic "q" or "q*s"; `dtype`, `compute` float32
    a       dtype of the activation's codes
    group   elements along k that share a scale of a: k where each row has one; 0: the whole tensor
    scale   dtype of sa
    out     dtype of the result
    bias    dtype of bias[n], added in float32; None: there is none
    fast    whether tensor cores may sum float8 products with the fewer bits that they keep by
            themselves (`use_fast_accum`)
    fused   whether the product with sa and the sum with the bias are one operation, rounded once:
            then K is one block
    zero    dtype of z[m, k // group], the zero points of a, whole numbers; None: there are none
    experts number of weights, all of one format, each of which has rows of a of its own; 0: there
            is one weight, and no such axis
    powers  whether all scales are known to be powers of two, W's such that its codes times them are
            exact in bf16
    """

    weight: WeightFormat
    a: torch.dtype
    group: int
    scale: torch.dtype
    out: torch.dtype
    bias: torch.dtype | None = None
    fast: bool = False
    fused: bool = False
    zero: torch.dtype | None = None
    experts: int = 0
    powers: bool = False

    __hash__ = Hashed.__hash__

    def __str__(self) -> str:
        return render(self)

    @property
    def granularity(self) -> str:
        """The usual name of the activation's group: tensor, token or group-<size>."""
        return {0: "tensor", self.weight.k: "token"}.get(self.group, f"group-{self.group}")

    @property
    def summary(self) -> str:
        """The contract as the report prints it, in the field's terms."""
        w = self.weight
        words = [
            f"{self.experts} experts of" if self.experts else "",
            f"{short(self.a)} {self.granularity} scale {short(self.scale)}",
            f"zero {short(self.zero)} x" if self.zero is not None else "x",
            f"{w.codes}[{w.n},{w.k}] {w.granularity}",
            f"scale {short(w.scale)}" if w.scale is not None else "",
            f"-> {short(self.out)}",
            "" if self.bias is None else "+bias, fused" if self.fused else "+bias",
            "fast sums" if self.fast else "",
            "powers of two" if self.powers else "",
        ]
        return " ".join(filter(None, words))


@dataclasses.dataclass(frozen=True, eq=False)
class Operands:
    """What a pattern proved: the weight and the bias [N]."""

    weight: QuantizedWeight
    bias: torch.Tensor | None = None


def reference(
    contract: ScaledMatmul,
    a: torch.Tensor,
    scale: torch.Tensor,
    operands: Operands,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[M, N], in plain torch: the specification. Each block of k that has one scale on either
    side is summed on its own, exactly; the scaled sums are added in float32."""
    c, w = contract, contract.weight
    q, s = operands.weight.codes, operands.weight.scale
    step, wide = step_of(c), FP64 if c.fused else FP32
    sa = scale.to(wide).reshape(-1, 1) if not c.group else scale.to(wide)
    z = a.new_zeros((), dtype=FP64) if zero is None else zero.to(FP64)
    z = z if c.group and zero is not None else z.reshape(1, 1).expand_as(sa)
    sw = None if s is None else s.to(FP32).repeat_interleave(w.bn, 0)[: w.n]
    out = a.new_zeros((a.shape[0], w.n), dtype=wide)
    for start in range(0, w.k, step):
        columns = slice(start, min(start + step, w.k))
        x = a[:, columns].to(FP64) - z[:, start // (c.group or w.k), None]
        part = (x @ q[:, columns].to(FP64).t()).to(FP32)
        part = part if sw is None else part * sw[:, start // w.bk]
        out = out + part.to(wide) * sa[:, start // (c.group or w.k), None]
    return (out if operands.bias is None else out + operands.bias.to(wide)).to(FP32).to(c.out)


def step_of(contract: ScaledMatmul) -> int:
    """Columns that share a scale on either side."""
    w = contract.weight
    return min(w.k if w.scale is None else w.bk, contract.group or w.k)


def powers_of_two(scale: torch.Tensor | None) -> bool:
    """Whether W's scales are powers of two, from 2^-100 to 2^100: a float8 code times one is exact
    in bf16."""
    if scale is None:
        return True
    mantissa, exponent = scale.to(FP32).frexp()  # of a power of two 0.5, and one more
    return bool(((mantissa == 0.5) & (exponent > -100) & (exponent < 102)).all())


def longest(contract: ScaledMatmul) -> int:
    """The largest K of which sums of 8-bit integers are int32: of products of magnitude 128 * 128,
    or 255 * 128 where zero points are subtracted."""
    return 131071 if contract.zero is None else 65793


def cost(contract: ScaledMatmul) -> dict[str, sympy.Expr]:
    """Bytes that must move and operations, in M: of all experts together, of which every weight is
    read."""
    c, w = contract, contract.weight
    weight = w.n * w.k * w.bits // 8 + w.grid[0] * w.grid[1] * (w.scale.itemsize if w.scale else 0)
    row = w.k * c.a.itemsize + w.n * c.out.itemsize
    entry = c.scale.itemsize + (0 if c.zero is None else c.zero.itemsize)
    row += (w.k // c.group if c.group else 0) * entry
    weight *= max(1, c.experts)
    return {"bytes": sympy.Integer(weight) + M * row, "flops": 2 * M * w.n * w.k}


SCALED_MATMUL = op(Op("scaled_matmul", ScaledMatmul, reference, cost))

TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    "scaled_matmul(Tensor a, Tensor scale, Tensor[] packed, str contract, str plan) -> Tensor",
    tags=TAGS,
)
LIBRARY.define(
    "scaled_matmul_zero(Tensor a, Tensor scale, Tensor zero, Tensor[] packed, str contract, "
    "str plan) -> Tensor",
    tags=TAGS,
)


@torch.library.impl(LIBRARY, "scaled_matmul", "CompositeExplicitAutograd")
def scaled_matmul(
    a: torch.Tensor,
    scale: torch.Tensor,
    packed: Sequence[torch.Tensor],
    contract: str,
    plan: str,
) -> torch.Tensor:
    """a[M, K] times the packed weight: [M, N]. `contract` and `plan` are printed values."""
    return _product((a, scale), packed, contract, plan)


@torch.library.impl(LIBRARY, "scaled_matmul_zero", "CompositeExplicitAutograd")
def scaled_matmul_zero(
    a: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    packed: Sequence[torch.Tensor],
    contract: str,
    plan: str,
) -> torch.Tensor:
    """The same where a has zero points."""
    return _product((a, scale, zero), packed, contract, plan)


def _product(
    given: Sequence[torch.Tensor], packed: Sequence[torch.Tensor], contract: str, plan: str
) -> torch.Tensor:
    form, routes = _prepared(contract, plan)
    m = given[0].shape[0]
    if (form.zero is not None) != (len(given) == 3):
        raise ValueError(f"scaled_matmul: {form.summary}, and {len(given) - 2} zero points")
    given = [*given[:2], *(zero.expand_as(given[1]) for zero in given[2:])]
    if m == 0:
        return given[0].new_empty((0, form.weight.n), dtype=form.out)
    for route in routes:
        if m <= route.limit:
            return fallback.run(SCALED_MATMUL, route, form, given, [packed[i] for i in route.take])
    raise RuntimeError(f"scaled_matmul: the plan {plan} has no provider for M = {m}")


@functools.cache
def _prepared(contract: str, plan: str) -> tuple[ScaledMatmul, tuple[Route, ...]]:
    form = parse(ScaledMatmul, contract)
    return form, Plan.parse(plan).routes(SCALED_MATMUL, form)


@torch.library.register_fake("qinductor::scaled_matmul", lib=LIBRARY)
def _(
    a: torch.Tensor,
    scale: torch.Tensor,
    packed: Sequence[torch.Tensor],
    contract: str,
    plan: str,
) -> torch.Tensor:
    return _like(a, contract)


@torch.library.register_fake("qinductor::scaled_matmul_zero", lib=LIBRARY)
def _(
    a: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    packed: Sequence[torch.Tensor],
    contract: str,
    plan: str,
) -> torch.Tensor:
    return _like(a, contract)


def _like(a: torch.Tensor, contract: str) -> torch.Tensor:
    """A fake result for a[M, K]."""
    form = parse(ScaledMatmul, contract)
    return a.new_empty((a.shape[0], form.weight.n), dtype=form.out)


class Reference(Specification):
    """The specification itself."""

    def operands(self, contract: ScaledMatmul) -> dict[str, Spec]:
        return operands(contract)

    def pack(self, contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
        return pack(contract, source)

    def run(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        a, scale, *zero = inputs
        return reference(contract, a, scale, self.whole(contract, packed), *zero)

    def whole(self, contract: ScaledMatmul, packed: Sequence[torch.Tensor]) -> Operands:
        """The proved weight back from its packed tensors."""
        named = dict(zip(self.operands(contract), packed, strict=True))
        codes = packing.unpack(contract.weight, packed[0])
        return Operands(
            QuantizedWeight(contract.weight, codes, named.get("scale")), named.get("bias")
        )


def operands(contract: ScaledMatmul) -> dict[str, Spec]:
    """The weight as it is: 8-bit codes [N, K], fewer bits as `packing` packs them; its scales."""
    w = contract.weight
    found = dict([packing.operand(w)])
    if w.scale is not None:
        found["scale"] = w.grid, w.scale
    if contract.bias is not None:
        found["bias"] = (w.n,), contract.bias
    return found


def code_sums(contract: ScaledMatmul, codes: torch.Tensor, step: int) -> torch.Tensor:
    """int32[N, ceil(K / step)]: codes [N, K] added up, by which zero points are subtracted."""
    k = contract.weight.k
    wide = torch.nn.functional.pad(codes.to(torch.int32), (0, -k % step))
    return wide.view(len(wide), -1, step).sum(-1, dtype=torch.int32)


def pack(contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
    """The packed tensors of `operands`."""
    w = source.weight
    tensors = {
        packing.operand(w.format)[0]: packing.pack(w.format, w.codes),
        "scale": w.scale,
        "bias": source.bias,
    }
    return {name: t.contiguous() for name, t in tensors.items() if t is not None}


SCALED_MATMUL.register(Reference())
