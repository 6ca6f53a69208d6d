"""Provider of scaled_matmul that trades memory for time: W is kept in bf16, for many rows."""

from collections.abc import Sequence

import sympy
import torch

from qinductor.contracts import QuantizedWeight, by_row, short
from qinductor.errors import Refused
from qinductor.kernels.scaled_matmul import (
    FP32,
    SCALED_MATMUL,
    Operands,
    ScaledMatmul,
    operands,
)
from qinductor.kernels.scaled_matmul_sums import experts_why_not
from qinductor.op import Spec
from qinductor.rates import BANDWIDTH, RATE, M

BF16 = torch.bfloat16
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


class DenseMM:
    """W made bf16 once; at each call a is, too, and `aten.linear` multiplies them.

    Float8 codes times powers of two are exact in bf16, so nothing is rounded but float32 sums, once
    for all of K. Other scales are refused. It runs only under `Options(dense=True)`; the report
    counts its bytes as dense.
    """

    name = "aten.mm_dense"
    dense = True
    reference = False

    def runs_on(self, target: str) -> bool:
        return target == "cpu" or target.startswith("sm_") and int(target[3:]) >= 80

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c, w = contract, contract.weight
        if c.zero is not None or c.experts:
            return experts_why_not(c) or "a has zero points; it takes none"
        if c.a not in FLOAT8 or w.storage not in FLOAT8:
            return f"{short(c.a)} times {w.codes}; it takes float8 with float8"
        if w.arithmetic not in ("q", "q*s") or w.permuted:
            return f"W is {w.arithmetic}{', permuted' * w.permuted}; it takes q and q*s"
        if not w.n * w.k:
            return f"W is {w.n}x{w.k}; it takes no empty one"
        if not c.powers:
            return "scales may be no powers of two; with others codes are not exact in bf16"
        if c.out is not BF16 or c.bias not in (None, BF16):
            return f"the result is {short(c.out)}, the bias {short(c.bias)}; it takes bf16 for both"
        return None

    def seconds(self, contract: ScaledMatmul) -> sympy.Expr:
        w = contract.weight
        # By an H200's times of cuBLAS, 8 shapes; before it 7 bytes of each code of a are moved.
        moved = 2 * w.n * w.k + 2 * M * (w.n + w.k)
        product = sympy.Max(moved / 0.92 / BANDWIDTH, 2 * M * w.n * w.k / RATE, evaluate=False)
        return 8e-6 + 7 * M * w.k / BANDWIDTH + product

    def operands(self, contract: ScaledMatmul) -> dict[str, Spec]:
        w, plain = contract.weight, operands(contract)
        found: dict[str, Spec] = {"dense": ((w.n, w.k), BF16)}
        return found | {name: plain[name] for name in ("bias",) if name in plain}

    def pack(self, contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
        found = {"dense": dense(source.weight), "bias": source.bias}
        return {name: t.contiguous() for name, t in found.items() if t is not None}

    def run(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        (a, scale), (w, *bias), group = inputs, packed, contract.group
        x, s = a.to(BF16, memory_format=torch.contiguous_format), scale.to(BF16)
        if not group:
            x.mul_(s.reshape(1, 1))
        elif x.shape[1] % group:
            x.mul_(s.repeat_interleave(group, 1)[:, : x.shape[1]])
        else:
            x.unflatten(1, (-1, group)).mul_(s.unsqueeze(-1))
        return torch.nn.functional.linear(x, w, bias[0] if bias else None)


def dense(weight: QuantizedWeight) -> torch.Tensor:
    """W in bf16, exact. Refused where it is not."""
    form, codes = weight.format, weight.codes
    w = codes.to(BF16)
    if weight.scale is None:
        return w
    scale = weight.scale.to(FP32)
    step = max(1, (1 << 24) // form.k // form.bn) * form.bn  # rows that are float32 at a time
    for first in range(0, form.n, step):
        part = w[first : first + step]
        some = scale[first // form.bn : -(-(first + len(part)) // form.bn)]
        by_code = by_row(form, some, len(part)).repeat_interleave(form.bk, 1)[:, : form.k]
        exact = part.float() * by_code
        part.copy_(exact)
        if not torch.equal(part.float().nan_to_num(), exact.nan_to_num()):
            raise Refused("codes times scales are not exact in bf16; wanted powers of two")
    return w


SCALED_MATMUL.register(DenseMM())
