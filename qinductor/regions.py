"""Regions: the part of a graph behind one operand, extracted and evaluated as a pure function."""

import dataclasses
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from qinductor.contracts import FLOAT_CODES
from qinductor.errors import Refused
from qinductor.freed import is_freed

aten, prims = torch.ops.aten, torch.ops.prims

VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
# Operators that move elements but compute nothing: the first argument is moved.
MOVES = VIEWS | {
    aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default,
    aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.repeat.default,
    aten.slice.Tensor, aten.index.Tensor, aten.index_select.default, aten.select.int,
}  # fmt: skip
# Operators that put axes in another order, or add one of size 1, and do nothing else.
TURNS = {aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default}
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten._scaled_mm.default, aten._scaled_mm_v2.default, aten._int_mm.default,
    aten._grouped_mm.default, aten.convolution.default,
}  # fmt: skip
FLOAT8 = tuple(FLOAT_CODES.values())
INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which hold words, and take no arithmetic
CODED = (*INTEGER, *UNSIGNED, torch.bool, *FLOAT8)  # dtypes of tensors that may hold codes


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where a constant is at run time: argument `index`, then these attributes of a subclass."""

    index: int
    attributes: tuple[str, ...] = ()

    def of(self, arguments: Sequence[Any]) -> torch.Tensor:
        """The tensor itself."""
        value = arguments[self.index]
        for name in self.attributes:
            value = getattr(value, name)
        return value  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return ".".join([f"arg{self.index}", *self.attributes])


@dataclasses.dataclass
class Scope:
    """What is known of a graph's placeholders: which are constant, and their values now.

    leaves     placeholder -> where its tensor is at run time
    why        placeholder -> why it is not constant
    arguments  what the graph was compiled with
    known      region of a weight -> what it was proved to be before its leaves were freed, as
               `Op.restored` gives it; None where they are there. Refused if it was not packed
    """

    leaves: dict[Node, Leaf]
    why: dict[Node, str]
    arguments: Sequence[Any]
    known: Callable[["Region"], Any] = lambda region: None

    def value(self, leaf: Leaf) -> torch.Tensor:
        """The constant's present value; a meta tensor if it was freed."""
        tensor = leaf.of(self.arguments)
        return torch.empty_like(tensor, device="meta") if is_freed(tensor) else tensor


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of a region's value: output features, input features, experts."""

    n: int
    k: int | None = None
    expert: int | None = None

    def order(self, rank: int) -> list[int]:
        """All axes of the value: those of size 1 that are none of these, experts, N, K."""
        last = [axis for axis in (self.expert, self.n, self.k) if axis is not None]
        return [axis for axis in range(rank) if axis not in last] + last


Key = tuple[str, Axes | None, tuple[Leaf, ...]]  # body, axes and leaves of a region


class Region:
    """A pure function of constants, copied out of a graph; what is computed twice is copied once.

    leaves     its inputs, in the order of the copied graph's placeholders
    body       equal for two regions that run the same operators on the same shapes and dtypes
    axes       where experts, output features and input features of the product lie in the value;
               None for those it does not have
    signature  body and axes. Turns of a weight at the end are no part of either: W and W.t() are
               one region
    key        by which what was packed of it is found
    shape      [N, K] of the weight, [experts * N, K] of a stack of them
    """

    def __init__(self, output: Node, order: list[Node], scope: Scope, axes: Axes) -> None:
        self.graph = Graph()
        self.constants: dict[Node, torch.Tensor] = {}
        while turned := _before(output, axes):
            output, axes = turned
            order = order[: order.index(output) + 1]
        self.axes = axes
        copies: dict[Node, Node] = {}
        same: dict[str, Node] = {}
        holders = [node for node in order if node.op == "placeholder"]
        self.leaves = tuple(scope.leaves[node] for node in holders)
        for node in [*holders, *(node for node in order if node.op != "placeholder")]:
            if isinstance(node.meta.get("val"), (list, tuple)):
                continue  # its parts are slices of what it splits
            target, whole = _part(node)
            arguments = torch.fx.node.map_arg(whole, copies.__getitem__)
            key = f"{node.op} {target} {arguments} {node.kwargs}"
            if key in same:
                copies[node] = same[key]
                continue
            if node.op == "get_attr":
                copies[node] = self.graph.placeholder(f"constant_{len(self.constants)}")
                self.constants[copies[node]] = attribute(node)
            elif node.op == "placeholder":
                copies[node] = self.graph.placeholder(f"leaf_{len(copies)}")
            elif target is not node.target:
                copies[node] = self.graph.call_function(target, arguments)
            else:
                copies[node] = self.graph.node_copy(node, copies.__getitem__)
            same[key] = copies[node]
            known = self.constants.get(copies[node])
            copies[node].meta = {"val": node.meta.get("val", known)}
        self.output = copies[output]
        self.inputs = [copies[node] for node in holders]
        self.nodes = list(dict.fromkeys(copies[node] for node in order if node in copies))
        value = output.meta["val"]
        sizes = [int(size) for size in value.shape]
        self.experts = 1 if axes.expert is None else sizes[axes.expert]
        k = 1 if axes.k is None else sizes[axes.k]
        self.shape = math.prod(sizes) // k, k
        self.dtype: torch.dtype = value.dtype
        self.device: torch.device = value.device
        self.body = self._body()
        self.signature = f"{self.body}\n{axes}"
        self.key: Key = self.body, axes, self.leaves

    def _body(self) -> str:
        index = {node: i for i, node in enumerate(self.nodes)}

        def text(value: Any) -> str:
            return f"%{index[value]}" if isinstance(value, Node) else str(value)

        lines = []
        for node in self.nodes:
            arguments = torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), text)
            what = node.op if node.op == "placeholder" else str(node.target)
            constant = self.constants.get(node)
            lines.append(f"{what} {arguments} {describe(node)} {digest(constant)}")
        return "\n".join(lines)

    def __call__(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The value W[N, K] for these leaves: one whole evaluation."""
        env = {**self.constants, **dict(zip(self.inputs, leaves, strict=True))}
        (value,) = evaluate(self.nodes, env, [self.output])
        return self.oriented(value)

    def oriented(self, value: torch.Tensor) -> torch.Tensor:
        """The value as W[N, K] or, of a part of a stack of experts, as W[part * N, K]."""
        if self.axes.k is None:
            return value.reshape(-1, 1)
        return value.permute(self.axes.order(value.dim())).reshape(-1, self.shape[1])

    @property
    def row_axis(self) -> tuple[int, int]:
        """(axis of the value whose parts are whole rows of W, how many rows one part has)."""
        if self.axes.expert is None:
            return self.axes.n, 1
        return self.axes.expert, self.shape[0] // self.experts


def _before(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    """What a weight is a turned view of, and where its axes lie there; None if it is no view."""
    if axes.k is None or node.target not in TURNS:
        return None
    source: Any = node.args[0]
    numbered = torch.empty(*range(2, source.meta["val"].dim() + 2), device="meta")
    at = node.target(numbered, *node.args[1:]).shape
    there: list[Any] = [a if a is None else at[a] - 2 for a in (axes.n, axes.k, axes.expert)]
    return None if -1 in there else (source, Axes(*there))


def _part(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """(operator, arguments) of a node; what takes a part of a split takes it of the whole."""
    if node.target is not operator.getitem:
        return node.target, node.args
    split, i = node.args
    assert isinstance(split, Node) and isinstance(i, int)
    source, *rest = split.args
    given: Any = (*rest, 0)[:2]
    if split.target is aten.unbind.int:
        return aten.select.int, (source, given[0], i)
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        raise Refused(f"the weight is taken from the results of {split.target}")
    sizes, dim = given
    ends = [j * sizes if isinstance(sizes, int) else sum(sizes[:j]) for j in (i, i + 1)]
    return aten.slice.Tensor, (source, dim, *ends)


def evaluate(
    nodes: Iterable[Node],
    given: Mapping[Node, torch.Tensor],
    wanted: Sequence[Node],
    widen: bool = False,
) -> list[torch.Tensor]:
    """Runs `nodes` (in order) from the given values, with no autograd and on real tensors.

    A value is dropped after its last use, so that one large intermediate is alive at a time. The
    caller has left Inductor's fake mode (`unset_fake_temporarily`) and autograd (`no_grad`).
    widen: floats that would be rounded to 16 bits become float32.
    """
    nodes = [node for node in nodes if node not in given]
    device = next((value.device for value in given.values()), None)
    last = {used: node for node in nodes for used in node.all_input_nodes}
    keep, env = set(wanted), dict(given)
    for node in nodes:
        env[node] = call(node, _unrounded(node, widen), env.__getitem__, device)
        for used in set(node.all_input_nodes):
            if last[used] is node and used not in keep:
                del env[used]
    return [env[node] for node in wanted]


def _unrounded(node: Node, widen: bool) -> tuple[Any, ...]:
    narrows = node.target is prims.convert_element_type.default and node.args[1] in HALVES
    return (node.args[0], torch.float32) if widen and narrows else node.args


def call(
    node: Node,
    arguments: tuple[Any, ...],
    value: Callable[[Node], torch.Tensor],
    device: torch.device | None,
) -> torch.Tensor:
    """Runs one node on `arguments`; what it makes is made on `device`, where the probes are."""

    def real(argument: Any) -> Any:
        if isinstance(argument, Node):
            return value(argument)
        return device if isinstance(argument, torch.device) else argument

    args, kwargs = torch.fx.node.map_aggregate((arguments, dict(node.kwargs)), real)
    return node.target(*args, **kwargs)  # type: ignore[operator,no-any-return]


def behind(node: Node, scope: Scope) -> tuple[list[Node], list[Node]]:
    """(nodes that `node` depends on, itself last, in graph order; those not constant)."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    order = sorted(seen)  # nodes compare by their places
    varying = [n for n in order if n.op == "placeholder" and n not in scope.leaves]
    return order, varying + [n for n in order if n.op == "call_function" and not pure(n)]


def extract(node: Node, order: list[Node], scope: Scope, axes: Axes) -> Region:
    """The region behind `node`. Refused if its sizes are symbolic or its tensors on two devices."""
    for other in order:
        value = other.meta.get("val")
        if isinstance(value, torch.Tensor) and any(
            isinstance(size, torch.SymInt) for size in value.shape
        ):
            raise Refused(f"the weight's sizes must be numbers; {other.name} is {describe(other)}")
    devices = {str(n.meta["val"].device) for n in order if n.op == "placeholder"}
    if "meta" in devices or not node.meta["val"].numel():
        raise Refused(f"the weight must hold values; it is {describe(node)} on {sorted(devices)}")
    if len(devices) > 1:
        raise Refused(f"the weight's tensors must lie on one device; found {sorted(devices)}")
    return Region(node, order, scope, axes)


def pure(node: Node) -> bool:
    """Whether the node computes the same value every time and changes nothing."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem or isinstance(node.meta.get("val"), (int, torch.SymInt))
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    return not seeded and not target._schema.is_mutable


def describe(node: Node) -> str:
    """dtype and shape of a node's value, such as `int8[128, 256]`."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def attribute(node: Node) -> torch.Tensor:
    """The tensor that a `get_attr` node reads."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value  # type: ignore[no-any-return]


def digest(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return ""
    with unset_fake_temporarily(), torch.no_grad():
        held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.sha256(bytes(held.tolist())).hexdigest()
