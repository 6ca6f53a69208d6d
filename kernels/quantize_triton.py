"""Provider of quantize in Triton, for sm_80 and up: one launch, or two for a dynamic scale of the
whole tensor.

The mean of squares of an RMS norm is summed in another order than eager's; all else is bitwise.
"""

import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import sympy
import torch

from qinductor.kernels.configs import matched
from qinductor.kernels.quantize import QUANTIZE, Quantize, cost, results
from qinductor.kernels.quantize_triton_form import E8M0, device_form, unsupported
from qinductor.kernels.triton_device import has_triton
from qinductor.op import Spec
from qinductor.rates import BANDWIDTH

SEEN = ((9, 0),)  # compute capabilities on which the shorter silu was seen to be eager's, in bf16
FLOAT8 = (8, 9)  # compute capability from which there is an instruction that converts to float8
PARTS = 512  # programs that look for a whole tensor's extremes, at most
# (elements of all of y up to which it is the first choice, rows, columns, warps)
TILES = (
    (1 << 17, 1, 512, 1),
    (1 << 20, 1, 1024, 2),
    (1 << 22, 2, 1024, 4),
    (1 << 62, 4, 1024, 4),
)
GATED = ((1 << 62, 1, 1024, 2),)  # best of those tried at K = 7168, M = 128 to 16384, on an H200
OTHERS = (
    (1, 512, 1), (1, 1024, 1), (1, 1024, 2), (1, 2048, 4), (1, 4096, 8), (2, 1024, 4),
    (4, 1024, 4), (8, 1024, 8), (4, 512, 4), (8, 512, 8), (2, 2048, 4), (2, 2048, 8), (4, 2048, 8),
)  # fmt: skip


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import quantize_triton_kernels

    return quantize_triton_kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows and columns of a tile, warps of a program."""

    rows: int
    columns: int
    warps: int

    def __str__(self) -> str:
        return f"r{self.rows}.c{self.columns}.w{self.warps}"

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Config":
        """The config that `str` wrote; ValueError for any other text."""
        match = matched(r"r(\d+)\.c(\d+)\.w(\d+)", text, "r1.c512.w1", "triton.quantize")
        return Config(*map(int, match.groups()))


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def tile(contract: Quantize, columns: int) -> tuple[int, int, int]:
    """(elements of a group, that rounded up to a power of two of 2 or more, groups) in a tile of
    about so many columns; of a whole tensor columns are grouped as the tile has them."""
    c = contract
    if not c.group and not c.source.norm:
        size = max(2, min(power(c.k), columns))
        return size, size, 1
    group = c.group or c.k
    wide = max(2, power(group))
    least = c.k // group if c.source.norm else 4 if c.scale is torch.int32 and c.groups > 1 else 1
    most = power(c.k // group)
    return group, wide, max(power(least), min(most, columns // wide))


@functools.lru_cache(4096)
def candidates(contract: Quantize, m: int) -> tuple[str, ...]:
    """Configs worth measuring at m rows, the best guess first."""
    c = contract
    group, wide, _ = tile(c, 1)
    row = wide * tile(c, 1)[2]
    elements = m * c.k
    if (c.group or c.source.norm) and row >= 1024:  # a program has rows
        each = 512 if m < 1024 or c.source.gate or row < 4096 else 1024
        guess = max(1, min(32 if m < 1024 else 16, row // each))
        found = [Config(1, row, guess)]
        found += [Config(1, row, guess // by) for by in (2, 4, 8) if guess // by]
        found += [Config(1, row, guess * 2)] if guess <= 16 else []
        found += [
            Config(rows, row, min(32, guess * by))
            for rows in (2, 4)
            for by in (1, 2)
            if rows <= m and rows * row <= 16384
        ]
        return tuple(dict.fromkeys(str(config) for config in found))
    tiles = GATED if c.source.gate else TILES
    first = next(Config(*rest) for limit, *rest in tiles if elements <= limit)
    found = [first, *(Config(*rest) for rest in OTHERS)]
    fit = []
    for config in found:
        columns = max(2, row, min(config.columns, power(c.k)))
        rows = min(power(m), config.rows * max(1, config.columns // columns))
        warps = max(1, min(config.warps, rows * columns // 256))
        fit.append(str(Config(rows, columns, warps)))
    return tuple(dict.fromkeys(fit))


class Triton:
    """A tile of y in registers: its extremes, scales, codes."""

    name = "triton.quantize"
    dense = False
    reference = False

    def runs_on(self, target: str) -> bool:
        return target.startswith("sm_") and int(target[3:]) >= 80

    def missing(self) -> str | None:
        return None if has_triton() else "Triton is not installed"

    def why_not(self, contract: Quantize) -> str | None:
        return unsupported(contract)

    def operands(self, contract: Quantize) -> dict[str, Spec]:
        return {}

    def pack(self, contract: Quantize, source: None) -> dict[str, torch.Tensor]:
        return {}

    def seconds(self, contract: Quantize) -> sympy.Expr:
        launches = 2 if not contract.group and not contract.static else 1
        return 1.4e-6 * launches + launches * cost(contract)["bytes"] / 0.9 / BANDWIDTH

    def configs(self, contract: Quantize, m: int) -> Sequence[str]:
        return candidates(contract, m)

    def run(
        self,
        contract: Quantize,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> list[torch.Tensor]:
        found = results(contract, inputs)
        launch(contract, inputs, found, config)
        return found


def rowwise(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [M, K], whose rows are contiguous; a copy where it has no such view."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def given(contract: Quantize, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """x or gate, up or residual, norm weight, scale: x for what the contract has not."""
    c, source, rest = contract, contract.source, list(inputs)
    scale = rest.pop() if c.static else rest[0]
    first = second = rowwise(rest.pop(0))
    if source.gate in ("halves", "swapped"):
        first, second = first[:, : c.k], first[:, c.k :]
        first, second = (first, second) if source.gate == "halves" else (second, first)
    elif source.gate or c.residual:
        second = rowwise(rest.pop(0))
    weight = rest.pop(0).contiguous() if source.norm else first
    return [first, second, weight, scale.float() if c.static and scale.dtype is E8M0 else scale]


def launch(
    contract: Quantize,
    inputs: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    config: str | None = None,
    limits: torch.Tensor | None = None,
    kernels: ModuleType | None = None,
) -> None:
    """Writes codes, scale, (zero), (sum) into the tensors `into`, in any layout of the scale.

    limits  int32[E]: of batch e of [E, T, K] only the first limits[e] rows are read and written
    """
    c, code = contract, kernels or device()
    x, second, weight, scale = given(c, inputs)
    m = x.shape[0]
    if not m:
        return
    chosen = Config.parse(config or candidates(c, m)[0])
    codes, s, *others = into
    batches = 1 if limits is None and flat(s) else inputs[0].shape[0]
    rows = m // batches
    s_batch, s_row, s_group = (0, 0, 0, *s.stride())[-3:]
    size, wide, groups = tile(c, chosen.columns)
    across = -(-c.k // (size * groups))
    tiles = -(-rows // chosen.rows) * across
    form, is_cpu = device_form(c), not x.is_cuda
    capability = (0, 0) if is_cpu else torch.cuda.get_device_capability(x.device)
    sums = others[-1] if c.residual else x
    source = (x, x.stride(0), second, second.stride(0), weight)
    options: dict[str, Any] = {
        "F": form, "G": size, "BM": chosen.rows, "BG": groups, "GP": wide,
        "LIB": 0 if is_cpu else 1 + (capability in SEEN), "num_warps": chosen.warps,
        "enable_fp_fusion": False,
    }  # fmt: skip
    with torch.cuda.device_of(x):
        if not c.group and not c.static:
            programs = min(PARTS, tiles)
            scale = x.new_empty((2, PARTS), dtype=torch.int32)
            code.extremes[(programs,)](*source, scale, m, tiles, **options)
        code.quantise[(tiles, batches)](
            *source, scale, _raw(codes), _raw(s), s_batch, s_row, s_group,
            others[0] if c.zero is not None else x, sums, x if limits is None else limits,
            rows, min(PARTS, tiles), MASKED=limits is not None, HARD=capability >= FLOAT8,
            **options,
        )  # fmt: skip


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Codes, and scales that are exponents, as the bytes that they are."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def flat(s: torch.Tensor) -> bool:
    """Whether all rows of the scale [..., G] are one stride apart."""
    return s.dim() != 3 or s.stride(0) == s.shape[1] * s.stride(1)


QUANTIZE.register(Triton())
