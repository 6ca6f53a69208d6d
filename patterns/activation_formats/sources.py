"""From the cast to codes back to what is quantised: every cut of the graph between both.

A cut is a set of nodes through which all that varies reaches the codes. From the codes, the last
node of the cut in graph order gives way to its inputs, so each cut lies behind the one before it.
"""

import dataclasses
import operator
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, Node

from qinductor.errors import Refused
from qinductor.patterns.probe import REDUCTIONS, count, fixed
from qinductor.regions import CASTS, FLOATS, MOVES, PRODUCTS, TURNS, VIEWS, Scope, aten, pure

CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, operator.getitem}
SCALINGS = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.reciprocal.default,
}
FILLS = {
    aten.full.default, aten.full_like.default, aten.zeros.default, aten.ones.default,
    aten.zeros_like.default, aten.ones_like.default,
}  # fmt: skip
# What takes some elements of a tensor, or some twice.
PARTIAL = {
    aten.slice.Tensor, aten.select.int, aten.index.Tensor, aten.index_select.default,
    aten.repeat.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
}  # fmt: skip
HELD = (torch.Tensor, list, tuple)
MOST = 3  # tensors in a cut


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """What lies behind a cast to codes.

    codes    the cast
    order    all that it depends on, and `side`, in graph order
    side     what is computed beside it of its scales alone
    varying  those of them that depend on an activation of more than one element; what is left
             depends on constants and on given scales alone
    cuts     nearest first; their nodes are floats
    """

    codes: Node
    order: list[Node]
    side: set[Node]
    varying: set[Node]
    cuts: list[tuple[Node, ...]]

    def after(self, y: Node) -> list[Node]:
        """The nodes of the site that depend on y, but y."""
        found = {y}
        for node in self.order:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return [n for n in self.order if n in found and n is not y]


def candidates(graph: Graph, scope: Scope) -> Iterator[Node]:
    """Casts to codes of something that varies and was scaled before."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.target not in CASTS or not node.users or not isinstance(value, torch.Tensor):
            continue
        source = node.args[0].meta["val"]
        cast = value.dtype in CODES and source.dtype in FLOATS and value.dim() > 0
        if cast and is_scaled(node, scope):
            yield node


def is_scaled(node: Node, scope: Scope) -> bool:
    """Whether a full tensor that varies is multiplied or divided on its way to this cast."""
    size, seen, stack, scaled = count(node.meta["val"]), {node}, [node], False
    while stack:
        current = stack.pop()
        for source in current.all_input_nodes:
            value = source.meta.get("val")
            if source in seen or source.target in REDUCTIONS or not isinstance(value, HELD):
                continue
            if isinstance(value, torch.Tensor) and count(value) < size:
                continue
            if source.op == "placeholder":
                if scaled and source not in scope.leaves:
                    return True
                continue
            scaled |= source.target in SCALINGS
            made = any(_is_tensor(n) for n in source.all_input_nodes)
            if scaled and made and not expandable(source):
                return True
            seen.add(source)
            stack.append(source)
    return False


def is_normed(node: Node) -> bool:
    """Whether a reciprocal square root of a mean lies behind a cast, with no product between."""
    stack, seen = [node], set()
    while stack:
        current = stack.pop()
        if current.target is aten.rsqrt.default:
            return True
        if current not in seen and expandable(current):
            stack.extend(current.all_input_nodes)
        seen.add(current)
    return False


def expandable(node: Node) -> bool:
    """Whether a region may reach behind this node."""
    target = node.target
    if node.op != "call_function" or not pure(node) or target in PRODUCTS:
        return False
    if target in MOVES | CASTS | REDUCTIONS | PARTS or target is aten.view.dtype:
        return True
    known = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    return known and torch.Tag.pointwise in target.tags  # type: ignore[union-attr]


def is_reduced(node: Node, codes: Node) -> bool:
    """Whether a tensor has fewer elements than the codes."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and 2 * count(value) <= count(codes.meta["val"])


def site_of(codes: Node, scope: Scope, norms: bool = False) -> Site:
    """All that lies behind a cast. norms: cuts may lie behind a product with a given vector."""
    order = _behind(codes)
    place = {node: i for i, node in enumerate(order)}
    varying = _varying(order, scope)
    cuts: list[tuple[Node, ...]] = []
    front = {codes}
    while True:
        inner = [n for n in front if _goes_on(n, varying, norms)]
        if not inner:
            break
        last = max(inner, key=place.__getitem__)
        front.remove(last)
        front.update(n for n in last.all_input_nodes if n in varying)
        if len(front) <= MOST and all(map(_is_source, front)):
            cuts.append(tuple(sorted(front, key=place.__getitem__)))
    side = _side(codes, order, varying)
    order = [node for node in codes.graph.nodes if node in side or node in place]
    return Site(codes, order, side, varying | side, cuts)


def _side(codes: Node, order: Sequence[Node], varying: set[Node]) -> set[Node]:
    """What is computed outside of a region of its reduced tensors and of numbers alone."""
    inside = set(order)
    reduced = {n for n in order if n in varying and is_reduced(n, codes)}
    found: set[Node] = set()
    for node in codes.graph.nodes:
        if node in inside or reduced.isdisjoint(node.all_input_nodes) or not _is_beside(node):
            continue
        others = [n for n in node.all_input_nodes if n not in reduced]
        if is_reduced(node, codes) and all(map(_is_literal, others)):
            reduced.add(node)
            found.update((node, *others))
    return found - inside


def _is_beside(node: Node) -> bool:
    """Whether a node may compute scales beside the codes: as many as it is given, in order."""
    value = node.meta.get("val")
    if not expandable(node) or node.target in PARTIAL | PARTS | TURNS:
        return False
    if not isinstance(value, HELD):
        return False
    if node.target is aten.view.dtype:
        given: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
        return given.dtype.itemsize == value.dtype.itemsize  # type: ignore[union-attr]
    return True


def _is_literal(node: Node) -> bool:
    """Whether a node holds one number that the graph itself has, or a size."""
    if not _is_tensor(node):
        return True
    held = any(n.op == "placeholder" and _is_tensor(n) for n in _behind(node))
    return not held and node.op != "get_attr" and _is_number(node)


def _goes_on(node: Node, varying: set[Node], norms: bool) -> bool:
    """Whether a node gives way to its inputs: it is computed of the activation and numbers alone.

    The bias of a product, say, is no number: what adds it is the end."""
    if not expandable(node):
        return False
    others = [n for n in node.all_input_nodes if n not in varying and _is_tensor(n)]
    if norms and node.target is aten.mul.Tensor:
        others = [n for n in others if n.op != "placeholder" or n.meta["val"].dim() != 1]
    return all(map(_is_number, others))


def _is_number(node: Node) -> bool:
    """Whether all elements of a tensor that does not vary are one number, in the graph or given."""
    if count(node.meta["val"]) == 1:
        return True
    made = node.target in FILLS or (expandable(node) and node.target not in PARTIAL)
    return made and all(map(_is_number, filter(_is_tensor, node.all_input_nodes)))


def _is_source(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS and value.dim() > 0


def _is_tensor(node: Node) -> bool:
    return node.op == "get_attr" or isinstance(node.meta.get("val"), torch.Tensor)


def _varying(order: list[Node], scope: Scope) -> set[Node]:
    found: set[Node] = set()
    given: set[Node] = set()  # single elements of the call's, and what is computed of them
    for node in order:
        if node.op == "placeholder":
            if node not in scope.leaves and _is_tensor(node):
                (found if count(node.meta["val"]) > 1 else given).add(node)
        elif node.op != "call_function" or not isinstance(node.meta.get("val"), HELD):
            continue
        elif not pure(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
        elif not given.isdisjoint(node.all_input_nodes):
            (found if _is_looked_up(node) else given).add(node)
    return found


def _is_looked_up(node: Node) -> bool:
    """Whether a single element stands for many others: a token's embedding, say."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and count(value) == 1:
        return False
    if expandable(node) and node.target not in PARTIAL:
        return False
    return not all(map(_is_number, filter(_is_tensor, node.all_input_nodes)))


def _behind(node: Node) -> list[Node]:
    seen: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return [other for other in node.graph.nodes if other in seen]


def beginning(site: Site) -> int:
    """The place among the cuts of what is quantised: that of which a scale is computed, else that
    which is scaled by a number or a given scale. Refused if there is none."""
    for is_scaled in (_is_dynamic, _is_static):
        at = None
        for i, cut in enumerate(site.cuts):
            if at is not None and not (len(cut) == 1 and _is_same(cut[0], site.cuts[at][0])):
                break
            if len(cut) == 1 and is_scaled(site, cut[0]):
                at = i
        if at is not None:
            return at
    raise Refused(
        f"what {site.codes.name} casts comes from no one tensor that its scale comes from, too"
    )


def _is_dynamic(site: Site, y: Node) -> bool:
    return any(is_reduced(n, site.codes) for n in site.after(y))


def _is_static(site: Site, y: Node) -> bool:
    scaled = any(
        n.target in SCALINGS and sum(m in site.varying for m in n.all_input_nodes) == 1
        for n in site.after(y)
    )
    return scaled and not _is_dynamic(site, y)


def _is_same(before: Node, after: Node) -> bool:
    """Whether a node holds the elements of one before it, in a row at least as long."""
    if before not in after.all_input_nodes:
        return False
    a, b = before.meta["val"], after.meta["val"]
    if after.target in CASTS:
        wider: bool = a.dtype.itemsize < b.dtype.itemsize or a.dtype == b.dtype
        return wider
    row, part = fixed(a.shape[-1]), fixed(b.shape[-1])
    whole = row is not None and part is not None and not row % part
    return after.target in VIEWS and whole
