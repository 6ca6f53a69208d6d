"""dequantised weight -> matrix product, however it is spelled.

    codes  scale  zero                          x   packed codes, scales
      |      |     |                             |     |
      any chain of operators                     |     |
             |                                   |     |
    x ------ mm / addmm(bias) [-- * s[N]]   ->   qinductor.dequant_matmul
             bmm / baddbmm                       qinductor.dequant_bmm
             bmm of weight[ids]                  qinductor.dequant_gathered_bmm
             _grouped_mm(offsets)                qinductor.dequant_grouped_matmul

Probed: which tensor holds the codes, how scales and zeros lie over W, what multiplies what in which
dtype. Proved: W, bit for bit, from the format's reference. A product scale is taken along where
its value is one number per output feature. A weight on the left is taken with both sides turned,
and a batched product of one weight as one product of all rows.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, Node

from qinductor.contracts import short
from qinductor.errors import Refused
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, DequantMatmul, Operands
from qinductor.pattern import Lowering, Planner
from qinductor.patterns.constants import check_constant
from qinductor.patterns.gathered_codes import choose_last, undo
from qinductor.patterns.gathers import gather_last, gathers
from qinductor.patterns.inserted import GONE
from qinductor.patterns.products import (
    ANCHORS,
    Product,
    check_factors,
    check_other_users,
    is_quantized,
    product_of,
    rows_of,
    sides,
)
from qinductor.patterns.siblings import Proved, Siblings
from qinductor.patterns.spelled import spell_out
from qinductor.patterns.weight_formats.reading import WEIGHTS
from qinductor.regions import (
    FLOATS,
    PRODUCTS,
    VIEWS,
    Axes,
    Region,
    Scope,
    aten,
    behind,
    extract,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The regions of one site; the site's leaves are those of each, in this order."""

    weight: Region
    bias: Region | None
    output_scale: Region | None

    @property
    def regions(self) -> list[Region]:
        """Those that are there."""
        return [r for r in (self.weight, self.bias, self.output_scale) if r is not None]

    def operands(
        self, tensors: Sequence[torch.Tensor], known: Sequence[Operands] | None = None
    ) -> tuple[tuple[Operands, ...], tuple[int, int]]:
        """(the operands for these leaves, proved, one for each expert if there are any; evaluations
        this took). `known`: what the weight was proved to be before its leaves were freed."""
        start = len(self.weight.leaves)
        experts = self.weight.experts
        n = self.weight.shape[0] // experts
        if known is not None:
            weights, evaluations = [operands.weight for operands in known], (0, 0)
        else:
            weights, evaluations = WEIGHTS(self.weight, tensors[:start])
        vectors = []
        for region in (self.bias, self.output_scale):
            value = None
            if region is not None:
                value = region(tensors[start : start + len(region.leaves)])
                value = value.reshape(-1, n if value.numel() >= n else 1)
                value = value.expand(experts, n).contiguous()
                start += len(region.leaves)
            vectors.append([None] * experts if value is None else list(value))
        operands = tuple(
            Operands(weight, bias=bias, output_scale=scale)
            for weight, bias, scale in zip(weights, *vectors, strict=True)
        )
        return operands, evaluations


class DequantMatmulPattern:
    """Lowers products of an activation and a dequantised constant weight."""

    name = "dequant_matmul"
    default = "on"

    def candidates(self, graph: Graph, scope: Scope) -> Iterator[Node]:
        """Products one operand of which is made from stored codes, or quantised in place."""
        spell_out(graph)
        choose_last(graph, scope, lambda stack: is_quantized(stack, scope))
        for found in list(gathers(graph)):
            if is_quantized(found.stack, scope) and behind(found.ids, scope)[1]:
                gather_last(found)
        for node in graph.nodes:
            if self._is_site(node, scope):
                yield node
            elif node.op == "output":
                # A graph break between dequantisation and product makes the weight an output.
                for value in dict.fromkeys(node.all_input_nodes):
                    order, varying = behind(value, scope)
                    computed = value.op != "call_function" or any(
                        n.target in PRODUCTS for n in order
                    )
                    if not varying and not computed and is_quantized(value, scope):
                        yield value

    def lower(self, node: Node, scope: Scope, planner: Planner) -> Lowering:
        """The lowering of one product, and of those that are computed with it; or Refused."""
        return Siblings(
            DEQUANT_MATMUL,
            lambda node: proved(node, scope),
            lambda node: sides(node)[0] if self._is_site(node, scope) else None,
            planner,
        )(node)

    def settled(self, node: Node, reason: str | None) -> None:
        """Puts a choice that was moved for a product back where it was."""
        if reason is not None:
            undo(node)

    def _is_site(self, node: Node, scope: Scope) -> bool:
        known = node.target in ANCHORS and GONE not in node.meta
        return known and any(is_quantized(side, scope) for side in sides(node))


def proved(node: Node, scope: Scope) -> Proved:
    """What one product was proved to be, or Refused."""
    product = product_of(node, scope)
    parts, scaled = _parts(product, scope)
    regions = parts.regions
    values = [scope.value(leaf) for region in regions for leaf in region.leaves]
    known = scope.known(parts.weight)
    operands, evaluations = parts.operands(values, known)
    contract = _contract(product, parts, operands)
    return Proved(
        product=node,
        value=node,
        inputs=product.inputs,
        regions=regions,
        contract=contract,
        operands=operands,
        evaluations=evaluations,
        read=lambda tensors, known: parts.operands(tensors, known)[0],
        m=rows_of(product),
        operator=product.operator,
        alone=product.form != "plain" or contract.experts > 0 or known is not None,
        form=product.form,
        bypassed=scaled,
    )


def _contract(product: Product, parts: Parts, operands: Sequence[Operands]) -> DequantMatmul:
    scale = operands[0].output_scale
    return DequantMatmul(
        weight=operands[0].weight.format,
        x=product.inputs[0].meta["val"].dtype,
        out=product.node.meta["val"].dtype,
        output_scale=None if scale is None else scale.dtype,
        bias=operands[0].bias is not None,
        experts=0 if parts.weight.axes.expert is None else parts.weight.experts,
    )


def _parts(product: Product, scope: Scope) -> tuple[Parts, tuple[tuple[Node, Node], ...]]:
    """(the site's regions, the product scale that is absorbed), or Refused."""
    weight, x = product.weight, product.inputs[0]
    order, varying = behind(weight, scope)
    check_constant("weight", order, varying, scope)
    products = [n for n in order if n.target in PRODUCTS]
    if products:
        raise Refused(
            f"the weight must be made of codes alone; {products[0].name} ({products[0].target}) "
            "is computed into it"
        )
    region = extract(weight, order, scope, product.axes)
    elements = weight.meta["val"].numel()
    value = x.meta["val"]
    if value.dtype not in FLOATS:
        raise Refused(f"x must be bf16, fp16 or fp32; it is {short(value.dtype)}")
    check_other_users(product.node, order, elements)
    if region.device != value.device:
        raise Refused(f"weight and x must be on one device; {region.device} and {value.device}")
    bias = None if product.bias is None else _bias(product, scope)
    plain = product.operator == "dequant_matmul" and product.form == "plain" and bias is None
    output_scale, scaled = _product_scale(product.node, scope) if plain else (None, ())
    return Parts(region, bias, output_scale), scaled


def _bias(product: Product, scope: Scope) -> Region:
    """The region of a bias that the product adds, one number per output feature; or Refused."""
    node, bias = product.node, product.bias
    assert bias is not None
    check_factors(node)
    shape, out = tuple(bias.meta["val"].shape), node.meta["val"]
    *batch, _, n = out.shape
    allowed = [(n,), (1, n), (1,), *((1, 1, n) for _ in batch)]
    if product.axes.expert is not None:
        allowed += [(e, 1, n) for e in batch]
    if product.operator == "dequant_grouped_matmul":
        allowed = [(product.weight.meta["val"].shape[0], n)]
    if shape not in allowed:
        raise Refused(f"the bias must have shape [{n}]; it has {list(shape)}")
    if bias.meta["val"].dtype != out.dtype:
        raise Refused(f"the bias must be {short(out.dtype)}; it is {short(bias.meta['val'].dtype)}")
    order, varying = behind(bias, scope)
    check_constant("bias", order, varying, scope)
    return _vector(bias, order, scope)


def _product_scale(node: Node, scope: Scope) -> tuple[Region | None, tuple[tuple[Node, Node], ...]]:
    """The scale that multiplies the product, if its only use is that multiplication."""
    value, n = node, node.meta["val"].shape[1]
    while len(value.users) == 1:
        user = next(iter(value.users))
        if user.target in VIEWS and user.meta["val"].shape[-1] == value.meta["val"].shape[-1]:
            value = user
            continue
        if user.target is not aten.mul.Tensor:
            break
        factor = user.args[1] if user.args[0] is value else user.args[0]
        if not isinstance(factor, Node) or factor is value:
            break
        shape, out = tuple(factor.meta["val"].shape), user.meta["val"]
        if not all(isinstance(size, int) for size in shape):
            break
        if shape and (max(shape[:-1], default=1) > 1 or shape[-1] not in (1, n)):
            break
        same = (out.dtype, factor.meta["val"].dtype) == (node.meta["val"].dtype,) * 2
        order, varying = behind(factor, scope)
        if varying or not same or out.dim() != value.meta["val"].dim():
            break
        return _vector(factor, order, scope), ((user, value),)
    return None, ()


def _vector(node: Node, order: list[Node], scope: Scope) -> Region:
    return extract(node, order, scope, Axes(n=0))
