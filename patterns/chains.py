"""Chains of operators on one value, as data: they outlive the graph that they were read off."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from qinductor.contracts import short
from qinductor.errors import Refused


@dataclasses.dataclass(frozen=True)
class Side:
    """A tensor that a chain takes beside its value."""

    name: str
    dtype: torch.dtype
    dim: int

    @staticmethod
    def of(node: Node) -> "Side":
        """What a node gives."""
        value = node.meta["val"]
        return Side(node.name, value.dtype, value.dim())

    def probe(self, value: torch.Tensor) -> torch.Tensor:
        """A value for it, of its dtype; one of no axes is no tensor for the rules of promotion."""
        return (value if self.dim else value.flatten()[0]).to(self.dtype)


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator.

    args   its arguments: `value` for that of the chain, a Side for another tensor
    dtype  of its result
    """

    target: Any
    args: tuple[Any, ...]
    dtype: torch.dtype

    @staticmethod
    def of(node: Node, value: Node) -> "Step":
        """What a node does with a value."""

        def held(argument: Any) -> Any:
            if argument is value:
                return VALUE
            return Side.of(argument) if isinstance(argument, Node) else argument

        return Step(node.target, tuple(map(held, node.args)), node.meta["val"].dtype)

    def takes(self, side: Side) -> bool:
        """Whether it takes this tensor."""
        return side in self.args


VALUE = "value"


def run(
    steps: Sequence[Step], value: torch.Tensor, given: Mapping[Side, torch.Tensor]
) -> torch.Tensor:
    """What a chain makes of a value."""
    for step in steps:
        args = [value if a is VALUE else given[a] if isinstance(a, Side) else a for a in step.args]
        value = step.target(*args)
    return value


def rounding(dtypes: Sequence[torch.dtype]) -> float:
    """The largest relative step of some dtypes. Refused for dtypes that are none of floats."""
    odd = [dtype for dtype in dtypes if not dtype.is_floating_point]
    if odd:
        raise Refused(f"it must compute in floats, not in {short(odd[0])}")
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
