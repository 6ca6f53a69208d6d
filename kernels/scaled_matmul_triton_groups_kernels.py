"""Device code of the Triton family of scaled_matmul for experts: rows sorted by expert, each times
its own weight. Where the rows of each expert end is read here, so a launch waits for nothing."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qinductor.kernels.dequant_matmul_triton_kernels import _expert
from qinductor.kernels.scaled_matmul_triton_kernels import _finished, sums_of


@triton.jit
def _tile(
    w, pointers, strides, sizes, expert, first, end, column, part, split, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The product of rows `first` to `end`, at most BM, with rows of the expert's W from `column`
    on; of a part of K, where there are several."""
    a, sa_ptr, sw_ptr, bias_ptr, out_ptr = pointers
    a_stride, sa_row, sa_group, w_stride, w_expert, sw_row, sw_group, sw_expert = strides
    T, N, K = sizes
    w_row = column
    if TMA:
        w_row += expert * N
    else:
        w += expert.to(tl.int64) * w_expert
    sw_ptr += expert.to(tl.int64) * sw_expert
    bias_ptr += expert.to(tl.int64) * N
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, split)
    acc = sums_of(
        a, a_stride, w, w_stride, sa_ptr, sa_row, sa_group, sw_ptr, sw_row, sw_group, sw_ptr, 0, 0,
        sw_ptr, first, column, w_row, T, N, K, part * share,
        tl.minimum(steps, (part + 1) * share), F, BM, BN, BK, BS, STAGES, EVEN_K, SWAP, False,
        TMA, ASM,
    )  # fmt: skip
    if SWAP:
        acc = acc.trans(1, 0)
    m, n = first + tl.arange(0, BM), column + tl.arange(0, BN)
    out = _finished(acc, sa_ptr, sa_row, sw_ptr, sw_row, sw_ptr, 0, sw_ptr, bias_ptr, m, n, T, N, F)
    place = (part.to(tl.int64) * T + m)[:, None] * N + n[None, :]
    mask = (m < end)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _halved(
    w, pointers, strides, sizes, expert, first, end, column, part, split, F: tl.constexpr,
    BM: tl.constexpr, LEAST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """`_tile` of BM rows, or of as few halves of that as hold the rows, of LEAST or more."""
    if BM > LEAST:
        if end - first <= BM // 2:
            _halved(
                w, pointers, strides, sizes, expert, first, end, column, part, split, F, BM // 2,
                LEAST, BN, BK, BS, STAGES, EVEN_K, SWAP, TMA, ASM,
            )  # fmt: skip
        else:
            _tile(
                w, pointers, strides, sizes, expert, first, end, column, part, split, F, BM, BN,
                BK, BS, STAGES, EVEN_K, SWAP, TMA, ASM,
            )  # fmt: skip
    else:
        _tile(
            w, pointers, strides, sizes, expert, first, end, column, part, split, F, BM, BN, BK,
            BS, STAGES, EVEN_K, SWAP, TMA, ASM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "split", "sa_group"])
def grouped(
    a, a_stride, sa_ptr, sa_row, sa_group, w, w_stride, w_expert, sw_ptr, sw_row, sw_group,
    sw_expert, bias_ptr, offsets_ptr, out_ptr, T, N, K, split, F: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BM: tl.constexpr, LEAST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out[T, N] of rows sorted by E experts; rows past the last offset are 0. Where EP is 0 there
    are no offsets: all have as many rows. Programs: tiles of rows of one expert x rows of its W,
    and `split` parts of K; where PARTS is set their scaled sums go to out[split, T, N] for
    `sum_groups`. w is a pointer, or where TMA is set a descriptor
    of all experts' rows; `*_expert` is how far experts lie apart."""
    if PARTS and PDL:
        gdc_launch_dependents()
    part = tl.program_id(1)
    if EP > 0:
        expert, first, end, column = _expert(offsets_ptr, tl.program_id(0), T, E, EP, BM)
    else:
        rows = T // E
        tiles = tl.cdiv(rows, BM)
        expert, column = tl.program_id(0) % (E * tiles) // tiles, tl.program_id(0) // (E * tiles)
        first = expert * rows + tl.program_id(0) % tiles * BM
        end = (expert + 1) * rows
    column = column * BN
    if column >= N:
        return
    end = tl.minimum(end, first + BM)
    if expert < E:
        pointers = (a, sa_ptr, sw_ptr, bias_ptr, out_ptr)
        strides = (a_stride, sa_row, sa_group, w_stride, w_expert, sw_row, sw_group, sw_expert)
        _halved(
            w, pointers, strides, (T, N, K), expert, first, end, column, part, split, F, BM, LEAST,
            BN, BK, BS, STAGES, EVEN_K, SWAP, TMA, ASM,
        )  # fmt: skip
    else:
        m, n = first + tl.arange(0, BM), column + tl.arange(0, BN)
        place = (part.to(tl.int64) * T + m)[:, None] * N + n[None, :]
        none = tl.zeros((BM, BN), out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, none, mask=(m < end)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["size", "split"])
def sum_groups(parts_ptr, out_ptr, size, split, B: tl.constexpr, PDL: tl.constexpr):
    """out[size] from [split, size], always added in one order."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32)
    if PDL:  # launched while the product still runs
        gdc_wait()
    for part in range(split):
        acc += tl.load(parts_ptr + tl.cast(part, tl.int64) * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


def compile_checks():
    """(name, check) of the products of rows sorted by expert, and of their sums."""
    from qinductor.kernels.scaled_matmul_triton_groups_checks import checks

    return list(checks())
