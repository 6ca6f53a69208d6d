"""Providers of dequant_matmul in torch's own CUDA operators."""

from collections.abc import Sequence

import sympy
import torch

from qinductor.contracts import short
from qinductor.kernels.dequant_matmul import (
    DEQUANT_MATMUL,
    DequantMatmul,
    Operands,
    cost,
    int4_group,
    int4_scales,
)
from qinductor.op import Spec
from qinductor.rates import BANDWIDTH, M

aten = torch.ops.aten
INNER_K_TILES = 8  # K must be a multiple of 16 times this


class Int4TensorCoreKernel:
    """`aten._weight_int4pack_mm`: W = bf16((q - 8) * s + z) in registers, bf16 tensor cores."""

    name = "aten.int4pack_mm_cuda"
    dense = False
    reference = False

    def runs_on(self, target: str) -> bool:
        return target.startswith("sm_") and int(target[3:]) >= 80  # tensor cores with bf16

    def why_not(self, contract: DequantMatmul) -> str | None:
        w = contract.weight
        if contract.experts:  # where groups end is known on the device: reading it would wait
            return f"there are {contract.experts} experts; it takes one weight"
        if w.codes != "int4":
            return f"codes are {w.codes}; it takes int4"
        if w.arithmetic not in ("q", "q*s"):
            return f"W is {w.arithmetic}; it takes q*s (its own zero is rounded to bf16)"
        if {contract.x, w.scale, w.dtype} != {torch.bfloat16}:
            return (
                f"x is {short(contract.x)}, the scale {short(w.scale)}, W {short(w.dtype)}; "
                "it takes bf16 for all three"
            )
        if contract.bias:
            return "a bias would be added after a rounding (1.6 times eager's error; 1.5 allowed)"
        if contract.output_scale is not None:
            return "the product has a scale of its own; it takes one for each group of one row"
        if w.bn != 1:
            return f"the scale is {w.granularity}; it takes one for each group of one row"
        if w.permuted:
            return "blocks hold columns in another order than W's; it takes columns in their order"
        if not int4_group(contract):
            return f"groups have {w.bk} of K = {w.k}; it takes multiples of 32 that divide K"
        if w.n % 8 or w.k % (16 * INNER_K_TILES):
            return f"W is {w.n}x{w.k}; it takes multiples of 8 and {16 * INNER_K_TILES}"
        return None

    def limit(self, contract: DequantMatmul, dense: bool = False) -> int:
        return 16

    def seconds(self, contract: DequantMatmul) -> sympy.Expr:
        # Fits 5 shapes x M = 1, 16, 64, 128 on an H200 to within 13 %: it reads the weight at 0.46
        # of the bandwidth, and from M = 4 on the time grows with M.
        weight = cost(contract)["bytes"].coeff(M, 0)
        return 3.4e-6 + weight / 0.46 / BANDWIDTH * sympy.Max(1, M / 4, evaluate=False)

    def operands(self, contract: DequantMatmul) -> dict[str, Spec]:
        w = contract.weight
        tiles = (w.n // 8, w.k // (16 * INNER_K_TILES), 32, INNER_K_TILES // 2)
        return {
            "int4tiles": (tiles, torch.int32),
            "int4tiles_scales": ((w.k // int4_group(contract), w.n, 2), torch.bfloat16),
        }

    def pack(self, contract: DequantMatmul, source: Operands) -> dict[str, torch.Tensor]:
        w, g = contract.weight, int4_group(contract)
        codes, scale = source.weight.codes, source.weight.scale
        assert scale is not None
        codes = (codes + 8).to(torch.uint8)
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        scale = scale.repeat_interleave(w.k // g // scale.shape[1], 1)
        return {
            "int4tiles": aten._convert_weight_to_int4pack(pairs.contiguous(), INNER_K_TILES),
            "int4tiles_scales": int4_scales(scale),
        }

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        codes, scales = packed
        out: torch.Tensor = aten._weight_int4pack_mm(
            x.contiguous(), codes, int4_group(contract), scales
        )
        return out


DEQUANT_MATMUL.register(Int4TensorCoreKernel())
