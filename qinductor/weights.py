"""Packed weights, resolved at every call: packed at first sight, packed again when a leaf changed.

A compiled graph never holds a weight: two instances of a class share one graph. What it holds is a
`Slot`; the tensors come from a store shared by all graphs, keyed by the identity of the leaves.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from qinductor import store
from qinductor.errors import Refused
from qinductor.freed import free, is_freed, parts, why_not
from qinductor.regions import Key, Leaf
from qinductor.store import ENTRIES, LOCK, Entry, Slot

# Calls between two looks at the fingerprints; the second call looks, too. A prime, so that layers
# that share a graph are looked at in turn.
CHECK_EVERY = 61
# Packings on consecutive calls after which a weight counts as no constant: written to in place, and
# replaced by a new tensor (which rebuilding a model in a loop does, too).
RESTLESS, REPLACED = 8, 64

KEPT = 4096  # layers of which a graph remembers what it found


class Unfit(Refused):
    """The weights are not what a graph was compiled for; `entry` is the one that says so."""

    def __init__(self, reason: str, entry: Entry) -> None:
        super().__init__(reason)
        self.entry = entry


# What the fast path compares, one row a leaf: argument, attributes, reference, stamp.
Row = tuple[int, tuple[str, ...], int, Any, int | None, int | None, int]

_resolvers: "weakref.WeakSet[Resolver]" = weakref.WeakSet()


class Resolver:
    """Finds the packed tensors of all slots of one compiled graph.

    `reads`: leaves that the graph reads itself, and so cannot do without.
    Where nothing changed since the last call it costs 2 us a leaf: 0.12 ms for the 72 of 36 torchao
    int8 weights, on one thread of a Xeon, torch 2.13.
    """

    def __init__(self, slots: Sequence[Slot], reads: Sequence[Leaf] = ()) -> None:
        self.slots, self.reads = list(slots), reads
        self.first = [*(leaf for slot in slots for leaf in slot.leaves), *reads][0]
        self.calls = 0
        self.unversioned = False  # inference tensors have no version: their bytes are looked at
        # Of each model or layer that the graph has run, by the identity of its first leaf.
        self.last: dict[int, tuple[list[Row], list[torch.Tensor]]] = {}
        with LOCK:
            _resolvers.add(self)

    def __call__(self, arguments: Sequence[Any], packs: bool = True) -> list[torch.Tensor] | None:
        """The packed tensors, in slot order. Unfit if a weight is not what was compiled for.

        `packs` False: None unless they were found before and nothing has changed since.
        """
        self.calls += 1
        look = self.unversioned or self.calls == 2 or self.calls % CHECK_EVERY == 0
        if look and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            look = False
        # A tensor subclass would answer every attribute through Python: 1.5 us each.
        with torch._C.DisableTorchFunctionSubclass():
            first = id(self.first.of(arguments))
            last = self.last.get(first)
            if last is not None and not look and _unchanged(last[0], arguments):
                return last[1]
            found = self._resolved(arguments, look, packs) if packs or last is not None else None
        if found is None:
            self.calls -= 1  # this call comes again, with `packs`
            self.last.pop(first, None)
            return None
        if len(self.last) >= KEPT:
            self.last.clear()
        self.last[first] = found
        return found[1]

    def _resolved(
        self, arguments: Sequence[Any], look: bool, packs: bool
    ) -> tuple[list[Row], list[torch.Tensor]] | None:
        if any(is_freed(leaf.of(arguments)) for leaf in self.reads):
            if not packs:
                return None
            raise Unfit("a weight that it reads was freed", Entry((), (), (), {}))
        rows: list[Row] = []
        found: list[torch.Tensor] = []
        for slot in self.slots:
            entry = self._known(slot, arguments)
            if look and entry is not None and not _as_packed(slot, entry, arguments):
                entry = None
            if not packs and (entry is None or entry.refused is not None):
                return None
            if entry is None:
                entry = self._packed(slot, arguments)
            if entry.refused is not None:
                raise Unfit(f"{slot.where}: {entry.refused}", entry)
            # Of this entry, not of `slot.entry`, which another thread may have changed by now.
            known = zip(slot.leaves, entry.references, entry.stamps, strict=True)
            rows.extend((leaf.index, leaf.attributes, *at, *stamp) for leaf, at, stamp in known)
            found.extend([entry.tensors[name] for name in slot.names])
        self.unversioned = any(row[4] is None for row in rows)
        return rows, found

    def _known(self, slot: Slot, arguments: Sequence[Any]) -> Entry | None:
        """The entry of these weights, if there is one and nothing has changed since."""
        entry = slot.entry
        if entry is None or not store.is_current(slot, entry, arguments):
            entry = ENTRIES.get(store.key_of(slot, arguments))
            if not store.serves(entry, slot, arguments):
                return None
            slot.entry = entry
        return entry

    def _packed(self, slot: Slot, arguments: Sequence[Any]) -> Entry:
        with LOCK, unset_fake_temporarily(), torch.no_grad():
            known = ENTRIES.get(store.key_of(slot, arguments))
            if not store.serves(known, slot, arguments):
                # Written to, or put in the place of one that is gone; another layer is no change.
                before = known or slot.entry
                changed = before is not None and (
                    known is not None or any(storage() is None for _, storage in before.references)
                )
                streak, last = 1, (id(self), self.calls - 1)
                if before is not None and changed and before.packed_at == last:
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
    with LOCK:
        known = ENTRIES.get(store.key_of(slot, arguments))
        if not store.serves(known, slot, arguments):
            known = _remember(slot, arguments, packed(), None)
        slot.entry = known


def _tried(
    slot: Slot, arguments: Sequence[Any], streak: int, patience: int
) -> tuple[dict[str, torch.Tensor], str | None]:
    """(packed tensors, why there are none)."""
    if streak > patience:
        return {}, f"its weight changed on {patience} calls in a row, so it is no constant"
    try:
        if slot.pack is None:
            return shared(slot, arguments), None
        known = restored(slot.region, arguments)
        leaves = [leaf.of(arguments) for leaf in slot.leaves]
        return slot.pack(leaves) if known is None else slot.pack(leaves, known), None
    except Refused as refusal:
        return {}, refusal.reason
    except Exception as error:
        return {}, f"an error of qinductor's own: {type(error).__name__}: {error}"


def shared(slot: Slot, arguments: Sequence[Any]) -> dict[str, torch.Tensor]:
    """What was packed of a weight that was freed. Refused if it is there, or of another kind."""
    entry = held(slot.region, arguments)
    if entry is None or entry.weight != slot.weight or not store.has_all(entry, slot):
        raise Refused("the graph takes a freed weight from its packed form, and this one has none")
    return {name: entry.tensors[name] for name in slot.names}


def restored(region: Key, arguments: Sequence[Any]) -> Any:
    """The weight that these leaves held when they were freed; None where none of them was."""
    entry = held(region, arguments)
    if entry is None or entry.weight is None:
        return None
    op, contract = entry.weight
    return op.restored(contract, entry.tensors)


def held(region: Key, arguments: Sequence[Any]) -> Entry | None:
    """What holds the weight that these leaves held when they were freed; None where none was.

    Axes of None are any. Refused if it was not packed from this region, whose graph may
    be another.
    """
    body, axes, leaves = region
    tensors = [leaf.of(arguments) for leaf in leaves]
    if not any(is_freed(tensor) for tensor in tensors):
        return None
    identity = (body, *map(id, tensors))
    stamps = tuple(store.stamp_of(leaf, arguments) for leaf in leaves)
    with LOCK:
        for entry in ENTRIES.values():
            same = entry.region == identity and entry.stamps[: len(stamps)] == stamps
            if same and entry.weight and entry.refused is None and axes in (None, entry.axes):
                return entry
    raise Refused("its memory was freed (weights='replace'), and it was packed in another form")


def replace(leaves: Sequence[Leaf], arguments: Sequence[Any]) -> tuple[int, list[tuple[Leaf, str]]]:
    """Frees packed leaves that nothing else holds: (bytes freed, leaves that stay and why).

    The caller's resolver has just found all of them packed.
    """
    size, stay = 0, []
    places = [id(part) for value in arguments for part in parts(value)]
    with LOCK, torch._C.DisableTorchFunctionSubclass():
        for leaf in leaves:
            tensor = leaf.of(arguments)
            if is_freed(tensor):
                continue
            why = why_not(tensor)
            if places.count(id(tensor)) > 1:
                why = "it is an argument of the graph twice"
            if why is not None:
                stay.append((leaf, why))
                continue
            before = store.stamp_of(leaf, arguments)
            size += free(tensor)
            _mark(id(tensor), before, store.stamp_of(leaf, arguments))
        if size:
            for resolver in list(_resolvers):
                resolver.last.clear()
    return size, stay


def _mark(identity: int, before: store.Stamp, after: store.Stamp) -> None:
    """Entries that were packed from a tensor as it was stay current now that it is freed.

    What was refused is tried again: a graph may take now what is packed.
    """
    for entry in ENTRIES.values():
        for i, (reference, _) in enumerate(entry.references if entry.refused is None else ()):
            if reference == identity and entry.stamps[i] == before:
                entry.stamps = (*entry.stamps[:i], after, *entry.stamps[i + 1 :])
                entry.fingerprints = (*entry.fingerprints[:i], (), *entry.fingerprints[i + 1 :])


def _retire(entry: Entry | None) -> None:
    """No slot of any graph takes an entry that the store has lost for current."""
    if entry is not None:
        entry.stamps = tuple((None, None, -1) for _ in entry.stamps)
    for resolver in list(_resolvers):
        resolver.last.clear()


def _as_packed(slot: Slot, entry: Entry, arguments: Sequence[Any]) -> bool:
    """Whether the leaves' bytes look as when they were packed; if not, the entry is dropped."""
    with LOCK:  # no leaf is freed meanwhile
        if entry.fingerprints == store.fingerprints_of(slot, arguments):
            return True
        _retire(ENTRIES.pop(store.key_of(slot, arguments), None))
        _retire(entry)
        return False


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
            or (pointer and store.pointer_of(value) != pointer)
        ):
            return False
    return True


def _remember(
    slot: Slot, arguments: Sequence[Any], tensors: dict[str, torch.Tensor], refused: str | None
) -> Entry:
    key = store.key_of(slot, arguments)
    old = ENTRIES.get(key)
    weight = slot.weight
    if old is not None and refused is None and store.is_current(slot, old, arguments):
        tensors = {**tensors, **old.tensors}  # another plan of the same weight
        weight = weight or old.weight

    def gone(_: Any) -> None:
        dead = made()
        if dead is not None:
            dead.tensors = {}
            if ENTRIES.get(key) is dead:
                ENTRIES.pop(key, None)
        for resolver in list(_resolvers):
            resolver.last.clear()  # it may hold the tensors, too

    values = [leaf.of(arguments) for leaf in slot.leaves]
    entry = Entry(
        # Of the storage: swap_tensors, and so Module.to, refuses a tensor with weak references.
        tuple((id(value), weakref.ref(value.untyped_storage(), gone)) for value in values),
        tuple(store.stamp_of(leaf, arguments) for leaf in slot.leaves),
        store.fingerprints_of(slot, arguments),
        tensors,
        refused,
        region=(slot.region[0], *(id(leaf.of(arguments)) for leaf in slot.region[2])),
        axes=slot.region[1],
        weight=weight,
    )
    made = weakref.ref(entry)
    ENTRIES[key] = entry
    _retire(old)
    return entry


def refresh(model: torch.nn.Module | None = None) -> int:
    """Packs weights again at their next use, after writes that bump no version (`.data`, pointers).

    model: whose parameters, buffers and tensor attributes to refresh; None for every weight.
    Returns how many packed weights were dropped.
    """
    pointers = None if model is None else _pointers(model)
    with LOCK:
        dropped = 0
        for key, entry in list(ENTRIES.items()):
            if any(stamp[2] == 0 for stamp in entry.stamps):
                continue  # it cannot be packed again: a leaf was freed
            if pointers is None or any(stamp[2] in pointers for stamp in entry.stamps):
                ENTRIES.pop(key, None)  # a weight may have died since
                _retire(entry)
                dropped += 1
    return dropped


def _pointers(model: torch.nn.Module) -> set[int]:
    return {
        part.data_ptr()
        for module in model.modules()
        for held in (module._parameters, module._buffers, vars(module))
        for value in held.values()
        for part in parts(value)
        if not is_freed(part)
    }
