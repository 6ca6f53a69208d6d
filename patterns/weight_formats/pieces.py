"""Stacks of weights that are stored or dequantised each by itself, and then put one on another."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from qinductor.regions import TURNS, VIEWS, Axes, Leaf, Region, Scope, aten


def pieces_of(stack: Node) -> list[Node]:
    """The matrices that a node puts one on another along its first axis; none if it does not."""
    args: Any = stack.args
    if stack.target is aten.stack.default and _first(args, 3):
        return list(args[0])
    if stack.target is aten.cat.default and _first(args, 3):
        parts = [part.args for part in args[0] if part.target is aten.unsqueeze.default]
        if len(parts) == len(args[0]) and all(axis in (0, -3) for _, axis in parts):
            return [source for source, _ in parts]
    if stack.target in VIEWS and args[0].target is aten.cat.default:
        inner: Any = args[0].args
        shape = stack.meta["val"].shape
        alike = [part.meta["val"].shape == shape[1:] for part in inner[0]]
        if len(shape) == 3 and len(alike) == shape[0] and all(alike) and _first(inner, 2):
            return list(inner[0])
    return []


def stacked(node: Node) -> list[Node]:
    """The same of what only turns the axes of a stack."""
    source: Any = node
    while source.target in TURNS and source.meta["val"].dim() == 3:
        source = source.args[0]
    return pieces_of(source)


def _first(args: Sequence[Any], rank: int) -> bool:
    """Whether tensors are joined along their first axis, or the one before it."""
    return (args[1] if len(args) > 1 else 0) in (0, -rank)


class Piece:
    """One matrix of a stack as a region of its own, whose leaves are those of the stack or entries
    of them: regions of pieces that are made alike are equal.

    region  of the matrix
    """

    def __init__(self, stack: Region, output: Node) -> None:
        order = _behind(output, set(stack.inputs))
        self._at = {node: i for i, node in enumerate(stack.inputs)}
        self._cuts: list[Node] = [n for n in order if self._is_leaf(n)]
        graph, root = Graph(), torch.nn.Module()
        graph.owning_module = root  # type: ignore[assignment]
        made: dict[Node, Node] = {}
        for node in order:
            if node in self._cuts:
                made[node] = graph.placeholder(f"leaf_{len(made)}")
            elif node in stack.constants:
                name = f"constant_{len(made)}"
                root.register_buffer(name, stack.constants[node])
                made[node] = graph.get_attr(name)
            elif node not in self._at:
                made[node] = graph.node_copy(node, made.__getitem__)
            else:
                continue
            made[node].meta = dict(node.meta)
        leaves = {made[node]: Leaf(i) for i, node in enumerate(self._cuts)}
        n, k = (axis - 1 for axis in (stack.axes.n, stack.axes.k or 0))
        nodes = [made[node] for node in order if node in made]
        self.region = Region(made[output], nodes, Scope(leaves, {}, ()), Axes(n, k))

    def _is_leaf(self, node: Node) -> bool:
        """Whether a node is a leaf of the stack that is read as it is, or an entry of one."""
        if node in self._at:
            return any(not self._is_entry(user) for user in node.users)
        return self._is_entry(node)

    def _is_entry(self, node: Node) -> bool:
        args: Any = node.args
        chosen = node.target is aten.select.int and args[0] in self._at and args[1] == 0
        return chosen and all(user.target is aten.select.int for user in args[0].users)

    def leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The leaves of the piece, of those of the stack."""

        def of(node: Node) -> torch.Tensor:
            if node in self._at:
                return tensors[self._at[node]]
            args: Any = node.args
            return tensors[self._at[args[0]]][args[2]]

        return [of(node) for node in self._cuts]


def _behind(output: Node, ends: set[Node]) -> list[Node]:
    found, stack = set(), [output]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(() if node in ends else node.all_input_nodes)
    return sorted(found)
