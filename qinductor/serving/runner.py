"""A graph that the backend compiled, at serving time: a call is replayed where warm-up recorded it.

An entry is one recorded call: of these sizes, of inputs at these addresses, with these packed
weights. Inputs that the user may make anew are copied into buffers; parameters, buffers of modules,
tensors marked static and those that the graph writes to are taken where they lie.
"""

import dataclasses
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from qinductor.freed import is_freed, parts
from qinductor.options import Options
from qinductor.report import last_report
from qinductor.serving import cuda
from qinductor.serving.account import Account
from qinductor.serving.entries import Entry, extent
from qinductor.serving.families import Family, Sizes
from qinductor.serving.signature import Signature, left_to_inductor

BY_ADDRESS = ("weight", "static", "written")
FITS = 4096  # calls of which a graph remembers where they fit
Key = tuple[Sizes, tuple[int, ...]]
accounts: "weakref.WeakSet[Account]" = weakref.WeakSet()  # of all that was warmed up


def recordable(
    gm: GraphModule,
    arguments: Sequence[Any],
    options: Options,
    compiles: Callable[[GraphModule, Sequence[Any], Options], Any],
) -> "Runner":
    """A compiled graph whose calls can be recorded, or which says why not."""
    left = left_to_inductor(gm, arguments) if options.cudagraphs == "buckets" else None
    if left is not None:
        options = dataclasses.replace(options, cudagraphs="inductor")
    signature = Signature(gm, arguments)
    run = compiles(gm, arguments, options)
    signature.finish(arguments)
    report = last_report()
    if left is not None:
        signature.reason = f"left to Inductor's CUDA graphs: {left}"
        if report is not None:
            report.notes.append(signature.reason)
    return Runner(run, signature)


class Runner:
    """What the backend gives Dynamo for `Options(cudagraphs="buckets")`.

    run       the compiled graph
    entries   recorded calls
    families  what each warm-up saw
    symbolic  whether sizes are inputs, so that it serves more than one
    computes  where the graph computes with its sizes, or None
    account   of the warm-up that saw it last
    """

    def __init__(self, run: Any, signature: Signature) -> None:
        self.run, self.inputs = run, signature.inputs
        self.device, self.reason = signature.device, signature.reason
        self.entries: dict[Key, Entry] = {}
        self.families: list[Family] = []
        self.computes = signature.computes
        self.account: Account | None = None
        self.lock = threading.RLock()
        self._fits: dict[Sizes, list[tuple[Family, int, int]]] = {}
        places = enumerate(self.inputs)
        self.changing = [i for i, given in places if given.kind != "weight"]
        self._looks = [LOOKS.get(self.inputs[i].kind, _shape) for i in self.changing]
        self.symbolic = any(given.kind == "value" for given in self.inputs)
        self.fixed = [i for i, given in enumerate(self.inputs) if given.kind in BY_ADDRESS]
        self._there = self.fixed  # those of them that were not freed
        # Entries by what tells them apart where Dynamo's guards hold, and the inputs that say it:
        # those taken by identity, which a watch goes on to check, by address, and by `_looks`.
        self._known: dict[Any, Entry] = {}
        self._telling: tuple[list[int], list[int], list[tuple[int, Any]]] | None = None

    def __call__(self, *arguments: Any) -> Any:
        session = active_session()
        if session is not None:
            return session.call(self, arguments)
        if not accounts or cuda.capturing():  # nobody has recorded, or somebody else does
            return self.run(*arguments)
        reason = self.reason or "a graph that was not recorded"
        if self.entries:
            with self.lock:
                entry, size, reason = self.found(arguments)
                if entry is not None:
                    entry.account.replayed += 1
                    return entry(arguments, size)
        for account in accounts if self.account is None else (self.account,):
            account.plain[reason] += 1
        return self.run(*arguments)

    def key(self, arguments: Sequence[Any]) -> Key:
        """By which a call is found."""
        pairs = zip(self.changing, self._looks, strict=True)
        sizes = tuple(look(arguments[i]) for i, look in pairs)
        with torch._C.DisableTorchFunctionSubclass():
            held = [arguments[i] for i in self._there]
            try:
                places = tuple(map(torch.Tensor.data_ptr, held))
            except RuntimeError:  # one was freed: what is packed of it is looked at instead
                self._there = [
                    i for i in self._there if not any(map(is_freed, parts(arguments[i])))
                ]
                return self.key(arguments)
            if 0 in places:  # of a subclass, which has none of its own
                places = tuple(part.data_ptr() for value in held for part in parts(value))
        return sizes, places

    def found(self, arguments: Sequence[Any]) -> tuple[Entry | None, int | None, str]:
        """(the entry that a call is replayed by, its size if it is padded, why there is none)."""
        known = self._known_by(arguments)
        entry, size, reason = self._known.get(known), None, "no recorded size fits"
        if entry is None:
            sizes, places = self.key(arguments)
            entry = self.entries.get((sizes, places))
            if entry is not None and known is not None:
                if len(self._known) >= FITS:  # tensors that are made anew at one address, say
                    self._known.clear()
                self._known[known] = entry
        if entry is None:
            entry, size, reason = self._padded(sizes, places, arguments)
        if entry is None:
            if any(known == sizes for known, _ in list(self.entries)):
                reason = "an input that is taken by its address is another tensor"
            return None, None, reason
        if not entry.is_current(self.run, arguments):
            entry.drop()
            return None, None, "weights changed since they were recorded; call warmup again"
        return entry, size, ""

    def _known_by(self, arguments: Sequence[Any]) -> Any:
        """By which a call is found that was found before; None where it is looked for in full.

        Sizes of inputs that are taken by address follow from the sizes that are inputs.
        """
        if self._telling is None:
            watches = [e.watch for e in self.entries.values() if e.recording is not None]
            every = [frozenset[int]() if watch is None else watch.indices for watch in watches]
            watched = frozenset.intersection(*every) if every else frozenset[int]()
            looks = [
                (i, look)
                for i, look in zip(self.changing, self._looks, strict=True)
                if i not in watched and (self.symbolic or self.inputs[i].kind not in BY_ADDRESS)
            ]
            others = [i for i in self.fixed if i not in watched]
            self._telling = sorted(watched), others, looks
        own, others, looks = self._telling
        with torch._C.DisableTorchFunctionSubclass():
            try:
                places = [arguments[i].data_ptr() for i in others]
            except RuntimeError:
                return None
        if 0 in places:
            return None
        identities = [id(arguments[i]) for i in own]
        return (*identities, *places, *[look(arguments[i]) for i, look in looks])

    def keep(self, key: Key, entry: Entry) -> None:
        """Adds a recorded call."""
        with self.lock:
            self.entries[key] = entry
            self._known.clear()
            self._telling = None

    def _padded(
        self, sizes: Sizes, places: tuple[int, ...], arguments: Sequence[Any]
    ) -> tuple[Entry | None, int | None, str]:
        for family, bucket, size in self._fitting(sizes):
            entry = self.entries.get((family.seen[bucket], places))
            if entry is None or entry.family is not family:
                continue
            if entry.axes is None or not entry.proved:
                return None, None, f"not padded: {entry.reason}"
            if not self._holds(family, bucket, arguments):
                return None, None, "not padded: a state has no memory for the rows that are added"
            return entry, size, ""
        return None, None, "no recorded size fits"

    def _holds(self, family: Family, bucket: int, arguments: Sequence[Any]) -> bool:
        """Whether inputs that are taken by address lie in memory as large as was recorded."""
        for i, known in zip(self.changing, family.seen[bucket], strict=True):
            value = arguments[i]
            if self.inputs[i].kind in ("static", "written") and tuple(value.shape) != known:
                end = value.storage_offset() + extent(known, value.stride())
                if end * value.itemsize > value.untyped_storage().nbytes():
                    return False
        return True

    def _fitting(self, sizes: Sizes) -> list[tuple[Family, int, int]]:
        if sizes not in self._fits:
            if len(self._fits) >= FITS:
                self._fits.clear()
            self._fits[sizes] = [(f, *of) for f in self.families for of in f.fits(sizes)]
        return self._fits[sizes]

    def saw(self, family: Family, size: int, sizes: Sizes) -> None:
        """Notes the sizes of inputs at the size of a call."""
        if family not in self.families:
            self.families.append(family)
        family.saw(size, sizes)
        self._fits.clear()

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drops recorded calls."""
        with self.lock:
            gone = {id(entry) for entry in entries}
            for key in [key for key, entry in self.entries.items() if id(entry) in gone]:
                del self.entries[key]  # in place: `torch._dynamo.disable` holds the dict, too
            self._known.clear()
            self._telling = None
            left = {id(entry.family) for entry in self.entries.values()}
            self.families[:] = [family for family in self.families if id(family) in left]
            self._fits.clear()


_shape: Callable[[Any], Any] = operator.attrgetter("shape")
# What a key holds of an input; of other kinds its shape.
LOOKS: dict[str, Callable[[Any], Any]] = {"value": lambda value: value, "number": torch.Tensor.item}
_active = threading.local()


def active_session() -> Any:
    """The session that warms up on this thread, or None."""
    return getattr(_active, "session", None)


def set_active_session(session: Any) -> None:
    """Makes calls of this thread a session's; None: nobody's."""
    _active.session = session
