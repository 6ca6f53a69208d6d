"""What may pick the experts of a router, and what a router may compute."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from qinductor.patterns.activation_formats.sources import expandable
from qinductor.patterns.probe import fixed
from qinductor.regions import FLOATS, PRODUCTS, aten, pure

MOST = 1024  # experts
DEPTH = 256  # nodes between the logits and a topk
SORTS = {aten.sort.default, aten.sort.stable}
PEAKS = {aten.argmax.default, aten.max.dim}
SELECTS = {aten.topk.default, *SORTS}
# What puts values at the places of the experts, takes them from there, or adds them up.
PLACES = {
    aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default,
    aten.sum.default, aten.cat.default,
}  # fmt: skip
COUNTS = {aten.cumsum.default}
PARTS = {aten.index.Tensor, aten.index_select.default}  # by which rows go to their experts
HELD = (torch.Tensor, list, tuple)


def candidates(graph: Graph) -> Iterator[Node]:
    """What picks the k largest, or its first result; not what is part of another one's choice."""
    found = [node for node in graph.nodes if _picks(node)]
    inner = {other for node in found for other in _behind(node) if other is not node}
    for node in found:
        repeated = node.target in PEAKS
        if node not in inner and (not repeated or any(n.target in PEAKS for n in _behind(node))):
            yield from [node, *node.users][node.target is not aten.argmax.default :][:1]


def _picks(node: Node) -> bool:
    """Whether a node may pick experts: a topk, a sort that is cut, a maximum of a few columns."""
    if node.target is aten.topk.default:
        return True
    if node.target not in SORTS | PEAKS or not node.args:
        return False
    value: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    if value.dtype not in FLOATS or value.dim() < 2:
        return False
    n = fixed(value.shape[-1])
    if n is None or n > MOST:
        return False
    return node.target in PEAKS or any(
        user.target is aten.slice.Tensor for part in node.users for user in part.users
    )


def _behind(node: Node) -> set[Node]:
    """What picks, behind this node and in front of its logits."""
    found: set[Node] = set()
    seen: set[Node] = set()
    stack = [*node.all_input_nodes]
    while stack and len(seen) < DEPTH:
        current = stack.pop()
        if current in seen or not goes_on(current):
            continue
        seen.add(current)
        stack.extend(current.all_input_nodes)
        if current.target in SELECTS | PEAKS:
            found.add(current)
    return found


def goes_on(node: Node) -> bool:
    """Whether a router may compute this."""
    if node.op != "call_function" or not pure(node) or node.target in PRODUCTS:
        return False
    made_of_numbers = not any(isinstance(n.meta.get("val"), HELD) for n in node.all_input_nodes)
    return made_of_numbers or node.target in SELECTS | PEAKS | PLACES | COUNTS or expandable(node)


def is_tensor(node: Node) -> bool:
    return node.op == "get_attr" or isinstance(node.meta.get("val"), HELD)
