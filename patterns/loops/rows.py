"""Operators that compute each row of a turn by itself, and along which axis rows lie."""

import math
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from qinductor.errors import Refused
from qinductor.patterns.loops.find import unknown
from qinductor.patterns.loops.turns import Chain
from qinductor.regions import CASTS, VIEWS, aten, describe, pure

PRODUCTS = {aten.mm.default, aten.addmm.default}
# Operators over axes -> place of the axes among the arguments.
OVER = {
    aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.amax.default: 1, aten.amin.default: 1,
    aten._softmax.default: 1, aten._log_softmax.default: 1, aten.var.correction: 1,
    aten.any.dim: 1, aten.cumsum.default: 1, aten.max.dim: 1, aten.min.dim: 1,
    aten.linalg_vector_norm.default: 2, aten.slice.Tensor: 1, aten.select.int: 1,
    aten.squeeze.dim: 1, aten.squeeze.dims: 1, aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2, aten.unbind.int: 1, aten.cat.default: 1,
}  # fmt: skip
FREE = {
    aten.clone.default, aten.alias.default, aten.detach.default, aten.full_like.default,
    aten.zeros_like.default, aten.ones_like.default,
}  # fmt: skip
MOVED = {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default,
    aten.expand.default,
}  # fmt: skip


def axis_of(node: Node) -> int:
    """Along which axis rows lie; Refused where they do not lie along one."""
    value = node.meta["val"]
    parts = value if isinstance(value, (list, tuple)) else [value]
    at = {tuple(i for i, s in enumerate(p.shape) if free_unbacked_symbols(s)) for p in parts}
    found = next(iter(at))
    if len(at) > 1 or len(found) != 1 or not _is_plain(parts[0].shape[found[0]]):
        raise Refused(f"{node.name} ({node.target}) has rows of a turn along no one axis")
    return found[0]


def _is_plain(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and size.node.expr.is_symbol


def check_rows(step: Node, chain: Chain) -> None:
    """Refused for an operator that may compute a row from others."""
    target, args = step.target, step.args
    if not _is_by_rows(step, chain):
        shown = ", ".join(describe(n) for n in step.all_input_nodes[:2])
        raise Refused(
            f"each row of a turn must be computed by itself; {step.name} ({target}) of {shown} "
            f"with {[a for a in args if not isinstance(a, Node)]} may mix them"
        )


def _is_by_rows(step: Node, chain: Chain) -> bool:
    target: Any = step.target
    args: Any = step.args
    axis = axis_of(step)
    inner = [n for n in step.all_input_nodes if n in chain.steps]
    if read_of(step) is not None:
        return _is_read(step, chain, axis)
    if not inner or not pure(step):
        return False
    first = inner[0]
    if target in VIEWS:
        return _is_view(first, axis_of(first), step, axis)
    if target.__name__ == "getitem":
        return True
    if target in OVER:
        place = OVER[target]
        over: Any = args[place] if len(args) > place else step.kwargs.get("dim", 0)
        if over is None:
            return False
        rank = _rank(first)
        axes = [a % rank for a in (over if isinstance(over, (list, tuple)) else [over])]
        return bool(axes) and all(axis_of(n) not in axes for n in inner)
    if target in CASTS | FREE | MOVED:
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    rank = step.meta["val"].dim()
    return all(axis_of(n) + rank - _rank(n) == axis for n in inner)


def _rank(node: Node) -> int:
    value = node.meta["val"]
    return int((value[0] if isinstance(value, (list, tuple)) else value).dim())


def _is_view(source: Node, before: int, step: Node, after: int) -> bool:
    """Whether rows are neither split nor put together with another axis."""
    old, new = source.meta["val"].shape, step.meta["val"].shape
    outer = [s for s in (*old[:before], *new[:after]) if not isinstance(s, int)]
    return not outer and math.prod(old[:before]) == math.prod(new[:after])


def read_of(step: Node) -> tuple[Node, list[Node | None]] | None:
    """(a table, what chooses from each of its axes) of what reads entries of one; else None."""
    args: Any = step.args
    if step.target is aten.index.Tensor:
        return args[0], list(args[1])
    if step.target is aten.index_select.default:
        axis = args[1] % args[0].meta["val"].dim()
        return args[0], [*(None for _ in range(axis)), args[2]]
    return None


def _is_read(step: Node, chain: Chain, axis: int) -> bool:
    """Whether rows of a table are read, by numbers of rows alone, which lie side by side."""
    read = read_of(step)
    assert read is not None
    table, chosen = read
    if table in chain.steps:
        return False
    at = [i for i, node in enumerate(chosen) if node is not None]
    plain = all(chosen[i] in chain.places for i in at)
    return plain and at == list(range(at[0], at[-1] + 1)) and axis == at[0] and not unknown(table)


def resized(step: Node) -> tuple[Any, ...]:
    """The arguments, with -1 for the number of rows among sizes."""
    args: Any = step.args
    if step.target not in VIEWS | {aten.expand.default}:
        return step.args
    axis = axis_of(step)
    sizes = [-1 if i == axis else size for i, size in enumerate(step.meta["val"].shape)]
    if not all(isinstance(size, int) for size in sizes):
        raise Refused(f"{step.name} has more than one size that is no number")
    return args[0], sizes
