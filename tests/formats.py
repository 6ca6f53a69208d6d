"""Weight formats as libraries and people write them: leaves of a size, and a function of them."""

import dataclasses
from collections.abc import Callable

import torch
from probing import (
    BF16,
    E4M3,
    ENK,
    FP16,
    FP32,
    KN,
    NK,
    Function,
    fp8,
    gptq,
    grouped,
    int8,
    ints,
    nibbles,
    normal,
    rand,
    stream,
    unstreamed,
    words32,
    zeros,
)
from torch.nn.functional import embedding

from qinductor.regions import Axes

U8, I32, I64 = torch.uint8, torch.int32, torch.int64
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([E2M1, -E2M1])


@dataclasses.dataclass(frozen=True)
class Format:
    """A weight W = f(*leaves(n, k)).

    said  what `probing.words` must say of it
    """

    f: Function
    leaves: Callable[[int, int], list[torch.Tensor]]
    said: str
    axes: Axes = NK


def bytes_(*shape: int) -> torch.Tensor:
    return ints(*shape, high=256, dtype=U8)


def small(*shape: int) -> torch.Tensor:
    """Biased exponents of 2 to the -6 and so on."""
    return ints(*shape, high=7, dtype=torch.int16).add(121).to(U8)


def e8m0(*shape: int) -> torch.Tensor:
    return small(*shape).view(torch.float8_e8m0fnu)


# Packing


def gptq3(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[K, N]: 32 codes of a column in three words, two of them over a border."""
    shifts = torch.tensor([[*range(0, 31, 3), 0], [0, *range(1, 32, 3)], [0, *range(2, 30, 3), 0]])
    q = words.reshape(-1, 3, 1, words.shape[1]).expand(-1, -1, 12, -1)
    q = (q >> shifts.to(I32)[None, :, :, None]) & 7
    q[:, 0, 10] = (q[:, 0, 10] & 3) | ((q[:, 1, 0] << 2) & 4)
    q[:, 1, 11] = (q[:, 1, 11] & 1) | ((q[:, 2, 0] << 1) & 6)
    q = torch.cat([q[:, 0, :11], q[:, 1, 1:12], q[:, 2, 1:11]], 1).flatten(0, 1)
    return (q - 4).to(scale.dtype) * scale.repeat_interleave(32, 0)


def gptq3_words(n: int, k: int) -> torch.Tensor:
    return stream(ints(n, k, high=8), 3, I32).t().contiguous()


def shuffled(k: int) -> torch.Tensor:
    """The group of each column, in no order."""
    return torch.randperm(k, generator=torch.Generator().manual_seed(k)) // 32


def awq(words: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[K, N]: eight codes of a row in a word, in the order 0, 4, 1, 5, 2, 6, 3, 7."""
    places = torch.arange(0, 32, 4)
    order = torch.arange(words.shape[1] * 8).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].flatten()
    q, z = ((t.unsqueeze(2) >> places).flatten(1) for t in (words, zero))
    q, z = (t[:, order] & 15 for t in (q, z))
    z, scale = (t.repeat_interleave(32, 0) for t in (z, scale))
    return (q - z) * scale


def half_planes(low: torch.Tensor, high: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Five bits: four in one tensor, the fifth of eight elements in a byte of another."""
    fifth = (high.unsqueeze(-1) >> torch.arange(8, dtype=U8) & 1).flatten(1)
    return grouped(nibbles(low) | fifth << 4, scale)


def row_blocks(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Four blocks of rows, two bits each, in one byte; written block by block."""
    quarter = len(packed)
    out = torch.empty(4 * quarter, packed.shape[1], dtype=torch.int8)
    for i in range(4):
        out[i * quarter : (i + 1) * quarter] = (packed >> 2 * i & 3).to(torch.int8)
    return (out - 1).bfloat16() * scale


def strided(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(len(packed), 2 * packed.shape[1], dtype=torch.int8)
    out[:, 0::2] = (packed & 15).to(torch.int8)
    out[:, 1::2] = (packed >> 4).to(torch.int8)
    return grouped(out - 8, scale)


def word_writes(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(len(words), 8 * words.shape[1], dtype=I32)
    for i in range(8):
        out[:, i::8] = words >> 4 * i & 15
    return grouped(out.to(torch.int8) - 8, scale)


def ten_a_word(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Ten codes of three bits in a word, two bits of which are free; cut to size."""
    q = torch.cat([words >> 27 - 3 * i & 7 for i in range(10)])
    return q[: len(scale)].bfloat16() * scale


def trits(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Five digits of base 3 in a byte; cut to size."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=U8)
    q = (packed.unsqueeze(-1) // powers % 3).flatten(1)[:, :96]
    return (q.to(torch.int8) - 1).bfloat16() * scale


def wrapped_trits(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Five digits of base 3 in a byte, as a fraction: the product in a byte wraps."""
    digits = [(packed * power).to(torch.int16) * 3 >> 8 for power in (1, 3, 9, 27, 81)]
    q = torch.stack(digits, -1).flatten(1)[:, :96]
    return (q - 1).bfloat16() * scale


def trit_bytes(n: int, k: int) -> torch.Tensor:
    return ints(n, -(-k // 5), high=243, dtype=U8)


def fractions(n: int, k: int) -> torch.Tensor:
    """Bytes for `wrapped_trits`: ceil(256 * v / 243)."""
    return ((trit_bytes(n, k).int() * 256 + 242) // 243).to(U8)


def fields(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of five bits in fields of seven."""
    q = (words.unsqueeze(-1) >> torch.arange(0, 56, 7) & 31).flatten(1)
    return q.bfloat16() * scale


# Blocks that hold codes and scales


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    blocks = blocks.view(len(blocks), -1, 18)
    d = blocks[..., :2].contiguous().view(FP16)
    q = torch.cat([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], -1)
    return (d * (q.to(torch.int8) - 8).half()).flatten(1)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    blocks = blocks.view(len(blocks), -1, 20)
    d, m = blocks[..., :2].view(FP16), blocks[..., 2:4].view(FP16)
    q = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
    return (d * q + m).flatten(1)


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    blocks = blocks.view(len(blocks), -1, 22)
    d, rest = blocks[..., :2].view(FP16), blocks[..., 6:]
    high = (blocks[..., 2:6].contiguous().view(I32) >> torch.arange(32, dtype=I32) & 1).to(U8)
    q = torch.cat([rest & 15, rest >> 4], -1) | high << 4
    return (d * (q.to(torch.int8) - 16)).flatten(1)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    d, q = blocks.view(len(blocks), -1, 34).split([2, 32], -1)
    return (d.view(FP16).float() * q.view(torch.int8).float()).flatten(1)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks of 256 with eight scales and minima of six bits, and two numbers to scale those."""
    d, low, scales, q = blocks.view(len(blocks), -1, 144).split([2, 2, 12, 128], -1)
    d, low = d.view(FP16).float(), low.view(FP16).float()
    a, b, c = scales.unflatten(-1, (3, 4)).unbind(-2)
    s = torch.cat([a & 63, (c & 15) | (a >> 2 & 48)], -1)
    m = torch.cat([b & 63, (c >> 4) | (b >> 2 & 48)], -1)
    q = q.unflatten(-1, (4, 32))
    q = torch.stack([q & 15, q >> 4], -2).flatten(-3, -2).float()
    return ((d * s).unsqueeze(-1) * q - (low * m).unsqueeze(-1)).flatten(1)


def with_halves(size: int, per: int, halves: tuple[int, ...]) -> Callable:
    """Rows of blocks of `size` bytes for `per` elements each, with fp16 numbers at `halves`."""

    def made(n: int, k: int) -> list[torch.Tensor]:
        blocks = bytes_(n, k // per, size)
        for at in halves:
            blocks[..., at : at + 2] = rand(n, k // per, 1, dtype=FP16).view(U8)
        return [blocks.flatten(1)]

    return made


def codes_and_zeros(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The zeros of each row's groups lie behind its codes."""
    groups = scale.shape[1]
    q, z = nibbles(packed[:, :-groups]), packed[:, -groups:]
    return (
        (q.bfloat16().unflatten(1, (groups, -1)) - z.unsqueeze(2)) * scale.unsqueeze(2)
    ).flatten(1)


# Codebooks


def looked_up(how: str) -> Callable[..., torch.Tensor]:
    """table[q] * s: a scale for each group of a row."""

    def f(packed: torch.Tensor, table: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q = nibbles(packed)
        if how == "gather":
            w = table.expand(len(q), -1).gather(1, q.long())
        else:
            w = {
                "index": lambda: table[q.int()],
                "flat": lambda: table.index_select(0, q.flatten().int()).view(q.shape),
                "take": lambda: table.take(q.long()),
                "embedding": lambda: embedding(q.int(), table.unsqueeze(1)).squeeze(-1),
            }[how]()
        return grouped(w, scale)

    return f


def held_table(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The table is in the code."""
    return grouped(FP4.to(scale.dtype)[nibbles(packed).int()], scale)


def table_of_each(entries: int) -> Callable:
    return lambda n, k: [ints(n, k, high=entries, dtype=U8), normal(entries), rand(n, k // 32)]


def looked_up_bytes(q: torch.Tensor, table: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return grouped(table[q.int()], scale)


def signed_table(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Eight values and a sign."""
    q = nibbles(packed)
    sign = torch.where((q & 8).bool(), -1.0, 1.0)
    return grouped(E2M1.to(BF16)[(q & 7).int()] * sign.bfloat16(), scale)


def where_tree(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Three values, by comparisons."""
    w = torch.where(q == 0, -1.5, torch.where(q == 1, 0.25, 2.0))
    return (w * scale).bfloat16()


def computed_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e2m1 by arithmetic on the bits of a float32."""
    q = nibbles(packed).int()
    exponent, mantissa, sign = q >> 1 & 3, q & 1, q >> 3
    normal = (exponent + 126) << 23 | mantissa << 22
    bits = torch.where(exponent == 0, mantissa * 0x3F000000, normal) | sign << 31
    return grouped(bits.view(FP32), scale).bfloat16()


def nf4(
    packed: torch.Tensor,
    scale: torch.Tensor,
    step: torch.Tensor,
    mean: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """High nibble first; scales are int8 themselves, with a step for 64 and a mean."""
    s = (scale.view(len(step), -1) * step.unsqueeze(1) + mean).view(-1, 3)
    return grouped(table[nibbles(packed, high_first=True).int()].view(-1, 96), s).bfloat16()


def nvfp4(how: str) -> Callable[..., torch.Tensor]:
    """e2m1 codes with an e4m3 scale for 16 elements, and one number for all."""

    def f(packed: torch.Tensor, scale: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        table = FP4.to(one.dtype)
        q, s = table[nibbles(packed).int()], scale.to(one.dtype)
        return {
            "multiplies the scale": lambda: grouped(q, s * one),
            "divides the scale": lambda: grouped(q, s / one),
            "multiplies first": lambda: grouped(q * one, s),
            "multiplies last": lambda: grouped(q, s) * one,
            "divides first": lambda: grouped(q / one, s),
            "divides last": lambda: grouped(q, s) / one,
        }[how]()

    return f


def tiled(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e2m1 codes; scales lie in tiles of 128 rows and four columns."""
    n, groups = len(packed), packed.shape[1] // 8
    s = scale.view(n // 128, groups // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(n, groups)
    return grouped(FP4[nibbles(packed).int()], s.to(FP32)).bfloat16()


def fp4_leaves(n: int, k: int, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [bytes_(n, k // 2), rand(n, k // 16).to(E4M3), torch.tensor([0.69], dtype=dtype)]


# Exponents


def by_power(how: str) -> Callable[..., torch.Tensor]:
    """e2m1 codes, or any, with a power of two for 32 elements."""

    def f(packed: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        if how == "ldexp":
            q = FP4[nibbles(packed).int()].unflatten(1, (e.shape[1], -1))
            return torch.ldexp(q, (e.int() - 127).unsqueeze(2)).flatten(1).bfloat16()
        q = FP4.to(BF16)[nibbles(packed).int()]
        return {
            "pow": lambda: grouped(q, torch.pow(2.0, (e.int() - 127).bfloat16())),
            "exp2": lambda: grouped(q, torch.exp2((e.int() - 127).bfloat16())),
            "e8m0": lambda: grouped(q, e.bfloat16()),
            "bits": lambda: grouped(q, (e.int() << 23).view(FP32).bfloat16()),
        }[how]()

    return f


def shifted(packed: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """Integers, shifted left by their group's exponent."""
    q = (nibbles(packed).to(I32) - 8).unflatten(1, (e.shape[1], -1))
    return (q << e.int().unsqueeze(2)).flatten(1).float()


def shifted_ones(q: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    return grouped(q, (1 << e.int()).bfloat16())


def power_codes(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes that are exponents themselves, with a sign: powers of two."""
    sign = 1 - 2 * (q >> 3 & 1).float()
    return grouped(sign * torch.exp2(-(q & 7).float()), scale)


# Parts of one weight


def part(how: str) -> Callable[..., torch.Tensor]:
    """Some rows of a dequantised weight."""

    def f(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        w, third = grouped(q, scale), len(q) // 3
        return {
            "split": lambda: w.split([third, third, len(q) - 2 * third])[1],
            "chunk": lambda: w.chunk(3)[2],
            "unbind": lambda: w.view(3, third, -1).unbind(0)[1],
            "select": lambda: w.view(3, third, -1)[2],
            "narrow": lambda: w.narrow(0, third, third),
        }[how]()

    return f


def parts(n: int, k: int) -> list[torch.Tensor]:
    return [int8(3 * n, k), rand(3 * n, k // 32)]


GROUPS = "group-32 q*s bf16 None bf16 bf16"
CHANNEL = "channel q*s bf16 None bf16 bf16"
FORMATS: dict[str, Format] = {
    "nibbles": Format(lambda p, s: grouped(nibbles(p).to(torch.int8) - 8, s),
                      lambda n, k: [bytes_(n, k // 2), rand(n, k // 32)], f"int4 {GROUPS}"),
    "nibbles, high first": Format(
        lambda p, s: grouped(nibbles(p, True), s),
        lambda n, k: [bytes_(n, k // 2), rand(n, k // 32)], f"uint4 {GROUPS}"),
    "nibbles, by shifts of int8": Format(
        lambda p, s: grouped(torch.stack([p << 4 >> 4, p >> 4], -1).flatten(1), s),
        lambda n, k: [int8(n, k // 2), rand(n, k // 32)], f"int4 {GROUPS}"),
    "nibbles, halves of a row": Format(
        lambda p, s: grouped(torch.cat([p & 15, p >> 4], 1), s),
        lambda n, k: [bytes_(n, k // 2), rand(n, k // 32)], f"uint4 {GROUPS}"),
    "nibbles, halves of the rows": Format(
        lambda p, s: grouped(torch.cat([p >> 4, p & 15]), s),
        lambda n, k: [bytes_(n // 2, k), rand(n, k // 32)], f"uint4 {GROUPS}"),
    "nibbles, by arithmetic": Format(
        lambda p, s: grouped(torch.stack([p % 16, p // 16], -1).flatten(1), s),
        lambda n, k: [bytes_(n, k // 2), rand(n, k // 32)], f"uint4 {GROUPS}"),
    "nibbles, strided writes": Format(
        strided, lambda n, k: [bytes_(n, k // 2), rand(n, k // 32)], f"int4 {GROUPS}"),
    "words, strided writes": Format(
        word_writes, lambda n, k: [ints(n, k // 8), rand(n, k // 32)], f"int4 {GROUPS}"),
    "two bits in blocks of rows": Format(
        row_blocks, lambda n, k: [bytes_(n // 4, k), rand(1)],
        "table2 tensor q*s bf16 None bf16 bf16 table=fp32"),
    "three bits, ten a word": Format(
        ten_a_word, lambda n, k: [ints(-(-n // 10), k), rand(n, 1)], f"uint3 {CHANNEL}"),
    "gptq of three bits": Format(
        gptq3, lambda n, k: [gptq3_words(n, k), rand(k // 32, n, dtype=FP16)],
        "int3 group-32 q*s fp16 None fp16 fp16", KN),
    "gptq with act-order": Format(
        gptq,
        lambda n, k: [words32(k // 8, n), words32(k // 32, n // 8), rand(k // 32, n, dtype=FP16),
                      shuffled(k)],
        "uint4 group-32 (q-z)*s fp16 int16 fp16 fp16 permuted", KN),
    "awq": Format(
        awq, lambda n, k: [ints(k, n // 8), ints(k // 32, n // 8), rand(k // 32, n, dtype=FP16)],
        "uint4 group-32 (q-z)*s fp16 int16 fp16 fp16", KN),
    "five bits in two tensors": Format(
        half_planes, lambda n, k: [bytes_(n, k // 2), bytes_(n, k // 8), rand(n, k // 32)],
        f"uint5 {GROUPS}"),
    "trits": Format(trits, lambda n, k: [trit_bytes(n, k), rand(n, 1)], f"int2 {CHANNEL}"),
    "trits, as a fraction": Format(
        wrapped_trits, lambda n, k: [fractions(n, k), rand(n, 1)], f"int2 {CHANNEL}"),
    "five bits in fields of seven": Format(
        fields, lambda n, k: [ints(n, k // 8, high=1 << 56, dtype=I64), rand(n, 1)],
        f"uint8 {CHANNEL}"),
    "five bits in fields of six": Format(
        lambda p, s: (torch.stack([p >> 6 * i & 31 for i in range(5)], -1).flatten(1)[:, :96])
        .bfloat16() * s,
        lambda n, k: [ints(n, 20), rand(n, 1)], f"uint5 {CHANNEL}"),
    "bits": Format(
        lambda p, s: grouped(unstreamed(p, 1).to(torch.int8) * 2 - 1, s),
        lambda n, k: [bytes_(n, k // 8), rand(n, k // 32)], f"table1 {GROUPS} table=fp32"),
    "bits as bool": Format(
        lambda q, s: grouped(torch.where(q, 1, -1), s),
        lambda n, k: [ints(n, k, high=2, dtype=torch.bool), rand(n, k // 32)], f"int2 {GROUPS}"),
    "bools that are multiplied": Format(
        lambda q, s: q * s, lambda n, k: [ints(n, k, high=2, dtype=torch.bool), rand(n, 1)],
        f"uint2 {CHANNEL}"),
    "q4_0": Format(q4_0, with_halves(18, 32, (0,)), "int4 group-32 q*s fp16 None fp16 fp16"),
    "q4_1": Format(q4_1, with_halves(20, 32, (0, 2)), "uint4 group-32 q*s+z fp16 fp16 fp16 fp16"),
    "q5_0": Format(q5_0, with_halves(22, 32, (0,)), "int5 group-32 q*s fp16 None fp16 fp16"),
    "q8_0": Format(q8_0, with_halves(34, 32, (0,)), "int8 group-32 q*s fp16 None fp32 fp32"),
    "q4_k": Format(q4_k, with_halves(144, 256, (0, 2)), "uint4 group-32 q*s+z fp32 fp32 fp32 fp32"),
    "codes and zeros": Format(
        codes_and_zeros,
        lambda n, k: [torch.cat([bytes_(n, k // 2), zeros(n, k // 32, dtype=U8)], 1),
                      rand(n, k // 32)],
        "uint4 group-32 (q-z)*s bf16 uint8 bf16 bf16"),
    **{
        f"table by {how}": Format(
            looked_up(how), lambda n, k: [bytes_(n, k // 2), normal(16), rand(n, k // 32)],
            f"table4 {GROUPS} table=fp32")
        for how in ("index", "flat", "take", "embedding", "gather")
    },
    "table of 5": Format(looked_up_bytes, table_of_each(5), f"table4 {GROUPS} table=fp32"),
    "table of 200": Format(looked_up_bytes, table_of_each(200), f"table8 {GROUPS} table=fp32"),
    "table of 256": Format(looked_up_bytes, table_of_each(256), f"table8 {GROUPS} table=fp32"),
    "table in the graph": Format(
        held_table, lambda n, k: [bytes_(n, k // 2), rand(n, k // 32)], f"float4_e2m1fn {GROUPS}"),
    "table and sign": Format(
        signed_table, lambda n, k: [bytes_(n, k // 2), rand(n, k // 32)],
        f"float4_e2m1fn {GROUPS}"),
    "three values": Format(
        where_tree, lambda n, k: [ints(n, k, high=3, dtype=U8), rand(n, 1, dtype=FP32)],
        "table2 channel q*s fp32 None fp32 bf16 table=fp32"),
    "e2m1 by its bits": Format(
        computed_fp4, lambda n, k: [bytes_(n, k // 2), rand(n, k // 32, dtype=FP32)],
        "float4_e2m1fn group-32 q*s fp32 None fp32 bf16"),
    "unscaled table": Format(
        lambda q, t: t[q.int()], lambda n, k: [bytes_(n, k), normal(256)],
        "table8 no scale q None None bf16 bf16 table=fp32"),
    "nf4 with int8 scales": Format(
        nf4,
        lambda n, k: [bytes_(n * k // 2), int8(n * k // 32),
                      rand(n * k // 32 // 64, dtype=FP32) / 128, rand(1, dtype=FP32) + 2,
                      NF4.clone()],
        "table4 group-32 q*s fp32 None fp32 bf16 table=fp32"),
    "nvfp4, multiplies the scale": Format(
        nvfp4("multiplies the scale"), fp4_leaves,
        "float4_e2m1fn group-16 q*s fp32 None fp32 fp32"),
    "nvfp4, divides the scale": Format(
        nvfp4("divides the scale"), fp4_leaves, "float4_e2m1fn group-16 q*s fp32 None fp32 fp32"),
    "nvfp4, multiplies first": Format(
        nvfp4("multiplies first"), fp4_leaves,
        "float4_e2m1fn group-16 q*t*s float8_e4m3fn None fp32 fp32 outer=fp32"),
    "nvfp4, multiplies last": Format(
        nvfp4("multiplies last"), fp4_leaves,
        "float4_e2m1fn group-16 q*s*t float8_e4m3fn None fp32 fp32 outer=fp32"),
    "nvfp4, divides first": Format(
        nvfp4("divides first"), fp4_leaves,
        "float4_e2m1fn group-16 q/t*s float8_e4m3fn None fp32 fp32 outer=fp32"),
    "nvfp4, divides last": Format(
        nvfp4("divides last"), fp4_leaves,
        "float4_e2m1fn group-16 q*s/t float8_e4m3fn None fp32 fp32 outer=fp32"),
    "nvfp4 in bf16, divides last": Format(
        nvfp4("divides last"), lambda n, k: fp4_leaves(n, k, BF16),
        "float4_e2m1fn group-16 q*s/t float8_e4m3fn None bf16 bf16 outer=bf16"),
    "fp4 with scales in tiles": Format(
        tiled, lambda n, k: [bytes_(max(n, 256), 64), rand(max(n, 256) * 8).to(E4M3)],
        "float4_e2m1fn group-16 q*s float8_e4m3fn None bf16 bf16"),
    "fp4 with e8m0 scales in tiles": Format(
        tiled, lambda n, k: [bytes_(max(n, 256), 64), e8m0(max(n, 256) * 8)],
        "float4_e2m1fn group-16 q*s fp32 None bf16 bf16"),
    **{
        f"mxfp4 by {how}": Format(
            by_power(how), lambda n, k: [bytes_(n, k // 2), small(n, k // 32)],
            f"float4_e2m1fn {GROUPS}")
        for how in ("pow", "exp2", "bits")
    },
    "mxfp4 by ldexp": Format(
        by_power("ldexp"), lambda n, k: [bytes_(n, k // 2), small(n, k // 32)],
        f"float4_e2m1fn {GROUPS}"),
    "mxfp4 by e8m0": Format(
        by_power("e8m0"), lambda n, k: [bytes_(n, k // 2), e8m0(n, k // 32)],
        "float4_e2m1fn group-32 q*s bf16 None bf16 bf16"),
    "mxfp8 by e8m0": Format(
        lambda q, s: grouped(q.bfloat16(), s.bfloat16()),
        lambda n, k: [fp8(n, k), e8m0(n, k // 32)],
        "float8_e4m3fn group-32 q*s bf16 None bf16 bf16"),
    "integers, shifted": Format(
        shifted, lambda n, k: [bytes_(n, k // 2), ints(n, k // 32, high=12, dtype=U8)],
        "int4 group-32 q*s fp32 None fp32 fp32"),
    "shifted ones": Format(
        shifted_ones, lambda n, k: [int8(n, k), ints(n, k // 32, high=12, dtype=U8)],
        "int8 group-32 q*s int16 None bf16 bf16"),
    "codes that are powers": Format(
        power_codes, lambda n, k: [ints(n, k, high=16, dtype=U8), rand(n, k // 32, dtype=FP32)],
        "table4 group-32 q*s fp32 None fp32 fp32 table=fp32"),
    "a number of a wider type": Format(
        lambda q, s: q.bfloat16() * s, lambda n, k: [int8(n, k), torch.tensor(0.0371)],
        "int8 tensor q*s fp32 None fp32 bf16"),
    "a wider zero": Format(
        lambda q, s, z: (q.bfloat16() - z) * s,
        lambda n, k: [int8(n, k), rand(n, 1), torch.tensor(3.37)],
        "int8 channel (q-z)*s bf16 fp32 bf16 bf16"),
    "multiplied and added at once": Format(
        lambda q, s, z: torch.addcmul(z, q.bfloat16(), s),
        lambda n, k: [int8(n, k), rand(n, 1), normal(n, 1)],
        "int8 channel q*s+z bf16 bf16 fp32 bf16"),
    "square roots": Format(
        lambda q, s: grouped(q, s.sqrt()), lambda n, k: [int8(n, k), rand(n, k // 32)],
        f"int8 {GROUPS}"),
    "logarithms": Format(
        lambda q, s: grouped(q, s.exp()), lambda n, k: [int8(n, k), rand(n, k // 32)],
        f"int8 {GROUPS}"),
    "int8 scales": Format(
        lambda q, s, t, m: grouped(q, (s.unflatten(1, (-1, 2)) * t.unsqueeze(2) + m).flatten(1)),
        lambda n, k: [int8(n, k), int8(n, k // 16), rand(n, k // 32) / 128, rand(1) + 1],
        "int8 group-16 q*s bf16 None bf16 bf16"),
    "scales in e4m3, a step a row": Format(
        lambda q, s, t: grouped(q, s.bfloat16() * t),
        lambda n, k: [int8(n, k), rand(n, k // 32).to(E4M3), rand(n, 1)], f"int8 {GROUPS}"),
    **{
        f"part by {how}": Format(part(how), parts, f"int8 {GROUPS}")
        for how in ("split", "chunk", "unbind", "select", "narrow")
    },
    "part of the columns": Format(
        lambda q, s: grouped(q, s).chunk(3, 1)[1],
        lambda n, k: [int8(n, 3 * k), rand(n, 3 * k // 32)], f"int8 {GROUPS}"),
    "experts of nibbles": Format(
        lambda p, s: grouped(nibbles(p).to(torch.int8) - 8, s),
        lambda n, k: [bytes_(4, n // 4, k // 2), rand(4, n // 4, k // 32)], f"int4 {GROUPS}", ENK),
    "experts of e2m1": Format(
        held_table, lambda n, k: [bytes_(4, n // 4, k // 2), rand(4, n // 4, k // 32)],
        f"float4_e2m1fn {GROUPS}", ENK),
    "experts, one of a stack": Format(
        lambda q, s: grouped(q, s)[2],
        lambda n, k: [int8(4, n, k), rand(4, n, k // 32)], f"int8 {GROUPS}"),
}  # fmt: skip
