"""What the turns of a loop have in common: one chain of operators on rows, for every expert alike.

Walked from the rows of all turns at once. What it ends in is the same for all, or something for
each of them: a weight, a bias, tokens, a column of routing weights.
"""

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.loops.find import Loop, Values, unknown
from qinductor.regions import describe

Each = tuple[Node, ...]  # one for every turn
WHOLE = (torch.int64, torch.int32)


@dataclasses.dataclass(eq=False)
class Chain:
    """What all turns do, in the nodes of the first.

    steps   operators on rows, each after what it takes
    places  whole numbers of rows: tokens, and which of a token's choices they are
    shared  what all turns take
    each    what each takes for itself
    inside  nodes of all turns
    """

    steps: list[Node] = dataclasses.field(default_factory=list)
    places: dict[Node, Each] = dataclasses.field(default_factory=dict)
    shared: dict[Node, Node] = dataclasses.field(default_factory=dict)
    each: dict[Node, Each] = dataclasses.field(default_factory=dict)
    inside: set[Node] = dataclasses.field(default_factory=set)


def chain_of(loop: Loop, values: Values) -> Chain:
    """The chain; Refused where turns differ in what they do."""
    chain = Chain()
    walk = _Walk(chain, values)
    walk(tuple(turn.tokens for turn in loop.turns))
    walk(tuple(turn.rows for turn in loop.turns))
    chain.inside |= {node for turn in loop.turns for node in turn.own}
    return chain


class _Walk:
    """Walks all turns from one of their nodes each."""

    def __init__(self, chain: Chain, values: Values) -> None:
        self.chain, self.values = chain, values
        self._known: dict[Node, Each] = {}

    def __call__(self, nodes: Each) -> None:
        first = nodes[0]
        if first in self._known:
            if self._known[first] != nodes and not self._are_one(nodes, self._known[first]):
                raise Refused(f"turns of the loop differ in where they take {first.name}")
            return
        self._known[first] = nodes
        inner = [bool(unknown(node)) for node in nodes]
        if not any(inner):
            self._outer(nodes)
            return
        value = first.meta["val"]
        self.chain.inside.update(nodes)
        if not all(inner) or any(node.target is not first.target for node in nodes):
            raise Refused(f"turns of the loop differ: {_names(nodes)}")
        if isinstance(value, torch.types.py_sym_types):
            self._inside(nodes)
        elif is_place(first):
            self.chain.places[first] = nodes
            self._inside(nodes)
        else:
            self._arguments(nodes)
            self.chain.steps.append(first)

    def _are_one(self, nodes: Each, others: Each) -> bool:
        return all(self.values[a] == self.values[b] for a, b in zip(nodes, others, strict=True))

    def _outer(self, nodes: Each) -> None:
        """What is made of no turn's rows."""
        first = nodes[0]
        value = first.meta["val"]
        if isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() == 1:
            self.chain.places[first] = nodes  # of tokens, as a mask
            return
        if all(self.values[node] == self.values[first] for node in nodes):
            self.chain.shared[first] = first
            return
        kinds = {describe(node) for node in nodes}
        if len(kinds) > 1:
            raise Refused(f"turns of the loop take other shapes: {', '.join(sorted(kinds))}")
        self.chain.each[first] = nodes

    def _inside(self, nodes: Each) -> None:
        self.chain.inside.update(n for node in nodes for n in made_of(node))

    def _arguments(self, nodes: Each) -> None:
        flat = [_flat(node) for node in nodes]
        if len({len(arguments) for arguments in flat}) > 1:
            raise Refused(f"turns of the loop differ: {_names(nodes)}")
        for arguments in zip(*flat, strict=True):
            if all(isinstance(argument, Node) for argument in arguments):
                self(arguments)
            elif any(argument != arguments[0] for argument in arguments):
                shown = sorted({str(argument) for argument in arguments})
                raise Refused(f"turns of the loop differ in {nodes[0].name}: {', '.join(shown)}")


def _names(nodes: Each) -> str:
    shown = dict.fromkeys(f"{node.name} ({node.target})" for node in nodes)
    return ", ".join(list(shown)[:3])


def _flat(node: Node) -> list[Any]:
    """The arguments of a node, those in lists too."""
    found: list[Any] = []

    def keep(value: Any) -> Any:
        found.append(value)
        return value

    torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), keep)
    return [(*sorted(node.kwargs),), *found]


def is_place(node: Node) -> bool:
    """Whether a value is whole numbers, made of which rows there are alone."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype not in WHOLE or value.dim() != 1:
        return False
    parts = (n.meta["val"] for n in made_of(node))
    return not any(isinstance(p, torch.Tensor) and p.dtype.is_floating_point for p in parts)


def made_of(node: Node) -> set[Node]:
    """The nodes of a turn behind one, itself among them."""
    found, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current not in found and unknown(current):
            found.add(current)
            stack.extend(current.all_input_nodes)
    return found
