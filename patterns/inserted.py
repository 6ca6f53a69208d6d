"""Nodes that a pattern puts into a graph for its operator to take."""

from typing import Any

import torch
from torch.fx import Graph, Node

from qinductor.regions import aten

OURS = "qinductor inserted"


def after(node: Node, target: Any, *args: Any) -> Node:
    """target(node, *args) right behind the node, once for all that ask for it."""
    for user in node.users:  # one of the graph's own may lie behind what is to take it
        if OURS in user.meta and (user.target, user.args) == (target, (node, *args)):
            return user
    value = node.meta["val"]
    with node.graph.inserting_after(node), value.fake_mode:
        made = node.graph.call_function(target, (node, *args))
        made.meta = {**node.meta, "val": target(value, *args), OURS: True}
    return made


def tensor_of(given: Node | float, dtype: torch.dtype, like: Node) -> Node:
    """A tensor that holds a number, put in before a node; a tensor as it is."""
    if isinstance(given, Node):
        return given
    value = like.meta["val"]
    with like.graph.inserting_before(like):
        node = like.graph.call_function(
            aten.full.default, ([1], given), {"dtype": dtype, "device": value.device}
        )
    with value.fake_mode:
        held = torch.full([1], given, dtype=dtype, device=value.device)
        node.meta = {**like.meta, "val": held, OURS: True}
    return node


def sweep(graph: Graph) -> None:
    """Takes what patterns have put into a graph, and nothing reads, out of it."""
    for node in reversed(list(graph.nodes)):
        if OURS in node.meta and not node.users:
            graph.erase_node(node)
