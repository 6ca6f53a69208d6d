"""The rewrite: one operator node for a proved site, checked against what it replaces.

A freed weight that a graph needs itself is such a site, too: it is made from its packed tensors.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.errors import Refused
from qinductor.freed import is_freed
from qinductor.op import Spec
from qinductor.pattern import Lowering, Part, where
from qinductor.regions import Axes, Scope, behind, extract
from qinductor.store import Slot
from qinductor.weights import held, seed, shared

Insert = Callable[..., Node]  # (target, arguments) -> a node before the one that is replaced


def rewrite(graph: Graph, lowering: Lowering) -> list[torch.Tensor]:
    """Puts the operator in place of the site and appends its packed inputs as placeholders.

    Returns their fake values. Refused, with the graph unchanged, if the operator's dtype, shape or
    strides are not those of the value it replaces.
    """
    for node, operand in lowering.bypassed:
        _check(node.meta["val"], operand.meta["val"], str(node.target))
    operands = lowering.plan.operands(lowering.op, lowering.contract)
    parts = lowering.parts or (Part(lowering.replaced, 0, ""),)
    nodes: list[Node] = []

    def build(insert: Insert, holders: list[Node]) -> Node:
        nodes.append(_inserted(insert, holders, lowering))
        if lowering.parts:
            nodes[:] = _cut(insert, nodes[0], lowering.parts)
        return nodes[0]

    _, fakes = _made(graph, lowering.replaced, operands, build)
    for absorbed, operand in lowering.bypassed:
        absorbed.replace_all_uses_with(operand)
    for part, node in zip(parts, nodes, strict=True):
        part.node.replace_all_uses_with(node)
    return fakes


def _cut(insert: Insert, whole: Node, parts: Sequence[Part]) -> list[Node]:
    """The parts of a result that was computed together, laid out as the products were."""
    aten, start, nodes = torch.ops.aten, 0, []
    for part in parts:
        node = insert(aten.slice.Tensor, whole, 1, start, start + part.columns)
        nodes.append(insert(aten.clone.default, node, memory_format=torch.contiguous_format))
        _check(part.node.meta["val"], nodes[-1].meta["val"], str(part.node.target))
        start += part.columns
    return nodes


def restore(graph: Graph, scope: Scope) -> Iterator[tuple[Slot, list[torch.Tensor]]]:
    """Makes from its packed tensors every freed weight that the graph still computes from others.

    Yields its slot and fake values of the placeholders it appends. What was not packed stays as it
    is.
    """
    read = ((n, leaf) for n, leaf in scope.leaves.items() if n.users)
    reads = {node for node, leaf in read if is_freed(leaf.of(scope.arguments))}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or reads.isdisjoint(node.all_input_nodes):
            continue
        order, varying = behind(node, scope)
        if varying:
            continue
        reads.add(node)
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        try:
            body, _, leaves = extract(node, order, scope, Axes(0)).key
            entry = held((body, None, leaves), scope.arguments)
            assert entry is not None and entry.weight is not None and entry.axes is not None
            (op, contract), axes = entry.weight, entry.axes
            assert op.weight is not None
            operands = op.operands(contract)
            signature, key = f"weight\n{body}\n{axes}\n{contract}", (body, axes, leaves)
            slot = Slot(where(node), signature, leaves, tuple(operands), None, key, entry.weight)
            seed(slot, scope.arguments, functools.partial(shared, slot, scope.arguments))
            build = functools.partial(_weight, axes=axes, old=value, call=op.weight(contract))
            made, fakes = _made(graph, node, operands, build)
        except Refused:
            continue
        node.replace_all_uses_with(made)
        yield slot, fakes


def _weight(
    insert: Insert, holders: list[Node], *, axes: Axes, old: torch.Tensor, call: tuple[str, Any]
) -> Node:
    """The node that makes a weight, or the last of those that give it its axes and strides."""
    aten = torch.ops.aten
    operator, contract = call
    node = insert(getattr(torch.ops.qinductor, operator).default, holders, str(contract))
    order = axes.order(old.dim())
    strides = old.stride()
    laid = sorted(order, key=lambda axis: strides[axis], reverse=True)
    if laid != order:
        node = insert(aten.permute.default, node, [order.index(axis) for axis in laid])
        node = insert(aten.clone.default, node, memory_format=torch.contiguous_format)
    back = [laid.index(axis) for axis in range(len(laid))]
    return node if back == sorted(back) else insert(aten.permute.default, node, back)


def _made(
    graph: Graph,
    replaced: Node,
    operands: Mapping[str, Spec],
    build: Callable[[Insert, list[Node]], Node],
) -> tuple[Node, list[torch.Tensor]]:
    """(what `build` makes from placeholders for the operands, to take a node's place; their fake
    values). Refused, with the graph unchanged, if it differs in dtype, shape or strides."""
    old = replaced.meta["val"]
    with old.fake_mode:
        fakes = [
            torch.empty(shape, dtype=dtype, device=old.device) for shape, dtype in operands.values()
        ]
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
        node = build(insert, holders)
        _check(old, node.meta["val"], str(replaced.target))
    except Refused:
        for node in reversed([*holders, *inserted]):
            graph.erase_node(node)
        raise
    return node, fakes


def _inserted(insert: Insert, holders: list[Node], lowering: Lowering) -> Node:
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
