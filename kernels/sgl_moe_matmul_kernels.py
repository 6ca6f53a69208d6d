"""Device code of `cutlass_w4a8_moe_mm`: int4 weights in their owner's own layout as e4m3 codes.

Of a row of 64 bytes (128 columns) a thread takes 16: in each byte the lower half is an even column
and the upper one the odd column after it. Tensor cores want four columns in a register, and sums
do not depend on the order of columns: x is laid out once in the order in which a weight's registers
come, so that halves of bytes need no interleaving and nothing moves between threads.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Two's complement nibbles v as bytes of e4m3 of v * 2^-9, whose bits are |v| and the sign: |v| of
# all eight at once, then the lower halves of bytes, then the upper ones.
_CODES = tl.constexpr("""{ .reg .b32 t, s, y;
and.b32 t, $2, 0x88888888; shr.u32 s, t, 3; sub.u32 y, t, s;
lop3.b32 y, $2, 0x77777777, y, 0x6A; add.u32 y, y, s; shl.b32 s, t, 4;
lop3.b32 $0, y, s, 0x0F0F0F0F, 0xE4; shr.u32 y, y, 4; lop3.b32 $1, y, t, 0x0F0F0F0F, 0xE4; }""")


@triton.jit
def _codes(q, ASM: tl.constexpr):
    """(lower, upper) halves of bytes as codes of e4m3, 2^-9 times their values."""
    if ASM:
        low, high = tl.inline_asm_elementwise(_CODES, "=r,=r,r", [q], (tl.int8,) * 2, True, 4)
    else:
        low, high = (q << 4) >> 4, q >> 4
        low, high = (low & -128) | tl.abs(low), (high & -128) | tl.abs(high)
    return low, high


@triton.jit
def _table(offsets_ptr, sizes_ptr, table_ptr, block, T, tiles, E, EP: tl.constexpr,
           BT: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """BT entries (expert, first row, last row + 1) of the table of tiles, and how many there are
    in all behind the last."""
    i = tl.arange(0, EP)
    start = tl.load(offsets_ptr + i, i < E, 0)
    m = tl.load(sizes_ptr + 3 * i + 1, i < E, 0)
    start = tl.minimum(tl.maximum(start, 0), T)
    end = start + tl.minimum(tl.maximum(m, 0), T - start)
    own = (end - start + BM - 1) // BM
    upto = tl.cumsum(own, 0)
    if block == 0:
        tl.store(table_ptr + 3 * tiles, tl.minimum(tl.max(upto, 0), tiles))
    tile = block * BT + tl.arange(0, BT)
    expert = tl.sum((upto[None, :] <= tile[:, None]).to(tl.int32), 1)
    here = i[None, :] == expert[:, None]
    first = tile[:, None] - (upto - own)[None, :]
    first = tl.sum(tl.where(here, start[None, :] + first * BM, 0), 1)
    last = tl.minimum(first + BM, tl.sum(tl.where(here, end[None, :], 0), 1))
    mask = tile < tiles
    tl.store(table_ptr + 3 * tile, expert, mask)
    tl.store(table_ptr + 3 * tile + 1, first, mask)
    tl.store(table_ptr + 3 * tile + 2, last, mask)


@triton.jit(do_not_specialize=["T", "tiles", "tables", "E"])
def arrange(
    x_ptr, x_row, y_ptr, offsets_ptr, sizes_ptr, table_ptr, T, K, tiles, tables, E,
    EP: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[T, K], x with the columns of each 128 in the order of a weight's registers; and the table
    of tiles of `product`. Both are words of four columns; the first `tables` programs write the
    table."""
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    if block < tables:
        _table(offsets_ptr, sizes_ptr, table_ptr, block, T, tiles, E, EP, BT, BM)
    else:
        groups = K // 128
        group = (block - tables).to(tl.int64) * B + tl.arange(0, B)
        mask = (group < T.to(tl.int64) * groups)[:, None]
        place = group // groups * x_row + group % groups * 32
        word = tl.arange(0, 32)[None, :]
        x = tl.load(x_ptr + place[:, None] + word, mask, 0)
        # thread, register, half of eight columns
        a, b = x.reshape(B, 4, 4, 2).split()
        even = (a & 0xFF) | ((a >> 8) & 0xFF00) | ((b & 0xFF) << 16) | ((b << 8) & -0x1000000)
        a, b = a >> 8, b >> 8
        odd = (a & 0xFF) | ((a >> 8) & 0xFF00) | ((b & 0xFF) << 16) | ((b << 8) & -0x1000000)
        y = tl.join(even, odd).permute(0, 2, 3, 1).reshape(B, 32)
        tl.store(y_ptr + group[:, None] * 32 + word, y, mask)


@triton.jit
def _weight(ptr, ASM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """W[BN, 128] as `arrange` has columns, from the addresses of its bytes [BN, 64] in the order of
    rows of `_rows`."""
    low, high = _codes(tl.load(ptr), ASM)
    # rows of all warps, r, warp, row g, thread t, word, byte, half
    w = tl.join(low, high).reshape(BN // (16 * WARPS), 2, WARPS, 8, 4, 4, 4, 2)
    w = w.permute(0, 2, 1, 3, 5, 7, 4, 6).reshape(BN, 128)
    return w.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _rows(BN: tl.constexpr, WARPS: tl.constexpr):
    """Rows of a weight in the order in which threads load them: a warp's product has rows g and
    g + 8 of its 16 in one thread, its load g and g + 8 * WARPS."""
    ALL: tl.constexpr = 16 * WARPS
    i = tl.arange(0, BN)
    return i // ALL * ALL + i // 8 % WARPS * 16 + i // (ALL // 2) % 2 * 8 + i % 8


@triton.jit
def _tile(
    pointers, sizes, expert, first, last, column, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, FOUR: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out[first : last, column : column + BN], of one expert and at most BM rows."""
    y_ptr, w_ptr, s_ptr, scale_ptr, out_ptr = pointers
    out_row, T, N, K = sizes
    expert = expert.to(tl.int64)
    most = N - 1
    rows = tl.minimum(column + _rows(BN, WARPS), most).to(tl.int64) + expert * N
    w_rows = w_ptr + rows[:, None] * (K // 2) + tl.arange(0, 64)[None, :]
    m, n = first + tl.arange(0, BM), column + tl.arange(0, BN)
    mask = (m < last)[:, None]
    x_rows = y_ptr + m.to(tl.int64)[:, None] * K + tl.arange(0, 128)[None, :]
    s_base = expert * (K // 128) * N
    inside = tl.minimum(n, most)
    acc = tl.zeros((BN, BM), tl.float32)
    begin, end = 0, K
    if PARTS:
        share = tl.cdiv(K // BK, tl.num_programs(1)) * BK
        begin = tl.program_id(1) * share
        end = tl.minimum(K, begin + share)
    for k in tl.range(begin, end, BK, num_stages=STAGES):
        for j in tl.static_range(BK // 128):
            g = (k >> 7) + j
            if FOUR:  # [K / 512, N, 4]: words of two groups
                if j % 2 == 0:
                    at = (s_base >> 1) + (g >> 2) * (2 * N) + inside * 2 + ((g >> 1) & 1)
                    both = tl.load(s_ptr + at)
                upper = (g & 1) == 1 if BK == 128 else j % 2 == 1
            else:  # [K / 128, N]: words of two rows
                at = s_base + g * N
                both = tl.load(s_ptr + ((at + inside) >> 1))
                upper = (((at & 1).to(tl.int32) + inside) & 1) == 1
            s = tl.where(upper, both & -65536, both << 16).to(tl.float32, bitcast=True)
            x = tl.load(x_rows + k + j * 128, mask=mask, other=0.0)
            part = tl.dot(_weight(w_rows + (k >> 1) + j * 64, ASM, BN, WARPS), x.trans(1, 0))
            acc = tl.fma(part, s[:, None], acc)
    place = m.to(tl.int64)[:, None] * out_row + n[None, :]
    if PARTS:
        place += tl.program_id(1).to(tl.int64) * T * out_row
    else:
        acc = _finished(acc, scale_ptr)
    out = acc.trans(1, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, out, mask & (n < N)[None, :])


@triton.jit
def _finished(acc, scale_ptr):
    """The result of sums over codes, which are 2^-9 times a weight."""
    return acc * 512.0 * tl.load(scale_ptr)


@triton.jit
def _halved(
    pointers, sizes, expert, first, last, column, BM: tl.constexpr, LEAST: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, FOUR: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`_tile` of BM rows, or of as few halves of that as hold the rows, of LEAST or more."""
    if BM > LEAST:
        if last - first <= BM // 2:
            _halved(
                pointers, sizes, expert, first, last, column, BM // 2, LEAST, BN, BK, FOUR,
                PARTS, STAGES, WARPS, ASM,
            )  # fmt: skip
        else:
            _tile(
                pointers, sizes, expert, first, last, column, BM, BN, BK, FOUR, PARTS, STAGES,
                WARPS, ASM,
            )  # fmt: skip
    else:
        _tile(
            pointers, sizes, expert, first, last, column, BM, BN, BK, FOUR, PARTS, STAGES,
            WARPS, ASM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "T"])
def product(
    y_ptr, w_ptr, s_ptr, scale_ptr, out_ptr, out_row, table_ptr, tiles, T, N, K,
    BM: tl.constexpr, LEAST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FOUR: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[rows of each tile, N]: tiles of `arrange`'s table, all of them for the same rows of each
    weight before the next ones. Where PARTS is set a program has a part of K, and the sums go to
    out[parts, T, N] for `sum_parts`."""
    if PDL:
        if PARTS:
            gdc_launch_dependents()
        gdc_wait()
    count = tl.load(table_ptr + 3 * tiles)
    if tl.program_id(0) >= count * tl.cdiv(N, BN):
        return
    tile, column = tl.program_id(0) % count, tl.program_id(0) // count * BN
    expert = tl.load(table_ptr + 3 * tile)
    first, last = tl.load(table_ptr + 3 * tile + 1), tl.load(table_ptr + 3 * tile + 2)
    pointers = (y_ptr, w_ptr, s_ptr, scale_ptr, out_ptr)
    _halved(
        pointers, (out_row, T, N, K), expert, first, last, column, BM, LEAST, BN, BK, FOUR,
        PARTS, STAGES, WARPS, ASM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "T", "parts"])
def sum_parts(
    parts_ptr, scale_ptr, out_ptr, out_row, table_ptr, tiles, T, N, parts, BM: tl.constexpr,
    B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[rows of each tile, N] from the sums [parts, T, N], always added in one order."""
    if PDL:  # launched while the product still runs
        gdc_wait()
    tile = tl.program_id(0)
    if tile >= tl.load(table_ptr + 3 * tiles):
        return
    first, last = tl.load(table_ptr + 3 * tile + 1), tl.load(table_ptr + 3 * tile + 2)
    m, n = (first + tl.arange(0, BM)).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    mask = (m < last)[:, None] & (n < N)[None, :]
    acc = tl.zeros((BM, B), tl.float32)
    for part in range(parts):
        place = (tl.cast(part, tl.int64) * T + m)[:, None] * N + n[None, :]
        acc += tl.load(parts_ptr + place, mask, 0.0)
    out = _finished(acc, scale_ptr).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + m[:, None] * out_row + n[None, :], out, mask)


def compile_checks():
    """(name, check) of products, and of x laid out."""
    from qinductor.kernels.sgl_moe_matmul_checks import checks

    return list(checks())
