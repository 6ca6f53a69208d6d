"""Provider of scaled_matmul in Triton, for sm_80 and up: triton.scaled_mma, for any M."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import sympy
import torch

from qinductor.kernels.configs import matched
from qinductor.kernels.scaled_matmul import FP32, SCALED_MATMUL, Operands, ScaledMatmul, cost
from qinductor.kernels.scaled_matmul_sums import signed
from qinductor.kernels.scaled_matmul_triton_form import (
    E8M0,
    INT8,
    PROMOTED,
    Packed,
    device_form,
    four,
    integral,
    padded,
    slice_of,
    sums_of,
)
from qinductor.kernels.triton_device import capability, shared_memory
from qinductor.rates import BANDWIDTH, RATE, M

SHARED = 204 << 10  # bytes of shared memory that a program's tiles may take
Tile = tuple[int, int, int, int, int]  # rows of a, rows of W, columns, warps, stages
MANY = 1 << 30
# Largest M -> tiles worth a try, the first guess first. Where M is at most FEW W is the left
# operand of the product: tensor cores want 64 rows of that, and 16 of the other.
FEW = 64
_NARROW = {
    bm: [(bm, 128, 128, 4, 4), (bm, 64, 128, 4, 6), (bm, 64, 256, 4, 4), (bm, 128, 256, 8, 3)]
    for bm in (16, 32)
}
_FEW: dict[int, list[Tile]] = {
    **_NARROW,
    64: [(64, 128, 128, 8, 4), (64, 64, 128, 4, 4), (64, 128, 128, 4, 4)],
}
# Sums stay in tensor cores.
WHOLE = {
    **_FEW,
    128: [(128, 64, 128, 4, 4), (128, 128, 128, 8, 4), (128, 64, 128, 8, 5)],
    MANY: [(128, 256, 128, 8, 4), (128, 256, 128, 8, 3), (128, 128, 128, 8, 4),
           (256, 128, 128, 8, 3)],
}  # fmt: skip
# Sums of 128 columns are added up outside of them: twice as many registers.
ADDED = {
    **_FEW,
    128: [(128, 64, 128, 4, 4), (128, 128, 128, 8, 4), (64, 128, 128, 4, 3)],
    MANY: [(128, 128, 128, 8, 4), (128, 128, 128, 8, 3), (64, 128, 128, 4, 3),
           (128, 64, 128, 4, 3)],
}  # fmt: skip
# Sums of fewer columns: a step of the loop has several of them.
SLICED = {
    **_FEW,
    128: [(128, 64, 128, 8, 4), (128, 128, 128, 8, 4), (64, 128, 128, 4, 3)],
    MANY: [(128, 128, 128, 8, 4), (128, 64, 128, 8, 4), (64, 128, 128, 4, 3)],
}
NIBBLES = {
    **_NARROW,
    64: [(64, 128, 128, 8, 4), (64, 128, 128, 4, 4), (64, 64, 128, 4, 4)],
    128: [(128, 128, 128, 8, 4), (64, 128, 128, 8, 4), (128, 128, 64, 8, 4)],
    MANY: [(128, 128, 128, 8, 4), (128, 128, 128, 8, 3), (128, 128, 64, 8, 4)],
}
# The same, and sums of slices of 8-bit codes, with zero points, which take registers.
CENTRED_NIBBLES = {
    **NIBBLES,
    128: [(64, 128, 128, 8, 4), (128, 128, 64, 8, 4), (64, 128, 128, 4, 4)],
    MANY: [(64, 128, 128, 8, 4), (128, 128, 64, 8, 4), (128, 64, 128, 4, 4)],
}
CENTRED = {
    **_FEW,
    128: [(128, 64, 128, 8, 4), (64, 128, 128, 4, 3)],
    MANY: [(128, 64, 128, 8, 4), (128, 128, 128, 8, 4), (64, 128, 128, 4, 3)],
}
FLOAT8 = (8, 9)  # compute capability from which tensor cores have float8


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import scaled_matmul_triton_kernels

    return scaled_matmul_triton_kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of rows of a, rows of W and columns; parts of K, warps and stages of the pipeline.

    swap  whether W is the left operand, the one with 64 rows and more
    tma   whether tiles are fetched by descriptors, where the device and alignment allow it
    """

    bm: int
    bn: int
    bk: int
    split: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False

    def __str__(self) -> str:
        text = f"m{self.bm}.n{self.bn}.k{self.bk}.s{self.split}.w{self.warps}.p{self.stages}"
        return text + ".swap" * self.swap + ".tma" * self.tma

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Config":
        """The config that `str` wrote; ValueError for any other text."""
        pattern = r"m(\d+)\.n(\d+)\.k(\d+)\.s(\d+)\.w(\d+)\.p(\d+)(\.swap)?(\.tma)?"
        match = matched(pattern, text, "m16.n64.k128.s4.w4.p4", "triton.scaled_mma")
        bm, bn, bk, split, warps, stages = map(int, match.groups()[:6])
        return Config(bm, bn, bk, split, warps, stages, bool(match[7]), bool(match[8]))

    def shared(self, contract: ScaledMatmul) -> int:
        """Bytes of shared memory that the pipeline takes, about."""
        return self.stages * self.bk * (self.bm + self.bn * contract.weight.bits // 8)

    def within(self, contract: ScaledMatmul, limit: int) -> "Config":
        """This config, or one of fewer stages and then columns that takes less shared memory."""
        config = self
        while config.shared(contract) > limit and (config.stages > 2 or config.bk > 64):
            stages = max(2, config.stages - 1)
            bk = config.bk if config.stages > 2 else config.bk // 2
            config = dataclasses.replace(config, stages=stages, bk=bk)
        return config


class ScaledMMA(Packed):
    """Codes in shared memory, or of 4 bits in registers; scales on the sums."""

    name = "triton.scaled_mma"
    version = 1

    def seconds(self, contract: ScaledMatmul) -> sympy.Expr:
        # An H200's times of four shapes, to M = 128 within about a fifth.
        spent, rate = cost(contract), 1.15 if slice_of(contract) else 1.5
        few = spent["bytes"] / 0.95 / BANDWIDTH
        rows = 2e-8 * M + 2.4e-10 * sympy.Min(M, 128, evaluate=False) ** 2
        return 3.5e-6 + rows + sympy.Max(few, spent["flops"] / rate / RATE, evaluate=False)

    def configs(self, contract: ScaledMatmul, m: int) -> Sequence[str]:
        return candidates(contract, m)

    def run(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> torch.Tensor:
        a, scale, *zero = inputs
        chosen = Config.parse(config or self.configs(contract, a.shape[0])[0])
        given = dict(zip(_names(contract), packed, strict=True))
        return launch(contract, a, scale, given, chosen, zero=zero[0] if zero else None)

    def direct(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        source: Operands,
        config: str | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product with codes of 8 bits that are not packed, into `out` if it is given."""
        a, scale = inputs
        given = {"codes": source.weight.codes, "scale": source.weight.scale, "bias": source.bias}
        held = {name: tensor for name, tensor in given.items() if tensor is not None}
        chosen = Config.parse(config or self.configs(contract, a.shape[0])[0])
        return launch(contract, a, scale, held, chosen, out)


PROVIDER = ScaledMMA()


@functools.cache
def _names(contract: ScaledMatmul) -> tuple[str, ...]:
    return tuple(PROVIDER.operands(contract))


def launch(
    contract: ScaledMatmul,
    a: torch.Tensor,
    scale: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    config: Config,
    out: torch.Tensor | None = None,
    kernels: ModuleType | None = None,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product [M, N], into `out` if it is given.

    given  the packed tensors by name; codes [N, K] with contiguous rows, `scale` of any strides"""
    code, w = kernels or device(), contract.weight
    m = a.shape[0]
    a = signed(a if a.stride(1) == 1 else a.contiguous())
    wide = False
    if a.is_cuda:
        config = config.within(contract, shared_memory(a.device, SHARED))
        wide = capability(a.device) < FLOAT8
    form = device_form(contract, wide)
    config = dataclasses.replace(config, bk=max(config.bk, 64 if four(contract) else form.summed))
    if four(contract):
        codes, stride = given["nibbles"], padded(contract)[1]
        held: torch.Tensor | None = given["nibbles_scale"].t()
    else:
        codes, held = given["codes"], given.get("scale")
        stride = codes.stride(0)
    bs = min(slice_of(contract) or PROMOTED, config.bk)
    split = min(config.split, -(-w.k // config.bk))
    tma = config.tma and not four(contract) and not wide and _aligned(a, codes)
    left, right = _operands(a, codes, wide, (config.bm, config.bn, bs) if tma else None)
    if out is None:
        out = a.new_empty((m, w.n), dtype=contract.out)
    summed = torch.int32 if integral(contract) and not form.promote else FP32
    stride_out = out.stride(0) if split == 1 else w.n
    parts = out if split == 1 else a.new_empty((split, m, w.n), dtype=summed)
    sw = _scales(held, parts)
    sa = _scales(scale if contract.group else scale.reshape(1, 1).expand(m, 1), parts)
    zeros = _zeros(contract, zero, given, parts)
    bias = given.get("bias", parts)
    asm = not type(code.product).__name__.startswith("Interpreted")
    pdl = a.is_cuda and capability(a.device) >= (9, 0)
    tiles = -(-m // config.bm) * -(-w.n // config.bn)
    with torch.cuda.device_of(out):
        code.product[(tiles, split)](
            left, a.stride(0), right, stride, *sa, *sw, *zeros, bias, parts, stride_out, m, w.n,
            w.k, split,
            F=form, BM=config.bm, BN=config.bn, BK=config.bk, BS=bs, PARTS=split > 1,
            STAGES=config.stages, EVEN_K=w.k % config.bk == 0, SWAP=config.swap or four(contract),
            TMA=tma, PDL=pdl, ASM=asm, num_warps=config.warps, enable_fp_fusion=False,
        )  # fmt: skip
        if split > 1:
            block = 256
            code.sum_parts[(m, -(-w.n // block))](
                parts, *sa[:2], *sw[:2], *zeros[:2], zeros[3], bias, out, out.stride(0), m, w.n,
                split, F=form, B=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
                enable_fp_fusion=False,
            )  # fmt: skip
    return out


def scaled(
    contract: ScaledMatmul,
    sums: torch.Tensor,
    scale: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    zero: torch.Tensor | None = None,
    kernels: ModuleType | None = None,
) -> torch.Tensor:
    """The result of contiguous int32 sums [M, N] where no scale changes along k, in one launch."""
    code, (m, n), block = kernels or device(), sums.shape, 1024
    out = sums.new_empty((m, n), dtype=contract.out)
    sw = _scales(given.get("scale"), sums)
    sa = _scales(scale if contract.group else scale.reshape(1, 1).expand(m, 1), sums)
    zeros = _zeros(contract, zero, given, sums)
    with torch.cuda.device_of(out):
        code.sum_parts[(m, -(-n // block))](
            sums, *sa[:2], *sw[:2], *zeros[:2], zeros[3], given.get("bias", sums), out, n, m, n, 1,
            F=device_form(contract, False), B=block, PDL=False, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _scales(held: torch.Tensor | None, none: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(scales, strides along rows and along k) as the kernels take them."""
    if held is None:
        return none, 0, 0
    bits = held.view(torch.uint8) if held.dtype is E8M0 else held
    rows, columns = bits.stride() if bits.dim() == 2 else (bits.stride(0), 0)
    return bits, rows, columns


def _zeros(
    contract: ScaledMatmul,
    zero: torch.Tensor | None,
    given: Mapping[str, torch.Tensor],
    none: torch.Tensor,
) -> tuple[torch.Tensor, int, int, torch.Tensor]:
    """(zero points, their strides along rows and along k, sums of codes) as the kernels take
    them."""
    if zero is None:
        return none, 0, 0, none
    held, *strides = _scales(zero if contract.group else zero.reshape(1, 1), none)
    (sums,) = (given[name] for name in sums_of(contract))
    return held, strides[0] if contract.group else 0, strides[1], sums


def _aligned(*tensors: torch.Tensor) -> bool:
    """Whether TMA can fetch tiles of these on this device."""
    ready = not tensors[0].is_cuda or capability(tensors[0].device) >= (9, 0)
    return ready and all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in tensors)


def _operands(
    a: torch.Tensor, codes: torch.Tensor, wide: bool, tiles: tuple[int, int, int] | None
) -> tuple[Any, Any]:
    """a and W as the kernels take them: tensors, or descriptors of tiles of these sizes."""
    if tiles is not None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        bm, bn, bs = tiles
        return (
            TensorDescriptor(a, list(a.shape), [a.stride(0), 1], [bm, bs]),
            TensorDescriptor(codes, list(codes.shape), [codes.stride(0), 1], [bn, bs]),
        )
    if wide:
        return a.view(torch.uint8), codes if codes.dtype is INT8 else codes.view(torch.uint8)
    return a, codes


@functools.cache
def tiles(contract: ScaledMatmul, m: int) -> tuple[Config, ...]:
    """Configs of one part of K that are worth measuring at m rows, the best guess first."""
    # Those take more registers for each number of the result.
    centred = slice_of(contract) > 0 and (contract.zero is not None or contract.out is FP32)
    table = {0: WHOLE, PROMOTED: ADDED}.get(slice_of(contract), SLICED)
    table = NIBBLES if four(contract) else table
    if centred:
        table = CENTRED_NIBBLES if four(contract) else CENTRED
    fits = next(rows for rows in table if m <= rows)
    tma = not four(contract)
    # Of nibbles in slices of 32 a step of 256 columns is not fetched ahead.
    most = 128 if four(contract) and slice_of(contract) < 64 else 256
    return tuple(
        Config(bm, bn, min(bk, most), 1, warps, stages, fits <= FEW, tma).within(contract, SHARED)
        for bm, bn, bk, warps, stages in table[fits]
    )


@functools.lru_cache(4096)
def candidates(contract: ScaledMatmul, m: int) -> tuple[str, ...]:
    """Configs worth measuring at m rows, the best guess first."""
    w, found = contract.weight, {str(heuristic(contract, m)): None}
    for config in tiles(contract, m):
        programs = -(-m // config.bm) * -(-w.n // config.bn)
        for split in (1, 2, 4, 8):
            fills = 100 <= programs * split <= 1056 or split == 1
            if fills and split * config.bk <= w.k:
                found[str(dataclasses.replace(config, split=split))] = None
    return tuple(found)


def heuristic(contract: ScaledMatmul, m: int) -> Config:
    """A config for m rows."""
    w, config = contract.weight, tiles(contract, m)[0]
    programs = -(-m // config.bm) * -(-w.n // config.bn)
    split = 1
    fill = 400 if m <= FEW else 200  # few rows: what counts are the loads in flight
    while split < 8 and programs * split < fill and w.k // (config.bk * split * 2) >= 4:
        split *= 2
    return dataclasses.replace(config, split=split)


SCALED_MATMUL.register(PROVIDER)
