"""A block of experts whose weights and activations are both quantised, and its quantiser."""

from typing import Any

import torch
from models import BF16, FP32, Random

E4M3 = torch.float8_e4m3fn
E, H, INNER = 3, 256, 128
Tensor = torch.Tensor


def power_of(s: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(s)))


def quantised(x: Tensor, group: int, dtype: torch.dtype = E4M3, power: bool = True) -> Any:
    """(codes, scales [..., K / group, 1]) of groups of x."""
    largest = 448 if dtype is E4M3 else 127
    parts = x.float().unflatten(-1, (-1, group))
    s = parts.abs().amax(-1, keepdim=True).clamp(min=1e-6) / largest
    s = power_of(s) if power else s
    q = (parts / s).clamp(-largest, largest)
    return (q if dtype is E4M3 else q.round()).to(dtype), s


class Experts(torch.nn.Module):
    """quantise -> product -> silu * up -> quantise -> product -> weighted sum, as fake-quantised
    models write it: FP8, groups and blocks of 128, scales that are powers of two."""

    def __init__(self) -> None:
        super().__init__()
        r = Random(7)
        for name, n, k in (("up", 2 * INNER, H), ("down", H, INNER)):
            self.register_buffer(name, r.float8(E, n, k))
            s = r.scales(E, n // 128, k // 128, dtype=FP32)
            self.register_buffer(f"{name}_scale", torch.exp2(torch.log2(s).round()))

    def linear(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        codes, scale = getattr(self, name), getattr(self, f"{name}_scale")
        q, s = quantised(x, 128)
        x = (q.float() * s).flatten(-2).to(BF16)
        blocks = codes.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
        w = blocks * scale.unsqueeze(2).unsqueeze(4)
        return torch._grouped_mm(x, w.flatten(3).flatten(1, 2).to(BF16).mT, offs=offsets)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        gate, up = self.linear("up", x, offsets).chunk(2, -1)
        return self.linear("down", torch.nn.functional.silu(gate) * up, offsets)
