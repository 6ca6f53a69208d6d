"""What is made of int32 sums of codes: zero points are subtracted, by sums of W's codes; scales.

    sum_k (a - z) q = sum_k a q - z sum_k q

Of int8 codes, and of uint8 ones less 128, all three are int32 and exact: z is taken apart into
what is in the range of int8 and, where it can be outside of that, the rest in float32.
"""

from collections.abc import Mapping

import torch

from qinductor.contracts import by_row, short
from qinductor.kernels.scaled_matmul import FP32, Operands, ScaledMatmul, code_sums, step_of
from qinductor.op import Spec

INT8, UINT8 = torch.int8, torch.uint8
INTEGERS = (INT8, UINT8, torch.int16, torch.int32, torch.int64)
ZEROS = (*INTEGERS, torch.bfloat16, torch.float16, FP32)


def zeros_why_not(contract: ScaledMatmul) -> str | None:
    """Why zero points of a are none that sums of integers take; None if they are, or are none."""
    c = contract
    if c.zero not in (None, *ZEROS):
        return f"zero points are {short(c.zero)}; it takes integers, bf16, fp16 and fp32"
    if c.experts and c.zero is not None:
        return f"there are {c.experts} experts and zero points; it takes experts without"
    if c.zero is None and c.a is UINT8:
        return "uint8 codes have no zero point; it takes those that have one"
    return None


def experts_why_not(contract: ScaledMatmul) -> str | None:
    """Why a provider that takes one weight does not take a stack of them."""
    # Its rows are known on the device alone: on CUDA each expert by itself would wait for that.
    if contract.experts:
        return f"there are {contract.experts} experts; it takes one weight"
    return None


def added(contract: ScaledMatmul) -> dict[str, Spec]:
    """The sums of W's codes, where a has zero points; of each block of k with one scale."""
    if contract.zero is None:
        return {}
    w = contract.weight
    return {"sums": ((w.n, -(-w.k // step_of(contract))), torch.int32)}


def totals(contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
    """The tensor of `added`."""
    if contract.zero is None:
        return {}
    return {"sums": code_sums(contract, source.weight.codes, step_of(contract))}


def signed(a: torch.Tensor) -> torch.Tensor:
    """Codes as int8: 128 less of uint8 ones."""
    return (a ^ 128).view(INT8) if a.dtype is UINT8 else a


def divided(contract: ScaledMatmul, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Zero points of `signed` codes as (int32 in the range of int8, what is left in float32; None
    if that is nothing)."""
    wide = zero.to(torch.float64 if zero.is_floating_point() else torch.int64)
    wide = wide - 128 if contract.a is UINT8 else wide
    inside = wide.clamp(-128, 127).to(torch.int32)
    rest = (wide - inside).to(FP32)
    narrow = zero.dtype is contract.a or not (zero.is_cuda or bool((rest != 0).any()))
    return inside, None if narrow else rest


def centred(
    sums: torch.Tensor, z: torch.Tensor, rest: torch.Tensor | None, codes: torch.Tensor
) -> torch.Tensor:
    """Sums [M, N] in int32 without z[M, 1] times the sums of W's codes [1, N], in float32; exact
    but for the rest of z."""
    out = sums.addcmul_(z, codes, value=-1).to(FP32)
    return out if rest is None else out - rest * codes.to(FP32)


def scaled(
    contract: ScaledMatmul,
    sums: torch.Tensor,
    scale: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of sums [M, N] where no scale changes along k."""
    held, bias = given.get("scale"), given.get("bias")
    if zero is None:
        out = sums.to(FP32)
    else:
        z, rest = divided(contract, zero.reshape(-1, 1))
        out = centred(sums, z, rest, given["sums"].t())
    if held is not None:
        out = out * by_row(contract.weight, held.to(FP32), contract.weight.n).reshape(1, -1)
    out = out * scale.to(FP32).reshape(-1, 1)
    return (out if bias is None else out + bias.to(FP32)).to(contract.out)
