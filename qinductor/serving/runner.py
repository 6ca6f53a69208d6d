"""A graph that the backend compiled, at serving time: a call is replayed where warm-up recorded it.

An entry is one recorded call: of these sizes, of inputs at these addresses, with these packed
weights. Inputs that the user may make anew are copied into buffers; parameters, buffers of modules,
tensors marked static and those that the graph writes to are taken where they lie.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule

from qinductor.freed import parts
from qinductor.options import Options
from qinductor.report import last_report
from qinductor.retrace import STATIC, holders, names
from qinductor.runtime import Choice, Compiled
from qinductor.serving import cuda, padding
from qinductor.serving.account import Account
from qinductor.serving.padding import Axis, Fill
from qinductor.store import pointer_of

FITS = 4096  # sizes of calls of which a graph remembers where they fit
Sizes = tuple[Any, ...]
Key = tuple[Sizes, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a graph.

    kind  "weight" and "static": taken by address, the latter of any shape; "written": too, and the
          graph writes to it; "copied"; "value": no tensor
    """

    name: str
    kind: str


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


class Signature:
    """What a graph's inputs are; made before the compile, `finish`ed after it.

    reason  why the graph is not recorded, or None
    """

    def __init__(self, gm: GraphModule, arguments: Sequence[Any]) -> None:
        kinds = map(_kind, holders(gm), arguments)
        self.inputs = [Input(*pair) for pair in zip(names(gm), kinds, strict=True)]
        self.own = sum(1 for _ in gm.parameters()) + sum(1 for _ in gm.buffers())
        self.device, self.reason = _device(arguments)

    def finish(self, arguments: Sequence[Any]) -> None:
        """Learns which inputs the graph writes to, from what AOTAutograd has noted."""
        context: Any = TracingContext.try_get()
        metadata = getattr(context, "fw_metadata", None)
        flat = [i for i, value in enumerate(arguments) for _ in _flat(value)]
        infos = [] if metadata is None else metadata.input_info[self.own :]
        if len(infos) != len(flat):
            self.reason = self.reason or "it is not known what the graph writes to"
            return
        for i, info in zip(flat, infos, strict=True):
            if info.mutates_metadata or info.mutates_storage_metadata:
                self.reason = f"the graph changes the shape of {self.inputs[i].name}"
            if info.mutates_data:
                self.inputs[i] = dataclasses.replace(self.inputs[i], kind="written")


def _flat(value: Any) -> Sequence[Any]:
    return list(parts(value)) if isinstance(value, torch.Tensor) else [value]


def _kind(node: Any, value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "value"
    if isinstance(value, torch.nn.Parameter):
        return "weight"
    return "static" if (node.meta.get("tensor_dict") or {}).get(STATIC) else "copied"


def _device(arguments: Sequence[Any]) -> tuple[torch.device | None, str | None]:
    """(the device of all tensors, why this is none to record on)."""
    devices = {value.device for value in arguments if isinstance(value, torch.Tensor)}
    if len(devices) != 1:
        found = " and ".join(sorted(map(str, devices))) or "no device"
        return None, f"its inputs are on {found}"
    (device,) = devices
    return device, None if device.type in cuda.RECORDERS else f"it runs on {device}"


def left_to_inductor(gm: GraphModule, arguments: Sequence[Any]) -> str | None:
    """Why a graph is Inductor's trees' to record, which split it; None if it is ours, or nobody's.

    Something in it is on a CPU, and the rest is not.
    """
    values = [*arguments, *(node.meta.get("example_value") for node in gm.graph.nodes)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    kinds = {tensor.device.type for tensor in tensors}
    if kinds & set(cuda.RECORDERS) and "cpu" in kinds:
        return "a part of the graph is on a CPU"
    return None


@dataclasses.dataclass(eq=False)
class Held:
    """A copied input of an entry: its buffer, and how it is padded."""

    index: int
    buffer: torch.Tensor
    fill: Fill
    axis: Axis | None = None


@dataclasses.dataclass(eq=False)
class Entry:
    """One recorded call.

    device   with what it was recorded
    recording  None once weights have changed: it is of no more use
    choice   the compiled variant and the packed weights
    outputs  as the compiled graph gave them, in memory that replays write
    shared   whether an output lies in an input that is taken by address, and is no copy
    axes     of outputs that grow; None where padding is not allowed, for the `reason`
    proved   whether a padded call was seen to give what the plain one gives
    """

    device: Any
    size: int
    recording: cuda.Recording | None
    choice: Choice
    held: list[Held]
    shared: list[bool]
    axes: list[Axis | None] | None = None
    reason: str = "only one size of it was recorded"
    proved: bool = False

    def __call__(self, arguments: Sequence[Any], size: int | None, turned: bool = False) -> Any:
        """Replays for these arguments, of fewer rows where `size` is given."""
        assert self.recording is not None
        with torch.no_grad(), self.device.replaying():
            into, given = [], []
            for held in self.held:
                value = arguments[held.index]
                if size is not None and held.axis is not None:
                    sizes = size, self.size
                    padding.padded_into(held.buffer, value, held.axis, sizes, held.fill, turned)
                else:
                    into.append(distinct(held.buffer))
                    given.append(distinct(value))
            if into:
                torch._foreach_copy_(into, given)
            self.recording.replay()
            outputs = self.recording.outputs
            made = [self._given(i, out, size) for i, out in enumerate(outputs)]
        return type(outputs)(made)

    def _given(self, i: int, out: Any, size: int | None) -> Any:
        if not isinstance(out, torch.Tensor):
            return out
        if size is not None and self.axes is not None:
            out = padding.cut(out, self.axes[i], size)
        return out if self.shared[i] else out.detach().clone()

    def drop(self) -> None:
        """Frees what it holds."""
        if self.recording is not None:
            self.recording.reset()
        self.recording = None
        self.held.clear()

    def is_current(self, choice: Choice) -> bool:
        """Whether a call would take the variant and the packed weights that were recorded."""
        compiled, packed = self.choice
        return (
            self.recording is not None
            and choice[0] is compiled
            and (
                choice[1] is packed
                or (len(choice[1]) == len(packed) and all(map(_same, choice[1], packed)))
            )
        )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b


def distinct(value: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that is broadcast, each once."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


class Runner:
    """What the backend gives Dynamo for `Options(cudagraphs="buckets")`.

    run      the compiled graph
    entries  recorded calls
    seen     sizes of the inputs that may change, by the size of the call
    gave     what the outputs looked like, by it
    symbolic whether sizes are inputs, so that it serves more than one
    """

    def __init__(self, run: Any, signature: Signature) -> None:
        self.run, self.inputs = run, signature.inputs
        self.device, self.reason = signature.device, signature.reason
        self.entries: dict[Key, Entry] = {}
        self.seen: dict[int, Sizes] = {}
        self.gave: dict[int, list[Any]] = {}
        self.account = Account()
        self.lock = threading.RLock()
        self._fits: dict[Sizes, list[tuple[int, int]]] = {}
        places = enumerate(self.inputs)
        self._changing = [i for i, given in places if given.kind != "weight"]
        self._tensors = [self.inputs[i].kind != "value" for i in self._changing]
        self.symbolic = not all(self._tensors)
        self._fixed = [i for i, x in enumerate(self.inputs) if x.kind not in ("copied", "value")]

    def __call__(self, *arguments: Any) -> Any:
        session = warming()
        if session is not None:
            return session.call(self, arguments)
        if not self.entries or cuda.capturing():  # nothing was recorded, or somebody else records
            return self.run(*arguments)
        with self.lock:
            entry, size, reason = self.found(arguments)
            if entry is not None:
                self.account.replayed += 1
                return entry(arguments, size)
        self.account.plain[reason] += 1
        return self.run(*arguments)

    def key(self, arguments: Sequence[Any]) -> Key:
        """By which a call is found."""
        pairs = zip(self._changing, self._tensors, strict=True)
        sizes = tuple(tuple(arguments[i].shape) if t else arguments[i] for i, t in pairs)
        with torch._C.DisableTorchFunctionSubclass():
            held = [arguments[i] for i in self._fixed]
            try:
                places = tuple(map(torch.Tensor.data_ptr, held))
            except RuntimeError:  # of one that was freed
                places = (0,)
            if 0 in places:  # or of a subclass, which has none of its own
                places = tuple(p for value in held for p in map(pointer_of, parts(value)))
        return sizes, places

    def choice(self, arguments: Sequence[Any]) -> Choice:
        """The variant that a call takes, and its packed weights."""
        return self.run.choose(arguments) if isinstance(self.run, Compiled) else (self.run, [])

    def found(self, arguments: Sequence[Any]) -> tuple[Entry | None, int | None, str]:
        """(the entry that a call is replayed by, its size if it is padded, why there is none)."""
        sizes, places = self.key(arguments)
        entry, size, reason = self.entries.get((sizes, places)), None, "no recorded size fits"
        if entry is None:
            entry, size, reason = self._padded(sizes, places)
        if entry is None:
            if any(known == sizes for known, _ in self.entries):
                reason = "an input that is taken by its address is another tensor"
            return None, None, reason
        if not entry.is_current(self.choice(arguments)):
            entry.drop()
            return None, None, "weights changed since they were recorded; call warmup again"
        return entry, size, ""

    def _padded(
        self, sizes: Sizes, places: tuple[int, ...]
    ) -> tuple[Entry | None, int | None, str]:
        reason = "no recorded size fits"
        for bucket, size in self.fits(sizes):
            entry = self.entries.get((self.seen[bucket], places))
            if entry is not None and entry.axes is not None and entry.proved:
                return entry, size, ""
            if entry is not None:
                reason = f"not padded: {entry.reason}"
        return None, None, reason

    def fits(self, sizes: Sizes) -> list[tuple[int, int]]:
        """(recorded size, the call's own), smallest first, of calls that padding would do for."""
        if sizes not in self._fits:
            if len(self._fits) >= FITS:
                self._fits.clear()
            self._fits[sizes] = list(self._fitting(sizes))
        return self._fits[sizes]

    def _fitting(self, sizes: Sizes) -> Iterator[tuple[int, int]]:
        try:
            axes = self.axes()
        except ValueError:
            return
        for bucket in sorted(self.seen):
            of = [
                (given[axis.dim], axis.each)
                for given, axis in zip(map(_shape, sizes), axes, strict=True)
                if axis is not None and len(given) > axis.dim
            ]
            size = of[0][0] // of[0][1] if of else bucket
            if size < bucket and all(
                _shape(given) == _cut(_shape(known), axis, size)
                for given, known, axis in zip(sizes, self.seen[bucket], axes, strict=True)
            ):
                yield bucket, size

    def saw(self, size: int, sizes: Sizes) -> None:
        """Notes the sizes of inputs at the size of a call."""
        self.seen.setdefault(size, sizes)
        self._fits.clear()

    def axes(self) -> list[Axis | None]:
        """How the inputs that may change grow, values as shapes of one axis. ValueError if not in
        proportion."""
        return [
            padding.axis_of(dict(zip(self.seen, map(_shape, column), strict=True)))
            for column in zip(*self.seen.values(), strict=True)
        ]


def _shape(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _cut(shape: tuple[int, ...], axis: Axis | None, size: int) -> tuple[int, ...]:
    if axis is None:
        return shape
    return (*shape[: axis.dim], size * axis.each, *shape[axis.dim + 1 :])


_active = threading.local()


def warming() -> Any:
    """The session that warms up on this thread, or None."""
    return getattr(_active, "session", None)


def warm(session: Any) -> None:
    """Makes calls of this thread a session's; None: nobody's."""
    _active.session = session
