"""Buffers of inputs that are copied: one of the largest size for each, shared by all sizes."""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from qinductor.serving import padding
from qinductor.serving.account import Account
from qinductor.serving.entries import Held, extent
from qinductor.serving.padding import Padding, distinct
from qinductor.serving.runner import Runner

COPIED = 16 << 20  # bytes of an input from which copying it is worth a note
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


class Buffers:
    """Those of all graphs of a warm-up."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.extents: weakref.WeakKeyDictionary[Runner, dict[int, Extent]] = (
            weakref.WeakKeyDictionary()
        )

    def measure(self, runner: Runner, arguments: Sequence[Any]) -> str | None:
        """Learns what a call needs; or why its inputs cannot be copied."""
        extents = self.extents.setdefault(runner, {})
        for i, given in enumerate(runner.inputs):
            if given.kind != "copied":
                continue
            value = arguments[i]
            if hasattr(value, "__tensor_flatten__"):
                return f"{given.name} is a {type(value).__name__} that may change"
            if value.is_conj() or value.is_neg():
                return f"{given.name} is a conjugate or negative view"
            elements = extent(value.shape, value.stride())
            if elements > extents.setdefault(i, Extent(0, value.dtype)).elements:
                extents[i] = Extent(elements, value.dtype)
        return None

    def predicted(self) -> int:
        """Bytes of buffers that are wanted and not there yet."""
        held = (known for extents in self.extents.values() for known in extents.values())
        return sum(known.bytes for known in held if known.memory is None)

    def allocate(self) -> None:
        """Makes them."""
        with torch.inference_mode(False):  # others could not be written to outside of it
            for runner, extents in self.extents.items():
                for i, known in extents.items():
                    if known.memory is not None:
                        continue
                    if known.bytes > COPIED:
                        name, size = runner.inputs[i].name, known.bytes >> 20
                        self.account.note(
                            f"{name} is copied at every call, {size} MiB: if it is always the same "
                            "tensor, call torch._dynamo.mark_static_address on it"
                        )
                    known.memory = torch.zeros(
                        known.elements, dtype=known.dtype, device=runner.device
                    )

    def filled(
        self, runner: Runner, arguments: Sequence[Any], fills: Padding
    ) -> tuple[list[Any], list[Held]]:
        """(arguments with buffers that hold the copied ones, these buffers)."""
        self.allocate()  # those that this rehearsal was first to measure
        given, held = list(arguments), []
        for i, known in self.extents[runner].items():
            value = arguments[i]
            assert known.memory is not None
            given[i] = known.memory.as_strided(value.shape, value.stride())
            distinct(given[i]).copy_(distinct(value).clone())  # it may lie in the buffer
            held.append(Held(i, given[i], padding.policy(fills, runner.inputs[i].name)))
        return given, held

    def clear(self) -> None:
        """Drops them."""
        self.extents.clear()
