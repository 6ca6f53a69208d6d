"""What follows a sum of products: scales of rows and columns, a bias, casts and views.

    sum[M, N] -> [- z[M, 1] * sums[N]] -> cast -> * sa[M, 1] -> cast -> * s[N] -> view -> + bias[N]

Followed as far as each value has one user. Run on probes, it must be (sum - z * sums) * sa * s +
bias, and so near to it that rounding once is as good.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.contracts import short
from qinductor.errors import Refused
from qinductor.oracle import errors
from qinductor.patterns.chains import Side, Step, rounding, run
from qinductor.regions import FLOATS, VIEWS, Scope, aten, behind, prims

PROBES = 64  # rows and columns of a sum to try: 4096 outputs
NEAR = 8  # roundings that an epilogue may be off by
Size = int | torch.SymInt


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """A scale.

    kind      "row": [..., M, 1], a number for each row; "column": [N]; "one": a number
    constant  whether it is made of constants alone
    """

    node: Node
    kind: str
    constant: bool

    @property
    def side(self) -> Side:
        """What it is to a chain."""
        return Side.of(self.node)


@dataclasses.dataclass(frozen=True, eq=False)
class Shift:
    """What is subtracted from a sum for the zero points of x: z[M, 1] * sums[N].

    zero   z: a "row" or "one"
    sums   of the weight's codes: a constant "column"
    steps  what makes it of z, without views
    side   what it is to the chain of the sum
    """

    zero: Factor
    sums: Factor
    steps: tuple[Step, ...]
    side: Side

    def probe(self, zero: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Its value for values of both."""
        return run(self.steps, self.zero.side.probe(zero), {self.sums.side: sums})


@dataclasses.dataclass(frozen=True, eq=False)
class Epilogue:
    """A chain of operators on a sum.

    source   the sum, or what is made of it in one operator
    inside   how many of the factors are in the source already
    steps    the chain without its views
    factors  what it multiplies by
    bias     what it adds, one number a column; or None
    last     whose value it gives
    sizes    of the last view before `last`, if there is one
    shift    what it subtracts from the sum, before it multiplies
    """

    source: Node
    factors: tuple[Factor, ...] = ()
    bias: Node | None = None
    inside: int = 0
    steps: tuple[Step, ...] = ()
    last: Node = dataclasses.field(kw_only=True)
    sizes: Sequence[int | Node] | None = None
    shift: Shift | None = None

    @property
    def widens(self) -> bool:
        """Whether it ends with a cast to more bits: a rounded result is not to be written so."""
        if not self.steps or self.steps[-1].target is not prims.convert_element_type.default:
            return False
        before = [self.source.meta["val"].dtype, *(step.dtype for step in self.steps[:-1])][-1]
        return before in FLOATS and self.steps[-1].dtype.itemsize > before.itemsize


def epilogues(start: Epilogue, scope: Scope) -> Iterator[tuple[Epilogue, str]]:
    """A source's epilogues, shortest first and that of no operators included, each with what comes
    next."""
    found, value, sizes = start, start.source, start.sizes
    while True:
        users = list(value.users)
        reason = f"it has {len(users)} users" if len(users) != 1 else ""
        longer = None
        if not reason and users[0].target in VIEWS and _keeps_columns(value, users[0]):
            sizes, value = users[0].args[1], users[0]  # type: ignore[assignment]
            continue
        if not reason:
            longer = _step(found, users[0], value, scope)
            reason = f"{users[0].target} takes it"
        yield found, reason
        if longer is None:
            return
        found, value = dataclasses.replace(longer, sizes=sizes), users[0]


def _keeps_columns(value: Node, view: Node) -> bool:
    return view.meta["val"].dim() > 1 and known(
        value.meta["val"].shape[-1], view.meta["val"].shape[-1]
    )


def _step(before: Epilogue, user: Node, value: Node, scope: Scope) -> Epilogue | None:
    """The epilogue with one more operator; None if that belongs to none."""
    old, new = value.meta["val"], user.meta.get("val")
    if not isinstance(new, torch.Tensor) or old.dim() != new.dim():
        return None
    if not all(known(a, b) for a, b in zip(old.shape, new.shape, strict=True)):
        return None
    tensors = [a for a in user.all_input_nodes if isinstance(a.meta["val"], torch.Tensor)]
    if len(tensors) != len(user.all_input_nodes):  # a symbolic number
        return None
    longer = dataclasses.replace(before, steps=(*before.steps, Step.of(user, value)), last=user)
    if user.target is prims.convert_element_type.default:
        return longer if new.dtype in (*FLOATS, torch.float64) else None
    if user.target is aten.sub.Tensor and not user.kwargs and user.args[0] is value:
        integers = before.source.meta["val"].dtype is torch.int32
        first = integers and not (before.factors or before.bias or before.shift)
        shift = _shift_of(user.args[1], value, scope) if first else None
        return dataclasses.replace(longer, shift=shift) if shift is not None else None
    if user.target not in (aten.mul.Tensor, aten.add.Tensor) or user.kwargs or before.bias:
        return None
    side = user.args[1] if user.args[0] is value else user.args[0]
    if not isinstance(side, Node) or side is value:
        return None
    factor = _factor_of(side, value, scope)
    if factor is None:
        return None
    if user.target is aten.mul.Tensor:
        return dataclasses.replace(longer, factors=(*before.factors, factor))
    constant = factor.kind == "column" and factor.constant
    return dataclasses.replace(longer, bias=factor.node) if constant else None


def _shift_of(side: object, value: Node, scope: Scope) -> Shift | None:
    """How a tensor is made of zero points of rows and of sums of columns; None if in another way
    than as their product."""
    steps: list[Step] = []
    node = side
    while isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor):
        first = node.args[0] if node.args else None
        if node.target is prims.convert_element_type.default and isinstance(first, Node):
            steps.append(Step.of(node, first))
        elif node.target is aten.mul.Tensor and not node.kwargs:
            break
        elif node.target not in VIEWS:
            return None
        node = first
    if not isinstance(node, Node) or not isinstance(side, Node):
        return None
    found = [_factor_of(a, value, scope) for a in node.args if isinstance(a, Node)]
    factors = {f.kind: f for f in found if f is not None}
    columns = factors.pop("column", None)
    if len(found) != 2 or len(factors) != 1 or columns is None or not columns.constant:
        return None
    (zero,) = factors.values()
    steps.append(Step.of(node, zero.node))
    return Shift(zero, columns, tuple(reversed(steps)), Side.of(side))


def _factor_of(side: Node, value: Node, scope: Scope) -> Factor | None:
    """How a tensor lies over [..., M, N] that it multiplies; None if in another way than these."""
    shape, whole = side.meta["val"].shape, value.meta["val"].shape
    constant = not behind(side, scope)[1]
    if all(known(1, size) for size in shape):
        return Factor(side, "one", constant)
    leading = all(known(1, size) for size in shape[:-1])
    if leading and len(shape) <= len(whole) and known(shape[-1], whole[-1]):
        return Factor(side, "column", constant)
    rows = len(shape) == len(whole) and known(1, shape[-1])
    if rows and all(known(a, b) for a, b in zip(shape[:-1], whole[:-1], strict=True)):
        return Factor(side, "row", constant)
    return None


def known(a: Size, b: Size) -> bool:
    """Whether two sizes are equal whatever the symbols are."""
    return statically_known_true(a == b)


@dataclasses.dataclass(frozen=True, eq=False)
class Roles:
    """Whose scale each factor is; the weight may have none."""

    activation: Factor
    weight: Factor | None


def roles(epilogue: Epilogue, of_activation: Sequence[Node]) -> Roles | None:
    """Which factor scales the activation and which the weight; None if there are others.

    of_activation  nodes behind the activation's codes: of two constants it is the one among these
    """
    if epilogue.inside == 2:  # the operator says which is whose
        return Roles(*epilogue.factors) if len(epilogue.factors) == 2 else None
    if epilogue.inside == 1:  # what x was made with
        own, *others = epilogue.factors
        fits = len(others) <= 1 and all(f.constant and f.kind != "row" for f in others)
        return Roles(own, others[0] if others else None) if fits else None
    weight = [f for f in epilogue.factors if f.constant and f.kind == "column"]
    activation = [f for f in epilogue.factors if f.kind == "row"]
    ones = [f for f in epilogue.factors if f.kind == "one"]
    activation += [f for f in ones if not f.constant]
    either = sorted((f for f in ones if f.constant), key=lambda f: f.node not in of_activation)
    activation += [either.pop(0)] if either and not activation else []
    weight += either
    if len(activation) != 1 or len(weight) > 1:
        return None
    if len(activation) + len(weight) != len(epilogue.factors):
        return None
    return Roles(activation[0], weight[0] if weight else None)


def prove(epilogue: Epilogue, found: Roles, largest: int) -> None:
    """Refused unless an epilogue is the sum times its factors, plus the bias, to within its own
    roundings, and rounding once is within the product oracle. `largest`: magnitude of a sum."""
    out, source = (node.meta["val"].dtype for node in (epilogue.last, epilogue.source))
    seeded = torch.Generator().manual_seed(0)

    def spread(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.exp2(torch.rand(shape, generator=seeded) * (high - low) + low)

    shapes = {"row": (PROBES, 1), "column": (1, PROBES), "one": (1, 1)}
    given = {f.side: f.side.probe(spread(-7, -3, *shapes[f.kind])) for f in epilogue.factors}
    sign = torch.randint(0, 2, (PROBES, PROBES), generator=seeded) * 2 - 1
    sums = (spread(0, math.log2(largest), PROBES, PROBES) * sign).round().double()
    bias, added = None, False
    if epilogue.bias is not None:
        side = Side.of(epilogue.bias)
        bias = given[side] = side.probe(torch.randn(1, PROBES, generator=seeded))
        added = any(step.takes(side) for step in epilogue.steps)
    start = sums if epilogue.inside == 0 else sums.float()  # what the source does, it does in fp32
    if epilogue.shift is not None:
        zero = torch.randint(-128, 128, (PROBES, 1), generator=seeded)
        column = spread(0, math.log2(largest) - 8, 1, PROBES).round() * sign[:1]
        zero = zero if epilogue.shift.zero.kind == "row" else zero[:1]
        held = epilogue.shift.sums.side.probe(column)
        given[epilogue.shift.side] = epilogue.shift.probe(zero, held)
        sums = sums - zero.double() * held.double()
    exact, ours = sums, sums.float()
    for part in filter(None, (found.weight, found.activation)):
        exact = exact * given[part.side].double()
        ours = ours * given[part.side].float()
        if part in epilogue.factors[: epilogue.inside]:
            start = start * given[part.side].float()
    if bias is not None and not added:
        start = start + bias.float()
    eager = run(epilogue.steps, start.to(source), given)
    size = exact.abs() if bias is None else exact.abs() + bias.double().abs()
    if epilogue.shift is not None:  # of what cancels only the difference is scaled
        size = size + (start.double().abs() / sums.abs().clamp_min(1)) * exact.abs()
    exact, ours = (exact, ours) if bias is None else (exact + bias.double(), ours + bias.float())
    ours = ours.to(out)
    dtypes = [source] if source.is_floating_point else []
    dtypes += [out, *(step.dtype for step in epilogue.steps if step.dtype is not torch.int32)]
    off = ((eager.double() - exact).abs() > NEAR * rounding(dtypes) * size) & eager.isfinite()
    if off.any():
        m, n = (int(i) for i in off.nonzero()[0])
        raise Refused(
            f"the scales must multiply the sums; {epilogue.last.name} makes {float(eager[m, n]):g} "
            f"of a sum of {float(sums[m, n]):g}, which would be {float(exact[m, n]):g}"
        )
    over = errors(ours, eager, exact).over()
    if over is not None:
        raise Refused(f"scaling sums in fp32 once, to {short(out)}, is less exact: {over}")
