"""Which tokens a turn takes, read off its behaviour: those that chose its expert.

The graph's own computation of tokens runs on random choices, with duplicates, experts that nobody
chose and numbers of none, and is compared with `nonzero(choices == expert)`.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.failures import FAILURES
from qinductor.patterns.loops.find import Loop, Values
from qinductor.patterns.loops.turns import WHOLE, Chain
from qinductor.patterns.probe import number
from qinductor.regions import VIEWS, aten, attribute, call, describe

PROBES = 4  # of random choices, beside those in which every expert is chosen
NEAR = 64  # nodes between tokens and choices
MOST = 4096  # numbers that the first expert may have
LIMITS = {aten.cumsum.default, aten.topk.default, aten.sort.default, aten.sort.stable}
Places = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
# (token, choice, tokens, choices of each) -> a number of the row
NAMES: dict[str, Places] = {
    "token": lambda t, s, rows, k: t,
    "choice": lambda t, s, rows, k: s,
    "both": lambda t, s, rows, k: t * k + s,
    "turned": lambda t, s, rows, k: s * rows + t,
}
# Rows in the order of tokens; of choices, then of tokens; one for a token at most.
WAYS = ("tokens", "turned", "once")


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """Which experts tokens choose.

    ids       [T] or [T, k]: the number of an expert
    k         choices of a token
    first     number of the first turn's expert; the others follow
    names     what the numbers of a turn's rows are
    distinct  whether no token chooses an expert twice
    once      whether a token that does so has one row
    """

    ids: Node
    k: int
    first: int
    names: dict[Node, str]
    distinct: bool
    once: bool


def choices_of(loop: Loop, chain: Chain, values: Values) -> Choices:
    """The choices; Refused where a turn takes other tokens than those that chose its expert."""
    tried = []
    for cut in _nearest([places[0] for places in chain.places.values()]):
        value = cut.meta.get("val")
        if not isinstance(value, torch.Tensor) or cut in chain.inside:
            continue
        if value.dtype not in WHOLE or value.dim() not in (1, 2):
            continue
        if not isinstance(value.shape[-1], int) and value.dim() == 2:
            continue
        tried.append(cut)
        found = _Probe(loop, chain, values, cut).found()
        if found is not None:
            first, once, names = found
            k = int(value.shape[1]) if value.dim() == 2 else 1
            distinct = k == 1 or _is_distinct(cut)
            return Choices(cut, k, first, names, distinct, once or not loop.turns[0].adds)
    held = ", ".join(f"{node.name} {describe(node)}" for node in tried) or "no whole numbers"
    raise Refused(f"turns must take the tokens that chose their expert; tried as choices: {held}")


def _nearest(nodes: Sequence[Node]) -> Iterator[Node]:
    """What nodes are made of, the nearest first."""
    seen = dict.fromkeys(nodes)
    queue = list(seen)
    while queue and len(seen) < NEAR:
        node = queue.pop(0)
        yield node
        queue += [n for n in node.all_input_nodes if n not in seen]
        seen |= dict.fromkeys(node.all_input_nodes)


def _is_distinct(ids: Node) -> bool:
    """Whether a row of choices holds no number twice: it is what a top-k gives."""
    node: Any = ids
    while node.target in VIEWS | {aten.clone.default, aten.alias.default}:
        source = node.args[0]
        if source.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            return False
        node = source
    parts = node.args if isinstance(node, Node) and node.op == "call_function" else ()
    top = parts[0] if len(parts) == 2 and parts[1] == 1 and isinstance(parts[0], Node) else None
    if top is None or top.target is not aten.topk.default:
        return False
    rank = top.args[0].meta["val"].dim()  # type: ignore[union-attr]
    dim: Any = top.args[2] if len(top.args) > 2 else -1
    return bool(dim % rank == rank - 1)


class _Probe:
    """Runs what makes the numbers of rows on choices, in place of one node."""

    def __init__(self, loop: Loop, chain: Chain, values: Values, cut: Node) -> None:
        self.chain, self.values, self.cut = chain, values, cut
        self.tokens = loop.turns[0].tokens
        self.turns = len(loop.turns)
        shape = [number(size, {}) for size in cut.meta["val"].shape]
        self.shape = (shape[0], shape[1] if len(shape) > 1 else 1)

    def found(self) -> tuple[int, bool, dict[Node, str]] | None:
        """(the first expert, whether a token has one row at most, names), or None."""
        try:
            for first in self._firsts():
                for way in WAYS:
                    names = self._names(first, way)
                    if names is not None:
                        return first, way == "once", names
        except (LookupError, *FAILURES):
            return None
        return None

    def _firsts(self) -> Iterator[int]:
        """0, then the number that a constant choice of which gives the first turn rows."""
        yield 0
        node = self.chain.places[self.tokens][0]
        for value in range(1, MOST):
            if len(self._run([node], torch.full(self.shape, value), {})[0]):
                yield value
                return

    def _probes(self, first: int) -> Iterator[torch.Tensor]:
        """Choices: random ones, then such that every expert is chosen, and numbers beside."""
        seeded = torch.Generator().manual_seed(0)
        low, high = first - 1, first + self.turns + 1
        for _ in range(PROBES):
            yield torch.randint(low, high, self.shape, generator=seeded)
        size = self.shape[0] * self.shape[1]
        for start in range(low, high, size):
            held = torch.arange(start, start + size) - low
            yield (held % (high - low) + low).view(self.shape)

    def _names(self, first: int, way: str) -> dict[Node, str] | None:
        """What the numbers are, if they are the same for all probes and turns."""
        left = {node: dict(NAMES) for node in self.chain.places}
        rows, k = self.shape
        for ids in self._probes(first):
            held: dict[int, Any] = {}
            for turn in range(self.turns):
                nodes = [places[turn] for places in self.chain.places.values()]
                token, choice = _expected(ids == first + turn, way)
                for node, got in zip(left, self._run(nodes, ids, held), strict=True):
                    for name in list(left[node]):
                        known = way != "once" or name == "token"
                        if not known or not _same(NAMES[name](token, choice, rows, k), got):
                            del left[node][name]
                if not all(left.values()):
                    return None
        names = {node: next(iter(found)) for node, found in left.items()}
        return names if names[self.tokens] == "token" else None

    def _real(self) -> tuple[int, ...]:
        return self.shape if self.cut.meta["val"].dim() == 2 else self.shape[:1]

    def _run(
        self, nodes: Sequence[Node], ids: torch.Tensor, held: dict[int, Any]
    ) -> list[torch.Tensor]:
        """Values of nodes; masks as the numbers of what they choose."""
        held[self.values[self.cut]] = ids.view(self._real()).to(self.cut.meta["val"].dtype)
        found = [self._value(node, held) for node in nodes]
        return [v.nonzero()[:, 0] if v.dtype is torch.bool else v for v in found]

    def _value(self, node: Node, held: dict[int, Any]) -> Any:
        key = self.values[node]
        if key in held:
            return held[key]
        value = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(value, torch.Tensor):
                raise LookupError(node.name)
            made: Any = number(value, {})
        elif node.op == "get_attr":
            made = attribute(node)
            if isinstance(made, FakeTensor):
                raise LookupError(node.name)
            made = made.detach().cpu()
        else:
            if _is_limit(node):  # which rows of fewer tokens than a call may have do not show
                raise LookupError(node.name)
            inputs = {n: self._value(n, held) for n in node.all_input_nodes}
            made = call(node, node.args, inputs.__getitem__, torch.device("cpu"))
        held[key] = made
        return made


def _is_limit(node: Node) -> bool:
    """Whether a node may leave out rows by their number, as a capacity of experts does."""
    if node.target is not aten.slice.Tensor:
        return node.target in LIMITS
    source, *given = node.args
    assert isinstance(source, Node)
    dim, start, end = (*given, *(0, 0, None)[len(given) :])[:3]
    size: Any = source.meta["val"].shape[dim or 0]
    whole = start in (None, 0) and (end is None or (isinstance(end, int) and end >= sys.maxsize))
    return not isinstance(size, int) and not whole


def _expected(chosen: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, which of its choices) of each row, where chosen[T, k] holds."""
    if way == "once":
        tokens = chosen.any(1).nonzero()[:, 0]
        return tokens, torch.zeros_like(tokens)
    if way == "turned":
        s, t = chosen.T.nonzero(as_tuple=True)
        return t, s
    t, s = chosen.nonzero(as_tuple=True)
    return t, s


def _same(expected: torch.Tensor, got: torch.Tensor) -> bool:
    return torch.equal(expected, got.long())
