"""Compiles the kernels of cute.scaled_dots, and says what is wrong with the code. No GPU."""

from collections.abc import Callable, Iterator
from functools import partial

from qinductor.kernels.scaled_matmul import ScaledMatmul
from qinductor.kernels.scaled_matmul_cute_checks import FORMATS, Code, coded
from qinductor.kernels.scaled_matmul_dots import device, heuristic
from qinductor.kernels.scaled_matmul_dots_form import Config, form_of

Check = tuple[str, Callable[[], None]]
ROWS = (1, 8)


def build(contract: ScaledMatmul, config: str, early: bool = True) -> Code:
    """The code of one kernel. Errors: those of `coded`."""
    return coded(
        lambda options: device().compiled(form_of(contract), Config.parse(config), early, options)
    )


def faults(code: Code, contract: ScaledMatmul, config: Config, early: bool = True) -> str:
    """What is wrong with the code of a kernel; empty if nothing."""
    form, found = form_of(contract), []
    whole = form.a == "int8"
    product = "m16n8k32.row.col.s32.s8.s8.s32" if whole else "m16n8k16.row.col.f32.f16.f16.f32"
    if f"mma.sync.aligned.{product}" not in code.ptx:
        found.append(f"there are no products {product}")
    kinds = {} if whole else {form.a: "a", form.w: "W"}
    for kind in kinds:
        name = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[kind]
        if f"cvt.rn.f16x2.{name}x2" not in code.ptx:
            found.append(f"codes of {kinds[kind]} are not made float16 from {name}")
    first = code.ptx.find("cp.async.cg.shared.global.L2::256B")
    if first < 0 or "], 16, p;" not in code.ptx:
        found.append("W is not fetched 16 bytes at a time")
    if early != (first < code.ptx.find("griddepcontrol.wait")):
        found.append("W is fetched before the kernel in front has ended, or should be")
    if (config.split > 1) != ("ld.shared::cluster" in code.ptx):
        found.append("parts of sums are not read from other programs, or should not be")
    if code.stack:
        found.append(f"{code.stack} bytes spill")
    most = min(255, 65536 // (config.threads * config.blocks) // 8 * 8)
    if code.registers > most:
        found.append(f"{code.registers} registers of {most}")
    return "; ".join(found)


def held(contract: ScaledMatmul, config: str, early: bool = True) -> None:
    """Compiles a kernel; RuntimeError with what is wrong with it."""
    found = faults(build(contract, config, early), contract, Config.parse(config), early)
    if found:
        raise RuntimeError(f"{contract.summary} {config}: {found}")


def checks() -> Iterator[Check]:
    """(name, check) of the kernels that are chosen for some numbers of rows."""
    formats = {name: some for name, some in FORMATS.items() if not some.contract.experts}
    for name, chosen in formats.items():
        for m in ROWS:
            config = str(heuristic(chosen.contract, m))
            yield f"{name} M={m} {config}", partial(held, chosen.contract, config)
