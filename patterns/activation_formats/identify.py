"""From the answers of a region to its contract: the scale as a function of amax, then the codes.

Both are searched in a family of a few members for each field. The numbers they are tried with are
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
from qinductor.kernels.quantize import POWERS, Quantize, Source, quantised, scales, stored
from qinductor.patterns.probe import BITS, MOST, Numbers, same
from qinductor.regions import FLOATS

FP32 = torch.float32
FEW = 48  # groups on which the family of scales is compared first
LEAST, LARGEST = 2.0**-127, 2.0**127  # powers of two in e8m0
EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)
SAMPLE = 8192  # elements on which the family of quotients is compared
USUAL = {  # codes -> divisors that are tried beside the region's own numbers
    torch.float8_e4m3fn: (448.0,),
    torch.float8_e5m2: (57344.0,),
    torch.int8: (127.0,),
    torch.uint8: (255.0,),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Answers:
    """What a region gave for groups of elements.

    y      [n, width], the elements of n groups
    codes  [n, width]
    scale  [n]; None where it is given
    zero   [n]; None if it has none
    given  the static scale, one element; None
    """

    y: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None = None
    given: torch.Tensor | None = None

    @property
    def ends(self) -> torch.Tensor:
        """[n, 2]: the smallest and the largest element of each group."""
        return torch.stack([self.y.amin(-1), self.y.amax(-1)], -1)


def battery(
    n: int, width: int, dtype: torch.dtype, numbers: Sequence[float], seed: int
) -> torch.Tensor:
    """[n, width]: n groups of elements, each with another largest magnitude.

    The magnitudes: 0, subnormals, powers of two and what a region's numbers make of them, each
    with its neighbours, all of the dtype's range at random, infinity and nan, once in a group of
    finite elements. In a group: both signs or, in every fourth, one; zeros of both signs; elements
    far smaller than the rest; ties in every third, else the largest at another place than in the
    groups before; in every fourth, quotients that lie between two codes, or next to that.
    """
    seeded = torch.Generator().manual_seed(seed)
    amax = _magnitudes(n, dtype, numbers, seeded)
    part = torch.rand((n, width), generator=seeded) * 2 - 1
    tied = (torch.rand((n, width), generator=seeded) < 0.1) & (torch.arange(n)[:, None] % 3 == 0)
    part = torch.where(tied, part.sign(), part * 0.99)
    small = torch.exp2(-20 * torch.rand((n, width), generator=seeded))
    part = torch.where(torch.rand((n, width), generator=seeded) < 0.3, part * small, part)
    part = torch.where(torch.rand((n, width), generator=seeded) < 0.05, part * 0, part)
    sign = torch.arange(n)[:, None] % 8
    part = torch.where(sign == 3, part.abs(), torch.where(sign == 7, -part.abs(), part))
    size = torch.where(amax.isfinite(), amax.double(), 1.0)[:, None]
    y = (part.double() * size).to(dtype)
    y = torch.where(torch.arange(n)[:, None] % 4 == 2, _ties(y, amax, numbers, seeded), y)
    place = torch.randperm(width, generator=seeded).repeat(-(-n // width))[:n, None]
    top = torch.where(part.gather(1, place) < 0, -1.0, 1.0).to(dtype)
    return y.scatter(1, place, amax[:, None] * top)


def between(shape: Sequence[int], seeded: torch.Generator) -> torch.Tensor:
    """Numbers in the middle of two codes of some format: (m + 0.5) * 2^e, of both signs."""
    m = torch.randint(0, 128, tuple(shape), generator=seeded)
    e = torch.randint(-9, 6, tuple(shape), generator=seeded).clamp_max(2)
    m = torch.where(e == 0, m, m % 16)
    sign = torch.randint(0, 2, tuple(shape), generator=seeded) * 2 - 1
    return torch.ldexp(sign * (m.float() + 0.5), e)


def _beside(y: torch.Tensor, seeded: torch.Generator) -> torch.Tensor:
    """Two thirds of the numbers are replaced by the one below or above in magnitude."""
    bits = y.view(BITS[y.dtype.itemsize])
    step = torch.randint(-1, 2, y.shape, generator=seeded).to(bits.dtype)
    return torch.where(y == 0, y, (bits + step).view(y.dtype))


def _ties(
    y: torch.Tensor, amax: torch.Tensor, numbers: Sequence[float], seeded: torch.Generator
) -> torch.Tensor:
    """Elements which amax / q divides to about the middle of two codes, q one of the numbers."""
    q = torch.tensor([v for v in numbers if v > 1] or [448.0], dtype=torch.float64)
    q = q[torch.randint(0, len(q), (len(y), 1), generator=seeded)]
    exact = between(y.shape, seeded).double()
    exact = torch.where(exact.abs() < q, exact, exact / 512)
    found = _beside((exact * (amax.double()[:, None] / q)).to(y.dtype), seeded)
    return torch.where(found.abs() < amax[:, None], found, y)


def near(y: torch.Tensor, scale: float, seed: int) -> torch.Tensor:
    """Rows y, three of four drawn anew such that a static scale leaves them in the codes' range."""
    seeded = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(y.shape, generator=seeded) * 2 - 1) * 500
    turn = torch.arange(len(y))[:, None] % 4
    drawn = torch.where(turn == 3, drawn, between(y.shape, seeded))
    narrow = torch.where(turn == 1, drawn / scale, drawn * scale).to(y.dtype)
    return torch.where(turn == 0, y, _beside(narrow, seeded))


def _magnitudes(
    n: int, dtype: torch.dtype, numbers: Sequence[float], seeded: torch.Generator
) -> torch.Tensor:
    limits = torch.finfo(dtype)
    low, high = math.log2(limits.smallest_normal), math.log2(limits.max)
    positive = sorted({abs(v) for v in numbers if v})
    powers = [math.ldexp(1.0, round(e)) for e in torch.linspace(low - 6, high, n // 8).tolist()]
    turns = [0, 1, -1, 3, -3, 6, 10, -10, 20, -20, 40, -40, 60]
    exact = [v * math.ldexp(1.0, e) for v in positive for e in turns]
    exact += [a * b for a in positive for b in positive]
    odd = [1, *torch.randint(2, 20, (2,), generator=seeded).tolist()]
    exact += [v * (2 * n + 1) * 2.0**e for v in positive if v > 1 for n in odd for e in (-4, 0)]
    marks = torch.tensor([*powers, *exact], dtype=torch.float64)
    marks = marks[marks <= limits.max].to(dtype).unique()
    marks = marks[torch.randperm(len(marks), generator=seeded)[: n // 5]]
    bits = marks.view(BITS[dtype.itemsize])
    near = torch.cat([bits, bits + 1, (bits - 1).clamp_min(0)]).view(dtype)
    tiny = torch.tensor([0, 0, 1, 2, 3, 1000], dtype=bits.dtype).view(dtype)
    ends = torch.tensor([limits.max, math.inf, math.nan, 1.0], dtype=dtype)
    fixed = torch.cat([tiny, ends, near])
    if n < len(fixed):  # of few some, but zeros
        fixed[1:] = fixed[1:][torch.randperm(len(fixed) - 1, generator=seeded)]
        fixed = fixed[: n - n // 4]
    spread = torch.rand(n - len(fixed), generator=seeded, dtype=torch.float64)
    drawn = torch.exp2(low + spread * (high - low)).to(dtype)
    drawn[::2] = torch.exp2((spread[::2] - 0.5) * 16).to(dtype)
    return torch.cat([fixed, drawn])[torch.randperm(n, generator=seeded)]


def identify(
    base: Quantize, answers: Answers, known: Numbers, dtypes: Sequence[torch.dtype]
) -> Iterator[Quantize]:
    """The contracts of these answers, likeliest first; Refused with how near the family came.

    base    k, x, source, codes, group, scale, static and zero are as they are found
    known   numbers that the region computes with
    dtypes  of floats in which it does
    """
    kinds = list(dict.fromkeys([FP32, *(d for d in dtypes if d in FLOATS)]))
    found = [base] if base.static else list(_scaled(base, answers, known.every, kinds))
    yield from _quantised(found, answers, known, kinds)


def _scaled(
    base: Quantize, answers: Answers, numbers: Sequence[float], dtypes: Sequence[torch.dtype]
) -> Iterator[Quantize]:
    """The members whose scales are the region's; Refused if there are none."""
    assert answers.scale is not None
    ends = answers.ends
    amax = ends.abs().amax(-1).float()
    usual = (amax > 1) & (amax < 1e30)  # no floor acts there
    some = torch.where(usual)[0] if usual.any() else torch.arange(len(amax))
    few = some[:FEW]
    nearest, fewest = base, len(some) + 1
    alive = []
    for compute, inverse, power, qmax in itertools.product(
        dtypes, (False, True), POWERS, _divisors(base, numbers)
    ):
        member = dataclasses.replace(base, compute=compute, inverse=inverse, power=power, qmax=qmax)
        wrong = int((~same(_scale(member, ends[few]), answers.scale[few])).sum())
        if wrong < fewest:
            nearest, fewest = member, wrong
        if not wrong and same(_scale(member, ends[some]), answers.scale[some]).all():
            alive.append(member)
    if not alive:
        raise Refused(f"no scale of the family is the region's: {_apart(nearest, answers, some)}")
    found, every = False, torch.arange(len(amax))
    nearest, fewest = alive[0], len(amax) + 1
    for member in alive:
        fits = False
        for floors in _floors(member, numbers):
            if fits and not 0 < floors.get("floor", 0) <= LEAST:  # which a stored exponent hides
                continue
            floored = dataclasses.replace(member, **floors)
            wrong = int((~same(_scale(floored, ends), answers.scale)).sum())
            if not wrong:
                found = fits = True
                yield floored
                if member.scale not in EXPONENTS:
                    break
            elif wrong < fewest:
                nearest, fewest = floored, wrong
    if not found:
        raise Refused(f"no floor of the family is the region's: {_apart(nearest, answers, every)}")


def _divisors(base: Quantize, numbers: Sequence[float]) -> list[float]:
    found = [v for v in numbers if v > 1]
    for value in (1 / v for v in numbers if 0 < v < 1):
        near = round(2 * value) / 2
        found += [near] if near > 1 and abs(near / value - 1) < 1e-6 else []
    wide = [v - w for v in numbers for w in numbers if v > 0 > w] if base.zero else []
    return [v for v in dict.fromkeys([*found, *wide, *USUAL[base.codes]]) if v <= MOST]


def _floors(member: Quantize, numbers: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Bounds of amax and of s, likeliest first."""
    yield {}
    for value in (v for v in numbers if v > 0):
        for name in ("least", "floor", "empty", "blank"):
            yield {name: value}
    if member.power:
        yield {"most": LARGEST}
        for value in dict.fromkeys((LEAST, *(v for v in numbers if 0 < v < 1))):
            yield {"most": LARGEST, "floor": value}
            yield {"most": LARGEST, "least": value}


def _scale(member: Quantize, y: torch.Tensor) -> torch.Tensor:
    return stored(member, scales(member, y)[0])


def _apart(member: Quantize, answers: Answers, some: torch.Tensor) -> str:
    """Where the scales of a member and the region's differ first among some groups, and both."""
    assert answers.scale is not None
    ours = _scale(member, answers.ends)
    i = int(some[(~same(ours, answers.scale))[some].int().argmax()])
    made = f"amax * (1/{member.qmax:g})" if member.inverse else f"amax / {member.qmax:g}"
    floors = ("blank", "least", "floor", "most", "empty", "power")
    more = [f"{n} {v:g}" if n != "power" else f"power of two {v}" for n in floors
            if (v := getattr(member, n)) not in (None, "")]  # fmt: skip
    words = ", ".join([f"{made} in {short(member.compute)}", *more])
    amax = float(answers.ends[i].abs().amax())
    return (
        f"nearest is {words}; for amax {amax!r} that gives {float(ours[i])!r}, and the region "
        f"{float(answers.scale[i])!r}"
    )


def _quantised(
    members: Sequence[Quantize],
    answers: Answers,
    known: Numbers,
    dtypes: Sequence[torch.dtype],
) -> Iterator[Quantize]:
    """The members whose codes are the region's; Refused if there are none."""
    n, width = answers.y.shape
    at = torch.randperm(n * width, generator=torch.Generator().manual_seed(1))[:SAMPLE]
    group = at // width
    y = torch.cat([answers.y.reshape(-1)[at, None], answers.ends[group]], -1)
    wanted = answers.codes.reshape(-1)[at]
    nearest, fewest, ours, found = None, len(at) + 1, wanted, False
    for member in members:
        if member.static:
            assert answers.given is not None
            s, amax = answers.given.reshape(1).expand(len(at)), y.new_zeros(len(at))
        else:
            s, amax = scales(member, y[:, 1:])
        for fields in _quotients(member, known, dtypes):
            tried = dataclasses.replace(member, **fields)
            codes, zero = quantised(tried, y, s[:, None], amax[:, None])
            equal = same(codes[:, 0], wanted)
            if zero is not None and answers.zero is not None:
                equal &= same(zero[:, 0].to(answers.zero.dtype), answers.zero[group])
            wrong = int((~equal).sum())
            if not wrong:
                found = True
                yield tried
            elif wrong < fewest:
                nearest, fewest, ours = tried, wrong, codes[:, 0]
    if found:
        return
    assert nearest is not None
    i = int((~same(ours, wanted)).int().argmax())
    raise Refused(
        f"no codes of the family are the region's: nearest is {_words(nearest)} ({fewest} of "
        f"{len(at)} differ); for y {float(y[i, 0])!r} that gives {float(ours[i])!r}, and the "
        f"region {float(wanted[i])!r}"
    )


def _words(member: Quantize) -> str:
    clamp = "no clamp" if member.low is None else f"clamp {member.low:g} {member.high:g}"
    return f"{member.quotient} in {short(member.inner)}, {clamp}"


def _quotients(
    member: Quantize, known: Numbers, dtypes: Sequence[torch.dtype]
) -> Iterator[dict[str, Any]]:
    """Fields of the codes, likeliest first."""
    bounds = known.bounds
    clamps: list[tuple[float | None, float | None]] = [
        (low, high) for low in bounds for high in bounds if low <= 0 < high and -low < 2 * high
    ]
    if member.zero is None:
        clamps.append((None, None))
    whole = not member.codes.is_floating_point
    quotients = ("x/s", "x*(1/s)", "x*s") if member.static else ("x/s", "x*(1/s)", "x*(q/a)")
    for plus, guard, truncate, quotient, inner, (low, high) in itertools.product(
        (False,) if whole else (False, True),
        (False, True), (False, True) if whole else (False,), quotients, dtypes, clamps,
    ):  # fmt: skip
        if not guard or quotient == "x*(1/s)":
            yield {
                "plus": plus, "guard": guard, "truncate": truncate, "quotient": quotient,
                "inner": inner, "low": low, "high": high,
            }  # fmt: skip


def plain(k: int, x: torch.dtype, codes: torch.dtype, group: int, scale: torch.dtype) -> Quantize:
    """A member to begin with."""
    return Quantize(
        k=k, x=x, source=Source(y=x), codes=codes, group=group, scale=scale, qmax=1.0,
        compute=FP32, inner=FP32, low=None, high=None,
    )  # fmt: skip
