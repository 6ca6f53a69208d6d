"""What the Triton family of scaled_matmul takes, how it packs that, and a kernel's constants.

Weights of 8 bits are taken as they are. Codes of 4 bits become `nibbles`, int8[N / 64, K / 64,
2048] of N and K padded to 128 and 64. The 2048 bytes are [warp 4][g 8][t 4][step 2][half 2][c 4],
in each the codes of two rows, 16 warp + g in the lower half and 8 rows below in the upper; their
column is 32 step + 16 half + 4 t + c. That is what a lane 4 g + t holds of an 8-bit matrix A of
wgmma.m64nNk32 (PTX ISA, "Matrix fragments"). A nibble is the code in two's complement; for float8
activations, of negative ones the lower three bits are inverted: what kernels make numbers of.

Where a has zero points, sums of the codes are packed as well: of whole rows, or of slices.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch.nn.functional import pad

from qinductor.contracts import Hashed, by_row, short
from qinductor.kernels.scaled_matmul import (
    FP32,
    Operands,
    ScaledMatmul,
    code_sums,
    longest,
    operands,
    pack,
)
from qinductor.kernels.scaled_matmul_sums import zeros_why_not
from qinductor.kernels.triton_device import capability, has_triton
from qinductor.op import Spec

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INT8, UINT8 = torch.int8, torch.uint8
E8M0 = torch.float8_e8m0fnu
NUMBERS = {E4M3: "e4m3", E5M2: "e5m2", INT8: "int8", UINT8: "int8"}
RESULTS = (torch.bfloat16, torch.float16, FP32)
SCALES = (*RESULTS, E8M0)
PROMOTED = 128  # columns after which float8 sums leave the tensor cores, which keep 14 bits
SUMMED = 64  # columns of a slice whose codes are added up for zero points, at most
FLOAT8 = (8, 9)  # compute capability from which tensor cores have float8
# What a nibble's number is times the code: bits of e4m3's subnormals, and the upper half of a byte.
FACTORS = {E4M3: 2.0**-9, E5M2: 2.0**-9, INT8: 16.0, UINT8: 16.0}


@dataclasses.dataclass(frozen=True)
class Form(Hashed):
    """What is constant in a kernel for a contract; dtypes are Triton's.

    a, code    numbers of a and of W: "e4m3", "e5m2" or "int8"
    four       whether the codes of W have 4 bits, in `nibbles`
    wide       whether float8 is multiplied as float16, where no tensor core has it
    sums       dtype of the sums of a slice
    promote    whether the sums of slices are added in float32
    rows       scales of a: "tensor", "row", or "group" where they change along k
    columns    scales of W: "", "row", or "grid" where they change along k
    group      columns that share a scale of a
    bn, bk     rows and columns that share a scale of W; 0: all
    a_e8m0, w_e8m0   whether scales are bytes of exponents
    zero       zero points of a: "" for none, "narrow" where all are in the range of the codes,
               "wide" where one may be outside
    less       what is subtracted from codes of a, and so from zero points: 128 of uint8
    summed     columns whose codes are added up for zero points; 0: all of a row
    """

    a: str
    code: str
    four: bool
    wide: bool
    sums: Any
    promote: bool
    rows: str
    columns: str
    group: int
    bn: int
    bk: int
    a_e8m0: bool
    w_e8m0: bool
    out: Any
    bias: bool
    zero: str
    less: int
    summed: int

    __hash__ = Hashed.__hash__  # it is hashed at every launch


def four(contract: ScaledMatmul) -> bool:
    """Whether W is packed in nibbles."""
    return contract.weight.codes == "int4"


def integral(contract: ScaledMatmul) -> bool:
    """Whether codes of a are integers; then sums are int32."""
    return contract.a in (INT8, UINT8)


def _summed_of(contract: ScaledMatmul) -> int:
    """Columns whose codes are added up for zero points; 0: all of a row."""
    return min(slice_of(contract), SUMMED)


def slice_of(contract: ScaledMatmul) -> int:
    """Columns whose sum must be taken out of the tensor cores; 0 where no sum must."""
    c, w = contract, contract.weight
    steps = [size for size in (c.group, w.bk if w.scale is not None else w.k) if 0 < size < w.k]
    if steps:
        return min(PROMOTED, *(size & -size for size in steps))
    return 0 if integral(c) or c.fast else PROMOTED


@functools.cache
def device_form(contract: ScaledMatmul, wide: bool) -> Form:
    """The constants of the kernels; wide: for a device whose tensor cores have no float8."""
    import triton.language as tl

    c, w = contract, contract.weight
    named = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, FP32: tl.float32}
    held = w.scale is not None or four(c)
    grid = w.scale is not None and w.bk < w.k
    integers = integral(c)
    code = (INT8 if integers else E4M3) if four(c) else w.storage
    zero = "" if c.zero is None else "narrow" if c.zero is c.a else "wide"
    return Form(
        NUMBERS[c.a], NUMBERS[code], four(c), wide and not integers,
        tl.int32 if integers else tl.float32, slice_of(c) > 0,
        "tensor" if not c.group else "row" if c.group >= w.k else "group",
        ("grid" if grid else "row") if held else "",
        c.group, 1 if four(c) else 0 if w.bn >= w.n else w.bn, w.bk if grid else 0,
        c.scale is E8M0, w.scale is E8M0 and not four(c), named[c.out], c.bias is not None,
        zero, 128 if c.a is UINT8 else 0, _summed_of(c) if zero else 0,
    )  # fmt: skip


def padded(contract: ScaledMatmul) -> tuple[int, int]:
    """(N, K) of the nibbles."""
    w = contract.weight
    return -(-w.n // 128) * 128, -(-w.k // 128) * 128


class Packed:
    """What the family takes, and how it holds W."""

    dense = False
    reference = False

    def runs_on(self, target: str) -> bool:
        return target.startswith("sm_") and int(target[3:]) >= 80  # asynchronous copies

    def missing(self) -> str | None:
        return None if has_triton() else "Triton is not installed"

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c, w = contract, contract.weight
        if not w.n * w.k:
            return f"W is {w.n}x{w.k}; it takes no empty one"
        floats = ("float8_e4m3fn", "float8_e5m2")
        whole_codes = ("int8", "int4")
        takes = {
            INT8: whole_codes,
            UINT8: whole_codes,
            E4M3: (*floats, "int4"),
            E5M2: (*floats, "int4"),
        }
        if w.codes not in takes.get(c.a, ()):
            return (
                f"{short(c.a)} times {w.codes}; it takes float8 with float8, int8 and uint8 with "
                "int8, and all with int4"
            )
        if c.zero is not None and not integral(c):
            return f"{short(c.a)} and zero points; it takes those of integers"
        if reason := zeros_why_not(c):
            return reason
        if w.arithmetic not in ("q", "q*s") or w.permuted:
            return f"W is {w.arithmetic}{', permuted' * w.permuted}; it takes q and q*s"
        if c.scale not in SCALES or w.scale not in (None, *SCALES):
            return (
                f"scales are {short(c.scale)} and {short(w.scale)}; it takes fp32, bf16, fp16 and "
                "float8_e8m0fnu"
            )
        if c.out not in RESULTS or c.bias not in (None, *RESULTS):
            return f"the result is {short(c.out)}, the bias {short(c.bias)}; it takes floats"
        if not integral(c) and c.out is FP32:
            return "float8 and a result in fp32; tensor cores keep 14 bits of such a sum"
        steps = [size for size in (c.group, w.bk) if 0 < size < w.k]
        if any(size % 32 for size in steps):
            return f"{min(steps)} columns share a scale; it takes multiples of 32, or whole rows"
        if len(steps) == 2 and max(steps) % min(steps):
            return f"a has a scale for {c.group} columns, W for {w.bk}; it takes multiples"
        if integral(c) and w.k > longest(c):
            return f"K is {w.k}; it takes up to {longest(c)} (sums are int32)"
        return None

    def operands(self, contract: ScaledMatmul) -> dict[str, Spec]:
        if not four(contract):
            return operands(contract) | sums_of(contract)
        w = contract.weight
        n, k = padded(contract)
        groups = w.grid[1] if w.scale is not None else 1
        found: dict[str, Spec] = {
            "nibbles": ((n // 64, k // 64, 2048), torch.int8),
            "nibbles_scale": ((groups, n), FP32),
        }
        if contract.bias is not None:
            found["bias"] = (w.n,), contract.bias
        return found | sums_of(contract)

    def pack(self, contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
        sums = _packed_sums(contract, source)
        if not four(contract):
            return pack(contract, source) | sums
        form, w = contract.weight, source.weight
        n, k = padded(contract)
        codes = pad(w.codes, (0, k - form.k, 0, n - form.n))
        tensors = {"nibbles": nibbles(codes, not integral(contract))} | sums
        scale = codes.new_ones((form.n, 1), dtype=FP32)
        if w.scale is not None:
            scale = by_row(form, w.scale.to(FP32), form.n)
        scale = pad(scale / FACTORS[contract.a], (0, 0, 0, n - form.n))
        tensors["nibbles_scale"] = scale.t().contiguous()
        if source.bias is not None:
            tensors["bias"] = source.bias.contiguous()
        return tensors


def sums_of(contract: ScaledMatmul) -> dict[str, Spec]:
    """The sums of W's codes where a has zero points, times what a nibble's number is times them."""
    c, w = contract, contract.weight
    if c.zero is None:
        return {}
    if _summed_of(c):
        return {"slice_sums": ((-(-w.k // _summed_of(c)), w.n), torch.int32)}
    return {"nibble_sums" if four(c) else "sums": ((w.n, 1), torch.int32)}


def _packed_sums(contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
    """The tensor of `sums_of`."""
    found = {}
    for name, (_, dtype) in sums_of(contract).items():
        total = code_sums(contract, source.weight.codes, _summed_of(contract) or contract.weight.k)
        total = total * int(FACTORS[contract.a]) if four(contract) else total
        found[name] = (total.t() if _summed_of(contract) else total).to(dtype).contiguous()
    return found


def nibbles(codes: torch.Tensor, floats: bool) -> torch.Tensor:
    """int8[N / 64, K / 64, 2048] of codes int8[N, K], -8 to 7, of padded sizes."""
    n, k = codes.shape
    bits = codes & 15
    if floats:
        bits = torch.where(codes < 0, bits ^ 7, bits)
    # rows / 64, warp, which row of two, g, tiles, step, half, t, c
    parts = bits.view(n // 64, 4, 2, 8, k // 64, 2, 2, 4, 4)
    parts = parts.permute(0, 4, 1, 3, 7, 5, 6, 8, 2).reshape(n // 64, k // 64, 2048, 2)
    return parts[..., 0] | parts[..., 1] << 4


def scales(held: torch.Tensor | None, none: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(scales, strides along rows and along k) as the kernels take them."""
    if held is None:
        return none, 0, 0
    bits = held.view(torch.uint8) if held.dtype is E8M0 else held
    rows, columns = bits.stride() if bits.dim() == 2 else (bits.stride(0), 0)
    return bits, rows, columns


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether TMA can fetch tiles of these on this device."""
    ready = not tensors[0].is_cuda or capability(tensors[0].device) >= (9, 0)
    return ready and all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in tensors)
