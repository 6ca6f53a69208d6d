"""Results of the CuTe DSL products of scaled_matmul: sums in registers, scaled, rounded, stored."""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from qinductor.kernels.sm90.scaled_matmul_tiles import Tiles


def ptx(code, *arguments, types=None):
    """One statement of PTX."""
    return cute.arch.inline_ptx(code, write_only_types=types, read_only_args=list(arguments))


class Results(Tiles):
    """The last part of `Product`. Rows and columns are those of D."""

    unit: int  # sums that are joined at once
    share: int  # times that a thread does so

    @cute.jit
    def number(self, held, row, column):
        """A scale; bytes are exponents."""
        value = held[row] if cutlass.const_expr(cute.rank(held) == 1) else held[row, column]
        if cutlass.const_expr(held.element_type is not cutlass.Uint8):
            return value.to(Float32)
        return self.power(value.to(Int32))

    @cute.jit
    def power(self, bits):
        """The number of an exponent (float8_e8m0fnu)."""
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
    def ahead(self, corner, sa, sw, bias, out):
        """(scale, bias) for some columns of D and for each thread's rows, two of a wave, fetched
        before a tile is multiplied."""
        batch, row, column = corner
        lane, thread = cute.arch.lane_idx(), cute.arch.thread_idx()[0] % 128
        columns = []
        if cutlass.const_expr(self.config.split == 1):
            for i in cutlass.range_constexpr((self.config.q + 127) // 128):
                columns.append(
                    self.factors(corner, column + i * 128 + thread, 1, sa, sw, bias, out)
                )
        else:
            for i in cutlass.range_constexpr(self.share):
                for v in cutlass.range_constexpr(min(self.unit, 2)):
                    at = column + self.column(i) + v
                    columns.append(self.factors(corner, at, 1, sa, sw, bias, out))
        row = row + thread // 32 * 16 + lane // 4
        rows = []
        for wave in cutlass.range_constexpr(self.config.waves):
            for h in cutlass.range_constexpr(2):
                at = row + wave * self.groups * 64 + h * 8
                rows.append(self.factors(corner, at, 0, sa, sw, bias, out))
        return columns, rows

    @cute.jit
    def factors(self, corner, at, axis: cutlass.Constexpr, sa, sw, bias, out):
        """(scale, bias) of a row of D, or with axis 1 of a column."""
        m, n = out.shape[0], out.shape[1]
        if cutlass.const_expr(self.config.swap == (axis == 0)):
            scale = self.scale(self.of(sw, corner[0]), self.form.columns, at, n)
            return scale, self.added(bias, at, n)
        return self.scale(self.of(sa, corner[0]), self.form.rows, at, m), Float32(0)

    @cute.jit
    def finished(self, acc, held, group, staging, row, column, found, out):
        """The result of the sums of 64 rows of each wave: scaled, rounded, and stored.

        found  what `ahead` fetched"""
        config = self.config
        columns, rows = found
        thread = cute.arch.thread_idx()[0] % 128
        # Of columns of D each thread has some scales; all see them in shared memory.
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        for i in cutlass.range_constexpr((config.q + 127) // 128):
            at = i * 128 + thread
            if at < config.q:
                held[0, at, group], held[1, at, group] = columns[i]
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        row = row + thread // 32 * 16
        scales = held.iterator.toint() + group * config.q * 8
        for wave in cutlass.range_constexpr(config.waves):
            part = cute.make_tensor(
                acc.iterator + wave * config.q // 2, cute.make_layout(config.q // 2)
            )
            two = rows[2 * wave : 2 * wave + 2]
            at = row + wave * self.groups * 64
            if cutlass.const_expr(config.swap):
                for j in cutlass.range_constexpr(config.q // 8):
                    self.stored_down(part, j, scales, two, at, column, out)
            elif cutlass.const_expr(self.out.width == 32):
                for j in cutlass.range_constexpr(config.q // 8):
                    self.stored_wide(part, j, scales, two, at, column, out)
            else:
                for j in cutlass.range_constexpr(0, config.q // 8, 8):
                    self.stored(part, j, scales, two, staging, at, column, out)

    @cute.jit
    def quad(self, acc, j: cutlass.Constexpr, scales, rows):
        """The four numbers of a thread in 8 columns of D, in float32: [h][v]."""
        place = scales + (j * 8 + cute.arch.lane_idx() % 4 * 2) * 8
        s0, b0, s1, b1 = ptx(
            "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", place,
            types=[Float32, Float32, Float32, Float32],
        )  # fmt: skip
        value = []
        for h in cutlass.range_constexpr(2):
            s, b = rows[h]
            pair = []
            for v, (t, c) in enumerate(((s0, b0), (s1, b1))):
                part = acc[v + 2 * h + 4 * j].to(Float32)
                if cutlass.const_expr(self.config.swap):
                    pair.append(part * s * t + b)
                else:
                    pair.append(part * t * s + c)
            value.append(pair)
        return value

    @cute.jit
    def stored_down(self, acc, j: cutlass.Constexpr, scales, rows, row, column, out):
        """8 columns of D, which are rows of the result."""
        m, n = out.shape
        lane = cute.arch.lane_idx()
        value = self.quad(acc, j, scales, rows)
        for h in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.out.width == 32):
                for v in cutlass.range_constexpr(2):
                    q, p = column + j * 8 + lane % 4 * 2 + v, row + lane // 4 + h * 8
                    if q < m and p < n:
                        out[q, p] = value[h][v]
            else:  # transposed, a thread has two numbers side by side
                word = ptx(
                    "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
                    self.word(*value[h]), types=[Uint32],
                )  # fmt: skip
                q, p = column + j * 8 + lane // 4, row + h * 8 + lane % 4 * 2
                if q < m and p < n:
                    place = Int64(q) * out.stride[0] + p
                    ptx("st.global.b32 [{$r0}], {$r1};", out.iterator.toint() + place * 2, word)

    @cute.jit
    def stored_wide(self, acc, j: cutlass.Constexpr, scales, rows, row, column, out):
        """8 columns of D, which are columns of the result, in float32."""
        m, n = out.shape
        lane = cute.arch.lane_idx()
        value = self.quad(acc, j, scales, rows)
        at = column + j * 8 + lane % 4 * 2
        for h in cutlass.range_constexpr(2):
            line = row + lane // 4 + h * 8
            if line < m and at < n:
                place = Int64(line) * out.stride[0] + at
                ptx(
                    "st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                    out.iterator.toint() + place * 4, *value[h],
                )  # fmt: skip

    @cute.jit
    def stored(self, acc, j: cutlass.Constexpr, scales, rows, staging, row, column, out):
        """64 columns of D, which are columns of the result, in 16 bits: by way of shared memory,
        so that 8 threads store 128 bytes of a row. A warp's rows are its own."""
        m, n = out.shape
        lane = cute.arch.lane_idx()
        count = min(8, self.config.q // 8 - j)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(0, count, 2):
            words = []
            for at in (j + i, j + i + 1):
                words += [self.word(*pair) for pair in self.quad(acc, at, scales, rows)]
            place = staging + lane % 16 * 128 + ((i + lane // 16) ^ (lane % 8)) * 16
            ptx(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], "
                "{{$r1}, {$r2}, {$r3}, {$r4}};", place, *words,
            )  # fmt: skip
        cute.arch.sync_warp()
        at = column + j * 8 + lane % 8 * 8
        for i in cutlass.range_constexpr(4):
            r = i * 4 + lane // 8
            place = staging + r * 128 + ((lane % 8) ^ (r % 8)) * 16
            words = ptx(
                "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", place,
                types=[Uint32, Uint32, Uint32, Uint32],
            )  # fmt: skip
            if row + r < m and at < n and lane % 8 < count:
                to = out.iterator.toint() + (Int64(row + r) * out.stride[0] + at) * 2
                ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", to, *words)

    @cute.jit
    def word(self, low, high):
        """Two numbers of 16 bits in a word."""
        code = "cvt.rn.bf16x2.f32" if self.form.out == "bf16" else "cvt.rn.f16x2.f32"
        return ptx(code + " {$w0}, {$r1}, {$r0};", low, high, types=[Uint32])

    @cute.jit
    def column(self, i: cutlass.Constexpr):
        """The first column of D, in its tile, of a thread's part i of the sums that it joins."""
        at = (cute.arch.block_idx_in_cluster() * self.share + i) * self.unit
        return at // 4 * 8 + cute.arch.lane_idx() % 4 * 2 + at % 2

    @cute.jit
    def joined(self, acc, s_l, corner, found, out):
        """The result of sums that the programs of a cluster have parts of: each adds up some."""
        config, unit = self.config, self.unit
        batch, row, column = corner
        columns, rows = found
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        threads = self.groups * 128
        base = s_l.iterator.toint() + thread * unit * 4
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)  # no group still reads tiles
        for i in cutlass.range_constexpr(0, config.q // 2, unit):
            self.vector("st.shared", base + i * threads * 4, [acc[i + j] for j in range(unit)])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        others = [
            ptx("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", base, Int32(i), types=[Int32])
            for i in range(config.split)
        ]
        row = row + thread % 128 // 32 * 16 + lane // 4
        m, n = out.shape
        first = cute.arch.block_idx_in_cluster() * self.share
        parts = []
        for i in cutlass.range_constexpr(self.share):
            # Where parts are fewer than programs, some read what another's share is, for nothing.
            at = cutlass.min(first + i, config.q // 2 // unit - 1) * unit * threads * 4
            parts.append([self.vector("ld.shared::cluster", other + at, None) for other in others])
        for i in cutlass.range_constexpr(self.share):
            at = (first + i) * unit
            for j in cutlass.range_constexpr(unit):
                total = parts[i][0][j]
                for other in cutlass.range_constexpr(1, config.split):
                    total = total + parts[i][other][j]
                h = j // 2 if cutlass.const_expr(unit == 4) else at // 2 % 2
                s, b = rows[0]
                if h == 1:
                    s, b = rows[1]
                t, c = columns[i * min(unit, 2) + j % 2]
                p, q = row + h * 8, column + self.column(i) + j % 2
                value = total.to(Float32)
                if cutlass.const_expr(config.swap):
                    if q < m and p < n and at < config.q // 2:
                        out[q, p] = (value * s * t + b).to(self.out)
                elif p < m and q < n and at < config.q // 2:
                    out[p, q] = (value * t * s + c).to(self.out)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def vector(self, code: cutlass.Constexpr, place, values):
        """`unit` sums loaded from shared memory, or stored there."""
        unit = self.unit
        width = {1: "", 2: ".v2", 4: ".v4"}[unit]
        names = [f"{{$w{i}}}" if values is None else f"{{$r{i + 1}}}" for i in range(unit)]
        text = "{" + ", ".join(names) + "}" if unit > 1 else names[0]
        if cutlass.const_expr(values is None):
            got = ptx(f"{code}{width}.b32 {text}, [{{$r0}}];", place, types=[self.total] * unit)
            return [got] if unit == 1 else list(got)
        ptx(f"{code}{width}.b32 [{{$r0}}], {text};", place, *values)
