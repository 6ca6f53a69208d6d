"""Provider of scaled_matmul in CuTe DSL, for Hopper: cute.scaled_mma, for any M."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import sympy
import torch

from qinductor.contracts import short
from qinductor.kernels import cute_cache, fallback
from qinductor.kernels.scaled_matmul import (
    FP32,
    SCALED_MATMUL,
    Operands,
    ScaledMatmul,
    cost,
    longest,
    operands,
    pack,
)
from qinductor.kernels.scaled_matmul_cute_form import (
    BK,
    E4M3,
    E5M2,
    E8M0,
    INT8,
    Config,
    Form,
    deepest,
    form_of,
    step_of,
)
from qinductor.kernels.scaled_matmul_sums import experts_why_not
from qinductor.op import Spec
from qinductor.rates import BANDWIDTH, RATE, M

RESULTS = (torch.bfloat16, torch.float16, FP32)
SCALES = (*RESULTS, E8M0)
PROGRAMS = 132  # multiprocessors of an H200, by which configs are chosen
FEWEST = 64
LONG = 8192  # columns
MANY = 1 << 30
Made = tuple[Callable[..., Any], int]  # a kernel, and how many programs run at once


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels.sm90 import scaled_matmul_cute

    return scaled_matmul_cute


@functools.cache
def kernel(form: Form, config: Config) -> Callable[..., Any]:
    """The compiled kernel, of all M, N and K."""
    return cute_cache.kernel(
        f"scaled_matmul {form} {config}", lambda: device().compiled(form, config)
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def prepared(contract: ScaledMatmul, config: str, device: torch.device) -> Made | None:
    """The kernel; None, after a warning, where the installed
    compiler or its libraries do not do."""
    chosen = Config.parse(config)
    return attempted(
        f"cute.scaled_mma@{config}",
        lambda: (kernel(form_of(contract), chosen), multiprocessors(device) * chosen.blocks),
    )


def attempted(route: str, make: Callable[[], Made]) -> Made | None:
    """What `make` makes; None, after a warning, where the compiler or its libraries do not do."""
    try:
        return make()
    except Exception as error:  # whatever a compiler raises
        fallback.warn(route, error)
        return None


class ScaledMMA:
    """Codes in shared memory, sums in registers."""

    name = "cute.scaled_mma"
    dense = False
    reference = False
    version = 1

    def runs_on(self, target: str) -> bool:
        return target == "sm_90"

    def missing(self) -> str | None:
        return cute_cache.missing()

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c, w = contract, contract.weight
        if c.zero is not None or c.experts:
            return experts_why_not(c) or "a has zero points; it takes none"
        if (c.a is INT8) != (w.storage is INT8) or w.bits != 8 or c.a not in (E4M3, E5M2, INT8):
            return f"{short(c.a)} times {w.codes}; it takes float8 with float8 and int8 with int8"
        if w.storage not in (E4M3, E5M2, INT8):
            return f"W has codes {w.codes}; it takes float8 and int8"
        if w.arithmetic not in ("q", "q*s") or w.permuted:
            return f"W is {w.arithmetic}{', permuted' * w.permuted}; it takes q and q*s"
        if not w.n * w.k or w.n % 8 or w.k % 16:
            return f"W is {w.n}x{w.k}; it takes N in multiples of 8 and K of 16"
        if c.scale not in SCALES or w.scale not in (None, *SCALES):
            return (
                f"scales are {short(c.scale)} and {short(w.scale)}; it takes fp32, bf16, fp16 and "
                "float8_e8m0fnu"
            )
        if c.out not in RESULTS or c.bias not in (None, *RESULTS):
            return f"the result is {short(c.out)}, the bias {short(c.bias)}; it takes floats"
        if c.a is not INT8 and c.out is FP32:
            return "float8 and a result in fp32; tensor cores keep 14 bits of such a sum"
        steps = [size for size in (c.group, w.bk if w.scale is not None else 0) if 0 < size < w.k]
        if any(size % 32 for size in steps):
            return f"{min(steps)} columns share a scale; it takes multiples of 32, or whole rows"
        if w.scale is not None and w.bn < w.n and (w.bn % 32 if w.bk < w.k else w.bn > 1):
            return (
                f"{w.bn} rows of W share a scale; it takes one for a row, for all, or where scales "
                "change along K for multiples of 32"
            )
        if c.a is INT8 and w.k > longest(c):
            return f"K is {w.k}; it takes up to {longest(c)} (sums are int32)"
        return None

    def seconds(self, contract: ScaledMatmul) -> sympy.Expr:
        # An H200's times of nine shapes, M = 1 to 4096: most within a sixth.
        spent, form = cost(contract), form_of(contract)
        rate = {0: 1.8, BK: 1.5 if form.scaled else 1.65, 64: 1.15}.get(form.step, 0.82)
        few = spent["bytes"] / 0.97 / BANDWIDTH
        rows = 2.2e-8 * sympy.Min(M, 128, evaluate=False)
        return 1.8e-6 + rows + sympy.Max(few, spent["flops"] / rate / RATE, evaluate=False)

    def operands(self, contract: ScaledMatmul) -> dict[str, Spec]:
        return operands(contract)

    def pack(self, contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
        return pack(contract, source)

    def configs(self, contract: ScaledMatmul, m: int) -> Sequence[str]:
        return candidates(contract, m)

    def run(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> torch.Tensor:
        a = inputs[0]
        made = prepared(contract, config or self.configs(contract, a.shape[0])[0], a.device)
        if made is None:
            return fallback.other(SCALED_MATMUL, self, contract, inputs, packed)
        code, *rest = packed
        whole = aligned(code)
        held = None if contract.weight.scale is None else rest.pop(0)
        early = MANY if whole is code else 0  # a copy is written by the kernel in front
        return _launch(contract, made, inputs, whole, held, rest[0] if rest else None, early)

    def direct(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        source: Operands,
        config: str | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The product with codes that are not packed and that the kernel in front may have written:
        they are fetched when it has ended. Into `out` if it is given. None where these codes would
        have to be copied, or no kernel can be made."""
        a, w = inputs[0], source.weight
        if not is_aligned(w.codes):
            return None
        made = prepared(contract, config or self.configs(contract, a.shape[0])[0], a.device)
        if made is None:
            return None
        there = out if out is not None and is_aligned(out) else None
        found = _launch(contract, made, inputs, w.codes, w.scale, source.bias, 0, there)
        return found if out is None or out is there else out.copy_(found)


def _launch(
    contract: ScaledMatmul,
    made: Made,
    inputs: Sequence[torch.Tensor],
    codes: torch.Tensor,
    held: torch.Tensor | None,
    bias: torch.Tensor | None,
    early: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product, in `out` if it is given.

    held   scales of W
    early  stages of W that are fetched while the kernel in front still runs"""
    (run, programs), (a, scale) = made, inputs
    if out is None:
        out = a.new_empty((a.shape[0], contract.weight.n), dtype=contract.out)
    scale = bits(scale if contract.group else scale.reshape(1))
    held = None if held is None else bits(held)
    with torch.cuda.device_of(out):
        bias = None if bias is None else bias.contiguous()
        run(aligned(a), scale, codes, held, bias, out, programs, early)
    return out


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the kernels take a tensor where it is: one row after the other, 16 bytes aligned."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def aligned(codes: torch.Tensor) -> torch.Tensor:
    """Codes as TMA takes them."""
    return codes if is_aligned(codes) else codes.clone(memory_format=torch.contiguous_format)


def bits(scale: torch.Tensor) -> torch.Tensor:
    """Scales as the kernels take them."""
    return scale.view(torch.uint8) if scale.dtype is E8M0 else scale


# Largest M -> (p, q, cluster, blocks) worth a try, the first guess first.
Tile = tuple[int, int, int, int]
Tiles = dict[int, list[Tile]]
# W is L
FEW: Tiles = {
    **{q: [(64, q, 1, 2), (128, q, 1, 1)] for q in (8, 16, 32)},
    64: [(128, 64, 1, 1), (64, 64, 1, 2)],
    128: [(128, 128, 2, 1)],
}
# a is L
WHOLE: Tiles = {
    64: [(64, 64, 1, 2), (64, 32, 1, 2)],
    128: [(128, 128, 1, 1), (64, 128, 1, 1), (64, 64, 1, 2), (128, 64, 1, 1)],
    256: [(128, 128, 1, 1), (128, 64, 1, 1), (128, 256, 1, 1), (128, 192, 1, 1)],
    512: [(128, 128, 2, 1), (128, 128, 1, 1), (128, 256, 2, 1), (128, 192, 2, 1)],
    MANY: [(128, 256, 2, 1), (128, 256, 1, 1), (128, 128, 2, 1), (128, 192, 2, 1)],
}
# Sums are held twice, or those of two waves.
ADDED: Tiles = {
    64: [(64, 32, 1, 2), (64, 64, 1, 2), (64, 32, 1, 1), (64, 64, 1, 1)],
    128: [(128, 128, 1, 1), (64, 128, 1, 1), (64, 32, 1, 2), (128, 32, 1, 1), (64, 64, 1, 2)],
    256: [(128, 64, 1, 1), (128, 128, 1, 1), (128, 32, 1, 1)],
    512: [(128, 128, 2, 1), (128, 128, 1, 1), (256, 128, 1, 1), (128, 64, 1, 1)],
    MANY: [(256, 128, 2, 1), (256, 128, 1, 1), (128, 128, 2, 1), (128, 128, 1, 1)],
}
# In slices of a stage.
SLICED: Tiles = {
    64: [(64, 64, 1, 2), (64, 32, 1, 2), (64, 64, 1, 1)],
    128: [(64, 64, 1, 2), (128, 128, 1, 1), (128, 64, 1, 1), (64, 32, 1, 2), (64, 64, 1, 1)],
    256: [(128, 64, 1, 1), (128, 128, 1, 1), (64, 64, 1, 2)],
    512: [(128, 128, 1, 1), (128, 128, 2, 1), (128, 64, 1, 1)],
    MANY: [(128, 128, 2, 1), (128, 128, 1, 1)],
}


def _tiles(table: Tiles, m: int) -> list[Tile]:
    """Those of the smallest M of a table that is not below m."""
    return next((table[most] for most in table if m <= most), [])


@functools.cache
def tiles(contract: ScaledMatmul, m: int) -> tuple[Config, ...]:
    """Configs of one part of K that are worth measuring at m rows, the best guess first."""
    table = {0: WHOLE, BK: ADDED}.get(step_of(contract), SLICED)
    most = [(tile, True) for tile in _tiles(FEW, m)]
    if m > 32:
        more = [(tile, False) for tile in _tiles(table, m)]
        most = most + more if m <= 64 and not step_of(contract) else more + most
    made = (deepest(Config(p, q, 2, c, 1, b, swap)) for (p, q, c, b), swap in most)
    found = tuple(config for config in made if config.takes(form_of(contract)))
    # 32 rows of W are in one block, whatever its size.
    return found or (deepest(Config(64, 32, 2, 1, 1, 2)),)


def _split(config: Config, split: int) -> Config | None:
    """The config with so many parts of K, if there can be."""
    changed = dataclasses.replace(config, split=split)
    return None if changed.fault else changed


@functools.lru_cache(4096)
def candidates(contract: ScaledMatmul, m: int) -> tuple[str, ...]:
    """Configs worth measuring at m rows, the best guess first: K in parts as far as they all run at
    once."""
    w, found = contract.weight, {str(heuristic(contract, m)): None}
    for config in tiles(contract, m):
        for split in (1, 2, 4, 8):
            changed = _split(config, split)
            filled = _programs(contract, m, config) * split / (PROGRAMS * config.blocks)
            if changed and (split == 1 or filled <= 1 and w.k >= split * BK * 4):
                found[str(changed)] = None
    return tuple(found)


def _programs(contract: ScaledMatmul, m: int, config: Config) -> int:
    """Tiles of the result."""
    left, right = (contract.weight.n, m) if config.swap else (m, contract.weight.n)
    return -(-left // config.p) * -(-right // config.q)


def heuristic(contract: ScaledMatmul, m: int) -> Config:
    """A config for m rows: the first tiles or, where they would leave most of the device idle,
    the smallest; K in parts where half of it would still be."""
    first, *others = tiles(contract, m)
    found = first
    if m > FEWEST and 2 * _programs(contract, m, first) < PROGRAMS:
        found = max([first, *others], key=lambda config: _programs(contract, m, config))
    # Beside a library that adds up parts of K, one sum of 14336 products in 14 bits is too far off.
    k, lossy = contract.weight.k, contract.a is not INT8 and not step_of(contract)
    longest_sum = LONG if lossy and m <= FEWEST else k
    while (
        3 * _programs(contract, m, found) * found.split < PROGRAMS * found.blocks
        and k // BK // found.split >= 16
    ) or k > longest_sum * found.split:
        more = _split(found, found.split * 2)
        if more is None:
            break
        found = more
    return found


SCALED_MATMUL.register(ScaledMMA())
