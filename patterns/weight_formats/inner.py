"""Codes inside a region: of a weight that is stored in floats and quantised in every call.

w -> / s -> round -> clamp -> codes -> * s -> W
"""

import math
from collections.abc import Iterable

import torch
from torch.fx import Node

from qinductor.patterns.whole import BYTE, STORED, Held, Span, span
from qinductor.regions import FLOATS, Region

UNSIGNED = (0.0, 255.0)


def codes_within(nodes: Iterable[Node], elements: int, held: Held) -> list[Node]:
    """Those of some nodes, in graph order, that hold a code for each element and are made of a
    tensor of floats as large: the last one of each number of bits, fewest first. `held`: constants
    that are placeholders."""
    made: set[Node] = set()
    found: dict[int, Node] = {}
    for node in nodes:
        if node.op != "call_function":
            large = node.op == "placeholder" and node not in held and _count(node) >= elements
            if large and node.meta["val"].dtype in FLOATS:
                made.add(node)
        elif not made.isdisjoint(node.all_input_nodes):
            made.add(node)
            bits = _bits(node, held) if _count(node) == elements else None
            if bits is not None:
                found[bits] = node
    return [found[bits] for bits in sorted(found)]


def whole_codes(code: Node, region: Region) -> Span | None:
    """What codes may be that a region of floats makes as whole numbers of another dtype."""
    inner = codes_within(region.nodes, math.prod(region.shape), region.constants)
    if code not in inner or code.meta["val"].dtype in STORED:
        return None
    return span(code, region.constants)


def _count(node: Node) -> int:
    """The elements of a tensor; -1 of what is none, or symbolic."""
    value = node.meta.get("val")
    size = value.numel() if isinstance(value, torch.Tensor) else -1
    return size if isinstance(size, int) else -1


def _bits(node: Node, held: Held) -> int | None:
    """Of a code, if a node holds any."""
    if node.meta["val"].dtype in STORED:
        return 8
    found = span(node, held)
    fits = found.within(*BYTE) or found.within(*UNSIGNED)
    return math.ceil(math.log2(found.high - found.low + 1)) if fits else None
