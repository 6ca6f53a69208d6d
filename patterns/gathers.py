"""A weight for each batch, chosen from a stack: `weight[ids]`, and what moves its axes after that.

    stack -> [ids] -> moves -> bmm      ->      stack -> moves -> [ids] -> bmm

so that all of the weight's own work is done on the stack, which is constant.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.patterns.inserted import OURS, Emit, before
from qinductor.regions import VIEWS, aten

BATCHED = (aten.bmm.default, aten.baddbmm.default)
COPIES = {aten.clone.default, aten.alias.default, aten.detach.default}
Step = tuple[Any, tuple[Any, ...]]  # an operator, its arguments after the first


def gathers(graph: Graph) -> Iterator[tuple[Node, int, Node, Node]]:
    """(a batched product, the place of an operand, the stack from which that is chosen, which)."""
    for target in BATCHED:
        for node in graph.find_nodes(op="call_function", target=target, sort=False):
            first = 1 if target is aten.baddbmm.default else 0
            for i in (first, first + 1):
                found = _traced(_arguments(node)[i])
                if found is not None:
                    yield node, i, found[0], found[1]


def gather_last(node: Node, i: int) -> None:
    """Moves the axes of the stack before operand i of a product is chosen from it."""
    found = _traced(_arguments(node)[i])
    assert found is not None
    stack, ids, steps = found
    emit = before(node, stack)
    for target, args in steps:
        stack = emit(target, stack, *args)
        stack.meta[OURS] = True
    node.update_arg(i, _chosen(emit, stack, ids))


def gathered(side: Node) -> tuple[Node, Node] | None:
    """(the stack, which of it each batch takes) of an operand that is chosen, and not moved."""
    found = _traced(side)
    return None if found is None or found[2] else found[:2]


def _chosen(emit: Emit, stack: Node, ids: Node) -> Node:
    made = emit(aten.index.Tensor, stack, [ids])
    made.meta[OURS] = True
    return made


def _traced(side: Node) -> tuple[Node, Node, list[Step]] | None:
    """(the stack, which of it, the moves after that) of an operand; None where it is not chosen
    along its first axis, or moved so that this is another."""
    steps: list[Step] = []
    while side.op == "call_function" and (args := _arguments(side)):
        if side.target in (aten.index.Tensor, aten.index_select.default):
            stack, ids = args[0], _ids(side.target, args)
            if ids is None or stack.meta["val"].dim() < 3:
                return None
            return stack, ids, steps[::-1]
        source = args[0]
        if not isinstance(source, Node) or not isinstance(source.meta.get("val"), torch.Tensor):
            return None
        step = _step(side, args, source.meta["val"], side.meta["val"])
        if step is None:
            return None
        steps += step
        side = source
    return None


def _ids(target: Any, args: Any) -> Node | None:
    """Which entries are chosen, if they are so along the first axis alone, by whole numbers."""
    if target is aten.index.Tensor:
        ids, *others = args[1]
        ids = None if any(other is not None for other in others) else ids
    else:
        ids = args[2] if args[1] % args[0].meta["val"].dim() == 0 else None
    if not isinstance(ids, Node) or ids.meta["val"].dim() != 1:
        return None
    return ids if ids.meta["val"].dtype in (torch.int32, torch.int64) else None


def _step(node: Node, args: Any, old: torch.Tensor, new: torch.Tensor) -> list[Step] | None:
    """A move as it is of a stack of any size; None where it does not keep the first axis."""
    rank = old.dim()
    if not rank or not new.dim() or not statically_known_true(old.shape[0] == new.shape[0]):
        return None
    if node.target in COPIES:
        return []
    if node.target is aten.permute.default:
        return [(node.target, (list(args[1]),))] if args[1][0] % rank == 0 else None
    if node.target is aten.transpose.int:
        return [(node.target, args[1:])] if args[1] % rank and args[2] % rank else None
    if node.target is aten.unsqueeze.default:
        return [(node.target, args[1:])] if args[1] % (rank + 1) else None
    if node.target in (aten.squeeze.dim, aten.squeeze.dims):
        axes = [args[1]] if node.target is aten.squeeze.dim else args[1]
        return [(node.target, args[1:])] if all(axis % rank for axis in axes) else None
    rest = new.shape[1:]
    if not all(isinstance(size, int) for size in (*old.shape[1:], *rest)):
        return None
    if node.target is aten.expand.default:
        return [] if tuple(old.shape[1:]) == tuple(rest) else None
    return [(aten.reshape.default, ([-1, *rest],))] if node.target in VIEWS else None


def _arguments(node: Node) -> Any:
    return node.args
