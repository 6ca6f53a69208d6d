"""Device code of gluon.wgmma: W's codes become the left operand of wgmma in registers, for sm_90a.

One warp fetches by TMA, two warpgroups multiply: each takes RN of the 2 RN rows of W of a tile, BM
rows of x, and slices of 64 columns. A ring of STAGES slices runs on from tile to tile; a program
takes work units `program, program + programs, ...`. F is a `Form`: what is constant for a weight
format. Registers hold the codes as `fragments` packed them: nothing moves between threads.

How a slice's memory goes back to TMA: a warpgroup reads its codes and scales (generic proxy), waits
for the wgmma that read x (async proxy), fences, meets at a barrier, and one thread arrives. PTX
orders a generic read before an async write only by a proxy fence ("Causality order" asks for one
on the path whenever the proxies differ, and Triton's own pass inserts it for a write after a read
within one function). CUTLASS's mixed-input kernels and DeepGEMM go without: what a read returned
is in registers before the arrive. FENCE says which.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qinductor.kernels.dequant_matmul_triton_kernels import _finished

MISSING: str | None = None
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

    # Names of Triton 3.6 and of later versions.
    tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    VIEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
    OPERAND = gl.NVMMASharedLayout(128, 16, 2)  # x and the result
    CODES = gl.NVMMASharedLayout(0, 32, 3)
    GRID = gl.NVMMASharedLayout(0, 32, 2)
except (ImportError, AttributeError, TypeError) as error:  # it is experimental
    MISSING = f"Gluon of triton {triton.__version__} is another: {error}"
    gluon, gl = triton, tl  # for the decorators; nothing below is called then

FENCE = gl.constexpr(True)
SHARED = 227 << 10  # bytes that a program may have
SUMMED = 32  # rows of W that a program of `sum_parts` takes


@triton.constexpr_function
def _decoding(form):
    """PTX: four pairs of W's elements $0 to $3, of two rows each, from the codes $4 of both, their
    two scales in $5 and zeros in $7. An exponent over a code makes it 128 + code in bf16, 1024 +
    code in fp16; zeros are packed with that added. Every operation rounds as the graph's own."""
    bf16 = form.x == tl.bfloat16
    over, magic = (0x4300, 128) if bf16 else (0x6400, 1024)
    lines = [".reg .b32 x, minus, none, s0, s1, z0, z1, a0, a1, a2, a3;"]
    lines += ["mov.b32 minus, 0xBF80BF80; mov.b32 none, 0x80008000;"] if bf16 else []  # -1 and -0
    if form.zero:
        lines += ["prmt.b32 z0, $7, $7, 0x1010; prmt.b32 z1, $7, $7, 0x3232;"]
    else:
        zero = (over + int(-form.addend) - magic) * 0x10001
        lines += [f"mov.b32 z0, {zero}; mov.b32 z1, {zero};"]
    lines += ["prmt.b32 s0, $5, $5, 0x1010; prmt.b32 s1, $5, $5, 0x3232;"]
    for j in range(4):  # one LOP3 takes codes out and puts the exponent over them
        lines += [f"shr.b32 x, $4, {4 * j}; lop3.b32 a{j}, x, 0x000F000F, {over * 0x10001}, 0xEA;"]
    for j in range(4):
        less = f"fma.rn.bf16x2 a{j}, z{j % 2}, minus, a{j};"
        lines += [less if bf16 else f"sub.rn.f16x2 a{j}, a{j}, z{j % 2};"]
    for j in range(4):
        times = f"fma.rn.bf16x2 ${j}, a{j}, s{j % 2}, none;"
        lines += [times if bf16 else f"mul.rn.f16x2 ${j}, a{j}, s{j % 2};"]
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def _view(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    if VIEW:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def _grid(buffer, RN: gl.constexpr, L: gl.constexpr):
    """Pairs of a slice's scales or zeros, int32[RN / 2, 32]: of a row and the one 8 below."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs = _view(buffer, gl.int32, [RN // 2], flat).load(gl.SliceLayout(1, L))
    return pairs.expand_dims(1).broadcast_to([RN // 2, 32])


@gluon.jit
def _weight(q, s, z, F: gl.constexpr, RN: gl.constexpr, A: gl.constexpr):
    """W[RN, 64] of one slice in registers, in the layout A of wgmma's left operand."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])  # 16 bytes of a thread
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    T: gl.constexpr = F.x
    codes = _view(q, gl.int16, [RN // 2, 32], flat).load(L)
    scales = _grid(s, RN, L)
    zeros = scales  # for none
    if F.zero:
        zeros = _grid(z, RN, L)
    a, b, c, d = gl.inline_asm_elementwise(
        _decoding(F), "=r,=r,=r,=r,r,r,r,r,r", [codes, scales, zeros], (T.value,) * 4, False, 2
    )
    w = gl.join(gl.join(a, c), gl.join(b, d))  # [.., half, row]
    # rows / 16, row g, pair of columns t, four words i, which of the pair, half, which row
    w = w.reshape([RN // 16, 8, 4, 4, 2, 2, 2]).permute([0, 6, 1, 3, 5, 2, 4]).reshape([RN, 64])
    return gl.convert_layout(w, A, assert_trivial=True)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _unit(t, schedule):
    """(tile of x's rows, tile of W's rows, first slice, its end, place) of work unit t: tiles
    before `whole` are one unit each and have place -1, the `rest` after them one unit a part."""
    row_tiles, units, whole, rest, chunk, steps = schedule
    past = t - whole
    cut = past >= 0
    first = gl.where(cut, past // rest * chunk, 0)
    end = gl.where(cut, gl.minimum(first + chunk, steps), steps)
    tile = gl.where(cut, whole + past % rest, t)
    return tile % row_tiles, tile // row_tiles, first, end, gl.maximum(past, -1)


@gluon.jit
def _produce(
    descriptors, ring, schedule, F: gl.constexpr, BM: gl.constexpr, RN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching warp: slices of x, and of both warpgroups' codes, scales and zeros."""
    x_desc, q_desc, s_desc, z_desc = descriptors
    xs, qs, ss, zs, full, empty = ring
    GRIDS: gl.constexpr = 2 if F.zero else 1
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), schedule[1], gl.num_programs(0)):
        m, n, first, end, _ = _unit(t, schedule)
        for k in range(first, end):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, BM * 128 + 2 * (RN * 32 + GRIDS * RN * 2))
            tma_load(x_desc, [m * BM, k * 64], bar, xs.index(stage))
            group = k * 0  # of whole rows
            if F.group > 0:
                group = k // (F.group // 64)
            for c in gl.static_range(2):
                row = (n * 2 + c) * (RN // 64)
                tma_load(q_desc, [row, k * 2, 0], bar, qs.index(stage * 2 + c))
                tma_load(s_desc, [group, row * 32], bar, ss.index(stage * 2 + c))
                if F.zero:
                    tma_load(z_desc, [group, row * 32], bar, zs.index(stage * 2 + c))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _finish(acc, row, N, scale_ptr, bias_ptr, F: gl.constexpr, RN: gl.constexpr, D: gl.constexpr):
    """As `_finished` of Triton's kernels."""
    n = row + gl.arange(0, RN, gl.SliceLayout(1, D))
    if F.output_scale:
        scale = gl.load(scale_ptr + n, n < N, 0.0).to(gl.float32)
        acc = acc.to(F.x).to(gl.float32) * scale.expand_dims(1)
        acc = acc.to(F.x).to(gl.float32)
    if F.bias:
        acc += gl.load(bias_ptr + n, n < N, 0.0).to(gl.float32).expand_dims(1)
    return acc.to(F.x)


@gluon.jit
def _release(empty, stage):
    """Gives a slice's memory back to the fetching warp; the arrive has a barrier before it."""
    if FENCE:
        fence_async_shared()
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _consume(
    out_desc, out, ring, schedule, epilogue, C: gl.constexpr, F: gl.constexpr, BM: gl.constexpr,
    RN: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup C: its RN rows of each tile. Of each DEPTH slices all but the last are multiplied
    while the next is decoded; nothing is in flight over a loop's end, where Triton would wait."""
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    xs, qs, ss, zs, full, empty = ring
    units = schedule[1]
    N, scale_ptr, bias_ptr, parts_ptr = epilogue
    step = gl.num_programs(0)
    stage = 0
    phase = 0
    mbarrier.wait(full.index(0), 0)
    w = _weight(qs.index(C), ss.index(C), zs.index(C), F, RN, A)
    for t in range(gl.program_id(0), units, step):
        m, n, first, end, place = _unit(t, schedule)
        acc = gl.zeros([RN, BM], gl.float32, D)
        for k in range(first, end, DEPTH):
            before = stage
            for u in gl.static_range(DEPTH):
                token = warpgroup_mma(w, xs.index(stage).permute([1, 0]), acc, is_async=True)
                acc = warpgroup_mma_wait(1 if u < DEPTH - 1 else 0, deps=(token,))
                if u > 0:
                    _release(empty, before)
                if u == DEPTH - 1:
                    _release(empty, stage)
                before = stage
                stage, phase = _next(stage, phase, STAGES)
                more = (k + u + 1 < end) | (t + step < units)
                mbarrier.wait(full.index(stage), phase, pred=more)
                at = stage * 2 + C
                w = _weight(qs.index(at), ss.index(at), zs.index(at), F, RN, A)
        if place >= 0:
            r = (place * 2 + C) * RN + gl.arange(0, RN, gl.SliceLayout(1, D)).expand_dims(1)
            gl.store(
                parts_ptr + r * BM + gl.arange(0, BM, gl.SliceLayout(0, D)).expand_dims(0), acc
            )
        else:
            row = (n * 2 + C) * RN
            done = _finish(acc, row, N, scale_ptr, bias_ptr, F, RN, D)
            tma.store_wait(0)
            barrier()
            out.index(C).permute([1, 0]).store(done)
            fence_async_shared()
            barrier()
            tma_store(out_desc, [m * BM, row], out.index(C))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "row_tiles", "units", "whole", "rest", "chunk", "steps"])
def product(
    x_desc, q_desc, s_desc, z_desc, out_desc, scale_ptr, bias_ptr, parts_ptr, N, row_tiles, units,
    whole, rest, chunk, steps, F: gl.constexpr, BM: gl.constexpr, RN: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[M, N] = x . W^T for tiles before `whole`; of those after, the fp32 sums of each part go
    to parts[part, tile, 2 RN, BM] for `sum_parts`."""
    gdc_launch_dependents()
    xs = gl.allocate_shared_memory(F.x, [STAGES, BM, 64], x_desc.layout)
    qs = gl.allocate_shared_memory(gl.int32, [STAGES * 2, RN // 64, 2, 256], q_desc.layout)
    ss = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 1, RN // 2], s_desc.layout)
    zs = ss
    if F.zero:
        zs = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 1, RN // 2], z_desc.layout)
    out = gl.allocate_shared_memory(F.x, [2, BM, RN], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    descriptors = (x_desc, q_desc, s_desc, z_desc)
    ring = (xs, qs, ss, zs, full, empty)
    schedule = (row_tiles, units, whole, rest, chunk, steps)
    epilogue = (N, scale_ptr, bias_ptr, parts_ptr)
    gl.warp_specialize(
        [
            (_consume, (out_desc, out, ring, schedule, epilogue, 0, F, BM, RN, DEPTH, STAGES)),
            (_consume, (out_desc, out, ring, schedule, epilogue, 1, F, BM, RN, DEPTH, STAGES)),
            (_produce, (descriptors, ring, schedule, F, BM, RN, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit(do_not_specialize=["M", "row_tiles", "whole", "rest", "parts"])
def sum_parts(
    parts_ptr, scale_ptr, bias_ptr, out_ptr, M, N, row_tiles, whole, rest, parts,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The tiles that were cut, from the sums [parts, rest, BN, BM], always added in one order."""
    tile = whole + tl.program_id(0)
    row = tl.program_id(1) * B + tl.arange(0, B)[:, None]
    column = tl.arange(0, BM)[None, :]
    m, n = tile % row_tiles * BM + column, tile // row_tiles * BN + row
    place = (tl.program_id(0) * BN + row) * BM + column
    acc = tl.zeros((B, BM), tl.float32)
    gdc_wait()  # launched while the product still runs
    for part in range(parts):
        acc += tl.load(parts_ptr + part * rest * BN * BM + place, mask=m < M, other=0.0)
    acc = _finished(acc, scale_ptr, bias_ptr, n, n < N, F)
    tl.store(out_ptr + m.to(tl.int64) * N + n, acc, mask=(m < M) & (n < N))


def compile_checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every tile, and every kind of format with one tile, for sm_90a."""
    from qinductor.kernels.dequant_matmul import BF16, FP16, case
    from qinductor.kernels.dequant_matmul_gluon import TILES, Config

    if MISSING is not None:
        return
    zero: dict[str, Any] = {"arithmetic": "(q-z)*s", "zero": torch.int8}
    formats = [
        case("int4", 1, 256, 512, 1, 128, BF16),
        case("int4", 1, 256, 512, 1, 512, FP16),
        case("uint4", 1, 256, 512, 1, 64, FP16, **zero),
        case("uint4", 1, 256, 512, 1, 512, BF16, bias=True, output_scale=True, **zero),
    ]
    configs = [Config(n, m, d, True) for (n, m), t in TILES.items() for d in t.depths]
    pairs = [(formats[0], config) for config in configs]
    pairs += [(chosen, configs[0]) for chosen in formats[1:]]
    for chosen, config in pairs:
        name = f"{chosen.contract.summary} {config}"
        yield name, functools.partial(_check, chosen.contract, config)


def _check(contract: Any, config: Any) -> None:
    """RuntimeError for spills, too much shared memory, W elsewhere than in registers, or one of
    these registers written early."""
    from qinductor.kernels.dequant_matmul_gluon import TILES
    from qinductor.kernels.dequant_matmul_triton_form import device_form
    from qinductor.sass import disassembled, early_writes
    from qinductor.triton_compile import compiled

    form, half = device_form(contract), config.n // 2
    dtype = str(form.x)
    sizes = ("N", "row_tiles", "units", "whole", "rest", "chunk", "steps", "M", "parts")
    types = {
        "x_desc": f"tensordesc<{dtype}[{config.m}, 64],{OPERAND!r}>",
        "q_desc": f"tensordesc<i32[{half // 64}, 2, 256],{CODES!r}>",
        "s_desc": f"tensordesc<i32[1, {half // 2}],{GRID!r}>",
        "z_desc": f"tensordesc<i32[1, {half // 2}],{GRID!r}>",
        "out_desc": f"tensordesc<{dtype}[{config.m}, {half}],{OPERAND!r}>",
        **dict.fromkeys(("scale_ptr", "bias_ptr", "out_ptr"), f"*{dtype}"),
        **dict.fromkeys(sizes, "i32"),
        "parts_ptr": "*fp32",
    }
    shape = {"F": form, "BM": config.m}
    stages = TILES[config.n, config.m].stages
    tile = {"RN": half, "DEPTH": config.depth, "STAGES": stages, "num_warps": 4}
    made = compiled(product, types, {**shape, **tile}, 90, num_warps=4)
    added = compiled(sum_parts, types, {**shape, "BN": config.n, "B": SUMMED}, 90, num_warps=4)
    if made.spills or added.spills:
        raise RuntimeError(f"spills {made.spills} and {added.spills} bytes; wanted none")
    if made.shared > SHARED:
        raise RuntimeError(f"takes {made.shared} bytes of shared memory; wanted up to {SHARED}")
    sass = disassembled(made.cubin)
    if sass is None:
        warnings.warn("this Triton has no nvdisasm: registers were not looked at", stacklevel=1)
        return
    found = early_writes(sass)
    if found.writes or not found.left:
        raise RuntimeError(f"wanted W in registers until it was used; got {found}")
