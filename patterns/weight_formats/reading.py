"""Weights as pattern families read them: identified once for equal regions, proved each time."""

from collections.abc import Sequence

import torch
from torch.fx import Node

from qinductor.contracts import QuantizedWeight
from qinductor.errors import Refused
from qinductor.patterns.weight_formats.identify import Structure, identify
from qinductor.patterns.weight_formats.pieces import Piece, pieces_of
from qinductor.patterns.weight_formats.prove import read
from qinductor.regions import Region


class Weights:
    """Regions of equal signature share what probing found, and are proved one by one."""

    def __init__(self) -> None:
        self._structures: dict[str, Structure] = {}

    def __call__(
        self, region: Region, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[QuantizedWeight], tuple[int, int]]:
        """(the weights that the region makes of its leaves, one for each expert; evaluations on
        probes and of the whole that this took), or Refused."""
        parts = pieces_of(region.output) if region.axes.expert == 0 else []
        return self._stack(region, parts, tensors) if parts else self._one(region, tensors)

    def _stack(
        self, region: Region, parts: Sequence[Node], tensors: Sequence[torch.Tensor]
    ) -> tuple[list[QuantizedWeight], tuple[int, int]]:
        """Weights that are made each by itself, of one format."""
        found: list[QuantizedWeight] = []
        probes = 0
        for i, part in enumerate(parts):
            piece = Piece(region, part)
            (weight,), (runs, _) = self._one(piece.region, piece.leaves(tensors))
            found.append(weight)
            probes += runs
            if weight.format != found[0].format:
                raise Refused(
                    f"weights of experts must be of one format; expert {i} is {weight.format}, "
                    f"expert 0 {found[0].format}"
                )
            if weight.table is not None and not torch.equal(weight.table, found[0].table):  # type: ignore[arg-type]
                raise Refused(f"weights of experts must have one table; that of expert {i} differs")
        return found, (probes, 2)

    def _one(
        self, region: Region, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[QuantizedWeight], tuple[int, int]]:
        known = self._structures.get(region.signature)
        if known is not None:
            try:
                return read(region, known, tensors), (0, 2)
            except Refused:
                pass  # the constants that were kept real may differ: probe again
        found = identify(region, tensors)
        self._structures[region.signature] = found
        return read(region, found, tensors), (found.evaluations, 2)


WEIGHTS = Weights()  # of all families
