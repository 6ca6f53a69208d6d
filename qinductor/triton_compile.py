"""Compiles a Triton kernel for a GPU that this machine does not have, and reads what came out."""

import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Compiled:
    """registers of a thread; bytes of shared memory, and of spills to local memory (ptxas -v);
    the TTGIR and PTX as text, and the cubin."""

    registers: int
    shared: int
    spills: int
    ttgir: str
    ptx: str
    cubin: bytes


def compiled(
    kernel: Any,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    target: int,
    **options: int,
) -> Compiled:
    """One kernel, of Triton or of Gluon, for sm_<target>.

    arguments  Triton's type of each argument, such as "*bf16" or "i32"; of sizes that are multiples
               of 16 "i32:16" (pointers are aligned so)
    constants  the constant arguments
    options    num_warps and so on
    Errors: what Triton or ptxas raise.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {n: "constexpr" if n in constants else arguments[n].partition(":")[0] for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n not in constants and (arguments[n][0] == "*" or arguments[n].endswith(":16"))
    }
    kind = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        kind = GluonASTSource
    source = kind(kernel, types, {(names.index(n),): v for n, v in constants.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    ptx = made.asm["ptx"]
    chip = re.search(r"\.target (\w+)", ptx)
    assert chip is not None
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        command = [get_ptxas(target).path, "-v", f"--gpu-name={chip[1]}", path, "-o", path + ".bin"]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
    text = said.stdout + said.stderr
    registers = re.search(r"Used (\d+) registers", text)
    assert registers is not None, text
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
    shared, ttgir, cubin = made.metadata.shared, made.asm["ttgir"], made.asm["cubin"]
    return Compiled(int(registers[1]), shared, spills, ttgir, ptx, cubin)
