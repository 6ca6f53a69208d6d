"""Scales that change along K, of the CuTe DSL products of scaled_matmul: warps that fetch those of
each stage into shared memory, as far ahead as its codes are."""

import cutlass
from cutlass import Float32, Int32, cute

from qinductor.kernels.scaled_matmul_cute_form import BK, SCALERS, Config, Form
from qinductor.kernels.sm90.scaled_matmul_results import Results, ptx


class Scales(Results):
    """Of a stage there are scales for every row of the tile of a, and for every block of rows of W;
    where the tile has one block, their products instead."""

    def __init__(self, form: Form, config: Config) -> None:
        self.form, self.config = form, config
        self.slices = BK // form.step if form.step else 1
        self.turn = 4 if form.scaled and self.slices == 1 else 2  # stages of a turn of the loop
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
        base, lane = held.iterator.toint(), cute.arch.lane_idx()
        for tile in cutlass.range(first, tiles, stride, unroll=1):
            batch, row, column = self.placed(tile, left, right)
            row, column = row * self.config.p, column * self.config.q
            at_m, at_n = (column, row) if cutlass.const_expr(self.config.swap) else (row, column)
            for step in cutlass.range(steps, unroll=1):
                if turn == 0:
                    k = (k0 + step) * BK
                    limits = m, n, left.shape[1]
                    found = self.fetched_scales(
                        self.of(sa, batch), self.of(sw, batch), at_m, at_n, k, limits
                    )
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    place = base + (stage * self.per_stage + lane) * 4
                    for i, value in enumerate(found):
                        if cutlass.const_expr(value is not None):  # noqa: SIM102
                            if i * 32 + lane < self.per_stage:
                                ptx("st.shared.f32 [{$r0}], {$r1};", place + i * 128, value)
                    cute.arch.mbarrier_arrive(full + stage)
                turn = SCALERS - 1 if turn == 0 else turn - 1
                stage, phase = self.next(stage, phase)

    @cute.jit
    def fetched_scales(self, sa, sw, at_m, at_n, k, limits):
        """A lane's share of a stage's scales, 32 apart."""
        lane = cute.arch.lane_idx()
        found = []
        for start in cutlass.range_constexpr(0, self.per_stage, 32):
            at = start + lane
            ours = self.rows * self.slices
            if cutlass.const_expr(start + 32 <= ours):
                found.append(self.of_row(sa, sw, at, at_m, at_n, k, limits))
            elif cutlass.const_expr(start >= ours):
                found.append(self.of_block(sw, at - ours, at_n, k, limits))
            else:
                value = self.of_row(sa, sw, cutlass.min(at, ours - 1), at_m, at_n, k, limits)
                if cutlass.const_expr(self.by_block and not self.folded):  # noqa: SIM102
                    if at >= ours:
                        value = self.of_block(sw, at - ours, at_n, k, limits)
                found.append(value)
        return found

    @cute.jit
    def of_row(self, sa, sw, at, at_m, at_n, k, limits):
        """The scale of a row of a and a slice, with W's where they are folded; past K it is 0."""
        form = self.form
        if cutlass.const_expr(not self.by_row):
            return None
        row, i = at // self.slices, at % self.slices
        if cutlass.const_expr(self.config.swap):
            row, i = at % self.rows, at // self.rows
        column = k + i * form.step
        inside = cutlass.min(column, limits[2] - 1)
        value = self.number(sa, cutlass.min(at_m + row, limits[0] - 1), inside // form.group)
        if cutlass.const_expr(self.folded):
            block = cutlass.min(at_n, limits[1] - 1) // form.bn
            value = value * self.number(sw, block, inside // form.bk)
        return value if column < limits[2] else Float32(0)

    @cute.jit
    def of_block(self, sw, at, at_n, k, limits):
        """The scale of a block of rows of W and a slice."""
        form = self.form
        if cutlass.const_expr(not self.by_block or self.folded):
            return None
        row = at_n + cutlass.min(at // self.slices, self.blocks - 1) * self.block
        column = k + at % self.slices * form.step
        inside = cutlass.min(column, limits[2] - 1)
        value = self.number(sw, cutlass.min(row, limits[1] - 1) // form.bn, inside // form.bk)
        return value if column < limits[2] else Float32(0)

    @cute.jit
    def read(self, base, index):
        """A number of the stage whose numbers begin at `base`."""
        return ptx("ld.shared.f32 {$w0}, [{$r0}];", base + index * 4, types=[Float32])

    @cute.jit
    def weights(self, base, i: cutlass.Constexpr, wave: cutlass.Constexpr):
        """(of the two rows of D of a thread, of its pairs of columns) the scales of a slice; None
        for those that are 1."""
        config = self.config
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
