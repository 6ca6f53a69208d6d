"""Oracles of the functions of sgl-kernel's names, written from their formulas; scale layouts."""

from collections.abc import Sequence

import torch

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LIMITS = {E4M3: (-448.0, 448.0), INT8: (-128.0, 127.0)}
LAYOUTS = ("row", "column", "column padded", "ue8m0 row", "ue8m0 column", "packed", "packed row")


def up(n: int, step: int) -> int:
    return -(-n // step) * step


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bit for bit, but for the bits of a nan; zeros keep their sign."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    if not found.dtype.is_floating_point:
        return torch.equal(found, wanted)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    nan = found.float().isnan() & wanted.float().isnan()
    return bool((nan | (found.view(bits) == wanted.view(bits))).all())


def hold_same(found: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    """AssertionError with the first place where they differ."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), what
    if same(found, wanted):
        return
    a, b = found.float(), wanted.float()
    wrong = ~((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan())
    at = tuple(wrong.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} differ; at {at} {a[at]} is not {b[at]}"
    )


def hold_equal(found: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    """AssertionError with the first place where the values differ; a zero has no sign."""
    hold_same(found + 0, wanted + 0, what)


def saturated(v: torch.Tensor, codes: torch.dtype) -> torch.Tensor:
    """Codes of float32 v: float8 rounds to nearest even, int8 toward zero; both saturate."""
    low, high = LIMITS[codes]
    v = v.clamp(low, high)
    return v.to(E4M3) if codes is E4M3 else v.trunc().to(INT8)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half of each row, rounded, times the second half, rounded."""
    gate, value = x.float().tensor_split(2, -1)
    return (gate / (1 + torch.exp(-gate))).to(x.dtype) * value.to(x.dtype)


def groups(
    y: torch.Tensor, size: int, codes: torch.dtype, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., H], scales float32 [..., H / size]."""
    top = LIMITS[codes][1]
    parts = y.float().reshape(*y.shape[:-1], -1, size)
    largest = parts.abs().max(-1).values.clamp(min=1e-10)
    s = largest * torch.tensor(1 / top, dtype=FP32, device=y.device)
    factor = torch.tensor(top, device=y.device) / largest
    if ue8m0:  # the carry out of a mantissa that is not zero raises the exponent
        whole = ((s.view(torch.int32) + 0x7FFFFF) >> 23 << 23).view(FP32)
        s = torch.where(s.isnan(), s, whole)
        factor = 1 / s
    return saturated(parts * factor[..., None], codes).reshape(y.shape), s


def words(s: torch.Tensor) -> torch.Tensor:
    """int32 [..., ceil(G / 4)] of powers of two [..., G]: byte g % 4 is the exponent of group g."""
    found = torch.zeros(*s.shape[:-1], up(s.shape[-1], 4), dtype=torch.int64, device=s.device)
    found[..., : s.shape[-1]] = s.contiguous().view(torch.int32) >> 23 & 0xFF
    shifts = 8 * torch.arange(4, device=s.device)
    return (found.unflatten(-1, (-1, 4)) << shifts).sum(-1).to(torch.int32)


def rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales [..., 1] of rows."""
    s = x.float().abs().max(-1, keepdim=True).values * torch.tensor(
        1 / 448, dtype=FP32, device=x.device
    )
    return saturated(x.float() * torch.where(s == 0, 0, 1 / s), E4M3), s


def whole(x: torch.Tensor, s: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale [1] of a tensor."""
    if s is None:  # a GPU divides by a number as a product with its reciprocal, by a tensor exactly
        s = (x.float().abs().max() / torch.tensor(448.0, device=x.device)).reshape(1)
    factor = torch.where(s == 0, 0, 1 / s).squeeze()
    return saturated(x.float() * factor, E4M3), s


def scales(lead: Sequence[int], g: int, layout: str, device: str, fill: int = 77) -> torch.Tensor:
    """An output_s [*lead, G] whose memory is filled with a number that shows what was written."""
    *batch, m = lead
    kind = layout.removeprefix("ue8m0 ")
    if kind.startswith("packed"):
        g = up(g, 4) // 4
    dtype = torch.int32 if kind.startswith("packed") else FP32
    if kind in ("row", "packed row"):
        return torch.full((*batch, m, g), fill, dtype=dtype, device=device)
    wide = m if kind == "column" else up(m, 4)
    held = torch.full((*batch, g, wide), fill, dtype=dtype, device=device)
    return held.transpose(-1, -2)[..., :m, :]


def summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The exact product of codes, rounded once to float32."""
    return (a.double() @ b.double()).float()


def row_scaled(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """fma(sa, sums * sb, bias), rounded to `out`."""
    found = (summed(a, b) * sb.reshape(1, -1)).double() * sa.reshape(-1, 1).double()
    return (found if bias is None else found + bias.double()).float().to(out)


def blocks(
    a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype,
    bn: int, bk: int,
) -> torch.Tensor:  # fmt: skip
    """a [M, K] times b [N, K] transposed: the sums of each block of K are scaled, then added."""
    found = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for g, (x, w) in enumerate(zip(a.split(bk, 1), b.split(bk, 1), strict=True)):
        of_rows = sb[:, g].repeat_interleave(bn)[: b.shape[0]]
        found += summed(x, w.t()) * (sa[:, g, None] * of_rows)
    return found.to(out)


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2 x.y / (x.x + y.y)."""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def hostile(dtype: torch.dtype, columns: int, device: str, infinite: bool) -> torch.Tensor:
    """Rows whose numbers lie where rounding, saturation and scales turn: each value alone in a
    group of zeros, with its negative, among smaller ones, and mixed with the others."""
    info = torch.finfo(dtype)
    powers = torch.exp2(torch.arange(-14.0, 16))
    edges = torch.tensor([0, 1, 2, 3, 127, 128, 240, 447, 448, 449, 464, 465, 480, 57344, 65504])
    tiny = torch.tensor([info.smallest_normal * f for f in (2**-3, 0.5, 1, 1.5, 2)])
    small = torch.tensor([1e-10, 2e-10, 5e-11, 4.48e-8, 1.27e-8, 1e-5, 1e-4])
    big = torch.tensor([info.max, info.max / 2, info.max * 0.75])
    values = torch.cat([powers, edges, edges / 448, tiny, small, big]).to(dtype)
    bits = values.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    values = torch.cat([(bits + 1).view(dtype), values, (bits - 1).clamp(min=0).view(dtype)])
    values = values[values.isfinite()]
    if infinite:
        values = torch.cat([values, torch.tensor([torch.inf], dtype=dtype)])
    x = torch.zeros(4, len(values), columns, dtype=dtype)
    x[0, :, 5 % columns] = values
    x[1, :, 0], x[1, :, -1] = -values, values
    x[2] = (torch.randn(len(values), columns) * 0.4).clamp(-1, 1).to(dtype)
    x[2] = torch.where(values.isfinite()[:, None], x[2] * values[:, None], x[2])
    x[2, :, 1] = values
    x[3] = values[torch.randint(len(values), (len(values), columns))]
    return x.reshape(-1, columns).to(device)
