"""Runs PTX on a CPU, as far as our kernels need it: the threads of a cluster side by side.

All threads at the least statement run it together, so that branches meet again. More strict than on
a GPU: copies of `cp.async` arrive when they are waited for and not before, shared memory begins as
NaN, a barrier must find all its threads. Less strict: programs of a cluster are never apart, and
the order of sums within one `mma` is numpy's.
"""

import re
import struct
from collections.abc import Sequence

import numpy as np
import torch

SHARED = 228 << 10
BASE = 1 << 20  # address of the first tensor
_KINDS = {"u": np.uint64, "b": np.uint64, "s": np.int64}
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
_FLOATS = {
    kind: torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float16).view(torch.int16)
    .numpy().view(np.uint16).astype(np.uint64)
    for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2))
}  # fmt: skip


def _signed(value: np.ndarray, bits: int) -> np.ndarray:
    moved = value.astype(np.uint64) << np.uint64(64 - bits)
    return moved.view(np.int64) >> np.int64(64 - bits)


def _float(value: np.ndarray) -> np.ndarray:
    return value.astype(np.uint32).view(np.float32)


def _bits(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32).view(np.uint32).astype(np.uint64)


class Memory:
    """Tensors in one array; their addresses begin at `BASE`."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.size = 0

    def place(self, tensor: torch.Tensor) -> int:
        """Copies a tensor's storage; the address of its first element."""
        raw = tensor.untyped_storage()
        held = torch.empty(0, dtype=torch.uint8).set_(raw).numpy().copy()
        padded = np.zeros(-(-len(held) // 256) * 256 + 256, np.uint8)
        padded[: len(held)] = held
        at = BASE + self.size + tensor.storage_offset() * tensor.itemsize
        self.parts.append(padded)
        self.size += len(padded)
        return at

    def joined(self) -> np.ndarray:
        return np.concatenate(self.parts)


class Cluster:
    """Programs of one cluster, from their first statement to their last."""

    def __init__(
        self, code: list[str], labels: dict[str, int], parameters: list[bytes],
        memory: np.ndarray, threads: int, programs: int, place: dict[str, int],
    ):  # fmt: skip
        self.code, self.labels, self.parameters, self.memory = code, labels, parameters, memory
        self.threads, self.count = threads, threads * programs
        self.registers: dict[str, np.ndarray] = {}
        self.shared = np.full((programs, SHARED), 0xFF, np.uint8)
        self.pc = np.zeros(self.count, np.int64)
        every = np.arange(self.count, dtype=np.uint64)
        self.program = (every // np.uint64(threads)).astype(np.int64)
        first = np.uint64(place["%ctaid.x"])
        self.special = {
            "%tid.x": every % np.uint64(threads),
            "%laneid": every % np.uint64(32),
            "%ctaid.x": first + self.program.astype(np.uint64),
            "%cluster_ctarank": self.program.astype(np.uint64),
            "%cluster_ctaid.x": self.program.astype(np.uint64),
        }
        for name, value in place.items():
            self.special.setdefault(name, np.full(self.count, value, np.uint64))
        warps = self.count // 32
        self.open: list[list] = [[] for _ in range(warps)]
        self.groups: list[list] = [[] for _ in range(warps)]
        self.reads = 0  # bytes of global memory that were copied to shared memory

    def run(self) -> None:
        end = len(self.code)
        while True:
            at = int(self.pc.min())
            if at >= end:
                break
            active = np.flatnonzero(self.pc == at)
            self.pc[active] += 1
            self.step(self.code[at], active)
        assert not any(self.open), "a copy is in no group"
        assert not any(self.groups), "a program ends before its copies"

    def value(self, name: str, active: np.ndarray) -> np.ndarray:
        name = name.strip()
        if name in self.registers:
            return self.registers[name][active]
        if name in self.special:
            return self.special[name][active]
        if name.startswith("0f"):
            number = int(name[2:], 16)
        elif name in ("__dynamic_shmem__0",):
            number = 0
        else:
            number = int(name, 0) & 0xFFFFFFFFFFFFFFFF
        return np.full(len(active), number, np.uint64)

    def put(self, name: str, active: np.ndarray, value: np.ndarray, bits: int = 32) -> None:
        held = self.registers.setdefault(name.strip(), np.zeros(self.count, np.uint64))
        mask = np.uint64((1 << bits) - 1)
        held[active] = value.astype(np.uint64) & mask if value.dtype != np.int64 else (
            value.view(np.uint64) & mask
        )  # fmt: skip

    def step(self, text: str, active: np.ndarray) -> None:
        guard = re.match(r"@(!?)(\S+)\s+(.*)", text)
        if guard:
            chosen = self.value(guard[2], active) != 0
            active, text = active[chosen ^ bool(guard[1])], guard[3]
            if not len(active):
                return
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        for start, handler in HANDLERS:
            if name.startswith(start):
                handler(self, name.split("."), parts, active)
                return
        raise NotImplementedError(text)

    # memory

    def address(self, text: str, active: np.ndarray) -> np.ndarray:
        found = re.fullmatch(r"\[\s*([^+\]\s]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        assert found, text
        return self.value(found[1], active).astype(np.int64) + int(found[2] or 0)

    def bytes_of(self, place: np.ndarray, size: int, space: str, active: np.ndarray) -> tuple:
        """(array, rows, columns) of the bytes at these addresses."""
        columns = place[:, None] + np.arange(size)
        if space == "global":
            columns = columns - BASE
            assert (columns >= 0).all() and (columns < self.memory.shape[1]).all(), "outside"
            return self.memory, np.zeros_like(columns), columns
        rank = self.program[active] if space == "shared" else place >> 24
        columns = columns & 0xFFFFFF
        assert (columns >= 0).all() and (columns < SHARED).all(), "outside of shared memory"
        return self.shared, np.broadcast_to(rank[:, None], columns.shape), columns

    def loaded(self, place: np.ndarray, size: int, space: str, active: np.ndarray) -> np.ndarray:
        assert (place % size == 0).all(), "not aligned"
        held, rows, columns = self.bytes_of(place, size, space, active)
        return held[rows, columns]


def _vector(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{}").split(",")]


def _load(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    space = "cluster" if "shared::cluster" in ".".join(name) else name[1]
    kind = next(part for part in name if re.fullmatch(r"[busf]\d+", part))
    bits, targets = int(kind[1:]), _vector(parts[0])
    size = bits // 8 * len(targets)
    if space == "param":
        which, offset = re.fullmatch(r"\[\w*_param_(\d+)(?:\+(\d+))?\]", parts[1]).groups()
        raw = c.parameters[int(which)][int(offset or 0) :][:size]
        words = np.frombuffer(raw, f"<u{bits // 8}").astype(np.uint64)
        for target, word in zip(targets, words, strict=True):
            c.put(target, active, np.full(len(active), word), bits)
        return
    raw = c.loaded(c.address(parts[1], active), size, space, active)
    words = np.ascontiguousarray(raw).view(f"<u{bits // 8}").astype(np.uint64)
    for i, target in enumerate(targets):
        c.put(target, active, words[:, i], bits)


def _store(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    bits, sources = int(name[-1][1:]), _vector(parts[1])
    words = np.stack([c.value(source, active) for source in sources], 1)
    raw = np.ascontiguousarray(words.astype(f"<u{bits // 8}")).view(np.uint8)
    place = c.address(parts[0], active)
    assert (place % raw.shape[1] == 0).all(), "not aligned"
    held, rows, columns = c.bytes_of(place, raw.shape[1], name[1], active)
    held[rows, columns] = raw


def _async(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    for warp in np.unique(active // 32):
        if name[2] == "commit_group":
            c.groups[warp].append(c.open[warp])
            c.open[warp] = []
        elif name[2] == "wait_group":
            left = int(parts[0])
            done = c.groups[warp][: len(c.groups[warp]) - left]
            c.groups[warp] = c.groups[warp][len(done) :]
            for group in done:
                for lanes, to, found in group:
                    held, rows, columns = c.bytes_of(to, found.shape[1], "shared", lanes)
                    held[rows, columns] = found
        else:
            lanes, size = active[active // 32 == warp], int(parts[2])
            ignored = c.value(parts[3], lanes) != 0
            found, read = np.zeros((len(lanes), size), np.uint8), lanes[~ignored]
            found[~ignored] = c.loaded(c.address(parts[1], read), size, "global", read)
            c.reads += size * len(read)
            to = c.address(parts[0], lanes)
            assert (to % size == 0).all(), "not aligned"
            held, rows, columns = c.bytes_of(to, size, "shared", lanes)
            held[rows, columns] = 0xFF  # whoever reads too early finds NaN
            c.open[warp].append((lanes, to, found))


def _move(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    value = c.value(parts[1], active)
    if parts[0].startswith("{"):
        for i, target in enumerate(_vector(parts[0])):
            c.put(target, active, value >> np.uint64(16 * i), 16)
    else:
        c.put(parts[0], active, value, int(name[1][1:]) if name[1] != "pred" else 1)


def _convert(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    to, source = [part for part in name if re.fullmatch(r"[a-z]+\d+(m\d)?(x2)?", part)][:2]
    value = c.value(parts[1], active)
    if source in ("e4m3x2", "e5m2x2"):
        table = _FLOATS[source[:4]]
        low, high = value & np.uint64(255), value >> np.uint64(8)
        c.put(parts[0], active, table[low] | table[high] << np.uint64(16))
    elif source == "f32":
        dtype = torch.bfloat16 if to == "bf16" else torch.float16
        made = torch.from_numpy(_float(value)).to(dtype).view(torch.int16).numpy()
        c.put(parts[0], active, made.view(np.uint16).astype(np.uint64), 16)
    elif to == "f32" and source in ("bf16", "f16"):
        dtype = torch.bfloat16 if source == "bf16" else torch.float16
        held = torch.from_numpy(value.astype(np.uint16).view(np.int16)).view(dtype)
        c.put(parts[0], active, _bits(held.float().numpy()))
    elif to == "f32":
        c.put(parts[0], active, _bits(_signed(value, int(source[1:])).astype(np.float32)))
    else:
        bits = int(source[1:])
        wide = _signed(value, bits) if source[0] == "s" else value & np.uint64((1 << bits) - 1)
        c.put(parts[0], active, wide, int(to[1:]))


def _arithmetic(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    kind = name[-1]
    if kind in ("f32",):
        given = [_float(c.value(part, active)) for part in parts[1:]]
        if name[0] == "fma":  # in one rounding
            wide = [value.astype(np.float64) for value in given]
            c.put(parts[0], active, _bits(wide[0] * wide[1] + wide[2]))
        else:
            made = {"add": np.add, "mul": np.multiply, "sub": np.subtract}[name[0]](*given)
            c.put(parts[0], active, _bits(made))
        return
    if kind == "pred":
        given = [c.value(part, active) for part in parts[1:]]
    else:
        bits = int(kind[1:])
        given = [c.value(part, active) for part in parts[1:]]
        given = [_signed(v, bits) if kind[0] == "s" else v & np.uint64((1 << bits) - 1)
                 for v in given]  # fmt: skip
    with np.errstate(over="ignore"):
        made = _INTEGERS[name[0]](given)
        if "hi" in name:  # of 32 bits, which 64 hold whole
            assert bits == 32, name
            made = made >> made.dtype.type(32)
    bits = 1 if kind == "pred" else int(kind[1:])
    c.put(parts[0], active, made, bits * 2 if "wide" in name else bits)


def _quotient(given: list[np.ndarray]) -> np.ndarray:
    left, right = given
    if left.dtype == np.int64:
        return (np.abs(left) // np.abs(right)) * np.sign(left) * np.sign(right)
    return left // right


_INTEGERS = {
    "add": lambda g: g[0] + g[1],
    "sub": lambda g: g[0] - g[1],
    "mul": lambda g: g[0] * g[1],
    "mad": lambda g: g[0] * g[1] + g[2],
    "div": _quotient,
    "rem": lambda g: g[0] - _quotient(g) * g[1],
    "min": lambda g: np.minimum(*g),
    "max": lambda g: np.maximum(*g),
    "neg": lambda g: -g[0],
    "and": lambda g: g[0] & g[1],
    "or": lambda g: g[0] | g[1],
    "xor": lambda g: g[0] ^ g[1],
    "not": lambda g: ~g[0],
    "shl": lambda g: g[0] << g[1],
    "shr": lambda g: g[0] >> g[1],
}


def _compare(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    kind, given = name[-1], [c.value(part, active) for part in parts[1:]]
    bits = int(kind[1:])
    given = [_signed(v, bits) if kind[0] == "s" else v & np.uint64((1 << bits) - 1) for v in given]
    c.put(parts[0], active, _COMPARE[name[1]](*given).astype(np.uint64), 1)


def _select(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    left, right, chosen = (c.value(part, active) for part in parts[1:])
    c.put(parts[0], active, np.where(chosen != 0, left, right), int(name[1][1:]))


def _whole_warps(c: Cluster, active: np.ndarray) -> np.ndarray:
    assert len(active) % 32 == 0 and (active.reshape(-1, 32) % 32 == np.arange(32)).all(), "apart"
    return active.reshape(-1, 32)


def _shuffle(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    _whole_warps(c, active)
    value, lane = c.value(parts[1], active).reshape(-1, 32), int(parts[2])
    c.put(parts[0], active, np.repeat(value[:, lane], 32))


def _barrier(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    if name[:2] == ["bar", "warp"]:
        _whole_warps(c, active)
    elif name[0] == "barrier":
        assert len(active) == c.count, "a program of the cluster is elsewhere"
    else:
        assert len(active) % c.threads == 0, "a thread is elsewhere"


def _branch(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    c.pc[active] = c.labels[parts[0]]


def _return(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    c.pc[active] = len(c.code)


def _map(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    rank = c.value(parts[2], active) << np.uint64(24)
    c.put(parts[0], active, c.value(parts[1], active) | rank)


def _product(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    """Fragments as the PTX ISA draws them for m16n8k16 (float16) and m16n8k32 (8 bits)."""
    _whole_warps(c, active)
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    whole = "s8" in name
    each, dtype = (4, np.int8) if whole else (2, np.float16)
    left, right, sums = (
        np.stack([c.value(part, active) for part in _vector(text)], -1).reshape(-1, 32, count)
        for text, count in zip(parts[1:], (4, 2, 4), strict=True)
    )
    a = np.zeros((len(left), 16, 8 * each))
    b, d = np.zeros((len(left), 8 * each, 8)), np.zeros((len(left), 16, 8))
    for i in range(4):
        numbers = np.ascontiguousarray(left[:, :, i].astype(np.uint32))[..., None].view(dtype)
        for j in range(each):
            a[:, g + i % 2 * 8, t * each + j + i // 2 * 4 * each] = numbers[:, :, j]
    for i in range(2):
        numbers = np.ascontiguousarray(right[:, :, i].astype(np.uint32))[..., None].view(dtype)
        for j in range(each):
            b[:, t * each + j + i * 4 * each, g] = numbers[:, :, j]
    for i in range(4):
        held = sums[:, :, i].reshape(-1)
        held = _signed(held, 32) if whole else _float(held)
        d[:, g + i // 2 * 8, t * 2 + i % 2] = held.reshape(-1, 32)
    with np.errstate(invalid="ignore"):
        d = d + a @ b
    for i, target in enumerate(_vector(parts[0])):
        found = np.ascontiguousarray(d[:, g + i // 2 * 8, t * 2 + i % 2]).reshape(-1)
        c.put(target, active, found.astype(np.int64) if whole else _bits(found))


def _nothing(c: Cluster, name: list[str], parts: list[str], active: np.ndarray) -> None:
    pass


HANDLERS = (
    ("ld.", _load), ("st.", _store), ("cp.async", _async), ("mov.", _move), ("cvt.", _convert),
    ("setp.", _compare), ("selp.", _select), ("shfl.", _shuffle), ("bar", _barrier),
    ("bra", _branch), ("ret", _return), ("mapa", _map), ("mma.sync", _product),
    ("griddepcontrol", _nothing), ("fma.", _arithmetic),
    *((f"{name}.", _arithmetic) for name in _INTEGERS),
)  # fmt: skip


def parsed(ptx: str) -> tuple[list[str], dict[str, int]]:
    """The statements of the kernel of a module, and where its labels are."""
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index("\n{", ptx.index(".entry")) :])
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in body.split("\n"):
        if found := re.fullmatch(r"(\$\w+):", line.strip()):
            labels[found[1]] = len(code)
            continue
        for part in line.split(";"):
            text = re.sub(r"\s+", " ", part.strip())
            if text and text not in ("{", "}") and not text.startswith("."):
                code.append(text)
    return code, labels


def parameter(memory: Memory, tensor: torch.Tensor, plain: bool) -> bytes:
    """A kernel's parameter for a tensor, as CuTe DSL lays it out: its address and sizes, then its
    strides; `plain`: of a contiguous one only those between rows."""
    sizes = struct.pack(f"<Q{tensor.dim()}i", memory.place(tensor), *tensor.shape)
    if plain:
        return sizes + struct.pack(f"<{tensor.dim() - 1}q", *tensor.stride()[:-1])
    return sizes + struct.pack(f"<{tensor.dim()}i", *tensor.stride())


def run(
    ptx: str, tensors: Sequence[tuple[torch.Tensor, bool]], result: torch.Tensor,
    grid: tuple[int, int], threads: int, programs: int = 1,
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """(what a kernel makes of `result`, its last tensor; bytes that it copied to shared memory).

    tensors   the others, and whether they are plain as in `parameter`
    grid      programs in all; `programs` of a cluster"""
    memory = Memory()
    parameters = [parameter(memory, *given) for given in [*tensors, (result, True)]]
    begin = memory.size - len(memory.parts[-1])
    code, labels = parsed(ptx)
    held, copied = memory.joined()[None], 0
    for y in range(grid[1]):
        for x in range(0, grid[0], programs):
            place = {"%ctaid.x": x, "%ctaid.y": y, "%ctaid.z": 0}
            place |= {"%nctaid.x": grid[0], "%nctaid.y": grid[1], "%nctaid.z": 1}
            place |= {"%tid.y": 0, "%tid.z": 0, "%ntid.x": threads, "%ntid.y": 1, "%ntid.z": 1}
            cluster = Cluster(code, labels, parameters, held, threads, programs, place)
            cluster.run()
            copied += cluster.reads
    raw = torch.from_numpy(held[0, begin : begin + result.nbytes].copy())
    return raw.view(result.dtype).view(result.shape), copied
