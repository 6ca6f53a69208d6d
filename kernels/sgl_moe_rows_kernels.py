"""Device code of `shuffle_rows` and `get_cutlass_w4a8_moe_mm_data`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "R"])
def shuffle(
    x_ptr, x_row, map_ptr, out_ptr, rows, R, W, BR: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """out[r] = x[map[r]] of rows of W words; zeros where there is no such row."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    source = tl.load(map_ptr + r, r < R, -1)
    mask = (r < R)[:, None] & (w < W)[None, :]
    there = (source >= 0) & (source < rows)
    x = tl.load(x_ptr + source.to(tl.int64)[:, None] * x_row + w, mask & there[:, None], 0)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * W + w, x, mask)


@triton.jit
def _keys(ids_ptr, i, numel, E):
    """Experts of these entries: E of one that is not there, E + 1 past the last entry."""
    key = tl.load(ids_ptr + i, i < numel, -1)
    key = tl.where((key < 0) | (key >= E), E, key)
    return tl.where(i < numel, key, E + 1)


@triton.jit
def _size(ptr, rows, count, columns):
    tl.store(ptr, rows)
    tl.store(ptr + 1, count)
    tl.store(ptr + 2, columns)


@triton.jit(do_not_specialize=["numel", "topk", "E", "n", "k"])
def order(
    ids_ptr, offsets_ptr, first_ptr, second_ptr, input_ptr, output_ptr, numel, topk, E, n, k,
    B: tl.constexpr,
):  # fmt: skip
    """What is known of expert e, a program's own: it counts the entries of the experts before it,
    then finds its own, in their order. The last program has the entries of no expert."""
    e = tl.program_id(0)
    i = tl.arange(0, B)
    before = tl.zeros((B,), tl.int32)
    own = tl.zeros((B,), tl.int32)
    for start in range(0, numel, B):
        key = _keys(ids_ptr, start + i, numel, E)
        before += (key < e).to(tl.int32)
        own += (key == e).to(tl.int32)
    place, count = tl.sum(before, 0), tl.sum(own, 0)
    tl.store(offsets_ptr + e, place)
    if e < E:
        _size(first_ptr + 3 * e, 2 * n, count, k)
        _size(second_ptr + 3 * e, k, count, n)
    if count > 0:
        for start in range(0, numel, B):
            at = start + i
            mine = _keys(ids_ptr, at, numel, E) == e
            slot = place + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(input_ptr + slot, tl.where(e < E, at // topk, 0), mine)
            tl.store(output_ptr + at, tl.where(e < E, slot, 0), mine)
            place += tl.sum(mine.to(tl.int32), 0)


def compile_checks():
    """(name, check) of both, for each target."""
    from qinductor.kernels.sgl_moe_rows import compiles

    return list(compiles())
