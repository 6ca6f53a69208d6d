"""An activation that is made from its own codes: x = codes * scale, rounded, and nothing else.

    codes -> cast -> [- zeros] -> [view] -> * scale -> [view] -> x[M, K]

Followed from x to the codes, and run on probes: x must be codes * scale to within its roundings.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.chains import Side, Step, rounding, run
from qinductor.patterns.epilogues import NEAR, PROBES, known
from qinductor.regions import (
    FLOAT8,
    INTEGER,
    VIEWS,
    Scope,
    aten,
    attribute,
    behind,
    call,
    describe,
    prims,
    pure,
)

STORED = (torch.int8, torch.uint8, *FLOAT8)  # dtypes that x may be made from
LARGEST = {torch.int8: 127.0}  # code that is tried; of float8, its largest one
ROUNDED = (aten.ceil.default, aten.floor.default, aten.round.default)  # give whole numbers
WHOLE = (*INTEGER, torch.float8_e8m0fnu)
# Powers of two between which scales are tried: as large as each other, so that none outweighs all.
POWERS = (-5, -4)
SEED = 0x5CA1ED  # of no model's random weights, which would be correlated with codes of one seed


@dataclasses.dataclass(frozen=True)
class Making:
    """How x is made of its codes, as data.

    codes  dtype of the codes
    scale  what multiplies them, if anything does
    group  elements along k that share a scale; 0: there is one
    power  whether scales are powers of two
    steps  from the codes to x, without views
    """

    codes: torch.dtype
    scale: Side | None
    group: int
    power: bool
    steps: tuple[Step, ...]

    def probes(self, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(codes[m, k], scale[m, k / group] or [1], x[m, k] of them); Refused if x is no product of
        both."""
        seeded, group = torch.Generator().manual_seed(SEED), self.group or k
        spread = torch.randn(PROBES, k // group, group, generator=seeded)
        largest = LARGEST.get(self.codes) or torch.finfo(self.codes).max
        codes = (spread * largest / 4).clamp(-largest, largest).to(self.codes)
        low, high = POWERS
        shape = (PROBES, k // group, 1) if self.group else (1, 1, 1)
        exponents = torch.rand(shape, generator=seeded) * (high - low) + low
        scale = torch.exp2(exponents.round() if self.power else exponents)
        scale = torch.ones(shape) if self.scale is None else self.scale.probe(scale)
        x = run(self.steps, codes, {} if self.scale is None else {self.scale: scale})
        exact = codes.double() * scale.double()
        near = NEAR * rounding([step.dtype for step in self.steps])
        off = (x.double() - exact).abs() > near * exact.abs()
        if off.any():
            at = tuple(int(i) for i in off.nonzero()[0])
            raise Refused(
                f"x must be its codes times their scale; it is {float(x[at]):g}, not "
                f"{float(exact[at]):g}"
            )
        scale = scale.reshape(PROBES, -1) if self.group else scale.reshape(1)
        return codes.view(PROBES, k), scale, x.view(PROBES, k)


@dataclasses.dataclass(frozen=True, eq=False)
class Dequantised:
    """The codes that x is made of, their scale if there is one, and how."""

    codes: Node
    scale: Node | None
    making: Making


def has_codes(x: Node) -> bool:
    """Whether x is made from codes by casts, views and products alone."""
    return any(node.meta["val"].dtype in STORED for node, _ in _path(x))


def dequantised(x: Node, k: int, scope: Scope) -> Dequantised:
    """How x[M, k] is made of its codes, or Refused."""
    m, scale, group = x.meta["val"].shape[0], None, 0
    steps: list[Step] = []
    path = _path(x)
    for (node, side), (inner, _) in zip(path, [*path[1:], path[-1]], strict=True):
        if node.meta["val"].dtype in STORED:
            of = None if scale is None else Side.of(scale)
            power = scale is not None and _is_power(scale, scope)
            making = Making(node.meta["val"].dtype, of, group, power, tuple(reversed(steps)))
            return Dequantised(node, scale, making)
        if node.target is aten.sub.Tensor:  # of zeros, which changes nothing
            assert side is not None
            if not _is_zero(side, scope):
                raise Refused(f"x must have no zero point; {describe(side)} is subtracted from it")
        elif node.target not in VIEWS:
            steps.append(Step.of(node, inner))
        if side is not None and node.target is aten.mul.Tensor:
            if scale is not None:
                raise Refused(
                    f"x must be scaled once; {describe(scale)} and {describe(side)} multiply it"
                )
            scale, group = side, _group(side, node.meta["val"].shape, m, k)
    raise Refused(f"x must be made of codes; {describe(x)} is not")


def _path(x: Node) -> list[tuple[Node, Node | None]]:
    """The nodes from x to its codes, each with the other operand of what it does."""
    found: list[tuple[Node, Node | None]] = []
    value = x
    while True:
        if not isinstance(value.meta.get("val"), torch.Tensor):
            return found
        inner, side = _step(value)
        codes = value.op == "call_function" and value.meta["val"].dtype in STORED
        found.append((value, side))
        if inner is None or codes:
            return found
        value = inner


def _step(node: Node) -> tuple[Node | None, Node | None]:
    """(the operand that a node moves, casts or scales; what it scales by or subtracts)."""
    args = [a for a in node.args if isinstance(a, Node)]
    if not all(isinstance(a.meta.get("val"), torch.Tensor) for a in args):
        return None, None
    if node.target in VIEWS or node.target is prims.convert_element_type.default:
        return args[0], None
    if node.target not in (aten.mul.Tensor, aten.sub.Tensor) or len(args) != 2 or node.kwargs:
        return None, None
    if not all(isinstance(a.meta["val"], torch.Tensor) for a in args):  # a symbolic number
        return None, None
    shape = node.meta["val"].shape
    whole = [a for a in args if _same(a.meta["val"].shape, shape)]
    if len(whole) != 1 or (node.target is aten.sub.Tensor and whole[0] is not args[0]):
        return None, None
    return whole[0], next(a for a in args if a is not whole[0])


def _same(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(shape) == len(other) and all(known(a, b) for a, b in zip(shape, other, strict=True))


def _group(side: Node, whole: Sequence[Any], m: Any, k: int) -> int:
    """Elements along k that share an entry of a scale of a view of x[M, k]; or Refused."""
    shape = side.meta["val"].shape
    if all(known(1, size) for size in shape):
        return 0
    g = whole[-1]
    inside = isinstance(g, int) and k % g == 0
    if len(shape) == len(whole) and known(1, shape[-1]) and inside:
        if _same(shape[:-1], whole[:-1]):  # an entry for each row of this view
            return int(g)
        split = next((i for i in range(len(whole)) if known(math.prod(whole[:i]), m)), None)
        rows = split is not None and _same(shape[:split], whole[:split])
        if rows and all(known(1, size) for size in shape[split:]):
            return k
    raise Refused(f"x must have a scale for each row, group or in all; {describe(side)} is neither")


def _is_zero(node: Node, scope: Scope) -> bool:
    """Whether the graph itself makes zeros: of no tensor that it is given."""
    value = _made(node, scope, {})
    return value is not None and not bool(value.any())


def _is_power(node: Node, scope: Scope) -> bool:
    """Whether a scale takes powers of two alone: it is made of whole numbers that the graph has on
    the way to it, and of nothing else."""
    for cut in reversed(behind(node, scope)[0]):
        value = cut.meta.get("val")
        if not isinstance(value, torch.Tensor) or cut is node or cut.op != "call_function":
            continue
        if value.dtype not in WHOLE and cut.target not in ROUNDED:
            continue
        sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
        if None in sizes:
            return False
        # Biased exponents about 127, or exponents about 0.
        first = 107 if value.dtype in (torch.uint8, torch.float8_e8m0fnu) else -20
        given = (torch.arange(math.prod(sizes)) % 40 + first).view(sizes)
        if value.dtype is torch.float8_e8m0fnu:
            given = given.to(torch.uint8).view(value.dtype)
        found = _made(node, scope, {cut: given.to(value.dtype)})
        if found is not None:
            return bool((found > 0).all() and (found.double().frexp().mantissa == 0.5).all())
    return False


def _made(node: Node, scope: Scope, given: Mapping[Node, torch.Tensor]) -> torch.Tensor | None:
    """A node's value for some others, at the sizes it was traced with; None if it depends on
    anything else that the graph is given."""
    env: dict[Node, Any] = dict(given)
    needed, stack = set(given), [node]
    while stack:
        current = stack.pop()
        if current not in needed:
            needed.add(current)
            stack.extend(current.all_input_nodes)
    for other in (n for n in node.graph.nodes if n in needed and n not in given):
        value = other.meta.get("val")
        if isinstance(value, torch.SymInt):
            env[other] = value.node.hint
        elif other.op == "get_attr":
            env[other] = attribute(other)
        elif other.op != "call_function" or not pure(other):
            return None
        else:
            env[other] = call(other, other.args, env.__getitem__, torch.device("cpu"))
        if env[other] is None:
            return None
    return env[node]  # type: ignore[no-any-return]
