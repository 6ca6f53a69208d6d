"""Compiles the kernels of the Triton family, and says what is wrong with the code. Needs no GPU."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from qinductor.kernels.dequant_matmul import BF16, FP16, FP32, NVFP4, DequantMatmul, case
from qinductor.kernels.dequant_matmul_triton import (
    MMA,
    Config,
    heuristic,
    registers,
    scaled_late,
    written_by,
)
from qinductor.kernels.dequant_matmul_triton_form import device_form
from qinductor.triton_compile import Compiled, compiled

Check = tuple[str, Callable[[], None]]
TYPES = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32", torch.int16: "*i16", torch.int32: "*i32"}
N, K = 28672, 4096  # where tiles have 128 rows of W, and registers are few
ZERO: dict[str, Any] = {"arithmetic": "(q-z)*s", "zero": torch.int8}
FORMATS = {
    "int4": case("int4", 1, N, K, 1, 128),
    "int2": case("int2", 1, N, K, 1, 64),
    "int3": case("int3", 1, N, K, 1, 32, FP16),
    "int8": case("int8", 1, N, K, N, K, arithmetic="q", output_scale=True, bias=True),
    "uint4 zero": case("uint4", 1, N, K, 1, 64, **ZERO),
    "uint8 zero": case("uint8", 1, N, K, 1, 128, FP16, **ZERO),
    "fp8": case("float8_e4m3fn", 1, N, K, 128, 128),
    "nvfp4": case("float4_e2m1fn", 1, N, K, 1, 16, arithmetic="q*s*t", **NVFP4),
    "table4": case("table4", 1, N, K, 1, 64),
    "in fp32": case("uint4", 1, N, K, 1, 64, arithmetic="q*s+z", zero=FP32, compute=FP32),
}
# Few registers are left where tiles have many rows of x; what else may go wrong shows at one.
ROWS = {"int4": (1, 64, 300), "int3": (1, 64, 300), "table4": (1, 64, 300), "nvfp4": (1, 64)}
OTHERS = ("int4", "int8", "nvfp4")  # also for the architectures that nothing was measured on


def products() -> Iterator[Check]:
    """Checks of products, by the configs that are chosen where nothing was measured."""
    for name, chosen in FORMATS.items():
        for m in ROWS.get(name, (64,)):
            yield _product(name, chosen.contract, str(heuristic(chosen.contract, m)), 90)
    for target in (80, 100):
        for name in OTHERS:
            contract = FORMATS[name].contract
            yield _product(name, contract, str(heuristic(contract, 1)), target)
    yield _product("int4 parts", FORMATS["int4"].contract, "m32.n64.k256.s4.w4.p3", 90)
    for config in (
        "m16.n128.k128.s1.w4.p3",
        "m32.n128.k256.s1.w4.p3",
        "m64.n128.k128.s1.w8.p3",
        "m128.n128.k64.s1.w8.p4",
    ):
        grouped = partial(held, "product", FORMATS["int4"].contract, 90, config, grouped=True)
        yield f"product of groups {config} sm_90", grouped
    for target in (80, 90, 100):
        grouped = partial(held, "product", FORMATS["uint4 zero"].contract, target, grouped=True)
        yield f"product of groups sm_{target}", grouped
        sums = partial(held, "sum_parts", FORMATS["int8"].contract, target)
        yield f"sum_parts sm_{target}", sums


def dequantised() -> Iterator[Check]:
    """Checks of W written out."""
    for name, chosen in FORMATS.items():
        yield f"dequantise {name} sm_90", partial(held, "dequantise", chosen.contract, 90)
    for target in (80, 100):
        int4 = FORMATS["int4"].contract
        yield f"dequantise int4 sm_{target}", partial(held, "dequantise", int4, target)


def _product(name: str, contract: DequantMatmul, config: str, target: int) -> Check:
    check = partial(held, "product", contract, target, config)
    return f"product {name} {config} sm_{target}", check


def held(
    kernel: str, contract: DequantMatmul, target: int, config: str = "", grouped: bool = False
) -> None:
    """Compiles one kernel for sm_<target>; RuntimeError if its code is not as it should be."""
    made = build(kernel, contract, target, config, grouped)
    late = kernel == "product" and _late(contract, _chosen(contract, config))
    found = faults(made, target, late) if kernel == "product" else spilled(made, target)
    if found:
        raise RuntimeError(f"{kernel} {config} of {contract.summary}, sm_{target}: {found}")


def build(
    kernel: str,
    contract: DequantMatmul,
    target: int,
    config: str = "",
    grouped: bool = False,
    asm: bool = True,
) -> Compiled:
    """A kernel as the launch has it compiled, for aligned operands of multiples of 16."""
    from qinductor.kernels import dequant_matmul_triton_kernels as kernels

    chosen = _chosen(contract, config)
    packed, x = MMA().operands(contract), TYPES[contract.x]
    types = {name: TYPES[packed[name][1]] for name in packed if packed[name][1] in TYPES}
    arguments = {
        **dict.fromkeys(("x_ptr", "scale_ptr", "bias_ptr", "out_ptr"), x),
        **dict.fromkeys(("q0_ptr", "q1_ptr", "q2_ptr"), "*i16"),
        "s_ptr": types.get("fragments_scale", x),
        "z_ptr": types.get("fragments_zero", x),
        "t_ptr": types.get("fragments_outer", x),
        "table_ptr": types.get("table", x),
        "offsets_ptr": "*i32" if grouped else x,
        "parts_ptr": "*fp32",
        **dict.fromkeys(("x_stride", "N", "K", "KP", "N64"), "i32:16"),
        **dict.fromkeys(("M", "rows", "split", "first"), "i32"),
    }
    parts = chosen.split > 1
    if parts:
        arguments["out_ptr"] = "*fp32"
    columns, written = written_by(contract)
    bk = chosen.bk if kernel == "product" else columns
    late = kernel == "product" and _late(contract, chosen)
    constants = {
        "F": device_form(contract, late), "ASM": asm, "PDL": target >= 90, "PARTS": parts, "BK": bk,
        "BM": chosen.bm, "BN": chosen.bn if kernel == "product" else 64, "B": 256,
        "STAGES": chosen.stages, "EVEN_K": True, "E": 8 if grouped else 0, "EP": 16 * grouped,
    }  # fmt: skip
    function = getattr(kernels, kernel)
    taken = {name: value for name, value in constants.items() if name in function.arg_names}
    warps = {"product": chosen.warps, "dequantise": written, "sum_parts": 4}[kernel]
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    if kernel == "product":
        options["maxnreg"] = registers(contract, chosen, grouped)
    return compiled(function, arguments, taken, target, **options)


def _chosen(contract: DequantMatmul, config: str) -> Config:
    return Config.parse(config) if config else heuristic(contract, 16)


def _late(contract: DequantMatmul, config: Config) -> bool:
    return scaled_late(contract, config.bm, config.bk)


def spilled(made: Compiled, target: int, late: bool = False) -> str:
    """What is wrong with the memory of a program, and with products and sums of fp32, if these are
    not scaled sums; empty if nothing is."""
    found = [f"{made.spills} bytes spill"] if made.spills else []
    if made.shared > (most := 163 << 10 if target < 90 else 227 << 10):
        found.append(f"{made.shared} bytes of shared memory of {most}")
    if not late and re.search(r"\bfma\.rn\.f32\b", made.ptx):
        found.append("a product and a sum are rounded once")
    return "; ".join(found)


def faults(made: Compiled, target: int, late: bool = False) -> str:
    """What is wrong with a product, whose sums or whose W are scaled; empty if nothing is.

    A product whose left operand is in registers must be over before they are written again, for
    which Triton (3.6 to 3.9) does not wait; the next tiles must be on their way meanwhile; and W
    must go from the decoding to the product in the registers of one thread. sm_100 cannot do that:
    its tensor cores take W from shared or tensor memory, where Triton puts it.
    """
    import triton

    found = [spilled(made, target, late)]
    steps = made.ttgir[made.ttgir.index("scf.for") : made.ttgir.rindex("scf.yield")]
    if any(int(count) for count in re.findall(r"pendings = (\d+)", steps)):
        found.append("a product may still run when its operand is overwritten")
    if "tt.load" in steps or "async_copy_global_to_local" not in steps:
        found.append("a load of the loop is waited for")
    body = loop(made.ptx)
    # Triton 3.6 shuffles W on sm_80 before it is scaled, which costs time alone.
    stays = target < 100 and (target >= 90 or not triton.__version__.startswith("3.6."))
    if stays and re.search(r"\b(st\.shared|stmatrix|shfl)\b", body):
        found.append("W moves between threads")
    products = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*(\S)", body)
    if 90 <= target < 100 and set(products) != {"{"}:
        found.append("W is no operand of wgmma in registers")
    if target < 90 and "mma.sync" not in body or target >= 100 and "tcgen05.mma" not in body:
        found.append("no tensor core instruction")
    return "; ".join(filter(None, found))


def loop(ptx: str) -> str:
    """The longest loop of a kernel."""
    best = ""
    for label in re.finditer(r"^(\$L__BB\d+_\d+):", ptx, re.MULTILINE):
        back = re.compile(rf"bra(?:\.uni)?\s+{re.escape(label[1])};")
        ends = [match.start() for match in back.finditer(ptx, label.end())]
        if ends and ends[-1] - label.end() > len(best):
            best = ptx[label.end() : ends[-1]]
    return best
