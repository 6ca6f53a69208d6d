"""Weights as pattern families read them: identified once for equal regions, proved each time."""

from collections.abc import Sequence

import torch

from qinductor.contracts import QuantizedWeight
from qinductor.errors import Refused
from qinductor.patterns.weight_formats.identify import Structure, identify
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
