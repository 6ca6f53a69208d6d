"""Packings of codes of 1 to 8 bits along the last axis, plainly: `pack` and `unpack` of each.

bytes    one code a byte
low      in the bits of a byte, the first code in the lowest ones
high     the same, the first code in the highest ones
halves   the same, but the codes of one byte lie far apart: its first code is of the first part of
         the axis, its last one of the last part
stream   32-bit words read as one stream of bits, the first code in the lowest ones: codes may begin
         in one word and end in the next
planes   one plane for each bit, eight codes a byte
"""

import torch


def of_byte(bits: int) -> range:
    """Where the codes of a byte begin."""
    return range(0, 8 // bits * bits, bits)


def pack(kind: str, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs uint8 codes [..., C]; "planes" adds an axis in front."""
    if kind == "bytes":
        return codes
    if kind == "planes":
        return torch.stack(
            [_bytes((codes >> i & 1).unflatten(-1, (-1, 8)), 1) for i in range(bits)]
        )
    if kind == "stream":
        return _stream(codes.unflatten(-1, (-1, 32)), bits)
    fields = codes.unflatten(-1, (-1, 8 // bits))
    if kind == "halves":
        fields = codes.unflatten(-1, (8 // bits, -1)).transpose(-1, -2)
    return _bytes(fields.flip(-1) if kind == "high" else fields, bits)


def _bytes(fields: torch.Tensor, bits: int) -> torch.Tensor:
    places = zip(fields.unbind(-1), of_byte(bits), strict=True)
    return torch.stack([field << place for field, place in places]).sum(0).to(torch.uint8)


def _stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32[..., bits] words from 32 codes."""
    words = [torch.zeros(codes.shape[:-1], dtype=torch.int64) for _ in range(bits)]
    for i, code in enumerate(codes.long().unbind(-1)):
        word, place = divmod(bits * i, 32)
        words[word] |= code << place & 0xFFFFFFFF
        if place + bits > 32:
            words[word + 1] |= code >> 32 - place
    stacked = torch.stack(words, -1).flatten(-2)
    return torch.where(stacked >= 1 << 31, stacked - (1 << 32), stacked).to(torch.int32)


def unpack(kind: str, packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes again, [..., C] in the dtype of what holds them."""
    mask = (1 << bits) - 1
    if kind == "bytes":
        return packed
    if kind == "planes":
        ones = [torch.stack([plane >> i & 1 for i in range(8)], -1).flatten(-2) for plane in packed]
        return sum(one << i for i, one in enumerate(ones))
    if kind == "stream":
        words = packed.unflatten(-1, (-1, bits))
        return torch.stack([_field(words, bits, i) for i in range(32)], -1).flatten(-2)
    fields = [packed >> place & mask for place in of_byte(bits)]
    if kind == "halves":
        return torch.cat(fields, -1)
    return torch.stack(fields[::-1] if kind == "high" else fields, -1).flatten(-2)


def _field(words: torch.Tensor, bits: int, i: int) -> torch.Tensor:
    """Code i of a group of 32."""
    word, place = divmod(bits * i, 32)
    low = words[..., word] >> place & (1 << min(bits, 32 - place)) - 1
    if place + bits <= 32:
        return low
    return low | (words[..., word + 1] & (1 << place + bits - 32) - 1) << 32 - place
