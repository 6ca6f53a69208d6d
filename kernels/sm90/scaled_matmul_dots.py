"""Device code of scaled_matmul for very few rows, in CuTe DSL, for sm_90a: each warp fetches what
it multiplies, and waits for nobody until its sums are whole.

A program has `rows` rows of W, its warps share K: each takes lines of 128 columns in turn, and has
`ahead` of them on their way.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from qinductor.kernels.scaled_matmul_cute_form import Form
from qinductor.kernels.scaled_matmul_dots_form import LINE, PAD, Config
from qinductor.kernels.sm90.scaled_matmul_cute import NUMBERS
from qinductor.kernels.sm90.scaled_matmul_dots_lines import Lines
from qinductor.kernels.sm90.scaled_matmul_results import ptx


class Dots(Lines):
    """The product of one form with one config; N, K and M are symbolic.

    early  whether W is fetched before the kernel in front has ended: it must be older than that"""

    def __init__(self, form: Form, config: Config, early: bool) -> None:
        super().__init__(form, config)
        self.early, self.out = early, NUMBERS[form.out]
        self.every = config.warps * config.split * LINE  # columns between a warp's lines

    @cute.jit
    def __call__(self, a, sa, w, sw, bias, out, programs: Int32, stream):
        """out[M, N] of a[M, K] and w[N, K]; `programs` run at once, at most."""
        config = self.work
        grid = cute.ceil_div(w.shape[0], config.rows)
        if cutlass.const_expr(config.split == 1):
            grid = cutlass.min(grid, programs)
        self.kernel(a, sa, w, sw, bias, out).launch(
            grid=(grid * config.split, cute.ceil_div(a.shape[0], config.q), 1),
            block=(config.threads, 1, 1), cluster=(config.split, 1, 1),
            min_blocks_per_mp=config.blocks, preferred_smem_carveout=100,
            use_pdl=True, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, a: cute.Tensor, sa: cute.Tensor, w: cute.Tensor, sw: cute.Tensor, bias,
        out: cute.Tensor,
    ):  # fmt: skip
        config, size = self.work, self.slot.size
        shared = SmemAllocator()
        ring = shared.allocate_tensor(
            cutlass.Uint8, cute.make_layout(size * config.ahead * config.warps), byte_alignment=128
        )
        place = cute.make_layout((config.rows + PAD, self.columns, config.warps, 2))
        parts = shared.allocate_tensor(self.total, place, byte_alignment=16)
        joint = shared.allocate_tensor(
            self.total, cute.make_layout(config.rows * config.q), byte_alignment=16
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = Int32(0)
        if cutlass.const_expr(config.split > 1):
            rank = cute.arch.block_idx_in_cluster()
        slab = cute.arch.block_idx()[1] * config.q
        stride = cute.arch.grid_dim()[0] // config.split
        k, whole = w.shape[1], cute.ceil_div(w.shape[0], config.rows)  # tiles of rows of W
        turns = cute.ceil_div(k, self.every)  # lines that a warp has of a tile
        own = ring.iterator.toint() + warp * (size * config.ahead)
        first = (rank * config.warps + warp) * LINE
        now = cute.arch.block_idx()[0] // config.split
        count = cute.ceil_div(whole - now, stride) * turns
        # The line that is fetched next.
        tile, turn, column = now, Int32(0), first
        at = cute.make_rmem_tensor((config.rows // 8,), Int64)
        if cutlass.const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
        self.placed(at, tile, column, w)
        begin = []  # columns of the first lines
        for u in cutlass.range_constexpr(config.ahead):
            self.fetched_w(own + u * size, at, tile, whole, column, w, sw)
            cute.arch.cp_async_commit_group()
            begin.append(column)
            tile, turn, column = self.next(at, tile, turn, column, turns, stride, first, w)
        if cutlass.const_expr(self.early):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.loaded_a(own, begin, slab, a, sa)
        mine = -(-config.rows * config.q // config.split // config.threads)
        ends = cute.make_rmem_tensor((3, mine), Float32)
        self.rest(ends, now, slab, rank, sa, sw, bias, out)
        acc = cute.make_rmem_tensor((4, config.rows // 16, self.tiles), self.total)
        acc.fill(0)
        done, which, slot = Int32(0), Int32(0), own
        for _ in cutlass.range(count, unroll=1):
            cute.arch.cp_async_wait_group(config.ahead - 1)
            cute.arch.sync_warp()
            left, right, scales = self.line(slot)
            cute.arch.sync_warp()  # all lanes have read the slot
            self.fetched_w(slot, at, tile, whole, column, w, sw)
            self.fetched_a(slot, column, slab, a, sa)
            cute.arch.cp_async_commit_group()
            tile, turn, column = self.next(at, tile, turn, column, turns, stride, first, w)
            slot = slot + size
            slot = own if slot == own + size * config.ahead else slot
            self.multiplied(acc, left, right, scales)
            done = done + 1
            if done == turns:
                self.finished_tile(acc, parts, joint, which, ends, now, slab, rank, out)
                now, done, which = now + stride, Int32(0), which ^ 1
                self.rest(ends, now, slab, rank, sa, sw, bias, out)
                acc.fill(0)
        cute.arch.cp_async_wait_group(0)  # no program ends before what it asked for has come

    @cute.jit
    def placed(self, at, tile, column, w):
        """Addresses of a lane's rows of W, from a column on."""
        n, k = w.shape
        lane = cute.arch.lane_idx()
        row = tile * self.work.rows + lane // 4
        for i in cutlass.range_constexpr(self.work.rows // 8):
            line = Int64(cutlass.min(row + i * 8, n - 1))
            at[i] = w.iterator.toint() + line * k + column + lane % 4 * 16

    @cute.jit
    def next(self, at, tile, turn, column, turns, stride, first, w):
        """The line after this one: (tile, turn, column), and its addresses."""
        turn = turn + 1
        last = turn == turns
        turn = 0 if last else turn
        tile = tile + stride if last else tile
        column = first if last else column + self.every
        if last:
            self.placed(at, tile, first, w)
        else:
            for i in cutlass.range_constexpr(self.work.rows // 8):
                at[i] = at[i] + self.every
        return tile, turn, column

    @cute.jit
    def number_of(self, o: cutlass.Constexpr, rank):
        """Which of the program's results a thread has, (row of W, row of a) of it and whether it
        is one."""
        config = self.work
        share = config.rows * config.q // config.split
        i = cute.arch.thread_idx()[0] + o * config.threads
        at = i + rank * share
        return at, at % config.rows, at // config.rows, i < share

    @cute.jit
    def rest(self, ends, tile, slab, rank, sa, sw, bias, out):
        """Scales and biases of a thread's results."""
        m, n = out.shape
        for o in cutlass.range_constexpr(cute.size(ends.shape[1])):
            _, row, line, _ = self.number_of(o, rank)
            row = row + tile * self.work.rows
            ends[0, o] = self.scale(sw, self.form.columns, row, n)
            ends[1, o] = self.scale(sa, self.form.rows, slab + line, m)
            ends[2, o] = self.added(bias, row, n)

    @cute.jit
    def finished_tile(self, acc, parts, joint, which, ends, tile, slab, rank, out):
        """Adds up the sums of all warps, and of the programs of a cluster; stores the results.

        which  of two places for sums, by turns: so nobody need wait until the last were read"""
        config = self.work
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        thread = cute.arch.thread_idx()[0]
        for b in cutlass.range_constexpr(self.tiles):
            for i in cutlass.range_constexpr(config.rows // 16):
                for c in cutlass.range_constexpr(4):
                    row = i * 16 + c // 2 * 8 + lane // 4
                    column = b * 8 + lane % 4 * 2 + c % 2
                    if self.columns >= 8 or column < self.columns:
                        parts[row, column, warp, which] = acc[c, i, b]
        cute.arch.sync_threads()
        if cutlass.const_expr(config.split > 1):
            size = config.rows * config.q
            for o in cutlass.range_constexpr(-(-size // config.threads)):
                i = thread + o * config.threads
                if i < size:
                    joint[i] = self.of_warps(parts, i, which)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        for o in cutlass.range_constexpr(cute.size(ends.shape[1])):
            at, row, line, own = self.number_of(o, rank)
            if own:
                if cutlass.const_expr(config.split > 1):
                    total = self.of_programs(joint, at)
                else:
                    total = self.of_warps(parts, at, which)
                n, m = row + tile * config.rows, line + slab
                if m < out.shape[0] and n < out.shape[1]:
                    value = total.to(Float32) * ends[0, o] * ends[1, o] + ends[2, o]
                    out[m, n] = value.to(self.out)
        if cutlass.const_expr(config.split > 1):
            cute.arch.cluster_arrive()  # others may still read sums here
            cute.arch.cluster_wait()

    @cute.jit
    def of_warps(self, parts, i, which):
        """The sum over the program's part of K, of its result i."""
        row, line = i % self.work.rows, i // self.work.rows
        column = line // self.per * 8 + line % self.per  # of the first half, in tiles
        total = self.total(0)
        for warp in cutlass.range_constexpr(self.work.warps):
            for half in cutlass.range_constexpr(self.halves):
                total = total + parts[row, column + half * self.per, warp, which]
        return total

    @cute.jit
    def of_programs(self, joint, i):
        """The sum over K, of the program's result i."""
        total = self.total(0)
        for other in cutlass.range_constexpr(self.work.split):
            place = ptx(
                "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
                joint.iterator.toint() + i * 4, Int32(other), types=[Int32],
            )  # fmt: skip
            total = total + ptx("ld.shared::cluster.b32 {$w0}, [{$r0}];", place, types=[self.total])
        return total


def compiled(form: Form, config: Config, early: bool = True, options: str = ""):
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
        Dots(form, config, early), matrix(form.a, m, k),
        scales(form.rows, form.sa, 1 if form.rows == "tensor" else 2), matrix(form.w, n, k),
        scales(form.columns, form.sw), bias, matrix(form.out, m, n), Int32(132),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch sm_90a {options}",
    )  # fmt: skip


def compile_checks():
    """(name, check) of the products."""
    from qinductor.kernels.scaled_matmul_dots_checks import checks

    return list(checks())
