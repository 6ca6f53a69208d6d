"""The calls that warm-up makes: an example in every size."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from qinductor.errors import OptionError
from qinductor.retrace import STATIC
from qinductor.serving import cuda, padding

Shape = tuple[int, ...]
Made = tuple[Sequence[Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Call:
    """One size, and what makes the arguments of a call of a size."""

    size: int
    make: Callable[[int], Made]
    between: bool = True  # whether it makes those of sizes that were not asked for
    asked: bool = True  # whether the user asked for this size

    def __call__(self) -> Made:
        """(args, kwargs)"""
        return self.make(self.size)


def calls_of(
    example: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_sizes: Sequence[int] | None,
    shapes: Sequence[Any] | None,
) -> list[Call]:
    """The calls that `warmup` was asked for, the largest first. OptionError for bad arguments."""
    if batch_sizes is not None and shapes is not None:
        raise OptionError("batch_sizes and shapes are both given; wanted one of them")
    made = len(example) == 1 and callable(example[0]) and not isinstance(example[0], torch.Tensor)
    if shapes is not None:
        return _of_shapes(example, kwargs, shapes, made)
    sizes = _sizes(batch_sizes)
    if made:
        if not sizes or kwargs:
            raise OptionError("a function that makes examples takes batch_sizes, and no kwargs")
        return _of_sizes(sizes, functools.partial(_made, example[0]))
    own = next((x.shape[0] for x in _tensors((example, kwargs)) if x.dim()), None)
    if own is None:
        raise OptionError("the example has no tensor with an axis; wanted the arguments of a call")
    resized = functools.partial(_batched, example, kwargs, own, len(sizes) > 0)
    return _of_sizes(sizes, resized) or [Call(own, resized)]


def _of_sizes(sizes: Sequence[int], make: Callable[[int], Made]) -> list[Call]:
    calls = [Call(size, make) for size in sizes]
    if sizes and sizes[-1] > 1:  # Dynamo compiles one row by itself: not at the first such call
        calls.append(Call(1, make, asked=False))
    return calls


def _sizes(batch_sizes: Sequence[int] | None) -> list[int]:
    """Positive integers, the largest first."""
    if batch_sizes is None:
        return []
    try:
        sizes = sorted(set(map(operator.index, batch_sizes)), reverse=True)
    except TypeError:
        sizes = []
    if not sizes or sizes[-1] < 1:
        raise OptionError(f"batch_sizes is {batch_sizes!r}; wanted positive integers")
    return sizes


def _positive(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def _made(example: Callable[[int], Made], size: int) -> Made:
    made = example(size)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise OptionError(f"the function of examples gave {type(made)}; wanted (args, kwargs)")
    return made


def _batched(example: Any, kwargs: Any, own: int, many: bool, size: int) -> Made:
    @functools.cache  # of one tensor, one
    def grown(value: torch.Tensor) -> torch.Tensor:
        return _grown(value, (size, *value.shape[1:]), (0,) if many else ())

    def resized(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == own:
            return grown(value)
        return value

    made: Made = tree_map(resized, (tuple(example), dict(kwargs)))
    return made


def _grown(value: torch.Tensor, shape: Sequence[int], varies: Sequence[int]) -> torch.Tensor:
    """A tensor's elements, over and over, in another shape, with axes that Dynamo is told may vary;
    the same memory in its own shape."""
    for dim, size in enumerate(shape):
        if value.shape[dim] != size and value.stride(dim) == 0:
            value = value.narrow(dim, 0, 1).expand(
                *value.shape[:dim], size, *value.shape[dim + 1 :]
            )
        elif value.shape[dim] != size:
            rows = torch.arange(size, device=value.device) % max(1, value.shape[dim])
            value = value.index_select(dim, rows)
    if type(value) is torch.Tensor and not hasattr(value, STATIC):
        made = value.data  # the marks are not the user's
        vars(made).update(vars(value))
        value = made
        for dim in varies:
            torch._dynamo.maybe_mark_dynamic(value, dim)
    return value


def _of_shapes(
    example: Sequence[Any], kwargs: Mapping[str, Any], shapes: Sequence[Any], made: bool
) -> list[Call]:
    tensors = _tensors((example, kwargs))
    if made or not tensors:
        raise OptionError("shapes need an example with tensors")
    wanted = [_fitting(given, tensors) for given in shapes]
    if not wanted:
        raise OptionError("shapes is empty")
    if len({len(each) for each in wanted}) > 1:
        raise OptionError("shapes has some for more tensors than others")
    firsts = [each[0] for each in wanted]
    varies = [dim for dim, sizes in enumerate(zip(*firsts, strict=True)) if len(set(sizes)) > 1]
    sizes = [shape[varies[0]] if len(varies) == 1 else math.prod(shape) for shape in firsts]
    known = dict(zip(sizes, wanted, strict=True))
    if len(known) < len({tuple(each) for each in wanted}):
        raise OptionError("shapes has two of one size, by what varies in the first tensor")
    return [
        Call(size, functools.partial(_shaped, example, kwargs, known), len(varies) == 1)
        for size in sorted(known, reverse=True)
    ]


def _fitting(given: Any, tensors: Sequence[torch.Tensor]) -> list[Shape]:
    """Shapes of the first tensors; OptionError if they cannot be."""
    try:
        one = tuple(given)
        each = [one] if all(map(_positive, one)) else [tuple(shape) for shape in one]
    except TypeError:
        raise OptionError(f"shapes has {given!r}; wanted a shape, or a tuple of them") from None
    if len(each) > len(tensors) or not all(
        len(shape) == tensor.dim() and all(map(_positive, shape))
        for shape, tensor in zip(each, tensors, strict=False)
    ):
        held = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise OptionError(f"shapes has {given!r}, and the example's tensors are {held}")
    return each


def _shaped(example: Any, kwargs: Any, known: Mapping[int, Sequence[Shape]], size: int) -> Made:
    """The example in the shapes of a size, or in those that a size between would have."""
    columns = [dict(zip(known, of, strict=True)) for of in zip(*known.values(), strict=True)]
    left = iter(columns)

    def resized(value: Any) -> Any:
        shapes = next(left, None) if isinstance(value, torch.Tensor) else None
        if shapes is None:
            return value
        shape = shapes[size] if size in shapes else _between(shapes, size)
        sizes = enumerate(zip(*shapes.values(), strict=True))
        return _grown(value, shape, [dim for dim, of in sizes if len(set(of)) > 1])

    made: Made = tree_map(resized, (tuple(example), dict(kwargs)))
    return made


def _between(shapes: Mapping[int, Shape], size: int) -> Shape:
    axis = padding.axis_of(shapes)
    shape = list(next(iter(shapes.values())))
    if axis is not None:
        shape[axis.dim] = size * axis.each
    return tuple(shape)


def between(calls: Sequence[Call]) -> list[Call]:
    """A call between each size and the next smaller one, by which padding is tried."""
    ascending = sorted(calls, key=lambda call: call.size)
    found = []
    for below, call in zip([1, *(c.size for c in ascending)], ascending, strict=False):
        size = max(2, below + 1)
        if call.between and size < call.size:
            found.append(Call(size, call.make, asked=False))
    return found


def devices(call: Call) -> list[torch.device]:
    """Devices of a call's tensors on which graphs can be recorded."""
    found = {tensor.device for tensor in _tensors(call())}
    return sorted((d for d in found if d.type in cuda.RECORDERS), key=str)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
