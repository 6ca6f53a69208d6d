"""The grouped form of a loop: all rows at once, sorted by their experts.

    choices[T, k] -> flat, sorted -> tokens of all rows, where the rows of each expert end
    rows -> the chain of one turn; its products are grouped products -> rows of each token, added
    to the result in the order of the turns

Numbers of rows are those of the choices, so that nothing waits for the device.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.inserted import before
from qinductor.patterns.loops.choices import Choices
from qinductor.patterns.loops.find import Loop
from qinductor.patterns.loops.rows import PRODUCTS, axis_of, check_rows, read_of, resized
from qinductor.patterns.loops.turns import Chain, Each
from qinductor.patterns.products import check_factors
from qinductor.regions import Scope, aten, behind, describe, prims


class Grouped:
    """The grouped form, before what a loop ends in; nothing reads it yet, `undo` takes it out.

    products  a product of the first turn -> that of all turns
    result    what takes the place of the loop's result
    """

    def __init__(self, loop: Loop, chain: Chain, choices: Choices, scope: Scope) -> None:
        self.loop, self.chain, self.choices, self.scope = loop, chain, choices, scope
        self.inserted: list[Node] = []
        self.products: dict[Node, Node] = {}
        self._emit = before(loop.result, loop.start)
        self._made: dict[Node, Any] = {}
        self._columns: dict[Node, Node] = {}
        try:
            self._route()
            for step in chain.steps:
                self._made[step] = self._step(step)
            self.result = self._combined(self._made[loop.turns[0].rows])
        except BaseException:
            self.undo()
            raise

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self._emit(target, *args, **kwargs)
        self.inserted.append(node)
        return node

    def undo(self) -> None:
        """Takes everything out of the graph but what an operator reads already."""
        for node in reversed(self.inserted):
            if not node.users:
                node.graph.erase_node(node)
        self.inserted.clear()

    def _route(self) -> None:
        """Experts of all choices, sorted; tokens of rows; where rows of each expert end."""
        found, experts = self.choices, len(self.loop.turns)
        ids, k = found.ids, found.k
        dtype = ids.meta["val"].dtype
        if found.first:
            ids = self(aten.sub.Tensor, ids, found.first)
        low, high = self(aten.lt.Scalar, ids, 0), self(aten.ge.Scalar, ids, experts)
        none = self._full(experts, dtype)
        ids = self(aten.where.self, self(aten.logical_or.default, low, high), none, ids)
        if found.once and not found.distinct:  # the last of equal choices counts
            equal = self(
                aten.eq.Tensor,
                self(aten.unsqueeze.default, ids, 2),
                self(aten.unsqueeze.default, ids, 1),
            )
            places = self._iota(k)
            later = self(
                aten.lt.Tensor, self(aten.unsqueeze.default, places, 1),
                self(aten.unsqueeze.default, places, 0),
            )  # fmt: skip
            again = self(aten.any.dim, self(aten.logical_and.default, equal, later), 2)
            ids = self(aten.where.self, again, none, ids)
        flat = self(aten.reshape.default, ids, [-1])
        self.experts, self.order = self._sorted(flat, 0)
        ends = self._iota(experts, dtype)
        self.offsets = self(
            aten.searchsorted.Tensor, self.experts, ends, out_int32=True, right=True
        )
        self.experts = self(aten.clamp_max.default, self.experts, experts - 1)
        self.token = self.order
        if k > 1:
            self.token = self(aten.div.Tensor_mode, self.order, k, rounding_mode="floor")

    def _sorted(self, ids: Node, dim: int) -> tuple[Node, Node]:
        both = self(aten.sort.stable, ids, stable=True, dim=dim, descending=False)
        return self._item(both, 0), self._item(both, 1)

    def _item(self, both: Node, i: int) -> Node:
        return self(operator.getitem, both, i)

    def _full(self, value: int, dtype: torch.dtype) -> Node:
        device = self.choices.ids.meta["val"].device
        return self(aten.full.default, [], value, dtype=dtype, device=device)

    def _iota(self, count: Any, dtype: torch.dtype = torch.int64) -> Node:
        device = self.choices.ids.meta["val"].device
        return self(
            prims.iota.default, count, start=0, step=1, dtype=dtype, device=device,
            requires_grad=False,
        )  # fmt: skip

    def _place(self, first: Node) -> Node:
        """What stands for a number of a turn's rows, or for its mask."""
        name = self.choices.names[first]
        if name == "token":
            return self.token
        if name == "both":
            return self.order
        choice = self(aten.remainder.Scalar, self.order, self.choices.k)
        if name == "choice":
            return choice
        whole = self(aten.mul.Tensor, choice, self._size(self.choices.ids, 0))
        return self(aten.add.Tensor, whole, self.token)

    def _size(self, node: Node, axis: int) -> Any:
        size = node.meta["val"].shape[axis]
        return size if isinstance(size, int) else self(aten.sym_size.int, node, axis)

    def _step(self, step: Node) -> Any:
        if step.target in PRODUCTS:
            return self._product(step)
        check_rows(step, self.chain)
        read = read_of(step)
        if read is not None:
            return self._read(step, *read)
        args: Any
        args, kwargs = torch.fx.node.map_arg(
            (resized(step), dict(step.kwargs)), lambda node: self._argument(step, node)
        )
        made = self(step.target, *args, **kwargs)
        _check_dtype(made, step)
        return made

    def _argument(self, step: Node, node: Node) -> Any:
        """What takes the place of an argument of a step."""
        if node in self._made:
            return self._made[node]
        if node in self.chain.each:
            return self._column(step, node)
        if node in self.chain.shared:
            return node
        if node in self.chain.places:
            return self._place(node)
        raise Refused(f"{step.name} ({step.target}) takes {node.name}, a number of rows")

    def _stack(self, node: Node) -> Node:
        """What each turn takes, one after the other along a new first axis."""
        if node not in self._columns:
            self._columns[node] = self._one_on_another(self.chain.each[node])
        return self._columns[node]

    def _one_on_another(self, nodes: Each) -> Node:
        return self(aten.cat.default, [self(aten.unsqueeze.default, node, 0) for node in nodes])

    def _column(self, step: Node, node: Node) -> Node:
        """What each turn takes for itself, for each row that of its expert."""
        value, shape = node.meta["val"], list(node.meta["val"].shape)
        rank = step.meta["val"].dim()
        if len(shape) == rank and shape[0] == 1:
            shape = shape[1:]
        plain = torch.Tag.pointwise in getattr(step.target, "tags", ())
        if not plain or axis_of(step) != 0 or len(shape) >= rank or not _whole(shape):
            raise Refused(
                f"{step.name} ({step.target}) takes {describe(node)}, which differs between turns"
            )
        chosen = self(aten.index.Tensor, self._stack(node), [self.experts])
        sizes = [-1, *(1,) * (rank - 1 - len(shape)), *shape]
        if len(sizes) == 1 + value.dim():
            return chosen
        return self(aten.reshape.default, chosen, sizes)

    def _read(self, step: Node, table: Node, chosen: Sequence[Node | None]) -> Node:
        """Rows of a table."""
        own = [self._argument(step, node) if node is not None else None for node in chosen]
        if table in self.chain.each:
            if None in own:
                raise Refused(f"{step.name} chooses from {describe(table)} along a later axis")
            return self(aten.index.Tensor, self._stack(table), [self.experts, *own])
        return self(aten.index.Tensor, self._argument(step, table), own)

    def _product(self, step: Node) -> Node:
        """The grouped product, with a bias for each expert if there are any. It is fake: what
        takes it stands in the graph before it would run."""
        check_factors(step)
        *bias, left, right = step.args
        assert isinstance(left, Node) and isinstance(right, Node)
        if left not in self._made or right in self._made:
            raise Refused(f"{step.name} must have rows on the left and a weight on the right")
        x = self._made[left]
        if right in self.chain.shared:
            if any(node not in self.chain.shared for node in bias):
                raise Refused(f"{step.name} has one weight for all turns, and a bias for each")
            return self(step.target, *bias, x, right)
        weights = self._stack(right)
        given = [x, weights, self.offsets]
        if bias:
            (node,) = bias
            assert isinstance(node, Node)
            given.append(self._bias(node, step))
        graph = self.loop.result.graph
        with graph.inserting_before(self.loop.result):
            made = graph.call_function(aten._grouped_mm.default, tuple(given))
        self.inserted.append(made)
        value = x.meta["val"]
        with value.fake_mode:
            out = value.new_empty((value.shape[0], step.meta["val"].shape[1]))
        made.meta = {**step.meta, "val": out}
        self.products[step] = made
        return made

    def _bias(self, node: Node, step: Node) -> Node:
        n = step.meta["val"].shape[1]
        each: Each = self.chain.each.get(node, (node,) * len(self.loop.turns))
        varying = [v for b in each for v in behind(b, self.scope)[1]]
        if tuple(node.meta["val"].shape) != (n,) or varying:
            raise Refused(f"{step.name} must have a constant bias [{n}]; it is {describe(node)}")
        return self._one_on_another(each)

    def _combined(self, rows: Node) -> Node:
        """The result: to each token its rows are added, those of the first turns first."""
        k, total = self.choices.k, self.loop.start
        if total.meta["val"].shape != self.loop.result.meta["val"].shape:
            total = self(aten.reshape.default, total, [*self.loop.result.meta["val"].shape])
        places = self._iota(self._size(self.order, 0))
        back = self(aten.index_put.default, places, [self.order], places)
        back = self(aten.reshape.default, back, [-1, k])
        if k > 1:
            back = self._sorted(back, 1)[0]
        end = self(aten.select.int, self.offsets, 0, len(self.loop.turns) - 1)
        chosen = self(aten.lt.Tensor, back, end)
        rank = rows.meta["val"].dim()
        for i in range(k):
            at = self(aten.select.int, back, 1, i)
            held = self(aten.select.int, chosen, 1, i)
            held = self(aten.reshape.default, held, [-1, *(1,) * (rank - 1)])
            row = self(aten.index.Tensor, rows, [at])
            total = self(aten.where.self, held, self(aten.add.Tensor, total, row), total)
        _check_dtype(total, self.loop.result)
        return total


def _check_dtype(made: Node, step: Node) -> None:
    """Refused where numbers of turns, which become columns, make another dtype of a result."""
    values = [n.meta["val"] for n in (made, step)]
    first, second = (v.dtype if isinstance(v, torch.Tensor) else None for v in values)
    if first is not second:
        raise Refused(f"{step.name} would be {first}, not {second}, of a column of numbers")


def _whole(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in sizes)
