"""Provider of dequant_matmul in Gluon for sm_90: gluon.wgmma, for codes of 4 bits and many rows.

W's codes become a matrix operand in registers while tensor cores work on the slice before (the
device code says how). Programs stay: each takes whole tiles of the result in turn. The last tiles,
too few for every multiprocessor, can be cut along K: a second kernel adds the parts up, always in
one order. It packs W as the Triton family does.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import sympy
import torch

from qinductor.contracts import short
from qinductor.kernels import fragments
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, DequantMatmul
from qinductor.kernels.dequant_matmul_triton import reordered
from qinductor.kernels.dequant_matmul_triton_form import (
    Packed,
    device_form,
    group,
    whole_zero,
    widths,
)
from qinductor.rates import RATE, M

SLICE = 64  # columns that are fetched and multiplied at a time
PART = 8  # slices of a part of K, at least
PROGRAMS = 132  # multiprocessors of an H100 and H200, for estimates


class Tile(NamedTuple):
    """stages  slices of the ring: what fits into 227 KiB beside the result
    depths  how many slices a loop's iteration may have
    us      that an H200 takes for one slice"""

    stages: int
    depths: tuple[int, ...]
    us: float


# (rows of W, rows of x) -> what is known of the tile
TILES = {
    (128, 256): Tile(4, (1, 2), 0.65),
    (256, 128): Tile(6, (4,), 0.68),
    (128, 128): Tile(8, (4,), 0.38),
    (128, 64): Tile(10, (4,), 0.27),
}
WORTH = 1.4  # configs estimated to take this many times the best one's are not tried


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import dequant_matmul_gluon_kernels

    return dequant_matmul_gluon_kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """A tile's rows of W and of x, slices of a loop's iteration, whether the last tiles are cut."""

    n: int
    m: int
    depth: int
    split: bool

    def __str__(self) -> str:
        return f"n{self.n}.m{self.m}.d{self.depth}.s{int(self.split)}"

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Config":
        """The config that `str` wrote; ValueError for any other text, or a tile that is none."""
        match = re.fullmatch(r"n(\d+)\.m(\d+)\.d(\d+)\.s([01])", text)
        n, m, depth, split = map(int, match.groups()) if match else (0, 0, 0, 0)
        if (n, m) not in TILES or depth not in TILES[n, m].depths:
            raise ValueError(f"no config of gluon.wgmma: {text!r}; wanted such as n128.m256.d1.s1")
        return Config(n, m, depth, bool(split))


class Schedule(NamedTuple):
    """`whole` tiles of one work unit each, then `rest` tiles of `parts` units of `chunk` slices."""

    steps: int
    whole: int
    rest: int
    chunk: int
    parts: int

    @property
    def units(self) -> int:
        return self.whole + (self.rest * self.parts if self.parts > 1 else 0)


@functools.lru_cache(4096)
def scheduled(tiles: int, k: int, config: Config, programs: int) -> Schedule:
    """What the programs do: tiles of K columns, the last ones cut so that no program is idle."""
    turns = -(-k // (SLICE * config.depth))  # of the loop; TMA fills slices past K with zeros
    whole = tiles // programs * programs
    rest = tiles - whole
    parts = min(programs // rest, turns * config.depth // PART) if rest and config.split else 1
    share = -(-turns // max(1, parts))
    parts = -(-turns // share)
    if parts == 1:
        whole, rest = tiles, 1
    return Schedule(turns * config.depth, whole, rest, share * config.depth, parts)


def microseconds(n: int, k: int, m: int, config: Config) -> float:
    """A rough estimate, to order configs by: an H200's times of three shapes to within 20 %."""
    tiles = -(-m // config.m) * -(-n // config.n)
    plan = scheduled(tiles, k, config, PROGRAMS)
    slices = -(-plan.whole // PROGRAMS) * plan.steps
    sums = 0.0
    if plan.parts > 1:
        slices += plan.chunk
        sums = 2 + plan.parts * plan.rest * config.n * config.m * 8 / 2.5e6  # written and read
    return 4 + slices * TILES[config.n, config.m].us + sums


def candidates(n: int, k: int, m: int) -> list[Config]:
    """Configs worth measuring, the best guess first."""
    found: dict[tuple[Any, ...], Config] = {}
    for (tile_n, tile_m), tile in TILES.items():
        for depth in tile.depths:
            for split in (False, True):
                config = Config(tile_n, tile_m, depth, split)
                tiles = -(-m // tile_m) * -(-n // tile_n)
                plan = scheduled(tiles, k, config, PROGRAMS)
                found.setdefault((tile_n, tile_m, depth, plan), config)
    times = {config: microseconds(n, k, m, config) for config in found.values()}
    least = min(times.values())
    return sorted((c for c, us in times.items() if us <= WORTH * least), key=times.__getitem__)


class WGMMA(Packed):
    """W in registers times x in shared memory, by wgmma, fetched by TMA."""

    name = "gluon.wgmma"

    def runs_on(self, target: str) -> bool:
        return target == "sm_90"  # no other has wgmma

    def missing(self) -> str | None:
        found: str | None = super().missing() or device().MISSING
        return found

    def why_not(self, contract: DequantMatmul) -> str | None:
        w = contract.weight
        if contract.experts:
            return f"there are {contract.experts} experts; it takes one weight"
        if w.codes not in ("int4", "uint4"):
            return f"codes are {w.codes}; it takes int4 and uint4"
        if w.arithmetic not in ("q*s", "(q-z)*s"):
            return f"W is {w.arithmetic}; it takes q*s and (q-z)*s"
        if w.zero is not None and not whole_zero(w):
            return f"zeros are {short(w.zero)}; it takes integers"
        if w.compute is not contract.x:
            return f"W is computed in {short(w.compute)}; it takes the dtype of x"
        if 0 < group(w) < SLICE:
            return f"{w.bk} columns share a scale; it takes multiples of {SLICE}, or whole rows"
        if w.n % 8 or w.k % 8:
            return f"W is {w.n}x{w.k}; it takes multiples of 8 (TMA's rows have 16 bytes or more)"
        return super().why_not(contract)

    def seconds(self, contract: DequantMatmul) -> sympy.Expr:
        # Of an H200's times (int4, three shapes, M = 128 to 4096) 29 % below to 17 % above.
        w = contract.weight
        products = 2 * w.n * w.k * sympy.Max(M, 128, evaluate=False)
        return 8e-6 + 1.12 * products / RATE

    def configs(self, contract: DequantMatmul, m: int) -> Sequence[str]:
        return _configs(contract, m)

    def run(
        self,
        contract: DequantMatmul,
        x: torch.Tensor,
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> torch.Tensor:
        chosen = Config.parse(config or _configs(contract, x.shape[0])[0])
        return launch(contract, x, self._named(contract, packed), chosen)


@functools.lru_cache(4096)
def _configs(contract: DequantMatmul, m: int) -> list[str]:
    return [str(config) for config in candidates(contract.weight.n, contract.weight.k, m)]


def fetchable(x: torch.Tensor) -> torch.Tensor:
    """x[M, K] as TMA reads it: rows of 16 bytes or more that start at multiples of 16."""
    apart = x.shape[0] == 1 or x.stride(0) >= x.shape[1] and x.stride(0) % 8 == 0
    if x.stride(1) != 1 or not apart:
        x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def launch(
    contract: DequantMatmul, x: torch.Tensor, given: Mapping[str, torch.Tensor], config: Config
) -> torch.Tensor:
    """The product [M, N]."""
    code, w, form = device(), contract.weight, device_form(contract)
    x = fetchable(reordered(x, given.get("order")))
    out = x.new_empty((x.shape[0], w.n))
    (m, k), (n, packed_k) = x.shape, fragments.padded(w.n, w.k, widths(w))
    rows, half = -(-m // config.m), config.n // 2  # of W for each of two warpgroups
    tiles = rows * -(-w.n // config.n)
    plan = scheduled(tiles, w.k, config, _multiprocessors(x.device))
    # Of this call alone: launches on two streams share nothing.
    cut = plan.parts if plan.parts > 1 else 0
    parts = x.new_empty((cut, plan.rest, config.n, config.m), dtype=torch.float32)

    def described(tensor: torch.Tensor, shape: Sequence[int], box: list[int], layout: Any) -> Any:
        strides = [1]
        for size in shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        return code.TensorDescriptor(tensor, list(shape), strides, box, layout)

    x_desc = code.TensorDescriptor(
        x, [m, k], [x.stride(0) if m > 1 else k, 1], [config.m, SLICE], code.OPERAND
    )
    codes = given["fragments4"].view(torch.int32)
    q_desc = described(codes, (n // 64, packed_k // 32, 256), [half // 64, 2, 256], code.CODES)
    scale, zero = given["fragments_scale"], given.get("fragments_zero")
    s_desc = described(scale, scale.shape, [1, half // 2], code.GRID)
    z_desc = s_desc if zero is None else described(zero, zero.shape, [1, half // 2], code.GRID)
    out_desc = described(out, out.shape, [config.m, half], code.OPERAND)
    epilogue = given.get("output_scale", x), given.get("bias", x)
    with torch.cuda.device_of(x):
        code.product[(min(_multiprocessors(x.device), plan.units),)](
            x_desc, q_desc, s_desc, z_desc, out_desc, *epilogue, parts, w.n, rows, plan.units,
            plan.whole, plan.rest, plan.chunk, plan.steps, F=form, BM=config.m, RN=half,
            DEPTH=config.depth, STAGES=TILES[config.n, config.m].stages, num_warps=4,
        )  # fmt: skip
        if cut:
            code.sum_parts[(plan.rest, config.n // code.SUMMED)](
                parts, *epilogue, out, m, w.n, rows, plan.whole, plan.rest, plan.parts, F=form,
                BM=config.m, BN=config.n, B=code.SUMMED, num_warps=4, launch_pdl=True,
            )  # fmt: skip
    return out


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


DEQUANT_MATMUL.register(WGMMA())
