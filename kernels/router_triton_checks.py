"""Compiles the kernels of the Triton family of routers, and says what is wrong with the code.
Needs no GPU."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from qinductor.kernels.router import FP32, Router
from qinductor.kernels.router_cases import MODELS, of_product
from qinductor.kernels.router_triton import Config, product_configs, product_constants
from qinductor.kernels.router_triton_form import BF16, FP16, device_form, places, power
from qinductor.triton_compile import Compiled, compiled

Check = tuple[str, Callable[[], None]]
POINTERS = {
    BF16: "*bf16", FP16: "*fp16", FP32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
}  # fmt: skip
SHAPES = ((256, 7168), (384, 7168), (128, 2880))
ROWS = (1, 4, 8, 16, 64)


def checks() -> Iterator[Check]:
    """Checks of each kernel in the configs that are chosen where nothing was measured."""
    launched = {(product_configs(n, k, True, m)[0], k, m): n for n, k in SHAPES[::-1] for m in ROWS}
    for (config, k, m), n in launched.items():  # N is no constant: one check for all that share it
        for target in (80, 90, 100) if n == 256 and m in (1, 16) else (90,):
            yield _check("product", target, config, k=k, m=m)
    for m in (1, 16):
        yield _check("product", 90, product_configs(256, 7168, False, m)[0], m=m, weight=FP32)
    for target in (80, 90, 100):
        yield _check("sum_parts", target)
        for name, contract in MODELS.items():
            if target == 90 or name in ("deepseek v3", "gpt oss"):
                yield f"select {name} sm_{target}", partial(held, "select", target, contract)
        sums = of_product(MODELS["deepseek v3"], 7168)
        yield f"select of sums sm_{target}", partial(held, "select", target, sums)


def _check(kernel: str, target: int, config: str = "", **fields: Any) -> Check:
    what = " ".join(f"{name}{value}" for name, value in fields.items())
    check = partial(held, kernel, target, config=config, **fields)
    return f"{kernel} {config} {what} sm_{target}", check


def held(kernel: str, target: int, contract: Router | None = None, **fields: Any) -> None:
    """Compiles one kernel for sm_<target>; RuntimeError if its code is not as it should be."""
    made = build(kernel, target, contract, **fields)
    experts = 0 if contract is None else contract.n
    if found := faults(kernel, made, fields.get("config", ""), experts):
        raise RuntimeError(f"{kernel} {contract or fields}, sm_{target}: {found}")


def build(
    kernel: str, target: int, contract: Router | None = None, config: str = "", k: int = 7168,
    m: int = 1, weight: torch.dtype = BF16,
) -> Compiled:  # fmt: skip
    """A kernel as a launch has it compiled, for aligned tensors of multiples of 16."""
    from qinductor.kernels import router_triton_kernels as kernels

    arguments = dict.fromkeys(("x_stride", "w_stride", "out_stride", "N", "K"), "i32:16")
    arguments |= {"M": "i32", "x_ptr": "*bf16", "w_ptr": POINTERS[weight]}
    arguments |= dict.fromkeys(("bias_ptr", "out_ptr", "parts_ptr"), "*fp32")
    constants: dict[str, Any] = {"BIAS": False, "PDL": target >= 90}
    options: dict[str, int] = {"num_warps": 1, "enable_fp_fusion": False}
    if kernel == "product":
        split, more = product_constants(Config.parse(config), m, k, weight.itemsize)
        constants |= more | {"PARTS": split > 1}
        options = {"num_warps": Config.parse(config).warps, "enable_fp_fusion": True}
    elif kernel == "sum_parts":
        constants |= {"SPLIT": 7, "B": 128}
    elif contract is not None:
        constants |= select_constants(contract, 7 if contract.hidden else 0)
        logits = FP32 if contract.hidden else contract.logits
        arguments |= {
            "logits_ptr": POINTERS[logits], "bias_ptr": POINTERS[contract.bias or logits],
            "logit_bias_ptr": POINTERS[contract.logit_bias or logits],
            "weights_ptr": POINTERS[contract.out], "indices_ptr": POINTERS[contract.indices],
        }  # fmt: skip
        options |= {"enable_reflect_ftz": False}
    function = getattr(kernels, kernel)
    taken = {name: value for name, value in constants.items() if name in function.arg_names}
    return compiled(function, arguments, taken, target, **options)


def select_constants(contract: Router, split: int) -> dict[str, Any]:
    """The constants of a selection."""
    groups, size = places(contract)
    return {
        "F": device_form(contract), "SPLIT": split, "GP": groups, "GS": size,
        "KP": power(contract.k), "LIB": True,
    }  # fmt: skip


def faults(kernel: str, made: Compiled, config: str = "", experts: int = 0) -> str:
    """What is wrong with the code; empty if nothing is."""
    found = [f"{made.spills} bytes spill"] if made.spills else []
    if kernel == "product":
        loads = re.findall(
            r"(?:ld\.global\S*\.(v\d)\.\w+|cp\.async\.c[ga]\.\S+.*?(0x10))", made.ptx
        )
        if not loads or any("v4" not in pair and "0x10" not in pair for pair in loads):
            found.append(f"loads are not of 16 bytes: {sorted(set(loads))}")
        cores = "mma.sync" in made.ptx
        if cores != (Config.parse(config).stages > 0):
            found.append("no tensor cores" if not cores else "tensor cores")
    if kernel == "select":
        if re.search(r"\bdiv\.(approx|full)", made.ptx):
            found.append("a quotient is not rounded to nearest")
        if re.search(r"\b(add|sub|mul|div|fma|sqrt)\S*\.ftz", made.ptx):
            found.append("subnormal numbers become 0")
        if experts >= 32 and "redux.sync" not in made.ptx:
            found.append("the largest of a warp is not found in one instruction")
    return "; ".join(found)
