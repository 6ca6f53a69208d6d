"""Device code of the Triton family of activation quantisers: float32 numbers as eager has them.

Where LIB is set (a GPU) exp, erf and tanh are those of CUDA's library, which eager has, too; else
(interpreter) they are the interpreter's. LIB is 2 on the GPUs of `quantize_triton.SEEN`.
"""

import struct

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

ABS = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
HALVES = tl.constexpr(12582912.0)  # 1.5 * 2^23: floats beside it are integers


def _floats(*words: int) -> tl.constexpr:
    """The float32 numbers of these bits."""
    return tl.constexpr(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *words)))


# Polynomials of CUDA's erf: of |x| from the border on, of x^2 below it
_BORDER = _floats(0x3F8060FE)
_FAR = _floats(
    0x38EB4C3A, 0xBAAE005B, 0x3C09919F, 0xBD24D99A, 0x3E235519, 0x3F69B4F9, 0x3F210A14
)  # fmt: skip
_NEAR = _floats(
    0x38B1E96A, 0xBA574D20, 0x3BAAD5EA, 0xBCDC1BE7, 0x3DE718AF, 0xBEC093AC, 0x3E0375D3
)  # fmt: skip


@triton.jit
def rounded(x, T: tl.constexpr):
    """x as T keeps it, in float32."""
    if T != tl.float32:
        x = x.to(T).to(tl.float32)
    return x


@triton.jit
def at_least(x, bound):
    """The larger one, as torch has it: nan stays."""
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(x, bound):
    return tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def integral(x):
    """x rounded to an integer, to nearest even; at 2^22 and more, something as large."""
    return (x + HALVES) - HALVES


@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


# exp(-x) as CUDA's library has it, bit for bit, in two instructions less
_EXP_MINUS = tl.constexpr("""{ .reg .f32 t, j, a; .reg .b32 b;
fma.rn.ftz.sat.f32 t, $1, 0fBBBB989D, 0f3F000000; fma.rm.ftz.f32 j, t, 0f437C0000, 0f4B400001;
sub.rn.f32 a, 0f4B40007F, j; fma.rn.ftz.f32 a, $1, 0fBFB8AA3B, a;
fma.rn.ftz.f32 a, $1, 0fB2A57060, a; ex2.approx.ftz.f32 a, a;
mov.b32 b, j; shl.b32 b, b, 23; mov.b32 j, b; mul.rn.f32 $0, a, j; }""")


@triton.jit
def _exp_minus(x, LIB: tl.constexpr):
    """exp(-x)"""
    if LIB:
        out = tl.inline_asm_elementwise(_EXP_MINUS, "=f,f", [x], tl.float32, True, 1)
    else:
        out = tl.exp(-x)
    return out


@triton.jit
def wide(x, LIB: tl.constexpr):
    """x in float32; of bf16 both halves of a word at once, which Triton makes three steps of."""
    if LIB and x.dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [x], tl.float32, True, 2
        )
    else:
        out = x.to(tl.float32)
    return out


_MUL_BF16 = tl.constexpr("""{ .reg .b32 zero;
mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }""")
_MUL_FP16 = tl.constexpr("mul.rn.f16x2 $0, $1, $2;")


@triton.jit
def times(a, b, T: tl.constexpr, LIB: tl.constexpr):
    """a * b rounded to T, of numbers that T has, in it or in float32; two at once of 16 bits."""
    if LIB and T != tl.float32:
        TEXT: tl.constexpr = _MUL_BF16 if T == tl.bfloat16 else _MUL_FP16
        out = tl.inline_asm_elementwise(TEXT, "=r,r,r", [a.to(T), b.to(T)], T.value, True, 2)
        out = wide(out, LIB)
    else:
        out = rounded(a.to(tl.float32) * b.to(tl.float32), T)
    return out


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr, LIB: tl.constexpr):
    """The largest |x| along an axis; nan where there is one."""
    if not LIB:  # where a reduction of one's own is slow
        return as_float(tl.max(as_bits(x) & ABS, axis))
    return tl.reduce(tl.abs(x), axis, _larger)


@triton.jit
def _tanh(x, LIB: tl.constexpr):
    if LIB:
        out = libdevice.tanh(x)
    else:
        e = tl.exp(-2.0 * tl.abs(x))
        out = (1.0 - e) / (1.0 + e)
        out = tl.where(x < 0, -out, out)
    return out


@triton.jit
def _erf(x, LIB: tl.constexpr):
    if LIB:
        size = tl.abs(x)
        far = size >= _BORDER[0]
        t = tl.where(far, size, x * x)
        p = tl.where(far, _FAR[0], _NEAR[0])
        for i in tl.static_range(1, 7):
            p = tl.fma(p, t, tl.where(far, _FAR[i], _NEAR[i]))
        u = tl.where(far, -size, x)
        out = tl.fma(p, u, u)
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [out], tl.float32, True, 1
        )
        sign = as_bits(x) ^ as_bits(size)
        out = tl.where(far, as_float(as_bits(1.0 - power) | sign), out)
    else:
        out = tl.erf(x)
    return out


@triton.jit
def _less(c, a, b):
    """c - a * b, rounded once; on a GPU."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 n; neg.f32 n, $2; fma.rn.f32 $0, n, $3, $1; }", "=f,f,f,f", [c, a, b],
        tl.float32, True, 1,
    )  # fmt: skip


@triton.jit
def _over_one_more(x, e, FEW: tl.constexpr, LIB: tl.constexpr):
    """x / (1 + e), rounded to nearest, for e >= 0."""
    if LIB and FEW:
        # Of a quarter of both, the reciprocal of which is no subnormal number. A step of Newton and
        # one of Markstein are right for all significands of 8 and 11 bits by all of 24, whatever
        # last bit the guess has; but for 1 / (2 - 2^-23), where it must be right. Where the
        # remainder may be subnormal or nan, 1 + e is 1, 2 or infinite, and the guess exact.
        d, y = tl.fma(e, 0.25, 0.25), x * 0.25
        guess = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], tl.float32, True, 1
        )
        r = tl.fma(guess, _less(1.0, d, guess), guess)
        q = y * r
        q = tl.fma(_less(y, d, q), r, q)
        out = tl.where((as_bits(d) & 0x7FFFFF) == 0, y * guess, q)
    else:
        out = tl.div_rn(x, 1.0 + e)
    return out


@triton.jit
def divider(s):
    """(p, m, r) for `divided` by s: m is s by a power of two p, r its reciprocal."""
    size = as_bits(s) & ABS
    exponent = tl.minimum(size >> 23, 252)
    p = as_float((253 - exponent) << 23)
    one = tl.full(s.shape, 1.0, tl.float32)
    special = (size == 0) | (size >= INF)
    m = tl.where(special, 1.0, s * p)
    return tl.where(special, tl.div_rn(one, s), p), m, tl.div_rn(one, m)


@triton.jit
def divided(x, p, m, r):
    """x / s, rounded to nearest (Markstein); below 2^-100 and above 2^100 only about."""
    y = x * p
    q = y * r
    rest = _less(y, m, q)
    size = as_bits(rest) & ABS  # of an infinite quotient the remainder is infinite or nan
    return tl.where((size > 0) & (size < INF), tl.fma(rest, r, q), q)


# silu of x to within some 2^-18: of all x in bf16 it is rounded to what eager has, as a test sees
# where LIB is 2. Of a quarter of 1 + exp(-x), whose reciprocal is no subnormal number.
_SILU_BF16 = tl.constexpr("""{ .reg .f32 t, y;
fma.rn.f32 t, $1, 0fBFB8AA3B, 0fC0000000; ex2.approx.ftz.f32 t, t; add.rn.f32 t, t, 0f3E800000;
rcp.approx.ftz.f32 t, t; mul.rn.f32 y, $1, 0f3E800000; mul.rn.f32 $0, y, t; }""")


@triton.jit
def activated(x, NAME: tl.constexpr, T: tl.constexpr, FEW: tl.constexpr, LIB: tl.constexpr):
    """The activation of x, each of its operations rounded to T, in the order that eager has.

    FEW: x has no more than 11 bits."""
    if NAME == "silu" and FEW and LIB == 2 and T == tl.bfloat16:
        x = tl.inline_asm_elementwise(_SILU_BF16, "=f,f", [x], tl.float32, True, 1)
    elif NAME == "silu":
        x = _over_one_more(x, _exp_minus(x, LIB), FEW, LIB)
    elif NAME == "x*sigmoid":
        one = tl.full(x.shape, 1.0, tl.float32)
        x = x * rounded(_over_one_more(one, _exp_minus(x, LIB), True, LIB), T)
    elif NAME == "gelu":
        x = x * 0.5 * (_erf(x * 0.7071067811865476, LIB) + 1.0)
    elif NAME == "gelu_tanh":
        cube = x * x * x
        inner = 0.7978845608028654 * (tl.fma(cube, 0.044715, x) if LIB else x + 0.044715 * cube)
        x = 0.5 * x * (1.0 + _tanh(inner, LIB))
    elif NAME == "relu2":
        x = at_least(x, 0.0)
        x = x * x
    return rounded(x, T)


@triton.jit
def power_of_two(s, HOW: tl.constexpr):
    """The power of two that takes the place of a scale; 0, inf and nan stay."""
    small = s < 1.1754943508222875e-38  # no normal number
    bits = as_bits(tl.where(small, s * 16777216.0, s))
    fraction, exponent = bits & 0x7FFFFF, bits >> 23
    if HOW == "up":
        up = fraction > 0
    elif HOW == "down":
        up = fraction < 0
    elif HOW == "nearest":
        up = fraction > 0x3504F3  # of sqrt(1/2) in float32
    else:
        # log2(s), rounded to float32, is a whole number e where the fraction is no more than
        # ln 2 times half the distance of floats above e, which for e < 0 are nearer to 0.
        e = tl.where(small, exponent - 24, exponent) - 127
        n = tl.where(e < 0, -1 - e, e)
        most = tl.where(n < 8, 1, tl.where(n < 16, 2, tl.where(n < 32, 5, 11)))
        most = tl.where(n < 4, 0, tl.where(n < 64, most, tl.where(n < 128, 22, 44)))
        up = fraction > most
    found = as_float((exponent + up.to(tl.int32)) << 23)
    found = tl.where(small, found * 5.960464477539063e-08, found)
    return tl.where((s > 0) & (as_bits(s) < INF), found, s)


@triton.jit
def as_float8(v, F: tl.constexpr, HARD: tl.constexpr):
    """Codes in float8 as uint8, rounded to nearest even."""
    bits = as_bits(v)
    size, sign = bits & ABS, (bits >> 24) & 0x80
    SHIFT: tl.constexpr = 23 - F.mantissa
    if HARD:
        code = v.to(F.codes).to(tl.uint8, bitcast=True)
        if not F.saturates:
            beyond = (size >= F.beyond) & (size <= INF)
            code = tl.where(beyond, (sign | F.last).to(tl.uint8), code)
    else:
        code = size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)
        code = (code >> SHIFT) - ((127 - F.bias) << F.mantissa)
        small = as_bits(as_float(size) + F.units) - F.units_bits
        code = tl.where(size < ((128 - F.bias) << 23), small, code)
        code = tl.where(size >= F.beyond, F.last, code)
        code = (tl.where(size > INF, 0x7F, code) | sign).to(tl.uint8)
    return code


def compile_checks():
    """(name, check) of the kernel that only looks for extremes."""
    from qinductor.kernels.quantize_triton_checks import extremes

    return list(extremes())
