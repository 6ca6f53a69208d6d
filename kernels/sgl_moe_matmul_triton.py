"""`cutlass_w4a8_moe_mm` in Triton: two launches; what rows experts have is read on the device.

The first lays x out for tensor cores and writes a table of tiles, the second multiplies: a program
has an entry of the table and rows of that expert's weight. Experts without rows have no entry.
Where few programs would have all of K they have parts of it, and a third launch adds those up.
"""

import dataclasses
import functools
from types import ModuleType

import torch

from qinductor.kernels.configs import matched
from qinductor.kernels.triton_device import capability, has_triton, shared_memory

MANY = 1 << 62
SHARED = 220 << 10  # bytes of shared memory that a program may take
LEAST = (8, 9)  # compute capability that has float8
LAID = 32  # groups of 128 columns that a program lays out
FILLED = 2 * 132  # programs that an H200's multiprocessors want
SUMMED = 256  # columns of a program that adds parts up
WIDE = 4096  # comparisons of a program that writes the table


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of rows of x, rows of W and columns; parts of K; warps, stages of the pipeline; `least`
    rows that a tile is halved to where an expert has fewer."""

    bm: int
    bn: int
    bk: int
    split: int
    warps: int
    stages: int
    least: int

    def __str__(self) -> str:
        tile = f"m{self.bm}.n{self.bn}.k{self.bk}.s{self.split}"
        return f"{tile}.w{self.warps}.p{self.stages}.l{self.least}"

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Config":
        """The config that `str` wrote; ValueError for any other text."""
        pattern = r"m(\d+)\.n(\d+)\.k(\d+)\.s(\d+)\.w(\d+)\.p(\d+)\.l(\d+)"
        match = matched(pattern, text, "m16.n128.k256.s1.w4.p4.l16")
        return Config(*map(int, match.groups()))

    def shared(self) -> int:
        """Bytes of shared memory that the pipeline takes, about."""
        waiting = self.bn * (self.bk // 2 + 8)  # what one step has of W and its scales
        return self.stages * self.bk * self.bm + (self.stages - 1) * waiting

    def within(self, k: int, limit: int) -> "Config":
        """This config for k columns, with fewer stages where shared memory is short."""
        bk = self.bk if k % self.bk == 0 else 128
        config = dataclasses.replace(self, bk=bk, split=min(self.split, k // bk))
        while config.shared() > limit and config.stages > 2:
            config = dataclasses.replace(config, stages=config.stages - 1)
        return config


# Largest mean number of rows of an expert -> configs worth a try, the first guess first.
LADDER: dict[int, tuple[str, ...]] = {
    8: ("m16.n128.k256.s1.w4.p3.l16", "m16.n64.k256.s1.w4.p6.l16", "m16.n64.k256.s1.w4.p4.l16",
        "m16.n128.k256.s1.w4.p4.l16", "m16.n128.k256.s1.w8.p4.l16", "m16.n256.k128.s1.w8.p5.l16"),
    24: ("m32.n128.k256.s1.w4.p3.l16", "m32.n128.k256.s1.w8.p3.l16", "m32.n64.k256.s1.w4.p4.l16",
         "m32.n128.k128.s1.w4.p4.l16"),
    48: ("m64.n64.k128.s1.w4.p4.l16", "m64.n128.k256.s1.w8.p3.l16", "m32.n128.k256.s1.w4.p3.l32",
         "m64.n128.k128.s1.w8.p4.l16", "m32.n128.k256.s1.w8.p3.l32"),
    96: ("m64.n64.k128.s1.w4.p4.l16", "m64.n128.k128.s1.w8.p4.l16", "m64.n128.k256.s1.w8.p3.l16",
         "m128.n128.k128.s1.w8.p4.l32"),
    MANY: ("m128.n64.k128.s1.w4.p4.l32", "m128.n128.k128.s1.w8.p4.l32",
           "m128.n128.k128.s1.w8.p3.l32", "m64.n128.k128.s1.w8.p4.l16",
           "m64.n128.k256.s1.w8.p3.l16"),
}  # fmt: skip


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import sgl_moe_matmul_kernels

    return sgl_moe_matmul_kernels


@functools.cache
def missing(device: torch.device) -> str | None:
    """Why the kernels do not run on this GPU."""
    if not has_triton():
        return "Triton is not installed"
    if capability(device) < LEAST:
        got = ".".join(map(str, capability(device)))
        return f"the GPU has compute capability {got}; wanted 8.9 or later, which have float8"
    return None


def heuristic(rows: int, experts: int, n: int, k: int) -> Config:
    """A config for so many rows of all experts."""
    mean = -(-rows // experts)
    chosen = next(configs for limit, configs in LADDER.items() if mean <= limit)
    found = Config.parse(chosen[0])
    groups, split = min(experts, rows), 1
    if found.bm >= 64 or groups * -(-n // found.bn) >= FILLED:
        return found
    # Parts of 4 steps or more, where else loads in flight would not fill the memory's bandwidth.
    while groups * -(-n // 64) * split < FILLED and k // (found.bk * split * 2) >= 4:
        split *= 2
    return dataclasses.replace(found, bn=64, warps=4, split=split)


def launch(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scales: torch.Tensor,
    offsets: torch.Tensor,
    sizes: torch.Tensor,
    config: Config | None = None,
    kernels: ModuleType | None = None,
) -> None:
    """Writes the product of each expert's rows to d; of no empty d or K.

    d          float16 or bfloat16 [T, N], rows contiguous
    a          float8_e4m3fn [T, K], K a multiple of 128
    b          int8 [E, N, K / 2]
    a_scale    float32, the first is taken
    b_scales   bfloat16 [E, K / 512, 4 N] if K is a multiple of 512, else [E, K / 128, N]
    offsets    int32 [E]; sizes int32 [E, 3], all contiguous
    """
    code, (t, k), (experts, n, _) = kernels or device(), a.shape, b.shape
    config = config or heuristic(t, experts, n, k)
    config = config.within(k, shared_memory(a.device, SHARED) if a.is_cuda else SHARED)
    if a.stride(1) != 1 or a.stride(0) % 16 or a.data_ptr() % 16:
        a = a.new_empty(a.shape).copy_(a)
    if b.data_ptr() % 16:
        b = b.clone()
    flat = b_scales.view(-1)
    if flat.numel() % 2 or flat.data_ptr() % 4:
        flat = torch.cat([flat, flat[: flat.numel() % 2]])
    y = a.new_empty((t, k))
    tiles = t // config.bm + min(experts, t)
    table = offsets.new_empty(3 * tiles + 1)
    ep = 1 << (experts - 1).bit_length()
    bt = max(1, min(128, WIDE // ep))
    tables = -(-tiles // bt)
    asm = not type(code.product).__name__.startswith("Interpreted")
    pdl = a.is_cuda and capability(a.device) >= (9, 0)
    words, split = a.view(torch.int32), config.split
    out = d if split == 1 else d.new_empty((split, t, n), dtype=torch.float32)
    with torch.cuda.device_of(a):
        code.arrange[(tables + -(-t * (k // 128) // LAID),)](
            words, words.stride(0), y.view(torch.int32), offsets, sizes, table, t, k, tiles,
            tables, experts, EP=ep, BT=bt, BM=config.bm, B=LAID, PDL=pdl, num_warps=4,
        )  # fmt: skip
        code.product[(tiles * -(-n // config.bn), split)](
            y, b, flat.view(torch.int32), a_scale, out, out.stride(-2), table, tiles, t, n, k,
            BM=config.bm, LEAST=config.least, BN=config.bn, BK=config.bk, FOUR=k % 512 == 0,
            PARTS=split > 1, STAGES=config.stages, WARPS=config.warps, ASM=asm, PDL=pdl,
            num_warps=config.warps, launch_pdl=pdl, enable_fp_fusion=False,
        )  # fmt: skip
        if split > 1:
            code.sum_parts[(tiles, -(-n // SUMMED))](
                out, a_scale, d, d.stride(0), table, tiles, t, n, split, BM=config.bm, B=SUMMED,
                PDL=pdl, num_warps=4, launch_pdl=pdl, enable_fp_fusion=False,
            )  # fmt: skip
