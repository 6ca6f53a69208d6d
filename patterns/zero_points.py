"""Zero points and scales of activations: where a graph has them, and that zeros are whole."""

import functools
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.whole import span
from qinductor.regions import FLOAT8, FLOATS, INTEGER, VIEWS, describe, prims, pure

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
    """What a node dequantises, if its operator is no torch one, takes codes, and names a scale."""
    names, value = _named(node), node.meta.get("val")
    if not pure(node) or not isinstance(value, torch.Tensor) or value.dtype not in FLOATS:
        return None
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    codes = node.args[0] if node.args else None
    scale, zero = (next((n for n in each if n in names), None) for each in NAMES)
    if not isinstance(codes, Node) or scale is None or codes.meta["val"].dim() != value.dim():
        return None
    if codes.meta["val"].dtype.is_floating_point and codes.meta["val"].dtype.itemsize > 1:
        return None
    target: Any = node.target
    made = functools.partial(target, **node.kwargs) if node.kwargs else target
    return Dequantiser(codes, given.get(scale), given.get(zero) if zero else None, made)


def is_quantiser(node: Node) -> bool:
    """Whether a node makes codes of floats, and its operator is no torch one and names a scale."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in (*INTEGER, *FLOAT8):
        return False
    source = node.args[0] if node.args else None
    held = source.meta.get("val") if isinstance(source, Node) else None
    floats = isinstance(held, torch.Tensor) and held.dtype in FLOATS and held.dim() == value.dim()
    return floats and any(name in NAMES[0] for name in _named(node))


def _named(node: Node) -> list[str]:
    """The names of the arguments that an operator takes; none of torch's own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims"):
        return []
    return [argument.name for argument in target._schema.arguments]


def stored(zero: Node) -> Node:
    """The tensor whose values are subtracted, without casts that keep them and views. Refused if it
    is not known to hold whole numbers alone."""
    if not span(zero, {}).whole:
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
