"""torch's own fake quantisers, spelled out in the graph where a product takes what they give.

    fake_quantize_*_affine_cachemask(x, s, z, low, high)[0]
        ->  (clamp(round(x * (1 / s)) + z, low, high) - z) * s

In float32, and bit for bit: a NaN becomes the lowest code, and by channels a CPU makes integers of
64 bits first, so that what is beyond them does, too.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from qinductor.patterns.inserted import Emit, before
from qinductor.patterns.products import ANCHORS
from qinductor.patterns.whole import span
from qinductor.regions import FLOATS, INTEGER, MOVES, aten, prims

FP32 = torch.float32


def spell_out(graph: Graph) -> None:
    """Puts nodes in place of those fake quantisers whose mask nothing reads."""
    for target, parts in PARTS.items():
        for node in graph.find_nodes(op="call_function", target=target, sort=False):
            results = list(node.users)
            values = all(u.target is operator.getitem and u.args[1] == 0 for u in results)
            x = node.args[0]
            known = isinstance(x, Node) and x.meta["val"].dtype in FLOATS
            if not known or not values or not any(map(_is_multiplied, results)):
                continue
            emit = before(node, x)
            found = parts(node, emit)
            if found is None:
                continue
            made = _made(x, *found, emit)
            for result in results:
                result.replace_all_uses_with(made)
                graph.erase_node(result)
            graph.erase_node(node)


def _is_multiplied(node: Node) -> bool:
    return any(
        (user.target in ANCHORS and ANCHORS[user.target][0] is not None)
        or (user.target in MOVES and _is_multiplied(user))
        for user in node.users
    )


def _made(x: Node, scale: Node, zero: Any, low: int, high: int, emit: Emit) -> Node:
    """What the operator gives; a zero is a node, or a number that is 0 where there is none."""
    cast = prims.convert_element_type.default
    value = x.meta["val"]
    wide = x if value.dtype == FP32 else emit(cast, x, FP32)
    q = emit(aten.mul.Tensor, wide, emit(aten.reciprocal.default, scale))
    q = emit(aten.round.default, q)
    shifted = isinstance(zero, Node) or zero != 0
    q = emit(aten.add.Tensor, q, zero) if shifted else q
    if scale.meta["val"].dim() > 1:  # by channels, it makes integers first
        q = emit(cast, q, torch.int64)
    else:  # and else the lowest code of NaN
        end = emit(aten.full.default, [], low, dtype=FP32, device=value.device, pin_memory=False)
        q = emit(aten.where.self, emit(aten.ge.Scalar, q, low), q, end)
    q = emit(aten.clamp_max.default, emit(aten.clamp_min.default, q, low), high)
    q = emit(aten.sub.Tensor, q, zero) if shifted else q
    q = q if q.meta["val"].dtype == FP32 else emit(cast, q, FP32)
    y = emit(aten.mul.Tensor, q, scale)
    return y if value.dtype == FP32 else emit(cast, y, value.dtype)


Found = tuple[Node, Any, int, int]  # scale in float32, zero, smallest and largest code


def _of_numbers(node: Node, emit: Emit) -> Found | None:
    x, scale, zero, low, high = node.args
    assert isinstance(x, Node)
    if not isinstance(scale, float) or not isinstance(zero, int):
        return None
    device = x.meta["val"].device
    full = emit(aten.full.default, [1], scale, dtype=FP32, device=device, pin_memory=False)
    return full, zero, low, high  # type: ignore[return-value]


def _of_tensors(node: Node, emit: Emit) -> Found | None:
    _, scale, zero, enabled, low, high = node.args
    on = span(enabled, {})
    if (on.low, on.high) != (1, 1):
        return None
    return _held(scale, zero, low, high, None, emit)


def _of_channels(node: Node, emit: Emit) -> Found | None:
    x, scale, zero, axis, low, high = node.args
    assert isinstance(x, Node) and isinstance(axis, int)
    shape = [1] * x.meta["val"].dim()
    shape[axis] = -1
    return _held(scale, zero, low, high, shape, emit)


def _held(
    scale: Any, zero: Any, low: Any, high: Any, shape: list[int] | None, emit: Emit
) -> Found | None:
    """Tensors as float32 and integers, viewed; None where they are of other dtypes."""
    if scale.meta["val"].dtype != FP32 or zero.meta["val"].dtype not in INTEGER:
        return None
    if shape is not None:
        scale, zero = (emit(aten.view.default, n, shape) for n in (scale, zero))
    return scale, zero, low, high


PARTS: dict[Any, Callable[[Node, Emit], Found | None]] = {
    aten.fake_quantize_per_tensor_affine_cachemask.default: _of_numbers,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _of_tensors,
    aten.fake_quantize_per_channel_affine_cachemask.default: _of_channels,
}
