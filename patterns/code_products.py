"""Products of codes as torch spells them: `_scaled_mm`, `_scaled_mm_v2` and `_int_mm`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from qinductor.contracts import FLOAT_CODES, QuantizedWeight, WeightFormat, short
from qinductor.errors import Refused
from qinductor.kernels.scaled_matmul import SCALED_MATMUL
from qinductor.patterns.dequantised import Dequantised
from qinductor.patterns.epilogues import Epilogue, Factor, known
from qinductor.patterns.inserted import after
from qinductor.regions import Axes, Region, Scope, aten, behind, describe, prims

FP32 = torch.float32
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# What shares a scale, as the recipes of `_scaled_mm_v2` number it.
TENSOR, ROW, BY_128, BLOCK_128 = 0, 1, 4, 5
PAIRS = ((TENSOR, TENSOR), (ROW, ROW), (BY_128, BY_128), (BY_128, BLOCK_128))  # of x, of the weight


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """The scale of a weight, and how it lies over W[N, K].

    bn, bk  block that shares an entry
    axes    of the value: those of N and K; None: there is one entry for each row, or one in all
    """

    node: Node
    bn: int
    bk: int
    axes: Axes | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class CodeProduct:
    """One product of codes.

    a, weight  [M, K] and [K, N]; of experts [E, M, K] or [T, K], and [E, K, N]
    start      its value, with the scales and the bias that the operator has taken itself
    group      elements along k that share a scale of a; 0: there is one; None: the epilogue tells
    grid       the scale of the weight; None: the epilogue tells
    fast       whether sums may be kept in fewer bits
    x          how the graph's own operand is made of `a`, where it does not multiply codes
    zero       zero points of a; None: there are none
    zeros      elements along k that share one; 0: there is one
    operator   which takes the product
    offsets    where each expert's rows end, of rows sorted by expert
    choices    of rows of a, and of its scales, one after the other: the product is of those
    """

    a: Node
    weight: Node
    start: Epilogue
    group: int | None = None
    grid: Grid | None = None
    fast: bool = False
    x: Dequantised | None = None
    zero: Node | None = None
    zeros: int = 0
    operator: str = SCALED_MATMUL.name
    offsets: Node | None = None
    choices: tuple[Node, ...] = ()

    @property
    def experts(self) -> int:
        """How many weights are stacked; 0: there is one."""
        *stack, _, _ = self.weight.meta["val"].shape
        return int(stack[0]) if stack else 0

    @property
    def axes(self) -> Axes:
        """Those of the weight."""
        return Axes(2, 1, 0) if self.experts else Axes(1, 0)

    @property
    def codes(self) -> torch.dtype:
        """Of the codes of x: `a` holds these, or floats that are the same numbers."""
        found: torch.dtype = self.a.meta["val"].dtype
        return found if self.x is None else self.x.making.codes

    def cast(self) -> Node:
        """What holds the codes in their dtype: `a`, or a cast of it, one for all products of it,
        which is put into the graph."""
        value = self.a.meta["val"]
        if value.dtype == self.codes:
            return self.a
        return after(self.a, prims.convert_element_type.default, self.codes)

    @property
    def rows(self) -> int | None:
        """M, unless it is symbolic, or that of each expert is known on the device alone."""
        if self.experts:
            return None
        m = self.start.source.meta["val"].shape[0]
        return m if isinstance(m, int) else None

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, K). Refused if they are symbolic."""
        k, n = self.weight.meta["val"].shape[-2:]
        if not isinstance(k, int) or not isinstance(n, int):
            raise Refused(f"the weight's sizes must be numbers; it is {describe(self.weight)}")
        return n, k


def product_of(node: Node, scope: Scope) -> CodeProduct:
    """What a node of `ANCHORS` multiplies, or Refused where no contract is of this form."""
    a, weight = node.args[:2]
    assert isinstance(a, Node) and isinstance(weight, Node)
    k = weight.meta["val"].shape[-2]
    # `_scaled_mm` is traced without a look at this: a symbolic size is k from here on.
    if isinstance(k, int) and a.meta["val"].shape[1] != k:
        raise Refused(f"x must be [M, {k}]; it is {describe(a)}")
    return ANCHORS[node.target](node, scope)


def _integers(node: Node, scope: Scope) -> CodeProduct:
    a, weight = node.args
    assert isinstance(a, Node) and isinstance(weight, Node)
    return CodeProduct(a, weight, Epilogue(node, last=node))


def _given(node: Node) -> dict[str, Any]:
    """The arguments of a node by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = [
        *node.args,
        *(node.kwargs.get(a.name, a.default_value) for a in schema[len(node.args) :]),
    ]
    return {argument.name: value for argument, value in zip(schema, values, strict=True)}


def _scaled(node: Node, scope: Scope) -> CodeProduct:
    given = _given(node)
    if given["scale_result"] is not None:
        raise Refused("the result must have no scale of its own (scale_result)")
    a, weight, sa, sb = (given[name] for name in ("self", "mat2", "scale_a", "scale_b"))
    m, (k, n) = a.meta["val"].shape[0], weight.meta["val"].shape
    blocks = -(-k // 128)
    for scale in (sa, sb):
        if scale.meta["val"].dtype != torch.float32:
            raise Refused(
                f"scales must be fp32, as they are; {describe(scale)} is in an order of its own "
                "(swizzled)"
            )
    shapes = [scale.meta["val"].shape for scale in (sa, sb)]
    if all(known(1, size) for shape in shapes for size in shape):
        recipes = TENSOR, TENSOR
    elif _is(shapes[0], m, 1) and _is(shapes[1], 1, n):
        recipes = ROW, ROW
    elif _is(shapes[0], m, blocks) and _is(shapes[1], blocks, -(-n // 128)):
        recipes = BY_128, BLOCK_128
    elif _is(shapes[0], m, blocks) and _is(shapes[1], blocks, n):
        recipes = BY_128, BY_128
    else:
        raise Refused(
            f"scales must be of tensors, rows, 1x128 or 128x128 blocks of the weight; they are "
            f"{describe(sa)} and {describe(sb)} of {describe(a)} and {describe(weight)}"
        )
    return _product(node, given, (sa, sb), recipes, Axes(1, 0), scope)


def _is(shape: Sequence[int], *sizes: int) -> bool:
    return len(shape) == len(sizes) and all(known(*pair) for pair in zip(shape, sizes, strict=True))


def _scaled_v2(node: Node, scope: Scope) -> CodeProduct:
    given = _given(node)
    swizzles = [*given["swizzle_a"], *given["swizzle_b"]]
    if any(swizzles):
        raise Refused(f"scales must be in order; they are swizzled ({swizzles})")
    if list(given["contraction_dim"]):
        raise Refused(f"K must be the inner axes; contraction_dim is {given['contraction_dim']}")
    recipes = tuple(zip(given["recipe_a"], given["recipe_b"], strict=False))
    one = len(given["recipe_a"]) == len(given["recipe_b"]) == 1
    if not one or recipes[0] not in PAIRS:
        raise Refused(
            f"scales must be one for each side, by recipes {' or '.join(map(str, PAIRS))}; they "
            f"are {given['recipe_a']} and {given['recipe_b']}"
        )
    scales = given["scale_a"][0], given["scale_b"][0]
    axes = Axes(1, 0) if recipes[0][1] == BLOCK_128 else Axes(0, 1)
    return _product(node, given, scales, recipes[0], axes, scope)


def _product(
    node: Node,
    given: dict[str, Any],
    scales: tuple[Node, Node],
    recipes: tuple[int, int],
    axes: Axes,
    scope: Scope,
) -> CodeProduct:
    a, weight, bias = given["self"], given["mat2"], given["bias"]
    m, (k, n) = a.meta["val"].shape[0], weight.meta["val"].shape
    sa, sb = scales
    group = {TENSOR: 0, ROW: k}.get(recipes[0], min(128, k))
    if group and not _is(sa.meta["val"].shape, m, -(-k // group)):
        raise Refused(f"the scale of x must be [M, {-(-k // group)}]; it is {describe(sa)}")
    blocks = {TENSOR: (n, k), ROW: (1, k), BLOCK_128: (min(128, n), min(128, k))}
    bn, bk = blocks.get(recipes[1], (1, min(128, k)))
    wanted, found = [-(-n // bn), -(-k // bk)], sb.meta["val"].shape
    if recipes[1] in (TENSOR, ROW):
        axes_of, fits = None, known(math.prod(found), wanted[0])
    else:  # `_scaled_mm_v2` wants it padded along k
        axes_of, fits = axes, len(found) == 2 and known(found[axes.n], wanted[0])
        fits = fits and found[axes.k or 0] >= wanted[1]
    if not fits:
        raise Refused(f"the scale of the weight must be {wanted}; it is {describe(sb)}")
    kinds = ("one" if recipes[0] == TENSOR else "row", "one" if recipes[1] == TENSOR else "column")
    factors = tuple(
        Factor(scale, kind, not behind(scale, scope)[1])
        for scale, kind in zip(scales, kinds, strict=True)
    )
    start = Epilogue(node, factors, bias, inside=2, last=node)
    return CodeProduct(a, weight, start, group, Grid(sb, bn, bk, axes_of), given["use_fast_accum"])


def _scaled_grouped(node: Node, scope: Scope) -> CodeProduct:
    given = _given(node)
    a, weight, sa, sb, offsets = (
        given[name] for name in ("self", "mat2", "scale_a", "scale_b", "offs")
    )
    ranks = [n.meta["val"].dim() for n in (a, weight)]
    others = [name for name in ("bias", "scale_result") if given[name] is not None]
    if ranks != [2, 3] or not isinstance(offsets, Node) or others:
        raise Refused(
            "a grouped product must be of x[T, K] with W[E, K, N] and offsets, without bias and "
            f"scale_result; it is of {describe(a)} with {describe(weight)}"
        )
    (t, k), (experts, _, n) = a.meta["val"].shape, weight.meta["val"].shape
    fp32 = all(scale.meta["val"].dtype is FP32 for scale in (sa, sb))
    if not (fp32 and _is(sa.meta["val"].shape, t) and _is(sb.meta["val"].shape, experts, n)):
        raise Refused(
            f"scales must be fp32, one for each row: [T] and [{experts}, {n}]; they are "
            f"{describe(sa)} and {describe(sb)}"
        )
    kinds = ((sa, "row"), (sb, "column"))
    factors = tuple(Factor(scale, kind, not behind(scale, scope)[1]) for scale, kind in kinds)
    start, grid = Epilogue(node, factors, inside=2, last=node), Grid(sb, 1, k)
    return CodeProduct(
        a, weight, start, k, grid, given["use_fast_accum"], operator="scaled_grouped_matmul",
        offsets=offsets,
    )  # fmt: skip


def check_codes(product: CodeProduct) -> None:
    """Refused if codes are of no dtype that the contract has, or x's lie in columns."""
    weight = product.weight.meta["val"].dtype if product.x is None else None
    of_x = CODES if product.zero is None else (*CODES, torch.uint8)
    for what, dtype, taken in (("x", product.codes, of_x), ("the weight", weight, CODES)):
        if dtype is not None and dtype not in taken:
            raise Refused(
                f"codes of {what} must be {', '.join(map(short, taken))}; they are {short(dtype)}"
            )
    value = product.a.meta["val"]
    if not known(value.shape[-1], 1) and not known(value.stride(-1), 1):
        raise Refused(f"rows of x must be contiguous; its strides are {list(value.stride())}")


def codes_of(region: Region, tensors: Sequence[torch.Tensor]) -> list[QuantizedWeight]:
    """The codes that a region makes, of each expert if there are any, without a scale. Those that
    are stored in fewer bits are int4 if all are in its range."""
    codes = region(tensors).contiguous().data
    n, k = codes.shape
    name = next((name for name, dtype in FLOAT_CODES.items() if dtype == codes.dtype), "int8")
    stored = 8 * sum(leaf.nbytes for leaf in tensors)
    if name == "int8" and stored < 8 * n * k:
        low, high = map(int, codes.aminmax())
        name = "int4" if -8 <= low and high <= 7 else name
    n = n // region.experts
    form = WeightFormat(
        codes=name, n=n, k=k, bn=n, bk=k, arithmetic="q", scale=None, zero=None,
        inner=FP32, compute=FP32, dtype=FP32,
    )  # fmt: skip
    return [QuantizedWeight(form, part) for part in codes.split(n)]


ANCHORS: dict[Any, Callable[[Node, Scope], CodeProduct]] = {
    aten._scaled_mm.default: _scaled,
    aten._scaled_mm_v2.default: _scaled_v2,
    aten._int_mm.default: _integers,
    aten._scaled_grouped_mm.default: _scaled_grouped,
}
