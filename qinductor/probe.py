"""A region as a function of its codes and parameters, run on probes."""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from qinductor.errors import Refused
from qinductor.regions import CASTS, INTEGER, MOVES, Region, evaluate
from qinductor.rows import Prefix, Rows, Untracked

BUDGET = 40  # evaluations of one region, the two whole ones of `read` included
COUNTING = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class Reduced:
    """A region as a function of its codes and parameters.

    chains   parameter -> the dtypes it is converted to on its way into the arithmetic
    nodes    the function in order: fixed inputs (real values: indices), codes, parameters, the rest
    """

    def __init__(self, region: Region, code: Node) -> None:
        dependent = descendants(region.nodes, {code})
        self.region, self.code = region, code
        self.chains: dict[Node, set[torch.dtype]] = {}
        for node in (n for n in region.nodes if n in dependent):
            for source in node.all_input_nodes:
                if node is not code and source not in dependent:
                    narrowest, dtypes = _narrowest(source)
                    self.chains.setdefault(narrowest, set()).update(dtypes)
        given = {code, *self.chains}
        needed = _ancestors([region.output], given)
        moving = descendants(region.nodes, given) & needed - given
        order = [node for node in region.nodes if node in moving]
        self.fixed = [
            node
            for node in dict.fromkeys(s for other in order for s in other.all_input_nodes)
            if node not in moving and node not in given
        ]
        self.nodes = [*self.fixed, code, *self.chains, *order]

    def real(self, leaves: Sequence[torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Real values of parameters, fixed inputs and codes."""
        region, wanted = self.region, [self.code, *self.chains, *self.fixed]
        env = {**region.constants, **dict(zip(region.inputs, leaves, strict=True))}
        needed = _ancestors(wanted, set(env))
        nodes = [node for node in region.nodes if node in needed]
        return dict(zip(wanted, evaluate(nodes, env, wanted), strict=True))


class Prober:
    """Runs the reduced region on the first `rows` rows with chosen fills, and counts the runs.

    real   what `Reduced.real` gives
    spent  runs that earlier probers of this region took: they count against the budget
    """

    def __init__(
        self, reduced: Reduced, real: Mapping[Node, torch.Tensor], rows: int, spent: int
    ) -> None:
        region = reduced.region
        self.rows, self.evaluations = min(rows, region.shape[0]), spent
        prefix = Prefix(region.n_axis, rows) if rows < region.shape[0] else None
        try:
            self.function = Rows(reduced.nodes, region.output, prefix)
        except Untracked:
            self.rows = region.shape[0]
            self.function = Rows(reduced.nodes, region.output, None)
        self.region, self.code = region, reduced.code
        self.values = {n: self.function.take(n, t).cpu() for n, t in real.items()}
        self.bits, self.whole_words = _width(real[reduced.code], region)

    def like(self, node: Node, value: float) -> torch.Tensor:
        """A parameter filled with one value."""
        held = self.values[node]
        return torch.full(held.shape, value, dtype=torch.float32).to(held.dtype)

    def fill(self, value: int) -> torch.Tensor:
        """The code tensor with every code equal to `value`."""
        held = self.values[self.code]
        if not held.is_floating_point() and not self.whole_words:
            packed = torch.empty(held.shape, dtype=held.dtype)
            packed.view(torch.uint8).fill_(value | value << 4 if self.bits == 4 else value)
            return packed
        return self.like(self.code, value)

    def __call__(self, code: int, given: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """W[rows, K] in float64 for this code everywhere."""
        self.evaluations += 1
        if self.evaluations > BUDGET - 2:
            raise Refused(f"identification needs more than {BUDGET} evaluations of the region")
        env = {**self.values, **given, self.code: self.fill(code)}
        return self.region.oriented(self.function(env)).double()


def _width(codes: torch.Tensor, region: Region) -> tuple[int, bool]:
    """(bits of one packed code, whether each has a word of its own)."""
    elements = region.shape[0] * region.shape[1]
    if codes.numel() == elements:
        return 8, True
    return (8 if codes.numel() * codes.itemsize >= elements else 4), False


def _narrowest(node: Node) -> tuple[Node, set[torch.dtype]]:
    """The tensor that `node` moves or converts, and the dtypes it takes on the way."""
    dtypes = {node.meta["val"].dtype}
    while node.op == "call_function" and node.target in MOVES | CASTS:
        source = node.args[0]
        if not isinstance(source, Node):
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
