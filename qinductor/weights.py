"""Packed weights, resolved at every call: packed at first sight, packed again when a leaf changed.

A compiled graph never holds a weight: two instances of a class share one graph. What it holds is a
`Slot`; the tensors come from a store shared by all graphs, keyed by the identity of the leaves.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from qinductor.errors import Refused
from qinductor.regions import Leaf

SAMPLE = 64  # elements of a leaf that its fingerprint reads
# Calls between two looks at the fingerprints; the second call looks, too. A prime, so that layers
# that share a graph are looked at in turn.
CHECK_EVERY = 61
# Packings on consecutive calls after which a weight counts as no constant: written to in place, and
# replaced by a new tensor (which rebuilding a model in a loop does, too).
RESTLESS, REPLACED = 8, 64

KEPT = 4096  # layers of which a graph remembers what it found

# (own version, outer version, data pointer): all equal means nothing was written,
# but for writes through `.data` or raw pointers, which bump no version.
Stamp = tuple[int | None, int | None, int]


@dataclasses.dataclass(eq=False)
class Entry:
    """The packed tensors of one weight, or why there are none; valid while the stamps hold.

    references, stamps, fingerprints  one for each leaf
    packed_at                         the resolver's call that packed it; 0 when compiled
    streak                            packings on consecutive calls up to that one
    settled                           whether another variant of the graph would not take it either
    """

    references: tuple[tuple[int, Any], ...]  # id of a leaf, weak reference to its storage
    stamps: tuple[Stamp, ...]
    fingerprints: tuple[Any, ...]
    tensors: dict[str, torch.Tensor]
    refused: str | None = None
    packed_at: tuple[int, int] = (0, 0)  # (resolver, its call)
    streak: int = 1
    settled: bool = False


class Unfit(Refused):
    """The weights are not what a graph was compiled for; `entry` is the one that says so."""

    def __init__(self, reason: str, entry: Entry) -> None:
        super().__init__(reason)
        self.entry = entry


@dataclasses.dataclass(eq=False)
class Slot:
    """The packed tensors that one operator of a compiled graph takes.

    signature  equal for slots whose `pack` does the same with the same leaves
    names      of the packed tensors, in the operator's order
    pack       leaves -> {name: tensor} for these names; Refused if the proof fails
    """

    where: str
    signature: str
    leaves: tuple[Leaf, ...]
    names: tuple[str, ...]
    pack: Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]
    entry: Entry | None = None


# What the fast path compares, one row a leaf: argument, attributes, reference, stamp.
Row = tuple[int, tuple[str, ...], int, Any, int | None, int | None, int]

_store: dict[tuple[Any, ...], Entry] = {}
_resolvers: "weakref.WeakSet[Resolver]" = weakref.WeakSet()
_lock = threading.RLock()


class Resolver:
    """Finds the packed tensors of all slots of one compiled graph.

    Where nothing changed since the last call it costs 2 us a leaf: 0.12 ms for the 72 of 36 torchao
    int8 weights, on one thread of a Xeon, torch 2.13.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self.calls = 0
        self.unversioned = False  # inference tensors have no version: their bytes are looked at
        # Of each model or layer that the graph has run, by the identity of its first leaf.
        self.last: dict[int, tuple[list[Row], list[torch.Tensor]]] = {}
        with _lock:
            _resolvers.add(self)

    def __call__(self, arguments: Sequence[Any], packs: bool = True) -> list[torch.Tensor] | None:
        """The packed tensors, in slot order. Unfit if a weight is not what was compiled for.

        `packs` False: None where a weight is unfit, or would have to be packed.
        """
        self.calls += 1
        look = self.unversioned or self.calls == 2 or self.calls % CHECK_EVERY == 0
        if look and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            look = False
        # A tensor subclass would answer every attribute through Python: 1.5 us each.
        with torch._C.DisableTorchFunctionSubclass():
            first = id(self.slots[0].leaves[0].of(arguments))
            last = self.last.get(first)
            if last is not None and not look and _unchanged(last[0], arguments):
                return last[1]
            resolved = self._resolved(arguments, look, packs)
        if resolved is None:
            self.calls -= 1  # this call comes again, with `packs`
            return None
        if len(self.last) >= KEPT:
            self.last.clear()
        self.last[first] = resolved
        return resolved[1]

    def _resolved(
        self, arguments: Sequence[Any], look: bool, packs: bool
    ) -> tuple[list[Row], list[torch.Tensor]] | None:
        rows: list[Row] = []
        found: list[torch.Tensor] = []
        for slot in self.slots:
            entry = self._known(slot, arguments)
            if look and entry is not None and entry.fingerprints != _fingerprints(slot, arguments):
                with _lock:
                    _retire(_store.pop(_key(slot, arguments), None))
                    _retire(entry)
                entry = None
            if not packs and (entry is None or entry.refused is not None):
                return None
            if entry is None:
                entry = self._packed(slot, arguments)
            if entry.refused is not None:
                raise Unfit(f"{slot.where}: {entry.refused}", entry)
            # Of this entry, not of `slot.entry`, which another thread may have changed by now.
            rows.extend(_rows(slot, entry))
            found.extend([entry.tensors[name] for name in slot.names])
        self.unversioned = any(row[4] is None for row in rows)
        return rows, found

    def _known(self, slot: Slot, arguments: Sequence[Any]) -> Entry | None:
        """The entry of these weights, if there is one and nothing has changed since."""
        entry = slot.entry
        if entry is None or not _current(slot, entry, arguments):
            entry = _store.get(_key(slot, arguments))
            if entry is None or not _current(slot, entry, arguments) or not _holds(entry, slot):
                return None
            slot.entry = entry
        return entry

    def _packed(self, slot: Slot, arguments: Sequence[Any]) -> Entry:
        with _lock, unset_fake_temporarily(), torch.no_grad():
            known = _store.get(_key(slot, arguments))
            if known is None or not _current(slot, known, arguments) or not _holds(known, slot):
                # Written to, or put in the place of one that is gone; another layer is no change.
                before = known or slot.entry
                changed = before is not None and (
                    known is not None or any(storage() is None for _, storage in before.references)
                )
                streak = 1
                if (
                    before is not None
                    and changed
                    and before.packed_at == (id(self), self.calls - 1)
                ):
                    streak = before.streak + 1
                patience = RESTLESS if known is not None else REPLACED
                tensors, refused = _tried(slot, arguments, streak, patience)
                known = _remember(slot, arguments, tensors, refused)
                known.packed_at, known.streak = (id(self), self.calls), streak
                known.settled = streak > patience
            slot.entry = known
            return known


def seed(
    slot: Slot, arguments: Sequence[Any], packed: Callable[[], dict[str, torch.Tensor]]
) -> None:
    """Packs a slot when its graph is compiled, unless another graph or a tied weight has."""
    with _lock:
        known = _store.get(_key(slot, arguments))
        if known is None or not _current(slot, known, arguments) or not _holds(known, slot):
            known = _remember(slot, arguments, packed(), None)
        slot.entry = known


def _tried(
    slot: Slot, arguments: Sequence[Any], streak: int, patience: int
) -> tuple[dict[str, torch.Tensor], str | None]:
    """(packed tensors, why there are none)."""
    if streak > patience:
        return {}, f"its weight changed on {patience} calls in a row, so it is no constant"
    try:
        return slot.pack([leaf.of(arguments) for leaf in slot.leaves]), None
    except Refused as refusal:
        return {}, refusal.reason
    except Exception as error:
        return {}, f"an error of qinductor's own: {type(error).__name__}: {error}"


def _rows(slot: Slot, entry: Entry) -> list[Row]:
    return [
        (leaf.index, leaf.attributes, *reference, *stamp)
        for leaf, reference, stamp in zip(slot.leaves, entry.references, entry.stamps, strict=True)
    ]


def _retire(entry: Entry | None) -> None:
    """No slot of any graph takes an entry that the store has lost for current."""
    if entry is not None:
        entry.stamps = tuple((None, None, -1) for _ in entry.stamps)
    for resolver in list(_resolvers):
        resolver.last.clear()


def _unchanged(rows: list[Row], arguments: Sequence[Any]) -> bool:
    for index, attributes, identity, storage, own, outer, pointer in rows:
        value = holder = arguments[index]
        for name in attributes:
            value = getattr(value, name)
        if (
            identity != id(value)
            or storage() is None
            or (own is not None and value._version != own)
            or (outer is not None and holder._version != outer)
            or value.data_ptr() != pointer
        ):
            return False
    return True


def _holds(entry: Entry, slot: Slot) -> bool:
    return entry.refused is not None or all(name in entry.tensors for name in slot.names)


def _key(slot: Slot, arguments: Sequence[Any]) -> tuple[Any, ...]:
    return (slot.signature, *(id(leaf.of(arguments)) for leaf in slot.leaves))


def _remember(
    slot: Slot, arguments: Sequence[Any], tensors: dict[str, torch.Tensor], refused: str | None
) -> Entry:
    key = _key(slot, arguments)
    old = _store.get(key)
    if old is not None and refused is None and _current(slot, old, arguments):
        tensors = {**tensors, **old.tensors}  # another plan of the same weight

    def gone(_: Any) -> None:
        dead = _store.pop(key, None)
        if dead is not None:
            dead.tensors = {}
        for resolver in list(_resolvers):
            resolver.last.clear()  # it may hold the tensors, too

    values = [leaf.of(arguments) for leaf in slot.leaves]
    entry = Entry(
        # Of the storage: swap_tensors, and so Module.to, refuses a tensor with weak references.
        tuple((id(value), weakref.ref(value.untyped_storage(), gone)) for value in values),
        tuple(_stamp(leaf, arguments) for leaf in slot.leaves),
        _fingerprints(slot, arguments),
        tensors,
        refused,
    )
    _store[key] = entry
    _retire(old)
    return entry


def _current(slot: Slot, entry: Entry, arguments: Sequence[Any]) -> bool:
    for leaf, reference, stamp in zip(slot.leaves, entry.references, entry.stamps, strict=True):
        identity, storage = reference
        if identity != id(leaf.of(arguments)) or storage() is None:
            return False
        if _stamp(leaf, arguments) != stamp:
            return False
    return True


def _stamp(leaf: Leaf, arguments: Sequence[Any]) -> Stamp:
    outer = arguments[leaf.index]
    inner = leaf.of(arguments) if leaf.attributes else outer
    return (
        None if inner.is_inference() else inner._version,
        None if outer is inner or outer.is_inference() else outer._version,
        inner.data_ptr(),
    )


def _fingerprints(slot: Slot, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """A sample of each leaf's bytes."""
    with unset_fake_temporarily(), torch.no_grad():
        return tuple(_fingerprint(leaf.of(arguments)) for leaf in slot.leaves)


def _fingerprint(tensor: torch.Tensor) -> tuple[int, ...]:
    count = tensor.numel()
    if not count:
        return ()
    at = torch.arange(0, count, max(1, count // SAMPLE), device=tensor.device)[: SAMPLE + 1]
    sample = tensor.detach().reshape(-1)[at].cpu()
    return tuple(sample.view(torch.uint8).tolist())


def refresh(model: torch.nn.Module | None = None) -> int:
    """Packs weights again at their next use, after writes that bump no version (`.data`, pointers).

    model: whose parameters, buffers and tensor attributes to refresh; None for every weight.
    Returns how many packed weights were dropped.
    """
    pointers = None if model is None else _pointers(model)
    with _lock:
        dropped = 0
        for key, entry in list(_store.items()):
            if pointers is None or any(stamp[2] in pointers for stamp in entry.stamps):
                _store.pop(key, None)  # a weight may have died since
                _retire(entry)
                dropped += 1
    return dropped


def _pointers(model: torch.nn.Module) -> set[int]:
    found: set[int] = set()

    def add(value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                add(getattr(value, name))
        else:
            found.add(value.data_ptr())

    for module in model.modules():
        for value in (
            *module._parameters.values(),
            *module._buffers.values(),
            *vars(module).values(),
        ):
            add(value)
    return found
