"""Device code of scaled_matmul in CuTe DSL, for sm_90a: warps that fetch tiles by TMA, groups of
warps that multiply them by wgmma.

D[P, Q] = L[P, K] R[Q, K]^T; L is a and R is W, or with `swap` the other way about. A thread of a
group holds of a 64 x q tile the numbers [v, h, j] of the row 16 warp + 8 h + lane / 4 and the
column 8 j + 2 (lane % 4) + v (PTX ISA, "Register fragments for wgmma").
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from qinductor.kernels.scaled_matmul_cute_form import BK, STAGING, Config, Form
from qinductor.kernels.sm90.scaled_matmul_sums import Sums

NUMBERS = {
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "int8": cutlass.Int8,
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "fp32": Float32,
    "float8_e8m0fnu": cutlass.Uint8,  # exponents
}
FETCHING, MULTIPLYING = 56, 224  # registers of a thread
K_MAJOR = OperandMajorMode.K


class Product(Sums):
    """The product of one form with one config; N, K and M are symbolic."""

    def __init__(self, form: Form, config: Config) -> None:
        super().__init__(form, config)
        self.groups = config.groups
        self.size = config.cluster * config.split  # programs of a cluster
        self.sums = Int32 if form.a == "int8" else Float32  # in the tensor cores
        self.total = Float32 if form.step else self.sums
        self.out = NUMBERS[form.out]
        # Sums of a thread that are joined at once, and how often each program of a cluster does so.
        self.unit = next((u for u in (4, 2) if config.q // 2 >= u * config.split), 1)
        self.share = -(-config.q // 2 // self.unit // config.split)
        numbers = NUMBERS[form.a], NUMBERS[form.w]
        self.numbers = numbers[::-1] if config.swap else numbers

    @cute.jit
    def __call__(self, a, sa, w, sw, bias, out, programs: Int32, early: Int32, stream):
        """out[M, N] of a[M, K] and w[N, K]; with batches all have an axis for those in front.

        programs  that run at once, at most
        early     stages of W that are fetched while the kernel before this one still runs"""
        config = self.config
        if cutlass.const_expr(self.form.batched):
            a, w, out, sa, sw = (self.behind(tensor) for tensor in (a, w, out, sa, sw))
        left, right = (w, a) if cutlass.const_expr(config.swap) else (a, w)
        mma = hopper_helpers.make_trivial_tiled_mma(
            *self.numbers, K_MAJOR, K_MAJOR, self.sums, (self.groups, 1, 1), (64, config.q)
        )  # fmt: skip
        atom = warpgroup.make_smem_layout_atom(
            warpgroup.SmemLayoutAtomKind.K_SW128, self.numbers[0]
        )
        places = [
            cute.tile_to_shape(atom, (rows, BK, config.stages), order=(0, 1, 2))
            for rows in (config.p, config.q)
        ]
        single, many = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        fetch_l, left = cpasync.make_tiled_tma_atom(
            single, left, cute.slice_(places[0], (None, None, 0)), (config.p, BK)
        )
        fetch_r, right = cpasync.make_tiled_tma_atom(
            many if config.cluster > 1 else single, right,
            cute.slice_(places[1], (None, None, 0)), (config.q, BK), num_multicast=config.cluster,
        )  # fmt: skip
        rows, columns = self.tiles(left, right)
        grid = rows * columns * self.size
        if cutlass.const_expr(self.form.batched):
            grid = grid * out.shape[2]
        if cutlass.const_expr(config.split == 1):
            grid = cutlass.min(grid, programs // self.size * self.size)
        self.kernel(
            fetch_l, left, fetch_r, right, mma, places[0], places[1], sa, sw, bias, out, early
        ).launch(
            grid=(grid, 1, 1), block=(config.threads(self.form), 1, 1), cluster=(self.size, 1, 1),
            min_blocks_per_mp=config.blocks, preferred_smem_carveout=100, use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, fetch_l: cute.CopyAtom, left: cute.Tensor, fetch_r: cute.CopyAtom,
        right: cute.Tensor, mma: cute.TiledMma, place_l: cute.ComposedLayout,
        place_r: cute.ComposedLayout, sa: cute.Tensor, sw: cute.Tensor, bias, out: cute.Tensor,
        early: Int32,
    ):  # fmt: skip
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator()
        s_l, s_r = (
            shared.allocate_tensor(number, place.outer, 1024, swizzle=place.inner)
            for number, place in zip(self.numbers, (place_l, place_r), strict=True)
        )
        held = shared.allocate_tensor(
            Float32, cute.make_layout((2, config.q, self.groups)), byte_alignment=16
        )
        turned = STAGING * self.groups * 4 if config.stages_results else 16
        staging = shared.allocate_tensor(
            cutlass.Uint8, cute.make_layout(turned), byte_alignment=128
        )
        scales = shared.allocate_tensor(
            Float32, cute.make_layout(max(self.per_stage * config.stages * self.form.scaled, 4)),
            byte_alignment=16,
        )  # fmt: skip
        full = shared.allocate_array(Int64, config.stages)
        empty = shared.allocate_array(Int64, config.stages)
        if warp == 0:
            cpasync.prefetch_descriptor(fetch_l)
            cpasync.prefetch_descriptor(fetch_r)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(config.stages):
                    cute.arch.mbarrier_init(full + i, 33 if self.form.scaled else 1)
                    cute.arch.mbarrier_init(empty + i, self.groups * 4 * config.cluster)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.size > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        # What comes before a wait runs while the kernel before this one ends.
        cute.arch.griddepcontrol_launch_dependents()
        if warp >= self.groups * 4:
            if cutlass.const_expr(config.donates):
                cute.arch.setmaxregister_decrease(FETCHING)
            if warp == self.groups * 4:
                self.fetched(fetch_l, left, s_l, fetch_r, right, s_r, full, empty, early)
            elif cutlass.const_expr(self.form.scaled):
                cute.arch.griddepcontrol_wait()
                m, n = out.shape[0], out.shape[1]
                self.weighed(scales, full, empty, sa, sw, m, n, left, right)
        else:
            if cutlass.const_expr(config.donates):
                cute.arch.setmaxregister_increase(MULTIPLYING)
            cute.arch.griddepcontrol_wait()
            self.multiplied(
                mma, left, right, s_l, s_r, full, empty, held, staging, scales, sa, sw, bias, out
            )
        if cutlass.const_expr(config.cluster > 1):  # others still arrive at barriers here
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def behind(self, tensor):
        """The axis of batches, if there is one, behind the others."""
        if cutlass.const_expr(tensor is None or cute.rank(tensor) < 3):
            return tensor
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 2, 0]))

    @cute.jit
    def fetched(self, fetch_l, left, s_l, fetch_r, right, s_r, full, empty, early):
        """What one warp does: it fetches all tiles, each stage once it is free."""
        config = self.config
        rank = Int32(0)
        if cutlass.const_expr(config.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        every = (None, None, None) if cutlass.const_expr(self.form.batched) else (None, None)
        tiles_l = cute.local_tile(left, (config.p, BK), every)
        tiles_r = cute.local_tile(right, (config.q, BK), every)
        to_l, from_l = cpasync.tma_partition(
            fetch_l, 0, cute.make_layout(1), cute.group_modes(s_l, 0, 2),
            cute.group_modes(tiles_l, 0, 2),
        )  # fmt: skip
        to_r, from_r = cpasync.tma_partition(
            fetch_r, rank, cute.make_layout(config.cluster), cute.group_modes(s_r, 0, 2),
            cute.group_modes(tiles_r, 0, 2),
        )  # fmt: skip
        first, tiles, stride, k0, steps = self.walk(left, right)
        stage, phase = cutlass.min(cutlass.min(early, steps), config.stages), Int32(1)
        self.early(
            fetch_l, from_l, to_l, fetch_r, from_r, to_r, full, stage, first, left, right, k0
        )
        begin = stage
        if stage == config.stages:
            stage, phase = Int32(0), Int32(0)
        for tile in cutlass.range(first, tiles, stride, unroll=1):
            own_l, own_r = self.own(from_l, from_r, tile, left, right)
            for step in cutlass.range(begin, steps, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                self.expected(full + stage)
                self.copied(fetch_l, own_l[None, k0 + step], to_l[None, stage], full + stage, 1)
                self.copied(
                    fetch_r, own_r[None, k0 + step], to_r[None, stage], full + stage, config.cluster
                )
                stage, phase = self.next(stage, phase)
            begin = Int32(0)

    @cute.jit
    def early(
        self, fetch_l, from_l, to_l, fetch_r, from_r, to_r, full, count, tile, left, right, k0
    ):
        """Fetches the first stages: W's part before the results of earlier kernels are there."""
        config = self.config
        own_l, own_r = self.own(from_l, from_r, tile, left, right)
        for i in cutlass.range(count, unroll=1):
            self.expected(full + i)
            if cutlass.const_expr(config.swap):
                self.copied(fetch_l, own_l[None, k0 + i], to_l[None, i], full + i, 1)
            else:
                self.copied(fetch_r, own_r[None, k0 + i], to_r[None, i], full + i, config.cluster)
        cute.arch.griddepcontrol_wait()
        for i in cutlass.range(count, unroll=1):
            if cutlass.const_expr(config.swap):
                self.copied(fetch_r, own_r[None, k0 + i], to_r[None, i], full + i, config.cluster)
            else:
                self.copied(fetch_l, own_l[None, k0 + i], to_l[None, i], full + i, 1)

    @cute.jit
    def own(self, from_l, from_r, tile, left, right):
        """The rows of L and of R of a tile, for every stage of K."""
        batch, row, column = self.placed(tile, left, right)
        if cutlass.const_expr(self.form.batched):
            return from_l[None, row, None, batch], from_r[None, column, None, batch]
        return from_l[None, row, None], from_r[None, column, None]

    @cute.jit
    def expected(self, full):
        """A stage waits for its bytes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, (self.config.p + self.config.q) * BK)

    @cute.jit
    def copied(self, fetch, source, target, full, programs: cutlass.Constexpr):
        """Starts to fetch a tile, for all programs of a cluster if they share it."""
        if cutlass.const_expr(programs > 1):
            mask = cutlass.Int16((1 << programs) - 1)
            cute.copy(fetch, source, target, tma_bar_ptr=full, mcast_mask=mask)
        else:
            cute.copy(fetch, source, target, tma_bar_ptr=full)

    @cute.jit
    def multiplied(
        self, mma, left, right, s_l, s_r, full, empty, held, staging, scales, sa, sw, bias, out
    ):
        """What a group of warps does: sums of all tiles, and their results."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // 128)
        staging = staging.iterator.toint() + cute.arch.make_warp_uniform(thread // 32) * STAGING
        own = mma.get_slice(group * 128)
        part_l = mma.make_fragment_A(own.partition_A(s_l))
        part_r = mma.make_fragment_B(own.partition_B(s_r))
        acc = cute.make_rmem_tensor(own.partition_shape_C((config.p, config.q)), self.total)
        self.wave = cute.make_layout(own.partition_shape_C((config.p // config.waves, config.q)))
        first, tiles, stride, k0, steps = self.walk(left, right)
        stage, phase = Int32(0), Int32(0)
        for tile in cutlass.range(first, tiles, stride, unroll=1):
            here = self.corner(tile, group, left, right)
            batch, row, column = here
            found = self.ahead(here, sa, sw, bias, out)
            if cutlass.const_expr(self.form.step == 0):
                stage, phase = self.summed(
                    mma, acc, part_l, part_r, full, empty, stage, phase, steps
                )
            else:
                stage, phase = self.promoted(
                    mma, acc, part_l, part_r, full, empty, stage, phase, steps, scales
                )
            if cutlass.const_expr(config.split > 1):
                self.joined(acc, s_l, here, found, self.of(out, batch))
            else:
                self.finished(acc, held, group, staging, row, column, found, self.of(out, batch))


def compiled(form: Form, config: Config, options: str = ""):
    """The kernel of a form, for every M, N and K; the compiler needs no GPU."""
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

    def matrix(number, rows, columns):
        kind = NUMBERS[number]
        if form.batched:  # rows and batches lie as far apart as they may
            step = 128 // kind.width
            strides = *(cute.sym_int64(divisibility=step) for _ in range(2)), 1
            return make_fake_tensor(kind, (batches, rows, columns), strides, assumed_align=16)
        return make_fake_compact_tensor(
            kind, (rows, columns), stride_order=(1, 0), assumed_align=16
        )

    def scales(kind, number, rank=2):
        rank += form.batched and rank > 1
        size, step = ([cute.sym_int() for _ in range(rank)] for _ in range(2))
        return make_fake_tensor(NUMBERS[number], tuple(size), tuple(step)) if kind else None

    batches = cute.sym_int()
    m, n, k = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=16)
    bias = make_fake_compact_tensor(NUMBERS[form.bias], (n,)) if form.bias else None
    return cute.compile(
        Product(form, config), matrix(form.a, m, k),
        scales(form.rows, form.sa, 1 if form.rows == "tensor" else 2), matrix(form.w, n, k),
        scales(form.columns, form.sw), bias, matrix(form.out, m, n), Int32(132), Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch sm_90a {options}",
    )  # fmt: skip


def compile_checks():
    """(name, check) of the products."""
    from qinductor.kernels.scaled_matmul_cute_checks import checks

    return list(checks())
