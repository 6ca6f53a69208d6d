"""Provider of scaled_matmul in CuTe DSL, for Hopper and very few rows: cute.scaled_dots."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import sympy
import torch

from qinductor.kernels import cute_cache, fallback
from qinductor.kernels.scaled_matmul import (
    FP32,
    SCALED_MATMUL,
    Operands,
    ScaledMatmul,
    cost,
    operands,
    pack,
)
from qinductor.kernels.scaled_matmul_cute import (
    PROGRAMS,
    Made,
    ScaledMMA,
    aligned,
    attempted,
    bits,
    is_aligned,
    multiprocessors,
)
from qinductor.kernels.scaled_matmul_cute_form import INT8, Form
from qinductor.kernels.scaled_matmul_dots_form import LINE, Config, form_of, halves
from qinductor.kernels.scaled_matmul_sums import experts_why_not
from qinductor.op import Spec
from qinductor.rates import BANDWIDTH, M

WGMMA = ScaledMMA()


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels.sm90 import scaled_matmul_dots

    return scaled_matmul_dots


@functools.cache
def kernel(form: Form, config: Config, early: bool) -> Callable[..., Any]:
    """The compiled kernel, of all M, N and K."""
    return cute_cache.kernel(
        f"scaled_dots {form} {config} {early}", lambda: device().compiled(form, config, early)
    )


@functools.cache
def prepared(contract: ScaledMatmul, config: str, device: torch.device, early: bool) -> Made | None:
    """The kernel; None, after a warning, where the installed compiler or its libraries do not do.

    early  whether it fetches W before the kernel in front has ended"""
    chosen = Config.parse(config)
    return attempted(
        f"cute.scaled_dots@{config}",
        lambda: (kernel(form_of(contract), chosen, early), multiprocessors(device) * chosen.blocks),
    )


class ScaledDots:
    """Lines of W and a in shared memory that no warp shares, sums by mma.sync."""

    name = "cute.scaled_dots"
    dense = False
    reference = False
    version = 1

    def runs_on(self, target: str) -> bool:
        return WGMMA.runs_on(target)

    def missing(self) -> str | None:
        return cute_cache.missing()

    def why_not(self, contract: ScaledMatmul) -> str | None:
        if contract.experts:
            return experts_why_not(contract)
        # The float16 products of mma.sync are summed in float32, so there may be a result in it.
        wide = contract.a is not INT8 and contract.out is FP32
        return WGMMA.why_not(
            dataclasses.replace(contract, out=torch.bfloat16) if wide else contract
        )

    def limit(self, contract: ScaledMatmul, dense: bool = False) -> int:
        return 16  # more rows read W too often

    def seconds(self, contract: ScaledMatmul) -> sympy.Expr:
        # Triton's estimate and a fifth: only measured times prefer it to wgmma. Every eight
        # rows of a read W again.
        weight = sympy.Max(1, M / 8, evaluate=False)
        return 1.2 * (3.5e-6 + 2e-8 * M + cost(contract)["bytes"] * weight / 0.95 / BANDWIDTH)

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
        found = self._product(contract, inputs, packed, config, early=True)
        if found is None:
            whole = aligned(packed[0])
            return fallback.other(SCALED_MATMUL, self, contract, inputs, [whole, *packed[1:]])
        return found

    def direct(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        source: Operands,
        config: str | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The product with codes that the kernel in front may have written: they are fetched when
        it has ended. Into `out` if it is given. None where these codes would have to be copied, or
        no kernel can be made."""
        if not is_aligned(source.weight.codes):
            return None
        held = (source.weight.codes, source.weight.scale, source.bias)
        packed = [tensor for tensor in held if tensor is not None]
        found = self._product(contract, inputs, packed, config, early=False)
        return found if found is None or out is None else out.copy_(found)

    def _product(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
        config: str | None,
        early: bool,
    ) -> torch.Tensor | None:
        a, scale = inputs
        m, (code, *rest) = a.shape[0], packed
        whole = aligned(code)
        early = early and whole is code  # a copy is written by the kernel in front
        made = prepared(contract, config or self.configs(contract, m)[0], a.device, early)
        if made is None:
            return None
        run, programs = made
        held = None if contract.weight.scale is None else bits(rest.pop(0))
        bias = rest[0].contiguous() if rest else None
        scale = bits(scale if contract.group else scale.reshape(1))
        out = a.new_empty((m, contract.weight.n), dtype=contract.out)
        with torch.cuda.device_of(out):
            run(aligned(a), scale, whole, held, bias, out, programs)
        return out


# (warps, programs on a multiprocessor, lines ahead at most) worth a try, the first guess first.
SHARES = ((8, 2, 6), (4, 4, 8), (8, 3, 4), (8, 1, 12), (4, 6, 4), (16, 1, 6), (16, 2, 3))
Q = (1, 2, 4, 8)


def rows_of(form: Form, m: int) -> int:
    """Rows of a that a program has, for m in all."""
    return next((q for q in Q if m <= q), 16 // halves(form))


def deepest(config: Config, form: Form, most: int) -> Config | None:
    """The config with as many lines ahead as fit, but no more than `most`; None if none do."""
    for ahead in range(most, 0, -1):
        tried = dataclasses.replace(config, ahead=ahead)
        if not tried.fault and tried.takes(form):
            return tried
    return None


def lines(contract: ScaledMatmul, split: int, warps: int) -> int:
    """Lines of a tile that a warp has."""
    return -(-contract.weight.k // (LINE * split * warps))


def parts(contract: ScaledMatmul, rows: int) -> int:
    """Parts of K, so that there are about as many programs as multiprocessors."""
    tiles, split = -(-contract.weight.n // rows), 1
    while tiles * split < 0.75 * PROGRAMS and split < 8 and lines(contract, split * 2, 1) >= 4:
        split *= 2
    return split


def shared_out(
    contract: ScaledMatmul, m: int, rows: int, share: tuple[int, int, int], split: int
) -> Config | None:
    """The config that these make, if there is one."""
    (warps, blocks, most), form = share, form_of(contract)
    programs = -(-contract.weight.n // rows) * split
    if programs <= PROGRAMS * blocks:  # each has one tile, and no more lines than that
        blocks = -(-programs // PROGRAMS)
        most = min(most if blocks > 1 else 16, lines(contract, split, warps))
    return deepest(Config(rows, rows_of(form, m), warps, 1, split, blocks), form, most)


@functools.lru_cache(4096)
def candidates(contract: ScaledMatmul, m: int) -> tuple[str, ...]:
    """Configs worth measuring at m rows, the best guess first."""
    found, split = {str(heuristic(contract, m)): None}, parts(contract, 16)
    tried = [(16, share, split) for share in SHARES]
    tried += [(32, share, parts(contract, 32)) for share in SHARES[:2]]
    tried += [(16, share, split * 2) for share in SHARES[:2] if split < 8]
    for rows, share, count in tried:
        config = shared_out(contract, m, rows, share, count)
        if config is not None and lines(contract, count, 1) >= config.warps:
            found[str(config)] = None
    return tuple(found)


def heuristic(contract: ScaledMatmul, m: int) -> Config:
    """A config for m rows: 8 warps, or fewer where K is so short that some would be idle."""
    split = parts(contract, 16)
    whole = lines(contract, split, 1)
    warps = next(w for w in (8, 4, 2, 1) if lines(contract, split, w) * w <= 1.2 * whole)
    found = shared_out(contract, m, 16, (warps, 16 // warps, 6), split)
    return found or Config(16, rows_of(form_of(contract), m), warps, 1, split)


SCALED_MATMUL.register(ScaledDots())
