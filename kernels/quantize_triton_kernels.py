"""Device code of the Triton family of activation quantisers.

A program has a tile [rows, groups, elements of a group]; a thread loads 16 bytes at once. All is
computed in float32, and rounded to a narrower dtype after each operation where the contract has
that. F is a `Form`: what is constant for a contract.

LIB: whether CUDA's library is there. HARD: whether the instruction that converts to float8 is.
"""

import triton
import triton.language as tl

from qinductor.kernels.quantize_triton_numbers import (
    ABS,
    HALVES,
    activated,
    as_bits,
    as_float,
    as_float8,
    at_least,
    at_most,
    divided,
    divider,
    integral,
    largest,
    power_of_two,
    rounded,
    times,
    wide,
)

PARTS = tl.constexpr(512)  # programs of `extremes`, at most


@triton.jit
def _normed(x, weight, F: tl.constexpr, LIB: tl.constexpr):
    """RMS norm over the last two axes, which hold a whole row."""
    total = tl.sum(tl.sum(x * x, 2), 1)
    if LIB:  # as eager on a GPU: no division
        scale = tl.inline_asm_elementwise(
            "rsqrt.approx.f32 $0, $1;", "=f,f", [total * F.mean + F.eps], tl.float32, True, 1
        )
    else:
        mean = tl.div_rn(total, tl.full(total.shape, F.k, tl.float32))
        scale = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(mean + F.eps))
    return rounded(weight * rounded(x * scale[:, None, None], F.x), F.x)


@triton.jit
def _loaded(
    x_ptr, x_stride, u_ptr, u_stride, w_ptr, sum_ptr, row, column, taken,
    F: tl.constexpr, LIB: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """y of a tile, in float32, 0 where it is not taken; x + residual is stored where SUM is set."""
    x = wide(tl.load(x_ptr + row * x_stride + column, taken, 0.0), LIB)
    if F.second:
        u = tl.load(u_ptr + row * u_stride + column, taken, 0.0)
    if F.norm != "":
        if F.norm == "add+rms":
            x = rounded(x + wide(u, LIB), F.x)
            if SUM:
                tl.store(sum_ptr + row * F.k + column, x.to(F.x), taken)
        weight = tl.load(w_ptr + column, column < F.k, 0.0).to(tl.float32)
        x = _normed(x, weight, F, LIB)
    if F.limit >= 0:
        x = at_most(x, F.limit)
        if F.gated:
            u = at_least(at_most(wide(u, LIB), F.limit), -F.limit)
    if F.activation != "":
        NAME: tl.constexpr = F.activation
        if F.widen:
            x = rounded(x, F.product)
        x = activated(x, NAME, F.product, F.x != tl.float32, LIB)
    if F.gated:
        if F.widen:
            u = rounded(wide(u, LIB), F.product)
        x = times(x, u, F.product, LIB)
    if F.narrow:
        x = rounded(x, F.y)
    return x


@triton.jit
def _high(y, F: tl.constexpr):
    """Bits of |y|, or of max(y, 0), as integers: in their order nan is the largest."""
    return as_bits(at_least(y, 0.0) if F.zero else y) & ABS


@triton.jit
def _low(y):
    """Bits of -min(y, 0)."""
    return as_bits(at_least(-y, 0.0)) & ABS


@triton.jit
def _beside(x, number: tl.constexpr):
    """A number in float32 in the shape of x: Triton takes subnormal ones for float64."""
    return tl.full(x.shape, number, tl.float32)


@triton.jit
def _scale(amax, F: tl.constexpr):
    """s, and amax as far as it is used again."""
    amax = rounded(amax, F.compute)
    if F.blank > 0:
        amax = tl.where(amax > 0, amax, _beside(amax, F.blank))
    if F.least > 0:
        amax = at_least(amax, _beside(amax, F.least))
    if F.inverse > 0:
        s = rounded(amax * F.inverse, F.compute)
    else:
        s = rounded(tl.div_rn(amax, _beside(amax, F.qmax)), F.compute)
    if F.floor > 0:
        s = at_least(s, _beside(s, F.floor))
    if F.most > 0:
        s = at_most(s, _beside(s, F.most))
    if F.empty != 0:
        s = tl.where(s == 0, _beside(s, F.empty), s)
    POWER: tl.constexpr = F.power
    if POWER != "":
        s = power_of_two(s, POWER)
    return s, amax


@triton.jit
def _spread(a, F: tl.constexpr):
    """A number, or one for each group, to be broadcast."""
    return a if F.whole else a[:, :, None]


@triton.jit
def _quotient(y, s, amax, F: tl.constexpr, LIB: tl.constexpr):
    """y / s as the contract has it, of tensors [rows, groups] s and amax, or of numbers."""
    T: tl.constexpr = F.inner
    y = rounded(y, T)
    if F.quotient == "x/s":
        if LIB:
            p, m, r = divider(s)
            p, m, r = _spread(p, F), _spread(m, F), _spread(r, F)
            v = y * p * r if F.power != "" else divided(y, p, m, r)
        else:
            v = tl.div_rn(y, tl.broadcast_to(_spread(s, F), y.shape))
    elif F.quotient == "x*(1/s)":
        inverse = rounded(tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s), T)
        if F.guard >= 0:
            inverse = tl.where(s <= F.guard, 0.0, inverse)
        v = y * _spread(inverse, F)
    elif F.quotient == "x*s":
        v = y * _spread(s, F)
    else:
        amax = rounded(amax, T)
        ratio = rounded(tl.div_rn(tl.full(amax.shape, F.top, tl.float32), amax), T)
        v = y * _spread(ratio, F)
    v = rounded(v, T)
    return v + 0.0 if F.plus else v


@triton.jit
def _coded(v, zero, F: tl.constexpr, HARD: tl.constexpr):
    """Codes as uint8; of nan, where they are integers, 0."""
    if F.zero:
        v = rounded(integral(v) + zero, F.inner)
    if F.clamps:
        v = at_most(at_least(v, F.low), F.high)
    if F.mantissa > 0:
        code = as_float8(v, F, HARD)
    else:
        v = tl.where(v == v, v, 0.0)
        code = v.to(tl.int32).to(tl.uint8) if F.truncate else as_bits(v + HALVES).to(tl.uint8)
    return code


@triton.jit
def _zero(low, s, F: tl.constexpr):
    """The zero point, of min(y, 0)."""
    ratio = rounded(tl.div_rn(rounded(low, F.inner), s), F.inner)
    zero = rounded(F.low - integral(ratio), F.inner)
    return at_most(at_least(zero, F.low), F.high)


@triton.jit
def _store_scale(at, s, taken, F: tl.constexpr):
    """s in the dtype of the contract."""
    if F.scale == "e8m0":
        bits = as_bits(s)
        exponent, rest = (bits >> 23) & 0xFF, bits & 0x7FFFFF
        # Halfway the last bit decides, of which a subnormal s has none.
        up = (rest > 0x400000) | ((rest == 0x400000) & (exponent > 0))
        exponent = tl.where(up & (exponent < 255), exponent + 1, exponent)
        tl.store(at, exponent.to(tl.uint8), taken)
    elif F.scale == "bytes":
        tl.store(at, ((as_bits(s) >> 23) & 0xFF).to(tl.uint8), taken)
    else:
        tl.store(at, s.to(F.stored), taken)


@triton.jit
def _store_packed(s_ptr, s_row, s_group, row, group, s, F: tl.constexpr, BM: tl.constexpr,
                  BG: tl.constexpr, taken):  # fmt: skip
    """Exponents of four groups in a word, the first in its lowest byte."""
    exponent = (as_bits(s) >> 23) & 0xFF
    exponent = tl.where(group < F.groups, exponent, 0)
    if BG == 1:  # the only group
        tl.store(s_ptr + row * s_row, exponent, taken)
    else:
        ACROSS: tl.constexpr = (F.groups + BG - 1) // BG
        word = tl.program_id(0) % ACROSS * (BG // 4) + tl.arange(0, BG // 4)[None, :]
        shifts = (tl.arange(0, BG) % 4 * 8)[None, :]
        parts = (exponent << shifts).reshape(BM, BG // 4, 4)
        at = s_ptr + row * s_row + word * s_group
        tl.store(at, tl.sum(parts, 2), taken & (word * 4 < F.groups))


@triton.jit
def _place(tile, T, batch, F: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr,
           GP: tl.constexpr):  # fmt: skip
    """Of a tile: rows of the batch [BM], rows of all [BM, 1, 1], groups [BG], columns, which of
    them there are."""
    ACROSS: tl.constexpr = (F.k + G * BG - 1) // (G * BG)
    t = tile // ACROSS * BM + tl.arange(0, BM)
    group = tile % ACROSS * BG + tl.arange(0, BG)
    inside = tl.arange(0, GP)
    column = group[:, None] * G + inside[None, :]
    taken = column < F.k
    if GP != G:
        taken = taken & (inside < G)[None, :]
    row = (batch * T + t).to(tl.int64)
    return t, row[:, None, None], group, column[None, :, :], taken[None, :, :]


@triton.jit
def extremes(
    x_ptr, x_stride, u_ptr, u_stride, w_ptr, parts_ptr, T, tiles,
    F: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr, GP: tl.constexpr,
    LIB: tl.constexpr,
):  # fmt: skip
    """Bits of the largest |y|, or of max(y, 0) and -min(y, 0), of the tiles of each program."""
    high = tl.zeros((BM, BG, GP), tl.int32)
    low = tl.zeros((BM, BG, GP), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        t, row, _, column, taken = _place(tile, T, 0, F, G, BM, BG, GP)
        taken = taken & (t < T)[:, None, None]
        y = _loaded(
            x_ptr, x_stride, u_ptr, u_stride, w_ptr, x_ptr, row, column, taken, F, LIB, False
        )
        high = tl.maximum(high, _high(y, F))
        if F.zero:
            low = tl.maximum(low, _low(y))
    tl.store(parts_ptr + tl.program_id(0), tl.max(high))
    if F.zero:
        tl.store(parts_ptr + PARTS + tl.program_id(0), tl.max(low))


@triton.jit
def quantise(
    x_ptr, x_stride, u_ptr, u_stride, w_ptr, given_ptr, codes_ptr, s_ptr, s_batch, s_row, s_group,
    z_ptr, sum_ptr, limit_ptr, T, parts,
    F: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr, GP: tl.constexpr,
    MASKED: tl.constexpr, LIB: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """Codes and scales of tiles of y: BM rows, BG groups of G elements.

    given_ptr  scale where it is given; the parts' extremes where it is that of the whole tensor
    T          rows of each batch; with MASKED of each batch only the first limit_ptr[batch]
    """
    batch = tl.program_id(1)
    t, row, group, column, taken = _place(tl.program_id(0), T, batch, F, G, BM, BG, GP)
    there = t < (tl.minimum(tl.load(limit_ptr + batch), T) if MASKED else T)
    taken = taken & there[:, None, None]
    y = _loaded(x_ptr, x_stride, u_ptr, u_stride, w_ptr, sum_ptr, row, column, taken, F, LIB, True)
    if F.static:
        s = tl.load(given_ptr).to(tl.float32)
        amax, low = s, s
    else:
        if F.whole:
            part = tl.arange(0, PARTS)
            high = as_float(tl.max(tl.load(given_ptr + part, part < parts, 0), 0))
            if F.zero:
                low = as_float(tl.max(tl.load(given_ptr + PARTS + part, part < parts, 0), 0))
        else:
            if F.zero:
                high = largest(at_least(y, 0.0), 2, LIB)
                low = largest(at_most(y, 0.0), 2, LIB)
            else:
                high = largest(y, 2, LIB)
        if F.zero:
            high = rounded(rounded(high, F.compute) + rounded(low, F.compute), F.compute)
        s, amax = _scale(high, F)
    inner = rounded(s, F.inner)
    zero = inner
    if F.zero:
        zero = _zero(-low, inner, F)
    code = _coded(_quotient(y, inner, amax, F, LIB), _spread(zero, F), F, HARD)
    tl.store(codes_ptr + row * F.k + column, code, taken)
    if F.whole:
        first = tl.program_id(0) == 0
        _store_scale(s_ptr, s, first, F)
        if F.zero:
            tl.store(z_ptr, _integer(zero, F), first)
    else:
        t, there = t.to(tl.int64)[:, None], there[:, None]
        at = s_ptr + batch.to(tl.int64) * s_batch
        if F.scale == "packed":
            _store_packed(at, s_row, s_group, t, group[None, :], s, F, BM, BG, there)
        else:
            there = there & (group < F.groups)[None, :]
            _store_scale(at + t * s_row + group[None, :] * s_group, s, there, F)
        if F.zero:
            at = z_ptr + (batch * T + t) * F.groups + group[None, :]
            tl.store(at, _integer(zero, F), there)


@triton.jit
def _integer(zero, F: tl.constexpr):
    """A zero point in its dtype; of nan, where that is of integers, 0."""
    if F.zeros.is_int():
        zero = tl.where(zero == zero, zero, 0.0)
    return zero.to(F.zeros)


def compile_checks():
    """(name, check) of every kernel."""
    from qinductor.kernels.quantize_triton_checks import checks

    return list(checks())
