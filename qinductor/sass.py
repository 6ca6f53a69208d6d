"""Reads SASS, the machine code of a GPU kernel: are registers that wgmma still reads written to?

wgmma runs on after it was issued, and reads its left operand from registers while it does. Neither
Triton nor ptxas is known to keep all other writes from them until it is waited for: a product would
be wrong now and then, with nothing else to tell.
"""

import os
import re
import subprocess
import tempfile
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\w+):")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?);")
_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")  # wgmma of 16-bit floats, of float8, of integers
_LEFT = re.compile(r"R\d+, R(\d+), gdesc")  # of a wgmma: sums, left operand, right one
_WRITTEN = re.compile(r"(?:P\w+, )?R(\d+)\b")
# What a first register is read by: stores, barriers, branches, comparisons, moves to uniform ones.
_READERS = ("ST", "RED", "BAR", "SYNCS", "UT", "R2UR", "WARP", "BRA", "CALL", "ISETP")


class Line(NamedTuple):
    """An instruction: its address, operation and operands."""

    address: str
    operation: str
    operands: str


class Early(NamedTuple):
    """left  wgmma instructions with a left operand in registers, loops counted several times
    writes   (instruction, wgmma that may still read what it writes), as text"""

    left: int
    writes: tuple[str, ...]


def disassembled(cubin: bytes) -> str | None:
    """SASS of a cubin, by the nvdisasm that comes with Triton; None where there is none."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/nvdisasm")
    if not os.access(tool, os.X_OK):
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def early_writes(sass: str) -> Early:
    """Writes to a register that a wgmma in flight reads, in every order that loops allow: the
    body of each loop with a wgmma is read again after itself."""
    lines, labels = _parsed(sass)
    groups: list[dict[int, str]] = []  # registers of each group in flight, oldest first
    open_: dict[int, str] = {}  # of the group that is not yet closed
    left, found = 0, []
    for line in _unrolled(lines, labels):
        if line.operation.startswith(_PRODUCTS):
            if operand := _LEFT.match(line.operands):
                left += 1
                open_.update({int(operand[1]) + i: line.address for i in range(4)})
            if "gsb0" in line.operands:
                groups, open_ = [*groups, open_], {}
        elif line.operation.startswith("WARPGROUP.DEPBAR"):
            kept = int(line.operands.rsplit(",", 1)[-1], 16)
            groups = groups[-kept:] if kept else []
        else:
            read = {register: at for group in (*groups, open_) for register, at in group.items()}
            found += [
                f"{line.address} {line.operation} {line.operands}: read by {read[register]}"
                for register in _written(line)
                if register in read
            ]
    return Early(left, tuple(dict.fromkeys(found)))


def _parsed(sass: str) -> tuple[list[Line], dict[str, int]]:
    """The instructions, and the place of each label among them."""
    lines: list[Line] = []
    labels: dict[str, int] = {}
    for text in sass.splitlines():
        if label := _LABEL.match(text):
            labels[label[1]] = len(lines)
        elif match := _LINE.search(text):
            lines.append(Line(*match.groups()))
    return lines, labels


def _unrolled(lines: list[Line], labels: dict[str, int]) -> list[Line]:
    """The instructions in order, then the body of each loop with a wgmma three times."""
    order = list(lines)
    for i, line in enumerate(lines):
        target = re.search(r"\((\.L_x_\w+)\)", line.operands)
        if line.operation != "BRA" or target is None:
            continue
        body = lines[labels.get(target[1], i + 1) : i + 1]
        if any(each.operation.startswith(_PRODUCTS) for each in body):
            order += body * 3
    return order


def _written(line: Line) -> range:
    """The registers that an instruction writes."""
    match = _WRITTEN.match(line.operands)
    if match is None or line.operation.startswith(_READERS):
        return range(0)
    wide = ".64" in line.operation or "WIDE" in line.operation
    matrices = re.search(r"\.M\w*88\.([24])$", line.operation)  # of ldmatrix
    if matrices is not None:
        count = int(matrices[1])
    else:
        count = 4 if ".128" in line.operation else 2 if wide or line.operation == "CS2R" else 1
    return range(int(match[1]), int(match[1]) + count)
