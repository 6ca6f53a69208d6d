"""Device code of the Triton family of routers: products of few tokens, and the choice of experts.

Weights of a router are read once, by programs on every processor: tiles of experts x parts of the
columns. Their sums are added in one order, by the program that chooses a token's experts or by one
of `sum_parts`, which is launched while they still run. F is a `Form`: what is constant for a
contract. LIB: whether CUDA's library is there.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from qinductor.kernels.quantize_triton_numbers import ABS, as_bits, as_float, at_least, rounded

NONE = tl.constexpr(-(1 << 31))  # before the key of every number


@triton.jit
def _fetch(rows, first, K, LINES: tl.constexpr):
    """Has lines of 128 bytes of rows fetched to the second-level cache, which is the same to all:
    it may hold what a launch still writes, and will then hold that."""
    column = first + tl.arange(0, LINES) * (1024 // rows.dtype.element_ty.primitive_bitwidth)
    place = (rows[:, None] + tl.minimum(column, K - 1)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place], tl.int32, False, 1
    )


@triton.jit
def _load(ptr, k, K, EVEN_K: tl.constexpr):
    """Columns k of rows, 0 past K."""
    return tl.load(ptr + k) if EVEN_K else tl.load(ptr + k, k < K, 0.0)


@triton.jit
def _sums(
    x_ptr, x_stride, w_ptr, m, M, first, K,
    MT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    EVEN_K: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """[BN, MT]: sums of products of rows of w and up to four tokens, from column `first` on.

    A token has sums [BN, BK] of its own: what a thread has loaded stays in its registers, and all
    loads are on their way at once."""
    a0 = tl.zeros((BN, BK), tl.float32)
    a1, a2, a3 = a0, a0, a0
    # Past the last token is that token again
    x1 = x_ptr + tl.minimum(m + 1, M - 1).to(tl.int64) * x_stride
    x2 = x_ptr + tl.minimum(m + 2, M - 1).to(tl.int64) * x_stride
    x3 = x_ptr + tl.minimum(m + 3, M - 1).to(tl.int64) * x_stride
    x0 = x_ptr + m.to(tl.int64) * x_stride
    for step in tl.static_range(STEPS):
        k = first + step * BK + tl.arange(0, BK)[None, :]
        w = _load(w_ptr, k, K, EVEN_K).to(tl.float32)
        a0 += w * _load(x0, k, K, EVEN_K).to(tl.float32)
        if MT > 1:
            a1 += w * _load(x1, k, K, EVEN_K).to(tl.float32)
        if MT > 2:
            a2 += w * _load(x2, k, K, EVEN_K).to(tl.float32)
            a3 += w * _load(x3, k, K, EVEN_K).to(tl.float32)
    if READY:
        gdc_launch_dependents()
    if MT == 1:
        out = tl.sum(a0, 1)[:, None]
    elif MT == 2:
        out = tl.sum(tl.join(a0, a1), 1)
    else:
        both = tl.join(tl.join(a0, a2), tl.join(a1, a3))  # the last axis is the lower bit
        out = tl.sum(both, 1).reshape(BN, 4)
    return out


@triton.jit(do_not_specialize=["M"])
def product(
    x_ptr, x_stride, w_ptr, w_stride, bias_ptr, out_ptr, out_stride, M, N, K,
    MT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, B: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    LINES: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[M, N] of x[M, K] and w[N, K]; with PARTS the float32 sums of STEPS * BK columns each go
    to out[parts, M, N]. Programs: tiles of BN experts x parts x tiles of MT tokens.

    LINES: of 128 bytes of each row of w, that are fetched before the launch before has ended.
    PDL: the next launch may start when all programs have begun, if it adds the parts, else when all
    have read; it waits for the end of this one before it reads or writes anything.
    DOT: by tensor cores, B slices of each BK columns at a time, one for each warp.
    """
    part = tl.program_id(1)
    n, m = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(2) * MT + tl.arange(0, MT)
    experts = w_ptr + tl.minimum(n, N - 1).to(tl.int64) * w_stride
    if PDL:
        if PARTS:
            gdc_launch_dependents()
        if LINES > 0:
            _fetch(experts, part * STEPS * BK, K, LINES)
        gdc_wait()
    if DOT:
        KB: tl.constexpr = BK // B
        rows = (x_ptr + tl.minimum(m, M - 1).to(tl.int64) * x_stride)[None, :, None]
        experts = experts[None, :, None]
        inside = tl.arange(0, B)[:, None, None] * KB + tl.arange(0, KB)[None, None, :]
        acc, one = tl.zeros((B, BN, MT), tl.float32), tl.full((B, BN, MT), 1.0, tl.float32)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            k = (part * STEPS + step) * BK + inside
            w, x = _load(experts, k, K, EVEN_K), _load(rows, k, K, EVEN_K)
            # Tensor cores cut a sum's last bits off, and Triton gives them what is added to theirs.
            acc = tl.fma(tl.dot(w, x.permute(0, 2, 1)), one, acc)
        if PDL and not PARTS:
            gdc_launch_dependents()
        out = tl.sum(acc, 0)
    else:
        out = _sums(
            x_ptr, x_stride, experts[:, None], tl.program_id(2) * MT, M, part * STEPS * BK, K,
            MT, BN, BK, STEPS, EVEN_K, PDL and not PARTS,
        )  # fmt: skip
    n, m = n[:, None], m[None, :]
    place = out_ptr + m.to(tl.int64) * out_stride + n
    mask = (m < M) & (n < N)
    if PARTS:
        tl.store(place + tl.cast(part, tl.int64) * M * N, out, mask)
    else:
        tl.store(place, _finished(out, bias_ptr, n, N, BIAS).to(out_ptr.dtype.element_ty),
                 mask)  # fmt: skip


@triton.jit
def _finished(sums, bias_ptr, n, N, BIAS: tl.constexpr):
    """Sums and the bias of the product."""
    if BIAS:
        sums += tl.load(bias_ptr + n, n < N, 0).to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["M"])
def sum_parts(
    parts_ptr, bias_ptr, out_ptr, out_stride, M, N,
    SPLIT: tl.constexpr, B: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[M, N] from the sums [SPLIT, M, N], always added in one order."""
    if PDL:  # launched while the product still runs
        gdc_wait()
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32)
    for part in tl.static_range(SPLIT):
        acc += tl.load(parts_ptr + (part * M + row) * N + n, n < N, 0.0)
    acc = _finished(acc, bias_ptr, n, N, BIAS)
    tl.store(out_ptr + row * out_stride + n, acc.to(out_ptr.dtype.element_ty), n < N)


# Scores ---------------------------------------------------------------------------------------


@triton.jit
def _exp(x, LIB: tl.constexpr):
    return libdevice.exp(x) if LIB else tl.exp(x)


@triton.jit
def _log1p(x, LIB: tl.constexpr):
    return libdevice.log1p(x) if LIB else tl.where(x < 1e-4, x - 0.5 * x * x, tl.log(1.0 + x))


@triton.jit
def _one_by_one(x, F: tl.constexpr, LIB: tl.constexpr):
    """Scores that depend on their own logit alone."""
    if F.score == "sigmoid":
        one = tl.full(x.shape, 1.0, tl.float32)
        x = rounded(tl.div_rn(one, 1.0 + _exp(-x, LIB)), F.compute)
    elif F.score == "sqrt_softplus":
        x = rounded(tl.where(x > 20.0, x, _log1p(_exp(x, LIB), LIB)), F.compute)
        x = rounded(tl.sqrt_rn(x), F.compute)
    return x


@triton.jit
def _butterfly(x, WIDTH: tl.constexpr):
    """The sum of [WIDTH]: halves are added, as in torch's softmax."""
    if WIDTH >= 32:
        x = tl.sum(x.reshape(2, 16), 0)
    if WIDTH >= 16:
        x = tl.sum(x.reshape(2, 8), 0)
    if WIDTH >= 8:
        x = tl.sum(x.reshape(2, 4), 0)
    if WIDTH >= 4:
        x = tl.sum(x.reshape(2, 2), 0)
    return tl.sum(x, 0)


@triton.jit
def _pairs(x, WIDTH: tl.constexpr, F: tl.constexpr):
    """The sum of [WIDTH], of which there are F.k numbers, in the order of torch's sum."""
    if WIDTH > F.k:
        x = tl.sum(x.reshape(2, WIDTH // 2), 0)
    LEFT: tl.constexpr = WIDTH // 2 if WIDTH > F.k else WIDTH
    if LEFT >= 32:
        x = tl.sum(x.reshape(16, 2), 1)
    if LEFT >= 16:
        x = tl.sum(x.reshape(8, 2), 1)
    if LEFT >= 8:
        x = tl.sum(x.reshape(4, 2), 1)
    if LEFT >= 4:
        x = tl.sum(x.reshape(2, 2), 1)
    return tl.sum(x, 0)


@triton.jit
def _softmax(x, there, row_ptr, F: tl.constexpr, ALL: tl.constexpr, LIB: tl.constexpr):
    """Softmax of logits of which some are not there. ALL: they are given in memory, and their
    exponentials are added in torch's order; so are those of up to 32."""
    top = tl.max(tl.where(there, x, float("-inf")), 0)
    e = tl.where(there, _exp(x - top, LIB), 0.0)
    if ALL:
        N: tl.constexpr = F.n
        lane = tl.arange(0, 32)
        sums = tl.zeros((32,), tl.float32)
        for first in tl.static_range(0, N, 32):
            taken = lane + first < N
            again = tl.load(row_ptr + first + lane, taken, 0.0).to(tl.float32)
            sums += tl.where(taken, _exp(rounded(again, F.compute) - top, LIB), 0.0)
        total = _butterfly(sums, 32)
    elif x.shape[0] <= 32:
        total = _butterfly(e, x.shape[0])
    else:
        total = tl.sum(e, 0)
    return rounded(tl.div_rn(e, tl.full(e.shape, 0.0, tl.float32) + total), F.compute)


# Choice ---------------------------------------------------------------------------------------


@triton.jit
def _keys(x):
    """Integers in the order of numbers: nan is the largest, 0 above -0."""
    bits = as_bits(x)
    return tl.where(x == x, tl.where(bits < 0, bits ^ ABS, bits), ABS)


@triton.jit
def _numbers(keys):
    return as_float(tl.where(keys < 0, keys ^ ABS, keys))


@triton.jit
def _in_kept(keys, F: tl.constexpr, GP: tl.constexpr, GS: tl.constexpr):
    """[GP * GS], whether the expert's group is kept."""
    grouped = keys.reshape(GP, GS)
    best = tl.max(grouped, 1)
    if F.top2:
        inside = tl.arange(0, GS)[None, :]
        first = tl.min(tl.where(grouped == best[:, None], inside, GS), 1)
        rest = tl.max(tl.where(inside == first[:, None], NONE, grouped), 1)
        score = _keys(rounded((0.0 + _numbers(best)) + _numbers(rest), F.ordered))
        best = tl.where(best == NONE, NONE, score)
    group = tl.arange(0, GP)
    one, other = best[:, None], best[None, :]
    earlier = (other == one) & (group[None, :] < group[:, None])
    rank = tl.sum(((other > one) | earlier).to(tl.int32), 1)
    return tl.broadcast_to((rank < F.kept)[:, None], (GP, GS)).reshape(GP * GS)


@triton.jit
def _largest(keys, place, slot, F: tl.constexpr):
    """Places [KP] of the k largest keys, of equal ones the first."""
    found = tl.zeros(slot.shape, tl.int32)
    for i in tl.range(0, F.k):
        top = tl.max(keys, 0)
        at = tl.min(tl.where(keys == top, place, keys.shape[0]), 0)
        found = tl.where(slot == i, at, found)
        keys = tl.where(place == at, NONE, keys)
    return found


@triton.jit
def _weighted(w, chosen, KP: tl.constexpr, F: tl.constexpr):
    """Weights of the chosen experts, of what was taken as such."""
    w = rounded(w, F.inner)
    if F.normalised:
        total = tl.full(w.shape, 0.0, tl.float32) + _pairs(tl.where(chosen, w, 0.0), KP, F)
        total = rounded(total, F.inner)
        epsilon = tl.full(w.shape, F.epsilon, tl.float32)
        if F.bounded:
            total = at_least(total, epsilon)
        elif F.epsilon != 0:
            total = rounded(total + epsilon, F.inner)
        w = rounded(tl.div_rn(w, total), F.inner)
    if F.scale != 1:
        w = rounded(w * tl.full(w.shape, F.scale, tl.float32), F.inner)
    return w


@triton.jit
def _expert(place, F: tl.constexpr, GS: tl.constexpr):
    """The expert at a place of a row; groups are padded to GS places each."""
    expert = place
    if F.size != GS:
        expert = place // GS * F.size + place % GS
    return expert


@triton.jit(do_not_specialize=["M"])
def select(
    logits_ptr, logit_bias_ptr, bias_ptr, weights_ptr, indices_ptr, M,
    F: tl.constexpr, SPLIT: tl.constexpr, GP: tl.constexpr, GS: tl.constexpr, KP: tl.constexpr,
    LIB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weights and indices [M, k] of logits [M, n]; where SPLIT is not 0 of sums [SPLIT, M, n]. A
    program has a token; what all of a token's experts say is a scalar."""
    if PDL:
        if F.bias:
            LINES: tl.constexpr = GP * GS // 32 if GP * GS > 32 else 1
            _fetch(bias_ptr + tl.zeros((1,), tl.int32), 0, F.n, LINES)
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place, slot = tl.arange(0, GP * GS), tl.arange(0, KP)
    expert = _expert(place, F, GS)
    there = expert < F.n
    if F.size != GS:
        there = there & (place % GS < F.size)
    bias = tl.zeros((GP * GS,), tl.float32)
    if F.bias:
        bias = tl.load(bias_ptr + expert, there, 0).to(tl.float32)
    row_ptr = logits_ptr + row * F.n
    if SPLIT > 0:
        logits = tl.zeros((GP * GS,), tl.float32)
        for part in tl.static_range(SPLIT):
            at = row_ptr + tl.cast(part, tl.int64) * M * F.n
            logits += tl.load(at + expert, there, 0.0)
        logits = _finished(logits, logit_bias_ptr, expert, F.n, F.logit_bias)
        logits = rounded(logits, F.logits)
    else:
        logits = tl.load(row_ptr + expert, there, 0.0).to(tl.float32)
    scores = rounded(logits, F.compute)
    if F.first:
        if F.score == "softmax":
            scores = _softmax(scores, there, row_ptr, F, SPLIT == 0, LIB)
        else:
            scores = _one_by_one(scores, F, LIB)
        scores = rounded(scores, F.ordered)
    choice = scores
    if F.bias:
        choice = rounded(choice + bias, F.ordered)
    keys = tl.where(there, _keys(choice), NONE)
    if F.groups > 1:
        keep = _in_kept(keys, F, GP, GS)
        choice = tl.where(keep, choice, tl.full(choice.shape, F.masked, tl.float32))
        keys = tl.where(there, _keys(choice), NONE)
    found = _largest(keys, place, slot, F)
    taken = tl.gather(choice if F.choice else scores, found, 0)
    chosen = slot < F.k
    if not F.first:
        if F.score == "softmax":
            taken = _softmax(taken, chosen, row_ptr, F, False, LIB)
        else:
            taken = _one_by_one(taken, F, LIB)
        taken = rounded(taken, F.ordered)
    weights = _weighted(taken, chosen, KP, F)
    at = row * F.k + slot
    tl.store(weights_ptr + at, weights.to(weights_ptr.dtype.element_ty), chosen)
    tl.store(indices_ptr + at, _expert(found, F, GS).to(indices_ptr.dtype.element_ty), chosen)


def compile_checks():
    """(name, check) of every kernel."""
    from qinductor.kernels.router_triton_checks import checks

    return list(checks())
