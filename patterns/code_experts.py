"""Products of experts on codes: which operator takes them, and rows of x that are chosen.

    codes -> dequantise -> [order] -> _grouped_mm      codes -> [order] -> qinductor
    scale ->                                           scale -> [order] -> .scaled_grouped_matmul

Rows are sorted by expert before they are quantised, or after: then codes and scales are sorted.
"""

from typing import Any

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.gathers import ids_of
from qinductor.patterns.inserted import after, behind_all
from qinductor.patterns.products import sides, unexpanded
from qinductor.regions import Scope, aten, behind, describe

OPERATORS: dict[Any, str] = {
    aten.bmm.default: "scaled_bmm",
    aten._grouped_mm.default: "scaled_grouped_matmul",
}


def is_stack(weight: Node, scope: Scope) -> bool:
    """Whether each batch has a weight of its own, which none chooses: others take those."""
    varying = [n for n in behind(weight, scope)[1] if isinstance(n.meta.get("val"), torch.Tensor)]
    return not varying and unexpanded(weight) is None


def offsets_of(node: Node) -> Node | None:
    """Where the rows of each expert end, if a product is of rows sorted by expert; or Refused."""
    if node.target is not aten._grouped_mm.default:
        return None
    (x, weight), given = sides(node), [*node.args[2:], *node.kwargs.values()]
    offsets, *others = given or [None]
    ranks = [n.meta["val"].dim() for n in (x, weight)]
    if ranks != [2, 3] or not isinstance(offsets, Node) or any(o is not None for o in others):
        raise Refused(
            "a grouped product must be of x[T, K] with W[E, K, N] and offsets, without bias; it is "
            f"of {describe(x)} with {describe(weight)}"
        )
    if offsets.meta["val"].dtype is not torch.int32:
        raise Refused(f"offsets must be int32; they are {describe(offsets)}")
    return offsets


def chosen_rows(x: Node) -> tuple[Node, tuple[Node, ...]]:
    """(what rows of x were chosen from, the choices one after the other)."""
    found: list[Node] = []
    while (ids := ids_of(x)) is not None and ids.meta["val"].dim() == 1:
        source: Any = x.args[0]
        if source.meta["val"].dim() != 2:
            break
        found.insert(0, ids)
        x = source
    return x, tuple(found)


def choose(rows: Node, sizes: list[int], choices: tuple[Node, ...]) -> Node:
    """Rows of a tensor, seen in these sizes, by all choices, put into the graph."""
    shape = rows.meta["val"].shape
    if choices and (len(shape) != 2 or shape[-1] != sizes[-1]):
        rows = after(rows, aten.reshape.default, sizes)
    for ids in choices:
        rows = behind_all([rows, ids], aten.index.Tensor, rows, [ids])
    return rows
