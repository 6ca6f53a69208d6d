"""Device code of the Triton family of dequant_matmul: W from its codes, in registers.

The 16 bytes of codes that a thread loads (`fragments` has their order) are the elements that its
tensor core instruction takes from it: nothing moves between threads after the load.

Where ASM is set two elements go through one 32-bit register: LOP3 takes the codes out and puts an
exponent over them, which makes floats of them; an add takes it off again, and a multiplication
scales. Else (interpreter) plain Triton computes the same values. Every operation rounds as the
graph's own did. F is a `Form`: what is constant for a weight format.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _pieces(width, over):
    """PTX: all fields of this width of two int16, each field as two int16, under the bits `over`.

    One LOP3 takes a field out and puts an exponent over it; ptxas would not make one of two.
    """
    count, mask = 16 // width, ((1 << width) - 1) * 0x10001
    lines = [
        f"shr.u32 x, ${count}, {width * j}; lop3.b32 ${j}, x, {mask}, {over * 0x10001}, 0xEA;"
        for j in range(count)
    ]
    return "{ .reg .b32 x; " + " ".join(lines) + " }"


@triton.constexpr_function
def _moved(shift):
    """PTX: sign and magnitude of the four e2m1 floats in each of two int16, the magnitude as far
    up as `shift` says."""
    lines = [
        f"sh{'l' if up >= 0 else 'r'}.b32 x, $4, {abs(up)}; and.b32 x, x, {7 * 0x10001 << shift}; "
        f"shl.b32 y, $4, {12 - 4 * j}; lop3.b32 ${j}, y, 0x80008000, x, 0xEA;"
        for j, up in enumerate(shift - 4 * j for j in range(4))
    ]
    return "{ .reg .b32 x, y; " + " ".join(lines) + " }"


@triton.constexpr_function
def _shift(form):
    """Bits that a mantissa of one bit has below it in the float that a code becomes."""
    return 6 if form.number == tl.bfloat16 else 9


@triton.constexpr_function
def _outputs(count):
    return "=r," * count + "r"


@triton.constexpr_function
def _over(form):
    """Bits that codes have over them as they are taken out: of 128 in bf16, of 1024 in fp16."""
    return (0x4300 if form.number == tl.bfloat16 else 0x6400) if form.kind == "magic" else 0


@triton.constexpr_function
def _shifted(width):
    return f"{{ .reg .b32 x; shl.b32 x, $1, {width}; or.b32 $0, x, $2; }}"


@triton.jit
def _joined4(a, b, c, d):
    """[..., upper bit, lower bit] of the place in a word."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _joined8(a, b, c, d, e, f, g, h):
    return tl.join(_joined4(a, c, e, g), _joined4(b, d, f, h))


@triton.jit
def _field(
    q, WIDTH: tl.constexpr, OVER: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    ASM: tl.constexpr, MOVED: tl.constexpr = 0,
):  # fmt: skip
    """int16[64 R, C * 256 / WIDTH] of fields under the bits OVER, or of e2m1 floats whose bits are
    MOVED, from int16[R, C * 1024] as `fragments` packs it."""
    # rows / 64, tiles of columns, warp, row g, pair of columns t, four words i, which of the pair
    q = q.reshape(R, C, 4, 8, 4, 4, 2)
    if WIDTH == 8:
        if ASM:
            a, b = tl.inline_asm_elementwise(
                _pieces(8, OVER), _outputs(2), [q], (tl.int16,) * 2, True, 2
            )
        else:
            a, b = q & 255, (q >> 8) & 255
        w = tl.join(a.reshape(R, C, 4, 8, 4, 2, 2, 2), b.reshape(R, C, 4, 8, 4, 2, 2, 2))
        w = w.permute(0, 2, 8, 3, 1, 5, 6, 4, 7)
    elif WIDTH == 4:
        if ASM:
            TEXT: tl.constexpr = _moved(MOVED) if MOVED > 0 else _pieces(4, OVER)
            a, b, c, d = tl.inline_asm_elementwise(TEXT, _outputs(4), [q], (tl.int16,) * 4, True, 2)
        else:
            a, b, c, d = q & 15, (q >> 4) & 15, (q >> 8) & 15, (q >> 12) & 15
        w = _joined4(a, b, c, d).permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    elif WIDTH == 2:
        if ASM:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                _pieces(2, OVER), _outputs(8), [q], (tl.int16,) * 8, True, 2
            )
        else:
            a, b, c, d = q & 3, (q >> 2) & 3, (q >> 4) & 3, (q >> 6) & 3
            e, f, g, h = (q >> 8) & 3, (q >> 10) & 3, (q >> 12) & 3, (q >> 14) & 3
        w = _joined8(a, b, c, d, e, f, g, h).permute(0, 2, 9, 3, 1, 7, 5, 8, 4, 6)
    else:
        if ASM:
            a, b, c, d, e, f, g, h, i, j, k, u, m, n, o, p = tl.inline_asm_elementwise(
                _pieces(1, OVER), _outputs(16), [q], (tl.int16,) * 16, True, 2
            )
        else:
            a, b, c, d = q & 1, (q >> 1) & 1, (q >> 2) & 1, (q >> 3) & 1
            e, f, g, h = (q >> 4) & 1, (q >> 5) & 1, (q >> 6) & 1, (q >> 7) & 1
            i, j, k, u = (q >> 8) & 1, (q >> 9) & 1, (q >> 10) & 1, (q >> 11) & 1
            m, n, o, p = (q >> 12) & 1, (q >> 13) & 1, (q >> 14) & 1, (q >> 15) & 1
        w = tl.join(_joined8(a, c, e, g, i, k, m, o), _joined8(b, d, f, h, j, u, n, p))
        w = w.permute(0, 2, 10, 3, 1, 7, 8, 5, 9, 4, 6)
    return w.reshape(R * 64, C * 256 // WIDTH)


_BYTE_BF16 = tl.constexpr("""{ .reg .f32 a, b; .reg .b32 x, y;
prmt.b32 x, $1, 0x4B000000, 0x7540; prmt.b32 y, $1, 0x4B000000, 0x7542;
mov.b32 a, x; mov.b32 b, y; add.rn.f32 a, a, 0fCB000000; add.rn.f32 b, b, 0fCB000000;
mov.b32 x, a; mov.b32 y, b; prmt.b32 $0, x, y, 0x7632; }""")  # through fp32: 2^23 + code


@triton.constexpr_function
def _float_bits(bits, shift):
    """PTX: sign and magnitude of a float of so many bits, moved to where a wider float has them."""
    magnitude, sign = ((1 << bits - 1) - 1) * 0x10001, (1 << bits - 1) * 0x10001
    return (
        f"{{ .reg .b32 x, y; and.b32 x, $1, {magnitude}; shl.b32 x, x, {shift}; "
        f"and.b32 y, $1, {sign}; shl.b32 y, y, {16 - bits}; or.b32 $0, x, y; }}"
    )


_MUL_BF16 = tl.constexpr("""{ .reg .b32 zero;
mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }""")
_ADD_BF16 = tl.constexpr("""{ .reg .b32 one;
mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }""")
_SUB_BF16 = tl.constexpr("""{ .reg .b32 minus;
mov.b32 minus, 0xBF80BF80; fma.rn.bf16x2 $0, $2, minus, $1; }""")
_MUL_FP16 = tl.constexpr("mul.rn.f16x2 $0, $1, $2;")
_ADD_FP16 = tl.constexpr("add.rn.f16x2 $0, $1, $2;")
_SUB_FP16 = tl.constexpr("sub.rn.f16x2 $0, $1, $2;")


@triton.constexpr_function
def groups_in(form, columns):
    """Groups of columns with a scale each in so many columns."""
    return columns // form.group if 0 < form.group < columns else 1


@triton.jit
def _asm1(a, TEXT: tl.constexpr, T: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r,r", [a], T.value, True, 2)


@triton.jit
def _asm2(a, b, TEXT: tl.constexpr, T: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r,r,r", [a, b], T.value, True, 2)


@triton.jit
def _with(high, low, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """Codes with WIDTH more bits below."""
    return _asm2(high, low, _shifted(WIDTH), tl.int16) if ASM else (high << WIDTH) | low


@triton.jit
def _op(a, b, OP: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """a OP b, of * / + -, computed and rounded in T."""
    a, b = tl.broadcast(a.to(T), b.to(T))
    if T == tl.float32 or OP == "/" or not ASM:
        a, b = a.to(tl.float32), b.to(tl.float32)
        if OP == "*":
            out = a * b
        elif OP == "/":
            out = tl.div_rn(a, b)
        elif OP == "+":
            out = a + b
        else:
            out = a - b
        out = out.to(T)
    elif OP == "*":
        out = _asm2(a, b, _MUL_BF16 if T == tl.bfloat16 else _MUL_FP16, T)
    elif OP == "+":
        out = _asm2(a, b, _ADD_BF16 if T == tl.bfloat16 else _ADD_FP16, T)
    else:
        out = _asm2(a, b, _SUB_BF16 if T == tl.bfloat16 else _SUB_FP16, T)
    return out


@triton.jit
def _float(code, MAN: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """A float code's bits as those of T: the value, but for a power of two."""
    SHIFT: tl.constexpr = (7 if T == tl.bfloat16 else 10) - MAN
    if ASM:
        out = _asm1(code, _float_bits(BITS, SHIFT), T)
    else:
        magnitude = (code & ((1 << (BITS - 1)) - 1)) << SHIFT
        sign = (code & (1 << (BITS - 1))) << (16 - BITS)
        out = (magnitude | sign).to(tl.int16).to(T, bitcast=True)
    return out


@triton.jit
def _value(code, table_ptr, F: tl.constexpr, ASM: tl.constexpr):
    """What codes (int16) stand for, exactly, in F.number: an entry of a table, or F.factor * v +
    F.addend with v the code or float code, or for "magic" 128 + code in bf16, 1024 + code in fp16.
    """
    T: tl.constexpr = F.number
    if F.kind == "table":
        if not ASM:
            out = tl.load(table_ptr + code.to(tl.int32))
        else:  # no tl.load: it would be staged through shared memory
            WIDE: tl.constexpr = T == tl.float32
            out = tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];" if WIDE else "ld.global.nc.b16 $0, [$1];",
                "=r,l" if WIDE else "=h,l", [table_ptr + code.to(tl.int32)], T.value, True, 1,
            )  # fmt: skip
    else:
        if F.kind == "magic":
            out = (code if ASM else code | _over(F)).to(T, bitcast=True)
        elif F.kind == "byte":
            out = _asm1(code, _BYTE_BF16, T) if ASM else code.to(tl.float32).to(T)
        elif F.kind == "e2m1":
            out = code.to(T, bitcast=True) if ASM else _float(code, 1, 4, T, ASM)
        elif F.kind == "e4m3":
            out = _float(code, 3, 8, T, ASM)
        else:
            out = _float(code, 2, 8, T, ASM)
        if F.factor != 1:
            out = _op(out, tl.full((1, 1), F.factor, T), "*", T, ASM)
        if F.addend != 0:
            out = _op(out, tl.full((1, 1), F.addend, T), "+", T, ASM)
    return out


@triton.jit
def _scaled(v, s, z, t, STEP: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """One step of the arithmetic: "*s", "/t", "+z" and so on; "" is none."""
    if STEP == "*s":
        v = _op(v, s, "*", T, ASM)
    elif STEP == "/s":
        v = _op(v, s, "/", T, ASM)
    elif STEP == "*t":
        v = _op(v, t, "*", T, ASM)
    elif STEP == "/t":
        v = _op(v, t, "/", T, ASM)
    elif STEP == "+z":
        v = _op(v, z, "+", T, ASM)
    elif STEP == "-z*s":
        v = _op(v, _op(z, s, "*", T, ASM), "-", T, ASM)
    return v


@triton.jit
def weight(
    q0, q1, q2, s, z, t, table_ptr, F: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """W[64 R, BK] in F.x: from words of each field, scales and zeros [64 R, groups], row scales."""
    OVER: tl.constexpr = _over(F)
    MOVED: tl.constexpr = _shift(F) if F.kind == "e2m1" else 0
    code = _field(q0, F.w0, 0 if F.w1 > 0 else OVER, R, BK * F.w0 // 256, ASM, MOVED)
    if F.w1 > 0:
        part = _field(q1, F.w1, 0 if F.w2 > 0 else OVER, R, BK * F.w1 // 256, ASM)
        code = _with(code, part, F.w1, ASM)
    if F.w2 > 0:
        part = _field(q2, F.w2, OVER, R, BK * F.w2 // 256, ASM)
        code = _with(code, part, F.w2, ASM)
    NG: tl.constexpr = groups_in(F, BK)
    v = _value(code, table_ptr, F, ASM).reshape(R * 64, NG, BK // NG)
    s, z, t = s[:, :, None], z[:, :, None], t[:, None, None]
    if F.head == "q-z":
        v = _op(v, z, "-", F.inner, ASM)
    # Bound first: Triton 3.6 does not take a text of F as an argument.
    STEP1: tl.constexpr = F.step1
    STEP2: tl.constexpr = F.step2
    TAIL: tl.constexpr = F.tail
    v = v.to(F.compute)
    v = _scaled(v, s, z, t, STEP1, F.compute, ASM)
    v = _scaled(v, s, z, t, STEP2, F.compute, ASM)
    v = _scaled(v, s, z, t, TAIL, F.compute, ASM)
    return v.to(F.x).reshape(R * 64, BK)


def compile_checks():
    """(name, check) of W decoded and written out."""
    from qinductor.kernels.dequant_matmul_triton_checks import dequantised

    return list(dequantised())
