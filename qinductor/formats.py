"""Formats as words for a command line: weights, `int4-g128`, `uint4-g64-zp`, `fp8_e4m3-block128`;
products of codes, `fp8-row`, `fp8-block128`, `int8-row`, `w4a8-fp8-g128`."""

import re
from typing import Any

import torch

from qinductor.errors import OptionError
from qinductor.kernels import scaled_matmul_cases as scaled
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, NVFP4, DequantMatmul, case
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, ScaledMatmul
from qinductor.op import Op

CODES = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "nf4": "table4",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)},
}
# Formats whose blocks and scales are part of their name: (codes, block along K, fields).
WHOLE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mxfp4": ("float4_e2m1fn", 32, {"scale": torch.float8_e8m0fnu}),
    "nvfp4": ("float4_e2m1fn", 16, {"arithmetic": "q*s*t", **NVFP4}),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCKS = "g<K>, channel, tensor or block<N>"
# Products of codes: what their words begin with -> (dtype of a, codes of W). A row, a channel or a
# tensor has a scale on both sides; of blocks a has one for as many columns, of 4-bit groups a row.
PRODUCTS = {
    "fp8": (torch.float8_e4m3fn, "float8_e4m3fn"),
    "int8": (torch.int8, "int8"),
    "w4a8-fp8": (torch.float8_e4m3fn, "int4"),
    "w4a8-int8": (torch.int8, "int4"),
}
_PRODUCT = re.compile(
    r"(?:(fp8)-(tensor|row|block[1-9]\d*)|(int8)-(row)|(w4a8-(?:fp8|int8))-(channel|g[1-9]\d*))"
    r"(-fast)?(?:-(bf16|fp16|fp32))?"
)
Contract = DequantMatmul | ScaledMatmul


def op_of(contract: Contract) -> Op:
    """The operator whose contract this is."""
    return SCALED_MATMUL if isinstance(contract, ScaledMatmul) else DEQUANT_MATMUL


def product_of(word: str, n: int, k: int) -> ScaledMatmul | None:
    """The contract of codes times codes that a word such as `fp8-row` or `fp8-row-fast-fp16` names,
    the result bf16 unless it ends in a dtype; None for any other."""
    match = _PRODUCT.fullmatch(word)
    if match is None:
        return None
    codes, block = (match[i] or match[i + 2] or match[i + 4] for i in (1, 2))
    (a, weight), size = PRODUCTS[codes], int(re.sub(r"\D", "", block) or 0)
    square = block.startswith("block")
    bn = n if block == "tensor" else min(size, n) if square else 1
    group = 0 if block == "tensor" else min(size, k) if square else k
    out = DTYPES[match[8] or "bf16"]
    made = scaled.case(
        weight, 1, n, k, bn, min(size or k, k), a, group, out=out, fast=match[7] is not None
    )
    return made.contract


def contract_of(word: str, n: int, k: int) -> Contract:
    """The contract of x times a weight [n, k] of the format, x bf16 unless the word ends in a
    dtype; or of a product of codes. OptionError with the valid words for any other."""
    product = product_of(word, n, k)
    if product is not None:
        return product
    rest = word.split("-")
    x = DTYPES[rest.pop()] if len(rest) > 1 and rest[-1] in DTYPES else torch.bfloat16
    codes, *rest = rest
    if codes in WHOLE and not rest:
        name, block, more = WHOLE[codes]
        return case(name, 1, n, k, 1, block, x, **more).contract
    fields: dict[str, Any] = {}
    if rest[1:] == ["zp"] and codes.lstrip("u").startswith("int"):
        fields = {"arithmetic": "(q-z)*s", "zero": torch.int8}
    match = re.fullmatch(r"(g|block)([1-9]\d*)|channel|tensor", rest[0]) if rest else None
    if codes not in CODES or match is None or (rest[1:] and not fields):
        raise OptionError(
            f"no format: {word!r}; wanted {', '.join(WHOLE)}, or CODES-BLOCK[-zp][-DTYPE] with "
            f"CODES one of {', '.join(CODES)}; BLOCK {BLOCKS}; zp, integer zeros, for int and "
            f"uint; DTYPE of x one of {', '.join(DTYPES)}; or products of codes: fp8-tensor, "
            "fp8-row, fp8-block<N>, int8-row, w4a8-fp8-g<K>, w4a8-int8-channel and so on, then "
            "[-fast][-DTYPE of the result]"
        )
    size = int(match[2] or 0)
    bn, bk = {"g": (1, size), "block": (size, size)}.get(match[1], (1, k))
    bn = n if rest[0] == "tensor" else bn
    return case(CODES[codes], 1, n, k, min(bn, n), min(bk, k), x, **fields).contract


def shape_of(word: str) -> tuple[int, int]:
    """(N, K) of `NxK`; OptionError for anything else."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
    if match is None:
        raise OptionError(f"no shape: {word!r}; wanted NxK, such as 4096x4096")
    return int(match[1]), int(match[2])


def rows_of(text: str) -> list[int]:
    """The M of `1,2,16`, ascending; OptionError for anything else."""
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text) is None:
        raise OptionError(f"no list of M: {text!r}; wanted such as 1,2,16")
    return sorted(set(map(int, text.split(","))))
