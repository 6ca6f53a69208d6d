"""Compiles the kernels of the Triton family of quantisers, and says what is wrong with the code.
Needs no GPU."""

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch

from qinductor.kernels import quantize_cases as cases
from qinductor.kernels.quantize import Quantize
from qinductor.kernels.quantize_triton import Config, candidates, tile
from qinductor.kernels.quantize_triton_form import FLOAT8, device_form
from qinductor.triton_compile import Compiled, compiled

Check = tuple[str, Callable[[], None]]
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8",
    torch.int8: "*i8", torch.int32: "*i32",
}  # fmt: skip
K = 7168
CONTRACTS = {
    "group v2": cases.contract(K, **cases.V2),
    "token": cases.contract(K, group=K, **cases.GUARDED),
    "token of 32768": cases.contract(1 << 15, torch.int8, 1 << 15, low=-127.0),
    "ue8m0 silu packed": cases.contract(
        K, source=cases.SILU, scale=torch.int32, layout="column_padded", **cases.UE8M0
    ),
    "divided": cases.contract(K, floor=1e-9),
    "mx bytes": cases.contract(
        K, group=32, scale=torch.uint8, floor=2.0**-127, most=2.0**127, **cases.MX
    ),
    "asymmetric": cases.contract(K, torch.uint8, K, **cases.ASYMMETRIC),
    "tensor": cases.contract(K, **cases.TENSOR),
    "e5m2": cases.contract(K, torch.float8_e5m2, 32, clamped=False),
    "gelu": cases.contract(K, source=cases.source("gelu", "two"), **cases.V2),
    "gelu_tanh": cases.contract(K, group=K, source=cases.source("gelu_tanh", "two")),
    "add rms": cases.contract(K, source=cases.ADDED, **cases.V2),
    "in bf16": cases.contract(
        K, torch.int8, compute=torch.bfloat16, inner=torch.bfloat16, scale=torch.bfloat16
    ),
}
ROWS = (1, 128, 4096)


def checks() -> Iterator[Check]:
    """Checks of each kernel in the configs that are chosen where nothing was measured."""
    for name, contract in CONTRACTS.items():
        for m in ROWS:
            config = candidates(contract, m)[0]
            for target in (80, 90, 100) if m == ROWS[-1] else (90,):
                check = partial(held, "quantise", contract, target, config)
                yield f"quantise {name} {config} m{m} sm_{target}", check
    contract = CONTRACTS["ue8m0 silu packed"]
    for target in (80, 90, 100):
        check = partial(
            held, "quantise", contract, target, candidates(contract, 64)[0], masked=True
        )
        yield f"quantise rows that are not masked sm_{target}", check


def extremes() -> Iterator[Check]:
    """Checks of what looks for the largest of a whole tensor."""
    for target in (80, 90, 100):
        check = partial(held, "extremes", CONTRACTS["tensor"], target, "r4.c1024.w4")
        yield f"extremes sm_{target}", check


def held(kernel: str, contract: Quantize, target: int, config: str, masked: bool = False) -> None:
    """Compiles one kernel for sm_<target>; RuntimeError if its code is not as it should be."""
    if found := faults(build(kernel, contract, target, config, masked), contract, target):
        raise RuntimeError(f"{kernel} {config} of {contract.summary}, sm_{target}: {found}")


def build(
    kernel: str, contract: Quantize, target: int, config: str, masked: bool = False
) -> Compiled:
    """A kernel as the launch has it compiled, for aligned tensors of multiples of 16."""
    from qinductor.kernels import quantize_triton_kernels as kernels

    c, chosen = contract, Config.parse(config)
    size, wide, groups = tile(c, chosen.columns)
    x = POINTERS[c.x]
    arguments = {
        **dict.fromkeys(("x_ptr", "u_ptr", "w_ptr", "sum_ptr"), x),
        "limit_ptr": "*i32" if masked else x,
        "given_ptr": POINTERS[c.scale] if c.static else x if c.group else "*i32",
        "codes_ptr": "*u8",
        "s_ptr": POINTERS.get(c.scale, "*u8"),
        "z_ptr": POINTERS[c.zero] if c.zero else x,
        "parts_ptr": "*i32",
        **dict.fromkeys(("x_stride", "u_stride", "s_batch", "s_row", "s_group"), "i32:16"),
        **dict.fromkeys(("T", "parts", "tiles"), "i32"),
    }
    constants = {
        "F": device_form(c), "G": size, "BM": chosen.rows, "BG": groups, "GP": wide,
        "MASKED": masked, "LIB": 1 + (target == 90), "HARD": target >= 89,
    }  # fmt: skip
    function = getattr(kernels, kernel)
    taken = {name: value for name, value in constants.items() if name in function.arg_names}
    return compiled(
        function, arguments, taken, target, num_warps=chosen.warps, enable_fp_fusion=False
    )


def fused(contract: Quantize) -> bool:
    """Whether the kernel has products and sums that are meant to be rounded once."""
    return contract.quotient == "x/s" or contract.source.activation != ""


def faults(made: Compiled, contract: Quantize, target: int) -> str:
    """What is wrong with the code; empty if nothing is."""
    found = [f"{made.spills} bytes spill"] if made.spills else []
    loads = re.findall(r"ld\.global\S*\.(v\d\.\w+)", made.ptx)
    if "v4.b32" not in loads:
        found.append(f"no load of 16 bytes: {sorted(set(loads))}")
    if "codes_ptr" in made.ttgir and not re.search(r"st\.global\S*\.v4\.b32", made.ptx):
        found.append("no store of 16 bytes")
    if re.search(r"\bdiv\.(approx|full)", made.ptx):
        found.append("a quotient is not rounded to nearest")
    # CUDA's exp, erf and tanh flush, too, where that changes nothing: they are added to 1.
    flushing = r"\b(add|sub|mul|div)\S*\.ftz" if contract.source.activation else r"\.ftz"
    if re.search(flushing, made.ptx):
        found.append("subnormal numbers become 0")
    if re.search(r"\bfma\.rn\.f32", made.ptx) and not fused(contract):
        found.append("a product and a sum are rounded once")
    code = {torch.float8_e4m3fn: "e4m3x2", torch.float8_e5m2: "e5m2x2"}.get(contract.codes)
    hard = code is not None and f"cvt.rn.satfinite.{code}.f32" in made.ptx
    if "codes_ptr" in made.ttgir and contract.codes in FLOAT8 and hard != (target >= 89):
        found.append("float8 is converted by software" if not hard else "sm_80 has no float8")
    return "; ".join(found)
