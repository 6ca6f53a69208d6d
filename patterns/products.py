"""Products of a quantised weight: which operand it is, and which operator takes the product."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.gathers import gathered
from qinductor.patterns.weight_formats.inner import codes_within
from qinductor.patterns.weight_formats.pieces import stacked
from qinductor.regions import (
    CODED,
    FLOAT8,
    MOVES,
    PRODUCTS,
    VIEWS,
    Axes,
    Scope,
    aten,
    behind,
    describe,
)

# product -> (operator, place of the left side, place of the bias)
ANCHORS: dict[Any, tuple[str | None, int, int | None]] = {
    aten.mm.default: ("dequant_matmul", 0, None),
    aten.addmm.default: ("dequant_matmul", 1, 0),
    aten.bmm.default: ("dequant_bmm", 0, None),
    aten.baddbmm.default: ("dequant_bmm", 1, 0),
    aten._grouped_mm.default: ("dequant_grouped_matmul", 0, None),
    aten.convolution.default: (None, 0, None),
}
LOOKUPS = {aten.embedding.default}
ROW_READS = LOOKUPS | {aten.index.Tensor, aten.index_select.default}  # of some rows of a weight


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """One product with a quantised weight.

    weight, axes    the node that is dequantised, and what its axes are
    inputs          the activation and, of a grouped product, the offsets; of a gathered one, which
                    weight each of its batches is multiplied by
    operator, form  what takes the product, and how it stands to that, see `Lowering`
    """

    node: Node
    weight: Node
    axes: Axes
    inputs: tuple[Node, ...]
    bias: Node | None
    operator: str
    form: str = "plain"


def rows_of(product: Product) -> int | None:
    """The M of the operator; None where it is symbolic, and of a grouped or gathered product, whose
    experts take as many as there are."""
    if len(product.inputs) > 1:
        return None
    shape = product.inputs[0].meta["val"].shape
    m = shape[-1] if "turned" in product.form else shape[-2]
    m = m * shape[0] if "batched" in product.form else m
    return m if isinstance(m, int) else None


def sides(node: Node) -> tuple[Node, Node]:
    """The left and the right operand of a product."""
    at = ANCHORS[node.target][1]
    left, right = node.args[at], node.args[at + 1]
    assert isinstance(left, Node) and isinstance(right, Node)
    return left, right


def is_quantized(side: Node, scope: Scope) -> bool:
    """Whether an operand is made from stored codes, or from a constant rounded in every call; or
    chosen for each batch from a stack that is."""
    chosen = chosen_from(side, scope)
    if chosen is not None:
        side = chosen[0]
    pieces = stacked(side)
    if pieces:
        return all(is_quantized(piece, scope) for piece in pieces)
    order, varying = behind(side, scope)
    value = side.meta["val"]
    if value.dim() < 2 or not value.dtype.is_floating_point:
        return False
    value = (unexpanded(side) or side).meta["val"]
    elements = math.prod(size for size in value.shape if isinstance(size, int))
    codes = [n for n in order if n.op != "call_function" and _holds_codes(n, elements)]
    sized = [n for n in order if n in scope.leaves and _has_codes_dtype(n)]
    tensors = [n for n in varying if isinstance(n.meta.get("val"), torch.Tensor)]
    symbolic = any(isinstance(size, torch.SymInt) for size in value.shape)
    if not tensors:
        rounded = not codes and codes_within(order, elements, {})
        return bool(codes or rounded or (symbolic and sized))
    computed = any(n.target in PRODUCTS | LOOKUPS for n in order)
    return bool(codes) and not computed and not symbolic


def _has_codes_dtype(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in CODED


def _holds_codes(node: Node, elements: int) -> bool:
    """Whether the tensor has at least a bit for each element."""
    if not _has_codes_dtype(node):
        return False
    value = node.meta["val"]
    size = value.numel()
    return isinstance(size, int) and size * value.dtype.itemsize * 8 >= elements


def check_factors(node: Node) -> None:
    """Refused for an addmm or baddbmm that multiplies its bias or its sums by a number."""
    factors = {name: node.kwargs.get(name, 1) for name in ("beta", "alpha")}
    if any(factor != 1 for factor in factors.values()):
        raise Refused(f"{node.target} must have beta = 1 and alpha = 1; it has {factors}")


def product_of(node: Node, scope: Scope) -> Product:
    """What multiplies what, or Refused where no operator has this form."""
    if node.target not in ANCHORS:
        raise Refused(
            "the product must be in the graph of its dequantised weight; a graph break in between "
            f"makes {describe(node)} an output of this graph"
        )
    operator, _, at_bias = ANCHORS[node.target]
    if operator is None:
        raise Refused(f"the product must be of matrices; it is {node.target}")
    left, right = sides(node)
    bias = None if at_bias is None else node.args[at_bias]
    assert bias is None or isinstance(bias, Node)
    if operator == "dequant_grouped_matmul":
        return _grouped(node, left, right)
    turned = not is_quantized(right, scope)
    x, weight = (right, left) if turned else (left, right)
    if turned and bias is not None:
        raise Refused(f"the weight must be the right operand of {node.target}; it is the left one")
    if operator == "dequant_matmul":
        axes = Axes(0, 1) if turned else Axes(1, 0)
        return Product(node, weight, axes, (x,), bias, operator, "turned" if turned else "plain")
    chosen = chosen_from(weight, scope)
    if chosen is not None:
        return _gathered(node, x, *chosen, turned)
    _check_own_batch(weight)
    one = unexpanded(weight)
    if one is not None:
        rank = one.meta["val"].dim()
        axes = Axes(rank - 2, rank - 1) if turned else Axes(rank - 1, rank - 2)
        form = "turned batched" if turned else "batched"
        return Product(node, one, axes, (x,), bias, "dequant_matmul", form)
    axes = Axes(1, 2, 0) if turned else Axes(2, 1, 0)
    return Product(node, weight, axes, (x,), bias, operator, "turned" if turned else "plain")


def _grouped(node: Node, x: Node, weight: Node) -> Product:
    """A product of rows sorted by expert with a stack of weights."""
    offsets, bias = (node.args[i] if len(node.args) > i else None for i in (2, 3))
    ranks = [n.meta["val"].dim() for n in (x, weight)]
    if ranks != [2, 3] or not isinstance(offsets, Node):
        raise Refused(
            "a grouped product must be of x[T, K] with W[E, K, N] and offsets; it is of "
            f"{describe(x)} with {describe(weight)}"
        )
    assert bias is None or isinstance(bias, Node)
    return Product(node, weight, Axes(2, 1, 0), (x, offsets), bias, "dequant_grouped_matmul")


def chosen_from(side: Node, scope: Scope) -> tuple[Node, Node] | None:
    """(a stack of weights, which of it each batch takes) of an operand, if that varies."""
    found = gathered(side)
    return found if found is not None and behind(found[1], scope)[1] else None


def _gathered(node: Node, x: Node, weight: Node, ids: Node, turned: bool) -> Product:
    """A product of each batch with one of a stack of weights."""
    if ANCHORS[node.target][2] is not None:
        raise Refused(
            "a product of weights that are chosen for each batch must be without bias; it is "
            f"{node.target}"
        )
    axes, form = (Axes(1, 2, 0), "turned") if turned else (Axes(2, 1, 0), "plain")
    return Product(node, weight, axes, (x, ids), None, "dequant_gathered_bmm", form)


def unexpanded(weight: Node) -> Node | None:
    """The one weight [K, N] or [1, K, N] that was broadcast along the batch, if it was."""
    *_, k, n = weight.meta["val"].shape
    node: object = weight
    while isinstance(node, Node):
        shape = node.meta["val"].shape
        if tuple(shape[-2:]) != (k, n):
            return None
        if all(size == 1 for size in shape[:-2]) and len(shape) <= 3:
            return node
        if node.target not in VIEWS | {aten.expand.default, aten.unsqueeze.default}:
            return None
        node = node.args[0]
    return None


def _check_own_batch(weight: Node) -> None:
    """Refused where a stack of weights is broadcast along one more axis."""
    *batch, _, _ = weight.meta["val"].shape
    node: object = weight
    while isinstance(node, Node) and node.target in MOVES:
        source = node.args[0]
        if node.target is aten.expand.default and isinstance(source, Node):
            before = [size for size in source.meta["val"].shape[:-2] if size != 1]
            if before and node.meta["val"].numel() != source.meta["val"].numel():
                raise Refused(f"a stack of {before} weights is broadcast along a batch {batch}")
        node = source


def check_other_users(node: Node, order: Sequence[Node], elements: int) -> None:
    """Refused if the dequantised weight is needed outside of products and reads of its rows."""
    inside = set(order)
    for other in order:
        value = other.meta.get("val")
        if other.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        if not value.dtype.is_floating_point or value.dtype in FLOAT8 or value.numel() < elements:
            continue
        for user in (user for user in other.users if user not in inside):
            needs = _needs_whole(user)
            if needs is not None:
                raise Refused(
                    f"the dequantised weight must feed products alone; {other.name} also feeds "
                    f"{needs.name} ({needs.target})"
                )


def _needs_whole(user: Node) -> Node | None:
    """The node at the end of this use of a weight that must have the weight written out."""
    if user.target in ROW_READS or (user.target in ANCHORS and ANCHORS[user.target][0]):
        return None
    if user.target not in MOVES:
        return user
    return next(filter(None, map(_needs_whole, user.users)), None)
