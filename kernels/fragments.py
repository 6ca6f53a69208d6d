"""Codes and grids in the order in which tensor cores take them: 16 bytes of a thread at a time.

Rows and columns are padded: N to tiles of 128, K to `columns(widths)`. Codes are unsigned, and cut
into fields of 8, 4, 2 and 1 bits as in `packing` (3 = 2 + 1); a field of w bits is a tensor
int16[N / 64, K / S / 16, 1024] with S = 16 / w steps of 16 columns in a tile. The 1024 words are
[warp 4][g 8][t 4][i 4][c 2], in each 16 / w codes from the lowest bits up. The code at place j is
of row 16 warp + 8 (j % 2) + g; its column is 16 step + 8 half + 2 t + c, where

| w       | half      | step          |
|---------|-----------|---------------|
| 8       | i % 2     | i / 2         |
| 4, 2, 1 | j / 2 % 2 | j / 4 * 4 + i |

which is what a lane 4 g + t of a warp holds of a 16-bit matrix A of mma.m16n8k16 and
wgmma.m64nNk16 (PTX ISA, "Matrix fragments").

A grid has a value for each row and group of columns: float32[groups, N], or where values have 16
bits int32[groups, N / 2] with two rows 8 apart in one word, rows 16 p + g and 16 p + g + 8 in word
8 p + g, the first in its lower half.
"""

import torch

ROWS = 128


def columns(widths: tuple[int, ...]) -> int:
    """What the padded K is a multiple of."""
    return max(128, 256 // min(widths))


def padded(n: int, k: int, widths: tuple[int, ...]) -> tuple[int, int]:
    """(N, K) of the packed tensors."""
    tile = columns(widths)
    return -(-n // ROWS) * ROWS, -(-k // tile) * tile


def words_shape(n: int, k: int, width: int) -> tuple[int, int, int]:
    """Shape of a field's words, from the padded sizes."""
    return n // 64, k * width // 256, 1024


def words(field: torch.Tensor, width: int) -> torch.Tensor:
    """The words of a field: uint8[N, K] of padded sizes."""
    n, k = field.shape
    sizes, order = _axes(n, k, width)
    codes = field.view(sizes).permute(order).reshape(n // 64, k * width // 256, 1024, 16 // width)
    found = torch.zeros(codes.shape[:-1], dtype=torch.int16, device=field.device)
    for j in range(16 // width):
        found |= codes[..., j].to(torch.int16) << width * j
    return found


def unpack_words(packed: torch.Tensor, n: int, k: int, width: int) -> torch.Tensor:
    """What `words` packed: uint8[N, K] of padded sizes."""
    sizes, order = _axes(n, k, width)
    mask = (1 << width) - 1
    codes = torch.stack(
        [(packed >> width * j & mask).to(torch.uint8) for j in range(16 // width)], -1
    )
    back = [order.index(axis) for axis in range(len(order))]
    return codes.view([sizes[axis] for axis in order]).permute(back).reshape(n, k)


def _axes(n: int, k: int, width: int) -> tuple[list[int], list[int]]:
    """How a field's rows and columns are cut, and the order of the cuts in its words."""
    tiles, steps = k * width // 256, 16 // width
    inner = min(4, steps)
    # rows, warp, r, g, tiles, upper steps, steps, half, t, c
    sizes = [n // 64, 4, 2, 8, tiles, steps // inner, inner, 2, 4, 2]
    last = [6, 7, 9, 5, 2] if width == 8 else [6, 9, 5, 7, 2]
    return sizes, [0, 4, 1, 3, 8, *last]


def grid(values: torch.Tensor) -> torch.Tensor:
    """The packed grid: values[N, groups] of padded rows, of 16 bits or float32."""
    if values.dtype is torch.float32:
        return values.t().contiguous()
    bits = values.view(torch.int16).to(torch.int32).view(-1, 2, 8, values.shape[1])
    pairs = bits[:, 0] & 0xFFFF | bits[:, 1] << 16
    return pairs.permute(2, 0, 1).reshape(values.shape[1], -1).contiguous()


def unpack_grid(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `grid` packed: [N, groups]."""
    if dtype is torch.float32:
        return packed.t()
    pairs = packed.view(len(packed), -1, 1, 8)
    halves = torch.cat([pairs << 16 >> 16, pairs >> 16], 2)
    return halves.to(torch.int16).view(dtype).reshape(len(packed), -1).t()


def grid_spec(n: int, groups: int, dtype: torch.dtype) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of a packed grid, from the padded N."""
    if dtype is torch.float32:
        return (groups, n), torch.float32
    return (groups, n // 2), torch.int32
