"""Padding to a captured size: which axes grow with it, what the added rows hold, and a proof.

The first axis whose size is a whole multiple of the call's size at every size that was seen, grows
with it. Added rows repeat the last one, or hold a number where that is declared.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from qinductor.errors import OptionError

FAR = 0.1  # of the rms of a result, from which padded and plain results count as different
Fill = str | float | int  # "repeat", or the number that added rows hold
Padding = Fill | Mapping[str, Fill] | None


class Axis(NamedTuple):
    """An axis that grows with a call's size, and how many of its elements one more row adds."""

    dim: int
    each: int


def check(padding: Padding) -> None:
    """OptionError for a policy that is none."""
    given = padding.values() if isinstance(padding, Mapping) else [padding]
    for fill in given:
        plain = isinstance(fill, (int, float)) and not isinstance(fill, bool)
        if fill is not None and fill != "repeat" and not plain:
            raise OptionError(f"padding is {fill!r}; wanted 'repeat', or a number for added rows")


def policy(padding: Padding, name: str) -> Fill:
    """What rows that are added to an input of this name hold."""
    if isinstance(padding, Mapping):
        found = (fill for key, fill in padding.items() if named(key, name))
        return next(found, "repeat")
    return "repeat" if padding is None else padding


def named(key: str, name: str) -> bool:
    """Whether a user's key names an input that Dynamo calls, say, L['kwargs']['input_ids']."""
    last = name.replace("]", "").replace("[", ".").replace("'", "").replace('"', "")
    return key == name or last == key or last.endswith("." + key)


def axis_of(shapes: Mapping[int, Sequence[int]]) -> Axis | None:
    """The axis of a tensor of these shapes at these sizes that grows; None if none does.

    ValueError where no single axis grows in proportion.
    """
    grows = [d for d, s in enumerate(zip(*shapes.values(), strict=True)) if len(set(s)) > 1]
    if not grows:
        return None
    each = {divmod(shape[grows[0]], size) for size, shape in shapes.items()}
    if len(grows) > 1 or len(each) > 1 or next(iter(each))[1]:
        text = ", ".join(f"{list(shape)} at {size}" for size, shape in shapes.items())
        raise ValueError(f"of shapes {text} no single axis grows in proportion")
    return Axis(grows[0], next(iter(each))[0])


def look(out: Any) -> Any:
    """The shape of an output, or what else it is."""
    return tuple(out.shape) if isinstance(out, torch.Tensor) else repr(out)


def grown(looks: dict[int, Any]) -> Axis | None:
    """The axis of an output that grows, by what it looks like at these sizes."""
    if all(isinstance(look, tuple) for look in looks.values()):
        return axis_of(looks)
    if len(set(looks.values())) > 1:
        raise ValueError("a result that is no tensor changes with the size")
    return None


@functools.lru_cache(1024)
def _rows(size: int, bucket: int, each: int, device: torch.device, turned: bool) -> torch.Tensor:
    """Which elements of `size` rows those of `bucket` ones are; added ones are the last, or where
    `turned`, the first ones."""
    last = itertools.cycle(range(size)) if turned else itertools.repeat(size - 1)
    rows = [*range(size), *itertools.islice(last, bucket - size)]
    return torch.tensor([row * each + i for row in rows for i in range(each)], device=device)


def padded_into(
    held: torch.Tensor, given: torch.Tensor, axis: Axis, sizes: tuple[int, int], fill: Fill,
    turned: bool = False,
) -> None:  # fmt: skip
    """Writes a tensor of sizes[0] rows into one of sizes[1]."""
    size, bucket = sizes
    if isinstance(fill, str):  # "repeat"
        rows = _rows(size, bucket, axis.each, given.device, turned)
        held.copy_(given.index_select(axis.dim, rows))
        return
    real = size * axis.each
    held.narrow(axis.dim, 0, real).copy_(given)
    held.narrow(axis.dim, real, held.shape[axis.dim] - real).fill_(fill)


def cut(value: torch.Tensor, axis: Axis | None, size: int) -> torch.Tensor:
    """The first rows."""
    return value if axis is None else value.narrow(axis.dim, 0, size * axis.each)


def differs(padded: torch.Tensor, other: torch.Tensor, exact: bool) -> str | None:
    """How two results differ, `exact`: in any bit; else by more than other kernels' roundings."""
    if padded.shape != other.shape:
        return f"its shape is {list(padded.shape)} padded and {list(other.shape)} plain"
    if exact or not (padded.is_floating_point() or padded.is_complex()):
        same = (padded == other) | ((padded != padded) & (other != other))
        share = 1.0 if exact else 0.9  # of indices a tie may go the other way
        if padded.numel() and float(same.double().mean()) < share:
            return "it depends on what is added" if exact else "it is another one"
        return None
    a, b = padded.double(), other.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "it is finite elsewhere"
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    if float((a - b).abs().square().mean()) > FAR**2 * float(b.abs().square().mean()):
        return "it is another one"
    return None


def proved(plain: Sequence[Any], padded: Sequence[Any], turned: Sequence[Any] | None) -> str | None:
    """Why results of padded calls are not the plain call's; None if they are.

    turned  of rows added otherwise; None where their fill is declared and so cannot change
    """
    for i, (want, one) in enumerate(zip(plain, padded, strict=True)):
        if not isinstance(want, torch.Tensor):
            if want != one:
                return f"result {i} is {one} padded and {want} plain"
            continue
        other = None if turned is None else turned[i]
        why = differs(one, want, False) or (other is not None and differs(one, other, True))
        if why:
            return f"of result {i}: {why}"
    return None
