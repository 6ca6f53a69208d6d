"""The proof of a quantiser: its reference and the region give the same bits on hostile rows."""

from collections.abc import Iterator, Sequence

import torch

from qinductor.errors import Refused
from qinductor.kernels.quantize import Quantize, reference
from qinductor.patterns.activation_formats.identify import battery, near
from qinductor.patterns.probe import Remembered, same

ROWS = (3, 40)  # of the runs of a proof, where they are symbolic
GROUPS = 64  # that a proof sees at least
RUNS = 4  # for either number of rows at most, also where a run gives one scale
NAMES = ("codes", "scale", "zero", "sum")
GIVEN = (0.02, 1.0, 0.25, 3e-5, 700.0, 1e-30)  # static scales


def prove(
    asked: Remembered,
    places: Sequence[int],
    contract: Quantize,
    numbers: Sequence[float],
    literal: float | None = None,
) -> None:
    """Refused with the first place where a region and the reference differ.

    places   of the region's outputs: those that are the reference's, in its order
    literal  a static scale that is a number in the region
    """
    region = asked.function
    for seed, wanted in enumerate(ROWS, 11):
        rows = region.rows(wanted)
        groups = rows * contract.groups if contract.group else 1
        count = len(GIVEN) if contract.static else max(1, min(GROUPS // groups, RUNS))
        for turn, inputs in enumerate(batteries(contract, rows, count, numbers, seed)):
            given = [_given(n.meta["val"], turn) for n in region.given]
            theirs = asked((contract.group, contract.static, seed, turn), inputs, given)
            held = given if literal is None else [torch.tensor([literal])]
            ours = reference(contract, [*inputs, *held])
            for name, a, i in zip(NAMES, ours, places, strict=False):
                check(name, a, theirs[i], contract, rows)


def _given(value: torch.Tensor, turn: int) -> torch.Tensor:
    """A static scale, or the weight of a norm."""
    seeded = torch.Generator().manual_seed(turn)
    made = torch.full(value.shape, GIVEN[turn % len(GIVEN)])
    return (made if value.numel() == 1 else torch.randn(value.shape, generator=seeded)).to(
        value.dtype
    )


def check(
    name: str, ours: torch.Tensor, theirs: torch.Tensor, contract: Quantize, rows: int
) -> None:
    """Refused unless two results are equal, whatever shapes they have."""
    if ours.dtype != theirs.dtype or ours.numel() != theirs.numel():
        raise Refused(
            f"{name} is {ours.dtype}{list(ours.shape)} in the reference and "
            f"{theirs.dtype}{list(theirs.shape)} in the region",
            contract=contract.summary,
        )
    a, b = ours.reshape(-1), theirs.reshape(-1)
    wrong = ~same(a, b)
    if wrong.any():
        i = int(wrong.int().argmax())
        each = max(1, len(a) // rows)
        raise Refused(
            f"{name}[{i // each},{i % each}] is {float(a[i])!r} in the reference and "
            f"{float(b[i])!r} in the region ({int(wrong.sum())} of {len(a)} differ); "
            f"the nearest contract is {contract}",
            contract=contract.summary,
        )


def batteries(
    contract: Quantize, rows: int, count: int, numbers: Sequence[float], seed: int
) -> Iterator[list[torch.Tensor]]:
    """Inputs of so many hostile rows, but for the static scale, for so many runs."""
    source = contract.source
    groups = rows * contract.groups if contract.group else 1
    width = rows * contract.k // groups
    known = [*numbers, *(GIVEN if contract.static else ())]
    whole = battery(count * groups, width, contract.x, known, seed).view(count, rows, contract.k)
    seeded = torch.Generator().manual_seed(seed)
    for turn, y in enumerate(whole):
        if contract.static:
            y = near(y, GIVEN[turn % len(GIVEN)], seed)
        gate = (torch.randn(y.shape, generator=seeded) * 4).to(contract.x)
        if contract.residual:
            yield [y, gate]
        elif not source.activation:
            yield [y]
        elif not source.gate:
            yield [torch.where(torch.rand(y.shape, generator=seeded) < 0.5, gate, y)]
        else:
            parts = [gate, y] if source.gate != "swapped" else [y, gate]
            yield parts if source.gate == "two" else [torch.cat(parts, -1)]
