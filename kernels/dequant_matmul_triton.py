"""Providers of dequant_matmul in Triton, for sm_80 and up.

`triton.mma` dequantises W in registers and multiplies by tensor cores, for any M; one launch does
all experts. `triton.dequant_cublas` writes W out, dense, into a workspace of the call and has
cuBLAS multiply: for large M, where that costs less than taking codes apart once for each tile.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch.nn.functional import linear

from qinductor.kernels import fragments
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, DequantMatmul
from qinductor.kernels.dequant_matmul_triton_form import Packed, device_form, widths

WORKSPACE = 512 << 20  # bytes of dense W at once
SHARED = 220 << 10  # bytes of shared memory of a multiprocessor that a program may fill


@functools.cache
def device() -> ModuleType:
    """The device code; Triton is imported when a kernel first runs."""
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
        match = re.fullmatch(r"m(\d+)\.n(\d+)\.k(\d+)\.s(\d+)\.w(\d+)\.p(\d+)", text)
        if match is None:
            raise ValueError(
                f"no config of triton.mma: {text!r}; wanted such as 'm16.n64.k128.s4.w4.p3'"
            )
        return Config(*map(int, match.groups()))

    def shared(self, contract: DequantMatmul) -> int:
        """Bytes of shared memory that the pipeline takes, about."""
        bits = contract.weight.bits
        return (
            self.stages + 1
        ) * self.bm * self.bk * 2 + self.stages * self.bn * self.bk * bits // 8


class MMA(Packed):
    """W[BN, BK] in registers times x in shared memory."""

    name = "triton.mma"

    def configs(self, contract: DequantMatmul, m: int) -> Sequence[str]:
        return [str(c) for c in candidates(contract, m)]

    def run(
        self,
        contract: DequantMatmul,
        x: torch.Tensor,
        packed: Sequence[torch.Tensor],
        config: str = "",
    ) -> torch.Tensor:
        """x[M, K] times W, or of E experts x[E, M, K]."""
        given = dict(zip(self.operands(contract), packed, strict=True))
        shape = (*x.shape[:-1], contract.weight.n)
        chosen = Config.parse(config or self.configs(contract, x.shape[-2])[0])
        return launch(contract, x, given, chosen, shape)


def launch(
    contract: DequantMatmul,
    x: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    config: Config,
    shape: tuple[int, ...],
    offsets: torch.Tensor | None = None,
    kernels: ModuleType | None = None,
) -> torch.Tensor:
    """The product, of shape [M, N], [E, M, N], or with offsets [T, N] of rows sorted by expert."""
    code = kernels or device()
    w = contract.weight
    if (order := given.get("order")) is not None:
        x = torch.take_along_dim(x, order[:, None, :], -1) if order.dim() > 1 else x[..., order]
    if x.stride(-1) != 1 or x.dim() == 3 and x.stride(0) != x.shape[1] * x.stride(1):
        x = x.contiguous()
    experts = 0 if offsets is None else offsets.shape[0]
    batch = x.shape[0] if x.dim() == 3 else 1
    m = x.shape[-2]
    n, k = fragments.padded(w.n, w.k, widths(w))
    tiles = -(-m // config.bm) + (min(experts, m) if experts else 0)
    # Rows past the last offset belong to no expert.
    out = x.new_zeros(shape) if experts else x.new_empty(shape)
    bk = min(config.bk, k & -k)  # a config of another K may be
    split = min(config.split, -(-w.k // bk))
    parts = out if split == 1 else x.new_empty((split, *shape), dtype=torch.float32)
    if split > 1 and experts:
        parts.zero_()
    fields = [given[f"fragments{width}"] for width in widths(w)]
    fields += [fields[0]] * (3 - len(fields))
    grids = (given.get(f"fragments_{name}", x) for name in ("scale", "zero", "outer"))
    epilogue = given.get("output_scale", x), given.get("bias", x)
    form = device_form(contract)
    asm = not type(code.product).__name__.startswith("Interpreted")
    pdl = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    with torch.cuda.device_of(x):
        code.product[(tiles, -(-w.n // config.bn), split * batch)](
            x, x.stride(-2), *fields, *grids, given.get("table", x), *epilogue,
            x if offsets is None else offsets, parts, m, w.n, w.k, n // 64, k, split,
            F=form, E=experts, EP=1 << (experts - 1).bit_length() if experts else 0,
            BM=config.bm, BN=config.bn, BK=bk, PARTS=split > 1, STAGES=config.stages,
            EVEN_K=w.k % bk == 0, PDL=pdl, ASM=asm, num_warps=config.warps,
        )  # fmt: skip
        if split > 1:
            rows, block = out.numel() // w.n, 256
            code.sum_parts[(rows, -(-w.n // block))](
                parts, *epilogue, out, rows, m, w.n, split, F=form, B=block, PDL=pdl,
                num_warps=4, launch_pdl=pdl,
            )  # fmt: skip
    return out


def candidates(contract: DequantMatmul, m: int) -> list[Config]:
    """Configs worth measuring at m rows, the best guess first."""
    w = contract.weight
    least = max(64, 256 // min(widths(w)))  # columns in a tile of the narrowest field
    rows = min(128, max(16, 1 << (m - 1).bit_length()))
    found = [heuristic(contract, m)]
    for bm, bn, bk in itertools.product({rows, max(16, rows // 2)}, (64, 128), (64, 128, 256)):
        programs = -(-m // bm) * -(-w.n // bn)
        splits = [s for s in (1, 2, 4, 8) if s == 1 or programs * s <= 1056 and s * bk * 2 <= w.k]
        for split, warps, stages in itertools.product(
            splits, (4, 8), (3, 5) if bm <= 32 else (3, 4)
        ):
            config = Config(bm, bn, bk, split, warps, stages)
            large = bm * bn > 64 * 128
            if bk < least or config.shared(contract) > SHARED:
                continue
            # Of 8 warps each 4 take 64 rows of W; sums of 64 x 128 fill the registers of 4 warps.
            if (warps == 8 and bn == 64) or (large and warps == 4) or (large and stages > 4):
                continue
            if programs * split < 66 or config in found:
                continue
            found.append(config)
    return found


def heuristic(contract: DequantMatmul, m: int) -> Config:
    """A config for m rows: enough programs that all multiprocessors load codes."""
    w = contract.weight
    bk = max(128, 256 // min(widths(w)))
    bm = next((b for b in (16, 32, 64) if m <= b), 128)
    bn = 128 if w.n >= 8192 or m > 64 else 64
    programs = -(-m // bm) * -(-w.n // bn)
    split = 1
    while programs * split < 200 and split < 8 and w.k >= bk * split * 8:
        split *= 2
    return Config(bm, bn, bk, split, 8 if bm * bn > 64 * 128 else 4, 3)


class DequantCublas(Packed):
    """W dense in a workspace, then cuBLAS: what a dense weight would cost, and writing W once."""

    name = "triton.dequant_cublas"

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        given = dict(zip(self.operands(contract), packed, strict=True))
        w = contract.weight
        if (order := given.get("order")) is not None:
            x = x[:, order]
        scale, bias = given.get("output_scale"), given.get("bias")
        rows = max(128, WORKSPACE // (2 * w.k) // 128 * 128)
        if rows >= w.n and scale is None:
            return linear(x, dense(contract, given, 0, w.n), bias)
        out = x.new_empty((x.shape[0], w.n))
        for first in range(0, w.n, rows):
            part = dense(contract, given, first, min(rows, w.n - first))
            torch.mm(x, part.t(), out=out[:, first : first + rows])
        if scale is not None:
            out.mul_(scale)
        return out if bias is None else out.add_(bias)


def dense(
    contract: DequantMatmul,
    given: Mapping[str, torch.Tensor],
    first: int,
    count: int,
    kernels: ModuleType | None = None,
) -> torch.Tensor:
    """These rows of W, in the order of columns in which codes are packed."""
    code = kernels or device()
    w = contract.weight
    n, k = fragments.padded(w.n, w.k, widths(w))
    fields = [given[f"fragments{width}"] for width in widths(w)]
    out = fields[0].new_empty((count, w.k), dtype=contract.x)
    fields += [fields[0]] * (3 - len(fields))
    grids = (given.get(f"fragments_{name}", out) for name in ("scale", "zero", "outer"))
    bk = max(128, 256 // min(widths(w)))
    asm = not type(code.product).__name__.startswith("Interpreted")
    with torch.cuda.device_of(out):
        code.dequantise[(-(-w.k // bk), -(-count // 64), 1)](
            *fields, *grids, given.get("table", out), out, count, w.k, n // 64, k, first,
            F=device_form(contract), BN=64, BK=bk, ASM=asm, num_warps=4,
        )  # fmt: skip
    return out


for provider in (MMA(), DequantCublas()):
    DEQUANT_MATMUL.register(provider)
