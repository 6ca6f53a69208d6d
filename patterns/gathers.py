"""A weight for each batch, chosen from a stack: `weight[ids]`, and what moves its axes after that.

    stack -> [ids] -> moves -> bmm      ->      stack -> moves -> [flat ids] -> bmm

so that all of the weight's own work is done on the stack, which is constant. Where a batch takes
several weights, one after the other along its rows or columns, each becomes a batch of its own:
"becd,bd->bec" of weight[ids] with ids[b, e] is a product of b * e batches.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.patterns.inserted import GONE, INSTEAD, OURS, before, read
from qinductor.regions import VIEWS, aten

BATCHED = {aten.bmm.default: 0, aten.baddbmm.default: 1}  # place of the left operand
COPIES = {aten.clone.default, aten.alias.default, aten.detach.default}
Axis = list[int]  # the axes of what was chosen that an axis is made of, the slowest first


@dataclasses.dataclass(frozen=True, eq=False)
class Gather:
    """An operand of a batched product that is chosen from a stack.

    node, place  the product, and which of its arguments this is
    stack, ids   what is chosen from along the first axis, and which
    axes         what each of the operand's three axes is made of: axes of ids, then of the stack's
    """

    node: Node
    place: int
    stack: Node
    ids: Node
    axes: tuple[Axis, Axis, Axis]

    @property
    def several(self) -> int:
        """The axis along which a batch has several weights; 0 where it has one."""
        rank = self.ids.meta["val"].dim()
        return next((i for i in (1, 2) if any(axis < rank for axis in self.axes[i])), 0)


def gathers(graph: Graph) -> Iterator[Gather]:
    """The operands of a graph that are chosen so, but for those that nothing moves."""
    for target, first in BATCHED.items():
        for node in graph.find_nodes(op="call_function", target=target, sort=False):
            for place in (first, first + 1):
                found = None if gathered(_arguments(node)[place]) else _traced(node, place)
                if found is not None and not (found.several and first):
                    yield found


def gathered(side: Node) -> tuple[Node, Node] | None:
    """(the stack, which of it each batch takes) of an operand that is chosen, and not moved."""
    ids = ids_of(side)
    if ids is None or ids.meta["val"].dim() != 1 or not _is_stack(side):
        return None
    return _arguments(side)[0], ids


def gather_last(found: Gather) -> None:
    """Moves the axes of a stack before it is chosen from; each weight becomes a batch."""
    put = before(found.node, found.stack)

    def emit(target: Any, *args: Any) -> Node:
        made = put(target, *args)
        made.meta[OURS] = True
        return made

    rank = found.ids.meta["val"].dim()
    groups = [[axis - rank + 1 for axis in axes if axis >= rank] for axes in found.axes[1:]]
    stack, order = found.stack, [0, *groups[0], *groups[1]]
    if order != sorted(order):
        stack = emit(aten.permute.default, stack, order)
    if len(order) != 3:
        shape = stack.meta["val"].shape
        sizes = [shape[1 : 1 + len(groups[0])].numel(), shape[1 + len(groups[0]) :].numel()]
        stack = emit(aten.reshape.default, stack, [-1, *sizes])
    args = list(_arguments(found.node))
    ids = found.ids if rank == 1 else emit(aten.reshape.default, found.ids, [-1])
    side = emit(aten.index.Tensor, stack, [ids])
    if not found.several:
        read(found.node, found.node, args[found.place], side)
        return
    other = 1 - found.place
    batch = _size(args[other], 0, emit)
    args[found.place], args[other] = side, _repeated(args[other], found, emit)
    product = emit(found.node.target, *args)
    del product.meta[OURS]
    sizes = [batch, *found.node.meta["val"].shape[1:]]
    if found.several == 1:
        whole = emit(aten.reshape.default, product, [sizes[0], -1, sizes[2]])
    else:  # each weight's columns lie together in a row
        parts = _size(found.ids, rank - 1, emit)
        n = product.meta["val"].shape[2]
        whole = emit(aten.reshape.default, product, [sizes[0], parts, sizes[1], n])
        whole = emit(aten.permute.default, whole, [0, 2, 1, 3])
        whole = emit(aten.reshape.default, whole, [sizes[0], sizes[1], -1])
    for made in (side, whole):
        made.meta.pop(OURS, None)
    found.node.replace_all_uses_with(whole)
    product.meta[INSTEAD] = whole, found.node
    found.node.meta[GONE] = True


def _repeated(other: Node, found: Gather, emit: Callable[..., Node]) -> Node:
    """The other operand, once for each weight of a batch."""
    rank = found.ids.meta["val"].dim()
    shape = other.meta["val"].shape
    parts = _size(found.ids, rank - 1, emit)
    wide = emit(aten.unsqueeze.default, other, 1)
    wide = emit(aten.expand.default, wide, [-1, parts, -1, -1])
    return emit(aten.reshape.default, wide, [-1, *shape[1:]])


def _size(node: Node, axis: int, emit: Callable[..., Node]) -> Any:
    size = node.meta["val"].shape[axis]
    return size if isinstance(size, int) else emit(aten.sym_size.int, node, axis)


def _traced(node: Node, place: int) -> Gather | None:
    """An operand that is chosen along the first axis of a stack, and then only moved."""
    moves: list[Node] = []
    side = _arguments(node)[place]
    while side.op == "call_function" and (args := _arguments(side)):
        ids = ids_of(side)
        if ids is not None and _is_stack(side):
            axes = _moved(side, moves[::-1])
            return None if axes is None else _gather(node, place, args[0], ids, axes)
        if not isinstance(args[0], Node) or not isinstance(args[0].meta.get("val"), torch.Tensor):
            return None
        moves.append(side)
        side = args[0]
    return None


def _gather(node: Node, place: int, stack: Node, ids: Node, axes: list[Axis]) -> Gather | None:
    """None where batches are no weights, or the rest of the shape is symbolic."""
    rank = ids.meta["val"].dim()
    if len(axes) != 3 or not axes[0] or any(axis >= rank for axis in axes[0]):
        return None
    found = Gather(node, place, stack, ids, (axes[0], axes[1], axes[2]))
    leads = [axis for part in axes for axis in part if axis < rank]
    groups = [[axis for axis in part if axis >= rank] for part in axes[1:]]
    few = len(axes[0]) >= rank - (1 if found.several else 0)
    first = not found.several or axes[found.several][0] == rank - 1
    other = _arguments(node)[1 - place] if found.several and node.target in BATCHED else stack
    sizes = [*stack.meta["val"].shape[1:], *other.meta["val"].shape[1:]]
    outer = found.several in (0, 1 + place)  # else products of several weights are added up
    fits = leads == list(range(rank)) and all(groups) and few and first and outer
    return found if fits and all(isinstance(size, int) for size in sizes) else None


def ids_of(node: Node) -> Node | None:
    """Which entries a node chooses, if it does so along the first axis alone, by whole numbers."""
    ids, args = None, _arguments(node)
    if node.target is aten.index.Tensor:
        ids, *others = args[1]
        ids = None if any(other is not None for other in others) else ids
    elif node.target is aten.index_select.default:
        ids = args[2] if args[1] % max(1, args[0].meta["val"].dim()) == 0 else None
    if not isinstance(ids, Node) or not isinstance(args[0], Node):
        return None
    value = ids.meta["val"]
    return ids if value.dtype in (torch.int32, torch.int64) and value.dim() > 0 else None


def _is_stack(chosen: Node) -> bool:
    """Whether what is chosen from has weights of two axes or more."""
    return bool(_arguments(chosen)[0].meta["val"].dim() >= 3)


def _moved(chosen: Node, moves: Sequence[Node]) -> list[Axis] | None:
    """What the axes are made of after these moves; None where one does something else."""
    sizes = list(chosen.meta["val"].shape)
    axes: list[Axis] = [[axis] for axis in range(len(sizes))]
    for node in moves:
        args, rank, shape = _arguments(node), len(axes), node.meta["val"].shape
        if node.target in COPIES:
            continue
        if node.target is aten.permute.default:
            axes = [axes[axis % rank] for axis in args[1]]
        elif node.target is aten.transpose.int:
            first, second = args[1] % rank, args[2] % rank
            axes[first], axes[second] = axes[second], axes[first]
        elif node.target is aten.unsqueeze.default:
            axes.insert(args[1] % (rank + 1), [])
        elif node.target in (aten.squeeze.dim, aten.squeeze.dims):
            gone = {axis % rank for axis in (args[1] if isinstance(args[1], list) else [args[1]])}
            if any(axes[axis] for axis in gone):
                return None
            axes = [axis for i, axis in enumerate(axes) if i not in gone]
        elif node.target is aten.expand.default:
            before_it = args[0].meta["val"].shape
            if len(before_it) != len(shape) or not all(map(_same, before_it, shape)):
                return None
        elif node.target in VIEWS:
            found = _viewed([axis for part in axes for axis in part], sizes, shape)
            if found is None:
                return None
            axes = found
        else:
            return None
    return axes


def _viewed(order: Axis, sizes: Sequence[Any], shape: Sequence[Any]) -> list[Axis] | None:
    """Axes in this order, cut into a shape; None where one of them would have to be split."""
    left, found = list(order), []
    for size in shape:
        part: Axis = []
        held: Any = 1
        while left and not _same(held, size):
            part.append(left.pop(0))
            held = held * sizes[part[-1]]
        if not _same(held, size):
            return None
        found.append(part)
    while left and _same(sizes[left[0]], 1):
        found[-1].append(left.pop(0))
    return None if left else found


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _arguments(node: Node) -> Any:
    return node.args
