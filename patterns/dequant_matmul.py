"""dequantised weight -> matrix product, however it is spelled.

    codes  scale  zero                          x   packed codes, scales
      |      |     |                             |     |
      any chain of operators                     |     |
             |                                   |     |
    x ------ mm / addmm(bias) [-- * s[N]]   ->   qinductor.dequant_matmul

Probed: which tensor holds the codes, how scales and zeros lie over W, what multiplies what in which
dtype. Proved: W, bit for bit, from the format's reference. A product scale is taken along where
its value is one number per output feature.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, Node

from qinductor.contracts import QuantizedWeight, short
from qinductor.errors import Refused
from qinductor.identify import Structure, identify
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, DequantMatmul, Operands
from qinductor.pattern import Lowering, Planner
from qinductor.prove import read
from qinductor.regions import (
    CASTS,
    FLOAT8,
    INTEGER,
    MOVES,
    PRODUCTS,
    VIEWS,
    Region,
    Scope,
    aten,
    behind,
    describe,
    extract,
)

# product -> (place of x, place of the weight, place of the bias)
ANCHORS = {
    aten.mm.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
    aten.bmm.default: (0, 1, None),
    aten.baddbmm.default: (1, 2, 0),
    aten._grouped_mm.default: (0, 1, None),
    aten.convolution.default: (0, 1, None),
}
LOWERED = (aten.mm.default, aten.addmm.default)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
LOOKUPS = {aten.embedding.default}


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The regions of one site, and where the leaves of each start in the site's leaves."""

    weight: Region
    bias: Region | None
    output_scale: Region | None

    @property
    def regions(self) -> list[Region]:
        """Those that are there."""
        return [r for r in (self.weight, self.bias, self.output_scale) if r is not None]

    def operands(
        self, structure: Structure | None, tensors: Sequence[torch.Tensor], known: Operands | None
    ) -> Operands:
        """The operands for these leaves, proved; the weight as it was proved, if it is known."""
        start = len(self.weight.leaves)
        if known is not None:
            weight = known.weight
        elif structure is None:
            raise Refused("its weight was restored, and how to read another one is not known")
        else:
            weight = read(self.weight, structure, tensors[:start])
        vectors = []
        for region in (self.bias, self.output_scale):
            value = None
            if region is not None:
                value = region(tensors[start : start + len(region.leaves)])
                value = value.reshape(-1).expand(self.weight.shape[0]).contiguous()
                start += len(region.leaves)
            vectors.append(value)
        return Operands(weight, bias=vectors[0], output_scale=vectors[1])


class DequantMatmulPattern:
    """Lowers products of an activation and a dequantised constant weight."""

    name = "dequant_matmul"
    default = "on"

    def __init__(self) -> None:
        self._structures: dict[str, Structure] = {}

    def candidates(self, graph: Graph, scope: Scope) -> Iterator[Node]:
        """Products one operand of which is made from stored codes, or quantised in place."""
        for node in graph.nodes:
            if node.target in ANCHORS:
                sides = [node.args[place] for place in ANCHORS[node.target][:2]]
                if any(_is_quantized(side, scope) for side in sides):
                    yield node
            elif node.op == "output":
                # A graph break between dequantisation and product makes the weight an output.
                for value in dict.fromkeys(node.all_input_nodes):
                    order, varying = behind(value, scope)
                    computed = value.op != "call_function" or any(
                        n.target in PRODUCTS for n in order
                    )
                    if not varying and not computed and _is_quantized(value, scope):
                        yield value

    def lower(self, node: Node, scope: Scope, planner: Planner) -> Lowering:
        """The lowering of one product, or Refused."""
        parts, x, scaled = _parts(node, scope)
        leaves = tuple(leaf for region in parts.regions for leaf in region.leaves)
        values = [scope.value(leaf) for leaf in leaves]
        known = scope.known(parts.weight)
        structure, operands, evaluations = self._identified(parts, values, known)
        bias, output_scale = operands.bias, operands.output_scale
        contract = DequantMatmul(
            weight=operands.weight.format,
            x=x.meta["val"].dtype,
            out=node.meta["val"].dtype,
            output_scale=None if output_scale is None else output_scale.dtype,
            bias=bias is not None,
        )
        m = x.meta["val"].shape[0]
        plan = planner(DEQUANT_MATMUL, contract, m if isinstance(m, int) else None)

        def pack(
            tensors: Sequence[torch.Tensor], known: Operands | None = None
        ) -> dict[str, torch.Tensor]:
            found = parts.operands(structure, tensors, known)
            _check_format(found.weight, contract)
            return plan.pack(DEQUANT_MATMUL, contract, found)

        return Lowering(
            op=DEQUANT_MATMUL,
            contract=contract,
            plan=plan,
            operator=DEQUANT_MATMUL.name,
            replaced=node,
            inputs=(x,),
            bypassed=scaled,
            leaves=leaves,
            signature="\n".join([*(r.signature for r in parts.regions), str(contract)]),
            weight=parts.weight,
            pack=pack,
            packed=lambda: plan.pack(DEQUANT_MATMUL, contract, operands),
            evaluations=evaluations,
        )

    def _identified(
        self, parts: Parts, values: Sequence[torch.Tensor], restored: Operands | None
    ) -> tuple[Structure | None, Operands, tuple[int, int]]:
        """Regions of equal signature share what probing found, and are proved one by one."""
        signature = parts.weight.signature
        known = self._structures.get(signature)
        if restored is not None:
            return known, parts.operands(known, values, restored), (0, 0)
        if known is not None:
            try:
                return known, parts.operands(known, values, None), (0, 2)
            except Refused:
                pass  # the constants that were kept real may differ: probe again
        found = identify(parts.weight, values[: len(parts.weight.leaves)])
        self._structures[signature] = found
        return found, parts.operands(found, values, None), (found.evaluations, 2)


def _is_quantized(side: Node, scope: Scope) -> bool:
    """Whether an operand is made from stored codes, or from a constant rounded in every call."""
    order, varying = behind(side, scope)
    value = side.meta["val"]
    if value.dim() < 2 or not value.dtype.is_floating_point:
        return False
    elements = math.prod(size for size in value.shape if isinstance(size, int))
    codes = [n for n in order if n.op != "call_function" and _holds_codes(n, elements)]
    sized = [n for n in order if n in scope.leaves and _has_codes_dtype(n)]
    tensors = [n for n in varying if isinstance(n.meta.get("val"), torch.Tensor)]
    symbolic = any(isinstance(size, torch.SymInt) for size in value.shape)
    if not tensors:
        rounded = any(
            n.op == "call_function" and n.target in CASTS
            and n.meta["val"].dtype in (*FLOAT8, torch.int8, torch.uint8)
            and n.meta["val"].numel() == elements
            for n in order
        )  # fmt: skip
        return bool(codes or rounded or (symbolic and sized))
    computed = any(n.target in PRODUCTS | LOOKUPS for n in order)
    return bool(codes) and not computed and not symbolic


def _has_codes_dtype(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (*INTEGER, *FLOAT8)


def _holds_codes(node: Node, elements: int) -> bool:
    """Whether the tensor has at least a bit for each element."""
    if not _has_codes_dtype(node):
        return False
    value = node.meta["val"]
    size = value.numel()
    return isinstance(size, int) and size * value.dtype.itemsize * 8 >= elements


def _parts(node: Node, scope: Scope) -> tuple[Parts, Node, tuple[tuple[Node, Node], ...]]:
    """(the site's regions, the activation, the product scale that is absorbed), or Refused."""
    if node.target not in ANCHORS:
        raise Refused(
            "the product must be in the graph of its dequantised weight; a graph break in between "
            f"makes {describe(node)} an output of this graph"
        )
    at_x, at_weight, at_bias = ANCHORS[node.target]
    x, weight = node.args[at_x], node.args[at_weight]
    assert isinstance(x, Node) and isinstance(weight, Node)
    if node.target not in LOWERED:
        raise Refused(f"the product must be mm, addmm or linear; it is {node.target}")
    if _is_quantized(x, scope) and not _is_quantized(weight, scope):
        raise Refused(
            f"the weight must be the right operand of {node.target}; it is the left one ({x.name})"
        )
    order, varying = behind(weight, scope)
    _check_constant("weight", varying, scope)
    products = [n for n in order if n.target in PRODUCTS]
    if products:
        raise Refused(
            f"the weight must be made of codes alone; {products[0].name} ({products[0].target}) "
            "is computed into it"
        )
    elements = weight.meta["val"].numel()
    if not any(n.op != "call_function" and _holds_codes(n, elements) for n in order):
        held = ", ".join(describe(n) for n in order if n.op == "placeholder")
        raise Refused(f"the weight is stored as {held} and quantised in every call: no codes")
    value = x.meta["val"]
    if value.dtype not in FLOATS:
        raise Refused(f"x must be bf16, fp16 or fp32; it is {short(value.dtype)}")
    _check_other_users(node, order, elements)
    region = extract(weight, order, scope, n_axis=1)
    if region.device != value.device:
        raise Refused(f"weight and x must be on one device; {region.device} and {value.device}")
    bias = None if at_bias is None else _bias(node, at_bias, scope)
    output_scale, scaled = (None, ()) if bias is not None else _product_scale(node, scope)
    return Parts(region, bias, output_scale), x, scaled


def _check_constant(what: str, varying: Sequence[Node], scope: Scope) -> None:
    """Refused if anything behind the weight or bias varies; names the first three."""
    if varying:
        known = "; ".join(f"{n.name} {scope.why.get(n, f'is {n.target}')}" for n in varying[:3])
        raise Refused(f"the {what} must be made of constants; {known}")


def _check_other_users(node: Node, order: Sequence[Node], elements: int) -> None:
    """Refused if the dequantised weight is needed outside of products."""
    inside = set(order)
    for other in order:
        value = other.meta.get("val")
        if other.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        if not value.dtype.is_floating_point or value.dtype in FLOAT8 or value.numel() < elements:
            continue
        for user in other.users:
            if user not in inside and user.target not in LOWERED:
                shared = user.target in MOVES and all(u.target in LOWERED for u in user.users)
                if not shared:
                    raise Refused(
                        f"the dequantised weight must feed products alone; {other.name} also "
                        f"feeds {user.name} ({user.target})"
                    )


def _bias(node: Node, at: int, scope: Scope) -> Region:
    """The region of addmm's bias, one number per output feature; or Refused."""
    factors = {name: node.kwargs.get(name, 1) for name in ("beta", "alpha")}
    if any(factor != 1 for factor in factors.values()):
        raise Refused(f"addmm must have beta = 1 and alpha = 1; it has {factors}")
    bias = node.args[at]
    assert isinstance(bias, Node)
    shape, n = tuple(bias.meta["val"].shape), node.meta["val"].shape[1]
    if shape not in ((n,), (1, n), (1,)):
        raise Refused(f"the bias must have shape [{n}]; it has {list(shape)}")
    if bias.meta["val"].dtype != node.meta["val"].dtype:
        raise Refused(
            f"the bias must be {short(node.meta['val'].dtype)}; it is "
            f"{short(bias.meta['val'].dtype)}"
        )
    order, varying = behind(bias, scope)
    _check_constant("bias", varying, scope)
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
    return extract(node, order, scope, n_axis=0)


def _check_format(weight: QuantizedWeight, contract: DequantMatmul) -> None:
    """Refused if a weight seen at run time has another format than the compiled one."""
    if weight.format != contract.weight:
        raise Refused(
            f"this weight is {weight.format}, yet the graph was compiled for {contract.weight}"
        )
