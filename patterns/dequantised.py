"""An activation that is made from its own codes: x = (codes - zero) * scale, rounded, no more.

    codes -> cast -> [- zero] -> [view] -> * scale -> [view] -> x[M, K]
    codes, scale, zero -> an operator of a library's -> x[M, K]

Codes are of 8 bits, or floats that are whole numbers of 8 bits: what was quantised in floats.

Followed from x to the codes, and run on probes: x must be (codes - zero) * scale to within its
roundings. Scale and zero may be tensors or numbers.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.chains import VALUE, Side, Step, rounding, run
from qinductor.patterns.epilogues import NEAR, PROBES, known
from qinductor.patterns.failures import FAILURES, said
from qinductor.patterns.gathers import ids_of
from qinductor.patterns.inserted import after
from qinductor.patterns.whole import BYTE, ROUNDS, STORED, code_dtype, span
from qinductor.patterns.zero_points import Given, dequantiser, stored
from qinductor.regions import (
    FLOAT8,
    INTEGER,
    MOVES,
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

LARGEST = {torch.int8: 127.0, torch.uint8: 127.0}  # code that is tried; of float8, its largest one
FAR = 8  # rows that have zero points out of the range of codes, where a dtype has such
SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
SIDED = (*SCALINGS, aten.sub.Tensor, aten.add.Tensor)
WHOLE = (*INTEGER, torch.float8_e8m0fnu)
BIASED = (torch.uint8, torch.float8_e8m0fnu)
EXPONENTS = 40  # that a scale is tried with
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
    zero   what is subtracted from the codes, if anything is
    zeros  elements along k that share a zero point; 0: there is one
    far    whether one may be out of the range of the codes
    under  whether the codes are divided by `scale`: then it is 1 / scale
    """

    codes: torch.dtype
    scale: Side | float | None
    group: int
    power: bool
    steps: tuple[Step, ...]
    zero: Side | float | None = None
    zeros: int = 0
    far: bool = False
    under: bool = False

    def probes(self, k: int) -> tuple[torch.Tensor, ...]:
        """(codes[m, k], scale[m, k / group] or [1], x[m, k] of them) and, if there are any, zero
        points as scale or [1]; Refused if x is not codes without zero times scale."""
        seeded, group = torch.Generator().manual_seed(SEED), self.group or k
        spread = torch.randn(PROBES, k // group, group, generator=seeded)
        largest = LARGEST.get(self.codes) or torch.finfo(self.codes).max
        codes = (spread * largest / 4).clamp(-largest, largest)
        codes = (codes + 128 if self.codes is torch.uint8 else codes).to(self.codes)
        low, high = POWERS
        shape = (PROBES, k // group, 1) if self.group else (1, 1, 1)
        exponents = torch.rand(shape, generator=seeded) * (high - low) + low
        scale = torch.exp2(exponents.round() if self.power else exponents)
        zero = self._zeros(PROBES if self.zeros else 1, k)
        if group == k:  # an operator may want the graph's number of axes
            codes, scale, zero = codes.squeeze(1), scale.squeeze(1), zero.squeeze(1)
        held = _given(self.scale, scale.reciprocal() if self.under else scale, 1)
        scale, zero = held.float().reciprocal() if self.under else held, _given(self.zero, zero, 0)
        sides = ((self.scale, held), (self.zero, zero))
        given = {side: value for side, value in sides if isinstance(side, Side)}
        try:
            x = run(self.steps, codes, given)
        except (AssertionError, *FAILURES) as error:
            raise Refused(f"x cannot be made on probes: {said(error)}") from error
        exact = (codes.double() - zero.double()) * scale.double()
        floats = [step.dtype for step in self.steps if step.dtype.is_floating_point]
        near = NEAR * rounding(floats)
        off = (x.double() - exact).abs() > near * exact.abs()
        if off.any():
            at = tuple(int(i) for i in off.nonzero()[0])
            codes_of = "its codes" if self.zero is None else "its codes less zero points"
            raise Refused(
                f"x must be {codes_of} times their scale; it is {float(x[at]):g}, not "
                f"{float(exact[at]):g}"
            )
        scale = scale.reshape(PROBES, -1) if self.group else scale.reshape(1)
        found = codes.view(PROBES, k), scale, x.view(PROBES, k)
        if self.zero is None:
            return found
        return *found, zero.reshape(PROBES, -1) if self.zeros else zero.reshape(1)

    def _zeros(self, rows: int, k: int) -> torch.Tensor:
        """Zero points in the range of the codes; some beyond it where the graph may have such."""
        low, high = (0, 256) if self.codes is torch.uint8 else (-128, 128)
        shape = (rows, k // (self.zeros or k), 1)
        found = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(SEED))
        found[:2] = torch.tensor([low, high - 1])[:rows, None, None]
        if self.far:
            found[2 : 2 + FAR] *= 6
        return found


def _given(of: Side | float | None, probe: torch.Tensor, otherwise: float) -> torch.Tensor:
    """A probe for what is a tensor; the number that it is, in float32."""
    if isinstance(of, Side):
        return of.probe(probe)
    return torch.full(probe.shape, otherwise if of is None else of)


@dataclasses.dataclass(frozen=True, eq=False)
class Dequantised:
    """The codes that x is made of, what scales them and their zero point if there are any, and
    how."""

    codes: Node
    side: Given
    making: Making
    zero: Given = None

    def scale(self) -> Given:
        """The scale; that of codes which are divided is put into the graph."""
        if not self.making.under or self.side is None:
            return self.side
        if not isinstance(self.side, Node):
            return 1 / self.side
        wide = after(self.side, prims.convert_element_type.default, torch.float32)
        return after(wide, aten.reciprocal.default)


def has_codes(x: Node) -> bool:
    """Whether x is made from codes, as far back as `_path` goes."""
    return any(node.meta["val"].dtype in STORED or _is_whole(node) for node, _ in _path(x))


def dequantised(x: Node, k: int, scope: Scope) -> Dequantised:
    """How x[M, k], or [E, M, k], is made of its codes, or Refused."""
    m = math.prod(x.meta["val"].shape[:-1])
    found, steps = _Sides(m, k), list[Step]()
    path = _path(x)
    for (node, side), (inner, _) in zip(path, [*path[1:], path[-1]], strict=True):
        codes = code_dtype(node) if node is path[-1][0] else None
        dtype = node.meta["val"].dtype
        if codes is not None:
            if codes != dtype:
                steps.append(Step(prims.convert_element_type.default, (VALUE, dtype), dtype))
            return found.made(node, codes, tuple(reversed(steps)), scope)
        whole = dequantiser(node)
        if node.target not in VIEWS:
            step = Step.of(node, inner)
            steps.append(step if whole is None else dataclasses.replace(step, target=whole.target))
        if whole is not None:
            found.scaled(whole.scale, node)
            found.shifted(whole.zero, node)
        elif node.target is aten.sub.Tensor:
            if isinstance(side, Node) and _is_zero(side, scope):
                steps.pop()  # which changes nothing
            else:
                found.shifted(side, node)
        elif node.target in SCALINGS:
            found.scaled(side, node)
        elif node.target is aten.add.Tensor:
            raise Refused(f"x must be codes less their zero points; {_show(side)} is added to them")
    last = path[-1][0]
    if _is_whole(last):
        of = span(last, {})
        raise Refused(
            f"codes of x must be from {BYTE[0]:g} to {BYTE[1]:g}; {last.name} ({last.target}) "
            f"makes whole numbers from {of.low:g} to {of.high:g}"
        )
    raise Refused(f"x must be made of codes; {describe(x)} is not")


@dataclasses.dataclass(eq=False)
class _Sides:
    """What was found on the way from x[M, K] to its codes."""

    m: Any
    k: int
    scale: Given = None
    group: int = 0
    zero: Given = None
    zeros: int = 0
    under: bool = False

    def scaled(self, side: Given, node: Node) -> None:
        if self.zero is not None:
            raise Refused(f"x must be scaled after {_show(self.zero)} is subtracted from its codes")
        if self.scale is not None:
            raise Refused(f"x must be scaled once; {_show(self.scale)} and {_show(side)} scale it")
        self.scale, self.under = side, node.target is aten.div.Tensor
        if isinstance(side, Node):
            self.group = _group(side, node.meta["val"].shape, self.m, self.k, "scale")

    def shifted(self, side: Given, node: Node) -> None:
        if self.zero is not None:
            raise Refused(
                f"x must have one zero point; {_show(self.zero)} and {_show(side)} are subtracted"
            )
        self.zero = side
        if isinstance(side, Node):
            self.zeros = _group(side, node.meta["val"].shape, self.m, self.k, "zero point")
        elif side is not None and not float(side).is_integer():
            raise Refused(f"zero points of x must be whole numbers; {side} is subtracted")

    def made(
        self, codes: Node, dtype: torch.dtype, steps: tuple[Step, ...], scope: Scope
    ) -> Dequantised:
        """All of it. Refused if zero points are not those of the scales, or no whole numbers."""
        scale, zero = self.scale, self.zero
        if zero is None and dtype is torch.uint8:
            zero = 0
        if zero is not None and dtype in FLOAT8:
            raise Refused(
                f"x must have no zero point; {_show(zero)} is subtracted from float8 codes"
            )
        if self.zeros and scale is not None and self.zeros != self.group:
            raise Refused(
                f"x must have a zero point for each scale; {_show(zero)} and {_show(scale)} lie "
                "otherwise"
            )
        held = stored(zero) if isinstance(zero, Node) else zero
        power = isinstance(scale, Node) and _is_power(scale, scope)
        sides = [Side.of(side) if isinstance(side, Node) else side for side in (scale, zero)]
        far = isinstance(held, Node) and held.meta["val"].dtype is not dtype
        making = Making(
            dtype, sides[0], self.group, power, steps, sides[1], self.zeros, far, self.under
        )
        return Dequantised(codes, scale, making, held)


def _show(side: Given) -> str:
    return describe(side) if isinstance(side, Node) else str(side)


def _path(x: Node) -> list[tuple[Node, Given]]:
    """The nodes from x to its codes, each with the other operand of what it does: to codes of 8
    bits, else to the first floats that are such numbers."""
    found: list[tuple[Node, Given]] = []
    value: Node | None = x
    while value is not None and isinstance(value.meta.get("val"), torch.Tensor):
        inner, side = _step(value)
        found.append((value, side))
        if value.op == "call_function" and value.meta["val"].dtype in STORED:
            return found
        value = inner
    for i, (value, _) in enumerate(found):
        if code_dtype(value) is not None:
            return found[: i + 1]
    return found


def _is_whole(node: Node) -> bool:
    return node.op == "call_function" and span(node, {}).whole


def _step(node: Node) -> tuple[Node | None, Given]:
    """(the operand that a node moves, casts or scales; what it scales by, subtracts or adds)."""
    whole = dequantiser(node)
    if whole is not None:
        return whole.codes, None
    args = [a for a in node.args if isinstance(a, Node)]
    if not all(isinstance(a.meta.get("val"), torch.Tensor) for a in args):  # a symbolic number
        return None, None
    if node.target in VIEWS or node.target is prims.convert_element_type.default:
        return args[0], None
    if node.target not in SIDED or len(node.args) != 2 or node.kwargs:
        return None, None
    if len(args) == 1:
        number = node.args[1]
        plain = args[0] is node.args[0] and isinstance(number, (int, float))
        return (args[0], number) if plain else (None, None)  # type: ignore[return-value]
    shape = node.meta["val"].shape
    whole_sized = [a for a in args if _same(a.meta["val"].shape, shape)]
    first, turns = whole_sized[:1] == args[:1], node.target in (aten.mul.Tensor, aten.add.Tensor)
    if len(whole_sized) != 1 or not (first or turns):
        return None, None
    return whole_sized[0], next(a for a in args if a is not whole_sized[0])


def _same(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(shape) == len(other) and all(known(a, b) for a, b in zip(shape, other, strict=True))


def _group(side: Node, whole: Sequence[Any], m: Any, k: int, what: str) -> int:
    """Elements along k that share an entry of a scale, say, of a view of x[M, k]; or Refused."""
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
    raise Refused(
        f"x must have a {what} for each row, group or in all; {describe(side)} is neither"
    )


def _is_zero(node: Node, scope: Scope) -> bool:
    """Whether the graph itself makes zeros: of no tensor that it is given."""
    value = _made(node, scope, {})
    return value is not None and not bool(value.any())


def _is_power(node: Node, scope: Scope) -> bool:
    """Whether a scale takes powers of two alone: it is made of whole numbers that the graph has on
    the way to it, and of nothing else but which of its rows are taken."""
    while node.target in MOVES or ids_of(node) is not None:
        node = node.args[0]  # type: ignore[assignment]
    for cut in reversed(behind(node, scope)[0]):
        value = cut.meta.get("val")
        if not isinstance(value, torch.Tensor) or cut is node or cut.op != "call_function":
            continue
        if value.dtype not in WHOLE and cut.target not in ROUNDS:
            continue
        sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
        if None in sizes:
            return False
        given = _exponents(sizes, value.dtype)
        scales = (_made(node, scope, {cut: exponents}) for exponents in given)
        found = list(itertools.takewhile(lambda scale: scale is not None, scales))
        if len(found) == len(given):
            return all(_are_powers(scale) for scale in found if scale is not None)
    return False


def _exponents(sizes: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of biased exponents about 127, or of exponents about 0: as many as hold all."""
    first, numel = 107 if dtype in BIASED else -20, math.prod(sizes)
    found = []
    for start in range(0, EXPONENTS, max(1, numel)):
        given = ((torch.arange(numel) + start) % EXPONENTS + first).view(sizes)
        is_e8m0 = dtype is torch.float8_e8m0fnu
        found.append(given.to(torch.uint8).view(dtype) if is_e8m0 else given.to(dtype))
    return found


def _are_powers(scale: torch.Tensor) -> bool:
    return bool((scale > 0).all() and (scale.double().frexp().mantissa == 0.5).all())


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
