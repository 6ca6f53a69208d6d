"""The rewrite: one operator node for a proved site, checked against what it replaces.

A freed weight that a graph needs itself is such a site, too: it is made from its packed tensors.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import has_free_symbols, statically_known_true

from qinductor.errors import Refused
from qinductor.freed import is_freed
from qinductor.op import Spec, stacked
from qinductor.pattern import Fusion, Lowering, Part, where
from qinductor.regions import MOVES, Axes, Scope, aten, behind, extract, pure
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
    replaced = [part.node for part in lowering.parts] or [lowering.replaced]
    nodes: list[Node] = []

    def build(insert: Insert, holders: list[Node]) -> Node:
        nodes.append(_inserted(insert, holders, lowering))
        if lowering.parts:
            nodes[:] = _cut(insert, nodes[0], lowering.parts)
        return nodes[0]

    _, fakes = _made(graph, lowering.replaced, operands, build)
    for absorbed, operand in lowering.bypassed:
        absorbed.replace_all_uses_with(operand)
    for old, node in zip(replaced, nodes, strict=True):
        old.replace_all_uses_with(node)
    return fakes


def _cut(insert: Insert, whole: Node, parts: Sequence[Part]) -> list[Node]:
    """The parts of a result that was computed together, laid out as the products were."""
    start, nodes = 0, []
    for part in parts:
        cut = functools.partial(insert, before=part.node)
        node = cut(aten.slice.Tensor, whole, 1, start, start + part.columns)
        node = cut(aten.clone.default, node, memory_format=torch.contiguous_format)
        nodes.append(node if part.sizes is None else cut(aten.view.default, node, [*part.sizes]))
        _check(part.node.meta["val"], nodes[-1].meta["val"], str(part.node.target))
        start += part.columns
    return nodes


def fuse(graph: Graph, fusion: Fusion) -> None:
    """Puts the operator behind its last input, and its results in place of the site's nodes.

    An operator that is there already, with these inputs and this contract, is taken again. Refused,
    with the graph unchanged, if dtype, shape or strides of a result are not those of what it
    replaces, or if the graph writes to memory in between.
    """
    insert = _Inserter(graph, fusion)
    target = getattr(torch.ops.qinductor, fusion.op.name).default
    results = []
    try:
        made = insert(target, insert.operands(), str(fusion.contract), str(fusion.plan))
        again = made not in insert.inserted
        for i, nodes in enumerate(fusion.replaced):
            for old in nodes:
                node = _shaped(insert, insert(operator.getitem, made, i), old.meta["val"])
                if (again or old is not nodes[0]) and _escapes(old):
                    node = insert(aten.clone.default, node)  # no two results are one tensor
                _check(old.meta["val"], node.meta["val"], str(old.target))
                results.append((old, node))
    except Refused:
        for node in reversed(insert.inserted):
            graph.erase_node(node)
        raise
    for old, node in results:
        old.replace_all_uses_with(node)


class _Inserter:
    """Inserts nodes behind the inputs of a fusion, each once: an equal one before all that is
    replaced is taken again."""

    def __init__(self, graph: Graph, fusion: Fusion) -> None:
        self.graph, self.fusion = graph, fusion
        self.inserted: list[Node] = []
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        nodes = [node for node in fusion.inputs if isinstance(node, Node)]
        holders = graph.find_nodes(op="placeholder")
        self.cursor = max((*nodes, holders[-1]), key=self.place.__getitem__)
        self.first = min(self.place[old] for nodes in fusion.replaced for old in nodes)
        self.value: torch.Tensor = nodes[0].meta["val"]
        start, end = self.place[self.cursor], max(self.place[n] for n in fusion.region)
        for node in graph.nodes:
            if start < self.place[node] < end and node.op == "call_function" and not pure(node):
                raise Refused(f"{node.name} ({node.target}) may write to memory in the midst of it")

    def operands(self) -> list[Node]:
        """The inputs; a scale has one axis."""
        found = []
        for node in self.fusion.inputs:
            if not isinstance(node, Node):
                device = self.value.device
                node = self(aten.full.default, [1], node, dtype=torch.float32, device=device)
            elif node.meta["val"].numel() == 1 and tuple(node.meta["val"].shape) != (1,):
                node = self(aten.view.default, node, [1])
            found.append(node)
        return found

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        other: Node
        for other in self.graph.find_nodes(op="call_function", target=target, sort=False):
            equal = (other.args, other.kwargs) == (args, kwargs) and target != aten.clone.default
            if equal and self.place.get(other, self.first) < self.first:
                self.cursor = max(self.cursor, other, key=self.place.__getitem__)
                return other
        with self.graph.inserting_after(self.cursor):
            node = self.graph.call_function(target, args, kwargs)
        given = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.value.fake_mode:  # type: ignore[attr-defined]
            value = target(*given[0], **given[1])
        node.meta = self.fusion.region[-1].meta | {"val": value, "eager_input_vals": given}
        self.inserted.append(node)
        self.place[node], self.cursor = self.place[self.cursor], node
        return node


def _escapes(node: Node) -> bool:
    """Whether a node or a view of it is a result of the graph."""
    views = [user for user in node.users if user.op == "output" or user.target in MOVES]
    return any(user.op == "output" or _escapes(user) for user in views)


def _shaped(insert: _Inserter, node: Node, old: torch.Tensor) -> Node:
    """The result as a view of the shape of what it replaces; as it is if that needs none."""
    shape, symbolic = tuple(node.meta["val"].shape), has_free_symbols
    if len(shape) == old.dim() and all(map(statically_known_true, map(eq, shape, old.shape))):
        return node
    sizes: list[Any] = [-1 if symbolic(s) else int(s) for s in old.shape]
    held = (node, *(n for n in insert.fusion.inputs if isinstance(n, Node)))
    known = [(n, j) for n in held for j, size in enumerate(n.meta["val"].shape) if symbolic(size)]
    for i, size in enumerate(old.shape) if sizes.count(-1) > 1 else ():
        same = [(n, j) for n, j in known if statically_known_true(n.meta["val"].shape[j] == size)]
        if sizes[i] == -1 and same:
            sizes[i] = insert(aten.sym_size.int, *same[0])
    if sizes.count(-1) > 1:
        raise Refused(f"no view of {list(shape)} has the shape {list(old.shape)}")
    return insert(aten.view.default, node, sizes)


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
            operands = stacked(contract, [op.form(contract, entry.tensors.keys())])
            signature, key = f"weight\n{body}\n{axes}\n{contract}", (body, axes, leaves)
            slot = Slot(where(node), signature, leaves, tuple(operands), None, key, entry.weight)
            seed(slot, scope.arguments, functools.partial(shared, slot, scope.arguments))
            call = (*op.weight(contract), [*operands])
            build = functools.partial(_weight, axes=axes, old=value, call=call)
            made, fakes = _made(graph, node, operands, build)
        except Refused:
            continue
        node.replace_all_uses_with(made)
        yield slot, fakes


def _weight(
    insert: Insert, holders: list[Node], *, axes: Axes, old: torch.Tensor, call: tuple[Any, ...]
) -> Node:
    """The node that makes a weight, or the last of those that give it its axes and strides."""
    aten = torch.ops.aten
    operator, contract, names = call
    node = insert(getattr(torch.ops.qinductor, operator).default, holders, str(contract), names)
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

    def insert(target: Any, *args: Any, before: Node = replaced, **kwargs: Any) -> Node:
        with graph.inserting_before(before):
            node = graph.call_function(target, args, kwargs)
        inserted.append(node)
        value = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with old.fake_mode:
            made = target(*value[0], **value[1])
        # By which Inductor keeps to the strides of our arguments, not to those of the replaced one.
        node.meta = {**replaced.meta, "val": made, "eager_input_vals": value}
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
    views = lowering.views or (None,) * (len(lowering.inputs) + 1)
    x, *others = (
        node if sizes is None else insert(aten.reshape.default, node, list(sizes))
        for node, sizes in zip(lowering.inputs, views[:-1], strict=True)
    )
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
    return node if views[-1] is None else insert(aten.view.default, node, list(views[-1]))


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
