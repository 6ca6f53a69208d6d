"""Packed weights on disk, for `Options(packed="disk")`: a file each, found by what it is made of.

A file is a line with the length and hash of its header, the header in JSON, and the bytes of the
tensors one after the other, each with a hash: data, and never code. It is read into memory, not
mapped, since what is mapped changes with the file.
"""

import ctypes
import functools
import hashlib
import json
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import torch

from qinductor.caches.disk import folder, said
from qinductor.caches.files import replace
from qinductor.caches.manifest import PACKED
from qinductor.freed import is_freed
from qinductor.pattern import Lowering

MAGIC = "qinductor packed 1"
Tensors = dict[str, torch.Tensor]
Pack = Callable[..., Tensors]


def kept(lowering: Lowering, arguments: Sequence[Any]) -> tuple[Pack, Callable[[], Tensors]]:
    """`pack` and `packed` of a lowering, which read what is on disk and write what is not.

    What is read needs no proof: the one that was made when it was written was of the same bytes by
    the same operators, contract and sources (the folder's name has those and the versions).
    """
    plan = lowering.plan
    text = f"{lowering.op.name}\n{lowering.signature}\n{lowering.contract}\n{plan} {plan.whole}"
    pack, packed = lowering.pack, lowering.packed
    now = [leaf.of(arguments) for leaf in lowering.leaves]

    def kept_pack(leaves: Sequence[torch.Tensor], known: Any = None) -> Tensors:
        if known is not None:  # the leaves were freed
            return pack(leaves, known)
        return through(text, leaves, lambda: pack(leaves))

    freed = any(map(is_freed, now))
    return kept_pack, packed if freed else lambda: through(text, now, packed)


def through(text: str, leaves: Sequence[torch.Tensor], make: Callable[[], Tensors]) -> Tensors:
    """What `make` returns for these leaves, from disk if it is there. `text`: what makes it."""
    place = folder()
    key = None if place is None else key_of(text, leaves)
    if place is None or key is None:
        return make()
    path = place / PACKED / key
    try:
        with open(path, "rb") as file:
            return _read(file, leaves)
    except FileNotFoundError:
        pass
    except torch.OutOfMemoryError:  # says nothing of the file
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        warnings.warn(
            f"qinductor: {path} is no packed weight ({error}); it is packed again", stacklevel=2
        )
    tensors = make()
    with said(f"a packed weight is not kept in {path.parent}"):
        _write(path, tensors, leaves)
    return tensors


def key_of(text: str, leaves: Sequence[torch.Tensor]) -> str | None:
    """The name of the file: a hash of the text and of all that the leaves are. None where a leaf's
    bytes cannot be read."""
    digest = hashlib.sha256(text.encode())
    for leaf in leaves:
        data = _data(leaf.contiguous()) if leaf.layout is torch.strided else None
        if data is None:
            return None
        strides = leaf.stride(), leaf.storage_offset()
        about = [str(leaf.dtype), tuple(leaf.shape), *strides, _device(leaf.device)]
        digest.update(json.dumps(about).encode())
        digest.update(data)
    return digest.hexdigest()


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _data(tensor: torch.Tensor) -> memoryview | None:
    """The bytes of a tensor, in the order in which they lie in memory; None where it has gaps, or
    is of a kind that has no such bytes."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or not _is_dense(tensor):
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return _bytes(flat.cpu().view(torch.uint8))


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a CPU tensor. Not by way of NumPy, after which its storage cannot be freed."""
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # alive as long as the view
    return memoryview(array).cast("B")


def _write(path: pathlib.Path, tensors: Tensors, leaves: Sequence[torch.Tensor]) -> None:
    header: dict[str, dict[str, Any]] = {}
    parts: list[memoryview] = []
    for name, tensor in tensors.items():
        row: dict[str, Any] = {
            "dtype": str(tensor.dtype),
            "shape": [*tensor.shape],
            "stride": [*tensor.stride()],
        }
        place = _place(tensor, leaves)
        if place is not None:
            header[name] = {**row, **place}
            continue
        data = _data(tensor)
        if data is None:
            return
        row |= {"bytes": len(data), "hash": hashlib.sha256(data).hexdigest()}
        header[name] = {**row, "cpu": tensor.is_cpu}
        parts.append(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    first = f"{MAGIC} {len(text)} {hashlib.sha256(text).hexdigest()}\n".encode()
    replace(path, [first, text, *parts])


def _place(tensor: torch.Tensor, leaves: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    """Where a tensor lies in the memory of a leaf, if it does: `same` if it is that leaf."""
    for i, leaf in enumerate(leaves):
        if tensor is leaf:
            return {"leaf": i, "same": True}
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        if leaf.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            return {"leaf": i, "offset": tensor.storage_offset()}
    return None


def _read(file: BinaryIO, leaves: Sequence[torch.Tensor]) -> Tensors:
    """The tensors of a file. ValueError, or what else reading nonsense raises, if it is broken."""
    magic, length, digest = file.readline(200).decode().rsplit(" ", 2)
    if magic != MAGIC:
        raise ValueError("it does not begin as one")
    text = file.read(int(length))
    if hashlib.sha256(text).hexdigest() != digest.strip():
        raise ValueError("its header is broken")
    tensors: Tensors = {}
    for name, row in json.loads(text).items():
        tensors[name] = _lying(row, leaves) if "leaf" in row else _tensor(file, row, leaves)
    if file.read(1):
        raise ValueError("it is too long")
    return tensors


def _lying(row: dict[str, Any], leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    leaf: torch.Tensor = leaves[row["leaf"]]
    if "same" in row:
        return leaf
    made = torch.empty(0, dtype=_dtype(row["dtype"]), device=leaf.device)
    made.set_(leaf.untyped_storage(), row["offset"], row["shape"], row["stride"])
    return made


def _tensor(file: BinaryIO, row: dict[str, Any], leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    raw = torch.empty(row["bytes"], dtype=torch.uint8)
    data = _bytes(raw)
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise ValueError("it is too short")
    if hashlib.sha256(data).hexdigest() != row["hash"]:
        raise ValueError("its bytes are not those that were written")
    tensor = raw.view(_dtype(row["dtype"])).as_strided(row["shape"], row["stride"])
    return tensor if row["cpu"] else tensor.to(_away(leaves))


def _away(leaves: Sequence[torch.Tensor]) -> torch.device:
    return next(leaf.device for leaf in leaves if not leaf.is_cpu)


@functools.cache
def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {text!r}")
    return dtype
