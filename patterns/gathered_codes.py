"""Codes that are chosen first, and dequantised then: `dequantise(codes[ids], scale[ids])`.

    codes -> [ids] \\                         codes \\
                    dequantise -> bmm   ->           dequantise -> [ids] -> bmm
    scale -> [ids] /                         scale /

Every operator in between must compute each entry of the first axis, or of as many as ids have, on
its own. Then they may run on the whole stack, which is constant; where the product is not lowered,
that is undone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.patterns.gathers import BATCHED, COPIES, ids_of
from qinductor.patterns.inserted import GONE, INSTEAD, MOVED, OURS, before, read, sweep
from qinductor.regions import CASTS, VIEWS, Scope, aten, behind

OF_AXIS = {aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.unsqueeze.default}  # args[1]
AXES = VIEWS | COPIES | {
    aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.expand.default,
}  # fmt: skip
JOINS = {aten.cat.default, aten.stack.default}


def choose_last(graph: Graph, scope: Scope, is_quantized: Callable[[Node], bool]) -> None:
    """Puts the choice behind the dequantisation, where a batched product takes it."""
    moved: dict[Node, Node] = {}  # a choice that was put in -> what it takes the place of
    for target, first in BATCHED.items():
        for node in graph.find_nodes(op="call_function", target=target, sort=False):
            for place in (first, first + 1):
                _chosen_last(node, place, scope, is_quantized, moved)


def _chosen_last(
    node: Node,
    place: int,
    scope: Scope,
    is_quantized: Callable[[Node], bool],
    moved: dict[Node, Node],
) -> None:
    operand: Any = node.args[place]
    side, moves = operand, list[Node]()
    order, varying = behind(side, scope)
    varying = [n for n in varying if isinstance(n.meta.get("val"), torch.Tensor)]  # else a size
    choices = [n for n in order if ids_of(n) is not None]
    if not varying or not choices:
        return
    ids = ids_of(choices[-1])
    assert ids is not None
    if (rank := ids.meta["val"].dim()) > 1:  # `gathers` has the moves that mix these axes
        while side not in choices and side.target in AXES:
            moves.append(side)
            side = side.args[0]
        order = behind(side, scope)[0]
    first = moves[-1] if moves else node
    if side in moved:  # by another product that has these moves, too
        read(node, first, moved[side], side)
    own = set(behind(ids, scope)[0])
    choices = [n for n in choices if n not in own and ids_of(n) is ids and _is_constant(n, scope)]
    after = _after(choices, order, own)
    if not choices or side not in after or side in choices or set(varying) - own:
        return
    put, made = before(first, side), dict[Node, Any]()
    steps = [_step(n, set(choices) | set(after), rank) for n in after]
    if not all(steps):
        return
    for choice in choices:
        made[choice] = choice.args[0]
    for n, step in zip(after, steps, strict=True):
        assert step is not None
        args, kwargs = torch.fx.node.map_arg((step, dict(n.kwargs)), lambda a: made.get(a, a))
        made[n] = put(aten.reshape.default if n.target in VIEWS else n.target, *args, **kwargs)
        made[n].meta[OURS] = True
    if is_quantized(made[side]):
        chosen = put(aten.index.Tensor, made[side], [ids])
        chosen.meta[OURS] = True
        moved[chosen] = side
        read(node, first, side, chosen)


def undo(node: Node) -> None:
    """A product has the operands again that it had before `choose_last` and `gather_last`."""
    if INSTEAD in node.meta:
        whole, original = node.meta[INSTEAD]
        whole.replace_all_uses_with(original)
        del original.meta[GONE]
        for made in (whole, node, *node.all_input_nodes):
            made.meta[OURS] = True
        node = original
    for reader, was, now in reversed(node.meta.pop(MOVED, ())):
        reader.replace_input_with(now, was)
    sweep(node.graph)


def _is_constant(choice: Node, scope: Scope) -> bool:
    stack = choice.args[0]
    return isinstance(stack, Node) and not behind(stack, scope)[1]


def _after(choices: list[Node], order: list[Node], own: set[Node]) -> list[Node]:
    """Nodes of a region that are made of what was chosen, in order."""
    held, found = set(choices), []
    for node in order:
        if node not in held | own and not held.isdisjoint(node.all_input_nodes):
            found.append(node)
            held.add(node)
    return found


def _step(node: Node, chosen: set[Node], rank: int) -> tuple[Any, ...] | None:
    """The arguments of an operator for a stack of any size, whose first axis stands for so many as
    what was chosen has; None where entries of these are not computed each on its own."""
    args: Any = node.args
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
        return None
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    shapes = [(n.meta["val"].shape, n in chosen) for n in inputs]
    if value.dim() < rank or any(varies and len(shape) < rank for shape, varies in shapes):
        return None
    first, axes = args[0], len(shapes[0][0])
    if target in VIEWS:
        sizes = list(value.shape[rank:])
        kept = _same_lead(shapes[0][0], value.shape, rank) and _whole(sizes)
        return (first, [-1, *sizes]) if kept else None
    if target is aten.expand.default:
        sizes = list(value.shape[rank:])
        same = axes == value.dim() and _same_lead(shapes[0][0], value.shape, rank)
        return (first, [-1, *sizes]) if same and _whole(sizes) else None
    if target is aten.permute.default:
        order = [axis % axes for axis in args[1]]
        kept = order[:rank] == list(range(rank))
        return (first, [0, *(axis - rank + 1 for axis in order[rank:])]) if kept else None
    if target is aten.transpose.int:
        turned = [axis % axes for axis in args[1:3]]
        return (first, *(axis - axes for axis in turned)) if min(turned) >= rank else None
    if target in OF_AXIS or target in JOINS:
        every = target in OF_AXIS or all(varies for _, varies in shapes)
        axes += target in (aten.unsqueeze.default, aten.stack.default)
        axis = (args[1] if len(args) > 1 else 0) % axes
        return (first, axis - axes, *args[2:]) if every and axis >= rank else None
    if target is aten.index.Tensor:  # entries of a table
        return args if first not in chosen and len(args[1]) == 1 and axes == 1 else None
    if target in CASTS | COPIES or torch.Tag.pointwise in target.tags:
        return args if all(_alike(*of, value, rank) for of in shapes) else None
    return None


def _same_lead(shape: torch.Size, other: torch.Size, rank: int) -> bool:
    """Whether the first axes of two shapes are of the same sizes."""
    return all(
        statically_known_true(a == b) for a, b in zip(shape[:rank], other[:rank], strict=True)
    )


def _alike(shape: torch.Size, varies: bool, value: torch.Tensor, rank: int) -> bool:
    """Whether an operand of a pointwise operator has the entries of the result along the first
    axes, or the same for all."""
    if varies:
        return len(shape) == value.dim() and _same_lead(shape, value.shape, rank)
    lead = len(shape) - value.dim() + rank  # the first axes become one
    return lead <= 0 or (lead == 1 and statically_known_true(shape[0] == 1))


def _whole(sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)
