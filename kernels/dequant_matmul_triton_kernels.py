"""Device code of the Triton family of dequant_matmul: products with W, and W written out.

A program holds W as the left operand of its product, [BN rows of W, BK columns], and x as the
right one, [BK, BM rows of x]. F is a `Form`: what is constant for a weight format.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qinductor.kernels.dequant_matmul_triton_decode import groups_in, weight


@triton.jit
def _words(ptr, expert, row, k, WIDTH: tl.constexpr, N64, KP, R: tl.constexpr, BK: tl.constexpr):
    """The words of a field of W[row : row + 64 R, k : k + BK], int16[R, 4 * WIDTH * BK]."""
    block = KP * (4 * WIDTH)  # words of 64 rows
    start = (expert.to(tl.int64) * N64 + row // 64) * block + k * (4 * WIDTH)
    place = (tl.arange(0, R) * block)[:, None] + tl.arange(0, 4 * WIDTH * BK)[None, :]
    return tl.load(ptr + start + place)


@triton.jit
def _grid(ptr, expert, row, group, groups, NP, BN: tl.constexpr, NG: tl.constexpr, T: tl.constexpr):
    """[BN, NG] of the scales or zeros that `fragments.grid` packed, in T."""
    first = expert.to(tl.int64) * groups + group
    if T == tl.float32:
        place = tl.arange(0, NG)[:, None] * NP + tl.arange(0, BN)[None, :]
        out = tl.load(ptr + first * NP + row + place).trans(1, 0)
    else:  # pairs of rows 8 apart: 4 bytes can be copied without waiting, 2 cannot
        place = tl.arange(0, NG)[:, None] * (NP // 2) + tl.arange(0, BN // 2)[None, :]
        pair = tl.load(ptr + first * (NP // 2) + row // 2 + place)
        both = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)).reshape(NG, BN // 16, 8, 2)
        out = both.permute(1, 3, 2, 0).reshape(BN, NG).to(T, bitcast=True)
    return out


@triton.jit
def _columns(
    q0_ptr, q1_ptr, q2_ptr, s_ptr, z_ptr, s, z, t, table_ptr, expert, row, k, N64, KP,
    F: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """(W[row : row + 64 R, k : k + BK], its scales); s and z are what a whole row shares, if it
    does."""
    q0 = _words(q0_ptr, expert, row, k, F.w0, N64, KP, R, BK)
    q1, q2 = q0, q0
    if F.w1 > 0:
        q1 = _words(q1_ptr, expert, row, k, F.w1, N64, KP, R, BK)
    if F.w2 > 0:
        q2 = _words(q2_ptr, expert, row, k, F.w2, N64, KP, R, BK)
    if F.group > 0:
        NG: tl.constexpr = groups_in(F, BK)
        groups = tl.cdiv(KP, F.group)
        if F.scale:
            s = _grid(s_ptr, expert, row, k // F.group, groups, N64 * 64, R * 64, NG, F.scales)
        if F.zero:
            z = _grid(z_ptr, expert, row, k // F.group, groups, N64 * 64, R * 64, NG, F.zeros)
    return weight(q0, q1, q2, s, z, t, table_ptr + expert * F.entries, F, R, BK, ASM), s


@triton.jit
def _rows(s_ptr, z_ptr, t_ptr, expert, row, N64, F: tl.constexpr, BN: tl.constexpr):
    """(s, z [BN, 1], t [BN]) of whole rows; zeros where there are none."""
    s = tl.zeros((BN, 1), F.scales)
    z = tl.zeros((BN, 1), F.compute)
    t = tl.zeros((BN,), F.compute)
    if F.scale and F.group == 0:
        s = _grid(s_ptr, expert, row, 0, 1, N64 * 64, BN, 1, F.scales)
    if F.zero and F.group == 0:
        z = _grid(z_ptr, expert, row, 0, 1, N64 * 64, BN, 1, F.zeros)
    if F.outer:
        t = tl.load(t_ptr + expert.to(tl.int64) * N64 * 64 + row + tl.arange(0, BN))
    return s, z, t


@triton.jit
def _finished(acc, scale_ptr, bias_ptr, at, mask, F: tl.constexpr):
    """What the product makes of fp32 sums: the output scale and bias of output features `at`."""
    if F.output_scale:
        acc = acc.to(F.x).to(tl.float32) * tl.load(scale_ptr + at, mask, 0.0).to(tl.float32)
        acc = acc.to(F.x).to(tl.float32)
    if F.bias:
        acc += tl.load(bias_ptr + at, mask, 0.0).to(tl.float32)
    return acc.to(F.x)


@triton.jit
def _expert(offsets_ptr, place, T, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """(expert, first row of its tile, where its rows end, tile of columns) of a program among those
    of all tiles of sorted rows, then of the next columns. Rows past the last offset are expert
    E's. Programs that are too many come last, with columns that are too."""
    i = tl.arange(0, EP)
    end = tl.load(offsets_ptr + i, mask=i < E, other=0)
    start = tl.load(offsets_ptr + i - 1, mask=(i > 0) & (i < E), other=0)
    # tl.clamp takes no integers before Triton 3.9.
    start, end = tl.minimum(tl.maximum(start, 0), T), tl.minimum(tl.maximum(end, 0), T)
    start, end = tl.where(i == E, tl.max(end, 0), start), tl.where(i == E, T, end)
    tiles = tl.where((i <= E) & (end > start), (end - start + BM - 1) // BM, 0)
    upto = tl.cumsum(tiles, 0)
    count = tl.maximum(tl.max(upto, 0), 1)
    tile = place % count
    here = i == tl.sum((upto <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(here, start + (tile - upto + tiles) * BM, 0), 0)
    expert, end = tl.sum(tl.where(here, i, 0), 0), tl.sum(tl.where(here, end, 0), 0)
    return expert, first, end, place // count


@triton.jit
def _tile(
    pointers, sizes, expert, base, first, end, row, part, split, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The product of rows `first` to `end`, at most BM, of the expert's x, that begins at `base`,
    with rows of its W from `row` on."""
    x_ptr, q0_ptr, q1_ptr, q2_ptr, s_ptr, z_ptr, t_ptr, table_ptr = pointers[:8]
    scale_ptr, bias_ptr, out_ptr = pointers[8:]
    x_stride, rows, N, K, N64, KP = sizes
    R: tl.constexpr = BN // 64
    LATE: tl.constexpr = F.late and F.group > 0
    m = first + tl.arange(0, BM)
    x_rows = x_ptr + (base + m).to(tl.int64)[:, None] * x_stride
    s, z, t = _rows(s_ptr, z_ptr, t_ptr, expert, row, N64, F, BN)
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, split)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(part * share, tl.minimum(steps, (part + 1) * share), num_stages=STAGES):
        k = step * BK
        columns = k + tl.arange(0, BK)
        mask = m[:, None] < end
        if not EVEN_K:
            mask = mask & (columns[None, :] < K)
        x = tl.load(x_rows + columns[None, :], mask=mask, other=0.0)
        w, scale = _columns(
            q0_ptr, q1_ptr, q2_ptr, s_ptr, z_ptr, s, z, t, table_ptr, expert, row, k, N64, KP,
            F, R, BK, ASM,
        )  # fmt: skip
        sums = tl.dot(w, x.trans(1, 0), None if LATE else acc)
        if ASM:
            # A use of the sums here makes Triton wait for the product before W's registers are
            # written again; it would not (3.6 to 3.9), and then results are wrong now and then.
            sums = tl.inline_asm_elementwise("", "=r,0", [sums], tl.float32, True, 1)
        acc = tl.fma(sums, tl.broadcast_to(scale.to(tl.float32), (BN, BM)), acc) if LATE else sums
    if F.late and F.group == 0:
        acc = acc * s.to(tl.float32)
    n = row + tl.arange(0, BN)
    mask = (m < end)[None, :] & (n < N)[:, None]
    at = (base + m).to(tl.int64)[None, :] * N + n[:, None]
    if not PARTS:
        at_expert = expert * N + n[:, None]
        acc = _finished(acc, scale_ptr, bias_ptr, at_expert, n[:, None] < N, F)
        tl.store(out_ptr + at, acc, mask=mask)
    else:
        tl.store(out_ptr + part.to(tl.int64) * rows * N + at, acc, mask=mask)


@triton.jit
def _halved(
    pointers, sizes, expert, base, first, end, row, part, split, F: tl.constexpr,
    BM: tl.constexpr, LEAST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`_tile` of BM rows, or of a half or a quarter of that if it holds them, of LEAST or more."""
    if BM > LEAST:
        if end - first <= BM // 2:
            _halved(
                pointers, sizes, expert, base, first, end, row, part, split, F, BM // 2, LEAST,
                BN, BK, PARTS, STAGES, EVEN_K, ASM,
            )  # fmt: skip
        else:
            _tile(
                pointers, sizes, expert, base, first, end, row, part, split, F, BM, BN, BK,
                PARTS, STAGES, EVEN_K, ASM,
            )  # fmt: skip
    else:
        _tile(
            pointers, sizes, expert, base, first, end, row, part, split, F, BM, BN, BK, PARTS,
            STAGES, EVEN_K, ASM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "split"])
def product(
    x_ptr, x_stride, q0_ptr, q1_ptr, q2_ptr, s_ptr, z_ptr, t_ptr, table_ptr, scale_ptr, bias_ptr,
    offsets_ptr, out_ptr, M, N, K, N64, KP, split, F: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x . W^T, of E experts [E, M, N] each its own, or with rows sorted by expert where
    EP > 0. Programs: tiles of x's rows, of W's rows, and experts x `split` parts of K; where
    PARTS is set the fp32 sums go to out[split, ...] for `sum_parts`."""
    if PARTS and PDL:
        gdc_launch_dependents()
    part, expert = tl.program_id(2) % split, tl.program_id(2) // split
    pointers = (
        x_ptr, q0_ptr, q1_ptr, q2_ptr, s_ptr, z_ptr, t_ptr, table_ptr, scale_ptr, bias_ptr,
        out_ptr,
    )  # fmt: skip
    if EP > 0:
        expert, first, end, column = _expert(offsets_ptr, tl.program_id(0), M, E, EP, BM)
        row = column * BN
        if row >= N:
            return
        end = tl.minimum(end, first + BM)
        if expert < E:
            sizes = (x_stride, M, N, K, N64, KP)
            LEAST: tl.constexpr = BM // 4 if BM > 64 else 16
            _halved(
                pointers, sizes, expert, 0, first, end, row, part, split, F, BM, LEAST, BN, BK,
                PARTS, STAGES, EVEN_K, ASM,
            )  # fmt: skip
        else:
            m, n = first + tl.arange(0, BM), row + tl.arange(0, BN)
            at = (part.to(tl.int64) * M + m)[:, None] * N + n[None, :]
            none = tl.zeros((BM, BN), out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, none, mask=(m < end)[:, None] & (n < N)[None, :])
    else:
        row, base = tl.program_id(1) * BN, expert * M
        sizes = (x_stride, M * (tl.num_programs(2) // split), N, K, N64, KP)
        _tile(
            pointers, sizes, expert, base, tl.program_id(0) * BM, M, row, part, split, F, BM, BN,
            BK, PARTS, STAGES, EVEN_K, ASM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "M", "split"])
def sum_parts(
    parts_ptr, scale_ptr, bias_ptr, out_ptr, rows, M, N, split, F: tl.constexpr, B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[rows, N] from the sums [split, rows, N], always added in one order; M rows an expert."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32)
    if PDL:  # launched while the product still runs
        gdc_wait()
    for part in range(split):
        acc += tl.load(parts_ptr + (part * rows + row) * N + n, mask=n < N, other=0.0)
    acc = _finished(acc, scale_ptr, bias_ptr, row // M * N + n, n < N, F)
    tl.store(out_ptr + row * N + n, acc, mask=n < N)


@triton.jit(do_not_specialize=["first"])
def dequantise(
    q0_ptr, q1_ptr, q2_ptr, s_ptr, z_ptr, t_ptr, table_ptr, out_ptr, N, K, N64, KP, first,
    F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """N rows of each expert's W from `first` on, dense: out[E, N, K]."""
    k, start = tl.program_id(0) * BK, tl.program_id(1) * BN
    row, expert = first + start, tl.program_id(2)
    s, z, t = _rows(s_ptr, z_ptr, t_ptr, expert, row, N64, F, BN)
    w, s = _columns(
        q0_ptr, q1_ptr, q2_ptr, s_ptr, z_ptr, s, z, t, table_ptr, expert, row, k, N64, KP,
        F, BN // 64, BK, ASM,
    )  # fmt: skip
    n, columns = start + tl.arange(0, BN), k + tl.arange(0, BK)
    mask = (n[:, None] < N) & (columns[None, :] < K)
    place = (expert.to(tl.int64) * N + n)[:, None] * K + columns[None, :]
    tl.store(out_ptr + place, w, mask=mask)


def compile_checks():
    """(name, check) of products; `dequant_matmul_triton_decode` has those of W written out."""
    from qinductor.kernels.dequant_matmul_triton_checks import products

    return list(products())
