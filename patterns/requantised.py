"""Products of two operands that are dequantised from codes: what they are on the codes alone."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from qinductor.contracts import FLOAT_CODES, QuantizedWeight, code_range, dequantize
from qinductor.errors import Refused
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Operands, ScaledMatmul, reference
from qinductor.oracle import LARGEST, Errors, errors
from qinductor.patterns.chains import Side, Step, run
from qinductor.patterns.code_experts import OPERATORS, chosen_rows, is_stack, offsets_of
from qinductor.patterns.code_products import CodeProduct
from qinductor.patterns.dequantised import POWERS, Making, dequantised, has_codes
from qinductor.patterns.epilogues import PROBES, Epilogue, Factor, Roles
from qinductor.patterns.inserted import tensor_of
from qinductor.patterns.products import check_factors, check_other_users, is_quantized, sides
from qinductor.regions import Scope, aten, behind

PLACES: dict[Any, int | None] = {  # of the bias
    aten.mm.default: None, aten.addmm.default: 0, **dict.fromkeys(OPERATORS),
}  # fmt: skip
# What the rms error may be, in eager's: it is measured on some rows, and on codes and scales that
# are no activation's, so it is less than the product oracle allows on all.
MEASURED = 1.25
STRIPS = 4  # of rows of the weight that a product is measured on
STACKED = 8  # of a stack of weights, how many are measured
FP32 = torch.float32


def is_site(node: Node, scope: Scope) -> bool:
    """Whether both operands of a product are made from codes, and x is no constant."""
    if node.target not in PLACES:
        return False
    left, right = sides(node)
    if node.target in OPERATORS and not is_stack(right, scope):
        return False
    if node.target is aten._grouped_mm.default:
        left, _ = chosen_rows(left)
    return has_codes(left) and is_quantized(right, scope) and bool(behind(left, scope)[1])


def product_of(node: Node, scope: Scope) -> CodeProduct:
    """The product on the codes of x, or Refused. Tensors are put into the graph for numbers."""
    left, right = sides(node)
    at = PLACES[node.target]
    bias = None if at is None else node.args[at]
    assert bias is None or isinstance(bias, Node)
    check_factors(node)
    offsets = offsets_of(node)
    left, choices = (left, ()) if offsets is None else chosen_rows(left)
    k = right.meta["val"].shape[-2]
    x = dequantised(left, int(k), scope)
    order, _ = behind(right, scope)
    check_other_users(node, order, right.meta["val"].numel())
    scales: tuple[Factor, ...] = ()
    scale = x.scale()
    if scale is not None:
        scale = tensor_of(scale, FP32, node)
        constant = not behind(scale, scope)[1]
        scales = (Factor(scale, "row" if x.making.group else "one", constant),)
    start = Epilogue(node, scales, bias, inside=len(scales), last=node)
    zero = None if x.zero is None else tensor_of(x.zero, torch.int32, node)
    group = x.making.group if scales else None
    return CodeProduct(
        x.codes, right, start, group, x=x, zero=zero, zeros=x.making.zeros,
        operator=OPERATORS.get(node.target, SCALED_MATMUL.name), offsets=offsets, choices=choices,
    )  # fmt: skip


def on_codes(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight as a product of codes has it: not rounded. Refused if there is none."""
    form, codes, scale = weight.format, weight.codes, weight.scale
    name = form.codes if form.codes in FLOAT_CODES else _widened(form.codes)
    if name is None or form.arithmetic not in ("q", "q*s", "q/s") or form.permuted:
        raise Refused(
            "the weight must be integers from -128 to 127 or float8 codes, times a scale of blocks "
            f"in order; it is {form.codes} {form.granularity} {form.arithmetic}"
            f"{' permuted' * form.permuted}"
        )
    if form.arithmetic == "q/s":
        assert scale is not None
        scale = scale.float().reciprocal()
    form = dataclasses.replace(
        form, codes=name, arithmetic=form.arithmetic.replace("/", "*"), inner=FP32, compute=FP32,
        dtype=FP32, scale=None if scale is None else scale.dtype,
    )  # fmt: skip
    codes = codes.to(torch.int8) if codes.dtype == torch.uint8 else codes
    return dataclasses.replace(weight, format=form, codes=codes, scale=scale)


def _widened(codes: str) -> str | None:
    """The type of codes that products take and that holds these; None if none does."""
    low, high = code_range(codes) or (0, math.inf)
    return next((n for n, end in (("int4", 8), ("int8", 128)) if -end <= low and high < end), None)


@dataclasses.dataclass(frozen=True)
class Site:
    """One product that is to be lowered, as data: by it its exactness is measured.

    making      how x is made of its codes; None: the graph multiplies codes
    activation  what scales the sums after the product, if x is not scaled before it
    weight      the same of the weight
    bias        what is added after the product; None: the product itself adds it, if there is one
    steps       what follows the product
    near        whether the product on codes must be as exact as the graph's
    """

    near: bool
    contract: ScaledMatmul
    making: Making | None
    activation: Side | None
    weight: Side | None
    bias: Side | None
    steps: tuple[Step, ...]

    @staticmethod
    def of(
        product: CodeProduct, found: Epilogue, of: Roles, contract: ScaledMatmul, near: bool
    ) -> "Site":
        """What a product and what follows it are."""
        inside = found.factors[: found.inside]

        def later(factor: Factor | None) -> Side | None:
            return None if factor is None or factor in inside else factor.side

        return Site(
            near=near,
            contract=contract,
            making=None if product.x is None else product.x.making,
            activation=later(of.activation),
            weight=later(of.weight),
            bias=Side.of(found.bias) if found.bias and not product.start.bias else None,
            steps=found.steps,
        )

    @property
    def text(self) -> str:
        """Equal for sites that are checked alike: without the names that the graph has."""
        if self.making is None:
            return ""
        names: dict[str, str] = {}
        return re.sub(
            r"name='(\w+)'", lambda m: names.setdefault(m[1], f"name={len(names)}"), str(self)
        )

    def check_all(self, operands: Sequence[Operands], weights: Sequence[QuantizedWeight]) -> None:
        """`check` of the weight or, of a stack, of some as far apart as there are."""
        last = len(weights) - 1
        count = min(len(weights), STACKED)
        for i in sorted({last * j // max(1, count - 1) for j in range(count)}):
            self.check(operands[i], weights[i])

    def check(self, operands: Operands, weight: QuantizedWeight) -> None:
        """Refused if x is not its codes times their scale or, where it must be near, if the product
        on codes is further from the exact product of the graph's own operands than it may be.
        Nothing is to be checked where the graph multiplies codes. `weight`: as the graph has it."""
        if self.making is None:
            return
        found = self._errors(self.making, operands, weight)
        if self.near and found.over(MEASURED) is not None:
            (ours, eager), (largest, allowed) = found.rms, found.largest
            raise Refused(
                f"the graph multiplies dequantised operands, and the product of their codes is "
                f"further from that than its own: rms error {ours:.3g} for {eager:.3g}, largest "
                f"{largest:.3g} for {allowed:.3g}, allowed {MEASURED:g} and {LARGEST:g} times as "
                "much; the pattern scaled_matmul_requantised lowers it all the same",
                contract=self.contract.summary,
            )

    def _errors(self, making: Making, operands: Operands, weight: QuantizedWeight) -> Errors:
        k, device = self.contract.weight.k, weight.codes.device
        codes, scale, x, *zero = (t.to(device) for t in making.probes(k))
        if self.activation is not None:
            low, high = POWERS
            rows = PROBES if self.contract.group else 1
            scale = torch.linspace(low, high, rows, device=device).exp2()[:, None]
            scale = scale.to(self.activation.dtype)
        parts = []
        for start, count in _strips(weight):
            w = weight.rows(start, count)
            bias = None if operands.bias is None else operands.bias[start : start + count]
            part = Operands(operands.weight.rows(start, count), bias)
            form = dataclasses.replace(self.contract, weight=part.weight.format)
            s = scale if form.group else scale.reshape(1)
            ours = reference(form, codes, s, part, *(z.expand_as(s) for z in zero))
            parts.append((ours, *self._graphs(x, dequantize(w), scale, part)))
        result, eager, exact = (torch.cat(values, 1) for values in zip(*parts, strict=True))
        return errors(result, eager, exact)

    def _graphs(
        self, x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, operands: Operands
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the graph's product, the exact one) with some rows of the weight."""
        given: dict[Side, torch.Tensor] = {}
        exact, bias = x.double() @ w.double().t(), operands.bias
        if self.activation is not None:
            given[self.activation] = self.activation.probe(scale)
            exact = exact * scale.double()
        if self.weight is not None and operands.weight.scale is not None:
            column = operands.weight.scale.reshape(1, -1)
            given[self.weight] = self.weight.probe(column)
            exact = exact * column.double()
        value = torch.mm(x, w.t())
        if bias is not None:
            exact = exact + bias.double()
            if self.bias is None:
                value = torch.addmm(bias, x, w.t())
            else:
                given[self.bias] = bias[None]
        return run(self.steps, value, given), exact


def _strips(weight: QuantizedWeight) -> Iterator[tuple[int, int]]:
    """(start, count) of some rows, as many in all as an error must be measured over."""
    form, count = weight.format, PROBES // STRIPS
    if form.n <= PROBES:
        yield 0, form.n
        return
    for strip in range(STRIPS):
        yield form.n * strip // STRIPS // form.bn * form.bn, count
