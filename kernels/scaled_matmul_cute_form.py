"""What the CuTe DSL kernels of scaled_matmul are compiled for: formats of operands, and tiles."""

import dataclasses
import functools

import torch

from qinductor.contracts import Hashed, short
from qinductor.kernels.configs import matched
from qinductor.kernels.scaled_matmul import ScaledMatmul

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
E8M0 = torch.float8_e8m0fnu
BK = 128  # columns of a stage: bytes that a row of swizzled shared memory holds
SHARED = 227 << 10  # bytes of shared memory of a multiprocessor that programs can have
ALL = 1 << 30  # rows of W
SCALERS = 3  # warps that fetch scales, beside the one that fetches codes
STAGING = 2048  # bytes in which a warp turns 16 rows of 64 results
PROMOTED = 128  # columns after which float8 sums leave the tensor cores, which keep 14 bits


@dataclasses.dataclass(frozen=True)
class Form(Hashed):
    """What is constant in a kernel for a contract; numbers have the short names of dtypes.

    a, w     codes of a and of W
    out      the result
    bias     the bias; "" for none
    step     columns whose sum leaves the tensor cores; 0: all
    rows     scales of a: "tensor", "row", or "group" where they change along k
    columns  scales of W: "" for none, "tensor", "row", or "grid" where they change along k
    sa, sw   dtypes of these
    group    columns that share a scale of a, where that changes along k
    bn, bk   rows and columns that share a scale of W, likewise
    batched  whether there are batches, each with a weight of its own
    """

    a: str
    w: str
    out: str
    bias: str
    step: int
    rows: str
    columns: str
    sa: str = "fp32"
    sw: str = "fp32"
    group: int = 0
    bn: int = 0
    bk: int = 0
    batched: bool = False

    __hash__ = Hashed.__hash__

    @property
    def scaled(self) -> bool:
        """Whether scales change along k."""
        return self.rows == "group" or self.columns == "grid"

    def __str__(self) -> str:
        return "_".join(str(getattr(self, field.name)) for field in dataclasses.fields(self))


@functools.cache
def form_of(contract: ScaledMatmul) -> Form:
    """The form of a contract's kernels."""
    c, w = contract, contract.weight
    bias = "" if c.bias is None else short(c.bias)
    rows = "tensor" if not c.group else "row" if c.group >= w.k else "group"
    grid = w.scale is not None and w.bk < w.k
    columns = "grid" if grid else "tensor" if w.bn >= w.n else "row"
    columns = "" if w.scale is None else columns
    bn = ALL if w.bn >= w.n else w.bn
    sizes = (c.group if rows == "group" else 0, bn if grid else 0, w.bk if grid else 0)
    scales = short(c.scale), "" if w.scale is None else short(w.scale)
    codes = short(c.a), short(w.storage)
    return Form(
        *codes, short(c.out), bias, step_of(c), rows, columns, *scales, *sizes, c.experts > 0
    )


def step_of(contract: ScaledMatmul) -> int:
    """Columns whose sum must be taken out of the tensor cores; 0 where no sum must."""
    c, w = contract, contract.weight
    steps = [size for size in (c.group, w.bk if w.scale is not None else w.k) if 0 < size < w.k]
    if steps:
        return min(PROMOTED, *(size & -size for size in steps))
    # torch has no fast sums of rows in fp16, whose results would show the bits that they lack.
    fast = c.fast and c.out is torch.bfloat16
    return 0 if c.a is INT8 or fast else PROMOTED


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles and schedule of a kernel: D = L R^T of L[P, K] and R[Q, K].

    p        rows of L that a program has: 64 for each of one or two groups of warps, once or twice
    q        rows of R
    stages   of the pipeline, each of BK columns
    cluster  programs that share a tile of R, of which each fetches a part for all
    split    programs that share a tile of the result, each with its part of K
    blocks   programs on a multiprocessor
    swap     whether L is W and R is a, for few rows of a
    """

    p: int
    q: int
    stages: int
    cluster: int = 1
    split: int = 1
    blocks: int = 1
    swap: bool = False

    def __str__(self) -> str:
        text = f"p{self.p}.q{self.q}.t{self.stages}.c{self.cluster}.s{self.split}.b{self.blocks}"
        return text + ".swap" * self.swap

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Config":
        """The config that `str` wrote; ValueError for any other text."""
        pattern = r"p(\d+)\.q(\d+)\.t(\d+)\.c(\d+)\.s(\d+)\.b(\d+)(\.swap)?"
        match = matched(pattern, text, "p128.q256.t4.c2.s1.b1", "cute.scaled_mma")
        p, q, stages, cluster, split, blocks = map(int, match.groups()[:6])
        config = Config(p, q, stages, cluster, split, blocks, bool(match[7]))
        if config.fault:
            raise ValueError(f"config {text!r} of cute.scaled_mma: {config.fault}")
        return config

    @property
    def fault(self) -> str:
        """Why no kernel has such tiles; empty if one has."""
        if self.p not in (64, 128, 256) or self.q % 8 or not 8 <= self.q <= 256:
            return "p is 64, 128 or 256, q a multiple of 8 up to 256"
        if not self.swap and self.q % 32:
            return "without swap q is a multiple of 32"
        if self.cluster > 1 and (self.split > 1 or self.q % (8 * self.cluster)):
            return "programs share tiles of R, of 8 rows and more each, or parts of K"
        if self.cluster not in (1, 2, 4) or self.split not in (1, 2, 4, 8):
            return "a cluster has 1, 2 or 4 programs, K 1, 2, 4 or 8 parts"
        if self.waves > 1 and (self.split > 1 or self.q > 128):
            return "with p 256 q is at most 128 and K one part"
        if self.split > 1 and self.p * self.q * 4 > self.stages * BK * (self.p + self.q):
            return "sums of parts must fit into the pipeline"
        if self.blocks < 1:
            return "a multiprocessor has a program at least"
        if not 2 <= self.stages <= 16 or self.shared * self.blocks > SHARED:
            return f"{self.stages} stages take {self.shared} bytes; {SHARED} are there"
        return ""

    def takes(self, form: Form) -> bool:
        """Whether rows of W that share a scale make up tiles of R, or the other way about; and
        sums fit into registers: twice where they are promoted, and with two waves only as sums of
        all of K, or of 128 columns and their scales."""
        if form.step and self.q > 128:
            return False
        if form.scaled and self.stages < SCALERS:  # each warp must see every release of a stage
            return False
        wide = max(self.q, form.bn), min(self.q, form.bn)
        if self.waves > 1 and not (form.step == BK and form.scaled or form.step == 0):
            return False
        return self.swap or form.columns != "grid" or wide[0] % wide[1] == 0

    @property
    def groups(self) -> int:
        """Groups of warps that multiply."""
        return min(self.p // 64, 2)

    @property
    def waves(self) -> int:
        """Tiles of 64 rows that each of them has."""
        return self.p // 64 // self.groups

    @property
    def shared(self) -> int:
        """Bytes of shared memory, with what the driver keeps for itself."""
        groups = self.groups
        staging = groups * 4 * STAGING if self.stages_results else 1024
        scales = self.q + self.p // 16 if self.swap else self.p + self.q // 32
        scales *= 16 if self.waves == 1 else 4  # bytes: in steps of 32 columns, or of 128
        stage = BK * (self.p + self.q) + scales + 16
        return self.stages * stage + groups * self.q * 8 + 2048 + staging

    @property
    def stages_results(self) -> bool:
        """Whether results go through shared memory, so that rows of them are stored together."""
        return not self.swap and self.split == 1

    def threads(self, form: Form) -> int:
        """Threads that multiply, and those that fetch."""
        return self.groups * 128 + (128 if self.donates or form.scaled else 32)

    @property
    def donates(self) -> bool:
        """Whether threads that fetch give up registers; those of one program must do for that."""
        return self.p > 64 and self.blocks == 1


def deepest(config: Config) -> Config:
    """The config with as many stages as fit."""
    found = config
    for stages in range(2, 13):
        tried = dataclasses.replace(config, stages=stages)
        if not tried.fault:
            found = tried
    return found
