"""Provider of dequant_matmul on a CPU, for any format and M: strips of W, then oneDNN."""

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qinductor.contracts import QuantizedWeight, by_row, dequantize, difference
from qinductor.errors import Refused
from qinductor.kernels import packing
from qinductor.kernels.dequant_matmul import (
    DEQUANT_MATMUL,
    DequantMatmul,
    Operands,
    Reference,
)
from qinductor.kernels.dequant_matmul_onednn_loop import (
    FIXED_BLOCK,
    Loop,
    emulated,
    exact_difference,
    loop,
)

# Elements of W that are dense at a time. 2 MB in bf16 is what an L2 cache holds, and a buffer that
# size is reused by the allocator, where a larger one is mapped and faulted in at every call.
STRIP = 1 << 20


class DequantStrips(Reference):
    """W, a strip at a time, by one loop that Inductor writes; each strip is multiplied at once.

    It takes every format. A strip is bitwise the graph's own W (its columns in the order they are
    packed in, and x's gathered likewise), so the result is eager's but for the order of summation.
    That is checked on the first call of each contract; where it fails, or Inductor cannot compile
    the loop, or W has no element, the reference serves.
    """

    name = "onednn.dequant_strips"
    reference = False

    def __init__(self) -> None:
        self._bound: dict[DequantMatmul, Bound | None] = {}

    def runs_on(self, target: str) -> bool:
        return target == "cpu"

    def pack(self, contract: DequantMatmul, source: Operands) -> dict[str, torch.Tensor]:
        _check_zero(source.weight)
        return super().pack(contract, source)

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if contract not in self._bound:
            self._bound[contract] = self._proved(contract, packed)
        bound = self._bound[contract]
        return super().run(contract, x, packed) if bound is None else bound(x, packed)

    def _proved(self, contract: DequantMatmul, packed: Sequence[torch.Tensor]) -> "Bound | None":
        """The strips of this contract, if they are bitwise the reference's."""
        if not contract.weight.n * contract.weight.k:
            return None
        whole = self.whole(contract, packed).weight
        w = dequantize(whole)
        if whole.order is not None:
            w = w[:, whole.order]
        bound = None
        try:
            bound = Bound(contract, list(self.operands(contract)))
            differ = next(filter(None, bound.differences(w, packed)), "")
        except Exception as error:
            differ = str(error)
        if differ:
            warnings.warn(f"{self.name} runs on its reference: {differ}", stacklevel=2)
        return None if differ else bound


def _check_zero(weight: QuantizedWeight) -> None:
    """Refused where q - z is not exact though the loop, which is compared with the reference for
    the first weight of a contract only, does not round it."""
    codes, zero, inner = weight.codes, weight.zero, weight.format.inner
    if zero is None or not zero.numel() or emulated(weight.format):
        return
    if not exact_difference(weight.format):
        return
    low, high = codes.min().item() - zero.max().item(), codes.max().item() - zero.min().item()
    exact = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}.get(inner, 1 << 24)
    if max(-low, high) > exact:
        raise Refused(
            f"q - z must be exact in {inner}, up to {exact}; it reaches {max(-low, high)}"
        )


class Bound:
    """The operator for one contract: what can be worked out once is.

    A strip is a slice of the packed rows, and W's rows in it are one slice of each run of rows.
    Its columns come in pieces: whole blocks along k, then what a ragged last block has.
    """

    def __init__(self, contract: DequantMatmul, names: list[str]) -> None:
        form = self.form = contract.weight
        self.out = contract.out
        self.place = {name: i for i, name in enumerate(names)}
        self.runs = packing.runs(form)
        self.count = -(-form.n // self.runs)
        step = min(self.count, max(1, STRIP // form.k // self.runs))
        self.strips = [slice(i, min(i + step, self.count)) for i in range(0, self.count, step)]
        # (columns, blocks, elements in each)
        whole, rest = form.k // form.bk, form.k % form.bk
        pieces = [
            (slice(0, whole * form.bk), slice(0, whole), form.bk),
            (slice(whole * form.bk, form.k), slice(whole, None), rest),
        ]
        self.pieces = [piece for piece in pieces if piece[0].start < piece[0].stop]
        self.one = len(self.strips) == len(self.pieces) == 1  # nothing is cut out of anything
        self.loops = {rows.stop - rows.start: self._loops(rows) for rows in self.strips}

    def _loops(self, rows: slice) -> list[Loop]:
        """For strips of as many packed rows, the loop of each piece."""
        free = dataclasses.replace(self.form, n=0, k=0, bn=0, bk=0, permuted=False)
        return [
            loop(
                free,
                (rows.stop - rows.start == 1, (columns.stop - columns.start) == bk, bk == 1),
                bk if bk <= FIXED_BLOCK else 0,
            )
            for columns, _, bk in self.pieces
        ]

    def _named(self, packed: Sequence[torch.Tensor], name: str) -> torch.Tensor | None:
        return packed[self.place[name]] if name in self.place else None

    def __call__(self, x: torch.Tensor, packed: Sequence[torch.Tensor]) -> torch.Tensor:
        names = ("bias", "output_scale", "order")
        added, scale, order = (self._named(packed, name) for name in names)
        bias = added if scale is None else None  # a scaled product is rounded first
        out = self._product(x if order is None else x[:, order], packed, bias)
        if scale is None:
            return out
        out.mul_(scale)
        return out if added is None else out.add_(added)

    def _product(
        self, x: torch.Tensor, packed: Sequence[torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        m, n, full = x.shape[0], self.form.n, self.runs * self.count
        grids = self.grids(packed)
        if bias is not None:
            bias = self._in_runs(bias[:, None])
        out = x.new_empty((m, full), dtype=self.out) if len(self.strips) > 1 else None
        for rows in self.strips:
            added = self._part(bias, rows)
            added = None if added is None else added.view(-1)
            part = linear(x, self.strip(rows, packed, grids), added)
            if out is None:
                out = part
            else:
                shape = m, self.runs, rows.stop - rows.start
                out.view(m, self.runs, self.count)[:, :, rows] = part.view(shape)
        assert out is not None
        return out if n == full else out[:, :n].contiguous()

    def grids(self, packed: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Scale, zero and outer scale, [runs, packed rows, blocks or 1, 1]."""
        found: list[torch.Tensor | None] = []
        for name in ("scale", "zero"):
            grid = self._named(packed, name)
            if grid is not None:
                grid = self._in_runs(by_row(self.form, grid, self.form.n))
            found.append(grid)
        outer = self._named(packed, "outer")
        return [*found, None if outer is None else self._in_runs(outer[:, None])]

    def _in_runs(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, blocks] as [runs, packed rows, blocks, 1]; rows that W has not get anything."""
        missing = self.runs * self.count - self.form.n
        if missing:
            rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
        return rows.view(self.runs, self.count, -1, 1)

    def _part(
        self, grid: torch.Tensor | None, rows: slice, blocks: slice = slice(None)
    ) -> torch.Tensor | None:
        """What a strip's piece takes of scales, of zeros or of what has one value a row."""
        if grid is None or self.one:
            return grid
        return grid[:, rows, blocks if grid.shape[2] > 1 else slice(None)].contiguous()

    def strip(
        self, rows: slice, packed: Sequence[torch.Tensor], grids: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """W of these packed rows, dense, [runs * packed rows, K]."""
        table = self._named(packed, "table")
        codes, found = packed[0] if len(self.strips) == 1 else packed[0][rows], []
        loops = self.loops[rows.stop - rows.start]
        for (columns, blocks, bk), run in zip(self.pieces, loops, strict=True):
            part = codes if len(self.pieces) == 1 else codes[..., columns].contiguous()
            part = part.view(*part.shape[:-1], -1, bk)
            values = [self._part(grid, rows, blocks) for grid in grids]
            found.append(run(part, *values, table).view(-1, columns.stop - columns.start))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def differences(self, w: torch.Tensor, packed: Sequence[torch.Tensor]) -> Iterator[str]:
        """For each strip what `contracts.difference` says of it and W."""
        grids = self.grids(packed)
        for rows in self.strips:
            ours = self.strip(rows, packed, grids).view(self.runs, -1, w.shape[1])
            for run, part in enumerate(ours):
                start = run * self.count + rows.start
                want = w[start : run * self.count + rows.stop]
                yield difference(part[: len(want)], want)


@functools.cache
def _bf16_linear() -> Any:
    """oneDNN's linear with a fused bias, where this machine has it in bf16; else None."""
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.ops.mkldnn._linear_pointwise.default
    return None


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[M, K] . w[N, K]^T + bias[N], rounded once; oneDNN adds the bias in its own loop."""
    if x.dtype is torch.bfloat16 and (fused := _bf16_linear()) is not None:
        return fused(x, w, bias, "none", [], "")  # type: ignore[no-any-return]
    return torch.nn.functional.linear(x, w, bias)


DEQUANT_MATMUL.register(DequantStrips())
