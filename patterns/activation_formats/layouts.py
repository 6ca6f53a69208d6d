"""How a quantiser's scale is stored: as what it is read, of which dtype, in which order.

From the proved scale forward: a node that is made of it and of literals alone, and through which
all go that read it, is what the operator may give in its place. Its dtype and its strides say which
form it would be; that its values are that form's is proved on scales of the contract. What lies
behind the last row is left open: a node that has it is no scale [M, G].
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.kernels.quantize import LAYOUTS, Quantize, laid_out, scales, stored
from qinductor.patterns.activation_formats.identify import battery
from qinductor.patterns.failures import FAILURES
from qinductor.patterns.probe import Function, Remembered, count, function, same
from qinductor.regions import FLOATS, PRODUCTS, pure

E8M0 = torch.float8_e8m0fnu
DTYPES = (*FLOATS, E8M0, torch.uint8, torch.int32)
POWERS = (torch.bfloat16, E8M0, torch.uint8)  # that hold powers of two as they are
ROWS = (2, 5, 67, 64)  # of the runs of a proof, where they are symbolic: each remainder by 4
VALUES = 256  # scales that are proved at least, where rows are a number
TURNS = 4  # runs for them, at most
DISTINCT = 4096  # different scales in a run, at most
NODES = 64  # that are looked at


def stored_as(
    contract: Quantize,
    found: Sequence[Node],
    codes: Node,
    inside: Collection[Node],
    proves: Callable[[Function, Quantize], bool],
) -> tuple[Quantize, Node]:
    """The contract with the form of its scale, and the node that has this form.

    found   nodes that hold the proved scale of the contract; of several each stays as it is
    inside  what lies behind the codes: they no longer read a scale
    proves  whether what a function makes of the scale is its form in a contract
    """
    scale, order = found[0], list(codes.graph.nodes)
    made = made_of(scale) if len(found) == 1 else [scale]
    for node in reversed(made):
        if node is not scale and _leaks(scale, (codes, node), {*made, *inside}):
            continue
        for member in _members(contract, node):
            if node is scale:
                return member, node
            if proves(dataclasses.replace(function([scale], [node], order), whole=True), member):
                return member, node
    return contract, scale


def made_of(scale: Node) -> list[Node]:
    """A scale and what is computed of it and of literals alone, in graph order."""
    found, stack = {scale}, [scale]
    literal: dict[Node, bool] = {}
    while stack and len(found) < NODES:
        for user in stack.pop().users:
            if user not in found and _is_pure(user) and all(
                n in found or _is_literal(n, literal) for n in user.all_input_nodes
            ):  # fmt: skip
                found.add(user)
                stack.append(user)
    return [n for n in scale.graph.nodes if n in found]


def _is_pure(node: Node) -> bool:
    made = isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
    return node.op == "call_function" and made and pure(node) and node.target not in PRODUCTS


def _is_literal(node: Node, known: dict[Node, bool]) -> bool:
    """Whether a node is a size, or made of numbers and sizes alone."""
    if node not in known:
        is_size = not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
        made = _is_pure(node) and all(_is_literal(n, known) for n in node.all_input_nodes)
        known[node] = is_size or made
    return known[node]


def _leaks(scale: Node, ends: Collection[Node], within: Collection[Node]) -> bool:
    """Whether something reads the scale and goes through none of the ends."""
    seen, stack = {scale}, [scale]
    while stack:
        for user in stack.pop().users:
            if user in ends or user in seen:
                continue
            if user not in within:
                return True
            seen.add(user)
            stack.append(user)
    return False


def _members(contract: Quantize, node: Node) -> Iterator[Quantize]:
    """The contract with the forms that a node's dtype, sizes and strides are those of."""
    value: Any = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES or not contract.group:
        return
    exact = contract.scale is torch.float32 or (contract.power and contract.scale in POWERS)
    once = exact and contract.compute is torch.float32
    if contract.scale != value.dtype and not once:  # what was rounded is rounded again
        return
    member = dataclasses.replace(contract, scale=value.dtype)
    for layout in LAYOUTS:
        if _lies(value, member.columns, layout):
            yield dataclasses.replace(member, layout=layout)


def _lies(value: torch.Tensor, columns: int, layout: str) -> bool:
    """Whether a tensor lies as scales of a layout do."""
    if value.dim() != 2:
        last = value.dim() and any(
            statically_known_true(size == columns) for size in value.shape[-2:]
        )
        return layout == "row" and bool(last) and value.is_contiguous()
    m, width = value.shape
    strides = {"row": (columns, 1), "column": (1, m), "column_padded": (1, (m + 3) // 4 * 4)}
    pairs = zip((width, *value.stride()), (columns, *strides[layout]), strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)


def proves(asked: Remembered, contract: Quantize, member: Quantize, known: Sequence[float]) -> bool:
    """Whether what a function makes of the contract's scales is what `member` stores.

    known  numbers that the quantiser computes with
    """
    part = asked.function
    value = part.inputs[0].meta["val"]
    turns = range(max(1, min(TURNS, VALUES // max(1, count(value)))))
    for seed, wanted in enumerate(ROWS if part.symbols(2) else turns):
        s = _scales(contract, part, wanted, known, seed)
        try:
            (theirs,) = asked(seed, [stored(contract, s).reshape(part.rows(wanted), -1)])
        except FAILURES:
            return False  # it has sizes that are not those of every number of rows, say
        ours = laid_out(member, s)
        if ours.numel() != theirs.numel() or ours.dtype != theirs.dtype:
            return False
        if not same(ours.reshape(-1), theirs.reshape(-1)).all():
            return False
    return True


def _scales(
    contract: Quantize, part: Function, wanted: int, known: Sequence[float], seed: int
) -> torch.Tensor:
    """[M, G] in what s is computed in: scales that the contract has, every second a hard one."""
    numel = math.prod(part.lead(part.inputs[0], part.symbols(wanted)))
    n = max(48, min(numel, DISTINCT))
    some = scales(contract, battery(n, 2, contract.x, known, 30 + seed))[0]
    hard, at = _hard(contract), torch.arange(numel) + seed * numel
    drawn = some[torch.randint(0, n, (numel,), generator=torch.Generator().manual_seed(seed))]
    drawn = torch.where(at % 2 == 0, hard[at // 2 % len(hard)], drawn)
    return torch.where(drawn.isnan(), torch.nan, drawn).view(-1, contract.groups)


def _hard(contract: Quantize) -> torch.Tensor:
    """Scales of inf, nan, 0, the largest and the least y; floats about the middle of two powers."""
    limits = torch.finfo(contract.x)
    y = torch.tensor([math.inf, math.nan, 0.0, limits.max, limits.tiny, 1.0])
    found = scales(contract, y[:, None].to(contract.x))[0]
    if contract.power or contract.compute is not torch.float32:
        return found
    mantissas = torch.tensor([0x400000, 0x400001, 0x3FFFFF, 0, 1, 0x7FFFFF], dtype=torch.int32)
    exponents = torch.arange(120, 374, 7, dtype=torch.int32) % 254 + 1
    floats = ((exponents[:, None] << 23) | mantissas).view(torch.float32).reshape(-1)
    floored = contract.floor is not None or contract.least is not None
    return torch.cat([found, floats.clamp_min(float(found[2])) if floored else floats])
