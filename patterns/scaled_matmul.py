"""codes of an activation times codes of a constant weight, and what scales the sums.

    a codes   sa   w codes   s                        a codes   sa   packed codes, scales, bias
       |      |      |       |                           |      |      |
       _scaled_mm / _scaled_mm_v2  [-> + bias]    ->     qinductor.scaled_matmul
       _int_mm -> cast -> * sa -> * s -> + bias -> cast
       mm(dequantised codes, dequantised weight) -> ...

Read off the operators: `_scaled_mm` names its scales, their shapes say of which blocks. Probed:
what follows the sums (`epilogues`), which must be one scale for each side and a bias; how x is
made of its codes (`dequantised`), and the weight of its own (`weight_formats`). Codes that are
multiplied as they are need no proof. What makes the activation's codes is another pattern's.

A product of dequantised operands rounds them, that of their codes does not: it is lowered where
that is within the product oracle for this weight, else only by the family that is named for it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from qinductor.contracts import QuantizedWeight
from qinductor.errors import Refused
from qinductor.kernels.scaled_matmul import (
    SCALED_MATMUL,
    Operands,
    ScaledMatmul,
    powers_of_two,
)
from qinductor.pattern import Lowering, Planner
from qinductor.patterns import code_products, requantised
from qinductor.patterns.code_experts import choose
from qinductor.patterns.code_products import CODES, CodeProduct, Grid, check_codes, codes_of
from qinductor.patterns.constants import check_constant, check_format
from qinductor.patterns.epilogues import Epilogue, Roles, epilogues, known, prove, roles
from qinductor.patterns.inserted import GONE, sweep
from qinductor.patterns.lost import LOST
from qinductor.patterns.products import sides
from qinductor.patterns.requantised import on_codes
from qinductor.patterns.siblings import Proved, Siblings
from qinductor.patterns.spelled import spell_out
from qinductor.patterns.weight_formats.reading import WEIGHTS
from qinductor.patterns.zero_points import check_sums, stored
from qinductor.regions import FLOATS, PRODUCTS, Axes, Region, Scope, behind, describe, extract

LARGEST = 1 << 30  # sum that an epilogue is tried on


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The regions of one site, and what they make; the site's leaves are those of each, in order.

    weight  of codes, or dequantised: then it has its own scales
    scale   of the product
    blocks  (bn, bk) of the weight that share an entry of that scale
    bias    of the product
    sums    of the weight's codes, where zero points of x multiply them
    """

    weight: Region
    scale: Region | None
    blocks: tuple[int, int]
    bias: Region | None
    sums: Region | None

    @property
    def regions(self) -> list[Region]:
        """Those that are there."""
        return [r for r in (self.weight, self.scale, self.sums, self.bias) if r is not None]

    def read(
        self, tensors: Sequence[torch.Tensor], freed: Sequence[Any] | None = None
    ) -> tuple[list[QuantizedWeight], tuple[int, int]]:
        """(the weights that these leaves make, proved, one for each expert if there are any;
        evaluations on probes and of the whole). `freed`: the operands of which they were proved
        to be some before their leaves were freed."""
        tensors = tensors[: len(self.weight.leaves)]
        if self.weight.dtype in CODES:
            return codes_of(self.weight, tensors), (0, 1)
        if freed is not None:
            return [operands.weight for operands in freed], (0, 0)
        weights, evaluations = WEIGHTS(self.weight, tensors)
        return _in_leaf(weights, tensors), evaluations

    def operands(
        self, weights: Sequence[QuantizedWeight], tensors: Sequence[torch.Tensor]
    ) -> tuple[Operands, ...]:
        """The operands for these leaves, of each weight. Codes may be a leaf's own memory, scales
        never are: when the model is gone, what was packed of it goes with them."""
        weights, start = [on_codes(weight) for weight in weights], len(self.weight.leaves)
        n, k = weights[0].format.n, weights[0].format.k
        if self.scale is not None:
            if weights[0].scale is not None:
                raise Refused(
                    f"the weight must be scaled once; it has a {weights[0].format.granularity} "
                    "scale, and its product one more"
                )
            (bn, bk), end = self.blocks, start + len(self.scale.leaves)
            found, start = self.scale(tensors[start:end]), end
            found, rows = found[:, : -(-k // bk)], -(-n // bn)
            parts = found.chunk(len(weights)) if len(weights) > 1 else [found]
            scales = [part.expand(rows, -(-k // bk)).clone().contiguous() for part in parts]
            form = dataclasses.replace(
                weights[0].format, bn=bn, bk=bk, arithmetic="q*s", scale=found.dtype
            )
            weights = [
                QuantizedWeight(form, weight.codes, scale)
                for weight, scale in zip(weights, scales, strict=True)
            ]
        if self.sums is not None:
            end = start + len(self.sums.leaves)
            check_sums(self.sums(tensors[start:end]), weights[0].codes)
            start = end
        bias = None if self.bias is None else self.bias(tensors[start:]).reshape(-1).clone()
        return tuple(Operands(weight, bias) for weight in weights)


def _in_leaf(
    weights: list[QuantizedWeight], leaves: Sequence[torch.Tensor]
) -> list[QuantizedWeight]:
    """The weights of experts, their codes in the memory of the leaf that holds just these, if one
    does: a stack is large."""
    first = weights[0].codes
    for leaf in leaves:
        same = leaf.dtype == first.dtype and leaf.numel() == first.numel() * len(weights)
        if len(weights) > 1 and same and leaf.is_contiguous() and not leaf.is_meta:
            parts = leaf.detach().data.view(len(weights), *first.shape)
            pairs = zip(parts, weights, strict=True)
            if all(torch.equal(a.view(torch.uint8), w.codes.view(torch.uint8)) for a, w in pairs):
                return [
                    dataclasses.replace(weight, codes=part)
                    for part, weight in zip(parts, weights, strict=True)
                ]
    return weights


class ScaledMatmulPattern:
    """Lowers products of quantised activations and quantised constant weights.

    near  whether a product of dequantised operands is lowered only where that is as exact
    """

    def __init__(self, name: str, default: str, near: bool) -> None:
        self.name, self.default, self.near = name, default, near

    def candidates(self, graph: Graph, scope: Scope) -> Iterator[Node]:
        """Products of codes, and those of two operands that are dequantised."""
        spell_out(graph)
        for node in graph.nodes:
            if self._left(node, scope) is not None:
                yield node

    def lower(self, node: Node, scope: Scope, planner: Planner) -> Lowering:
        """The lowering of one product, or Refused."""
        return Siblings(
            SCALED_MATMUL,
            lambda node: self._proved(node, scope),
            lambda node: self._left(node, scope),
            planner,
        )(node)

    def settled(self, node: Node, reason: str | None) -> None:
        """Takes out what was made for an operator that does not come."""
        if reason is not None:
            sweep(node.graph)

    def _left(self, node: Node, scope: Scope) -> Node | None:
        """The operand of a candidate that is made of x; None of what is no candidate."""
        if GONE in node.meta:
            return None
        if self.near and node.target in code_products.ANCHORS:
            left = node.args[0]
            assert isinstance(left, Node)
            return left
        return sides(node)[0] if requantised.is_site(node, scope) else None

    def _proved(self, node: Node, scope: Scope) -> Proved:
        """What one product was proved to be, or Refused."""
        of_codes = node.target in code_products.ANCHORS
        product = (code_products if of_codes else requantised).product_of(node, scope)
        check_codes(product)
        weight = _region("weight", product.weight, product.axes, scope)
        if product.grid is not None:
            check_constant("weight's scale", *behind(product.grid.node, scope), scope)
        epilogue, found = _scaling(product, scope)
        if self.near:
            LOST.check(product, found.activation.node, scope)
        if epilogue.shift is not None:
            rows = epilogue.shift.zero.kind == "row"
            zero = stored(epilogue.shift.zero.node)
            product = dataclasses.replace(product, zero=zero, zeros=product.sizes[1] * rows)
        parts = _parts(product, weight, epilogue, found, scope)
        values = [scope.value(leaf) for region in parts.regions for leaf in region.leaves]
        freed = scope.known(weight)
        read_as, evaluations = parts.read(values, freed)
        operands = parts.operands(read_as, values)
        contract = _contract(product, epilogue, found, operands[0])
        if product.zeros and product.zeros != contract.group:
            raise Refused(f"x must have a zero point for each scale; {contract.summary}")
        inputs = _inputs(product, found, contract)
        site = requantised.Site.of(product, epilogue, found, contract, self.near)
        site.check_all(operands, read_as)

        def read(
            tensors: Sequence[torch.Tensor], freed: Sequence[Any] | None
        ) -> tuple[Operands, ...]:
            read_as, _ = parts.read(tensors, freed)
            operands = parts.operands(read_as, tensors)
            check_format(operands[0].weight, contract.weight)
            if contract.powers and not powers_of_two(operands[0].weight.scale):
                raise Refused("the weight's scales must be powers of two, as those before were")
            site.check_all(operands, read_as)
            return operands

        return Proved(
            product=node,
            value=epilogue.last,
            inputs=inputs,
            regions=parts.regions,
            contract=contract,
            operands=operands,
            evaluations=evaluations,
            read=read,
            m=product.rows,
            operator=product.operator + "_zero" * (contract.zero is not None),
            text=site.text,
            alone=freed is not None or product.experts > 0,
            views=_views(product, epilogue, inputs, contract),
        )


def _scaling(product: CodeProduct, scope: Scope) -> tuple[Epilogue, Roles]:
    """The longest epilogue that a contract can say, and which of its factors is whose scale."""
    behind_a, varying = behind(product.a, scope)
    if not varying:
        raise Refused(f"x must vary from call to call; {describe(product.a)} is constant")
    reasons = []
    each = [(e, following) for e, following in epilogues(product.start, scope) if not e.widens]
    if product.experts:  # what follows is one for all of them
        each = [(e, f) for e, f in each if len(e.factors) == e.inside and e.bias is None]
    for epilogue, following in reversed(each):
        found, out = roles(epilogue, behind_a), epilogue.last.meta["val"].dtype
        if found is None:
            scales = ", ".join(f"{f.kind} {describe(f.node)}" for f in epilogue.factors)
            reasons.append(
                f"the sums must be multiplied by one scale of x and at most one constant scale of "
                f"the weight; {epilogue.last.name} has [{scales}], then {following}"
            )
        elif out not in FLOATS:
            reasons.append(f"the result must be bf16, fp16 or fp32; it is {out}")
        else:
            try:
                prove(epilogue, found, min(product.sizes[1] << 14, LARGEST))
                return epilogue, found
            except Refused as refusal:
                reasons.append(refusal.reason)
    raise Refused(reasons[0])


def _parts(
    product: CodeProduct, weight: Region, epilogue: Epilogue, found: Roles, scope: Scope
) -> Parts:
    n, k = product.sizes
    grid = product.grid
    if grid is None and found.weight is not None:
        grid = Grid(found.weight.node, 1 if found.weight.kind == "column" else n, k)
    scale = bias = sums = None
    if grid is not None:
        scale = _region("weight's scale", grid.node, grid.axes or Axes(0), scope)
    if epilogue.bias is not None:
        shape = epilogue.bias.meta["val"].shape
        if shape[-1:] != (n,) or epilogue.bias.meta["val"].numel() != n:
            raise Refused(f"the bias must have shape [{n}]; it is {describe(epilogue.bias)}")
        bias = _region("bias", epilogue.bias, Axes(0), scope)
    if epilogue.shift is not None:
        sums = _region("sums of the weight's codes", epilogue.shift.sums.node, Axes(0), scope)
    device = product.a.meta["val"].device
    if weight.device != device:
        raise Refused(f"weight and x must be on one device; {weight.device} and {device}")
    return Parts(weight, scale, (n, k) if grid is None else (grid.bn, grid.bk), bias, sums)


def _region(what: str, node: Node, axes: Axes, scope: Scope) -> Region:
    order, varying = behind(node, scope)
    check_constant(what, order, varying, scope)
    products = [n for n in order if n.target in PRODUCTS]
    if products:
        raise Refused(f"the {what} must be stored; {products[0].name} is computed into it")
    return extract(node, order, scope, axes)


def _contract(
    product: CodeProduct, epilogue: Epilogue, found: Roles, operands: Operands
) -> ScaledMatmul:
    group = product.group
    if group is None:
        m = product.start.source.meta["val"].shape[0]
        rows = found.activation.kind == "row" or (known(m, 1) and not found.activation.constant)
        group = product.sizes[1] if rows else 0
    return ScaledMatmul(
        weight=operands.weight.format,
        a=product.codes,
        group=group,
        scale=found.activation.node.meta["val"].dtype,
        out=epilogue.last.meta["val"].dtype,
        bias=None if operands.bias is None else operands.bias.dtype,
        fast=product.fast,
        zero=None if product.zero is None else product.zero.meta["val"].dtype,
        experts=product.experts,
        powers=_powers(product, operands),
    )


def _powers(product: CodeProduct, operands: Operands) -> bool:
    """Whether float8 codes of both sides are scaled by powers of two."""
    both = {product.codes, operands.weight.format.storage}
    return (
        product.x is not None
        and product.x.making.power
        and all(codes.is_floating_point for codes in both)
        and not product.experts
        and powers_of_two(operands.weight.scale)
    )


def _inputs(product: CodeProduct, found: Roles, contract: ScaledMatmul) -> tuple[Node, ...]:
    """What the operator takes: codes, scale, zero point, offsets."""
    codes, scale, k = product.cast(), found.activation.node, contract.weight.k
    if product.choices:
        codes = choose(codes, [-1, k], product.choices)
        if contract.group:
            scale = choose(scale, [-1, -(-k // contract.group)], product.choices)
    return tuple(filter(None, (codes, scale, product.zero, product.offsets)))


def _views(
    product: CodeProduct, epilogue: Epilogue, inputs: Sequence[Node], contract: ScaledMatmul
) -> tuple[Sequence[int | Node] | None, ...]:
    """How codes, scale and result are to be viewed."""
    k, lead = contract.weight.k, [-1]
    if product.operator == "scaled_bmm":
        lead = [contract.experts, -1]
    codes, *others = inputs
    flat = codes.meta["val"].dim() == len(lead) + 1 and known(codes.meta["val"].shape[-1], k)
    same = epilogue.last.meta["val"].dim() == len(lead) + 1
    views: list[Sequence[int | Node] | None] = [None if flat else [*lead, k]]
    for node in others:
        shape = node.meta["val"].shape
        one = node is product.zero and all(known(1, size) for size in shape)
        wanted = [*lead, -(-k // contract.group)] if contract.group and not one else [1]
        fits = len(shape) == len(wanted) and known(shape[-1], wanted[-1])
        views.append(None if fits or node is product.offsets else wanted)
    return *views, None if same else epilogue.sizes
