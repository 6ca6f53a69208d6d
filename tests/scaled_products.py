"""What tests of scaled products share: plans of one route, inputs, what eager gives, the oracle."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Operands, ScaledMatmul
from qinductor.kernels.scaled_matmul_cases import Case, Made, eager, wide
from qinductor.op import INFINITE, Plan
from qinductor.testing import OUTPUTS, product_oracle


def only(route: str) -> Plan:
    """A plan in which one provider, in one config, runs every M."""
    return Plan(((INFINITE, route),))


def made(chosen: Case, m: int, exact: bool, device: str = "cpu") -> Made:
    """(a, scale, operands) of m rows."""
    a, scale, source = dataclasses.replace(chosen, m=m).make(exact=exact)
    return a.to(device), scale.to(device), on(source, device)


def on(source: Operands, device: str) -> Operands:
    """The operands on another device."""

    def moved(value: Any) -> Any:
        held = {n: t.to(device) for n, t in vars(value).items() if isinstance(t, torch.Tensor)}
        return dataclasses.replace(value, **held)

    return dataclasses.replace(moved(source), weight=moved(source.weight))


def many(contract: ScaledMatmul) -> int:
    """Rows that make enough outputs for an error to be measured."""
    return -(-OUTPUTS // contract.weight.n)


def packed(plan: Plan, contract: ScaledMatmul, source: Operands) -> list[torch.Tensor]:
    """The packed tensors, in the operator's order."""
    found = plan.pack(SCALED_MATMUL, contract, source)
    return [found[name] for name in plan.operands(SCALED_MATMUL, contract)]


def call(
    a: torch.Tensor, scale: torch.Tensor, tensors: Sequence[torch.Tensor], contract: ScaledMatmul,
    plan: Plan, *zero: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The operator as a compiled graph calls it."""
    texts = list(tensors), str(contract), str(plan)
    if zero:
        return torch.ops.qinductor.scaled_matmul_zero(a, scale, *zero, *texts)
    return torch.ops.qinductor.scaled_matmul(a, scale, *texts)


def hold(
    contract: ScaledMatmul, ours: torch.Tensor, a: torch.Tensor, scale: torch.Tensor,
    source: Operands, *zero: torch.Tensor,
) -> None:  # fmt: skip
    """Our product to the oracle."""
    x, y = wide(contract, a, scale, source, *zero)
    product_oracle(ours, eager(contract, a, scale, source, *zero), x, y, source.bias)


def check(out: torch.Tensor, contract: ScaledMatmul, m: int) -> None:
    assert out.shape == (m, contract.weight.n) and out.dtype == contract.out
    assert out.is_contiguous()


def layouts(a: torch.Tensor, scale: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """a and its scales with the same values in other strides."""
    k, narrow = a.shape[1], a.view(torch.uint8)
    beside = torch.cat([narrow, narrow[:, :16]], 1)[:, :k].view(a.dtype)
    odd = torch.cat([narrow[:, :3], narrow], 1)[:, 3:].view(a.dtype)
    spread = narrow.repeat_interleave(2, 0)[::2].view(a.dtype)
    found = {
        "rows farther apart": (beside, scale),
        "rows that begin anywhere": (odd, scale),
        "every other row": (spread, scale),
    }
    if scale.dim() == 2:
        bits = scale.view(torch.uint8) if scale.itemsize == 1 else scale
        m, groups = bits.shape
        padded = bits.new_zeros((groups, -(-m // 4) * 4)).t()[:m]
        padded.copy_(bits)
        found |= {
            "scales by column": (a, bits.t().contiguous().t().view(scale.dtype)),
            "scales by padded column": (a, padded.view(scale.dtype)),
        }
    return found
