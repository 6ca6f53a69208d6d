"""The phases of warm-up: what graphs do with a call while each of them goes on."""

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from qinductor.errors import OptionError, QinductorError
from qinductor.freed import is_freed, parts
from qinductor.report import reports
from qinductor.serving import cuda, padding
from qinductor.serving.account import Account, Outcome, Phase
from qinductor.serving.padding import Padding
from qinductor.serving.runner import Entry, Family, Held, Runner, distinct, warm, warming

RESTORED = 64 << 20  # bytes of states that are as before after warm-up; more of them are not
COPIED = 16 << 20  # bytes of an input from which copying it is worth a note
ROUNDS = 5  # runs of all sizes until one must compile nothing
BLOCK = 512  # bytes to which the allocator rounds up


@dataclasses.dataclass
class Extent:
    """The flat memory that buffers of all sizes of one input share."""

    elements: int
    dtype: torch.dtype
    memory: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """As the allocator rounds them."""
        return -(-self.elements * self.dtype.itemsize // BLOCK) * BLOCK


class Session:
    """What was warmed up for one model.

    mode     what a graph does with a call: "run", "rehearse", "record" or "prove"
    extents  of the copied inputs of each graph
    """

    def __init__(self) -> None:
        self.account = Account()
        self.runners: weakref.WeakSet[Runner] = weakref.WeakSet()
        self.entries: list[Entry] = []
        self.extents: weakref.WeakKeyDictionary[Runner, dict[int, Extent]] = (
            weakref.WeakKeyDictionary()
        )
        self.gpus: dict[torch.device, Any] = {}
        self.compiles = cuda.Compiles()
        self.mode, self.size = "run", 0
        self.padding: Padding = None
        self.scratch: dict[torch.device, Any] = {}
        self.kept: list[Any] = []
        self.names: weakref.WeakKeyDictionary[Runner, str] = weakref.WeakKeyDictionary()
        # Of this warm-up.
        self.families: weakref.WeakKeyDictionary[Runner, Family] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def warming(self, padding: Padding) -> Iterator[None]:
        """Calls of this thread are ours within."""
        if warming() is not None:
            raise OptionError("warmup was called within a warmup")
        self.padding = padding
        self.families.clear()
        warm(self)
        try:
            with self.compiles.watched():
                yield
        finally:
            warm(None)
            self.mode = "run"
            self.drop()

    def call(self, runner: Runner, arguments: Sequence[Any]) -> Any:
        """What a graph does with a call meanwhile."""
        self.runners.add(runner)
        runner.account = self.account
        if self.mode == "prove" and runner.reason is None:
            return self._proved(runner, arguments)
        with self._restored(runner, arguments):
            return self._called(runner, arguments)

    @contextlib.contextmanager
    def _restored(self, runner: Runner, arguments: Sequence[Any]) -> Iterator[None]:
        """States that the graph writes to are afterwards what they were."""
        pairs = zip(runner.inputs, arguments, strict=True)
        states = [value for given, value in pairs if given.kind == "written"]
        before, left = [], RESTORED
        for state in sorted(states, key=lambda state: state.nbytes):  # positions before caches
            left -= state.nbytes
            if left < 0:
                self.account.note(
                    f"warm-up has written to states of more than {RESTORED >> 20} MiB"
                )
                break
            before.append((state, state.detach().clone()))
        try:
            yield
        finally:
            with torch.no_grad():
                for state, old in before:
                    state.copy_(old)

    def _called(self, runner: Runner, arguments: Sequence[Any]) -> Any:
        if runner.reason is None and runner.device is not None:
            gpu = self.gpu(runner.device)
            if self.mode == "rehearse":
                return self._rehearsed(gpu, runner, arguments)
            if self.mode == "record":
                return self._recorded(gpu, runner, arguments)
            self._measure(runner, arguments)
            out = runner.run(*arguments)
            self.family(runner).gave.setdefault(self.size, [padding.look(one) for one in out])
            if any(isinstance(one, torch.Tensor) and one.requires_grad for one in out):
                runner.reason = "a training graph; wanted warmup and calls within torch.no_grad()"
            return out
        elif self.mode == "record":
            self._outcome(runner, runner.reason)
        return runner.run(*arguments)

    def gpu(self, device: torch.device) -> Any:
        """The recorder of a device."""
        if device not in self.gpus:
            self.gpus[device] = cuda.RECORDERS[device.type](device)
        return self.gpus[device]

    def _measure(self, runner: Runner, arguments: Sequence[Any]) -> None:
        extents = self.extents.setdefault(runner, {})
        for i, given in enumerate(runner.inputs):
            if given.kind != "copied":
                continue
            value = arguments[i]
            if hasattr(value, "__tensor_flatten__"):
                runner.reason = f"{given.name} is a {type(value).__name__} that may change"
                return
            if torch._debug_has_internal_overlap(distinct(value)) == 1:
                runner.reason = f"elements of {given.name} share memory"
                return
            pairs = zip(value.shape, value.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in pairs if size)
            known = extents.setdefault(i, Extent(0, value.dtype))
            if elements > known.elements:
                extents[i] = Extent(elements, value.dtype)
        runner.saw(self.family(runner), self.size, runner.key(arguments)[0])

    def family(self, runner: Runner) -> Family:
        """What this warm-up saw of a graph."""
        return self.families.setdefault(runner, Family())

    def check_names(self) -> None:
        """OptionError if padding names what no graph has."""
        if not isinstance(self.padding, Mapping):
            return
        inputs = [given for runner in self.runners for given in runner.inputs]
        for key in self.padding:
            if not any(padding.named(key, given.name) for given in inputs):
                known = sorted({given.name for given in inputs if given.kind == "copied"})
                raise OptionError(f"padding of {key!r} is no input of a graph; known: {known}")

    def predicted(self) -> int:
        """Bytes of buffers that are wanted and not there yet."""
        return sum(extent.bytes for extent in self._missing())

    def allocate(self) -> None:
        """Makes the buffers."""
        with torch.inference_mode(False):  # others could not be written to outside of it
            for runner, extents in self.extents.items():
                for i, extent in extents.items():
                    if extent.memory is None and extent.bytes > COPIED:
                        name, size = runner.inputs[i].name, extent.bytes >> 20
                        self.account.note(
                            f"{name} is copied at every call, {size} MiB: if it is always the same "
                            "tensor, call torch._dynamo.mark_static_address on it"
                        )
                    if extent.memory is None:
                        extent.memory = torch.zeros(
                            extent.elements, dtype=extent.dtype, device=runner.device
                        )

    def _missing(self) -> list[Extent]:
        held = (extent for extents in self.extents.values() for extent in extents.values())
        return [extent for extent in held if extent.memory is None]

    def _bound(
        self, runner: Runner, arguments: Sequence[Any]
    ) -> tuple[Callable[[], Any], Any, list[Held]]:
        """(the call on buffers that hold these arguments, its choice, the buffers)."""
        given, held = list(arguments), []
        self._measure(runner, arguments)
        self.allocate()  # what another graph was expected to take
        for i, extent in self.extents[runner].items():
            value = arguments[i]
            assert extent.memory is not None
            given[i] = extent.memory.as_strided(value.shape, value.stride())
            distinct(given[i]).copy_(distinct(value))
            fill = padding.policy(self.padding, runner.inputs[i].name)
            held.append(Held(i, given[i], fill))
        choice = runner.choice(arguments)
        return lambda: _outputs(runner, choice, given), choice, held

    def _rehearsed(self, gpu: Any, runner: Runner, arguments: Sequence[Any]) -> Any:
        run, _, _ = self._bound(runner, arguments)
        if gpu.device not in self.scratch:
            self.scratch[gpu.device] = gpu.scratch()
        out = gpu.rehearse(run, self.scratch[gpu.device])
        self.kept.append(out)  # as the recordings will keep theirs
        return out

    def drop(self) -> int:
        """Ends a rehearsal; the bytes that its pools took, and so recordings will."""
        taken: int = sum(self.gpus[device].held(pool) for device, pool in self.scratch.items())
        self.kept.clear()
        self.scratch.clear()
        for gpu in self.gpus.values():
            gpu.free()
        return taken

    def _recorded(self, gpu: Any, runner: Runner, arguments: Sequence[Any]) -> Any:
        key = runner.key(arguments)
        known, size, _ = runner.found(arguments)
        if known is not None and size is None and known in self.entries:
            self._outcome(runner, None)
            return known(arguments, None)
        try:
            run, choice, held = self._bound(runner, arguments)
            with self.compiles.none():
                recording = gpu.record(run)
            shared = _shared(runner, arguments, held, recording.outputs)
        except torch.OutOfMemoryError as error:
            self._outcome(runner, f"out of memory: {str(error).splitlines()[0]}")
            return runner.run(*arguments)
        except QinductorError:  # something was compiled
            raise
        except Exception as error:
            first: BaseException = error  # the last one says only that recording has failed
            while first.__context__ is not None:
                first = first.__context__
            said = (str(first) or "no message").splitlines()[0]
            self._outcome(runner, f"{type(first).__name__}: {said}")
            return runner.run(*arguments)
        entry = Entry(gpu, self.size, recording, choice, held, shared, self.family(runner))
        runner.entries[key] = entry
        self.entries.append(entry)
        self.account.captures += 1
        self._outcome(runner, None)
        return entry(arguments, None)

    def spread(self) -> None:
        """Decides which axes of each graph's inputs and outputs grow with a call's size."""
        for runner in self.runners:
            family = self.family(runner)
            try:
                looks = zip(*family.gave.values(), strict=True)
                grown = [padding.grown(dict(zip(family.gave, look, strict=True))) for look in looks]
                reason = self._unpadded(runner, family)
            except ValueError as error:
                reason = str(error)
            for entry in runner.entries.values():
                if entry.family is not family:
                    continue
                if reason is not None or family.axes is None:
                    entry.reason = reason or ""
                    continue
                by_place = dict(zip(runner.changing, family.axes, strict=True))
                for held in entry.held:
                    held.axis = by_place[held.index]
                entry.axes, entry.reason = grown, "it was not tried"

    def _unpadded(self, runner: Runner, family: Family) -> str | None:
        """Why calls of a graph are not padded, or None."""
        if family.axes is None:
            return "of its inputs no single axis grows in proportion"
        if len(family.seen) < 2 or not any(axis is not None for axis in family.axes):
            return "only one size of it was recorded"
        written = [given.name for given in runner.inputs if given.kind == "written"]
        if written and self.padding is None:
            return f"the graph writes to {written[0]}; wanted padding=, for rows that are added"
        return None

    def _proved(self, runner: Runner, arguments: Sequence[Any]) -> Any:
        """Runs a call plainly, and padded twice with other rows added."""
        with self._restored(runner, arguments):
            plain = runner.run(*arguments)
        sizes, places = runner.key(arguments)
        family = self.family(runner)
        for bucket, size in family.fits(sizes):
            entry = runner.entries.get((family.seen[bucket], places))
            if entry is None or entry.axes is None or entry.family is not family or size < 1:
                continue
            with self._restored(runner, arguments):
                padded = entry(arguments, size)
            turned = None
            if size > 1 and all(h.fill == "repeat" for h in entry.held if h.axis is not None):
                with self._restored(runner, arguments):
                    turned = entry(arguments, size, turned=True)
            why = padding.proved(plain, padded, turned)
            entry.proved, entry.reason = why is None, why or ""
            if why is not None:
                self.account.note(f"{self._name(runner)} at {bucket} is not padded: {why}")
        return plain

    def _name(self, runner: Runner) -> str:
        return self.names.setdefault(runner, f"graph {len(self.names) + 1}")

    def _outcome(self, runner: Runner, reason: str | None) -> None:
        self.account.outcomes.append(Outcome(self.size, self._name(runner), reason))

    @contextlib.contextmanager
    def phase(self, name: str, predicted: int | None) -> Iterator[Phase]:
        """Times a phase, and measures what it allocates; `used` may be set within."""
        before, started = self.allocated(), time.perf_counter()
        phase = Phase(name, predicted=predicted)
        try:
            yield phase
        finally:
            after = self.allocated()
            phase.seconds = time.perf_counter() - started
            if phase.used is None and before is not None and after is not None:
                phase.used = after - before
            self.account.phases.append(phase)

    def packed(self, known: set[int]) -> int:
        """Bytes that graphs with other reports hold beside the model, less those freed."""
        made = (report for report in reports() if id(report) not in known)
        return sum(report.packed_bytes - report.freed_bytes for report in made)

    def grows(self) -> bool:
        """Whether a graph serves more than one size."""
        return any(runner.symbolic for runner in self.runners)

    def allocated(self) -> int | None:
        """Bytes of tensors on all devices that graphs are recorded on."""
        return sum(gpu.allocated() for gpu in self.gpus.values()) if self.gpus else None

    def pools(self) -> int:
        """Bytes of the pools of recordings."""
        return int(sum(gpu.held() for gpu in self.gpus.values()))

    def beside(self) -> int:
        """Bytes of devices that others than tensors take."""
        return int(sum(gpu.beside() for gpu in self.gpus.values()))

    def release(self) -> None:
        """Drops recordings and buffers, and gives their memory back."""
        for runner in list(self.runners):
            runner.forget(self.entries)
        for entry in self.entries:
            entry.drop()
        self.entries.clear()
        self.extents.clear()
        for gpu in self.gpus.values():
            gpu.free()


def _outputs(runner: Runner, choice: Any, given: Sequence[Any]) -> Any:
    """A compiled variant's outputs for arguments and packed weights."""
    return runner.run.called(choice, given) if hasattr(runner.run, "called") else choice[0](*given)


def _shared(
    runner: Runner, arguments: Sequence[Any], held: Sequence[Held], outputs: Sequence[Any]
) -> list[bool]:
    """Which outputs lie in inputs that are taken by address. ValueError for one in a buffer."""

    def place(value: torch.Tensor) -> int:
        return value.untyped_storage().data_ptr()

    buffers = {place(h.buffer): runner.inputs[h.index].name for h in held}
    fixed = {place(part) for i in runner.fixed for part in _there(arguments[i])}
    found = []
    for i, out in enumerate(outputs):
        at = place(out) if isinstance(out, torch.Tensor) and out.numel() else 0
        if at and at in buffers:
            raise ValueError(f"result {i} is a view of {buffers[at]}")
        found.append(bool(at) and at in fixed)
    return found


def _there(value: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of an input whose memory is still there."""
    return [part for part in parts(value) if not is_freed(part)]
