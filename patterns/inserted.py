"""Nodes that a pattern puts into a graph for its operator to take."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from qinductor.regions import aten

OURS = "qinductor inserted"
MOVED = "qinductor moved"  # of a product: (reader, what it read, what it reads now), in order
GONE = "qinductor left out"  # of a product that nothing reads while another stands for it
INSTEAD = "qinductor instead of"  # of a product: (what is read in place of another, that one)
Emit = Callable[..., Node]  # (target, arguments) -> a node


def before(node: Node, like: Node) -> Emit:
    """What puts nodes in before a node, on fakes of the mode of another."""
    mode = like.meta["val"].fake_mode

    def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
        with node.graph.inserting_before(node):
            made = node.graph.call_function(target, args, kwargs)
        given = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            made.meta = {**node.meta, "val": target(*given[0], **given[1])}
        return made

    return emit


def after(node: Node, target: Any, *args: Any) -> Node:
    """target(node, *args) right behind the node, once for all that ask for it."""
    return behind_all([node], target, node, *args)


def behind_all(nodes: Sequence[Node], target: Any, *args: Any) -> Node:
    """target(*args) right behind the last of the nodes, which are all that it takes; once for all
    that ask for it."""
    for user in nodes[0].users:  # one of the graph's own may lie behind what is to take it
        if OURS in user.meta and (user.target, user.args) == (target, args):
            return user
    place = {node: i for i, node in enumerate(nodes[0].graph.nodes)} if len(nodes) > 1 else {}
    last = max(nodes, key=lambda node: place.get(node, 0))
    given = torch.fx.node.map_arg(args, lambda node: node.meta["val"])
    with last.graph.inserting_after(last), last.meta["val"].fake_mode:
        made = last.graph.call_function(target, args)
        made.meta = {**nodes[0].meta, "val": target(*given), OURS: True}
    return made


def tensor_of(given: Node | float, dtype: torch.dtype, like: Node) -> Node:
    """A tensor that holds a number, put in before a node; a tensor as it is."""
    if isinstance(given, Node):
        return given
    device = like.meta["val"].device
    node = before(like, like)(aten.full.default, [1], given, dtype=dtype, device=device)
    node.meta[OURS] = True
    return node


def read(product: Node, reader: Node, was: Node, now: Node) -> None:
    """A product, or what moves an operand of it, reads something else now; for `undo` to know."""
    reader.replace_input_with(was, now)
    product.meta[MOVED] = (*product.meta.get(MOVED, ()), (reader, was, now))


def sweep(graph: Graph) -> None:
    """Takes what patterns have put into a graph, and nothing reads, out of it."""
    for node in reversed(list(graph.nodes)):
        if OURS in node.meta and not node.users:
            graph.erase_node(node)
