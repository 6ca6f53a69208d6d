"""A region evaluated on its first rows only, so that identification costs no whole evaluations.

From "the first m of the output along one axis" the demand is carried back, node by node, to the
inputs. A node without a rule for its demand takes all of its inputs.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from qinductor.regions import CASTS, VIEWS, aten, call, prims

SAME = CASTS | {aten.clone.default, aten.alias.default, aten.detach.default,
                aten.lift_fresh_copy.default}  # fmt: skip
MAKERS = {aten.full.default, aten.empty.memory_format, aten.scalar_tensor.default,
          prims.iota.default}  # fmt: skip


class Untracked(Exception):
    """A node has no rule for the demand that reached it."""


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The first `size` elements along `axis`."""

    axis: int
    size: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """That part of a tensor; all of it where it is shorter."""
        return tensor.narrow(self.axis, 0, min(self.size, tensor.shape[self.axis]))


Demand = Prefix | None  # None: the whole
Needs = dict[Node, Demand]
# Of a node: (what is needed of each input, its arguments with sizes made to fit).
Carried = tuple[Needs, tuple[Any, ...]]


class Rows:
    """The function from some inputs to a prefix of `output` (all of it for `prefix` None).

    demand  node -> the part of it that is computed or, for an input, taken
    """

    def __init__(self, nodes: Sequence[Node], output: Node, prefix: Demand) -> None:
        self.output = output
        self.demand: Needs = {output: prefix}
        steps = []
        for node in reversed(nodes):
            if node not in self.demand:  # it counts for other rows alone
                continue
            demand = self.demand[node]
            needs, arguments = (dict.fromkeys(node.all_input_nodes), node.args)
            if demand is not None and node.op == "call_function":
                with contextlib.suppress(Untracked):
                    needs, arguments = _rule(node, demand)
            for source, need in needs.items():
                self.demand[source] = _join(need, self.demand.get(source, need))
            steps.append((node, needs, arguments))
        self.steps = steps[::-1]

    def take(self, node: Node, tensor: torch.Tensor) -> torch.Tensor:
        """The part of an input's whole tensor that the function takes."""
        demand = self.demand.get(node)
        return tensor if demand is None else demand.of(tensor)

    def __call__(self, given: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """The output's prefix; `given` holds the inputs as `take` returns them."""
        env = dict(given)
        device = next((tensor.device for tensor in given.values()), None)
        for node, needs, arguments in self.steps:
            if node in env:
                continue

            def value(source: Node, needs: Needs = needs) -> torch.Tensor:
                need = needs[source]
                return env[source] if need is None else need.of(env[source])

            env[node] = call(node, arguments, value, device)
            demand = self.demand[node]
            if demand is not None:
                env[node] = demand.of(env[node])
        return env[self.output]


def _join(a: Demand, b: Demand) -> Demand:
    """A demand that holds both; the whole where they lie along different axes."""
    if a is None or b is None or a.axis != b.axis:
        return None
    return a if a.size >= b.size else b


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def _rule(node: Any, want: Prefix) -> Carried:
    target = node.target
    if target in MAKERS:
        return {}, node.args
    if target in SAME:
        return {node.args[0]: want}, node.args
    if target in VIEWS:
        return _view(node, want)
    if target in _HANDLERS:
        return _HANDLERS[target](node, want)
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return _pointwise(node, want)
    raise Untracked(f"{target} has no row rule")


def _pointwise(node: Any, want: Prefix) -> Carried:
    needs: Needs = {}
    for source in node.all_input_nodes:
        axis = want.axis - (len(_shape(node)) - len(_shape(source)))
        whole = axis < 0 or _shape(source)[axis] == 1
        needs[source] = None if whole else Prefix(axis, want.size)
    return needs, node.args


def _view(node: Any, want: Prefix) -> Carried:
    source, shape, inner = node.args[0], list(_shape(node)), _shape(node.args[0])
    before, after = math.prod(shape[: want.axis]), math.prod(shape[want.axis + 1 :])
    for axis, size in enumerate(inner):
        if math.prod(inner[:axis]) == before and (size > 1 or shape[want.axis] == 1):
            step = math.prod(inner[axis + 1 :])  # one row of the input, in elements
            unit = math.lcm(step, after)
            count = min(-(-want.size * after // unit) * (unit // step), size)
            if count * step % after:
                break
            shape[want.axis] = count * step // after
            return {source: Prefix(axis, count)}, (source, shape)
    raise Untracked(f"rows of {list(_shape(node))} are no rows of {list(inner)}")


def _expand(node: Any, want: Prefix) -> Carried:
    shape = list(_shape(node))
    shape[want.axis] = want.size
    return _pointwise(node, want)[0], (node.args[0], shape)


def _permute(node: Any, want: Prefix) -> Carried:
    source, dims = node.args
    return {source: Prefix(dims[want.axis] % len(dims), want.size)}, node.args


def _transpose(node: Any, want: Prefix) -> Carried:
    rank = len(_shape(node))
    a, b = (int(d) % rank for d in (node.args[1:] or (0, 1)))
    axis = {a: b, b: a}.get(want.axis, want.axis) if rank > 1 else want.axis
    return {node.args[0]: Prefix(axis, want.size)}, node.args


def _unsqueeze(node: Any, want: Prefix) -> Carried:
    source, dim = node.args[0], int(node.args[1]) % len(_shape(node))
    need = None if dim == want.axis else Prefix(want.axis - (dim < want.axis), want.size)
    return {source: need}, node.args


def _squeeze(node: Any, want: Prefix) -> Carried:
    source, dims = node.args
    inner = _shape(source)
    gone = {int(d) % len(inner) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    if any(inner[d] != 1 for d in gone):  # one row of them would be squeezed
        raise Untracked(f"axes {sorted(gone)} of {list(inner)} are not all 1")
    kept = [axis for axis in range(len(inner)) if axis not in gone]
    return {source: Prefix(kept[want.axis], want.size)}, node.args


def _sum(node: Any, want: Prefix) -> Carried:
    source, dims, keep = (*node.args, False)[:3]
    rank = len(_shape(source))
    gone = {int(d) % rank for d in dims}
    axis = [axis for axis in range(rank) if keep or axis not in gone][want.axis]
    return {source: None if axis in gone else Prefix(axis, want.size)}, node.args


def _view_dtype(node: Any, want: Prefix) -> Carried:
    source, size = node.args[0], want.size
    if want.axis == len(_shape(node)) - 1:
        bits = [n.meta["val"].dtype.itemsize for n in (node, source)]
        size = -(-want.size * bits[0] // bits[1])
    return {source: Prefix(want.axis, size)}, node.args


def _slice(node: Any, want: Prefix) -> Carried:
    given: tuple[Any, ...] = tuple(node.args)
    source, dim, start, _, step = given + (0, 0, None, 1)[len(given) - 1 :]
    rank, inner = len(_shape(node)), _shape(source)
    if int(dim) % rank != want.axis:
        return {source: want}, node.args
    start = int(start or 0)
    start = max(start + inner[want.axis], 0) if start < 0 else start
    size = min(start + (want.size - 1) * int(step) + 1, inner[want.axis])
    return {source: Prefix(want.axis, size)}, (source, dim, start, size, step)


def _select(node: Any, want: Prefix) -> Carried:
    source, dim = node.args[0], int(node.args[1]) % (len(_shape(node)) + 1)
    return {source: Prefix(want.axis + (want.axis >= dim), want.size)}, node.args


def _cat(node: Any, want: Prefix) -> Carried:
    dim = (int(node.args[1]) if len(node.args) > 1 else 0) % len(_shape(node))
    if dim != want.axis:
        return dict.fromkeys(node.all_input_nodes, want), node.args
    needs: Needs = {}
    start = 0
    for part in node.args[0]:
        if start < want.size:
            need = Prefix(dim, min(want.size - start, _shape(part)[dim]))
            needs[part] = _join(need, needs.get(part, need))
        start += _shape(part)[dim]
    return needs, ([part for part in node.args[0] if part in needs], dim)


def _index(node: Any, want: Prefix) -> Carried:
    source, indices = node.args[0], list(node.args[1])
    used = [i for i, index in enumerate(indices) if index is not None]
    if len(used) != 1:
        raise Untracked("the rows are gathered by several indices")
    at, index = used[0], indices[used[0]]
    rank = len(_shape(index))
    if at <= want.axis < at + rank:
        return {source: None, index: Prefix(want.axis - at, want.size)}, node.args
    axis = want.axis if want.axis < at else want.axis - rank + 1
    return {source: Prefix(axis, want.size), index: None}, node.args


def _embedding(node: Any, want: Prefix) -> Carried:
    table, index = node.args[:2]
    return {table: None, index: want if want.axis < len(_shape(index)) else None}, node.args


def _gather(node: Any, want: Prefix) -> Carried:
    source, dim, index = node.args[:3]
    along = int(dim) % len(_shape(source)) == want.axis
    return {source: None if along else want, index: want}, node.args


def _index_put(node: Any, want: Prefix) -> Carried:
    source, indices, values = node.args[:3]
    masks = [n for n in indices if n is not None and n.meta["val"].dtype is torch.bool]
    if len(indices) != 1 or not masks or _shape(masks[0]) != _shape(node) or _shape(values):
        raise Untracked("rows are written by indices")
    return {source: want, masks[0]: want, values: None}, node.args


def _pad(node: Any, want: Prefix) -> Carried:
    source, pads = node.args[0], list(node.args[1])
    at = 2 * (len(_shape(node)) - 1 - want.axis)  # pads run from the last axis, (before, after)
    if at < len(pads):
        if pads[at] != 0:
            raise Untracked("the rows are padded in front")
        pads[at + 1] = max(0, want.size - _shape(source)[want.axis])
        want = Prefix(want.axis, min(want.size, _shape(source)[want.axis]))
    return {source: want}, (source, pads, *node.args[2:])


def _scatter(node: Any, want: Prefix) -> Carried:
    dim = (int(node.args[2]) if len(node.args) > 2 else 0) % len(_shape(node))
    if dim == want.axis:
        raise Untracked("the rows are written in blocks")
    return dict.fromkeys(node.all_input_nodes, want), node.args


def _select_scatter(node: Any, want: Prefix) -> Carried:
    source, part, dim = node.args[:3]
    dim = int(dim) % len(_shape(node))
    if dim == want.axis:
        raise Untracked("the rows are written one by one")
    inner = Prefix(want.axis - (dim < want.axis), want.size)
    return {source: want, part: inner}, node.args


_HANDLERS: dict[Any, Callable[[Any, Prefix], Carried]] = {
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.sum.dim_IntList: _sum,
    aten.view.dtype: _view_dtype,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    aten.index_put.default: _index_put,
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _scatter,
    aten.select_scatter.default: _select_scatter,
    aten.copy.default: _pointwise,
}
