"""Results of the CuTe DSL products of scaled_matmul: sums in registers, scaled, rounded, stored."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from qinductor.kernels.scaled_matmul_cute_form import Config, Form


def ptx(code, *arguments, types=None):
    """One statement of PTX."""
    return cute.arch.inline_ptx(code, write_only_types=types, read_only_args=list(arguments))


class Results:
    """The last part of `Product`. Rows and columns are those of D."""

    form: Form
    config: Config
    groups: int  # of warps that multiply
    sums: Any  # type in which tensor cores add up
    total: Any  # type of the sums over K
    out: Any  # type of the result

    @cute.jit
    def number(self, held, row, column):
        """A scale; bytes are exponents."""
        value = held[row] if cutlass.const_expr(cute.rank(held) == 1) else held[row, column]
        if cutlass.const_expr(held.element_type is not cutlass.Uint8):
            return value.to(Float32)
        bits = value.to(Int32)
        word = Int32(0x400000) if bits == 0 else bits << 23
        word = Int32(0x7FC00000) if bits == 255 else word
        return ptx("mov.b32 {$w0}, {$r0};", word, types=[Float32])

    @cute.jit
    def scale(self, held, kind: cutlass.Constexpr, place, limit):
        """The scale of one row of a or of W; 1 where it is none of a row."""
        value = Float32(1)
        if cutlass.const_expr(kind == "tensor"):
            value = self.number(held, 0, 0)
        elif cutlass.const_expr(kind == "row"):
            value = self.number(held, cutlass.min(place, limit - 1), 0)
        return value

    @cute.jit
    def added(self, bias, place, limit):
        """The bias of a row of W."""
        value = Float32(0)
        if cutlass.const_expr(self.form.bias != ""):
            value = bias[cutlass.min(place, limit - 1)].to(Float32)
        return value

    @cute.jit
    def finished(self, acc, held, group, row, column, sa, sw, bias, out):
        """The result of the sums of 64 rows: scaled, rounded, and stored."""
        form, config = self.form, self.config
        thread = cute.arch.thread_idx()[0] % 128
        m, n = out.shape
        # Of columns of D each thread reads some scales; all see them in shared memory.
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        for i in cutlass.range_constexpr((config.q + 127) // 128):
            at = i * 128 + thread
            if at < config.q:
                if cutlass.const_expr(config.swap):
                    held[0, at, group] = self.scale(sa, form.rows, column + at, m)
                else:
                    held[0, at, group] = self.scale(sw, form.columns, column + at, n)
                    held[1, at, group] = self.added(bias, column + at, n)
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        row = row + thread // 32 * 16 + cute.arch.lane_idx() // 4
        s, b = [], []  # of the two rows
        for h in cutlass.range_constexpr(2):
            at = row + h * 8
            if cutlass.const_expr(config.swap):
                s.append(self.scale(sw, form.columns, at, n))
                b.append(self.added(bias, at, n))
            else:
                s.append(self.scale(sa, form.rows, at, m))
        for j in cutlass.range_constexpr(0, config.q // 8, 1 if config.swap else 4):
            if cutlass.const_expr(config.swap):
                self.stored_down(acc, j, held, group, s, b, row, column, out)
            else:
                self.stored(acc, j, held, group, s, row, column, out)

    @cute.jit
    def stored_down(self, acc, j: cutlass.Constexpr, held, group, s, b, row, column, out):
        """8 columns of D, which are rows of the result."""
        m, n = out.shape
        lane, value = cute.arch.lane_idx(), []
        for i in cutlass.range_constexpr(4):
            t = held[0, j * 8 + lane % 4 * 2 + i % 2, group]
            value.append(acc[i + 4 * j].to(Float32) * s[i // 2] * t + b[i // 2])
        for h in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.out.width == 32):
                for v in cutlass.range_constexpr(2):
                    q = column + j * 8 + lane % 4 * 2 + v
                    if q < m and row + h * 8 < n:
                        out[q, row + h * 8] = value[v + 2 * h]
            else:  # transposed, a thread has two numbers side by side
                word = ptx(
                    "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
                    self.word(value[2 * h], value[2 * h + 1]), types=[Uint32],
                )  # fmt: skip
                q, p = column + j * 8 + lane // 4, row - lane // 4 + h * 8 + lane % 4 * 2
                if q < m and p < n:
                    place = Int64(q) * out.stride[0] + p
                    ptx("st.global.b32 [{$r0}], {$r1};", out.iterator.toint() + place * 2, word)

    @cute.jit
    def stored(self, acc, j: cutlass.Constexpr, held, group, s, row, column, out):
        """32 columns of D, which are columns of the result."""
        m, n = out.shape
        quad = cute.arch.lane_idx() % 4
        wide = self.out.width // 8
        for h in cutlass.range_constexpr(2):
            value = []
            for i in cutlass.range_constexpr(8):
                q = (j + i // 2) * 8 + quad * 2 + i % 2
                part = acc[i % 2 + 2 * h + 4 * (j + i // 2)].to(Float32) * held[0, q, group]
                value.append(part * s[h] + held[1, q, group])
            line = out.iterator.toint() + Int64(row + h * 8) * out.stride[0] * wide
            inside = row + h * 8 < m
            if cutlass.const_expr(wide == 4):
                for i in cutlass.range_constexpr(4):
                    at = column + (j + i) * 8 + quad * 2
                    if inside and at < n:
                        ptx(
                            "st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                            line + at * 4, value[2 * i], value[2 * i + 1],
                        )  # fmt: skip
            else:
                words = self.gathered(value, quad)
                at = column + j * 8 + quad * 8
                if inside and at < n:
                    ptx(
                        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                        line + at * 2, *words,
                    )  # fmt: skip

    @cute.jit
    def gathered(self, value, quad):
        """8 numbers side by side, as four words: of the four columns of tiles whose numbers four
        threads hold, thread i gets column i."""
        w = [self.word(value[2 * i], value[2 * i + 1]) for i in range(4)]
        odd, high = quad % 2 == 1, quad >= 2
        pairs = []
        for i in cutlass.range_constexpr(2):
            low, up = w[2 * i], w[2 * i + 1]
            got = cute.arch.shuffle_sync_bfly(low if odd else up, 1)
            pairs.append((got if odd else low, up if odd else got))
        (a, b), (c, d) = pairs
        e = cute.arch.shuffle_sync_bfly(a if high else c, 2)
        f = cute.arch.shuffle_sync_bfly(b if high else d, 2)
        return (e if high else a), (f if high else b), (c if high else e), (d if high else f)

    @cute.jit
    def word(self, low, high):
        """Two numbers of 16 bits in a word."""
        code = "cvt.rn.bf16x2.f32" if self.form.out == "bf16" else "cvt.rn.f16x2.f32"
        return ptx(code + " {$w0}, {$r1}, {$r0};", low, high, types=[Uint32])

    @cute.jit
    def joined(self, acc, count: cutlass.Constexpr, s_l, row, column, sa, sw, bias, out):
        """The result of sums that the programs of a cluster have parts of: each adds up some."""
        config, form = self.config, self.form
        thread = cute.arch.thread_idx()[0]
        threads = self.groups * 128
        base = s_l.iterator.toint()
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)  # no group still reads tiles
        for i in cutlass.range_constexpr(count):
            ptx("st.shared.b32 [{$r0}], {$r1};", base + (i * threads + thread) * 4, acc[i])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        rank, share = cute.arch.block_idx_in_cluster(), -(-count // config.split)
        lane = cute.arch.lane_idx()
        row = row + thread % 128 // 32 * 16 + lane // 4
        m, n = out.shape
        for i in cutlass.range_constexpr(share):
            at = rank * share + i
            if at < count:
                total = self.total(0)
                for other in cutlass.range_constexpr(config.split):
                    place = ptx(
                        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
                        base + (at * threads + thread) * 4, Int32(other), types=[Int32],
                    )  # fmt: skip
                    total = total + ptx(
                        "ld.shared::cluster.b32 {$w0}, [{$r0}];", place, types=[self.total]
                    )
                p = row + at // 2 % 2 * 8
                q = column + at // 4 * 8 + lane % 4 * 2 + at % 2
                at_m, at_n = (q, p) if cutlass.const_expr(config.swap) else (p, q)
                if at_m < m and at_n < n:
                    value = total.to(Float32) * self.scale(sw, form.columns, at_n, n)
                    value = value * self.scale(sa, form.rows, at_m, m)
                    out[at_m, at_n] = (value + self.added(bias, at_n, n)).to(self.out)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
