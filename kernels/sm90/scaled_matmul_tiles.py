"""Which tiles and stages the programs of the CuTe DSL products of scaled_matmul have."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from qinductor.kernels.scaled_matmul_cute_form import BK, Config, Form

BAND = 8  # rows of tiles that are near each other in time, for the L2 cache


class Tiles:
    """Tiles of D[P, Q], whose rows are those of L and whose columns are rows of R."""

    form: Form
    config: Config
    groups: int  # of warps that multiply
    size: int  # programs of a cluster
    sums: Any  # type in which tensor cores add up
    total: Any  # type of the sums over K
    out: Any  # type of the result

    @cute.jit
    def tiles(self, left, right):
        """(groups of tiles of L for a cluster, tiles of R), of a batch."""
        rows = cute.ceil_div(left.shape[0], self.config.p * self.config.cluster)
        return rows, cute.ceil_div(right.shape[0], self.config.q)

    @cute.jit
    def placed(self, tile, left, right):
        """(batch, tile of L, tile of R) of this program."""
        rows, columns = self.tiles(left, right)
        batch = Int32(0)
        if cutlass.const_expr(self.form.batched):
            batch = tile // (rows * columns)
            tile = tile - batch * rows * columns
        band = tile // (BAND * columns)
        high = cutlass.min(rows - band * BAND, BAND)
        inside = tile - band * BAND * columns
        row = band * BAND + inside % high
        if cutlass.const_expr(self.config.cluster > 1):
            row = row * self.config.cluster + cute.arch.block_idx_in_cluster()
        return batch, row, inside // high

    @cute.jit
    def corner(self, tile, group, left, right):
        """(batch, first row of D, first column) of a group's part of a tile."""
        batch, row, column = self.placed(tile, left, right)
        return batch, row * self.config.p + group * 64, column * self.config.q

    @cute.jit
    def walk(self, left, right):
        """(first tile, number of tiles, step between them, first stage of K, number of them)."""
        first = cute.arch.block_idx()[0] // self.size
        rows, columns = self.tiles(left, right)
        tiles = rows * columns
        if cutlass.const_expr(self.form.batched):
            tiles = tiles * left.shape[2]
        k, steps = Int32(0), cute.ceil_div(left.shape[1], BK)
        if cutlass.const_expr(self.config.split > 1):
            share = cute.ceil_div(steps, self.config.split)
            k = cute.arch.block_idx_in_cluster() * share
            steps = cutlass.max(cutlass.min(steps - k, share), 0)
        return first, tiles, cute.arch.grid_dim()[0] // self.size, k, steps

    @cute.jit
    def next(self, stage, phase):
        """The stage after this one, and its phase."""
        wraps = stage + 1 == self.config.stages
        return (0 if wraps else stage + 1), (phase ^ 1 if wraps else phase)

    @cute.jit
    def of(self, tensor, batch):
        """A batch of a tensor; those without such an axis are for all."""
        if cutlass.const_expr(tensor is None or cute.rank(tensor) < 3):
            return tensor
        return tensor[None, None, batch]
