"""Padding to a captured size: which axes grow with it, what the added rows hold, and a proof.

An axis grows with a call's size if it is the only one of its tensor that changes, in proportion to
the size. Added rows repeat the last one, or hold a number where that is declared.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from qinductor.errors import OptionError

LOUD = 8.0  # times the rms of an input: its largest numbers are among the added rows
Fill = str | float | int  # "repeat", or the number that added rows hold
Padding = Fill | Mapping[str, Fill] | None


class Axis(NamedTuple):
    """An axis that grows with a call's size, and how many of its elements one more row adds."""

    dim: int
    each: int


def check(padding: Padding) -> None:
    """OptionError for a policy that is none."""
    if padding is None:
        return
    if isinstance(padding, Mapping) and not all(isinstance(key, str) for key in padding):
        raise OptionError(f"padding is {padding!r}; wanted names of arguments for keys")
    for fill in padding.values() if isinstance(padding, Mapping) else [padding]:
        plain = isinstance(fill, (int, float)) and not isinstance(fill, bool)
        if fill != "repeat" and not plain:
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


def distinct(value: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that is broadcast, each once."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


def padded_into(
    held: torch.Tensor, given: torch.Tensor, axis: Axis, sizes: tuple[int, int], fill: Fill,
    noise: bool = False,
) -> bool:  # fmt: skip
    """Writes a tensor of sizes[0] rows into one of sizes[1]. `noise`: rows that would repeat the
    last one hold something else; returns whether they do."""
    if held.stride(axis.dim) == 0:  # all rows are one
        distinct(held).copy_(distinct(given))
        return False
    held, given = distinct(held), distinct(given)
    real = sizes[0] * axis.each
    held.narrow(axis.dim, 0, real).copy_(given)
    added = held.narrow(axis.dim, real, held.shape[axis.dim] - real)
    if not isinstance(fill, str):
        added.fill_(fill)
        return False
    last = given.narrow(axis.dim, real - axis.each, axis.each)
    rows = added.unflatten(axis.dim, (sizes[1] - sizes[0], axis.each))
    rows.copy_(last.unsqueeze(axis.dim))
    return noise and _disturb(added, given)


def _disturb(added: torch.Tensor, given: torch.Tensor) -> bool:
    """Overwrites rows by random ones, of the kind that is given; whether that made a difference."""
    generator = torch.Generator(added.device).manual_seed(0)
    size: dict[str, Any] = {"size": added.shape, "generator": generator, "device": added.device}
    if added.dtype is torch.bool:
        made = torch.rand(**size) > 0.5
    elif added.is_floating_point() or added.is_complex():
        wide = given.abs().double().nan_to_num(0, 0, 0)
        dtype = torch.complex64 if added.is_complex() else torch.float32
        rms = float(wide.square().mean()) ** 0.5
        made = torch.randn(**size, dtype=dtype) * (LOUD * rms or 1.0)
    else:  # indices perhaps: none that is larger than those that are given
        low, high = int(given.long().min()), int(given.long().max())
        if low == high and high <= 0:
            return False
        made = torch.randint(min(low, high - 1), high + 1, **size)
    added.copy_(made)
    return True


def cut(value: torch.Tensor, axis: Axis | None, size: int) -> torch.Tensor:
    """The first rows."""
    return value if axis is None else value.narrow(axis.dim, 0, size * axis.each)


def tolerance(tensors: Iterable[torch.Tensor]) -> float:
    """The share of a result's rms by which two kernels may differ, in a graph of these tensors.

    32 layers of int4 weights in bf16 are 0.008 from eager's (H200, torch 2.11); for fp32, which may
    be multiplied in TF32's 10 bits, nothing was measured.
    """
    narrow = any(t.is_floating_point() and t.itemsize < 4 for t in tensors)
    return 0.03 if narrow else 1e-3


def differs(padded: torch.Tensor, plain: torch.Tensor, limit: float) -> str | None:
    """How a padded result differs from a plain one, beyond what other kernels' roundings do."""
    if padded.shape != plain.shape:
        return f"its shape is {list(padded.shape)} padded and {list(plain.shape)} plain"
    if padded.is_complex():
        padded, plain = torch.view_as_real(padded), torch.view_as_real(plain)
    if not padded.is_floating_point():
        return None if torch.equal(padded, plain) else "it is another one"
    a, b = padded.double(), plain.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "it is finite elsewhere"
    if not bool(b.isfinite().any()) and b.numel():
        return "the example's is not finite, which shows nothing"
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    if float((a - b).square().mean()) > limit**2 * float(b.square().mean()):
        return "it is another one"
    return None


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, nan where nan."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def refuted(
    plain: Sequence[Any], padded: Sequence[Any], noisy: Sequence[Any] | None, limit: float
) -> str | None:
    """Why results of padded calls are not the plain call's; None if they are.

    noisy  of other rows added; None where their fill is declared and so cannot change
    limit  as of `tolerance`
    """
    for i, (want, one) in enumerate(zip(plain, padded, strict=True)):
        if not isinstance(want, torch.Tensor):
            if want != one:
                return f"result {i} is {one} padded and {want} plain"
            continue
        if why := differs(one, want, limit):
            return f"of result {i}: {why}"
        if noisy is not None and not same(one, noisy[i]):
            return f"of result {i}: it depends on what is added"
    return None
