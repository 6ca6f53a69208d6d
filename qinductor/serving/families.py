"""Sizes of calls that a warm-up saw, and which of them another call can be padded to."""

from collections.abc import Iterator
from typing import Any

from qinductor.serving import padding
from qinductor.serving.padding import Axis

Sizes = tuple[Any, ...]


class Family:
    """The sizes that one warm-up saw of one graph: of inputs that may change, by a call's size.

    gave  what the outputs looked like then
    """

    def __init__(self) -> None:
        self.seen: dict[int, Sizes] = {}
        self.gave: dict[int, list[Any]] = {}

    @property
    def axes(self) -> list[Axis | None] | None:
        """How the inputs grow, values as shapes of one axis; None if not in proportion."""
        try:
            return [
                padding.axis_of(dict(zip(self.seen, map(_shape, column), strict=True)))
                for column in zip(*self.seen.values(), strict=True)
            ]
        except ValueError:
            return None

    def saw(self, size: int, sizes: Sizes) -> None:
        """Notes the sizes of inputs at the size of a call."""
        self.seen.setdefault(size, sizes)

    def fits(self, sizes: Sizes) -> Iterator[tuple[int, int]]:
        """(recorded size, the call's own), smallest first, of calls that padding would do for."""
        axes, shapes = self.axes, list(map(_shape, sizes))
        if axes is None or len(axes) != len(shapes):
            return
        growing = [(s, axis) for s, axis in zip(shapes, axes, strict=True) if axis is not None]
        if not growing or len(growing[0][0]) <= growing[0][1].dim:
            return
        shape, axis = growing[0]
        size = shape[axis.dim] // axis.each
        for bucket in sorted(self.seen):
            known = map(_shape, self.seen[bucket])
            if 0 < size < bucket and shapes == [
                _cut(*of, size) for of in zip(known, axes, strict=True)
            ]:
                yield bucket, size


def _shape(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _cut(shape: tuple[int, ...], axis: Axis | None, size: int) -> tuple[int, ...]:
    if axis is None:
        return shape
    return (*shape[: axis.dim], size * axis.each, *shape[axis.dim + 1 :])
