"""Configs of the Triton family of scaled_matmul: their text, and which are worth a try."""

import dataclasses
import functools

from qinductor.kernels.configs import matched
from qinductor.kernels.scaled_matmul import FP32, ScaledMatmul
from qinductor.kernels.scaled_matmul_triton_form import PROMOTED, four, slice_of

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
# Of rows sorted by expert W is the left operand, whatever their number: an expert with fewer rows
# than a tile has takes a half of it, or a quarter.
_GROUPS = {
    8: [(16, 128, 256, 4, 3), (16, 128, 128, 4, 4), (16, 64, 128, 4, 6), (16, 64, 256, 4, 4),
        (16, 128, 256, 8, 3)],
    24: [(32, 128, 128, 4, 4), (32, 64, 128, 4, 6), (32, 128, 256, 8, 3), (32, 64, 256, 4, 4)],
    64: [(64, 128, 128, 8, 4), (64, 64, 128, 4, 4), (64, 128, 128, 4, 4), (32, 128, 128, 4, 4)],
    MANY: [(128, 128, 128, 8, 4), (128, 64, 128, 4, 4), (64, 128, 128, 8, 4),
           (128, 128, 128, 8, 3)],
}  # fmt: skip
_NIBBLE_GROUPS = {
    8: [(16, 128, 128, 4, 5), (16, 128, 256, 4, 3), (16, 64, 256, 4, 4), (16, 128, 256, 8, 4)],
    24: [(32, 128, 256, 4, 3), (32, 64, 256, 4, 4), (32, 128, 128, 4, 4), (32, 128, 256, 8, 3)],
    64: [(64, 128, 128, 4, 4), (64, 64, 128, 4, 4), (64, 128, 128, 8, 4), (64, 128, 256, 8, 3)],
    MANY: [(128, 64, 128, 4, 4), (128, 128, 128, 8, 4), (128, 128, 128, 8, 3),
           (64, 128, 128, 8, 4)],
}  # fmt: skip
# Sums of 128 columns are added up outside of tensor cores.
_ADDED_GROUPS = {
    **_GROUPS,
    MANY: [(64, 128, 128, 8, 4), (128, 64, 128, 4, 4), (128, 128, 128, 8, 3)],
}
# Sums of slices of fewer than 128 columns.
_SLICED_GROUPS = {
    8: [(16, 128, 128, 4, 4), (16, 128, 256, 4, 3), (16, 64, 128, 4, 6)],
    24: _GROUPS[24],
    64: [(32, 128, 128, 4, 4), (32, 64, 128, 4, 4), (64, 64, 128, 4, 4)],
    MANY: [(64, 64, 128, 4, 4), (128, 64, 128, 8, 4), (128, 64, 128, 8, 3)],
}
FILLED = 2 * 132  # programs that an H200's multiprocessors want


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of rows of a, rows of W and columns; parts of K, warps and stages of the pipeline.

    split 0: as many parts as fill the device, of rows sorted by expert
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
    if contract.experts:
        return tuple(map(str, of_groups(contract, m)))
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


@functools.cache
def of_groups(contract: ScaledMatmul, mean: int) -> tuple[Config, ...]:
    """Configs for rows sorted by expert, of which each has so many on average, best guess first."""
    table = {0: _GROUPS, PROMOTED: _ADDED_GROUPS}.get(slice_of(contract), _SLICED_GROUPS)
    table = _NIBBLE_GROUPS if four(contract) else table
    found = next(tiles for limit, tiles in table.items() if mean <= limit)
    most = 128 if four(contract) and slice_of(contract) < 64 else 256
    return tuple(
        Config(bm, bn, min(bk, most), 0, warps, stages, True, not four(contract)).within(
            contract, SHARED
        )
        for bm, bn, bk, warps, stages in found
    )


def parts_of(config: Config, rows: int, experts: int, n: int, k: int) -> int:
    """Parts of K, where the number of rows in all is all that is known of experts' rows."""
    if config.split:
        return min(config.split, -(-k // config.bk))
    tiles = max(min(rows, experts), -(-rows // config.bm)) * -(-n // config.bn)
    split = 1
    # Of 4 steps or more, where else loads in flight would not fill the memory's bandwidth.
    while tiles * split < FILLED and k // (config.bk * split * 2) >= 4:
        split *= 2
    return split
