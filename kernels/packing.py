"""Packed codes: which bits of which byte hold the code of a row.

| bits        | operand | shape, dtype                   | code of row n, column k            |
|-------------|---------|--------------------------------|------------------------------------|
| 8           | codes   | [N, K], `WeightFormat.storage` | [n, k]                             |
| 4           | halves  | int8[ceil(N/2), K]             | [i, k] = row i * 16 + row h+i + 8  |
| 1,2,3,5,6,7 | planes  | uint8[ceil(N/8), bits, K]      | spread over [i, :, k], see below   |

A byte never holds two columns of one row: rows are unpacked whole, by arithmetic that vectorises.
A row is n = j * h + i, h the rows of the packed tensor. Codes of `halves` are made signed first,
codes of `planes` unsigned, both by half their range. In `planes` a code is cut from its highest bit
into fields of 4, 2 and 1 bits, as many as its width asks for (7 = 4 + 2 + 1). A field of w bits has
w planes, those of 4 bits first, and row j of the eight is bits w * (j // w) of its plane j % w.
The last rows of a packed tensor may be filled with codes that nothing reads.
"""

import torch

from qinductor.contracts import WeightFormat
from qinductor.op import Spec


def runs(form: WeightFormat) -> int:
    """Rows of W in one row of the packed tensor."""
    return {8: 1, 4: 2}.get(form.bits, 8)


def operand(form: WeightFormat) -> tuple[str, Spec]:
    """Name, shape and dtype of the packed codes."""
    rows = -(-form.n // runs(form))
    if form.bits == 8:
        return "codes", ((form.n, form.k), form.storage)
    if form.bits == 4:
        return "halves", ((rows, form.k), torch.int8)
    return "planes", ((rows, form.bits, form.k), torch.uint8)


def fields(bits: int) -> list[tuple[int, int, int]]:
    """(width, first plane, place in the code) of each field of a code."""
    found, first = [], 0
    for width in (4, 2, 1):
        if bits & width:
            first += width
            found.append((width, first - width, bits - first))
    return found


def pack(form: WeightFormat, codes: torch.Tensor) -> torch.Tensor:
    """The packed tensor of codes [N, K]."""
    if form.bits == 8:
        return codes
    signed, half = form.storage is torch.int8, 1 << form.bits - 1
    rows = -(-form.n // runs(form))
    if signed != (form.bits == 4):
        codes = codes + half if signed else codes.to(torch.int8) - half
    codes = torch.nn.functional.pad(codes, (0, 0, 0, runs(form) * rows - form.n))
    if form.bits == 4:
        return (codes[:rows] << 4) + (codes[rows:] + half)
    codes, planes = codes.to(torch.uint8).view(8, rows, form.k), []
    for width, _, place in fields(form.bits):
        field = (codes >> place & (1 << width) - 1).unflatten(0, (-1, width))
        planes.append(sum(part << width * a for a, part in enumerate(field)))
    return torch.cat(planes).transpose(0, 1).contiguous()


def unpack(form: WeightFormat, packed: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] in `form.storage`, from what `pack` packed."""
    if form.bits == 8:
        return packed
    signed, half = form.storage is torch.int8, 1 << form.bits - 1
    if form.bits == 4:  # a shift of int8 keeps the sign
        codes = torch.cat([packed >> 4, (packed & 15) - half])
    else:
        codes = packed.new_zeros((8, packed.shape[0], form.k))
        for width, first, place in fields(form.bits):
            planes = packed[:, first : first + width].transpose(0, 1)
            parts = [planes >> width * a & (1 << width) - 1 for a in range(8 // width)]
            codes |= torch.cat(parts) << place
        codes = codes.flatten(0, 1)
    codes = codes[: form.n]
    if signed != (form.bits == 4):
        codes = codes - half if signed else codes + half
    return codes.to(form.storage)
