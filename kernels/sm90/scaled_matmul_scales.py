"""Scales that change along K, of the CuTe DSL products of scaled_matmul: warps that fetch those of
each stage into shared memory, as far ahead as its codes are."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from qinductor.kernels.scaled_matmul_cute_form import BK, SCALERS, Config, Form
from qinductor.kernels.sm90.scaled_matmul_results import Results, ptx


class Scales(Results):
    """Of a stage there are scales for every row of the tile of a, and for every block of rows of W;
    where the tile has one block, their products instead."""

    def __init__(self, form: Form, config: Config) -> None:
        self.form, self.config = form, config
        self.slices = BK // form.step if form.step else 1
        # Sums of which some are under way, and stages of a turn of the loop: as registers allow.
        small = config.q <= 32
        self.buffers = 1 if config.waves > 1 else 4 if small and self.slices == 4 else 2
        self.turn = 4 if form.scaled and (small or self.slices == 1) else 2
        self.by_row, self.by_block = form.rows == "group", form.columns == "grid"
        self.rows = config.q if config.swap else config.p  # of the tile of a
        wide = config.p if config.swap else config.q  # rows of the tile of W
        # 16 rows of W, those of a warp, lie in one block, as `Form` and `Config.takes` have it.
        self.block = 16 if config.swap else min(form.bn or wide, wide)
        self.blocks = wide // self.block
        self.folded = self.by_row and self.by_block and form.bn % wide == 0
        self.per_stage = (self.rows + self.blocks) * self.slices

    @cute.jit
    def weighed(self, held, full, empty, sa, sw, m, n, left, right):
        """What each of `SCALERS` warps does: it fetches the scales of its share of the stages."""
        first, tiles, stride, k0, steps = self.walk(left, right)
        turn = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.groups * 4 - 1
        stage, phase = Int32(0), Int32(1)
        limits = m, n, left.shape[1]
        for tile in cutlass.range(first, tiles, stride, unroll=1):
            batch, row, column = self.placed(tile, left, right)
            row, column = row * self.config.p, column * self.config.q
            at_m, at_n = (column, row) if cutlass.const_expr(self.config.swap) else (row, column)
            own_a, own_w = self.of(sa, batch), self.of(sw, batch)
            for step in cutlass.range(steps, unroll=1):
                if turn == 0:
                    k = (k0 + step) * BK
                    rows = self.of_rows(own_a, own_w, at_m, at_n, k, limits)
                    block = self.of_block(own_w, at_n, k, limits)
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    self.kept(held.iterator.toint() + stage * self.per_stage * 4, rows, block)
                    cute.arch.mbarrier_arrive(full + stage)
                turn = SCALERS - 1 if turn == 0 else turn - 1
                stage, phase = self.next(stage, phase)

    @cute.jit
    def of_rows(self, sa, sw, at_m, at_n, k, limits):
        """[row][slice]: the scales of a lane's rows of a, 32 apart, with W's where they are folded;
        past K they are 0."""
        form, lane, found = self.form, cute.arch.lane_idx(), []
        if cutlass.const_expr(self.by_row):
            columns = [k + i * form.step for i in range(self.slices)]
            inside = [cutlass.min(column, limits[2] - 1) for column in columns]
            factors = [Float32(1)] * self.slices
            if cutlass.const_expr(self.folded):
                block = cutlass.min(at_n, limits[1] - 1) // form.bn
                factors = [self.number(sw, block, at // form.bk) for at in inside]
            for start in cutlass.range_constexpr(0, self.rows, 32):
                row = cutlass.min(at_m + cutlass.min(start + lane, self.rows - 1), limits[0] - 1)
                values = self.of_row(sa, row, [at // form.group for at in inside], k, limits[2])
                some = []
                for i in cutlass.range_constexpr(self.slices):
                    value = values[i] * factors[i] if cutlass.const_expr(self.folded) else values[i]
                    some.append(value if columns[i] < limits[2] else Float32(0))
                found.append(some)
        return found

    @cute.jit
    def of_row(self, sa, row, groups, k, limit):
        """The scales of a row of a. Four that lie side by side are one load: by themselves each
        would fetch the same 32 bytes."""
        values = cute.make_rmem_tensor((self.slices,), Float32)
        number = sa.element_type
        wide = number in (Float32, cutlass.Uint8)
        if cutlass.const_expr(self.slices == 4 and self.form.group == 32 and wide):
            size = 4 * number.width // 8
            first = sa.iterator.toint()
            beside = (sa.stride[1] == 1) & (sa.stride[0] % 4 == 0) & (first % size == 0)
            if beside & (k + BK <= limit):
                place = first + (Int64(row) * sa.stride[0] + groups[0]) * (number.width // 8)
                if cutlass.const_expr(number is Float32):
                    text = "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
                    four = ptx(text, place, types=[Float32] * 4)
                    for i in cutlass.range_constexpr(4):
                        values[i] = four[i]
                else:
                    word = ptx("ld.global.b32 {$w0}, [{$r0}];", place, types=[Int32])
                    for i in cutlass.range_constexpr(4):
                        values[i] = self.power((word >> (8 * i)) & 255)
            else:
                for i in cutlass.range_constexpr(4):
                    values[i] = self.number(sa, row, groups[i])
        else:
            for i in cutlass.range_constexpr(self.slices):
                values[i] = self.number(sa, row, groups[i])
        return values

    @cute.jit
    def of_block(self, sw, at_n, k, limits):
        """A lane's scale, of a block of rows of W and a slice; there are at most 32."""
        form, value = self.form, Float32(0)
        if cutlass.const_expr(self.by_block and not self.folded):
            lane = cute.arch.lane_idx()
            row = at_n + cutlass.min(lane // self.slices, self.blocks - 1) * self.block
            column = k + lane % self.slices * form.step
            inside = cutlass.min(column, limits[2] - 1)
            value = self.number(sw, cutlass.min(row, limits[1] - 1) // form.bn, inside // form.bk)
            value = value if column < limits[2] else Float32(0)
        return value

    @cute.jit
    def kept(self, base, rows, block):
        """Writes a lane's scales of a stage: [row][slice], but [slice][row] of an a that is R."""
        lane = cute.arch.lane_idx()
        for t, some in enumerate(rows):
            row = t * 32 + lane
            if row < self.rows:
                if cutlass.const_expr(self.config.swap or self.slices != 4):
                    for i in cutlass.range_constexpr(self.slices):
                        at = row * self.slices + i
                        if cutlass.const_expr(self.config.swap):
                            at = i * self.rows + row
                        ptx("st.shared.f32 [{$r0}], {$r1};", base + at * 4, some[i])
                else:
                    text = "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
                    ptx(text, base + row * 16, *some)
        if cutlass.const_expr(self.by_block and not self.folded):  # noqa: SIM102
            if lane < self.blocks * self.slices:
                at = base + (self.rows * self.slices + lane) * 4
                ptx("st.shared.f32 [{$r0}], {$r1};", at, block)

    @cute.jit
    def read(self, base, index):
        """A number of the stage whose numbers begin at `base`."""
        return ptx("ld.shared.f32 {$w0}, [{$r0}];", base + index * 4, types=[Float32])

    @cute.jit
    def weights(self, held, stage, piece: cutlass.Constexpr):
        """(of the two rows of D of a thread, of its pairs of columns) the scales of a slice of a
        wave; None for those that are 1."""
        config = self.config
        i, wave = piece // config.waves, piece % config.waves
        base = held.iterator.toint() + stage * self.per_stage * 4
        lane = cute.arch.lane_idx()
        warp = cute.arch.thread_idx()[0] // 32 + wave * self.groups * 4
        blocks = base + self.rows * self.slices * 4
        near, far = None, None
        if cutlass.const_expr(config.swap):
            if cutlass.const_expr(self.by_block and not self.folded):
                s = self.read(blocks, warp * self.slices + i)
                near = [s, s]
            if cutlass.const_expr(self.by_row):
                far = []
                for j in cutlass.range_constexpr(config.q // 8):
                    place = base + (i * self.rows + j * 8 + lane % 4 * 2) * 4
                    far.append(
                        ptx(
                            "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", place,
                            types=[Float32, Float32],
                        )
                    )  # fmt: skip
        else:
            if cutlass.const_expr(self.by_row):
                row = warp * 16 + lane // 4
                near = [self.read(base, (row + h * 8) * self.slices + i) for h in range(2)]
            if cutlass.const_expr(self.by_block and not self.folded):
                some = [self.read(blocks, b * self.slices + i) for b in range(self.blocks)]
                far = [[some[j * 8 // self.block]] * 2 for j in range(config.q // 8)]
        return near, far
