"""The phases of warm-up: what graphs do with a call while each of them goes on."""

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from qinductor.errors import OptionError, QinductorError
from qinductor.freed import is_freed, parts
from qinductor.serving import cuda, padding
from qinductor.serving.account import Account, Outcome, Phase
from qinductor.serving.buffers import Buffers
from qinductor.serving.entries import OWN, VIEW, Entry, Held, chosen, run_chosen, watched
from qinductor.serving.families import Family
from qinductor.serving.padding import Padding
from qinductor.serving.runner import Runner, accounts, active_session, set_active_session
from qinductor.store import ENTRIES, LOCK

RESTORED = 64 << 20  # bytes of states that are as before after warm-up; more of them are not
UNDONE = 4 << 20  # bytes of a state that is undone between runs that are compared
ROUNDS = 5  # runs of all sizes until one must compile nothing


class Session:
    """What was warmed up for one model.

    mode     what a graph does with a call: "run", "rehearse", "record" or "prove"
    buffers  of the copied inputs of each graph
    """

    def __init__(self) -> None:
        self.account = Account()
        self.lock = threading.Lock()
        accounts.add(self.account)
        self.runners: weakref.WeakSet[Runner] = weakref.WeakSet()
        self.entries: weakref.WeakSet[Entry] = weakref.WeakSet()
        self.buffers = Buffers(self.account)
        self.gpus: dict[torch.device, Any] = {}
        self.compiles = cuda.Compiles()
        self.mode, self.size = "run", 0
        self.padding: Padding = None
        self.scratch: dict[torch.device, Any] = {}
        self.kept: list[Any] = []
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.ran = 0  # graphs, in this call of the model
        self.names: weakref.WeakKeyDictionary[Runner, str] = weakref.WeakKeyDictionary()
        # Of this warm-up.
        self.families: weakref.WeakKeyDictionary[Runner, Family] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def warming(self, fills: Padding) -> Iterator[None]:
        """Calls of this thread are ours within."""
        if active_session() is not None:
            raise OptionError("warmup was called within a warmup")
        if not self.lock.acquire(blocking=False):
            raise OptionError("another thread is warming this model up; wait for it")
        self.padding = fills
        self.families.clear()
        set_active_session(self)
        try:
            with self.compiles.watched():
                yield
        finally:
            set_active_session(None)
            self.mode = "run"
            self.drop()
            self.lock.release()

    @contextlib.contextmanager
    def calling(self, mode: str, size: int) -> Iterator[None]:
        """One call of the model; states that graphs write to are afterwards what they were."""
        self.mode, self.size, self.ran = mode, size, 0
        try:
            yield
        finally:
            with torch.no_grad():
                for state, before in reversed(self.states.values()):  # the first copy last
                    if before is not None:
                        state.copy_(before)
            self.states.clear()
        if not self.ran and mode == "run":
            reason = "no graph of qinductor ran; Dynamo gave up, at its limit of recompiles perhaps"
            self.account.outcomes.append(Outcome(size, "the model", reason))

    def call(self, runner: Runner, arguments: Sequence[Any]) -> Any:
        """What a graph does with a call meanwhile."""
        self.runners.add(runner)
        self.ran += 1
        runner.account = self.account
        self._save(runner, arguments)
        if runner.reason is None and self.mode != "prove":
            runner.reason = self.buffers.measure(runner, arguments)
            runner.saw(self.family(runner), self.size, runner.key(arguments)[0])
        if runner.reason is not None or runner.device is None:
            if self.mode == "record":
                self._outcome(runner, runner.reason)
            return runner.run(*arguments)
        gpu = self.gpu(runner.device)
        if self.mode == "run":
            return self._run(runner, arguments)
        with runner.lock, gpu.lock:  # other threads may replay meanwhile
            if self.mode == "rehearse":
                return self._rehearsed(gpu, runner, arguments)
            if self.mode == "record":
                return self._recorded(gpu, runner, arguments)
            return self._proved(runner, arguments)

    def _save(self, runner: Runner, arguments: Sequence[Any]) -> None:
        """Keeps what states were before this call of the model, small ones first."""
        written = [i for i, given in enumerate(runner.inputs) if given.kind == "written"]
        for i in sorted(written, key=lambda i: arguments[i].nbytes):
            state = arguments[i]
            if id(state) in self.states:
                continue
            held = sum(old.nbytes for _, old in self.states.values() if old is not None)
            fits = held + state.nbytes <= RESTORED
            self.states[id(state)] = state, state.detach().clone() if fits else None
            if not fits:
                limit = f"{RESTORED >> 20} MiB"
                self.account.note(f"warm-up has written to states of more than {limit}")

    @contextlib.contextmanager
    def _undone(self, runner: Runner, arguments: Sequence[Any]) -> Iterator[None]:
        """What is done to small states within is undone; larger ones keep what was written."""
        inputs = zip(runner.inputs, arguments, strict=True)
        small = [x for given, x in inputs if given.kind == "written" and x.nbytes <= UNDONE]
        before = [state.detach().clone() for state in small]
        yield
        with torch.no_grad():
            for state, old in zip(small, before, strict=True):
                state.copy_(old)

    def _run(self, runner: Runner, arguments: Sequence[Any]) -> Any:
        out = runner.run(*arguments)
        self.family(runner).gave.setdefault(self.size, [padding.look(one) for one in out])
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in out):
            runner.reason = "a training graph; wanted warmup and calls within torch.no_grad()"
        return out

    def gpu(self, device: torch.device) -> Any:
        """The recorder of a device."""
        if device not in self.gpus:
            self.gpus[device] = cuda.RECORDERS[device.type](device)
        return self.gpus[device]

    def _bound(self, runner: Runner, arguments: Sequence[Any]) -> tuple[Any, Any, list[Held]]:
        """(the call on buffers that hold these arguments, its choice, the buffers)."""
        given, held = self.buffers.filled(runner, arguments, self.padding)
        choice = chosen(runner.run, arguments)
        return lambda: run_chosen(runner.run, choice, given), choice, held

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
        known = runner.entries.get(key)
        if known is not None and known.is_current(runner.run, arguments):
            self._adopt(runner, known)
            self._outcome(runner, None)
            return known(arguments, None)
        try:
            run, choice, held = self._bound(runner, arguments)
            with self.compiles.none():
                recording = gpu.record(run)
            lies = _lies(runner, arguments, held, recording.outputs)
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
        written = [i for i, given in enumerate(runner.inputs) if given.kind == "written"]
        watch = watched(runner.run, choice[0], arguments)
        entry = Entry(gpu, self.size, recording, choice, held, lies, written, watch,
                      self.account, self.family(runner))  # fmt: skip
        runner.keep(key, entry)
        self.entries.add(entry)
        self.account.captures += 1
        self._outcome(runner, None)
        return entry(arguments, None)

    def _adopt(self, runner: Runner, entry: Entry) -> None:
        """Takes a call that was recorded before for one of this warm-up's."""
        entry.family, entry.axes, entry.proved = self.family(runner), None, None
        for held in entry.held:
            held.fill = padding.policy(self.padding, runner.inputs[held.index].name)

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
        if runner.computes is not None:
            return runner.computes
        written = [given.name for given in runner.inputs if given.kind == "written"]
        if written and self.padding is None:
            return f"the graph writes to {written[0]}; wanted padding=, for rows that are added"
        return None

    def _proved(self, runner: Runner, arguments: Sequence[Any]) -> Any:
        """Runs a call plainly, and padded with the rows that are added, and with others."""
        with self._undone(runner, arguments):
            plain = runner.run(*arguments)
        sizes, places = runner.key(arguments)
        family = self.family(runner)
        tolerance = padding.tolerance(
            x for x in (*arguments, *plain) if isinstance(x, torch.Tensor)
        )
        for bucket, size in family.fits(sizes):
            entry = runner.entries.get((family.seen[bucket], places))
            if entry is None or entry.axes is None or entry.family is not family:
                continue
            with self._undone(runner, arguments):
                padded = entry(arguments, size)
            with self._undone(runner, arguments):
                noisy = entry(arguments, size, noise=True)
            varied = entry.noisy
            why = padding.refuted(plain, padded, noisy if varied else None, tolerance)
            repeats = any(h.fill == "repeat" for h in entry.held if h.axis is not None)
            if why is None and repeats and not varied:
                why = "all rows of the example are alike, which shows nothing; wanted varied ones"
            if entry.proved is not False:  # once refuted is refuted
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
        ours = list(self.entries)
        for runner in list(self.runners):
            runner.forget(ours)
        for entry in ours:
            entry.drop()
        self.entries.clear()
        accounts.discard(self.account)
        self.buffers.clear()
        for gpu in self.gpus.values():
            gpu.free()


def _lies(
    runner: Runner, arguments: Sequence[Any], held: Sequence[Held], outputs: Sequence[Any]
) -> list[int]:
    """Where each output lies, as `Entry` has it. ValueError for one in a buffer."""

    def place(value: torch.Tensor) -> int:
        return value.untyped_storage().data_ptr()

    buffers = {place(h.buffer): runner.inputs[h.index].name for h in held}
    fixed = {place(part) for i in runner.fixed for part in _there(arguments[i])}
    found = []
    for i, out in enumerate(outputs):
        at = place(out) if isinstance(out, torch.Tensor) and out.numel() else 0
        if at and at in buffers:
            raise ValueError(f"result {i} is a view of {buffers[at]}")
        same = [j for j in runner.fixed if arguments[j] is out]
        found.append(same[0] if same else VIEW if at and at in fixed else OWN)
    return found


def _there(value: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of an input whose memory is still there."""
    return [part for part in parts(value) if not is_freed(part)]


def packed_bytes() -> int:
    """Bytes of all that is packed, but for what lies in the memory of the models' own tensors.

    Graphs share what is packed: of two sizes of one model both reports count it."""
    found: dict[int, int] = {}
    with LOCK:
        for entry in ENTRIES.values():
            leaves = [storage() for _, storage in entry.references]  # of no bytes: it was freed
            own = {leaf.data_ptr() for leaf in leaves if leaf is not None and leaf.nbytes()}
            for tensor in entry.tensors.values():
                if (place := tensor.untyped_storage().data_ptr()) not in own:
                    found[place] = tensor.untyped_storage().nbytes()
    return sum(found.values())
