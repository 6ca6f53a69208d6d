"""Device code of the Triton family of scaled_matmul: products of codes, scaled where they must be.

A program makes the tile [BM rows of a, BN rows of W] of the result, slices of BS columns at a time.
What is summed without a scale stays in the tensor cores; where a scale changes along k, or float8
sums ask for it, each slice's sum is added to float32 registers. F is a `Form`: what is constant for
a contract. Where SWAP is set W is the left operand of the product, so that few rows of a suffice
for its 64; weights of 4 bits always are, from registers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Bytes of two's complement nibbles as `fragments8` packs them: the lower half of each byte, then
# the upper one. Of int8 16 times the value; of e4m3 2^-9 times, whose bits are 0x80 | -v or v.
_INT8 = tl.constexpr(
    "{ .reg .b32 x; shl.b32 x, $2, 4; and.b32 $0, x, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0; }"
)
_E4M3 = tl.constexpr("""{ .reg .b32 s, x, y;
shl.b32 x, $2, 4; and.b32 x, x, 0x80808080; lop3.b32 x, $2, 0x07070707, x, 0xEA;
shr.u32 s, x, 7; and.b32 s, s, 0x01010101; add.u32 $0, x, s;
shr.u32 y, $2, 4; and.b32 y, y, 0x07070707; lop3.b32 y, $2, 0x80808080, y, 0xEA;
shr.u32 s, y, 7; and.b32 s, s, 0x01010101; add.u32 $1, y, s; }""")


@triton.jit
def _nibbles(q, F: tl.constexpr, ASM: tl.constexpr):
    """(lower, upper) codes of bytes, int8 with the bits of a number in F.code."""
    if F.code == "int8":
        if ASM:
            low, high = tl.inline_asm_elementwise(_INT8, "=r,=r,r", [q], (tl.int8,) * 2, True, 4)
        else:
            low, high = q << 4, q & -16
    elif ASM:
        low, high = tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [q], (tl.int8,) * 2, True, 4)
    else:
        low = ((q << 4) & -128) | (q & 7)
        high = (q & -128) | ((q >> 4) & 7)
        low, high = low + ((low >> 7) & 1), high + ((high >> 7) & 1)
    return low, high


@triton.jit
def _fragments(ptr, row, k, KP, F: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """W[row : row + BN, k : k + 64 C] of `fragments8`."""
    R: tl.constexpr = BN // 64
    start = (row // 64).to(tl.int64) * (KP * 32) + k * 32
    place = (tl.arange(0, R) * (KP * 32))[:, None] + tl.arange(0, C * 2048)[None, :]
    q = tl.load(ptr + start + place)
    # rows / 64, tiles of columns, warp, row g, columns t, step and half, byte, which row of two
    q = q.reshape(R, C, 4, 8, 4, 4, 4)
    low, high = _nibbles(q, F, ASM)
    w = tl.join(low, high).permute(0, 2, 7, 3, 1, 5, 4, 6).reshape(BN, C * 64)
    if F.wide:
        w = _half(w, 3)
    elif F.code == "e4m3":
        w = w.to(tl.float8e4nv, bitcast=True)
    return w


@triton.jit
def _half(codes, MANTISSA: tl.constexpr):
    """Bytes of e4m3 or e5m2, by bits of the mantissa, as float16, exactly."""
    bits = codes.to(tl.int16)
    if MANTISSA == 3:
        half = ((bits & 128) << 8) | ((bits & 127) << 7)
        out = half.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        out = tl.where((bits & 127) == 127, float("nan"), out).to(tl.float16)
    else:
        out = (bits << 8).to(tl.int16).to(tl.float16, bitcast=True)
    return out


@triton.jit
def _tile(source, stride, row, k, K, limit, WIDE: tl.constexpr, B: tl.constexpr,
          BS: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """[B rows, BS columns] of codes, WIDE: of float8 with so many bits of mantissa as float16; rows
    past the limit may be anything, columns past K are 0."""
    if TMA:
        out = source.load([row, k])
    else:
        rows = tl.minimum(row + tl.arange(0, B), limit - 1)
        columns = k + tl.arange(0, BS)
        place = source + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        mask = (columns < K)[None, :]
        out = tl.load(place) if EVEN_K else tl.load(place, mask=mask, other=0.0)
    if WIDE > 0:
        out = _half(out, WIDE)
    return out


@triton.jit
def _scale(ptr, mask, E8M0: tl.constexpr):
    """Scales in float32, 0 where the mask is not set; E8M0: they are bytes of exponents."""
    s = tl.load(ptr, mask, 0)
    if E8M0:
        bits = s.to(tl.int32)
        bits = tl.where(bits == 255, 0x7FC00000, tl.where(bits == 0, 0x400000, bits << 23))
        s = bits.to(tl.float32, bitcast=True)
    return s.to(tl.float32)


@triton.jit
def _rows(sa_ptr, sa_row, sa_group, m, k, M, K, F: tl.constexpr):
    """Scales of these rows of a at column k."""
    place = sa_ptr + tl.minimum(m, M - 1).to(tl.int64) * sa_row
    if F.rows == "group":
        place += (k // F.group).to(tl.int64) * sa_group
    return _scale(place, m * 0 + k < K, F.a_e8m0)


@triton.jit
def _columns(sw_ptr, sw_row, sw_group, n, k, N, K, F: tl.constexpr):
    """Scales of these rows of W at column k."""
    n = tl.minimum(n, N - 1)
    if F.bn == 0:
        n = n * 0
    elif F.bn > 1:
        n = n // F.bn
    place = sw_ptr + n.to(tl.int64) * sw_row
    if F.bk > 0:
        place += (k // F.bk).to(tl.int64) * sw_group
    return _scale(place, n * 0 + k < K, F.w_e8m0)


@triton.jit
def _zeros(z_ptr, z_row, z_group, m, k, M, K, F: tl.constexpr):
    """(what of the zero points of these rows of a at column k is in the range of the codes, the
    rest)."""
    place = z_ptr + tl.minimum(m, M - 1).to(tl.int64) * z_row
    if F.rows == "group":
        place += (k // F.group).to(tl.int64) * z_group
    z = tl.load(place, m * 0 + k < K, 0)
    if z.dtype.is_floating():
        z = z.to(tl.float32)
    elif z.dtype != tl.int64:
        z = tl.maximum(z.to(tl.int32), -2147483520)  # what is subtracted now leaves it in int32
    z = z - F.less
    inside = tl.minimum(tl.maximum(z, -128), 127).to(tl.int32)
    return inside, (z - inside).to(tl.float32)


@triton.jit
def _centred(part, z, rest, sums_ptr, n, k, N, K, F: tl.constexpr, BS: tl.constexpr,
             SWAP: tl.constexpr):  # fmt: skip
    """Sums of a slice of BS columns in float32, without zero points of a times the sums of codes
    of W, whose rows are n. Exact, but for the rest of the zero points."""
    n = tl.minimum(n, N - 1)
    q = n * 0
    for i in tl.static_range(BS // F.summed if F.summed > 0 else 1):
        at = k // F.summed + i if F.summed > 0 else 0
        mask = n * 0 + k + i * F.summed < K
        q += tl.load(sums_ptr + tl.cast(at, tl.int64) * N + n, mask, 0)
    part = part - (q[:, None] * z[None, :] if SWAP else z[:, None] * q[None, :])
    part = part.to(tl.float32)
    if F.zero == "wide":
        q = q.to(tl.float32)
        part -= q[:, None] * rest[None, :] if SWAP else rest[:, None] * q[None, :]
    return part


@triton.jit
def _added(acc, part, sa_ptr, sa_row, sa_group, sw_ptr, sw_row, sw_group, row, column, k, M, N, K,
           F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr):  # fmt: skip
    """The sums and those of one slice, with the scales that change along k."""
    part = part.to(tl.float32)
    m = row + tl.arange(0, BM)
    if F.rows == "group" and F.columns == "grid" and F.bn > 1 and F.bn < BN and BN % F.bn == 0:
        # Rows of W that share a scale are an axis of their own: one product of scales serves them.
        NB: tl.constexpr = BN // F.bn
        n = column + tl.arange(0, NB) * F.bn
        c = _columns(sw_ptr, sw_row, sw_group, n, k, N, K, F)
        r = _rows(sa_ptr, sa_row, sa_group, m, k, M, K, F)
        if SWAP:
            s = (c[:, None] * r[None, :])[:, None, :]
            acc = tl.fma(part.reshape(NB, F.bn, BM), s, acc.reshape(NB, F.bn, BM)).reshape(BN, BM)
        else:
            s = (r[:, None] * c[None, :])[:, :, None]
            acc = tl.fma(part.reshape(BM, NB, F.bn), s, acc.reshape(BM, NB, F.bn)).reshape(BM, BN)
        return acc
    if F.columns == "grid":
        if F.bn == 0 or F.bn % BN == 0:  # one for the tile
            c = _columns(sw_ptr, sw_row, sw_group, column, k, N, K, F)
            if F.rows != "group":
                acc = tl.fma(part, c, acc)
        else:
            n = column + tl.arange(0, BN)
            c = _columns(sw_ptr, sw_row, sw_group, n, k, N, K, F)
            c = c[:, None] if SWAP else c[None, :]
            if F.rows != "group":
                acc = tl.fma(part, c, acc)
            else:
                part = part * c
    if F.rows == "group":
        r = _rows(sa_ptr, sa_row, sa_group, m, k, M, K, F)
        if F.columns == "grid" and (F.bn == 0 or F.bn % BN == 0):
            r = r * c
        acc = tl.fma(part, r[None, :] if SWAP else r[:, None], acc)
    elif F.columns != "grid":
        acc += part
    return acc


@triton.jit
def _finished(acc, sa_ptr, sa_row, sw_ptr, sw_row, z_ptr, z_row, sums_ptr, bias_ptr, m, n, M, N,
              F: tl.constexpr):  # fmt: skip
    """The result of sums [BM, BN] in float32: what does not change along k, and the bias."""
    if F.zero != "" and not F.promote:
        z, rest = _zeros(z_ptr, z_row, 0, m, 0, M, 1, F)
        acc = _centred(acc, z, rest, sums_ptr, n, 0, N, 1, F, 0, False)
    acc = acc.to(tl.float32)
    if F.columns == "row":
        acc = acc * _columns(sw_ptr, sw_row, 0, n, 0, N, 1, F)[None, :]
    bias = tl.zeros((1, 1), tl.float32)
    if F.bias:
        bias = tl.load(bias_ptr + n, n < N, 0).to(tl.float32)[None, :]
    if F.rows != "group":
        acc = tl.fma(acc, _rows(sa_ptr, sa_row, 0, m, 0, M, 1, F)[:, None], bias)
    elif F.bias:
        acc += bias
    return acc


@triton.constexpr_function
def mantissa(number, wide):
    """Bits of the mantissa of a float8 that is multiplied as float16; 0 of others."""
    return {"e4m3": 3, "e5m2": 2}[number] if wide else 0


@triton.jit
def _placed(tile, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """(first row of a, first row of W) of a tile: eight rows of tiles at a time, for the cache."""
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    band = tile // (8 * columns)
    high = tl.minimum(rows - band * 8, 8)
    inside = tile - band * 8 * columns
    return (band * 8 + inside % high) * BM, (inside // high) * BN


@triton.jit
def sums_of(
    a, a_stride, w, w_stride, sa_ptr, sa_row, sa_group, sw_ptr, sw_row, sw_group, z_ptr, z_row,
    z_group, sums_ptr, row, column, w_row, M, N, K, begin, end, F: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA_A: tl.constexpr, TMA_W: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The sums of a tile, from step `begin` of BK columns to `end`: rows of a from `row` on, rows
    of W from `column` on, which lie at `w_row` of w. Scales that change along k are in them."""
    # Columns of W that are fetched at once: a thread's 16 bytes hold 64 of 4 bits.
    BW: tl.constexpr = 64 if F.four and BS < 64 else BS
    WIDE_A: tl.constexpr = mantissa(F.a, F.wide)
    WIDE_W: tl.constexpr = mantissa(F.code, F.wide)
    SUMS: tl.constexpr = tl.float32 if F.promote else F.sums
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), SUMS)
    CAREFUL: tl.constexpr = F.promote and F.out == tl.float32  # its last bits are the sums' own
    if CAREFUL:
        excess = tl.zeros(acc.shape, tl.float32)  # of acc, by the roundings of its sums
    rows = row + tl.arange(0, BM)
    if F.zero != "" and F.promote and F.rows != "group":
        z, rest = _zeros(z_ptr, z_row, 0, rows, 0, M, 1, F)
    for step in tl.range(begin, end, num_stages=STAGES):
        for j in tl.static_range(BK // BW):
            first = step * BK + j * BW
            if F.four:
                wide = _fragments(w, w_row, first, w_stride, F, BN, BW // 64, ASM)
            else:
                wide = _tile(w, w_stride, w_row, first, K, N, WIDE_W, BN, BS, EVEN_K, TMA_W)
            if BW > BS:
                both = wide.reshape(BN, 2, BS).permute(0, 2, 1).split()
            for i in tl.static_range(BW // BS):
                k = first + i * BS
                x = _tile(a, a_stride, row, k, K, M, WIDE_A, BM, BS, EVEN_K, TMA_A)
                y = both[i] if BW > BS else wide
                if not F.promote:
                    acc = tl.dot(y, x.T, acc, out_dtype=SUMS) if SWAP else tl.dot(
                        x, y.T, acc, out_dtype=SUMS
                    )  # fmt: skip
                    if F.four and ASM:
                        # Else Triton (3.6 to 3.9) writes W's registers again while the product
                        # still reads them.
                        acc = tl.inline_asm_elementwise("", "=r,0", [acc], acc.dtype, True, 1)
                else:
                    sums = tl.dot(y, x.T, out_dtype=F.sums) if SWAP else tl.dot(
                        x, y.T, out_dtype=F.sums
                    )  # fmt: skip
                    if F.zero != "":
                        if F.rows == "group":
                            z, rest = _zeros(z_ptr, z_row, z_group, rows, k, M, K, F)
                        sums = _centred(
                            sums, z, rest, sums_ptr, column + tl.arange(0, BN), k, N, K, F, BS, SWAP
                        )
                    term = _added(
                        -excess if CAREFUL else acc, sums, sa_ptr, sa_row, sa_group, sw_ptr,
                        sw_row, sw_group, row, column, k, M, N, K, F, BM, BN, SWAP,
                    )  # fmt: skip
                    if CAREFUL:
                        whole = acc + term
                        excess = (whole - acc) - term
                        acc = whole
                    else:
                        acc = term
    return acc


@triton.jit(do_not_specialize=["M", "split", "sa_group", "z_group"])
def product(
    a, a_stride, w, w_stride, sa_ptr, sa_row, sa_group, sw_ptr, sw_row, sw_group, z_ptr, z_row,
    z_group, sums_ptr, bias_ptr, out_ptr, out_stride, M, N, K, split, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out[M, N]. Programs: tiles of the result x `split` parts of K; where PARTS is set their sums
    go to out[split, M, N] for `sum_parts`. a and w are pointers, or where TMA is set descriptors;
    of fragments w_stride is their padded K."""
    if PARTS and PDL:
        gdc_launch_dependents()
    row, column = _placed(tl.program_id(0), M, N, BM, BN)
    part = tl.program_id(1)
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, split)
    acc = sums_of(
        a, a_stride, w, w_stride, sa_ptr, sa_row, sa_group, sw_ptr, sw_row, sw_group, z_ptr, z_row,
        z_group, sums_ptr, row, column, column, M, N, K, part * share,
        tl.minimum(steps, (part + 1) * share), F, BM, BN, BK, BS, STAGES, EVEN_K, SWAP, TMA, TMA,
        ASM,
    )  # fmt: skip
    if SWAP:
        acc = acc.trans(1, 0)
    m, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
    mask = (m < M)[:, None] & (n < N)[None, :]
    place = m.to(tl.int64)[:, None] * out_stride + n[None, :]
    if PARTS:
        tl.store(out_ptr + part.to(tl.int64) * M * N + place, acc, mask=mask)
    else:
        out = _finished(
            acc, sa_ptr, sa_row, sw_ptr, sw_row, z_ptr, z_row, sums_ptr, bias_ptr, m, n, M, N, F
        )
        tl.store(out_ptr + place, out.to(F.out), mask=mask)


@triton.jit(do_not_specialize=["M", "split"])
def sum_parts(
    parts_ptr, sa_ptr, sa_row, sw_ptr, sw_row, z_ptr, z_row, sums_ptr, bias_ptr, out_ptr,
    out_stride, M, N, split, F: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[M, N] from the sums [split, M, N], always added in one order."""
    row = tl.program_id(0)
    n = tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32 if F.promote else F.sums)
    if PDL:  # launched while the product still runs
        gdc_wait()
    for part in range(split):
        at = (tl.cast(part, tl.int64) * M + row) * N
        acc += tl.load(parts_ptr + at + n, mask=n < N, other=0)
    m = row + tl.arange(0, 1)
    out = _finished(
        acc[None, :], sa_ptr, sa_row, sw_ptr, sw_row, z_ptr, z_row, sums_ptr, bias_ptr, m, n, M, N,
        F,
    )  # fmt: skip
    place = m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out_ptr + place, out.to(F.out), mask=(n < N)[None, :])


def compile_checks():
    """(name, check) of the products and of their sums."""
    from qinductor.kernels.scaled_matmul_triton_checks import checks

    return list(checks())
