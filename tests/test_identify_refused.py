"""Near misses: what looks like a format, and is one after all or is refused for a true reason."""

from typing import Any

import pytest
import torch
from probing import (
    BF16,
    BYTES,
    E4M3,
    FP32,
    centred,
    fp8,
    grouped,
    identified,
    int8,
    ints,
    nibbles,
    normal,
    rand,
    words,
    zeros,
)

from qinductor.errors import Refused
from qinductor.patterns.weight_formats.probe import BUDGET

CHANNEL, GROUPS = rand(64, 1), rand(64, 3)


def pairs() -> torch.Tensor:
    """Two of four: bool[64, 96], each four neighbours with two at random."""
    order = torch.rand(64, 24, 4, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return (order < 2).flatten(1)


def sparse() -> torch.Tensor:
    return int8() * pairs()


def terms(q: torch.Tensor, s: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    w = q.bfloat16() * s
    for term in rest:
        w = w + term
    return w


def with_value(scale: torch.Tensor, value: float) -> torch.Tensor:
    scale = scale.clone()
    scale[3, 0] = value
    return scale


def products_below(q: torch.Tensor, p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Codes in the first rows, products of two in the others."""
    rows = len(q) - len(p)
    return torch.cat([q[:rows].float(), (q[rows:].int() * p.int()).float()]) * s


UNEVEN = torch.tensor([0] * 32 + [1] * 16 + [2] * 48)
# name: (f, its leaves, what the reason must match)
REFUSED: dict[str, tuple[Any, list[torch.Tensor], str]] = {
    "no codes": (
        lambda w, s: w * s,
        [rand(64, 96), CHANNEL],
        r"no tensor holds codes: wanted integers or float8 with at least a bit for each of 64x96 "
        r"elements, found bfloat16\[64, 96\]",
    ),
    "codes too few": (
        lambda q, s: q.repeat_interleave(12, 1).bfloat16() * s,
        [int8(64, 8), CHANNEL],
        r"no tensor holds codes: .* for each of 64x96 elements, found int8\[64, "
        r"8\], bfloat16\[64, 1\]",
    ),
    "a mask of elements": (
        lambda q, m, s: torch.where(m, q.bfloat16() * s, 0.0),
        [int8(), pairs(), CHANNEL],
        r"W must depend on its codes everywhere; W\[\d+,\d+\] is 0 for all that were tried",
    ),
    "two of four": (
        lambda q, m, s: q.bfloat16() * m * s,
        [int8(), pairs(), CHANNEL],
        r"W must depend on its codes everywhere; W\[\d+,\d+\] is 0 for all that were tried",
    ),
    "a mask of bits": (
        lambda q, m, s: (q & m).bfloat16() * s,
        [int8(), ints(64, 96, **BYTES).to(torch.int8), CHANNEL],
        r"W must depend on its codes everywhere; W\[\d+,\d+\] is 0 for all that were tried",
    ),
    "a float mask": (
        lambda q, m, s: q.bfloat16() * s * m,
        [int8(), pairs().bfloat16(), CHANNEL],
        r"bfloat16\[64, 96\] has one entry for each element, so it is no scale of a block",
    ),
    "a scale for each element": (
        lambda q, s: q.bfloat16() * s,
        [int8(), rand(64, 96)],
        r"bfloat16\[64, 96\] has one entry for each element, so it is no scale of a block",
    ),
    "an offset for each element": (
        lambda q, s, z: q.bfloat16() * s + z,
        [int8(), CHANNEL, rand(64, 96)],
        r"bfloat16\[64, 96\] has one entry for each element, so it is no scale of a block",
    ),
    "scales that are moved": (
        lambda q, s, i: q.bfloat16() * s.flatten()[i],
        [int8(), rand(64, 96), torch.randperm(64 * 96).view(64, 96)],
        r"codes in int64\[64, 96\]: W must depend on its codes everywhere",
    ),
    "a table for each row": (
        lambda q, t, s: t.gather(1, q.long()) * s,
        [ints(64, 96, high=16, dtype=torch.uint8), normal(64, 16), CHANNEL],
        r"W takes \d+ values and more; 8 bits an element tell at most 256 apart",
    ),
    "a table for each group": (
        lambda q, t: t.gather(1, q.long().view(192, 32)).view(64, 96),
        [ints(64, 96, high=16, dtype=torch.uint8), normal(192, 16)],
        r"W takes \d+ values and more; 8 bits an element tell at most 256 apart",
    ),
    "vectors of a table": (
        lambda q, t: t[q.int()].flatten(1),
        [ints(64, 24, **BYTES), normal(256, 4)],
        r"W takes \d+ values and more; 2 bits an element tell at most 4 apart",
    ),
    "groups of rows far apart": (
        lambda q, s: (q.bfloat16().view(32, -1) * s).view(2048, 96),
        [int8(2048, 96), rand(1, 64 * 96)],
        r"the entries of bfloat16\[1, 6144\] must change along N in equal blocks; with blocks of "
        r"1, row 64 at k = 0 has another entry",
    ),
    "uneven groups": (
        lambda q, s, g: q.bfloat16() * s[:, g],
        [int8(), GROUPS, UNEVEN],
        r"the entries of bfloat16\[64, 3\] must serve equally many columns each; 3 of them are "
        r"spread over 96 columns",
    ),
    "unequal blocks of rows": (
        lambda q, s, g: q.bfloat16() * s[g],
        [int8(8, 96), rand(3, 1), torch.tensor([0] * 3 + [1] * 2 + [2] * 3)],
        r"bfloat16\[3, 1\] must change along N in equal blocks; with blocks of 3, row 5",
    ),
    "rows in another order": (
        lambda q, s, g: grouped(q, s[g]),
        [int8(), GROUPS, torch.randperm(64)],
        r"bfloat16\[64, 3\] must change along N in equal blocks; with blocks of "
        r"1, row 2 at k = 0 has",
    ),
    "three scales": (
        lambda q, s, t, u: q.bfloat16() * s * t * u,
        [int8(), CHANNEL, rand(96), rand(1)],
        r"wanted at most 2 scales, found 3: bfloat16\[\d.*\] and bfloat16\[.* and bfloat16\[",
    ),
    "two scales of groups": (
        lambda q, s, t: q.bfloat16() * s.repeat_interleave(32, 1) * t.repeat_interleave(48, 1),
        [int8(), GROUPS, rand(64, 2)],
        "one of two scales must be the same along K; both change along it",
    ),
    "two zeros": (
        terms,
        [int8(), CHANNEL, rand(64, 1), rand(96)],
        r"wanted at most 1 zero, found 2: bfloat16\[\d.*\] and bfloat16\[",
    ),
    "a zero taken twice": (
        lambda q, s, z: (q.bfloat16() - z - z) * s,
        [int8(), CHANNEL, rand(64, 1)],
        r"a zero of 1 must move W by 1 where the scale is 1; it moves by -2",
    ),
    "a zero for half of the columns": (
        lambda q, s, z: torch.cat([q[:, :48].bfloat16() - z, q[:, 48:].bfloat16()], 1) * s,
        [int8(), CHANNEL, rand(64, 1)],
        "a zero of 1 must move W by the same everywhere; it moves by",
    ),
    "a zero between two scales": (
        lambda q, s, z, t: (q.bfloat16() * s - z) * t,
        [int8(), GROUPS[:, :1], rand(64, 1), rand(1)],
        "a zero that some of the scales multiply and others do not is not supported",
    ),
    "a scale taken twice": (
        lambda q, s: (q.bfloat16() * s) * s,
        [int8(), CHANNEL],
        r"doubling bfloat16\[64, 1\] must double, halve or keep .*; it makes it 4 times as large",
    ),
    "a scale that is a zero too": (
        lambda q, s: (q.bfloat16() - s) * s,
        [int8(), CHANNEL],
        "cannot be told apart",
    ),
    "a scale beside one": (
        lambda q, s: q.bfloat16() * (s + 1) + q.bfloat16() * s,
        [int8(), CHANNEL],
        r"doubling bfloat16\[64, 1\] must .*; it makes it 1.5 times as large",
    ),
    "blocks across each other": (
        lambda q, s, z: (q.bfloat16() - z.repeat_interleave(48, 1)) * s.repeat_interleave(32, 1),
        [int8(), GROUPS, zeros(64, 2)],
        r"scale and zero have blocks of (48 and 32|32 and 48)",
    ),
    "zeros in another order": (
        lambda q, s, z, g: (q.bfloat16() - z.repeat_interleave(32, 1)) * s[:, g],
        [int8(), GROUPS, zeros(64, 3), (torch.arange(96) // 32)[torch.randperm(96)]],
        "scale and zero group the columns of W differently",
    ),
    "wrapping codes": (
        lambda q, s, z: (q - z).bfloat16() * s,
        [int8(), CHANNEL, zeros(64, 1, high=100)],
        r"not bitwise equal .*W\[\d+,\d+\] is .* in the reference and .* in the region \(\d+ of 6",
    ),
    "a clamp": (
        lambda q, s: (q.bfloat16() * s).clamp(max=40),
        [int8(), CHANNEL],
        r"W must be in proportion to bfloat16\[64, 1\]; it is not",
    ),
    "a clamp to e4m3": (
        lambda q, s: (q.bfloat16() * s).clamp(-448, 448),
        [fp8(64, 96), CHANNEL * 30],
        r"not bitwise equal .*W\[\d+,\d+\] is -?[\d.]+ in the reference and -?448.0 in the region",
    ),
    "codes of 16 bits": (
        lambda q, s: q.float() * s,
        [ints(64, 96, high=1 << 16, dtype=torch.int32), rand(64, 1, dtype=FP32)],
        r"under unit scales W takes \d+ values and more; 8 bits an element tell at most 256 apart",
    ),
    "other rows below": (
        products_below,
        [int8(1024, 32), int8(512, 32), rand(1024, 1, dtype=FP32)],
        r"under unit scales W takes \d+ values and more; codes have at most 256",
    ),
    "rounded in between": (
        lambda q, s: (q.float() * s).half().bfloat16(),
        [int8(), rand(64, 1, dtype=FP32)],
        r"not bitwise equal .*W\[\d+,\d+\] is .* in the reference and .* in the region",
    ),
    "rounded up after": (
        lambda q, s: (q.bfloat16() * s).round(),
        [int8(), CHANNEL * 3],
        r"not bitwise equal .*W\[\d+,\d+\] is .* in the reference and -?\d+.0 in the region",
    ),
    "a table of inf and nan": (
        lambda q, t, s: grouped(t[q.int()], s),
        [
            ints(64, 96, high=16, dtype=torch.uint8),
            torch.cat([normal(14, dtype=FP32), torch.tensor([torch.inf, torch.nan])]),
            GROUPS,
        ],
        "under unit scales W must be finite for the codes it holds",
    ),
    "a table of one value": (
        lambda q, t, s: grouped(t[q.int()], s),
        [torch.zeros(64, 96, dtype=torch.uint8), torch.full((16,), 0.3), GROUPS],
        r"W must depend on its codes everywhere; W\[0,0\] is 0.300781 for all that were tried",
    ),
    "too many tensors": (
        terms,
        [int8(), CHANNEL, *[CHANNEL.clone() for _ in range(20)]],
        f"identification needs more than {BUDGET} evaluations",
    ),
    "a sum of two weights": (
        lambda q, s, p, t: q.bfloat16() * s + p.bfloat16() * t,
        [int8(), CHANNEL, int8(64, 96) + 1, CHANNEL + 1],
        r"bfloat16\[64, 96\] has one entry for each element, so it is no scale of a block",
    ),
    "a difference of neighbours": (
        lambda q, s: q.float().cumsum(1) * s,
        [int8(), CHANNEL.float()],
        r"W takes \d+ values and more; 8 bits an element tell at most 256 apart",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_was_found_and_what_was_wanted(name):
    f, leaves, said = REFUSED[name]
    with pytest.raises(Refused, match=said):
        identified(f, leaves)


BIG = torch.finfo(BF16).max
# name: (f, its leaves, what the format must say)
FOUND: dict[str, tuple[Any, list[torch.Tensor], str]] = {
    "a scale of nan": (
        grouped,
        [int8(), with_value(GROUPS, torch.nan)],
        "int8 group-32 q*s bf16 None bf16 bf16",
    ),
    "a scale of inf": (
        grouped,
        [int8(), with_value(GROUPS, torch.inf)],
        "int8 group-32 q*s bf16 None bf16 bf16",
    ),
    "a scale of 0": (
        grouped,
        [int8(), with_value(GROUPS, 0)],
        "int8 group-32 q*s bf16 None bf16 bf16",
    ),
    "scales of 0": (grouped, [int8(), GROUPS * 0], "int8 group-32 q*s bf16 None bf16 bf16"),
    "negative scales": (grouped, [int8(), -GROUPS], "int8 group-32 q*s bf16 None bf16 bf16"),
    "subnormal scales": (
        grouped,
        [int8(), GROUPS * 2**-130],
        "int8 group-32 q*s bf16 None bf16 bf16",
    ),
    "subnormal scales of halves": (
        grouped,
        [int8(), GROUPS.half() * 2**-22],
        "int8 group-32 q*s fp16 None fp16 fp16",
    ),
    "overflow": (
        grouped,
        [int8(), with_value(GROUPS, BIG)],
        "int8 group-32 q*s bf16 None bf16 bf16",
    ),
    "overflow of halves": (
        grouped,
        [int8(), GROUPS.half() * 2e4],
        "int8 group-32 q*s fp16 None fp16 fp16",
    ),
    "overflow in the dtype of W": (
        lambda q, s: (q.float() * s).half(),
        [int8(), GROUPS[:, :1].float() * 2e4],
        "int8 channel q*s fp32 None fp32 fp16",
    ),
    "divided by 0": (
        lambda q, s: q.bfloat16() / s,
        [int8(), with_value(CHANNEL, 0)],
        "int8 channel q/s bf16 None bf16 bf16",
    ),
    "zeros of nan": (
        centred,
        [int8(), GROUPS, with_value(GROUPS, torch.nan)],
        "int8 group-32 (q-z)*s bf16 bf16 bf16 bf16",
    ),
    "codes of nan": (
        grouped,
        [fp8(64, 96).fill_(torch.nan), GROUPS],
        "float8_e4m3fn group-32 q*s bf16 None bf16 bf16",
    ),
    "all codes 0": (grouped, [int8() * 0, GROUPS], "uint2 group-32 q*s bf16 None bf16 bf16"),
    "all nibbles 0": (
        lambda p, s: grouped(nibbles(p), s),
        [ints(64, 48, high=1, dtype=torch.uint8), GROUPS],
        "uint4 group-32 q*s bf16 None bf16 bf16",
    ),
    "all nibbles equal": (
        lambda p, s: grouped(nibbles(p).bfloat16() - 8, s),
        [torch.full((64, 48), 0x77, dtype=torch.uint8), GROUPS],
        "int4 group-32 q*s bf16 None bf16 bf16",
    ),
    "all codes equal": (
        grouped,
        [torch.full((64, 96), -3, dtype=torch.int8), GROUPS],
        "int4 group-32 q*s bf16 None bf16 bf16",
    ),
    "all W equal": (
        lambda q, s: q.bfloat16() * s,
        [torch.ones(64, 96, dtype=torch.int8), torch.ones(1)],
        "uint2 tensor q*s fp32 None fp32 fp32",
    ),
    "all float8 0": (
        grouped,
        [torch.zeros(64, 96).to(E4M3), GROUPS],
        "float8_e4m3fn group-32 q*s bf16 None bf16 bf16",
    ),
    "two of four, in the codes": (
        grouped,
        [sparse(), GROUPS],
        "int8 group-32 q*s bf16 None bf16 bf16",
    ),
    "an index that the codes make": (
        lambda q, s: s.flatten()[q.int()],
        [ints(64, 96, high=64, dtype=torch.uint8), CHANNEL],
        "table8 no scale q None None bf16 bf16 table=fp32",
    ),
    "a transform": (
        lambda q, s: (
            torch.stack([q[:, ::2] + q[:, 1::2], q[:, ::2] - q[:, 1::2]], -1).flatten(1).bfloat16()
            * s
        ),
        [ints(64, 96, high=16, dtype=torch.int8), CHANNEL],
        "int8 channel q*s bf16 None bf16 bf16",
    ),
    "codes of nine bits, few": (
        lambda q, s: (q.bfloat16() * 2 - 255) * s,
        [ints(64, 96, **BYTES), CHANNEL],
        "table8 channel q*s bf16 None bf16 bf16 table=fp32",
    ),
    "a curve": (
        lambda q, s: (q.bfloat16() * q.bfloat16()) * s,
        [int8(), CHANNEL],
        "table8 channel q*s bf16 None bf16 bf16 table=fp32",
    ),
    "halved codes": (
        lambda q, s: (q.bfloat16() / 2) * s,
        [int8(), CHANNEL],
        "table8 channel q*s bf16 None bf16 bf16 table=fp32",
    ),
    "thirds": (
        lambda q, s: (q.bfloat16() / 7.5 - 1) * s,
        [ints(64, 96, high=16, dtype=torch.uint8), CHANNEL],
        "table4 channel q*s bf16 None bf16 bf16 table=fp32",
    ),
    "a clamp of the codes": (
        lambda q, s: q.clamp(-5, 5).bfloat16() * s,
        [int8(), CHANNEL],
        "int4 channel q*s bf16 None bf16 bf16",
    ),
    "nibbles wrapping in int8": (
        lambda p, z, s: (nibbles(p).to(torch.int8) - z).bfloat16() * s,
        [ints(64, 48, **BYTES), zeros(64, 1), CHANNEL],
        "uint4 channel (q-z)*s bf16 int8 bf16 bf16",
    ),
    "zeros that wrap in uint8": (
        lambda p, z, s: (nibbles(p) - z).view(torch.int8).bfloat16() * s,
        [ints(64, 48, **BYTES), zeros(64, 1, dtype=torch.uint8), CHANNEL],
        "uint4 channel (q-z)*s bf16 uint8 bf16 bf16",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_values_that_change_nothing(name):
    f, leaves, said = FOUND[name]
    _, weight = identified(f, leaves)
    assert words(weight) == said
