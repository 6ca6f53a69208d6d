"""Structures that no library need have: codes of 1 to 8 bits in every packing, layout and product.

All combinations are too many: a seeded sample is compiled and compared, and covers every value.
"""

import dataclasses
import itertools
import random

import pytest
import torch
from packings import pack, unpack
from table import BF16, FP16, FP32, Made, hold_lowered, run

GROUP, ROWS = 64, 32  # columns of a group; rows of a block
SAMPLE = 40  # each costs two seconds or three
AXES = {
    "bits": range(1, 9),
    "packing": ("bytes", "low", "high", "halves", "stream", "planes"),
    "layout": ("nk", "kn"),  # how the weight is stored; codes are packed along the last axis
    "granularity": ("group", "channel", "block"),
    "zero": ("none", "half", "packed", "float", "minimum"),
    "product": ("linear", "matmul", "einsum", "bmm"),
    "rank": (1, 2, 3, 4),  # of x
    "experts": (0, 4),
    "dtype": (BF16, FP16, FP32),
    "spelling": ("view", "repeat"),  # how scales meet codes
}


def possible(packing: str, bits: int) -> bool:
    fields = packing in ("low", "high", "halves")
    return not (fields and bits not in (1, 2, 4)) and not (packing == "bytes" and bits != 8)


@dataclasses.dataclass(frozen=True)
class Structure:
    bits: int
    packing: str
    layout: str
    granularity: str
    zero: str
    product: str
    rank: int
    experts: int
    dtype: torch.dtype
    spelling: str

    @property
    def exists(self) -> bool:
        return (
            possible(self.packing, self.bits)
            and (self.product != "bmm" or self.experts > 0)
            and (self.product != "linear" or self.experts == 0)
            and (self.experts == 0 or self.rank == 3)
        )

    @property
    def size(self) -> tuple[int, int]:
        """(N, K): at least 4096 outputs with 32 rows of x, or with one."""
        return (4096, 128) if self.rank == 1 else (128, 192)

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) that share a scale."""
        k = self.size[1]
        return {"group": (1, GROUP), "channel": (1, k), "block": (ROWS, GROUP)}[self.granularity]

    def __str__(self) -> str:
        experts = "-experts" if self.experts else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.bits}bit-{self.packing}-{self.layout}-{self.granularity}-{self.zero}-"
            f"{self.spelling}-{self.product}-rank{self.rank}{experts}-{dtype}"
        )


def sample() -> list[Structure]:
    """A seeded choice in which every value of every axis is as frequent as can be."""
    everything = [Structure(*values) for values in itertools.product(*AXES.values())]
    chance = random.Random(0)
    left = [structure for structure in everything if structure.exists]
    used: dict[tuple, int] = {}
    chosen: list[Structure] = []
    while len(chosen) < SAMPLE:
        some = chance.sample(left, 200)
        keys = [[(axis, getattr(one, axis)) for axis in AXES] for one in some]
        new = [sum(1 / (1 + used.get(key, 0)) for key in each) for each in keys]
        best = new.index(max(new))
        chosen.append(some[best])
        for key in keys[best]:
            used[key] = used.get(key, 0) + 1
    return chosen


class Weight(torch.nn.Module):
    """A product with a weight of that structure, with random codes, scales and zeros."""

    def __init__(self, structure: Structure) -> None:
        super().__init__()
        self.structure = form = structure
        lead = (form.experts,) if form.experts else ()
        (n, k), (bn, bk) = form.size, form.block
        shape, grid = (n, k), (n // bn, k // bk)
        if form.layout == "kn":
            shape, grid = shape[::-1], grid[::-1]
        top = 1 << form.bits
        codes = torch.randint(0, top, (*lead, *shape), dtype=torch.uint8)
        self.register_buffer("codes", pack(form.packing, codes, form.bits))
        scale = torch.rand(*lead, *grid) * 0.02 + 0.002
        self.register_buffer("scale", scale.to(form.dtype))
        zero = torch.rand(*lead, *grid) * (top - 1)
        if form.zero == "packed":
            packing = form.packing if grid[-1] % 32 == 0 else "bytes"
            self.register_buffer("zero", pack(packing, zero.round().to(torch.uint8), form.bits))
            self.packing_of_zero = packing
        else:
            zero = -0.01 * zero if form.zero == "minimum" else zero
            self.register_buffer("zero", zero.to(form.dtype))

    def weight(self) -> torch.Tensor:
        form = self.structure
        q = unpack(form.packing, self.codes, form.bits).to(form.dtype)
        s, z = self.scale, self.zero
        if form.zero == "half":
            q = q - (1 << form.bits - 1)
        if form.zero == "packed":
            z = unpack(self.packing_of_zero, z, form.bits).to(form.dtype)
        shape, (a, b) = q.shape, s.shape[-2:]
        if form.spelling == "view":
            q = q.unflatten(-1, (b, -1)).unflatten(-3, (a, -1))
            s, z = s[..., :, None, :, None], z[..., :, None, :, None]
        else:
            s, z = self.repeated(s, shape), self.repeated(z, shape)
        if form.zero in ("packed", "float"):
            q = q - z
        w = q * s
        w = w + z if form.zero == "minimum" else w
        return w.reshape(shape)

    def repeated(self, grid: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        rows, columns = shape[-2] // grid.shape[-2], shape[-1] // grid.shape[-1]
        grid = grid.repeat_interleave(rows, -2) if rows > 1 else grid
        return grid.repeat_interleave(columns, -1) if columns > 1 else grid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        form, w = self.structure, self.weight()
        if form.product == "einsum":
            x_axes, w_axes = ("emk", "e") if form.experts else ("...k", "")
            out = "emn" if form.experts else "...n"
            return torch.einsum(f"{x_axes},{w_axes}{form.layout}->{out}", x, w)
        if form.product == "linear":
            return torch.nn.functional.linear(x, w if form.layout == "nk" else w.t())
        w = w.transpose(-1, -2) if form.layout == "nk" else w
        return torch.bmm(x, w) if form.product == "bmm" else torch.matmul(x, w)


def made(structure: Structure) -> Made:
    shapes = {1: (), 2: (32,), 3: (2, 16), 4: (2, 2, 8)}
    shape = (structure.experts, 32) if structure.experts else shapes[structure.rank]
    k = structure.size[1]
    return Made(Weight(structure), lambda m: (torch.randn(*shape, k, dtype=structure.dtype),))


@pytest.mark.parametrize("structure", sample(), ids=str)
def test_structure(structure):
    codes = "int" if structure.zero == "half" else "uint"
    bn, bk = structure.block
    granularity = {"group": f"group-{bk}", "channel": "channel", "block": f"block-{bn}x{bk}"}
    says = (f" {codes}{structure.bits}[", granularity[structure.granularity])
    run(made(structure), lambda reports: hold_lowered(reports, 1, says))


def test_the_sample_covers_every_value():
    chosen = sample()
    for axis, values in AXES.items():
        missing = set(values) - {getattr(structure, axis) for structure in chosen}
        assert not missing, (axis, missing)


PACKINGS = [(p, b) for p in AXES["packing"] for b in AXES["bits"] if possible(p, b)]


@pytest.mark.parametrize(("packing", "bits"), PACKINGS)
def test_packing(packing, bits):
    codes = torch.randint(0, 1 << bits, (3, 64), dtype=torch.uint8)
    packed = pack(packing, codes, bits)
    assert packed.numel() * packed.element_size() == codes.numel() * bits // 8
    assert torch.equal(unpack(packing, packed, bits).to(torch.uint8), codes)
