"""Recorded calls: what they copy in, what they give back, and when they may be replayed."""

import dataclasses
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from qinductor.runtime import Choice, Compiled
from qinductor.serving import cuda, padding
from qinductor.serving.account import Account
from qinductor.serving.families import Family
from qinductor.serving.padding import Axis, Fill, distinct
from qinductor.weights import CHECK_EVERY, Resolver

OWN = -1  # an output in memory of the recording, which is copied
VIEW = -2  # an output that is a view of an input
CHUNK = 1 << 16  # elements that one block of `_foreach_copy_` copies
LOOK = 997  # replays between two looks at the fingerprints of weights


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
    lies     where each output lies: OWN, VIEW, or the index of the input that it is
    written  the inputs that the graph writes to
    watch    whether leaves of the packed weights are as they were; None where that cannot be told
    account  where its replays are counted
    family   the sizes that were seen with it
    axes     of outputs that grow; None where padding is not allowed, for the `reason`
    proved   whether padded calls gave what plain ones give, each time they were tried
    noisy    whether the last call's added rows held something of no meaning
    """

    device: Any
    size: int
    recording: cuda.Recording | None
    choice: Choice
    held: list[Held]
    lies: list[int]
    written: list[int]
    watch: "Watch | None"
    account: Account
    family: Family
    axes: list[Axis | None] | None = None
    reason: str = "only one size of it was recorded"
    proved: bool | None = None
    noisy: bool = False

    def __call__(self, arguments: Sequence[Any], size: int | None, noise: bool = False) -> Any:
        """Replays for these arguments, of fewer rows where `size` is given."""
        assert self.recording is not None
        with torch.no_grad(), self.device.replaying():
            into, given, noisy = [], [], []
            for held in self.held:
                value = arguments[held.index]
                if size is not None and held.axis is not None:
                    sizes = size, self.size
                    noisy.append(
                        padding.padded_into(held.buffer, value, held.axis, sizes, held.fill, noise)
                    )
                else:
                    into.append(distinct(held.buffer))
                    given.append(distinct(value))
            copy(into, given)
            self.noisy = any(noisy)
            self.recording.replay()
            written = [arguments[i] for i in self.written if not arguments[i].is_inference()]
            torch.autograd.graph.increment_version(written)  # by which others see a state change
            return self._given(arguments, size)

    def _given(self, arguments: Sequence[Any], size: int | None) -> Any:
        assert self.recording is not None
        outputs, made = self.recording.outputs, {}
        places: dict[int, list[int]] = {}
        for i, out in enumerate(outputs):
            if not isinstance(out, torch.Tensor):
                made[i] = out
                continue
            if size is not None and self.axes is not None:
                out = padding.cut(out, self.axes[i], size)
            if self.lies[i] >= 0 and size is None:
                made[i] = arguments[self.lies[i]]
            elif self.lies[i] == OWN:
                places.setdefault(out.untyped_storage().data_ptr(), []).append(i)
                made[i] = out
            else:
                made[i] = out.detach()
        for group in places.values():
            copied = copies([made[i] for i in group])
            made.update(zip(group, copied, strict=True))
        return type(outputs)(made[i] for i in range(len(outputs)))

    def drop(self) -> None:
        """Frees what it holds."""
        if self.recording is not None:
            self.recording.reset()
        self.recording, self.watch, self.choice = None, None, (_gone, [])
        self.held.clear()

    def is_current(self, run: Any, arguments: Sequence[Any]) -> bool:
        """Whether a call would take the variant and the packed weights that were recorded."""
        if self.recording is None:
            return False
        if self.watch is not None and self.watch.is_quiet(arguments):
            return True
        (compiled, packed), now = self.choice, chosen(run, arguments)
        same = now[0] is compiled and len(now[1]) == len(packed)
        return same and all(map(operator.is_, now[1], packed))


def _gone(*arguments: Any) -> Any:
    raise AssertionError("a recording that was dropped is not run")


def chosen(run: Any, arguments: Sequence[Any]) -> Choice:
    """The variant that a call takes, and its packed weights."""
    return run.choose(arguments) if isinstance(run, Compiled) else (run, [])


def run_chosen(run: Any, choice: Choice, arguments: Sequence[Any]) -> Any:
    """The outputs of what was chosen."""
    return run.called(choice, arguments) if isinstance(run, Compiled) else choice[0](*arguments)


def copy(into: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Copies tensors: small ones in one launch, a large one on all of the device."""
    large = [i for i, held in enumerate(into) if held.numel() > CHUNK]
    for i in large:
        into[i].copy_(given[i])
    if len(large) < len(into):
        small = [i for i in range(len(into)) if i not in large]
        torch._foreach_copy_([into[i] for i in small], [given[i] for i in small])


def copies(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors that share memory, which share memory again, with the same strides; of
    several dtypes, or where one is empty, each by itself."""
    first = outputs[0].detach()
    if len(outputs) == 1 and extent(first.shape, first.stride()) == first.numel():  # dense
        return [first.clone()]
    if len({out.dtype for out in outputs}) > 1 or not all(out.numel() for out in outputs):
        return [out.detach().clone() for out in outputs]
    low = min(out.storage_offset() for out in outputs)
    high = max(out.storage_offset() + extent(out.shape, out.stride()) for out in outputs)
    flat = first.as_strided((high - low,), (1,), low).clone()
    return [flat.as_strided(out.shape, out.stride(), out.storage_offset() - low) for out in outputs]


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory from a tensor's first to its last."""
    pairs = zip(shape, strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs if size)


class Watch:
    """Whether the leaves of a resolver are as they were, in a few passes over all of them.

    It stands in for the resolver, but for calls at which that looks at fingerprints: every LOOKth,
    for a look waits for the device.

    indices  of the arguments that are watched
    """

    def __init__(self, resolver: Resolver, arguments: Sequence[Any]) -> None:
        self.resolver, self.calls = resolver, 0
        leaves = [*(leaf for slot in resolver.slots for leaf in slot.leaves), *resolver.reads]
        self.plain = sorted({leaf.index for leaf in leaves if not leaf.attributes})
        self.inner = sorted({(x.index, ".".join(x.attributes)) for x in leaves if x.attributes})
        self.indices = frozenset([*self.plain, *(index for index, _ in self.inner)])
        values = self._values(arguments)
        self.identities = list(map(id, values))
        self.storages = [weakref.ref(value.untyped_storage()) for value in values]
        self.freed = {i for i, value in enumerate(values) if not value.untyped_storage().nbytes()}
        self.stamps = self._stamps(values)

    def _values(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        values = [arguments[i] for i in self.plain]
        for index, names in self.inner:
            outer = arguments[index]
            values += [outer, operator.attrgetter(names)(outer)]
        return values

    def _stamps(self, values: Sequence[torch.Tensor]) -> list[Any]:
        versions = [value._version for value in values]
        if self.freed:
            values = [value for i, value in enumerate(values) if i not in self.freed]
        return [*versions, *map(torch.Tensor.data_ptr, values)]

    def is_quiet(self, arguments: Sequence[Any]) -> bool:
        """Whether nothing has changed; False where it is time for a closer look, too."""
        self.calls += 1
        if self.resolver.unversioned or self.calls % LOOK == 0:
            self.resolver.calls = CHECK_EVERY - 1  # so that it looks
            return False
        with torch._C.DisableTorchFunctionSubclass():
            values = self._values(arguments)
            return (
                list(map(id, values)) == self.identities
                and None not in [storage() for storage in self.storages]
                and self._stamps(values) == self.stamps
            )


def watched(run: Any, compiled: Any, arguments: Sequence[Any]) -> Watch | None:
    """A watch over the leaves of a variant; None where there are none, or they have no versions."""
    for variant in run.variants if isinstance(run, Compiled) else ():
        if variant.compiled is compiled:
            try:
                return Watch(variant.resolver, arguments)
            except RuntimeError:  # inference tensors have none
                return None
    return None
