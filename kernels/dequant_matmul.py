"""qinductor::dequant_matmul: x times a quantised weight, which is never written out whole.

qinductor::dequant_weight is that weight alone, written out for what needs it whole.

| tensor       | shape              | dtype                                                   |
|--------------|--------------------|---------------------------------------------------------|
| x            | [M, K], M >= 0     | bf16, fp16, fp32                                        |
| codes        | as `packing` says  | integers of 1 to 8 bits, float8, e2m1, from a table     |
| scale, zero  | [N / bn, K / bk]   | as `WeightFormat` says; ragged blocks too               |
| outer        | [N]                | as `WeightFormat` says                                  |
| table        | [2^bits]           | as `WeightFormat` says                                  |
| order        | [K]                | int64; then codes are packed as codes[:, order]         |
| output_scale | [N]                | the dtype of x                                          |
| bias         | [N]                | the dtype of x                                          |
| result       | [M, N], contiguous | the dtype of x                                          |
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from qinductor.contracts import (
    FLOAT_CODES,
    Hashed,
    QuantizedWeight,
    WeightFormat,
    code_range,
    dequantize,
    parse,
    render,
    short,
)
from qinductor.kernels import packing
from qinductor.op import LIBRARY, M, Op, Plan, Route, Spec, Specification, op, single


@dataclasses.dataclass(frozen=True)
class DequantMatmul(Hashed):
    """out[m, n] = x[m, :] . W[n, :] (* output_scale[n]) (+ bias[n]), W as `weight` says.

    x, out        dtypes of the activation and of the result
    output_scale  dtype of a scale that the graph applies to the product, or None
    bias          whether the product itself adds a bias of shape [n]
    experts       number of weights, all of one format, each of which has rows of x of its own; 0
                  for a plain product
    """

    weight: WeightFormat
    x: torch.dtype
    out: torch.dtype
    output_scale: torch.dtype | None
    bias: bool
    experts: int = 0

    __hash__ = Hashed.__hash__

    def __str__(self) -> str:
        return render(self)

    @property
    def summary(self) -> str:
        """The contract as the report prints it, in the field's terms."""
        w = self.weight
        scale = w.scale or self.output_scale
        place = "" if self.output_scale is None else " after the product"
        what = w.granularity if self.output_scale is None else "channel"
        scaled = f" {what} scale {short(scale)}{place}" if scale is not None else " no scale"
        words = [
            f"{short(self.x)} x",
            f"{self.experts} experts of" if self.experts else "",
            f"{w.codes}[{w.n},{w.k}]{scaled}",
            "" if w.zero is None else f"zero {short(w.zero)}",
            "" if w.outer is None else f"row scale {short(w.outer)}",
            "" if w.table is None else f"table {short(w.table)}",
            w.arithmetic,
            "permuted" if w.permuted else "",
            "+bias" if self.bias else "",
        ]
        return " ".join(filter(None, words))


@dataclasses.dataclass(frozen=True, eq=False)
class Operands:
    """What a pattern proved: the weight, and the scale and bias of the product, each [N]."""

    weight: QuantizedWeight
    output_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def reference(contract: DequantMatmul, x: torch.Tensor, operands: Operands) -> torch.Tensor:
    """out[M, N] = x . W^T (* output_scale) (+ bias): each operation rounds as the graph's did."""
    weight = operands.weight
    w = dequantize(weight)
    if operands.output_scale is None:
        return torch.nn.functional.linear(x, w, operands.bias)
    out = torch.nn.functional.linear(x, w) * operands.output_scale
    return out if operands.bias is None else out + operands.bias


def cost(contract: DequantMatmul) -> dict[str, sympy.Expr]:
    """Bytes that must move and floating-point operations, in M: of all experts together, of which
    every weight is read."""
    w = contract.weight
    scales = sum(dtype.itemsize for dtype in (w.scale, w.zero) if dtype is not None)
    weight = w.n * w.k * w.bits // 8 + w.grid[0] * w.grid[1] * scales
    weight += w.n * w.outer.itemsize if w.outer is not None else 0
    weight += (w.table.itemsize << w.bits) if w.table is not None else 0
    weight += w.k * torch.int64.itemsize if w.permuted else 0
    return {
        "bytes": sympy.Integer(weight * max(1, contract.experts))
        + M * (w.k * contract.x.itemsize + w.n * contract.out.itemsize),
        "flops": 2 * M * w.n * w.k,
    }


def alone(contract: DequantMatmul) -> tuple[str, DequantMatmul]:
    """(the operator, the contract) of the weight of a product without the product."""
    w = contract.weight
    return "dequant_weight", DequantMatmul(w, w.dtype, w.dtype, None, False, contract.experts)


DEQUANT_MATMUL = op(Op("dequant_matmul", DequantMatmul, reference, cost, alone))

for schema in (
    "dequant_matmul(Tensor x, Tensor[] packed, str contract, str plan) -> Tensor",
    "dequant_weight(Tensor[] packed, str contract, str[] names) -> Tensor",
):
    LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))


@torch.library.impl(LIBRARY, "dequant_matmul", "CompositeExplicitAutograd")
def dequant_matmul(
    x: torch.Tensor, packed: Sequence[torch.Tensor], contract: str, plan: str
) -> torch.Tensor:
    """x[M, K] times the packed weight: [M, N]. `contract` and `plan` are printed values."""
    form, routes = _prepared(contract, plan)
    m = x.shape[0]
    if m == 0:
        return x.new_empty((0, form.weight.n), dtype=form.out)
    for route in routes:
        if m <= route.limit:
            out: torch.Tensor = route.run(form, x, [packed[i] for i in route.take])
            return out
    raise RuntimeError(f"dequant_matmul: the plan {plan} has no provider for M = {m}")


@functools.cache
def _prepared(contract: str, plan: str) -> tuple[DequantMatmul, tuple[Route, ...]]:
    form = parse(DequantMatmul, contract)
    return form, Plan.parse(plan).routes(DEQUANT_MATMUL, form)


@torch.library.register_fake("qinductor::dequant_matmul", lib=LIBRARY)
def _(x: torch.Tensor, packed: Sequence[torch.Tensor], contract: str, plan: str) -> torch.Tensor:
    form = parse(DequantMatmul, contract)
    return x.new_empty((x.shape[0], form.weight.n), dtype=form.out)


@torch.library.impl(LIBRARY, "dequant_weight", "CompositeExplicitAutograd")
def dequant_weight(
    packed: Sequence[torch.Tensor], contract: str, names: Sequence[str]
) -> torch.Tensor:
    """W[N, K] or, of experts, [E, N, K], of a contract that `alone` made, from the packed tensors
    of a form by their names."""
    one, experts = single(parse(DequantMatmul, contract))
    if not experts:
        (restored,) = DEQUANT_MATMUL.restored(one, dict(zip(names, packed, strict=True)))
        return dequantize(restored.weight).contiguous()
    out = packed[0].new_empty((experts, one.weight.n, one.weight.k), dtype=one.weight.dtype)
    for i in range(experts):
        part = {name: tensor[i] for name, tensor in zip(names, packed, strict=True)}
        out[i] = dequantize(DEQUANT_MATMUL.restored(one, part)[0].weight)
    return out


@torch.library.register_fake("qinductor::dequant_weight", lib=LIBRARY)
def _(packed: Sequence[torch.Tensor], contract: str, names: Sequence[str]) -> torch.Tensor:
    one, experts = single(parse(DequantMatmul, contract))
    shape = one.weight.n, one.weight.k
    return packed[0].new_empty((experts, *shape) if experts else shape, dtype=one.weight.dtype)


INT4_GROUPS = (256, 128, 64, 32)  # the group sizes of torch's int4 kernels, on a CPU and on CUDA


@functools.cache
def int4_group(contract: DequantMatmul) -> int:
    """The group for torch's int4 kernels: the largest that divides a block along K; 0 if none."""
    w = contract.weight
    return next((g for g in INT4_GROUPS if w.k % w.bk == 0 and w.bk % g == 0), 0)


def int4_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales and zeros of 0 as torch's int4 kernels take them, [groups, N, 2], from [N, groups]."""
    scale = scale.t()
    return torch.stack([scale, torch.zeros_like(scale)], -1).contiguous()


def unchanged(contract: DequantMatmul) -> dict[str, Spec]:
    """The tensors that are packed as they are."""
    w = contract.weight
    specs: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {
        "table": ((1 << w.bits,), w.table),
        "order": ((w.k,), torch.int64 if w.permuted else None),
        "output_scale": ((w.n,), contract.output_scale),
        "bias": ((w.n,), contract.x if contract.bias else None),
    }
    return {name: (shape, dtype) for name, (shape, dtype) in specs.items() if dtype is not None}


class Reference(Specification):
    """The specification on the plainly packed weight."""

    def operands(self, contract: DequantMatmul) -> dict[str, Spec]:
        w = contract.weight
        found = dict([packing.operand(w)])
        for name, shape, dtype in (
            ("scale", w.grid, w.scale),
            ("zero", w.grid, w.zero),
            ("outer", (w.n,), w.outer),
        ):
            if dtype is not None:
                found[name] = shape, dtype
        return {**found, **unchanged(contract)}

    def pack(self, contract: DequantMatmul, source: Operands) -> dict[str, torch.Tensor]:
        w = source.weight
        codes = w.codes if w.order is None else w.codes[:, w.order]
        tensors = {
            packing.operand(w.format)[0]: packing.pack(w.format, codes),
            "scale": w.scale,
            "zero": w.zero,
            "outer": w.outer,
            "table": w.table,
            "order": w.order,
            "output_scale": source.output_scale,
            "bias": source.bias,
        }
        return {name: t for name, t in tensors.items() if t is not None}

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return reference(contract, x, self.whole(contract, packed))

    def whole(self, contract: DequantMatmul, packed: Sequence[torch.Tensor]) -> Operands:
        """The proved weight back from its packed tensors."""
        named = dict(zip(self.operands(contract), packed, strict=True))
        codes = packing.unpack(contract.weight, packed[0])
        if (order := named.get("order")) is not None:
            codes = codes[:, order.argsort()]
        parts = (named.get(name) for name in ("scale", "zero", "outer", "table", "order"))
        weight = QuantizedWeight(contract.weight, codes, *parts)
        return Operands(weight, named.get("output_scale"), named.get("bias"))


DEQUANT_MATMUL.register(Reference())


@dataclasses.dataclass(frozen=True)
class Case:
    """One named case for tests and benchmarks: M (of each expert) and contract."""

    name: str
    m: int
    contract: DequantMatmul

    def make(self, seed: int = 0) -> tuple[torch.Tensor, Operands]:
        """(x, operands) with random codes, scales, zeros, table and order; of one expert."""
        g, w, c = torch.Generator().manual_seed(seed), self.contract.weight, self.contract

        def rand(shape: tuple[int, ...], low: float, high: float, dtype: Any) -> Any:
            if dtype is None:
                return None
            if not dtype.is_floating_point:
                return torch.randint(int(low), int(high), shape, generator=g).to(dtype)
            return (torch.rand(shape, generator=g) * (high - low) + low).to(dtype)

        if w.codes in FLOAT_CODES:
            codes = (torch.randn(w.n, w.k, generator=g) * 20).to(w.storage)
        else:
            low, high = code_range(w.codes) or (0, (1 << w.bits) - 1)
            codes = rand((w.n, w.k), low, high + 1, w.storage)
        scale = rand(w.grid, 0.002, 0.022, w.scale)
        whole = w.zero is not None and not w.zero.is_floating_point
        zero = rand(w.grid, *((0, 16) if whole else (6, 10)), w.zero)
        output = rand((w.n,), 0.002, 0.022, c.output_scale)
        bias = rand((w.n,), -0.5, 0.5, c.x if c.bias else None)
        x = torch.randn(self.m, w.k, generator=g).to(c.x)
        outer = rand((w.n,), 0.5, 1.5, w.outer)
        table = rand((1 << w.bits,), -1, 1, w.table)
        order = torch.randperm(w.k, generator=g) if w.permuted else None
        return x, Operands(
            QuantizedWeight(w, codes, scale, zero, outer, table, order), output, bias
        )


def case(
    codes: str, m: int, n: int, k: int, bn: int, bk: int, x: torch.dtype = torch.bfloat16,
    arithmetic: str = "q*s", bias: bool = False, output_scale: bool = False, experts: int = 0,
    **fields: Any,
) -> Case:  # fmt: skip
    """A case whose weight is computed in the dtype of x; `fields` are those of its format."""
    given = {
        "scale": x if "s" in arithmetic else None,
        "table": x if codes.startswith("table") else None,
        **dict.fromkeys(("inner", "compute", "dtype"), x),
        "zero": None,
        **fields,
    }
    form = WeightFormat(codes, n, k, bn, bk, arithmetic, **given)
    contract = DequantMatmul(form, x, x, x if output_scale else None, bias, experts)
    return Case(f"{contract.summary} M={m}", m, contract)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A scale for 16 elements and one for a row, in fp32.
NVFP4: dict[str, Any] = {
    "scale": torch.float8_e4m3fn,
    "outer": FP32,
    "inner": FP32,
    "compute": FP32,
}
CASES = (
    case("int4", 1, 384, 384, 1, 64, bias=True),
    case("int4", 8, 384, 1536, 1, 128),
    case("int4", 100, 384, 384, 1, 32, FP16),
    case("int4", 3, 48, 96, 1, 96, FP32),
    case("int4", 17, 33, 65, 1, 65, bias=True),
    case("uint4", 5, 64, 256, 1, 64),
    case("uint4", 64, 64, 256, 1, 64, arithmetic="(q-z)*s", zero=torch.int8),
    case("uint4", 2, 64, 256, 1, 128, FP16, arithmetic="(q-z)*s", zero=FP16, bias=True),
    case("uint4", 2, 64, 256, 1, 64, arithmetic="q*s+z", zero=BF16),
    case("int8", 1, 256, 512, 1, 512),
    case("int8", 4, 256, 512, 256, 512, bias=True),
    case("int8", 4, 256, 512, 1, 128),
    case("int8", 7, 256, 512, 256, 512, arithmetic="q", output_scale=True),
    case("int8", 40, 256, 512, 256, 512, FP16, arithmetic="q", output_scale=True),
    case("int8", 3, 256, 512, 256, 1, FP32),
    case("uint8", 4, 40, 72, 1, 24, arithmetic="(q-z)*s", zero=torch.int16),
    case("float8_e4m3fn", 4, 200, 300, 128, 128),
    case("float8_e4m3fn", 1, 64, 128, 1, 128, bias=True),
    case("float8_e5m2", 33, 64, 128, 64, 128, FP16, arithmetic="q/s"),
    case("float8_e4m3fn", 9, 64, 128, 1, 32, FP32),
    case("uint1", 6, 64, 128, 1, 32),
    case("int2", 1, 128, 256, 1, 64, bias=True),
    case("int3", 12, 44, 100, 1, 32, FP16),
    case("uint5", 3, 40, 96, 1, 48, arithmetic="(q-z)*s", zero=torch.uint8),
    case("int6", 33, 64, 128, 64, 128, FP32),
    case("uint7", 2, 27, 64, 1, 64),
    case("table4", 5, 96, 256, 1, 64),
    case("table4", 1, 64, 128, 1, 64, table=FP32, scale=FP32, compute=FP32),
    case("table3", 20, 48, 64, 1, 64),
    case("table8", 4, 64, 128, 1, 128, arithmetic="q", bias=True),
    case("float4_e2m1fn", 7, 64, 128, 1, 32),
    case("float4_e2m1fn", 2, 96, 160, 1, 16, arithmetic="q*s*t", bias=True, **NVFP4),
    case("uint4", 9, 64, 256, 1, 64, arithmetic="(q-z)*s", zero=torch.int8, permuted=True),
    case("int4", 40, 64, 256, 1, 64, arithmetic="(q-z)*s*t", zero=torch.int8, outer=BF16),
    case("int8", 3, 40, 100, 1, 32, arithmetic="q/t*s-z*s", zero=BF16, outer=BF16, permuted=True),
)
