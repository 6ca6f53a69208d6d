"""Which values of a graph are whole numbers, and between which bounds.

    x / s -> round -> clamp(-128, 127) -> cast -> codes      in floats, and in either order

Read off the operators from a value back: what rounds makes whole numbers, what clamps bounds them,
moves keep them, and a cast rounds the bounds as it does everything between them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import Node

from qinductor.regions import CASTS, FLOAT8, FLOATS, INTEGER, MOVES, aten, attribute

Held = Mapping[Node, torch.Tensor]  # values of nodes that are known


@dataclasses.dataclass(frozen=True)
class Span:
    """What the elements of a value may be.

    low, high  between what
    whole      whether they are whole numbers (or infinite)
    nan        whether some may be NaN, whatever the bounds
    """

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    nan: bool = True

    def within(self, low: float, high: float) -> bool:
        """Whether all are whole numbers in these bounds, or NaN."""
        return self.whole and low <= self.low and self.high <= high

    def each(self, function: Callable[[float], float], **more: bool) -> "Span":
        """Of a function that never falls, at both ends."""
        return dataclasses.replace(self, low=function(self.low), high=function(self.high), **more)


ANY = Span()
Of = Callable[[Any], Span]  # what an argument may be
DEPTH = 24  # operators that are looked through
MOST = 1 << 16  # elements of a constant that are looked at
STORED = (torch.int8, torch.uint8, *FLOAT8)  # dtypes of codes of 8 bits
BYTE = (-128.0, 127.0)


def span(value: Any, held: Held) -> Span:
    """What a node or a number may be. `held`: constants that are placeholders of the graph."""
    known: dict[Node, Span] = {}

    def of(value: Any, depth: int) -> Span:
        if isinstance(value, (int, float)):
            return Span(value, value, float(value).is_integer(), math.isnan(value))
        if not isinstance(value, Node):
            return ANY
        if value not in known:
            known[value] = _of_node(value, held, lambda inner: of(inner, depth + 1), depth < DEPTH)
        return known[value]

    return of(value, 0)


def _of_node(node: Node, held: Held, of: Of, goes_on: bool) -> Span:
    if node in held or node.op == "get_attr":
        return _of_tensor(held[node] if node in held else attribute(node))
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return ANY
    rule = RULES.get(node.target) if goes_on else None
    found = ANY if rule is None else rule(node, of)
    return _of_dtype(found, tensor.dtype, cast=node.target in CASTS)


def code_dtype(node: Node) -> torch.dtype | None:
    """The dtype of 8 bits of a value: its own, or int8 of computed whole numbers that fit."""
    tensor = node.meta.get("val")
    if isinstance(tensor, torch.Tensor) and tensor.dtype in STORED:
        own: torch.dtype = tensor.dtype
        return own
    fits = node.op == "call_function" and span(node, {}).within(*BYTE)
    return torch.int8 if fits else None


def _of_tensor(found: torch.Tensor) -> Span:
    tensor = found.constant if isinstance(found, FakeTensor) else found
    if tensor is None or not 0 < tensor.numel() <= MOST or tensor.is_complex():
        return ANY
    with unset_fake_temporarily():
        wide = tensor.detach().double()
        whole = bool((wide == wide.round()).all())
        return Span(float(wide.amin()), float(wide.amax()), whole, bool(wide.isnan().any()))


@functools.cache
def _nearest(value: float, dtype: torch.dtype) -> float:
    """The number of a dtype that is nearest."""
    with unset_fake_temporarily():
        return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def _of_dtype(found: Span, dtype: torch.dtype, cast: bool) -> Span:
    """What is left of a value in a dtype that holds it: rounded, and in its range."""
    if dtype is torch.bool:
        return Span(0, 1, True, False)
    if dtype in INTEGER:
        limits = torch.iinfo(dtype)
        fits = limits.min <= found.low and found.high <= limits.max
        if not fits or (cast and found.nan):  # what is cast from NaN may be any number
            return Span(limits.min, limits.max, True, False)
        return found.each(math.trunc, whole=True, nan=False)
    if dtype not in FLOATS:
        return found if dtype is torch.float64 else ANY
    return found.each(lambda end: _nearest(end, dtype))


def _rounded(node: Node, of: Of) -> Span:
    step = ROUNDS[node.target]
    return of(node.args[0]).each(lambda end: step(end) if math.isfinite(end) else end, whole=True)


def _clamped(node: Node, of: Of) -> Span:
    """Not below the first bound, not above the second: that is the one that holds where both are
    at odds."""
    value, *bounds = node.args
    named = {**dict(zip(("min", "max"), bounds, strict=False)), **node.kwargs}
    return _bounded(_bounded(of(value), named.get("min"), of, max), named.get("max"), of, min)


def _bounded(found: Span, bound: Any, of: Of, end: Callable[[float, float], float]) -> Span:
    """The larger (max) or the smaller one (min) of a value and a bound, if there is one."""
    if bound is None:
        return found
    other = of(bound)
    whole, nan = found.whole and other.whole, found.nan or other.nan
    return Span(end(found.low, other.low), end(found.high, other.high), whole, nan)


def _larger(node: Node, of: Of) -> Span:
    return _bounded(of(node.args[0]), node.args[1], of, max)


def _smaller(node: Node, of: Of) -> Span:
    return _bounded(of(node.args[0]), node.args[1], of, min)


def _sum(node: Node, of: Of) -> Span:
    """Of two values, or their difference."""
    if node.kwargs.get("alpha", 1) != 1:
        return ANY
    a, b = (of(arg) for arg in node.args[:2])
    b = b if node.target is aten.add.Tensor else _turned(b)
    low, high = a.low + b.low, a.high + b.high
    if math.isnan(low) or math.isnan(high):
        return dataclasses.replace(ANY, whole=a.whole and b.whole)
    endless = math.isinf(low) or math.isinf(high)  # inf - inf
    return Span(low, high, a.whole and b.whole, a.nan or b.nan or endless)


def _turned(found: Span) -> Span:
    """Of the negative."""
    return dataclasses.replace(found, low=-found.high, high=-found.low)


def _chosen(node: Node, of: Of) -> Span:
    a, b = (of(arg) for arg in node.args[1:])
    return Span(min(a.low, b.low), max(a.high, b.high), a.whole and b.whole, a.nan or b.nan)


def _kept(node: Node, of: Of) -> Span:
    return of(node.args[0])


def _filled(node: Node, of: Of) -> Span:
    return of(node.args[1])


ROUNDS: dict[Any, Callable[[float], float]] = {
    aten.round.default: round,  # halves to the even number, as torch does
    aten.floor.default: math.floor,
    aten.ceil.default: math.ceil,
    aten.trunc.default: math.trunc,
}
RULES: dict[Any, Callable[[Node, Of], Span]] = {
    **dict.fromkeys(MOVES | CASTS, _kept),
    **dict.fromkeys(ROUNDS, _rounded),
    **dict.fromkeys((aten.clamp.default, aten.clamp.Tensor), _clamped),
    **dict.fromkeys(
        (aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default), _larger
    ),
    **dict.fromkeys(
        (aten.clamp_max.default, aten.clamp_max.Tensor, aten.minimum.default), _smaller
    ),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _sum),
    **dict.fromkeys((aten.full.default, aten.full_like.default), _filled),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default), lambda node, of: of(0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default), lambda node, of: of(1)),
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), _kept),
    aten.neg.default: lambda node, of: _turned(of(node.args[0])),
    aten.scalar_tensor.default: lambda node, of: of(node.args[0]),
    aten.where.self: _chosen,
}  # fmt: skip
