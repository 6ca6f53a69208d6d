"""The product that makes a router's logits, as its operator takes it."""

import dataclasses
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.kernels.router import Router
from qinductor.patterns.probe import fixed
from qinductor.regions import CASTS, FLOATS, VIEWS, aten

TURNED = {aten.permute.default, aten.transpose.int, aten.t.default}
Inputs = tuple[Node, ...]  # of the product: x, the weight, maybe a bias


def product_of(contract: Router, logits: Node) -> tuple[Router, Inputs] | None:
    """(the contract with the product that makes its logits, what the product takes); None if the
    operator has no such product."""
    node = _viewed(logits)
    bias: Node | None = None
    if node.target in CASTS:  # one rounding, if the sums were float32
        node = _viewed(node.args[0])
        if _dtype(node) is not torch.float32:
            return None
    if node.target is aten.add.Tensor:
        terms = [m for m in node.all_input_nodes if m.meta["val"].dim() == 1]
        others = [m for m in node.all_input_nodes if m not in terms]
        if len(terms) != 1 or len(others) != 1 or _dtype(node) is not torch.float32:
            return None
        (bias,), node = terms, _viewed(others[0])
    if node.target is aten.addmm.default and bias is None and not node.kwargs:
        bias, *operands = node.args[:3]  # type: ignore[assignment]
        if not isinstance(bias, Node) or bias.meta["val"].dim() != 1:
            return None
    elif node.target is aten.mm.default:
        operands = [*node.args]
    else:
        return None
    x, weight = _rows(operands[0]), _weight(operands[1])
    if weight is None or fixed(x.meta["val"].shape[-1]) is None:
        return None
    inputs = (x, weight) if bias is None else (x, weight, bias)
    for held in (value.meta["val"] for value in inputs):
        if held.dtype not in FLOATS or held.stride(-1) != 1:
            return None
    made = dataclasses.replace(
        contract,
        hidden=int(x.meta["val"].shape[-1]),
        x=_dtype(x),
        weight=_dtype(weight),
        logit_bias=None if bias is None else _dtype(bias),
    )
    return made, inputs


def _rows(node: Any) -> Node:
    """x, of any rank and in its own dtype."""
    h = node.meta["val"].shape[-1]
    while True:
        source: Any = _exact(node)
        if source is node and node.target in VIEWS:
            source = node.args[0]
            held = source.meta["val"]
            if held.dim() < 2 or not statically_known_true(held.shape[-1] == h):
                return node  # type: ignore[no-any-return]
        if source is node:
            return node  # type: ignore[no-any-return]
        node = source


def _weight(node: Any) -> Node | None:
    """The weight [n, H] that a product takes turned; None if it takes it as it is stored."""
    turned = False
    while isinstance(node, Node):
        if node.target in TURNED and node.meta["val"].dim() == 2:
            turned, node = not turned, node.args[0]
            continue
        source = _exact(node)
        if source is node:
            return node if turned else None
        node = source
    return None


def _exact(node: Any) -> Node:
    """What a node holds in a wider dtype."""
    while node.target in CASTS:
        source = node.args[0]
        if (
            source.meta["val"].dtype not in FLOATS
            or _dtype(source).itemsize > _dtype(node).itemsize
        ):
            break
        if _dtype(source) is not _dtype(node) and _dtype(node) is not torch.float32:
            break  # from one of 16 bits to the other
        node = source
    return node  # type: ignore[no-any-return]


def _viewed(node: Any) -> Node:
    """What a node holds in another shape."""
    while node.target in VIEWS:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _dtype(node: Node) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found
