"""Loops over experts: every turn adds what an expert makes of its tokens to one result.

    result -> index_add(tokens of 0, rows) -> index_add(tokens of 1, rows) -> ...

Tokens of a turn are whole numbers or a mask; how many there are is a number that the graph does
not know. A turn that reads its tokens' rows, adds, and writes them back is taken alike.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from qinductor.patterns.equal import origin
from qinductor.regions import VIEWS, aten, pure

ADDS, PUTS = aten.index_add.default, aten.index_put.default


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """One expert's part.

    node    what adds its rows to the result
    before  the result so far
    tokens  whose rows they are: whole numbers, or a mask
    rows    what is added
    adds    whether a token that is there twice is added twice; else one of its rows counts
    own     the nodes that do so
    """

    node: Node
    before: Node
    tokens: Node
    rows: Node
    adds: bool
    own: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """Turns in the order in which they add."""

    turns: tuple[Turn, ...]

    @property
    def start(self) -> Node:
        """The result before the first turn."""
        return self.turns[0].before

    @property
    def result(self) -> Node:
        """The result after the last turn."""
        return self.turns[-1].node


class Values:
    """Which nodes of a graph are one value: equal operators on equal arguments have one number."""

    def __init__(self, graph: Graph) -> None:
        self._numbers: dict[Node, int] = {}
        known: dict[str, int] = {}
        for i, node in enumerate(graph.nodes):
            text = f"{node.op} {i}"
            if node.op == "get_attr":
                text = f"{node.op} {node.target}"
            elif node.op == "call_function" and (pure(node) or _is_number(node)):
                text = f"{node.target} {self._text((node.args, dict(node.kwargs)))}"
            self._numbers[node] = known.setdefault(text, i)

    def __getitem__(self, node: Node) -> int:
        """The number; one of its own for a node that was put in since."""
        return self._numbers.setdefault(node, -1 - len(self._numbers))

    def _text(self, arguments: Any) -> str:
        def numbered(value: Any) -> Any:
            return f"%{self._numbers[value]}" if isinstance(value, Node) else value

        return repr(torch.fx.node.map_aggregate(arguments, numbered))


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, *torch.types.py_sym_types))


def unknown(node: Node) -> set[Any]:
    """The numbers that the graph does not know in the sizes of a node's value."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else [value]
    found: set[Any] = set()
    for part in parts:
        if isinstance(part, (torch.Tensor, *torch.types.py_sym_types)):
            found |= free_unbacked_symbols(part)
    return found


def loops(graph: Graph, values: Values) -> Iterator[Loop]:
    """The loops of a graph, of two turns or more."""
    turns = {node: turn for node in graph.nodes if (turn := _turn(node, values)) is not None}
    befores = {origin(turn.before) for turn in turns.values()}
    for last in (node for node in turns if node not in befores):
        chain = [turns[last]]
        while origin(chain[-1].before) in turns:
            chain.append(turns[origin(chain[-1].before)])
        if len(chain) > 1:
            yield Loop(tuple(reversed(chain)))


def again(loop: Loop, values: Values) -> Loop:
    """The loop as it is after the graph before it has changed."""
    turns = [_turn(turn.node, values) for turn in loop.turns]
    return Loop(tuple(turn for turn in turns if turn is not None))


def _turn(node: Node, values: Values) -> Turn | None:
    args: Any = node.args
    own: tuple[Node, ...] = ()
    if node.target is ADDS:
        before, dim, tokens, rows = args[:4]
        plain = dim == 0 and not args[4:] and node.kwargs.get("alpha", 1) == 1
        adds = True
    elif node.target is PUTS:
        before, (tokens, *others), rows = args[:3]
        plain, adds = not others, len(args) > 3 and bool(args[3])
        if plain and isinstance(tokens, Node) and not adds:
            rows, own = _added(rows, before, tokens, values)
    else:
        return None
    if not plain or not isinstance(tokens, Node) or not isinstance(rows, Node):
        return None
    shape, whole = rows.meta["val"].shape, before.meta["val"].shape
    same = list(shape[1:]) == list(whole[1:]) and tokens.meta["val"].dim() == 1
    if not unknown(rows) or not same:
        return None
    return Turn(node, before, tokens, rows, adds, (node, *own))


def _added(
    total: Any, before: Node, tokens: Node, values: Values
) -> tuple[Node | None, tuple[Node, ...]]:
    """(what is added to the rows that are read from the result, the nodes that read and add); None
    if it is anything else."""
    if not isinstance(total, Node) or total.target is not aten.add.Tensor or total.kwargs:
        return None, ()
    sides: Any = total.args
    for read, other in (sides, sides[::-1]):
        if not isinstance(read, Node) or not isinstance(other, Node):
            continue
        if read.target is aten.index.Tensor and read.args[0] is before:
            chosen: Any = read.args[1]
            same = len(chosen) == 1 and values[chosen[0]] == values[tokens]
            if same and other.meta["val"].dtype == before.meta["val"].dtype:
                return other, (total, read)
    return None, ()


def used_elsewhere(loop: Loop, inside: set[Node]) -> Node | None:
    """What reads a part of a loop and is none, but for checks of how many rows there are."""
    own = {node for turn in loop.turns for node in turn.own}
    results = [(user, own) for turn in loop.turns[:-1] for user in turn.node.users]
    parts = [(user, inside) for node in inside if node is not loop.result for user in node.users]
    stack = results + [(user, may) for user, may in parts if user not in own]
    while stack:
        user, may = stack.pop()
        if may is own and user.target in VIEWS and not unknown(user):
            stack.extend((other, own) for other in user.users)
        elif user not in may and not checks(user):
            return user
    return None


def checks(user: Node) -> bool:
    """Whether a node, and all that is made of it, only checks a number."""
    if user.target is aten._assert_scalar.default:
        return True
    return _is_number(user) and all(map(checks, user.users))
