"""Which outputs of a region may be scales and zero points, and what it answers to a battery."""

import contextlib
from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.kernels.quantize import Quantize
from qinductor.patterns.activation_formats.identify import Answers, battery
from qinductor.patterns.activation_formats.layouts import made_of
from qinductor.patterns.activation_formats.prove import prove
from qinductor.patterns.probe import Function, Numbers, Remembered, count
from qinductor.regions import FLOATS

SCALE = (*FLOATS, torch.float8_e8m0fnu)
ELEMENTS = 1 << 19  # of a battery, at most
GROUPS = (48, 512)  # in it, at least and at most
RUNS = 16  # for a battery, where a run takes few groups
SCALES = 3  # reduced tensors that are tried as the scale, or as the zero; of bytes one more


def answers(asked: Remembered, member: Quantize, places: Sequence[int], known: Numbers) -> Answers:
    """What a region answers to a battery."""
    k, group = member.k, member.group
    rows = asked.function.rows(2 if not group else min(256, max(4, ELEMENTS // k)))
    width, each = (group, rows * k // group) if group else (rows * k, 1)
    n = min(max(GROUPS[0], min(ELEMENTS // width, GROUPS[1])), RUNS * each)
    n = -(-n // each) * each
    y = battery(n, width, member.x, known.every, 0)
    found: list[list[torch.Tensor]] = [[] for _ in places]
    for turn, part in enumerate(y.split(each)):
        out = asked((group, turn), [part.reshape(rows, k)])
        for held, i in zip(found, places, strict=True):
            held.append(out[i].reshape(len(part), -1))
    codes, *others = (torch.cat(held) for held in found)
    return Answers(y, codes, *(other.reshape(-1) for other in others))


def again(
    asked: Remembered, contract: Quantize, scale: int, used: Sequence[int], known: Numbers
) -> list[int]:
    """The places of other outputs that hold the scale."""
    found, outputs = [], asked.function.outputs
    for i in used:
        first, other = (outputs[j].meta["val"] for j in (scale, i))
        if i != scale and (first.dtype, count(first)) == (other.dtype, count(other)):
            with contextlib.suppress(Refused):
                prove(asked, (0, i), contract, known.every)
                found.append(i)
    return found


def is_zero(region: Function, zero: int, scale: int, group: int) -> bool:
    """Whether an output may be the zero point beside a scale: it is not made of that alone."""
    node, other = region.outputs[zero], region.outputs[scale]
    return zero != scale and group_of(region, node) == group and node not in made_of(other)


def group_of(region: Function, scale: Node) -> int | None:
    """Elements of a row that share a scale; 0 for all rows, None where there is no such number."""
    y = region.inputs[0].meta["val"]
    k, entries = int(y.shape[-1]), count(scale.meta["val"])
    rows = count(y) // k
    if entries == 1 and rows > 1:
        return 0
    each = entries // rows
    return None if entries % rows or k % each else k // each


def scales_among(candidates: Sequence[Node], used: Collection[Node]) -> list[Node]:
    """What is tried as the scale: first that of which all else that is used can be made, the last
    of them first; at last what may be exponents."""
    whole = {node: set(made_of(node)).issuperset(used) for node in candidates}
    place = {node: i for i, node in enumerate(candidates[0].graph.nodes)} if candidates else {}
    order = sorted(whole, key=lambda n: (not whole[n], -place[n] if whole[n] else 0))
    floats = [n for n in order if n.meta["val"].dtype in SCALE]
    return floats[:SCALES] + [n for n in order if n.meta["val"].dtype is torch.uint8][:1]


def nearness(refusal: Refused) -> int:
    """How far a search came."""
    order = ("no scale", "no floor", "no codes")
    return next((i for i, words in enumerate(order) if refusal.reason.startswith(words)), 3)
