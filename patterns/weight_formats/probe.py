"""A region as a function of its codes and parameters, run on probes."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.patterns.weight_formats.rows import Prefix, Rows
from qinductor.regions import CASTS, INTEGER, MOVES, UNSIGNED, Region, aten, evaluate

BUDGET = 40  # evaluations of one region, the two whole ones of `read` included
# What reads entries of its first argument at the places that another argument names.
LOOKUPS = {
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default,
    aten.embedding.default, aten.take.default,
}  # fmt: skip
SAMPLE = 1 << 16  # elements in which values are counted
SHIFTS = {
    aten.bitwise_right_shift.Tensor, aten.bitwise_left_shift.Tensor,
    aten.__rshift__.Tensor, aten.__lshift__.Tensor,
}  # fmt: skip
COUNTING = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class Reduced:
    """A region as a function of its codes and parameters.

    chains   parameter -> the dtypes it is converted to on its way into the arithmetic
    tables   inputs that are looked up by code: they keep their values
    stored   nodes that depend on what the model stores, not on what the graph itself makes alone
    nodes    the function in order: fixed inputs (real values: indices), codes, parameters, the rest
    """

    def __init__(self, region: Region, code: Node, leaves: Sequence[torch.Tensor]) -> None:
        dependent = descendants(region.nodes, {code})
        self.region, self.code = region, code
        self.leaves = dict(zip(region.inputs, leaves, strict=True))
        # What the graph itself makes, or a number or integers that it holds, is the arithmetic's.
        self.stored = descendants(region.nodes, {*region.inputs, *region.constants})
        varying = descendants(region.nodes, {*region.inputs})
        numbers = {n for n in region.nodes if n not in self.stored or n not in varying
                   and (n.meta["val"].numel() == 1 or n.meta["val"].dtype in INTEGER)}  # fmt: skip
        self.chains: dict[Node, set[torch.dtype]] = {}
        self.tables: set[Node] = set()
        for node in (n for n in region.nodes if n in dependent):
            for source in node.all_input_nodes:
                if node.target in LOOKUPS and source is node.args[0] and source not in dependent:
                    self.tables.add(source)
                elif node is not code and source not in dependent and source not in numbers:
                    narrowest, dtypes = _narrowest(source)
                    self.chains.setdefault(narrowest, set()).update(dtypes)
        given = {code, *self.chains, *self.tables}
        needed = _ancestors([region.output], given)
        moving = descendants(region.nodes, given) & needed - given
        order = [node for node in region.nodes if node in moving]
        self.fixed = [
            node
            for node in dict.fromkeys(s for other in order for s in other.all_input_nodes)
            if node not in moving and node not in {code, *self.chains}
        ]
        self.nodes = [*self.fixed, code, *self.chains, *order]

    def amounts(self) -> set[Node]:
        """What something is shifted by."""
        given = [n.args[1] for n in self.region.nodes if n.target in SHIFTS]
        return _ancestors([amount for amount in given if isinstance(amount, Node)], set())

    def real(self) -> dict[Node, torch.Tensor]:
        """Real values of parameters, fixed inputs and codes."""
        wanted = [self.code, *self.chains, *self.fixed]
        return dict(zip(wanted, self.computed(wanted, {}), strict=True))

    def computed(
        self, wanted: Sequence[Node], changed: Mapping[Node, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Values of nodes, with some leaves changed."""
        env = {**self.region.constants, **self.leaves, **changed}
        needed = _ancestors(wanted, set(env))
        return evaluate([n for n in self.region.nodes if n in needed], env, wanted)


class Prober:
    """Runs the reduced region on its first rows with chosen fills, and counts the runs.

    spent   runs that earlier probers of this region took: they count against the budget
    rows    of W that the probes give: at least those asked for, or all
    planes  other integer inputs that may hold bits of the codes, and how many for each element
    fills   values of the code tensor, see `_fills`; `spare` ones are for where these do not do
    """

    def __init__(self, reduced: Reduced, rows: int, spent: int) -> None:
        region, real = reduced.region, reduced.real()
        axis, unit = region.row_axis
        # Of experts at least two, to see how their scales follow each other.
        parts = max(-(-min(rows, region.shape[0]) // unit), min(region.experts, 2))
        self.rows, self.evaluations = parts * unit, spent
        prefix = Prefix(axis, parts) if self.rows < region.shape[0] else None
        self.function = Rows(reduced.nodes, region.output, prefix)
        self.region, self.code, self.parameters = region, reduced.code, reduced.chains
        self.values = {n: self.function.take(n, t).cpu() for n, t in real.items()}
        self.fills, self.spare = _fills(self.values[self.code], bits_each(reduced.code, region))
        # Other integers with a bit for each element may hold more bits of the codes.
        inputs = (*reduced.fixed, *reduced.chains)
        whole = (*INTEGER, *UNSIGNED, torch.bool)
        planes = [n for n in inputs if n in reduced.stored and real[n].dtype in whole]
        self.planes = {
            n: math.log2(len(real[n].flatten()[:SAMPLE].unique()))
            for n in planes if bits_each(n, region) >= 1
        }  # fmt: skip
        self.given: dict[Node, torch.Tensor] = {}

    def density(self, parameters: Iterable[Node]) -> float:
        """Bits of a code, given which integers are parameters and hold no part of it."""
        more = (bits for node, bits in self.planes.items() if node not in parameters)
        return bits_each(self.code, self.region) + sum(more)

    def like(self, node: Node, value: float) -> torch.Tensor:
        """A parameter filled with one value."""
        return _filled(self.values[node], value)

    def mixed(self, node: Node, value: int) -> torch.Tensor:
        """A parameter filled with this value and the next one in turns."""
        held = self.values[node]
        return value + torch.arange(held.numel(), dtype=held.dtype).view(held.shape) % 2

    def __call__(self, fill: torch.Tensor, given: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """W[rows, K] in float64 for these codes; parameters not given are as set by `settle`."""
        self.evaluations += 1
        if self.evaluations > BUDGET - 2:
            raise Refused(f"identification needs more than {BUDGET} evaluations of the region")
        env = {**self.values, **self.given, **given, self.code: fill}
        return self.region.oriented(self.function(env)).double()

    def settle(self, given: Mapping[Node, torch.Tensor]) -> list[torch.Tensor]:
        """Sets parameters for the probes that follow; W for each fill. Drops fills that fail."""
        self.given.update(given)
        found, kept, failed = [], [], ""
        for fill in self.fills:
            try:
                value = self(fill, {})
            except (RuntimeError, IndexError) as error:  # such as a code beyond the table's end
                failed = str(error).strip().partition("\n")[0]
                continue
            if value.isfinite().all():
                found.append(value)
                kept.append(fill)
            elif fill is self.values[self.code]:
                raise Refused("under unit scales W must be finite for the codes it holds")
        if not found:
            raise Refused(f"it gives no finite value for any codes tried; {failed}".rstrip("; "))
        self.fills = kept
        return found


def bits_each(codes: Node, region: Region) -> float:
    """Bits of a tensor for each element of W; 8 and more where each has its own word."""
    value = codes.meta["val"]
    elements = region.shape[0] * region.shape[1]
    return float(value.numel() * value.itemsize * 8) / elements


def _fills(real: torch.Tensor, density: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Values to try for the code tensor, and others for when these tell no codes apart.

    All bits set and all clear give every element the same code in any packing by bits, 0x79 in
    bytes of base 3; random words reach other codes; the real ones are always in range of what they
    index.
    """
    if real.is_floating_point():
        return [_filled(real, 1), _filled(real, 2)], []
    if real.dtype is torch.bool:
        return [_filled(real, 1), _filled(real, 0), real], []
    random = torch.empty(real.shape, dtype=real.dtype)
    view, seeded = random.view(torch.uint8), torch.Generator().manual_seed(0)
    view.copy_(torch.randint(0, 256, view.shape, generator=seeded))
    words = [_filled(real, value) for value in (5, 3, 1)]
    bits = [torch.full_like(view, byte).view(real.dtype) for byte in (0xFF, 0x00, 0x55, 0x79)]
    if density >= 8:
        return [*words[:2], real], [*bits, random, *words[2:]]
    return [*bits[:2], random, real], [*bits[2:], *words]


def _filled(like: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full(like.shape, value, dtype=torch.float32).to(like.dtype)


def told_apart(values: Sequence[torch.Tensor]) -> list[int]:
    """The fewest of these fills for which every element takes two values; empty if none do."""
    for size in range(2, len(values) + 1):
        for chosen in itertools.combinations(range(len(values)), size):
            first, *others = (values[i] for i in chosen)
            if torch.stack([first != other for other in others]).any(0).all():
                return list(chosen)
    return []


def _narrowest(node: Node) -> tuple[Node, set[torch.dtype]]:
    """The tensor that `node` moves or converts, and the dtypes it takes on the way."""
    dtypes = {node.meta["val"].dtype}
    while node.op == "call_function" and node.target in MOVES | CASTS:
        source = node.args[0]
        tiled = (
            node.target is aten.permute.default and sum(s > 1 for s in node.meta["val"].shape) > 3
        )
        if not isinstance(source, Node) or tiled:  # entries of tiles are in order only behind it
            break
        dtype = source.meta["val"].dtype
        if node.target in CASTS and dtype not in COUNTING and dtype not in INTEGER:
            break
        node = source
        dtypes.add(dtype)
    return node, dtypes


def descendants(nodes: Sequence[Node], roots: set[Node]) -> set[Node]:
    """The roots and all that depends on one of them; `nodes` are in graph order."""
    found = set(roots)
    for node in nodes:
        if node not in found and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _ancestors(wanted: Sequence[Node], stop: set[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                stack.extend(node.all_input_nodes)
    return found
