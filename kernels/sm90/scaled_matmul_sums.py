"""Sums of the CuTe DSL products of scaled_matmul: the loops over the stages of a tile."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.base_dsl.dsl import extract_mlir_values, new_from_mlir_values
from cutlass.cute.nvgpu import warpgroup

from qinductor.kernels.scaled_matmul_cute_form import BK
from qinductor.kernels.sm90.scaled_matmul_scales import Scales


class Sums(Scales):
    """The middle part of `Product`."""

    wave: Any  # layout of a thread's sums of one wave

    @cute.jit
    def released(self, empty, stage):
        """A warp has read a stage: says so to all that fetch into it."""
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.config.cluster > 1):
            if lane < self.config.cluster:
                cute.arch.mbarrier_arrive(empty + stage, lane)
        elif lane == 0:
            cute.arch.mbarrier_arrive(empty + stage)

    @cute.jit
    def summed(self, mma, acc, part_l, part_r, full, empty, stage, phase, steps):
        """acc: the sums over all steps, in the tensor cores."""
        acc.fill(0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        before = stage
        for step in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for i in cutlass.range_constexpr(BK // 32):
                at = (None, None, i, stage)
                cute.gemm(mma, acc, part_l[at], part_r[at], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if step > 0:
                self.released(empty, before)
            before = stage
            stage, phase = self.next(stage, phase)
        warpgroup.wait_group(0)
        if steps > 0:
            self.released(empty, before)
        return stage, phase

    @cute.jit
    def promoted(self, mma, acc, part_l, part_r, full, empty, stage, phase, steps, scales):
        """acc: the sums over all steps, those of each slice scaled and added in float32 while the
        tensor cores add up the next one.

        scales  those of all stages, in shared memory"""
        size = (self.config.q // 2,)
        sums = [cute.make_rmem_tensor(size, self.sums) for _ in range(self.buffers)]
        acc.fill(0)
        loop = (mma, sums, acc, part_l, part_r, full, empty, scales)
        # Sums that are under way where a loop turns around would be read one product at a time.
        for _ in cutlass.range(steps // self.turn, unroll=1):
            stage, phase = self.turned(loop, stage, phase, self.turn)
        for _ in cutlass.range(steps % self.turn, unroll=1):
            stage, phase = self.turned(loop, stage, phase, 1)
        return stage, phase

    @cute.jit
    def turned(self, loop, stage, phase, count: cutlass.Constexpr):
        """Adds the sums of some stages; returns the stage after them, and its phase."""
        mma, sums, acc, part_l, part_r, full, empty, scales = loop
        pieces = self.slices * self.config.waves  # of a stage
        ahead, weights = len(sums) - 1, []
        for t in cutlass.range_constexpr(-ahead, count * pieces):
            begin, end = t + ahead, t
            if cutlass.const_expr(begin < count * pieces):
                if cutlass.const_expr(begin % pieces == 0):
                    after, later = stage, phase
                    if cutlass.const_expr(ahead and begin > 0):
                        after, later = self.next(stage, phase)
                    cute.arch.mbarrier_wait(full + after, later)
                self.begun(mma, sums[begin % len(sums)], part_l, part_r, begin % pieces, after)
                weights.append(self.weights(scales, after, begin % pieces))
            if cutlass.const_expr(end >= 0):
                more = min(ahead, count * pieces - 1 - end)
                self.ended(
                    acc, sums[end % len(sums)], weights[end], end % pieces, empty, stage, more
                )
                if cutlass.const_expr((end + 1) % pieces == 0):
                    stage, phase = self.next(stage, phase)
        return stage, phase

    @cute.jit
    def begun(self, mma, sums, part_l, part_r, piece: cutlass.Constexpr, stage):
        """Starts the sums of a piece of a stage: a wave of a slice of K."""
        i, wave = piece // self.config.waves, piece % self.config.waves
        count = BK // 32 // self.slices
        mma = new_from_mlir_values(mma, extract_mlir_values(mma))  # `set` holds in a region only
        to = cute.make_tensor(sums.iterator, self.wave)
        warpgroup.fence()
        for j in cutlass.range_constexpr(count):
            k = i * count + j
            mma.set(warpgroup.Field.ACCUMULATE, j > 0)
            rows = cute.append_ones(part_l[None, wave, k, stage], up_to_rank=2)
            cute.gemm(mma, to, rows, part_r[None, None, k, stage], to)
        warpgroup.commit_group()

    @cute.jit
    def ended(
        self, acc, sums, weights, piece: cutlass.Constexpr, empty, stage, more: cutlass.Constexpr
    ):
        """Adds the sums of a piece, once they are there; so many `more` may be under way."""
        warpgroup.wait_group(more)
        if cutlass.const_expr(piece + 1 == self.slices * self.config.waves):
            self.released(empty, stage)
        self.scaled(acc, sums, *weights, piece % self.config.waves * self.config.q // 2)

    @cute.jit
    def scaled(self, acc, sums, near, far, first: cutlass.Constexpr):
        """Adds sums times their scales, of rows of D and of pairs of columns."""
        for j in cutlass.range_constexpr(self.config.q // 8):
            for v in cutlass.range_constexpr(2):
                for h in cutlass.range_constexpr(2):
                    at = v + 2 * h + 4 * j
                    term, to = sums[at].to(acc.element_type), first + at
                    if cutlass.const_expr(near is not None and far is not None):
                        acc[to] = acc[to] + term * (far[j][v] * near[h])
                    elif cutlass.const_expr(near is not None):
                        acc[to] = acc[to] + term * near[h]
                    elif cutlass.const_expr(far is not None):
                        acc[to] = acc[to] + term * far[j][v]
                    else:
                        acc[to] = acc[to] + term
