"""Products of one activation: found, and their weights put one below the other."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from qinductor.contracts import QuantizedWeight
from qinductor.errors import Refused
from qinductor.kernels.dequant_matmul import DequantMatmul, Operands
from qinductor.op import Plan
from qinductor.patterns.products import ANCHORS
from qinductor.regions import VIEWS


def siblings(node: Node, x: Node) -> Iterator[Node]:
    """Products after `node`, in graph order, that multiply the same rows with another weight."""
    seen, stack, found = set(), [_origin(x)], set()
    while stack:
        source = stack.pop()
        for user in source.users:
            if user.target in ANCHORS:
                found.add(user)
            elif user.target in VIEWS and user not in seen:
                seen.add(user)
                stack.append(user)
    after = False
    for other in node.graph.nodes:
        if after and other in found and other.target is node.target:
            place = ANCHORS[other.target][1]
            rows = other.args[place]
            if isinstance(rows, Node) and _same(rows, x):
                yield other
        after = after or other is node


def _origin(x: Node) -> Node:
    """What x is a view of."""
    while x.target in VIEWS:
        source = x.args[0]
        assert isinstance(source, Node)
        x = source
    return x


def _same(a: Node, b: Node) -> bool:
    """Whether both are one value: the same view of one node."""
    values = [node.meta["val"] for node in (a, b)]
    shapes = [(value.shape, value.stride()) for value in values]
    return _origin(a) is _origin(b) and shapes[0] == shapes[1]


def joined_contract(contracts: Sequence[DequantMatmul]) -> DequantMatmul:
    """The contract of all products as one; Refused if they differ in more than N."""
    first = contracts[0]
    n = sum(contract.weight.n for contract in contracts)
    for contract in contracts:
        w = contract.weight
        alike = dataclasses.replace(w, n=first.weight.n)
        if dataclasses.replace(contract, weight=alike) != first:
            raise Refused(f"products of {first} and {contract} are not computed as one")
        if contract.experts or w.permuted or w.n % w.bn:
            raise Refused(f"{contract} is computed by itself")
    return dataclasses.replace(first, weight=dataclasses.replace(first.weight, n=n))


def check_tables(weights: Sequence[QuantizedWeight]) -> None:
    """Refused if weights of one format have tables of other values: one product has one table."""
    tables = [weight.table for weight in weights if weight.table is not None]
    if not all(torch.equal(tables[0], other) for other in tables):
        raise Refused("the tables of products that are computed as one differ")


def joined(found: Sequence[tuple[Operands, ...]], contract: DequantMatmul) -> Operands:
    """The operands of products that are computed as one: weights, biases and scales one below the
    other. Refused if their tables differ."""
    parts = [operands for (operands,) in found]
    weights = [part.weight for part in parts]
    check_tables(weights)
    codes = torch.cat([weight.codes for weight in weights])
    scale, zero, outer = (
        _below([getattr(weight, name) for weight in weights]) for name in ("scale", "zero", "outer")
    )
    weight = QuantizedWeight(contract.weight, codes, scale, zero, outer, weights[0].table)
    return Operands(
        weight,
        _below([part.output_scale for part in parts]),
        _below([part.bias for part in parts]),
    )


def _below(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    held = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(held) if held else None


def is_faster(whole: Plan, alone: Sequence[Plan]) -> bool:
    """Whether one product is expected to take less time than several, at every M."""
    sums = [sum(times) for times in zip(*(plan.us for plan in alone), strict=True)]
    return bool(whole.us) and all(a < b for a, b in zip(whole.us, sums, strict=True))
