"""Providers of dequant_matmul in Triton, for sm_80 and up.

`triton.mma` dequantises W in registers and multiplies by tensor cores, for any M, and all experts
at once. `triton.dequant_cublas` writes W out, dense, into a workspace of the call and has
cuBLAS multiply: for large M, where that costs less than taking codes apart once for each tile.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import ModuleType

import sympy
import torch
from torch.nn.functional import linear

from qinductor.kernels import fragments
from qinductor.kernels.configs import matched
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, DequantMatmul, cost
from qinductor.kernels.dequant_matmul_triton_form import (
    NARROW,
    Packed,
    device_form,
    may_be_late,
    widths,
)
from qinductor.kernels.triton_device import capability, shared_memory
from qinductor.rates import BANDWIDTH, RATE

WORKSPACE = 512 << 20  # bytes of dense W at once
SHARED = 204 << 10  # bytes of shared memory that a program's tiles may take
MEASURED = 1024  # of more rows only the first guess: others win (4096x4096, M = 4096: 244, 185 us)
# Rows of x -> tiles worth a try: (rows of W, columns, warps, stages). Of 8 warps each 4 take 64
# rows of W; sums of 128 x 64 fill the registers of 4.
_FEW = [(bn, bk, 4, p) for bn in (64, 128) for bk in (128, 256) for p in (3, 5)]
TILES = {
    16: _FEW,
    32: _FEW,
    64: [(64, 128, 4, 3), (128, 128, 4, 3), (128, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3)],
    128: [(128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3)],
}


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import dequant_matmul_triton_kernels

    return dequant_matmul_triton_kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of rows of x, rows of W and columns; parts of K, warps and stages of the pipeline."""

    bm: int
    bn: int
    bk: int
    split: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"m{self.bm}.n{self.bn}.k{self.bk}.s{self.split}.w{self.warps}.p{self.stages}"

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Config":
        """The config that `str` wrote; ValueError for any other text."""
        pattern = r"m(\d+)\.n(\d+)\.k(\d+)\.s(\d+)\.w(\d+)\.p(\d+)"
        match = matched(pattern, text, "m16.n64.k128.s4.w4.p3", "triton.mma")
        return Config(*map(int, match.groups()))

    def within(self, contract: DequantMatmul, limit: int) -> "Config":
        """This config, or one of fewer stages and then rows that takes less shared memory."""
        config = self
        while config.shared(contract) > limit and (config.stages > 2 or config.bm > 16):
            less = {"stages": config.stages - 1} if config.stages > 2 else {"bm": config.bm // 2}
            config = dataclasses.replace(config, **less)
        return config

    def shared(self, contract: DequantMatmul) -> int:
        """Bytes of shared memory that the pipeline takes, about."""
        bits = contract.weight.bits
        return (
            self.stages + 1
        ) * self.bm * self.bk * 2 + self.stages * self.bn * self.bk * bits // 8


class MMA(Packed):
    """W[BN, BK] in registers times x in shared memory."""

    name = "triton.mma"

    def seconds(self, contract: DequantMatmul) -> sympy.Expr:
        # Fits three shapes x M = 1, 16, 64, 128, 512 of int4 on an H200 to within 20 %.
        spent = cost(contract)
        return 4.5e-6 + spent["bytes"] / 0.75 / BANDWIDTH + 1.2 * spent["flops"] / RATE

    def configs(self, contract: DequantMatmul, m: int) -> Sequence[str]:
        # Of experts only a call knows how many have rows.
        return () if contract.experts else candidates(contract, m)

    def run(
        self,
        contract: DequantMatmul,
        x: torch.Tensor,
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> torch.Tensor:
        experts, m = x.shape[0] if x.dim() == 3 else 1, x.shape[-2]
        chosen = Config.parse(config) if config else heuristic(contract, m, experts)
        return launch(contract, x, self._named(contract, packed), chosen)

    batched = run  # x[E, M, K] times stacked weights

    def grouped(
        self,
        contract: DequantMatmul,
        x: torch.Tensor,
        offsets: torch.Tensor,
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> torch.Tensor:
        """x[T, K] of rows sorted by expert times stacked weights: [T, N]."""
        chosen = Config.parse(config) if config else of_groups(contract, x, offsets)
        return launch(contract, x, self._named(contract, packed), chosen, offsets)


def launch(
    contract: DequantMatmul,
    x: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    config: Config,
    offsets: torch.Tensor | None = None,
    kernels: ModuleType | None = None,
) -> torch.Tensor:
    """The product, of shape [M, N], [E, M, N], or with offsets [T, N] of rows sorted by expert."""
    code = kernels or device()
    w = contract.weight
    x = reordered(x, given.get("order"), offsets)
    shape = (*x.shape[:-1], w.n)
    if x.stride(-1) != 1 or x.dim() == 3 and x.stride(0) != x.shape[1] * x.stride(1):
        x = x.contiguous()
    if x.is_cuda:
        config = config.within(contract, shared_memory(x.device, SHARED))
    experts = 0 if offsets is None else offsets.shape[0]
    batch = x.shape[0] if x.dim() == 3 else 1
    m = x.shape[-2]
    n, k = fragments.padded(w.n, w.k, widths(w))
    grid = -(-m // config.bm), -(-w.n // config.bn)
    if experts:  # one more than can be: with rows past the last offset, which are 0
        grid = (grid[0] + min(experts + 1, m)) * grid[1], 1
    out = x.new_empty(shape)
    bk = min(config.bk, k & -k)  # a config of another K may be
    split = min(config.split, -(-w.k // bk))
    if experts and {"output_scale", "bias"} & set(given):
        split = 1  # `sum_parts` does not know whose a row is
    parts = out if split == 1 else x.new_empty((split, *shape), dtype=torch.float32)
    epilogue = given.get("output_scale", x), given.get("bias", x)
    form = device_form(contract, scaled_late(contract, config.bm, bk))
    asm = not type(code.product).__name__.startswith("Interpreted")
    pdl = x.is_cuda and capability(x.device) >= (9, 0)
    with torch.cuda.device_of(x):
        code.product[(*grid, split * batch)](
            x, x.stride(-2), *_packed(contract, given, x), *epilogue,
            x if offsets is None else offsets, parts, m, w.n, w.k, n // 64, k, split,
            F=form, E=experts, EP=1 << experts.bit_length() if experts else 0,
            BM=config.bm, BN=config.bn, BK=bk, PARTS=split > 1, STAGES=config.stages,
            EVEN_K=w.k % bk == 0, PDL=pdl, ASM=asm, num_warps=config.warps,
            maxnreg=registers(contract, config, experts > 0),
            enable_fp_fusion=False,  # every operation rounds as the graph's did
        )  # fmt: skip
        if split > 1:
            rows, block = out.numel() // w.n, 256
            code.sum_parts[(rows, -(-w.n // block))](
                parts, *epilogue, out, rows, m, w.n, split, F=form, B=block, PDL=pdl,
                num_warps=4, launch_pdl=pdl, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def scaled_late(contract: DequantMatmul, bm: int, bk: int) -> bool:
    """Whether sums are scaled, and not W, where scaling W takes float32 and a rounding: 32 experts
    of FP8 blocks, 7168x2048, take 126 us instead of 176 on an H200. Of the few values of fewer
    bits, those that the graph rounds up may be most."""
    w = contract.weight
    wide = w.compute is torch.float32 and w.bits >= 4
    return wide and bm <= 64 and may_be_late(contract, bk)


def registers(contract: DequantMatmul, config: Config, grouped: bool) -> int | None:
    """The most registers of a thread, where ptxas would take so many for a tile of sorted rows that
    fewer programs fit a multiprocessor, and 128 do: plain products then take 116 and 124."""
    w = contract.weight
    plain = w.bits == 4 and w.table is None and w.arithmetic == "q*s" and w.compute in NARROW
    few = config.bm == 16 and config.bn * config.bk <= 32 * config.warps * 128
    many = config.warps == 8 and config.bn * config.bm <= 128 * 128 and config.bk == 64
    return 128 if grouped and plain and (few or many) else None


def _packed(
    contract: DequantMatmul, given: Mapping[str, torch.Tensor], none: torch.Tensor
) -> list[torch.Tensor]:
    """W as the kernels take it: three fields, the first again for those that it has not; scale,
    zero, outer scale and table, `none` for those that it has not."""
    fields = [given[f"fragments{width}"] for width in widths(contract.weight)]
    fields += [fields[0]] * (3 - len(fields))
    others = "fragments_scale", "fragments_zero", "fragments_outer", "table"
    return [*fields, *(given.get(name, none) for name in others)]


def written_by(contract: DequantMatmul) -> tuple[int, int]:
    """(columns, warps) of a program that writes W out; W of 256 columns spills with 4 warps."""
    bk = fragments.columns(widths(contract.weight))
    return bk, 4 if bk == 128 else 8


@functools.lru_cache(4096)
def candidates(contract: DequantMatmul, m: int) -> tuple[str, ...]:
    """Configs worth measuring at m rows, the best guess first."""
    w, first = contract.weight, heuristic(contract, m)
    found = {str(first): None}
    least = 256 // min(widths(w))  # columns in a tile of the narrowest field
    sizes = {first.bm, min(first.bm, 64)} if m <= MEASURED else set()
    tiles = [(bm, *tile) for bm in sorted(sizes) for tile in TILES[bm]]
    for bm, bn, bk, warps, stages in tiles:
        programs = -(-m // bm) * -(-w.n // bn)
        for split in (1, 2, 4, 8):
            config = Config(bm, bn, max(bk, least), split, warps, stages)
            fills = 66 <= programs * split <= 1056 or split == 1
            fits = split * config.bk * 2 <= w.k and config.shared(contract) <= SHARED
            if fills and fits:
                found[str(config)] = None
    return tuple(found)


def of_groups(contract: DequantMatmul, x: torch.Tensor, offsets: torch.Tensor) -> Config:
    """A config for rows sorted by expert, of which only the number in all is known: tiles of twice
    as many as the mean, since an expert that needs two takes its codes apart twice."""
    rows, experts = x.shape[0], offsets.shape[0]
    mean = -(-rows // experts)
    return heuristic(contract, 2 * mean if 4 < mean <= 32 else mean, min(rows, experts))


def heuristic(contract: DequantMatmul, m: int, experts: int = 1) -> Config:
    """A config for m rows of each expert, as an H200 preferred for int4 of three shapes."""
    w = contract.weight
    bk = max(64 if m > 64 else 128, 256 // min(widths(w)))
    bm = next((b for b in (16, 32, 64) if m <= b), 128)
    addresses = w.table is not None and bm == 64  # of a table's entries, which take registers
    narrow = m <= 64 and (w.n * experts < 8192 or addresses)
    bn = 64 if narrow else 128
    programs = -(-m // bm) * -(-w.n // bn) * experts
    split = 1
    # Parts of 8 steps or more; fewer where multiprocessors would have nothing to do.
    while split < 8 and programs * split < (900 if bm <= 32 else 200):
        steps = w.k // (bk * split * 2)
        if steps < (8 if programs * split >= 132 else 2):
            break
        split *= 2
    wide = bm == 64 and bn * bk > 128 * 128  # 1-bit fields: W would fill the registers of 4 warps
    config = Config(bm, bn, bk, split, 8 if bm > 64 or wide else 4, 4 if bm > 64 else 3)
    return config.within(contract, SHARED)


def reordered(
    x: torch.Tensor, order: torch.Tensor | None, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """x with its columns in the order in which those of W are packed."""
    if order is None:
        return x
    if order.dim() == 1:
        return x[..., order]
    if offsets is None:
        return torch.take_along_dim(x, order[:, None, :], -1)
    rows = torch.arange(x.shape[0], device=x.device)
    expert = torch.searchsorted(offsets.to(rows.dtype), rows, right=True)
    return x.gather(1, order[expert.clamp(max=order.shape[0] - 1)])


class DequantCublas(Packed):
    """W dense in a workspace, then cuBLAS: what a dense weight would cost, and writing W once."""

    name = "triton.dequant_cublas"

    def seconds(self, contract: DequantMatmul) -> sympy.Expr:
        # W is written at 0.95 of the bandwidth and read again by the product, at 0.85 if that is
        # what the product waits for (an H200).
        w, spent = contract.weight, cost(contract)
        wide = w.n * w.k * contract.x.itemsize * max(1, contract.experts)
        product = sympy.Max(spent["flops"] / RATE, wide / 0.85 / BANDWIDTH, evaluate=False)
        return 7e-6 + (spent["bytes"] + wide) / 0.95 / BANDWIDTH + product

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        given, w = self._named(contract, packed), contract.weight
        # Of rows that are not aligned cuBLAS sums parts in bf16, with twice the error.
        x = reordered(x, given.get("order")).contiguous()
        scale, bias = given.get("output_scale"), given.get("bias")
        rows = max(128, WORKSPACE // (2 * w.k) // 128 * 128)
        if rows >= w.n and scale is None:
            return linear(x, dense(contract, given, 0, w.n), bias)
        out = x.new_empty((x.shape[0], w.n))
        for first in range(0, w.n, rows):
            part = dense(contract, given, first, min(rows, w.n - first)).t()
            into = out[:, first : first + rows]
            if bias is None or scale is not None:
                torch.mm(x, part, out=into)
            else:
                torch.addmm(bias[first : first + rows], x, part, out=into)
        if scale is None:
            return out
        out.mul_(scale)
        return out if bias is None else out.add_(bias)

    def grouped(
        self,
        contract: DequantMatmul,
        x: torch.Tensor,
        offsets: torch.Tensor,
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> torch.Tensor:
        """x[T, K] of rows sorted by expert times stacked weights: [T, N]."""
        given, w = self._named(contract, packed), contract.weight
        aligned = contract.x is torch.bfloat16 and not w.n % 8 and not w.k % 8
        fits = offsets.shape[0] * w.n * w.k * contract.x.itemsize <= WORKSPACE
        # Elsewhere torch reads the offsets on the host.
        waits = x.is_cuda and capability(x.device)[0] not in (9, 10)
        if waits or not (aligned and fits) or {"bias", "output_scale"} & set(given):
            return launch(contract, x, given, of_groups(contract, x, offsets), offsets)
        x = reordered(x, given.get("order"), offsets).contiguous()
        wide = dense(contract, given, 0, w.n, offsets.shape[0])
        out = torch._grouped_mm(x, wide.mT, offs=offsets)
        rows = torch.arange(x.shape[0], device=x.device)
        return torch.where((rows < offsets.max())[:, None], out, 0)


def dense(
    contract: DequantMatmul,
    given: Mapping[str, torch.Tensor],
    first: int,
    count: int,
    experts: int = 0,
    kernels: ModuleType | None = None,
) -> torch.Tensor:
    """These rows of W, or of each expert's [E, N, K], in the order of columns that is packed."""
    code = kernels or device()
    w = contract.weight
    n, k = fragments.padded(w.n, w.k, widths(w))
    shape = (experts, count, w.k) if experts else (count, w.k)
    out = next(iter(given.values())).new_empty(shape, dtype=contract.x)
    bk, warps = written_by(contract)
    asm = not type(code.product).__name__.startswith("Interpreted")
    with torch.cuda.device_of(out):
        code.dequantise[(-(-w.k // bk), -(-count // 64), max(1, experts))](
            *_packed(contract, given, out), out, count, w.k, n // 64, k, first,
            F=device_form(contract), BN=64, BK=bk, ASM=asm, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


for provider in (MMA(), DequantCublas()):
    DEQUANT_MATMUL.register(provider)
