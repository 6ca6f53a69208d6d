"""Compiles products of rows sorted by expert, and says what is wrong with the code. No GPU."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from qinductor.kernels.scaled_matmul import FP32, ScaledMatmul
from qinductor.kernels.scaled_matmul_cases import BF16, FP8, INT8, case
from qinductor.kernels.scaled_matmul_triton_checks import TYPES, faults, shared, spilled
from qinductor.kernels.scaled_matmul_triton_form import (
    PROMOTED,
    device_form,
    four,
    integral,
    slice_of,
)
from qinductor.kernels.scaled_matmul_triton_tiles import Config, of_groups
from qinductor.triton_compile import Compiled, compiled

Check = tuple[str, Callable[[], None]]
N, K = 4096, 7168
FORMATS = {
    "fp8 tensor": case(FP8, 1, N, K, N, K, group=0),
    "fp8 row": case(FP8, 1, N, K, 1, K, bias=BF16),
    "fp8 block128": case(FP8, 1, N, K, 128, 128, group=128),
    "fp8 block32": case(FP8, 1, N, K, 32, 32, group=32),
    "fp8 group32": case(FP8, 1, N, K, 1, 32, group=32),
    "int8 row": case("int8", 1, N, K, 1, K, INT8),
    "w4 fp8 tensor": case("int4", 1, N, K, 1, 128, group=0),
    "w4 fp8 group128": case("int4", 1, N, K, 1, 128, group=128),
}
MEANS = (1, 20, 40, 300)  # rows of an expert


def checks() -> Iterator[Check]:
    """Checks of products, by the configs that are chosen where nothing was measured, and sums."""
    for name, chosen in FORMATS.items():
        for config in dict.fromkeys(str(of_groups(chosen.contract, m)[0]) for m in MEANS):
            yield _product(name, chosen.contract, config, 90)
    for target in (80, 89, 100):
        for name in ("fp8 block128", "int8 row", "w4 fp8 group128"):
            contract = FORMATS[name].contract
            yield _product(name, contract, str(of_groups(contract, 1)[0]), target)
    for name in ("fp8 row", "int8 row"):
        contract = FORMATS[name].contract
        check = partial(held, contract, 90, str(of_groups(contract, 1)[0]), batched=True)
        yield f"batch {name} sm_90", check
    for target in (80, 90, 100):
        yield f"sum_groups sm_{target}", partial(_sums, target)


def _product(name: str, contract: ScaledMatmul, config: str, target: int) -> Check:
    return f"grouped {name} {config} sm_{target}", partial(held, contract, target, config)


def held(contract: ScaledMatmul, target: int, config: str, batched: bool = False) -> None:
    """Compiles a product for sm_<target>; RuntimeError if its code is not as it should be."""
    found = faults(build(contract, target, config, batched=batched), contract, target)
    if found:
        raise RuntimeError(f"grouped {config} of {contract.summary}, sm_{target}: {found}")


def build(
    contract: ScaledMatmul, target: int, config: str, parts: bool = False, batched: bool = False
) -> Compiled:
    """A product as the launch has it compiled, of 8 experts."""
    from qinductor.kernels import scaled_matmul_triton_groups_kernels as kernels

    c, w = contract, contract.weight
    chosen = Config.parse(config).within(contract, shared(target) * 9 // 10)
    wide = target < 89 and not integral(c)
    if wide:
        chosen = dataclasses.replace(chosen, bk=min(chosen.bk, 128))
    bs = min(slice_of(c) or PROMOTED, chosen.bk)
    tma = chosen.tma and target >= 90 and not four(c)
    code = "i8" if four(c) else TYPES[w.storage]
    out = "*fp32" if parts else f"*{TYPES[c.out]}"
    scale = FP32 if four(c) else w.scale
    arguments = {
        "a": "*u8" if wide else f"*{TYPES[c.a]}",
        "w": f"tensordesc<{code}[{chosen.bn}, {bs}]>" if tma
        else "*u8" if wide and not four(c) else f"*{code}",
        "sa_ptr": f"*{TYPES[c.scale]}",
        "sw_ptr": f"*{TYPES[scale]}" if scale is not None else out,
        "bias_ptr": f"*{TYPES[c.bias]}" if c.bias is not None else out,
        "offsets_ptr": "*i32", "out_ptr": out,
        **dict.fromkeys(("a_stride", "w_stride", "w_expert", "N", "K", "sw_expert"), "i32:16"),
        **dict.fromkeys(("T", "split", "sa_row", "sa_group", "sw_row", "sw_group"), "i32"),
    }  # fmt: skip
    constants: dict[str, Any] = {
        "F": device_form(c, wide), "E": 8, "EP": 0 if batched else 16, "BM": chosen.bm,
        "LEAST": chosen.bm // 4 if chosen.bm > 64 else 16, "BN": chosen.bn, "BK": chosen.bk,
        "BS": bs, "PARTS": parts, "STAGES": chosen.stages, "EVEN_K": w.k % chosen.bk == 0,
        "SWAP": True, "TMA": tma, "PDL": target >= 90, "ASM": True,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": chosen.warps, "enable_fp_fusion": False}
    return compiled(kernels.grouped, arguments, constants, target, **options)


def _sums(target: int) -> None:
    from qinductor.kernels import scaled_matmul_triton_groups_kernels as kernels

    types = {"parts_ptr": "*fp32", "out_ptr": "*bf16", "size": "i32", "split": "i32"}
    constants = {"B": 1024, "PDL": target >= 90}
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
    found = spilled(compiled(kernels.sum_groups, types, constants, target, **options), target)
    if found:
        raise RuntimeError(f"sum_groups, sm_{target}: {found}")
