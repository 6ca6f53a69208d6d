"""Spellings of what is quantised and dequantised in floats: activations, and weights."""

from collections.abc import Callable

import torch
from models import BF16, FP32, Holder, Random
from torch.nn.functional import linear

N, K, G = 48, 128, 32


def quantised(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (x / s).round().clamp(-128, 127) * s


def clamped_first(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (x / s).clamp(-128, 127).round() * s


def by_tensors(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    low, high = (torch.tensor(v, device=x.device) for v in (-128.0, 127.0))
    return torch.clamp(x / s, low, high).to(x.dtype).round() * s


def by_full(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    low, high = (torch.full_like(s, v) for v in (-128, 127))
    return torch.minimum(torch.maximum((x / s).round(), low), high) * s


def widened(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    q = (x.float() / s.float()).round().clamp(-128, 127).to(x.dtype)
    return (q.float() * s.float()).to(x.dtype)


def by_reciprocal(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (x * (1.0 / s)).round().clamp(-127, 127) * s


def with_a_zero(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """A zero point of 0, as symmetric schemes have one."""
    zero = torch.zeros_like(s).to(torch.int8).to(x.dtype)
    return ((x / s + zero).clamp(-128, 127).round() - zero) * s


def floored(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (x / s).floor().clamp(-128, 127) * s


def raised(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (x / s).clamp(-128, 127).ceil() * s


def integers(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (x / s).round().to(torch.int32).clamp(-128, 127).to(x.dtype) * s


def other_scale(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Quantised by one scale, dequantised by another one."""
    return (x / s).round().clamp(-128, 127) * (s * 1.25)


def divided(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """By what x was multiplied with."""
    times = 1.0 / s
    return (x * times).round().clamp(-128, 127) / times


SPELLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    f.__name__: f
    for f in (
        quantised, clamped_first, by_tensors, by_full, widened, by_reciprocal, with_a_zero, floored,
        raised, integers, other_scale, divided,
    )
}  # fmt: skip
Fake = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_token(x: torch.Tensor, fake: Fake = quantised) -> torch.Tensor:
    return fake(x, x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 127)


def by_tensor(x: torch.Tensor, fake: Fake = quantised) -> torch.Tensor:
    return fake(x, x.abs().amax().clamp(min=1e-4) / 127)


def by_group(x: torch.Tensor, fake: Fake = quantised) -> torch.Tensor:
    return by_token(x.unflatten(-1, (-1, G)), fake).flatten(-2)


GRANULARITIES = {"token": by_token, "tensor": by_tensor, "group": by_group}


def layer(
    fake: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = FP32, seed: int = 0
) -> Holder:
    """x, fake quantised, times a weight of int8 codes and a scale for each row."""
    r = Random(seed)
    module = Holder(
        lambda m, x: linear(fake(x), m.w.to(x.dtype) * m.s),
        w=r.integers(-128, 128, N, K, dtype=torch.int8), s=r.scales(N, 1, dtype=dtype),
    )  # fmt: skip
    module.operands = lambda x: (fake(x), module.w.to(x.dtype) * module.s)
    return module


def int4_groups(w: torch.Tensor) -> torch.Tensor:
    w = w.unflatten(-1, (-1, G))
    s = (w.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-6)
    return ((w * (1.0 / s)).round().clamp(-8, 7) * s).flatten(-2)


def int8_rows(w: torch.Tensor) -> torch.Tensor:
    s = (w.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
    return (w / s).clamp(-127, 127).round() * s


def uint4_groups(w: torch.Tensor) -> torch.Tensor:
    """With a zero point."""
    w = w.unflatten(-1, (-1, G))
    low, high = (end(w, -1, keepdim=True) for end in (torch.amin, torch.amax))
    s = ((high - low) / 15).clamp(min=1e-6)
    zero = (-low / s).round().clamp(0, 15)
    return (((w / s).round() + zero).clamp(0, 15) - zero).mul(s).flatten(-2)


def ternary(w: torch.Tensor) -> torch.Tensor:
    s = w.abs().mean().clamp(min=1e-5)
    return (w / s).round().clamp(-1, 1) * s


def ternary_divided(w: torch.Tensor) -> torch.Tensor:
    """As 1.58 bits are trained."""
    times = 1.0 / w.abs().mean().clamp(min=1e-5)
    return (w * times).round().clamp(-1, 1) / times


def float8_rows(w: torch.Tensor) -> torch.Tensor:
    s = (w.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
    return (w / s).clamp(-448, 448).to(torch.float8_e4m3fn).to(w.dtype) * s


def integer_rows(w: torch.Tensor) -> torch.Tensor:
    """Codes of 32 bits on the way."""
    s = (w.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
    return (w / s).round().to(torch.int32).clamp(-127, 127).to(w.dtype) * s


WEIGHTS = {
    "int4[48,128] group-32": int4_groups,
    "int8[48,128] channel": int8_rows,
    "uint4[48,128] group-32": uint4_groups,
    "int2[48,128] tensor": ternary,
    "int2[48,128] tensor, divided": ternary_divided,
    "float8_e4m3fn[48,128] channel": float8_rows,
    "int8[48,128] channel, by int32": integer_rows,
}


def trained(
    fake: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = BF16, seed: int = 0,
    activation: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> Holder:  # fmt: skip
    """x times a weight that is stored in floats, and fake quantised in every call."""
    r = Random(seed)
    spread = torch.rand(N, K // 16, 1, generator=r.generator).add(0.2).expand(-1, -1, 16)
    w = (r.normal(N, K, dtype=FP32, times=0.1) * spread.reshape(N, K)).to(dtype)
    module = Holder(lambda m, x: linear(activation(x), fake(m.w)), w=w)
    module.operands = lambda x: (activation(x), fake(module.w))
    return module
