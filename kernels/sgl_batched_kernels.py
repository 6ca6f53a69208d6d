"""Device code of `bmm_fp8`: float8 codes become float16, which holds them all, for tensor cores."""

import triton
import triton.language as tl


@triton.jit
def product(
    a_ptr, b_ptr, sa_ptr, sb_ptr, out_ptr, M, N, K, a_batch, a_row, b_batch, b_k, b_n,
    A: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[e, m, n] of a[e, m, k] and b[e, k, n], bytes of codes A and B; sums in float32."""
    across = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * across
    batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    m, n = tile // across * BM + tl.arange(0, BM), tile % across * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a = a_ptr + batch * a_batch + m[:, None].to(tl.int64) * a_row + k[None, :]
    b = b_ptr + batch * b_batch + k[:, None].to(tl.int64) * b_k + n[None, :].to(tl.int64) * b_n
    rows, columns = (m < M)[:, None], (n < N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inside = k < K - start
        x = tl.load(a, mask=rows & inside[None, :], other=0).to(A, bitcast=True)
        w = tl.load(b, mask=columns & inside[:, None], other=0).to(B, bitcast=True)
        acc = tl.dot(x.to(tl.float16), w.to(tl.float16), acc)
        a += BK
        b += BK * b_k
    acc = acc * (tl.load(sa_ptr) * tl.load(sb_ptr))
    place = (batch * M + m)[:, None] * N + n[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=rows & columns)


def compile_checks():
    """(name, check) of each pair of codes, in both orders of b."""
    from qinductor.kernels.sgl_batched import compiles

    return list(compiles())
