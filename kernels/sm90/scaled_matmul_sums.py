"""Sums of the CuTe DSL products of scaled_matmul: the loops over the stages of a tile."""

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import warpgroup

from qinductor.kernels.scaled_matmul_cute_form import BK, Config, Form
from qinductor.kernels.sm90.scaled_matmul_results import Results


class Sums(Results):
    """The middle part of `Product`. A warp's registers hold what it needs of the scales of a step:
    `near` those of its rows of D, `far` those of its columns."""

    def __init__(self, form: Form, config: Config) -> None:
        self.form, self.config = form, config
        kinds = form.rows == "group", form.columns == "grid"
        self.near_kind, self.far_kind = kinds[::-1] if config.swap else kinds
        self.slices = BK // form.step if form.step else 1
        # Rows of a have one each, blocks of W share one.
        self.near_count = 1 if config.swap else 2
        blocks = max(1, config.q // form.bn) if form.bn else 1
        self.far_count = -(-config.q // 32) if config.swap else blocks

    @cute.jit
    def next(self, stage, phase):
        """The stage after this one, and its phase."""
        wraps = stage + 1 == self.config.stages
        return (0 if wraps else stage + 1), (phase ^ 1 if wraps else phase)

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
    def promoted(
        self, mma, acc, part_l, part_r, full, empty, stage, phase, k0, steps, row, column, sa, sw,
        limits,
    ):  # fmt: skip
        """acc: the sums over all steps, those of each slice scaled and added in float32.

        limits  M, N, K"""
        slices = self.slices
        sums = [cute.make_rmem_tensor(acc.shape, self.sums) for _ in range(2 if slices > 1 else 1)]
        acc.fill(0)
        near = cute.make_rmem_tensor((self.near_count * slices,), Float32)
        far = cute.make_rmem_tensor((self.far_count * slices,), Float32)
        later = cute.make_rmem_tensor_like(near), cute.make_rmem_tensor_like(far)
        self.scales(later, row, column, k0 * BK, sa, sw, limits)
        for step in cutlass.range(steps, unroll=1):
            near.store(later[0].load())
            far.store(later[1].load())
            cute.arch.mbarrier_wait(full + stage, phase)
            for i in cutlass.range_constexpr(slices):
                warpgroup.fence()
                for j in cutlass.range_constexpr(BK // 32 // slices):
                    at = (None, None, i * (BK // 32 // slices) + j, stage)
                    mma.set(warpgroup.Field.ACCUMULATE, j > 0)
                    cute.gemm(mma, sums[i % 2], part_l[at], part_r[at], sums[i % 2])
                warpgroup.commit_group()
                if cutlass.const_expr(i == 0):  # fetched while the tensor cores work
                    self.scales(later, row, column, (k0 + step + 1) * BK, sa, sw, limits)
                else:
                    warpgroup.wait_group(1)
                    self.scaled(acc, sums[(i - 1) % 2], near, far, i - 1)
            warpgroup.wait_group(0)
            self.released(empty, stage)
            self.scaled(acc, sums[(slices - 1) % 2], near, far, slices - 1)
            stage, phase = self.next(stage, phase)
        return stage, phase

    @cute.jit
    def scales(self, found, row, column, k, sa, sw, limits):
        """Fills (near, far) with the scales of the columns from k on."""
        near, far = found
        config, form = self.config, self.form
        m, n, columns = limits
        lane, thread = cute.arch.lane_idx(), cute.arch.thread_idx()[0] % 128
        first = row + thread // 32 * 16
        for i in cutlass.range_constexpr(self.slices):
            at = cutlass.min(k + i * form.step, columns - 1)
            if cutlass.const_expr(self.near_kind and config.swap):
                place = cutlass.min(first, n - 1) // form.bn
                near[i] = self.number(sw, place, at // form.bk)
            elif cutlass.const_expr(self.near_kind):
                for h in cutlass.range_constexpr(2):
                    place = cutlass.min(first + lane // 4 + 8 * h, m - 1)
                    near[2 * i + h] = self.number(sa, place, at // form.group)
            for j in cutlass.range_constexpr(self.far_count):
                if cutlass.const_expr(self.far_kind and config.swap):
                    place = cutlass.min(column + j * 32 + lane, m - 1)
                    far[i * self.far_count + j] = self.number(sa, place, at // form.group)
                elif cutlass.const_expr(self.far_kind):
                    place = cutlass.min(column + j * form.bn, n - 1) // form.bn
                    far[i * self.far_count + j] = self.number(sw, place, at // form.bk)

    @cute.jit
    def scaled(self, acc, sums, near, far, i: cutlass.Constexpr):
        """Adds the sums of slice i times their scales."""
        config, form = self.config, self.form
        lane = cute.arch.lane_idx()
        for j in cutlass.range_constexpr(config.q // 8):
            for v in cutlass.range_constexpr(2):
                f = Float32(1)
                if cutlass.const_expr(self.far_kind and config.swap):
                    place = j % 4 * 8 + lane % 4 * 2 + v
                    f = cute.arch.shuffle_sync(far[i * self.far_count + j // 4], place)
                elif cutlass.const_expr(self.far_kind):
                    f = far[i * self.far_count + j * 8 // max(form.bn, config.q // self.far_count)]
                for h in cutlass.range_constexpr(2):
                    at = v + 2 * h + 4 * j
                    term = sums[at].to(Float32)
                    if cutlass.const_expr(self.near_kind):
                        s = near[i * self.near_count + (0 if config.swap else h)]
                        acc[at] = acc[at] + term * (f * s)
                    elif cutlass.const_expr(self.far_kind):
                        acc[at] = acc[at] + term * f
                    else:
                        acc[at] = acc[at] + term
