"""A layer as a UE8M0 checkpoint with blocks of 32 x 32 writes it, and what it computes."""

import torch
from models import BF16, FP32, Holder, Random

from qinductor.contracts import QuantizedWeight
from qinductor.kernels.scaled_matmul import Operands, ScaledMatmul, reference
from qinductor.kernels.scaled_matmul_cases import FP8, case

E4M3 = torch.float8_e4m3fn
BLOCK, LEAST = 32, 1e-4


def quantised(x: torch.Tensor, rounded: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [M, K], scales [M, K / 32]) of x; rounded: up to powers of two."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    s = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / 448
    s = torch.exp2(torch.ceil(torch.log2(s))) if rounded else s
    q = (groups / s).clamp(-448, 448).to(E4M3)
    return q.flatten(-2), s.squeeze(-1)


def forward(m: Holder, x: torch.Tensor) -> torch.Tensor:
    q, s = quantised(x)
    a = (q.float().unflatten(-1, (-1, BLOCK)) * s.unsqueeze(-1)).flatten(-2)
    n, k = m.w.shape
    blocks = m.w.float().view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    return (a @ (blocks * m.s.float().unsqueeze(1).unsqueeze(-1)).view(n, k).t()).to(BF16)


def layer(n: int = 64, k: int = 160, scale: torch.dtype = FP32, seed: int = 0) -> Holder:
    """x [M, K] -> [M, N]; its scales are powers of two."""
    r = Random(seed)
    s = torch.exp2(r.integers(-9, -3, n // BLOCK, k // BLOCK, dtype=torch.int8).float())
    return Holder(forward, w=r.float8(n, k), s=s.to(scale))


def expected(module: Holder, x: torch.Tensor, rounded: bool = True) -> torch.Tensor:
    """By the specification."""
    contract, operands = meant(module)
    return reference(contract, *quantised(x, rounded), operands)


def meant(module: Holder) -> tuple[ScaledMatmul, Operands]:
    """The contract of a layer, and its operands."""
    (n, k), dtype = module.w.shape, module.s.dtype
    contract = case(
        FP8, 1, n, k, BLOCK, BLOCK, group=BLOCK, weight_scale=dtype, powers=True
    ).contract
    return contract, Operands(QuantizedWeight(contract.weight, module.w, module.s))
