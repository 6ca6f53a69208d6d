"""From a topk back to the logits and on to the weights: the nodes of one router."""

import dataclasses
import heapq
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.probe import count, fixed
from qinductor.patterns.router_formats.anchors import (
    COUNTS,
    DEPTH,
    HELD,
    MOST,
    PARTS,
    SELECTS,
    SORTS,
    goes_on,
    is_tensor,
)
from qinductor.regions import CASTS, FLOATS, MOVES, PRODUCTS, VIEWS, Scope, aten, describe, pure


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """A router.

    n, k      experts, and those that a token gets
    logits    what all is computed of, [..., n]
    order     the logits and all that is computed of them, in graph order
    bias      a vector, [n] or [1, n], that is read beside them; None
    indices   the experts of each token
    weights   the node through which all that is made of their scores goes; None where that is none
    """

    n: int
    k: int
    logits: Node
    order: list[Node]
    bias: Node | None
    indices: Node
    weights: Node | None


def site_of(result: Node, scope: Scope) -> Site:
    """The router of a candidate. Refused if that is none."""
    anchor: Any = result.args[0] if result.target is operator.getitem else result
    n, k = _sizes(anchor)
    place = {node: i for i, node in enumerate(anchor.graph.nodes)}
    varies = _Varying(scope)
    logits = _biased(_logits(anchor, n, place, varies), n)
    order, after = _computed(logits, anchor, place, varies)
    values, indices = (next((u for u in anchor.users if u.args[1] == i), None) for i in (0, 1))
    indices = indices or _unread(anchor)
    _check_rows(logits, indices, n, k)
    weights = _weights(order, after, indices, values)
    region = _region(logits, [node for node in (indices, weights) if node is not None])
    order = [node for node in order if node in region]
    counted = next((n for n in order if n.target in COUNTS and not _along_last(n)), None)
    if counted is not None:
        raise Refused(
            "a token's experts and weights must be computed of its own logits; "
            f"{counted.name} counts those of other tokens, too, as a capacity does"
        )
    return Site(n, k, logits, order, _bias(order, n), indices, weights)


def _sizes(anchor: Node) -> tuple[int, int]:
    """(experts, how many of them are picked)."""
    if anchor.target is not aten.topk.default:
        what = "a sort of all" if anchor.target in SORTS else "one maximum after the other"
        raise Refused(f"the experts must be picked by one topk; {anchor.name} is {what}")
    named = dict(zip(("self", "k", "dim", "largest", "sorted"), anchor.args, strict=False))
    named |= anchor.kwargs
    value, k, dim = anchor.args[0].meta["val"], named["k"], named.get("dim", -1)  # type: ignore[union-attr]
    if value.dtype not in FLOATS:
        raise Refused(f"experts are picked by scores in floats; it is {describe(anchor.args[0])}")  # type: ignore[arg-type]
    if value.dim() < 2 or dim not in (-1, value.dim() - 1):
        raise Refused(
            f"experts must lie along the last axis of two or more; topk picks along axis {dim} of "
            f"{describe(anchor.args[0])}"  # type: ignore[arg-type]
        )
    if not named.get("largest", True):
        raise Refused("the largest scores must be picked; topk has largest=False")
    n = fixed(value.shape[-1])
    if n is None or n > MOST:
        raise Refused(f"a router has at most {MOST} experts; topk picks among {value.shape[-1]}")
    if not isinstance(k, int):
        raise Refused(f"k must be a number; it is {k}")
    if not k:
        raise Refused("k must be at least 1; it is 0")
    return n, k


def _check_rows(logits: Node, indices: Node, n: int, k: int) -> None:
    """Refused unless every row of logits, of one or more, has its experts."""
    rows, picked = count(logits.meta["val"]) // n, count(indices.meta["val"]) // k
    if not rows:
        raise Refused(f"there must be tokens to pick experts for; {logits.name} has no row")
    if rows != picked:
        raise Refused(
            f"each row of logits must have its experts; {logits.name} has {rows} rows, and "
            f"{indices.name} experts of {picked}"
        )


def _unread(anchor: Node) -> Node:
    """The indices that a topk picks, which nothing reads."""
    with anchor.graph.inserting_after(anchor):
        node = anchor.graph.call_function(operator.getitem, (anchor, 1))
    node.meta = {**anchor.meta, "val": anchor.meta["val"][1]}
    return node


class _Varying:
    """Whether a tensor depends on what a call brings, or is drawn anew in each."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.known: dict[Node, bool] = {}

    def __call__(self, node: Node) -> bool:
        stack = [node]
        while stack:
            current = stack[-1]
            inputs = [n for n in current.all_input_nodes if n not in self.known]
            if inputs:
                stack.extend(inputs)
                continue
            stack.pop()
            if current.op == "placeholder":
                held = isinstance(current.meta.get("val"), torch.Tensor)
                self.known[current] = held and current not in self.scope.leaves
            elif current.op == "call_function":
                held = isinstance(current.meta.get("val"), HELD)  # sizes do not vary
                given = any(self.known[n] for n in current.all_input_nodes)
                self.known[current] = held and (given or not pure(current))
            else:
                self.known[current] = False
        return self.known[node]


def _logits(anchor: Node, n: int, place: dict[Node, int], varies: _Varying) -> Node:
    """The farthest node [.., n] through which all that varies reaches a topk."""
    front = {anchor}
    found: Node | None = None
    for _ in range(DEPTH):
        inner = [node for node in front if goes_on(node)]
        if not inner:
            break
        last = max(inner, key=place.__getitem__)
        front.remove(last)
        front.update(m for m in last.all_input_nodes if _is_rows(m) and varies(m))
        if len(front) == 1 and _is_logits(next(iter(front)), n):
            (found,) = front
    drawn = next((m for m in front if m.op == "call_function" and _is_random(m)), None)
    if drawn is not None:
        raise Refused(f"experts must be picked by their logits alone; {drawn.name} is random")
    if found is None or not (found in front or all(m.target in PRODUCTS for m in front)):
        words = ", ".join(f"{m.name} {describe(m)}" for m in front) or "nothing that varies"
        raise Refused(f"experts must be picked by one tensor [.., {n}] of logits; found {words}")
    return found


def _is_random(node: Node) -> bool:
    target = node.target
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags


def _is_rows(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() > 1)


def _is_logits(node: Node, n: int) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.dtype not in FLOATS:
        return False
    return fixed(value.shape[-1]) == n


def _biased(logits: Node, n: int) -> Node:
    """The logits with the bias of their product, or in the narrower dtype that they are rounded to,
    if nothing reads them without."""
    node = logits
    while len(node.users) == 1 and node.target in PRODUCTS | VIEWS:
        (user,) = node.users
        if not _is_logits(user, n):
            break
        old, new = node.meta["val"].dtype, user.meta["val"].dtype
        others = [m for m in user.all_input_nodes if m is not node]
        added = user.target is aten.add.Tensor and not user.kwargs and new == old
        if added and len(others) == 1 and _is_vector(others[0], n):
            return user
        if user.target in CASTS and new.itemsize < old.itemsize:
            return user
        if user.target not in VIEWS:
            break
        node = user
    return logits


def _is_vector(node: Node, n: int, more: int = 0) -> bool:
    """Whether a node is a float vector [n], with up to so many axes of size 1 before its own."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in FLOATS:
        return False
    *ones, last = map(fixed, value.shape or (1,))
    return value.dim() > 0 and last == n and len(ones) <= more and all(one == 1 for one in ones)


def _computed(
    logits: Node, anchor: Node, place: dict[Node, int], varies: _Varying
) -> tuple[list[Node], set[Node]]:
    """(what is computed of the logits and of what does not vary, in graph order; what of it is
    computed of the picked experts)."""
    found, after = {logits}, set[Node]()
    waiting = [(place[user], user) for user in logits.users]
    heapq.heapify(waiting)
    order = [logits]
    while waiting:
        _, node = heapq.heappop(waiting)
        if node in found or not goes_on(node):
            continue
        behind = not after.isdisjoint(node.all_input_nodes)
        if behind and node.target in SELECTS | PARTS:
            continue  # tokens are sorted by their experts
        if behind and node.target in COUNTS and _along_last(node):
            continue  # as many experts as have some share of the weights
        others = [m for m in node.all_input_nodes if m not in found and is_tensor(m)]
        if any(varies(m) and (m.op != "placeholder" or _is_rows(m)) for m in others):
            continue
        if behind and not all(map(_is_made_of_numbers, others)):
            continue  # such as a scale whose value is given: what it makes stays the graph's
        found.add(node)
        order.append(node)
        if node is anchor or behind:
            after.add(node)
        for user in node.users:
            heapq.heappush(waiting, (place[user], user))
    if anchor not in found:
        raise Refused(f"{anchor.name} must be computed of {logits.name} and of constants alone")
    return order, after - {anchor}


def _weights(
    order: Sequence[Node], after: set[Node], indices: Node, values: Node | None
) -> Node | None:
    """The last node through which everything that is made of the scores of the picked experts goes;
    None if nothing is. Refused if there is no such node."""
    inside = set(order)
    scored = _scored(order, after, values)
    ends = [n for n in scored if any(user not in inside for user in n.users)]
    if not ends:
        return None
    size = count(indices.meta["val"])
    for node in reversed(scored):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in FLOATS:
            continue
        if count(value) != size:
            continue
        beyond = set(_scored(order, after, values, without=node))
        if beyond.isdisjoint(ends):
            return _unmoved(node, scored)
    names = ", ".join(f"{n.name} {describe(n)}" for n in ends[:3])
    raise Refused(f"all weights must go through one node; what is read are {names}")


def _scored(
    order: Sequence[Node], after: set[Node], values: Node | None, without: Node | None = None
) -> list[Node]:
    """What is made of the scores of the picked experts, not through one node."""
    found: dict[Node, None] = {}
    for node in order:
        if node not in after or node is without:
            continue
        inputs = node.all_input_nodes
        placed = node.target is aten.gather.default and inputs[0] not in after
        if node is values or placed or any(n in found for n in inputs):
            found[node] = None
    return list(found)


def _unmoved(node: Node, scored: Collection[Node]) -> Node:
    """What a node holds in another shape, or in a wider dtype."""
    while node.target in MOVES | CASTS:
        source: Any = node.args[0]
        if source not in scored or count(source.meta["val"]) != count(node.meta["val"]):
            break
        if node.target in CASTS and is_narrowed(node):
            break
        node = source
    return node


def is_narrowed(node: Node) -> bool:
    """Whether a node rounds what it casts."""
    if node.target not in CASTS:
        return False
    old, new = (n.meta["val"].dtype for n in (node.args[0], node))  # type: ignore[union-attr]
    return new is not old and new.itemsize <= old.itemsize


def _region(logits: Node, outputs: Sequence[Node]) -> set[Node]:
    """The nodes between the logits and some others, and what is read beside."""
    found, stack = {logits}, list(outputs)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def beyond(nodes: Collection[Node], inside: Collection[Node]) -> set[Node]:
    """What is made of some nodes outside a region, up to products."""
    found = set[Node]()
    stack = [user for node in nodes for user in node.users]
    while stack:
        node = stack.pop()
        if node not in found and node not in inside and node.target not in PRODUCTS:
            found.add(node)
            stack.extend(node.users)
    return found


def _bias(order: Sequence[Node], n: int) -> Node | None:
    """The one vector [n] or [1, n] that is read beside the logits; None if nothing is."""
    inside, found = set(order), set[Node]()
    beside = {m for node in order[1:] for m in node.all_input_nodes if m not in inside}
    for node in sorted(beside, key=str):
        if not is_tensor(node) or _is_made_of_numbers(node):
            continue
        source: Any = node
        while not _is_vector(source, n, 1) and source.target in MOVES:
            source = source.args[0]
        if not _is_vector(source, n, 1):
            raise Refused(
                f"a router reads its logits and one bias [{n}] alone; this reads {source.name}, "
                f"{describe(source)}"
            )
        found.add(source)
    if len(found) > 1:
        names = ", ".join(sorted(node.name for node in found))
        raise Refused(f"a router has one bias for the choice; this reads {names}")
    return next(iter(found), None)


def _along_last(node: Node) -> bool:
    """Whether what is counted are entries of the last axis."""
    axis: Any = node.args[1]
    return axis % node.meta["val"].dim() == node.meta["val"].dim() - 1  # type: ignore[no-any-return]


def _is_made_of_numbers(node: Node) -> bool:
    """Whether a tensor is computed of nothing that is given: of literals, and sizes."""
    stack, seen = [node], {node}
    while stack:
        current = stack.pop()
        if current.op == "placeholder":
            return False
        inputs = set(filter(is_tensor, current.all_input_nodes)) - seen
        stack.extend(inputs)
        seen |= inputs
    return True


def rows_of(node: Node) -> int | None:
    """Rows of a tensor; None where they are symbolic."""
    shape = [fixed(size) for size in node.meta["val"].shape[:-1]]
    return None if None in shape else math.prod(size or 0 for size in shape)
