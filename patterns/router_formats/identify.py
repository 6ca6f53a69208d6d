"""From the answers of a region to the router it computes: first the choice, then the weights.

Both are searched in a family of a few members for each field; the numbers they are tried with are
those that the region computes with. A member must give the region's bits on every probe; what is
found is proved on other probes later.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qinductor.contracts import short
from qinductor.errors import Refused
from qinductor.kernels.router import ORDERS, SCORES, TAKEN, Router, reference, weighted
from qinductor.patterns.probe import same

FEW = 32  # rows on which the family is compared first
ODD = 0.05  # of what these have may differ there: see `_ask` in find.py
SURVIVORS = 12  # choices whose weights are searched
THRESHOLD = 20.0  # of a softplus, above which it is x itself
FP32 = torch.float32


@dataclasses.dataclass(frozen=True, eq=False)
class Answers:
    """What a region gave for some rows.

    logits   [rows, n]
    bias     [n]; None
    indices  [rows, k]
    weights  [rows, k]; None if the region has none
    """

    logits: torch.Tensor
    bias: torch.Tensor | None
    indices: torch.Tensor
    weights: torch.Tensor | None

    @property
    def inputs(self) -> list[torch.Tensor]:
        """What the reference takes."""
        return [self.logits] if self.bias is None else [self.logits, self.bias]

    def first(self, rows: int) -> "Answers":
        """Of the first rows alone."""
        weights = None if self.weights is None else self.weights[:rows]
        return Answers(self.logits[:rows], self.bias, self.indices[:rows], weights)


@dataclasses.dataclass(frozen=True)
class Known:
    """What a region shows of its fields.

    numbers  that it computes with
    dtypes   of floats in which it does
    groups   (groups, how many of them are kept) that its shapes allow
    """

    numbers: Sequence[float]
    dtypes: Sequence[torch.dtype]
    groups: Sequence[tuple[int, int]]


def battery(base: Router, rows: int, seed: int, numbers: Sequence[float] = ()) -> torch.Tensor:
    """[rows, n]: hostile logits for a region that computes with some numbers.

    In turn: random ones of some sizes, few values and so many ties, neighbours in their dtype, all
    equal, so small or so large that scores are 0 or 1, around the threshold of a softplus, all far
    below 0, few above the others, few whose scores are not 0, zeros of both signs, infinities and
    nan, about its numbers.
    """
    n, dtype = base.n, base.logits
    seeded = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, n), generator=seeded)
    turn = torch.arange(rows)[:, None] % 14
    size = torch.exp2(torch.randint(-6, 5, (rows, 1), generator=seeded).float())
    few = torch.randint(-2, 3, (rows, n), generator=seeded) * 0.5
    step = torch.randint(-2, 3, (rows, n), generator=seeded).float()
    near = size + step * size * torch.finfo(dtype).eps
    low = -torch.rand((rows, 1), generator=seeded) * 90 + x
    spikes = torch.where(torch.rand((rows, n), generator=seeded) < 3 / n, x.abs() * 40, x * 0.1)
    odd = torch.tensor([0.0, -0.0, 1.0, -math.inf, math.inf, math.nan, 1e30, -1e30, 65504.0])
    drawn = odd[torch.randint(0, 4, (rows, n), generator=seeded)]
    worst = odd[torch.randint(0, len(odd), (rows, n), generator=seeded)]
    marks = torch.tensor([*numbers, 1.0])
    marks = marks[torch.randint(0, len(marks), (rows, n), generator=seeded)] * (1 + step * 1e-3)
    sparse = torch.where(torch.rand((rows, n), generator=seeded) < 0.25, x, -300.0)
    kinds = (
        x, x * size, few, near, size.expand(rows, n), x * 200, 20 + x * 2, low, spikes, drawn,
        torch.where(torch.rand((rows, n), generator=seeded) < 0.1, worst, x), x * 1e-4, marks,
        sparse,
    )  # fmt: skip
    found = x
    for i, kind in enumerate(kinds):
        found = torch.where(turn == i, kind, found)
    return found.to(dtype)


def biases(n: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Biases of experts: small ones, ones that change every choice, few values and so many ties."""
    seeded = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=seeded)
    few = torch.randint(-1, 2, (n,), generator=seeded) * 0.5
    return [made.to(dtype) for made in (x * 0.05, x * 2 - 1, few)]


def identify(base: Router, given: Sequence[Answers], known: Known) -> Iterator[Router]:
    """The routers of these answers, likeliest first; Refused with how near the family came.

    base  n, k, logits, out and bias are as they are found
    """
    chosen = list(itertools.islice(_choices(base, given, known), SURVIVORS))
    if given[0].weights is None:
        yield from chosen
        return
    nearest, fewest, found = chosen[0], math.inf, False
    for member in chosen:
        taken = [_taken(member, each) for each in given]
        for fields in _weightings(member, known):
            tried = dataclasses.replace(member, **fields)
            wrong = _wrong_weights(tried, taken, given, FEW)
            near = wrong <= ODD * FEW * base.k * len(given)
            if near and not _wrong_weights(tried, taken, given, None):
                found = True
                yield tried
            elif wrong < fewest:
                nearest, fewest = tried, wrong
    if not found:
        raise Refused(
            f"no weights of the family are the region's: {apart(nearest, given)}",
            contract=nearest.summary,
        )


def _choices(base: Router, given: Sequence[Answers], known: Known) -> Iterator[Router]:
    """The members that pick the region's experts; Refused if there are none."""
    nearest, fewest, found = base, math.inf, False
    for fields in _selections(base, known):
        member = dataclasses.replace(base, **fields)
        wrong = _wrong_indices(member, given[0].first(FEW))
        near = wrong <= ODD * FEW * base.k
        if near and not any(_wrong_indices(member, each) for each in given):
            found = True
            yield member
        elif wrong < fewest:
            nearest, fewest = member, wrong
    if not found:
        raise Refused(
            f"no choice of the family is the region's: {apart(nearest, given)}",
            contract=nearest.summary,
        )


def _selections(base: Router, known: Known) -> Iterator[dict[str, Any]]:
    """Fields of the choice, likeliest first."""
    lowest = [v for v in known.numbers if v < -1]
    for groups, kept in known.groups:
        forms: list[dict[str, Any]] = [{}]
        if groups > 1:
            sums = ("top2", "max") if base.n // groups > 1 else ("max",)
            forms = [
                {"groups": groups, "kept": kept, "group_score": by, "masked": masked}
                for by in sums for masked in (-math.inf, 0.0, *lowest)
            ]  # fmt: skip
        for form, (compute, scores), order, score in itertools.product(
            forms, _dtypes(known), ORDERS, SCORES
        ):
            if order == "select-score" and score == "none":
                continue
            if score == "sqrt_softplus" and THRESHOLD not in known.numbers:
                continue  # beyond another one few numbers differ, by their last bit
            yield {**form, "compute": compute, "scores": scores, "order": order, "score": score}


def _dtypes(known: Known) -> Iterator[tuple[torch.dtype, torch.dtype | None]]:
    """dtypes in which scores are computed, and to which they are rounded."""
    kinds = list(dict.fromkeys([FP32, *known.dtypes]))
    for compute in kinds:
        yield compute, None
        yield from ((compute, scores) for scores in kinds if scores is not compute)


def _weightings(member: Router, known: Known) -> Iterator[dict[str, Any]]:
    """Fields of the weights, likeliest first."""
    small = [v for v in known.numbers if 0 < v < 1]
    norms = [("", 0.0), ("s+eps", 0.0)]
    norms += [(how, v) for v in small for how in ("s+eps", "max(s,eps)")]
    scales = [1.0, *(v for v in known.numbers if v not in (0, 1))]
    scales += [1 / v for v in known.numbers if v not in (0, 1) and abs(v) > 1e-6]
    inner = [None, *(d for d in dict.fromkeys([FP32, *known.dtypes]) if d is not member.ordered)]
    kinds = _kinds(member)
    for taken, dtype, scale, (how, epsilon) in itertools.product(kinds, inner, scales, norms):
        yield {
            "taken": taken, "inner": dtype, "scale": scale, "normalised": how, "epsilon": epsilon,
        }  # fmt: skip


def _taken(member: Router, given: Answers) -> dict[str, torch.Tensor]:
    """What a member makes weights of, by kind."""
    plain = dataclasses.replace(member, normalised="", scale=1.0, inner=None, out=member.ordered)
    return {
        kind: reference(dataclasses.replace(plain, taken=kind), given.inputs)[0]
        for kind in _kinds(member)
    }


def _kinds(member: Router) -> tuple[str, ...]:
    """What a member's weights may be taken from, where these differ."""
    return TAKEN if member.bias is not None or member.groups > 1 else TAKEN[:1]


def _wrong_weights(
    member: Router,
    taken: Sequence[dict[str, torch.Tensor]],
    given: Sequence[Answers],
    rows: int | None,
) -> int:
    """Weights of a member that are not the region's, of so many rows."""
    wrong = 0
    for parts, each in zip(taken, given, strict=True):
        assert each.weights is not None
        ours = weighted(member, parts[member.taken][:rows])
        wrong += int((~same(ours, each.weights[:rows])).sum())
    return wrong


def _wrong_indices(member: Router, given: Answers) -> int:
    return int((reference(member, given.inputs)[1] != given.indices).sum())


def apart(member: Router, given: Sequence[Answers]) -> str:
    """Where a member and the region differ first, and both values."""
    for each in given:
        weights, indices = reference(member, each.inputs)
        wrong = indices != each.indices
        if wrong.any():
            i = int(wrong.any(-1).int().argmax())
            return (
                f"nearest is {words(member)}; row {i} goes to {indices[i].tolist()} there, and to "
                f"{each.indices[i].tolist()} in the region"
            )
        if each.weights is None:
            continue
        wrong = ~same(weights, each.weights)
        if wrong.any():
            i, j = divmod(int(wrong.int().flatten().argmax()), member.k)
            return (
                f"nearest is {words(member)}; weight [{i},{j}] is {float(weights[i, j])!r} there, "
                f"and {float(each.weights[i, j])!r} in the region ({int(wrong.sum())} of "
                f"{wrong.numel()} differ)"
            )
    return f"nearest is {words(member)}"


def words(member: Router) -> str:
    """A member by the fields that were searched."""
    score = "none" if member.score == "none" else f"{member.score} in {short(member.compute)}"
    top = f"top {member.k} of {member.n}"
    parts = [score, top] if member.order == "score-select" else [top, score]
    if member.groups > 1:
        parts.append(f"{member.kept} of {member.groups} groups by {member.group_score}")
    if member.normalised:
        parts.append(f"/ {member.normalised.replace('eps', f'{member.epsilon:g}')}")
    if member.scale != 1:
        parts.append(f"* {member.scale:g}")
    return ", ".join(parts)
