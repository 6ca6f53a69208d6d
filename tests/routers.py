"""A provider that runs routers anywhere, and what is found of them in graphs."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from quantisers import Of, few_runs

import qinductor
from qinductor.contracts import parse
from qinductor.kernels.router import ROUTER, Reference, Router
from qinductor.patterns.router_formats.find import Finder
from qinductor.testing import rewritten

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
N, H, T = 16, 64, 6  # experts, columns of x, tokens


class Anywhere(Reference):
    """The reference under a name of its own, so that a site is lowered on every target."""

    name = "test.anywhere"
    reference = False


def provided() -> contextlib.AbstractContextManager[Any]:
    """Within it the operator has a provider for every target, and no other."""
    qinductor.load()
    reference = {Reference.name: ROUTER.providers[Reference.name], Anywhere.name: Anywhere()}
    return mock.patch.dict(ROUTER.providers, reference, clear=True)


def sites(
    function: Callable[..., Any],
    *x: torch.Tensor,
    dynamic: bool | None = None,
    target: str = "cpu",
    **buffers: torch.Tensor,
) -> tuple[qinductor.Report, list[Router]]:
    """The report on a function of buffers and x, and the contracts of the routers in its graph."""
    with provided(), few_runs(Finder):
        made = rewritten(lambda: Of(function, **buffers), *x, target=target, dynamic=dynamic)
    return made.report, [*contracts(made.after)]


def contracts(text: str) -> Iterator[Router]:
    """Those of the routers in the text of a graph."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if "qinductor.router.default" in line:
            end = next(j for j in range(i, len(lines)) if lines[j].strip() == Anywhere.name)
            start = next(j for j in range(i, end) if re.match(r"    n=\d", lines[j]))
            yield parse(Router, " ".join(part.strip() for part in lines[start:end]))


def found(function: Callable[..., Any], *x: torch.Tensor, **more: Any) -> Router:
    """The contract of the one router in the graph of a function."""
    report, (contract,) = sites(function, *x, **more)
    assert report.lowered == len(report.sites) == 1, report
    return contract


def compiled(
    function: Callable[..., Any], *x: torch.Tensor, options: Any = None, **buffers: torch.Tensor
) -> tuple[Any, Any, qinductor.Report]:
    """A compiled function, its results, and its report."""
    torch._dynamo.reset()
    made = torch.compile(Of(function, **buffers), backend="qinductor", options=options)
    with torch.no_grad(), provided(), few_runs(Finder):
        return made, made(*x), qinductor.last_report()


def refused(function: Callable[..., Any], *x: torch.Tensor, **more: Any) -> str:
    """Why the one site in the graph of a function was left."""
    report, contracts = sites(function, *x, **more)
    assert not contracts and len(report.sites) == 1, report
    return str(report.sites[0].reason)


def tokens(rows: int = T, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(rows, H, dtype=dtype)


def weight(n: int = N, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(n, H, dtype=dtype)


def distinct(rows: int = T, n: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    """x and a weight whose product is exact in every dtype, all logits of a row different."""
    x = torch.randn(rows, H).to(BF16)
    x[:, :n] = torch.stack([torch.randperm(n) for _ in range(rows)]) / 4 - n / 8
    return x, torch.eye(n, H, dtype=BF16)[torch.randperm(n)]


def sets(results: Any) -> Any:
    """Results with each row of k in the order of its experts, whatever order that was."""
    *others, indices = results
    if indices.dtype not in (torch.int64, torch.int32) or indices.dim() < 2:
        return results
    order = indices.long().argsort(-1)
    weights = [w.gather(-1, order) if w.shape == indices.shape else w for w in others]
    return [*weights, indices.gather(-1, order)]


def assert_close(ours: Any, eager: Any, name: str = "") -> None:
    """Equal experts; weights that differ by no more than rounding twice does. `name`: of errors."""
    ours, eager = (r if isinstance(r, tuple) else (r,) for r in (ours, eager))
    for a, b in zip(sets(ours), sets(eager), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if a.is_floating_point():
            rtol = (8 if b.dtype is FP32 else 2) * torch.finfo(b.dtype).eps
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=1e-30, msg=lambda text: f"{name}: {text}"
            )
        else:
            assert torch.equal(a, b), name
