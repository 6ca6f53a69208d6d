"""Spellings of routers as libraries and people write them, and what is found of them."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from quantisers import Of
from torch.nn.functional import linear, softmax

import qinductor
from qinductor.contracts import parse
from qinductor.kernels.router import ROUTER, Reference, Router
from qinductor.patterns.router_formats.find import Finder
from qinductor.testing import rewritten

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MOST = 40  # evaluations of one region
N, H, T = 16, 64, 6  # experts, columns of x, tokens


class Anywhere(Reference):
    """The reference under a name of its own, so that a site is lowered on every target."""

    name = "test.anywhere"
    reference = False


def provided() -> contextlib.AbstractContextManager[Any]:
    """Within it the operator has a provider for every target, and no other."""
    reference = {Reference.name: ROUTER.providers[Reference.name], Anywhere.name: Anywhere()}
    return mock.patch.dict(ROUTER.providers, reference, clear=True)


@contextlib.contextmanager
def few_runs() -> Iterator[None]:
    """Within it no site, lowered or not, is run on probes more often than `MOST` times."""
    find = Finder.__call__

    def counted(self: Finder, *args: Any) -> Any:
        try:
            return find(self, *args)
        finally:
            assert self.runs <= MOST, f"{self.runs} runs of one site"

    with mock.patch.object(Finder, "__call__", counted):
        yield


def sites(
    function: Callable[..., Any],
    *x: torch.Tensor,
    dynamic: bool | None = None,
    target: str = "cpu",
    **buffers: torch.Tensor,
) -> tuple[qinductor.Report, list[Router]]:
    """The report on a function of buffers and x, and the contracts of the routers in its graph."""
    with provided(), few_runs():
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


def refused(function: Callable[..., Any], *x: torch.Tensor, **more: Any) -> str:
    """Why the one site in the graph of a function was left."""
    report, contracts = sites(function, *x, **more)
    assert not contracts and len(report.sites) == 1, report
    return str(report.sites[0].reason)


def tokens(rows: int = T, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(rows, H, dtype=dtype)


def weight(n: int = N, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(n, H, dtype=dtype)


def mixtral(
    m: Any, x: torch.Tensor, k: int = 2, normalised: bool = True
) -> tuple[torch.Tensor, ...]:
    """Also Qwen, OLMoE, Jamba: logits in the model's dtype, scores in float32, then topk."""
    weights, indices = torch.topk(softmax(linear(x, m.w), dim=-1, dtype=FP32), k, dim=-1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(x.dtype), indices


def deepseek(
    m: Any, x: torch.Tensor, k: int = 4, groups: int = 4, kept: int = 2, mask: float = float("-inf")
) -> tuple[torch.Tensor, ...]:
    """DeepSeek-V3, GLM-4, Kimi and others, as transformers has it."""
    scores = linear(x.float(), m.w.float()).sigmoid()
    choice = scores + m.b
    best = choice.view(-1, groups, N // groups).topk(2, dim=-1)[0].sum(-1)
    at = torch.topk(best, k=kept, dim=-1, sorted=False)[1]
    keep = torch.zeros_like(best).scatter_(1, at, 1)
    keep = keep.unsqueeze(-1).expand(-1, groups, N // groups).reshape(-1, N)
    choice = choice.masked_fill(torch.bitwise_not(keep.bool()), mask)
    indices = torch.topk(choice, k=k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, indices)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * 2.5, indices


def gpt_oss(m: Any, x: torch.Tensor, k: int = 4) -> tuple[torch.Tensor, ...]:
    """topk of the logits, then a softmax of what was picked."""
    values, indices = torch.topk(linear(x, m.w, m.c), k, dim=-1)
    return softmax(values, dim=1, dtype=values.dtype), indices
