"""What is lost where codes that the graph holds in floats become int8: NaN.

A graph that quantises in floats keeps a NaN among its codes, and so in a row of its product; in
int8 it is a number. Its scale must then keep the row from being finite. Run on probes: wherever the
codes of a group are NaN, so must its scale be, or infinite, which whole numbers times it are, too.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.activation_formats.identify import battery
from qinductor.patterns.activation_formats.sources import site_of
from qinductor.patterns.code_experts import chosen_rows
from qinductor.patterns.code_products import CodeProduct
from qinductor.patterns.failures import FAILURES, said
from qinductor.patterns.probe import GIVEN, Function, fixed, function
from qinductor.patterns.whole import span
from qinductor.regions import Scope, behind

CUTS = 12  # tensors that are tried
GROUPS = 64  # of the battery of quantisers
ROWS = 16  # of a run, where they are symbolic


class Lost:
    """Checks products; equal quantisers are run once."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def check(self, product: CodeProduct, scale: Node, scope: Scope) -> None:
        """Refused where a NaN among the codes of x would be lost: its scale does not keep it."""
        codes = product.a
        if product.codes == codes.meta["val"].dtype or not span(codes, {}).nan:
            return
        reason = ""
        (codes, chosen), (held, others) = chosen_rows(codes), chosen_rows(scale)
        if chosen != others:
            codes, held = product.a, scale
        for made in itertools.islice(_functions(codes, held, scope), CUTS):
            reason = self._reason(made)
            if not reason:
                return
        raise Refused(
            reason
            or f"codes of x are floats, which may be NaN where int8 is not; {codes.name} and its "
            f"scale, {scale.name}, are made of no one tensor"
        )

    def _reason(self, made: Function) -> str:
        key = made.text()
        if key not in self._known:
            try:
                self._known[key] = _found(made)
            except FAILURES as error:
                self._known[key] = f"what quantises x cannot be run on probes: {said(error)}"
        return self._known[key]


LOST = Lost()


def _functions(codes: Node, scale: Node, scope: Scope) -> Iterator[Function]:
    """Codes and scale as a function of one tensor that both are made of, the nearest first: that
    may be NaN where the graph never makes it so."""
    seen = {*behind(codes, scope)[0], *behind(scale, scope)[0]}
    order = [node for node in codes.graph.nodes if node in seen]
    for cut in site_of(codes, scope).cuts:
        if len(cut) == 1 and fixed(cut[0].meta["val"].shape[-1]) is not None:
            with contextlib.suppress(Refused):
                yield function(cut, [codes, scale], order)


def _found(made: Function) -> str:
    """Where a NaN is lost; empty if it never is."""
    value = made.inputs[0].meta["val"]
    width, dtype = int(value.shape[-1]), value.dtype
    rows = made.rows(ROWS)
    given = made.filled(GIVEN)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = (t.float() for t in made([x.reshape(rows, width)], given))
        return codes.reshape(scale.numel(), -1), scale.reshape(-1, 1)

    each, size = run(torch.zeros(rows, width, dtype=dtype))[0].shape
    probes = _probes(size, dtype)
    whole = -(-len(probes) // each) * each
    for part in probes[torch.arange(whole) % len(probes)].split(each):
        codes, scale = run(part)
        nan = codes.isnan()
        wrong = (nan.any(1, True) & scale.isfinite()).flatten()
        if wrong.any():
            i = int(wrong.int().argmax())
            held = part[i][codes[i].isnan()][0]
            return (
                f"codes of x are floats; where x holds {float(held):g} beside a largest "
                f"{float(part[i].abs().amax()):g} they are NaN, and their scale is "
                f"{float(scale[i]):g}: int8 codes would lose that; the pattern "
                "scaled_matmul_requantised lowers it all the same"
            )
    return ""


def _probes(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Groups of elements: hostile ones of all magnitudes; with NaN, infinities or zeros in one
    place, in some, in all."""
    seeded = torch.Generator().manual_seed(0)
    groups = [torch.zeros(size), torch.full((size,), torch.finfo(dtype).tiny)]
    for value in (math.nan, math.inf, -math.inf):
        for beside in (torch.randn(size, generator=seeded), torch.zeros(size)):
            for count in (1, size // 2, size):
                at = torch.randperm(size, generator=seeded)[: max(1, count)]
                groups.append(beside.scatter(0, at, value))
    both = torch.randn(size, generator=seeded)
    both[:2] = torch.tensor([math.inf, -math.inf])[: len(both)]
    return torch.cat([torch.stack([*groups, both]).to(dtype), battery(GROUPS, size, dtype, [], 0)])
