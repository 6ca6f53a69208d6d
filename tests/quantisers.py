"""Spellings of activation quantisers, a provider that runs them anywhere, and what is found."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import silu

import qinductor
from qinductor.contracts import parse
from qinductor.kernels.quantize import QUANTIZE, Quantize, Reference
from qinductor.patterns.activation_formats.find import Finder
from qinductor.patterns.probe import Prober
from qinductor.testing import rewritten

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MOST = 40  # runs of one site on probes


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
    with provided(), few_runs():
        made = rewritten(lambda: Of(function, **buffers), *x, dynamic=dynamic)
    return made.report, list(_contracts(made.after))


@contextlib.contextmanager
def few_runs(finder: type[Prober] = Finder) -> Iterator[None]:
    """Within it no site, lowered or not, is run on probes more often than `MOST` times."""
    find: Any = finder.__call__

    def counted(self: Prober, *args: Any) -> Any:
        try:
            return find(self, *args)
        finally:
            assert self.runs <= MOST, f"{self.runs} runs of one site"

    with mock.patch.object(finder, "__call__", counted):
        yield


def compiled(
    function: Callable[..., Any],
    *x: torch.Tensor,
    dynamic: bool | None = None,
    options: Any = None,
    **buffers: torch.Tensor,
) -> tuple[Any, Any, qinductor.Report]:
    """A compiled function, its results, and its report."""
    torch._dynamo.reset()
    made = torch.compile(
        Of(function, **buffers), backend="qinductor", dynamic=dynamic, options=options
    )
    with torch.no_grad(), provided(), few_runs():
        return made, made(*x), qinductor.last_report()


def assert_same(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> None:
    """Both have the same bits in the same places."""
    for a, b in zip(ours, eager, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert_values(a, b)


def assert_values(ours: torch.Tensor, eager: torch.Tensor) -> None:
    """Both have the same bits, in any order in memory."""
    assert (ours.dtype, ours.shape) == (eager.dtype, eager.shape)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.dtype.itemsize]
    assert torch.equal(ours.view(bits), eager.view(bits))


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
