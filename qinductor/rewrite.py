"""The rewrite: one operator node for a proved site, checked against what it replaces."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.errors import Refused
from qinductor.pattern import Lowering


def rewrite(graph: Graph, lowering: Lowering) -> list[torch.Tensor]:
    """Puts the operator in place of the site and appends its packed inputs as placeholders.

    Returns their fake values. Refused, with the graph unchanged, if the operator's dtype, shape or
    strides are not those of the value it replaces.
    """
    replaced = lowering.replaced
    old = replaced.meta["val"]
    operands = lowering.plan.operands(lowering.op, lowering.contract)
    with old.fake_mode:
        fakes = [
            torch.empty(shape, dtype=dtype, device=old.device) for shape, dtype in operands.values()
        ]
    for node, operand in lowering.bypassed:
        _check(node.meta["val"], operand.meta["val"], str(node.target))
    inserted: list[Node] = []

    def insert(target: Any, *args: Any, **kwargs: Any) -> Node:
        with graph.inserting_before(replaced):
            node = graph.call_function(target, args, kwargs)
        inserted.append(node)
        value = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with old.fake_mode:
            made = target(*value[0], **value[1])
        node.meta = {**replaced.meta, "val": made}
        return node

    holders = [_placeholder(graph, name, fake) for name, fake in zip(operands, fakes, strict=True)]
    try:
        node = _inserted(insert, lowering, holders)
        _check(old, node.meta["val"], str(replaced.target))
    except Refused:
        for node in reversed([*holders, *inserted]):
            graph.erase_node(node)
        raise
    for absorbed, operand in lowering.bypassed:
        absorbed.replace_all_uses_with(operand)
    replaced.replace_all_uses_with(node)
    return fakes


def _inserted(insert: Callable[..., Node], lowering: Lowering, holders: list[Node]) -> Node:
    """The operator's node, or the last of those that give its result the form of the product's."""
    aten = torch.ops.aten
    target = getattr(torch.ops.qinductor, lowering.operator).default
    x, *others = lowering.inputs
    texts = str(lowering.contract), str(lowering.plan)
    rank = x.meta["val"].dim()
    turn = [*range(rank - 2), rank - 1, rank - 2]
    turned, batched = ("turned" in lowering.form, "batched" in lowering.form)
    if turned:
        x = insert(aten.permute.default, x, turn)
    sizes: list[Any] = []
    if batched:
        shape = x.meta["val"].shape
        sizes = [
            s if isinstance(s, int) else insert(aten.sym_size.int, x, i)
            for i, s in enumerate(shape[:2])
        ]
        x = insert(aten.reshape.default, x, [-1, shape[2]])
    node = insert(target, x, *others, holders, *texts)
    if batched:
        node = insert(aten.view.default, node, [*sizes, node.meta["val"].shape[1]])
    if turned:
        node = insert(aten.permute.default, node, turn)
        node = insert(aten.clone.default, node, memory_format=torch.contiguous_format)
    return node


def _check(old: torch.Tensor, new: torch.Tensor, what: str) -> None:
    """Refused unless both values have one dtype, shape and strides."""
    if old.dtype != new.dtype:
        raise Refused(f"{what} gives {old.dtype}, the operator {new.dtype}")
    pairs = [
        *zip(old.shape, new.shape, strict=False),
        *zip(old.stride(), new.stride(), strict=False),
    ]
    if old.dim() != new.dim() or not all(statically_known_true(a == b) for a, b in pairs):
        raise Refused(
            f"{what} gives {list(old.shape)} with strides {list(old.stride())}, the operator "
            f"{list(new.shape)} with strides {list(new.stride())}"
        )


def _placeholder(graph: Graph, name: str, fake: torch.Tensor) -> Node:
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(holders[-1]):
        node = graph.placeholder(f"packed_{name}_{len(holders)}")
    node.meta["val"] = fake
    return node
