"""The packed weights of all graphs: entries, kept by the identity of the leaves."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from qinductor.freed import is_freed
from qinductor.op import Op
from qinductor.regions import Axes, Key, Leaf

SAMPLE = 64  # elements of a leaf that its fingerprint reads
# (own version, outer version, data pointer): all equal means nothing was written,
# but for writes through `.data` or raw pointers, which bump no version.
Stamp = tuple[int | None, int | None, int]


@dataclasses.dataclass(eq=False)
class Entry:
    """The packed tensors of one weight, or why there are none; valid while the stamps hold.

    references, stamps, fingerprints  one for each leaf
    packed_at                         (resolver, its call) that packed it; zeros when compiled
    streak                            packings on consecutive calls up to that one
    settled                           whether another variant of the graph would not take it either
    region                            (body, ids of the leaves) of the weight
    axes, weight                      as of the slot, by which a freed weight is found and restored;
                                      where there is a weight, the tensors are enough to restore it
    """

    references: tuple[tuple[int, Any], ...]  # id of a leaf, weak reference to its storage
    stamps: tuple[Stamp, ...]
    fingerprints: tuple[Any, ...]
    tensors: dict[str, torch.Tensor]
    refused: str | None = None
    packed_at: tuple[int, int] = (0, 0)
    streak: int = 1
    settled: bool = False
    region: tuple[Any, ...] = ()
    axes: Axes | None = None
    weight: tuple[Op, Any] | None = None


@dataclasses.dataclass(eq=False)
class Slot:
    """The packed tensors that one operator of a compiled graph takes.

    signature  equal for slots whose `pack` does the same with the same leaves
    names      of the packed tensors, in the operator's order
    pack       leaves -> {name: tensor} for these names; Refused if the proof fails. A second
               argument is the restored weight, if its leaves were freed. None if the operator
               takes what others have packed of a freed weight
    region     of the weight, the part of this that may be freed
    weight     (operator, contract of this weight alone), by which it is restored; None where it is
               not to be freed
    """

    where: str
    signature: str
    leaves: tuple[Leaf, ...]
    names: tuple[str, ...]
    pack: Callable[..., dict[str, torch.Tensor]] | None
    region: Key = ("", None, ())
    weight: tuple[Op, Any] | None = None
    entry: Entry | None = None


ENTRIES: dict[tuple[Any, ...], Entry] = {}
LOCK = threading.RLock()


def has_all(entry: Entry, slot: Slot) -> bool:
    """Whether an entry holds all that a slot wants."""
    restores = entry.weight is not None or slot.weight is None
    return entry.refused is not None or (restores and entry.tensors.keys() >= {*slot.names})


def key_of(slot: Slot, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The key of a slot's entry in ENTRIES."""
    return (slot.signature, *(id(leaf.of(arguments)) for leaf in slot.leaves))


def is_current(slot: Slot, entry: Entry, arguments: Sequence[Any]) -> bool:
    """Whether nothing has changed since the entry was made."""
    for leaf, (own, storage), stamp in zip(
        slot.leaves, entry.references, entry.stamps, strict=True
    ):
        gone = own != id(leaf.of(arguments)) or storage() is None
        if gone or stamp_of(leaf, arguments) != stamp:
            return False
    return True


def serves(entry: Entry | None, slot: Slot, arguments: Sequence[Any]) -> TypeGuard[Entry]:
    """Whether a slot can take an entry, or the reason that it holds."""
    return entry is not None and is_current(slot, entry, arguments) and has_all(entry, slot)


def aliases(slot: Slot, arguments: Sequence[Any]) -> set[str]:
    """Names of packed tensors that lie in the memory of the slot's own leaves."""
    if slot.entry is None:  # nothing is packed
        return set()

    def place(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    leaves = (leaf.of(arguments) for leaf in slot.leaves)
    own = {place(leaf) for leaf in leaves if not is_freed(leaf)} - {0}
    return {name for name, tensor in slot.entry.tensors.items() if place(tensor) in own}


def stamp_of(leaf: Leaf, arguments: Sequence[Any]) -> Stamp:
    """The stamp of a leaf now; its pointer is 0 if it was freed."""
    outer = arguments[leaf.index]
    inner = leaf.of(arguments) if leaf.attributes else outer
    return (
        None if inner.is_inference() else inner._version,
        None if outer is inner or outer.is_inference() else outer._version,
        pointer_of(inner),
    )


def pointer_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's data; 0 if it was freed."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def fingerprints_of(slot: Slot, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """A sample of each leaf's bytes."""
    with unset_fake_temporarily(), torch.no_grad():
        return tuple(_fingerprint(leaf.of(arguments)) for leaf in slot.leaves)


def _fingerprint(tensor: torch.Tensor) -> tuple[int, ...]:
    count = tensor.numel()
    if not count or is_freed(tensor):
        return ()
    at = torch.arange(0, count, max(1, count // SAMPLE), device=tensor.device)[: SAMPLE + 1]
    sample = tensor.detach().reshape(-1)[at].cpu()
    return tuple(sample.view(torch.uint8).tolist())
