"""Cases of scaled_matmul: for tests, the tuner and benchmarks."""

import dataclasses
from typing import Any

import torch

from qinductor.contracts import FLOAT_CODES, QuantizedWeight, WeightFormat, by_row, code_range
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Operands, ScaledMatmul

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UINT8, INT32 = torch.uint8, torch.int32
E4M3, E5M2, INT8, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float8_e8m0fnu
Made = tuple[torch.Tensor, torch.Tensor, Operands]


@dataclasses.dataclass(frozen=True)
class Case:
    """One named case: M and contract."""

    name: str
    m: int
    contract: ScaledMatmul

    def make(self, seed: int = 0, exact: bool = False, device: str = "cpu") -> Made:
        """(a, its scale, operands) with random codes and scales.

        device where they are drawn, and stay; the numbers are others on another kind of device
        exact  codes are small integers and scales powers of two: every sum is exact in float32, in
               any order, and so is the result but for its last rounding"""
        c, w = self.contract, self.contract.weight
        data = Data(torch.Generator(device).manual_seed(seed), exact, c.powers)
        low, high = code_range(w.codes) or (-127, 127)
        q = data.codes(FLOAT_CODES.get(w.codes, INT8), (w.n, w.k), low, high)
        held = None if w.scale is None else data.scales(w.grid, w.scale)
        bias = None
        if c.bias is not None:
            bias = data.integers(-8, 9, (w.n,)).to(c.bias)
            more = torch.rand(w.n, generator=data.random, device=device).to(c.bias)
            bias = bias if exact else bias + more
        a, scale = activation(c, self.m, seed, exact, device)
        return a, scale, Operands(QuantizedWeight(w, q, held), bias)


@dataclasses.dataclass(frozen=True)
class Data:
    """Random codes and scales; `exact` as in `Case.make`; `powers`: scales are powers of two."""

    random: torch.Generator
    exact: bool
    powers: bool

    def codes(
        self, dtype: torch.dtype, shape: tuple[int, ...], low: int, high: int
    ) -> torch.Tensor:
        if self.exact:
            low, high = max(low, -4), min(high, 3)
        if not dtype.is_floating_point or self.exact:
            return self.integers(low, high + 1, shape).to(dtype)
        drawn = torch.randn(shape, generator=self.random, device=self.random.device)
        return drawn.mul_(60).clamp_(-448, 448).to(dtype)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.random, device=self.random.device)

    def scales(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.exact or self.powers or dtype is E8M0:
            return torch.exp2(self.integers(-3, 1, shape).float()).to(dtype)
        drawn = torch.rand(shape, generator=self.random, device=self.random.device)
        return (drawn * 0.02 + 0.002).to(dtype)


def activation(
    contract: ScaledMatmul, m: int, seed: int = 0, exact: bool = False, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a [m, K], its scale), always the same for a seed."""
    c, k = contract, contract.weight.k
    data = Data(torch.Generator(device).manual_seed(seed + 1), exact, c.powers)
    shape = (m, -(-k // c.group)) if c.group else (1,)
    low, high = (0, 255) if c.a is UINT8 else (-127, 127)
    return data.codes(c.a, (m, k), low, high), data.scales(shape, c.scale)


def zeros(contract: ScaledMatmul, m: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(the zero points for `activation`,), the ends of the codes' range among them; () if it has
    none."""
    c = contract
    if c.zero is None:
        return ()
    low, high = (0, 256) if c.a is UINT8 else (-128, 128)
    shape = (m, -(-c.weight.k // c.group)) if c.group else (1,)
    made = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed + 2))
    hostile = torch.tensor([low, high - 1, 0])[: made.numel()]
    made.flatten()[: len(hostile)] = hostile
    return (made.to(c.zero),)


def case(
    codes: str, m: int, n: int, k: int, bn: int, bk: int, a: torch.dtype = E4M3, group: int = -1,
    scale: torch.dtype = FP32, out: torch.dtype = BF16, bias: torch.dtype | None = None,
    weight_scale: torch.dtype | None = FP32, fast: bool = False, zero: torch.dtype | None = None,
    experts: int = 0, powers: bool = False,
) -> Case:  # fmt: skip
    """A case; group -1: each row of a has one scale. Of experts `Case.make` makes one."""
    given: dict[str, Any] = dict.fromkeys(("inner", "compute", "dtype"), FP32)
    arithmetic = "q" if weight_scale is None else "q*s"
    form = WeightFormat(
        codes, n, k, min(bn, n), min(bk, k), arithmetic, weight_scale, None, **given
    )
    contract = ScaledMatmul(
        form,
        a,
        k if group < 0 else group,
        scale,
        out,
        bias,
        fast,
        zero=zero,
        experts=experts,
        powers=powers,
    )
    return Case(f"{contract.summary} M={m}", m, contract)


def wide(
    contract: ScaledMatmul,
    a: torch.Tensor,
    scale: torch.Tensor,
    source: Operands,
    zero: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the product multiplies, in float64: a times its scales, codes of W times theirs."""
    w = contract.weight
    x, y = a.to(FP32).double(), source.weight.codes.to(FP32).double()
    s, z = scale.to(FP32).double(), x.new_zeros(1) if zero is None else zero.double()
    if contract.group:
        s = s.repeat_interleave(contract.group, 1)[:, : w.k]
        z = z if zero is None else z.repeat_interleave(contract.group, 1)[:, : w.k]
    x = x - z
    if source.weight.scale is not None:
        grid = source.weight.scale.to(FP32).double()
        y = y * by_row(w, grid, w.n).repeat_interleave(w.bk, 1)[:, : w.k]
    return x * s, y


def eager(
    contract: ScaledMatmul,
    a: torch.Tensor,
    scale: torch.Tensor,
    source: Operands,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """A graph's own product: torch._scaled_mm on CUDA where it takes this, else float32."""
    native = SCALED_MATMUL.providers["aten.scaled_mm"]
    if a.is_cuda and native.why_not(contract) is None:
        found = native.pack(contract, source)
        held = [found[name] for name in native.operands(contract)]
        return native.run(contract, (a, scale), held)  # type: ignore[no-any-return]
    x, y = wide(contract, a, scale, source, zero)
    out = x.float() @ y.float().T
    return (out if source.bias is None else out + source.bias.float()).to(contract.out)


FP8, WIDE8 = "float8_e4m3fn", "float8_e5m2"
CASES = (
    case(FP8, 16, 128, 256, 128, 256, group=0),
    case(FP8, 1, 256, 512, 1, 512),
    case(FP8, 17, 144, 160, 1, 160, bias=BF16),
    case(FP8, 5, 33, 65, 1, 65, out=FP16, bias=FP32),
    case(FP8, 64, 256, 256, 1, 256, out=FP16, fast=True),
    case(FP8, 33, 96, 128, 96, 128, out=FP16, bias=FP16),
    case(FP8, 7, 64, 128, 1, 128, group=0, weight_scale=BF16),
    case(FP8, 4, 64, 128, 64, 128, weight_scale=None),
    case(WIDE8, 9, 80, 128, 1, 128),
    case(FP8, 9, 80, 128, 80, 128, E5M2, group=0),
    case(WIDE8, 3, 80, 128, 1, 128, E5M2),
    case(FP8, 40, 256, 384, 128, 128, group=128),
    case(FP8, 3, 200, 320, 128, 128, group=128, bias=BF16),
    case(FP8, 20, 256, 256, 1, 128, group=128, out=FP16),
    case(FP8, 2, 96, 256, 1, 128),
    case(FP8, 6, 96, 256, 96, 256, group=64),
    case(FP8, 4, 128, 384, 128, 128, group=64),
    case(FP8, 17, 40, 96, 32, 32, group=32),
    case(FP8, 65, 72, 288, 32, 32, group=32),
    case(FP8, 1, 264, 576, 32, 32, group=32, scale=E8M0, weight_scale=E8M0),
    case(FP8, 33, 72, 304, 32, 32, group=32, powers=True, bias=BF16),
    case(WIDE8, 8, 33, 160, 32, 32, group=32, powers=True, scale=E8M0, weight_scale=E8M0),
    case("int8", 16, 128, 256, 1, 256, INT8),
    case("int8", 1, 264, 512, 1, 512, INT8, out=FP16, bias=FP16),
    case("int8", 40, 48, 100, 48, 100, INT8, group=0, out=FP32, bias=BF16),
    case("int8", 5, 64, 256, 1, 128, INT8, group=128),
    case("int8", 5, 33, 96, 1, 32, INT8, scale=BF16, weight_scale=BF16),
    case("int4", 16, 128, 256, 1, 128),
    case("int4", 1, 264, 512, 1, 128, INT8, bias=BF16),
    case("int4", 33, 72, 320, 1, 64, out=FP16),
    case("int4", 4, 72, 320, 1, 64, INT8, group=64),
    case("int4", 6, 64, 288, 1, 32, group=32),
    case("int4", 3, 64, 288, 1, 32, INT8, out=FP32),
    case("int4", 9, 130, 200, 1, 200, E5M2, bias=FP32),
    case("int4", 9, 130, 200, 1, 200, INT8, group=0, weight_scale=None),
    case("int4", 70, 128, 256, 64, 128, group=128, weight_scale=BF16),
)
# Of asymmetric activations; their zero points are in `zeros`.
ASYMMETRIC = (
    case("int8", 16, 128, 256, 1, 256, INT8, zero=INT8),
    case("int8", 5, 264, 512, 1, 512, UINT8, zero=UINT8, out=FP16, bias=FP16),
    case("int8", 40, 48, 104, 48, 104, UINT8, group=0, out=FP32, bias=BF16, zero=INT32),
    case("int8", 5, 64, 256, 1, 128, INT8, group=128, zero=FP32),
    case("int8", 7, 40, 96, 1, 96, INT8, zero=torch.int64, scale=BF16, weight_scale=None),
    case("int8", 3, 64, 256, 1, 64, UINT8, out=FP32, zero=BF16),
    case("int4", 16, 128, 256, 1, 32, INT8, zero=INT8, scale=BF16, weight_scale=BF16),
    case("int4", 1, 264, 512, 1, 128, INT8, bias=BF16, zero=INT32, out=FP32),
    case("int4", 9, 130, 200, 1, 200, UINT8, group=0, weight_scale=None, zero=INT32),
    case("int4", 4, 72, 320, 1, 64, INT8, group=64, zero=INT8, out=FP16),
    case("int4", 5, 72, 384, 1, 128, UINT8, group=64, zero=FP16),
)
# Of experts.
EXPERTS = (
    case(FP8, 6, 64, 256, 64, 256, group=0, experts=3),
    case(FP8, 3, 72, 256, 1, 256, experts=4),
    case(FP8, 5, 33, 160, 1, 160, out=FP16, fast=True, experts=2),
    case(FP8, 4, 200, 384, 128, 128, group=128, experts=3),
    case(FP8, 4, 96, 256, 1, 128, group=128, out=FP16, experts=2),
    case(FP8, 5, 96, 192, 32, 32, group=32, experts=3),
    case(FP8, 2, 40, 288, 1, 32, group=32, scale=E8M0, weight_scale=E8M0, experts=3),
    case(FP8, 2, 64, 128, 64, 128, weight_scale=None, experts=1),
    case("int8", 7, 48, 128, 1, 128, INT8, experts=4),
    case("int8", 3, 48, 256, 1, 128, INT8, group=128, out=FP32, experts=2),
    case("int4", 5, 72, 256, 1, 128, group=0, experts=3),
    case("int4", 4, 130, 256, 1, 128, group=128, weight_scale=BF16, experts=2),
    case("int4", 3, 64, 192, 1, 32, INT8, group=64, experts=3),
)
