"""Codes that are chosen first, and dequantised then: `dequantise(codes[ids], scale[ids])`.

    codes -> [ids] \\                         codes \\
                    dequantise -> bmm   ->           dequantise -> [ids] -> bmm
    scale -> [ids] /                         scale /

Every operator in between must compute each entry of the first axis on its own. Then they may run on
the whole stack, which is constant; where the product is not lowered, that is undone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.patterns.gathers import BATCHED, COPIES, ids_of
from qinductor.patterns.inserted import OURS, before
from qinductor.regions import CASTS, VIEWS, Scope, aten, behind

OF_AXIS = {aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.unsqueeze.default}  # args[1]
BEFORE = "qinductor chosen first"
JOINS = {aten.cat.default, aten.stack.default}


def choose_last(graph: Graph, scope: Scope, is_quantized: Callable[[Node], bool]) -> None:
    """Puts the choice behind the dequantisation, where a batched product takes it."""
    for target, first in BATCHED.items():
        for node in graph.find_nodes(op="call_function", target=target, sort=False):
            for place in (first, first + 1):
                _chosen_last(node, place, scope, is_quantized)


def _chosen_last(
    node: Node, place: int, scope: Scope, is_quantized: Callable[[Node], bool]
) -> None:
    side: Any = node.args[place]
    order, varying = behind(side, scope)
    varying = [n for n in varying if isinstance(n.meta.get("val"), torch.Tensor)]  # else a size
    choices = [n for n in order if _ids(n) is not None]
    if not varying or not choices:
        return
    ids = _ids(choices[-1])
    assert ids is not None
    own = set(behind(ids, scope)[0])
    choices = [n for n in choices if n not in own and _ids(n) is ids and _is_constant(n, scope)]
    after = _after(choices, order, own)
    if not choices or side not in after or side in choices or set(varying) - own:
        return
    put, made = before(node, side), dict[Node, Any]()
    steps = [_step(n, set(choices) | set(after)) for n in after]
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
        chosen.meta |= {OURS: True, BEFORE: side}
        node.update_arg(place, chosen)


def undo(node: Node) -> None:
    """Gives a product the operands again that it had before `choose_last`."""
    for i, side in enumerate(node.args):
        if isinstance(side, Node) and BEFORE in side.meta:
            node.update_arg(i, side.meta[BEFORE])


def _ids(node: Node) -> Node | None:
    """By what vector of whole numbers a node chooses along the first axis alone."""
    ids = ids_of(node)
    return ids if ids is not None and ids.meta["val"].dim() == 1 else None


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


def _step(node: Node, chosen: set[Node]) -> tuple[Any, ...] | None:
    """The arguments of an operator for a stack of any size; None where entries of the first axis
    are not computed each on its own."""
    args: Any = node.args
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
        return None
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    shapes = [(n.meta["val"].shape, n in chosen) for n in inputs]
    if not value.dim() or any(varies and not len(shape) for shape, varies in shapes):
        return None
    first = args[0]
    if target in VIEWS:
        kept = statically_known_true(shapes[0][0][0] == value.shape[0])
        sizes = list(value.shape[1:])
        return (first, [-1, *sizes]) if kept and _whole(sizes) else None
    rank = len(shapes[0][0])
    if target is aten.expand.default:
        same = rank == value.dim() and statically_known_true(shapes[0][0][0] == value.shape[0])
        return (first, [-1, *value.shape[1:]]) if same and _whole(value.shape[1:]) else None
    if target is aten.permute.default:
        return args if args[1][0] % rank == 0 else None
    if target is aten.transpose.int:
        return args if all(axis % rank for axis in args[1:3]) else None
    if target in OF_AXIS:
        axis = args[1] if len(args) > 1 else 0
        return args if axis % (rank + (target is aten.unsqueeze.default)) else None
    if target in JOINS:
        axis = args[1] if len(args) > 1 else 0
        every = all(varies for _, varies in shapes)
        return args if every and axis % (rank + (target is aten.stack.default)) else None
    if target is aten.index.Tensor:  # entries of a table
        table = first not in chosen and len(args[1]) == 1 and len(shapes[0][0]) == 1
        return args if table else None
    if target in CASTS | COPIES or torch.Tag.pointwise in target.tags:
        return args if all(_alike(*of, value) for of in shapes) else None
    return None


def _alike(shape: torch.Size, varies: bool, value: torch.Tensor) -> bool:
    """Whether an operand of a pointwise operator has the entries of the result along the first
    axis, or the same for all."""
    if varies:
        return len(shape) == value.dim() and statically_known_true(shape[0] == value.shape[0])
    return len(shape) < value.dim() or statically_known_true(shape[0] == 1)


def _whole(sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)
