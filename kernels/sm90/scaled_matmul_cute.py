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

from qinductor.kernels.scaled_matmul_cute_form import BK, Config, Form
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
BAND = 8  # rows of tiles that are near each other in time, for the L2 cache
FETCHING, MULTIPLYING = 40, 232  # registers of a thread
K_MAJOR = OperandMajorMode.K


class Product(Sums):
    """The product of one form with one config; N, K and M are symbolic."""

    def __init__(self, form: Form, config: Config) -> None:
        super().__init__(form, config)
        self.groups = config.p // 64
        self.size = config.cluster * config.split  # programs of a cluster
        self.sums = Int32 if form.a == "int8" else Float32  # in the tensor cores
        self.total = Float32 if form.step else self.sums
        self.out = NUMBERS[form.out]
        numbers = NUMBERS[form.a], NUMBERS[form.w]
        self.numbers = numbers[::-1] if config.swap else numbers

    @cute.jit
    def __call__(self, a, sa, w, sw, bias, out, programs: Int32, stream):
        """out[M, N] of a[M, K] and w[N, K]; `programs` run at once, at most."""
        config = self.config
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
        tiles = cute.ceil_div(left.shape[0], config.p * config.cluster)
        tiles = tiles * cute.ceil_div(right.shape[0], config.q)
        grid = tiles * self.size
        if cutlass.const_expr(config.split == 1):
            grid = cutlass.min(grid, programs // self.size * self.size)
        self.kernel(
            fetch_l, left, fetch_r, right, mma, places[0], places[1], sa, sw, bias, out
        ).launch(
            grid=(grid, 1, 1), block=(config.threads, 1, 1), cluster=(self.size, 1, 1),
            min_blocks_per_mp=config.blocks, preferred_smem_carveout=100, use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, fetch_l: cute.CopyAtom, left: cute.Tensor, fetch_r: cute.CopyAtom,
        right: cute.Tensor, mma: cute.TiledMma, place_l: cute.ComposedLayout,
        place_r: cute.ComposedLayout, sa: cute.Tensor, sw: cute.Tensor, bias, out: cute.Tensor,
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
        full = shared.allocate_array(Int64, config.stages)
        empty = shared.allocate_array(Int64, config.stages)
        if warp == 0:
            cpasync.prefetch_descriptor(fetch_l)
            cpasync.prefetch_descriptor(fetch_r)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(config.stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, self.groups * 4 * config.cluster)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.size > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        # All above runs while the kernel before this one ends, and the next one's while this does.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp >= self.groups * 4:
            if cutlass.const_expr(config.donates):
                cute.arch.setmaxregister_decrease(FETCHING)
            if warp == self.groups * 4:
                self.fetched(fetch_l, left, s_l, fetch_r, right, s_r, full, empty)
        else:
            if cutlass.const_expr(config.donates):
                cute.arch.setmaxregister_increase(MULTIPLYING)
            self.multiplied(mma, left, right, s_l, s_r, full, empty, held, sa, sw, bias, out)
        if cutlass.const_expr(config.cluster > 1):  # others still arrive at barriers here
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def placed(self, tile, left, right):
        """(tile of L, tile of R) of this program."""
        rows = cute.ceil_div(left.shape[0], self.config.p * self.config.cluster)
        columns = cute.ceil_div(right.shape[0], self.config.q)
        band = tile // (BAND * columns)
        high = cutlass.min(rows - band * BAND, BAND)
        inside = tile - band * BAND * columns
        row = band * BAND + inside % high
        if cutlass.const_expr(self.config.cluster > 1):
            row = row * self.config.cluster + cute.arch.block_idx_in_cluster()
        return row, inside // high

    @cute.jit
    def walk(self, left, right):
        """(first tile, number of tiles, step between them, first stage of K, number of them)."""
        first = cute.arch.block_idx()[0] // self.size
        rows = cute.ceil_div(left.shape[0], self.config.p * self.config.cluster)
        tiles = rows * cute.ceil_div(right.shape[0], self.config.q)
        k, steps = Int32(0), cute.ceil_div(left.shape[1], BK)
        if cutlass.const_expr(self.config.split > 1):
            share = cute.ceil_div(steps, self.config.split)
            k = cute.arch.block_idx_in_cluster() * share
            steps = cutlass.max(cutlass.min(steps - k, share), 0)
        return first, tiles, cute.arch.grid_dim()[0] // self.size, k, steps

    @cute.jit
    def fetched(self, fetch_l, left, s_l, fetch_r, right, s_r, full, empty):
        """What one warp does: it fetches all tiles, each stage once it is free."""
        config = self.config
        rank = Int32(0)
        if cutlass.const_expr(config.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tiles_l = cute.local_tile(left, (config.p, BK), (None, None))
        tiles_r = cute.local_tile(right, (config.q, BK), (None, None))
        to_l, from_l = cpasync.tma_partition(
            fetch_l, 0, cute.make_layout(1), cute.group_modes(s_l, 0, 2),
            cute.group_modes(tiles_l, 0, 2),
        )  # fmt: skip
        to_r, from_r = cpasync.tma_partition(
            fetch_r, rank, cute.make_layout(config.cluster), cute.group_modes(s_r, 0, 2),
            cute.group_modes(tiles_r, 0, 2),
        )  # fmt: skip
        first, tiles, stride, k0, steps = self.walk(left, right)
        stage, phase = Int32(0), Int32(1)
        for tile in cutlass.range(first, tiles, stride, unroll=1):
            row, column = self.placed(tile, left, right)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        full + stage, (config.p + config.q) * BK
                    )
                cute.copy(
                    fetch_l, from_l[None, row, k0 + step], to_l[None, stage],
                    tma_bar_ptr=full + stage,
                )  # fmt: skip
                if cutlass.const_expr(config.cluster > 1):
                    cute.copy(
                        fetch_r, from_r[None, column, k0 + step], to_r[None, stage],
                        tma_bar_ptr=full + stage,
                        mcast_mask=cutlass.Int16((1 << config.cluster) - 1),
                    )  # fmt: skip
                else:
                    cute.copy(
                        fetch_r, from_r[None, column, k0 + step], to_r[None, stage],
                        tma_bar_ptr=full + stage,
                    )  # fmt: skip
                stage, phase = self.next(stage, phase)

    @cute.jit
    def multiplied(self, mma, left, right, s_l, s_r, full, empty, held, sa, sw, bias, out):
        """What a group of warps does: sums of all tiles, and their results."""
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // 128)
        own = mma.get_slice(group * 128)
        part_l = mma.make_fragment_A(own.partition_A(s_l))
        part_r = mma.make_fragment_B(own.partition_B(s_r))
        count = self.config.q // 2
        acc = cute.make_rmem_tensor(
            own.partition_shape_C((self.config.p, self.config.q)), self.total
        )
        first, tiles, stride, k0, steps = self.walk(left, right)
        stage, phase = Int32(0), Int32(0)
        for tile in cutlass.range(first, tiles, stride, unroll=1):
            row, column = self.placed(tile, left, right)
            row, column = row * self.config.p + group * 64, column * self.config.q
            if cutlass.const_expr(self.form.step == 0):
                stage, phase = self.summed(
                    mma, acc, part_l, part_r, full, empty, stage, phase, steps
                )
            else:
                stage, phase = self.promoted(
                    mma, acc, part_l, part_r, full, empty, stage, phase, k0, steps, row, column,
                    sa, sw, (*out.shape, left.shape[1]),
                )  # fmt: skip
            if cutlass.const_expr(self.config.split > 1):
                self.joined(acc, count, s_l, row, column, sa, sw, bias, out)
            else:
                self.finished(acc, held, group, row, column, sa, sw, bias, out)


def compiled(form: Form, config: Config, options: str = ""):
    """The kernel of a form, for every M, N and K; the compiler needs no GPU."""
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

    def matrix(number, rows, columns):
        return make_fake_compact_tensor(
            NUMBERS[number], (rows, columns), stride_order=(1, 0), assumed_align=16
        )

    def scales(kind, number, rank=2):
        size, step = ([cute.sym_int() for _ in range(rank)] for _ in range(2))
        return make_fake_tensor(NUMBERS[number], tuple(size), tuple(step)) if kind else None

    m, n, k = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=16)
    bias = make_fake_compact_tensor(NUMBERS[form.bias], (n,)) if form.bias else None
    return cute.compile(
        Product(form, config), matrix(form.a, m, k),
        scales(form.rows, form.sa, 1 if form.rows == "tensor" else 2), matrix(form.w, n, k),
        scales(form.columns, form.sw), bias, matrix(form.out, m, n), Int32(132),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch sm_90a {options}",
    )  # fmt: skip


def compile_checks():
    """(name, check) of the products."""
    from qinductor.kernels.scaled_matmul_cute_checks import checks

    return list(checks())
