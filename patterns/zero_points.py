"""Zero points and scales of activations: where a graph has them, and that zeros are whole."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.regions import FLOAT8, FLOATS, INTEGER, MOVES, VIEWS, aten, describe, prims, pure

# What gives whole numbers.
ROUNDED = (aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default)
# What gives whole numbers for whole numbers.
KEEPS = {
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.neg.default, aten.clamp.default,
    aten.clamp_min.default, aten.clamp_max.default, aten.minimum.default, aten.maximum.default,
    aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.full.default, aten.full_like.default,
    prims.convert_element_type.default, *MOVES,
}  # fmt: skip
WHOLE_UP_TO = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}  # bits
NAMES = ("scale", "scales"), ("zero_point", "zero_points", "zero", "zeros")  # in a schema
Given = Node | float | None  # a tensor, a number that the graph has, or nothing


class Dequantiser(NamedTuple):
    """An operator that makes floats of codes, by its schema: what that computes is probed."""

    codes: Node
    scale: Given
    zero: Given
    target: Any


def dequantiser(node: Node) -> Dequantiser | None:
    """What a node dequantises, if its operator is no torch one and names codes and scale."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims"):
        return None
    if not pure(node) or not isinstance(value, torch.Tensor) or value.dtype not in FLOATS:
        return None
    names = [argument.name for argument in target._schema.arguments]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    codes = node.args[0] if node.args else None
    scale, zero = (next((n for n in each if n in names), None) for each in NAMES)
    if not isinstance(codes, Node) or scale is None or codes.meta["val"].dim() != value.dim():
        return None
    if codes.meta["val"].dtype.is_floating_point and codes.meta["val"].dtype.itemsize > 1:
        return None
    made = functools.partial(target, **node.kwargs) if node.kwargs else target
    return Dequantiser(codes, given.get(scale), given.get(zero) if zero else None, made)


def is_quantiser(node: Node) -> bool:
    """Whether a node makes codes of floats, and its operator is no torch one and names a scale."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims"):
        return False
    if not isinstance(value, torch.Tensor) or value.dtype not in (*INTEGER, *FLOAT8):
        return False
    source = node.args[0] if node.args else None
    held = source.meta.get("val") if isinstance(source, Node) else None
    floats = isinstance(held, torch.Tensor) and held.dtype in FLOATS and held.dim() == value.dim()
    return floats and any(a.name in NAMES[0] for a in target._schema.arguments)


def stored(zero: Node) -> Node:
    """The tensor whose values are subtracted, without casts that keep them and views. Refused if it
    is not known to hold whole numbers alone."""
    if not is_whole(zero):
        raise Refused(
            f"zero points of x must be whole numbers, rounded or integers; {describe(zero)} "
            f"({zero.name}) may not be"
        )
    node = zero
    while True:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or node.target not in _PEELED:
            return node
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        if before != after and not _keeps(before, after):
            return node
        node = source


_PEELED = {prims.convert_element_type.default, *VIEWS}


def _keeps(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether every whole number of a dtype is one of another."""
    if before not in INTEGER:
        return False
    bits = torch.iinfo(before).bits - (before is not torch.uint8)
    if after in WHOLE_UP_TO:
        return bits <= WHOLE_UP_TO[after]
    return after in INTEGER and bits < torch.iinfo(after).bits


def is_whole(node: Node) -> bool:
    """Whether a tensor holds whole numbers alone: it is rounded, or of integers."""
    return all(map(_is_whole, _ends(node)))


def _ends(node: Node) -> Iterator[Any]:
    """What a node is made of by operators that keep whole numbers."""
    seen, stack = set(), [node]
    while stack:
        current = stack.pop()
        value = current.meta.get("val")
        integers = isinstance(value, torch.Tensor) and value.dtype in INTEGER
        if integers or current.target not in KEEPS:
            yield current
        elif current not in seen:
            seen.add(current)
            fills = current.target is aten.full.default
            operands = current.args[1:2] if fills else current.args
            if current.target in MOVES or current.target is prims.convert_element_type.default:
                operands = operands[:1]
            elif current.target in (aten.full_like.default,):
                operands = operands[1:]
            if current.kwargs.get("alpha", 1) != 1:
                yield current
            stack.extend(a for a in operands if isinstance(a, Node))
            yield from (a for a in operands if not isinstance(a, Node) and a is not None)


def _is_whole(end: Any) -> bool:
    if isinstance(end, Node):
        value = end.meta.get("val")
        integers = isinstance(value, torch.Tensor) and value.dtype in INTEGER
        return integers or end.target in ROUNDED
    return isinstance(end, (int, float)) and float(end).is_integer()


def check_sums(found: torch.Tensor, codes: torch.Tensor) -> None:
    """Refused unless what zero points of x multiply, a number for each row of a weight, is the sum
    of that row of its codes [N, K]. Tensors that were freed were checked before."""
    if "meta" in (found.device.type, codes.device.type):
        return
    wanted = codes.sum(1, dtype=torch.int64).double()
    found = found.reshape(-1).double()
    off = (found != wanted).nonzero().flatten()
    if len(off):
        n = int(off[0])
        raise Refused(
            f"zero points of x must multiply the sums of the weight's codes; of row {n} that is "
            f"{float(wanted[n]):g}, and the graph has {float(found[n]):g}"
        )
