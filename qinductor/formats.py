"""Weight formats as words for a command line: `int4-g128`, `uint4-g64-zp`, `fp8_e4m3-block128`."""

import re
from typing import Any

import torch

from qinductor.errors import OptionError
from qinductor.kernels.dequant_matmul import NVFP4, DequantMatmul, case

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


def contract_of(word: str, n: int, k: int) -> DequantMatmul:
    """The contract of x times a weight [n, k] of the format; x is bf16 unless the word ends in a
    dtype. OptionError with the valid words for any other."""
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
            f"uint; DTYPE of x one of {', '.join(DTYPES)}"
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
