"""Spellings of activation quantisers, a provider that runs them anywhere, and what is found."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import silu

import qinductor
from qinductor.contracts import parse
from qinductor.kernels.quantize import QUANTIZE, Quantize, Reference
from qinductor.testing import rewritten

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Anywhere(Reference):
    """The reference under a name of its own, so that a site is lowered on every target."""

    name = "test.anywhere"
    reference = False


def provided() -> contextlib.AbstractContextManager[Any]:
    """Within it the operator has a provider for every target."""
    return mock.patch.dict(QUANTIZE.providers, {Anywhere.name: Anywhere()})


class Of(torch.nn.Module):
    """A function of buffers and x."""

    def __init__(self, function: Callable[..., Any], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *x: torch.Tensor) -> Any:
        return self.function(self, *x) if self._buffers else self.function(*x)


def found(
    function: Callable[..., Any], *x: torch.Tensor, dynamic: bool | None = None, **buffers: Any
) -> list[Quantize]:
    """The contracts of the operators in the graph of a function; every site must be lowered."""
    report, contracts = sites(function, *x, dynamic=dynamic, **buffers)
    assert report.lowered == len(report.sites) > 0, report
    return contracts


def refused(function: Callable[..., Any], *x: torch.Tensor, **buffers: Any) -> str:
    """Why the one site in the graph of a function was left."""
    report, contracts = sites(function, *x, **buffers)
    assert not contracts and len(report.sites) == 1, report
    return str(report.sites[0].reason)


def sites(
    function: Callable[..., Any], *x: torch.Tensor, dynamic: bool | None = None, **buffers: Any
) -> tuple[qinductor.Report, list[Quantize]]:
    """The report on a function, and the contracts of the operators in its graph."""
    with provided():
        made = rewritten(lambda: Of(function, **buffers), *x, dynamic=dynamic)
    return made.report, list(_contracts(made.after))


def _contracts(text: str) -> Iterator[Quantize]:
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if "qinductor.quantize.default" in line:
            end = next(j for j in range(i, len(lines)) if lines[j].strip() == Anywhere.name)
            start = next(j for j in range(i, end) if lines[j].startswith("    k="))
            yield parse(Quantize, " ".join(part.strip() for part in lines[start:end]))


def rows(m: int = 8, k: int = 256, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Rows of very different size, one of them zero."""
    x = torch.randn(m, k) * torch.logspace(-4, 4, m)[:, None]
    x[m // 2] = 0
    return x.to(dtype)


def by_token(x: torch.Tensor, least: float = 1e-12) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and fp32 scales of rows."""
    s = x.float().abs().amax(-1, keepdim=True).clamp(min=least) / 448.0
    return (x.float() / s).clamp(-448, 448).to(E4M3), s


def by_group(
    x: torch.Tensor, power: bool = False, least: float = 1e-4
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and fp32 scales of groups of 128."""
    t = x.float().view(x.shape[0], -1, 128)
    s = t.abs().amax(-1, keepdim=True).clamp(min=least) / 448.0
    s = torch.exp2(torch.ceil(torch.log2(s))) if power else s
    return (t / s).clamp(-448.0, 448.0).to(E4M3).view(x.shape), s.squeeze(-1)


def gated(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half times the second."""
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def rms(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The norm of rows."""
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
