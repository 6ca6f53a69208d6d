"""A region run on chosen rows: its symbolic sizes are replaced, a large static M made smaller."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from qinductor.errors import Refused
from qinductor.regions import MOVES, VIEWS, aten, attribute, describe, digest

REDUCTIONS = {
    aten.amax.default, aten.amin.default, aten.aminmax.default, aten.max.default, aten.max.dim,
    aten.min.default, aten.min.dim, aten.mean.dim, aten.mean.default, aten.sum.dim_IntList,
    aten.linalg_vector_norm.default,
}  # fmt: skip
CLAMPS = {
    aten.clamp_min.default, aten.clamp_max.default, aten.clamp_min.Tensor, aten.clamp_max.Tensor,
    aten.clamp.default, aten.clamp.Tensor, aten.minimum.default, aten.maximum.default,
}  # fmt: skip
LARGEST = 1 << 16  # elements of a static graph that it is run with as it is; with fewer rows above
MOST = torch.finfo(torch.float32).max  # of a literal that a contract can have
EMPTY = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip
GIVEN = 0.0213  # a scale that a region is given
USUAL = 8  # for a symbol whose value is not known
SIZES = (int, torch.SymInt)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fixed(size: Any) -> int | None:
    """A size that is a number, also where a symbol was found to be one; else None."""
    return None if has_free_symbols(size) else int(size)


def number(size: Any, symbols: Mapping[sympy.Symbol, int]) -> int:
    """A size with its symbols replaced, by USUAL where they are not among the given ones."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    given = {symbol: symbols.get(symbol, USUAL) for symbol in expression.free_symbols}
    try:
        return int(expression.xreplace(given))
    except ZeroDivisionError:
        raise Refused(f"the size {size} must have a value for {given}") from None


def count(value: torch.Tensor) -> int:
    """The elements of a tensor in the call that was traced; USUAL for what is not known of it."""
    return math.prod(_hint(size) for size in value.shape)


def _hint(size: Any) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint if size.node.has_hint() else None
    return USUAL if hint is None else int(hint)


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """Outputs of a graph as a function of nodes in it.

    inputs    what it is a function of, [..., width] each with the same number of rows
    given     tensors that it reads beside them, parameters, buffers or arguments: vectors, then
              those of one element
    outputs   what it gives
    nodes     what is computed, in graph order
    constants tensors that the graph itself holds
    whole     whether a run takes all rows of a static graph, however many
    instead   operator -> what is run in its place
    """

    inputs: tuple[Node, ...]
    given: tuple[Node, ...]
    outputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    constants: dict[Node, torch.Tensor]
    whole: bool = False
    instead: Mapping[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def rows(self, wanted: int) -> int:
        """The number of rows that a run takes, about as many as are wanted."""
        return math.prod(self.lead(self.inputs[0], self.symbols(wanted))[:-1])

    def symbols(self, wanted: int) -> dict[sympy.Symbol, int]:
        """Values of the symbols for about so many rows."""
        shape = self.inputs[0].meta["val"].shape
        free = [s.node.expr.free_symbols for s in shape[:-1] if isinstance(s, torch.SymInt)]
        symbols = sorted(set().union(*free), key=str)
        found = dict.fromkeys(symbols, 2)
        if symbols:
            unit = math.prod(number(s, {**found, symbols[0]: 1}) for s in shape[:-1])
            found[symbols[0]] = max(2, -(-wanted // max(1, unit)))
        return found

    def lead(self, node: Node, symbols: Mapping[sympy.Symbol, int]) -> list[int]:
        """The shape of an input in a run; a static one is made smaller where it is large."""
        shape = node.meta["val"].shape
        sizes = [number(size, symbols) for size in shape]
        if not (self.whole or symbols) and math.prod(sizes) > LARGEST and len(sizes) > 1:
            axis = max(range(len(sizes) - 1), key=sizes.__getitem__)
            sizes[axis] = max(1, LARGEST * sizes[axis] // math.prod(sizes))
        return sizes

    def __call__(
        self, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """The outputs for inputs [rows, width], where rows is a number that `rows` returned; those
        of several runs for inputs [runs, rows, width]."""
        if tensors[0].dim() == 3:
            return list(torch.vmap(lambda *parts: self(parts, given))(*tensors))
        symbols = self.symbols(len(tensors[0]))
        env: dict[Node, Any] = dict(self.constants)
        for node, tensor in zip(self.inputs, tensors, strict=True):
            env[node] = tensor.reshape(self.lead(node, symbols))
        env.update(zip(self.given, given, strict=True))
        run = _Run(env, symbols, self.instead)
        for node in self.nodes:
            if node not in env:
                env[node] = run(node)
        return [env[node] for node in self.outputs]

    def filled(self, value: float) -> list[torch.Tensor]:
        """A number for what is given."""
        held = [node.meta["val"] for node in self.given]
        return [torch.full(tensor.shape, value).to(tensor.dtype) for tensor in held]

    def text(self) -> str:
        """Equal for two functions that run the same operators on values of the same kind, on the
        same kind of device, whose arithmetic may be its own."""
        index = {node: i for i, node in enumerate((*self.inputs, *self.given, *self.nodes))}

        def show(value: Any) -> str:
            return f"%{index[value]}" if value in index else str(value.meta["val"])

        lines = []
        for node in index:
            arguments = torch.fx.node.map_arg((node.args, dict(node.kwargs)), show)
            ours = node in self.inputs or node in self.given
            what = "" if ours or node in self.constants else f"{node.target} {arguments}"
            lines.append(f"{what} {describe(node)} {digest(self.constants.get(node))}")
        device = self.outputs[0].meta["val"].device.type
        return "\n".join([device, *lines, *(str(index[node]) for node in self.outputs)])


def function(
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    order: Sequence[Node],
    vectors: bool = False,
    ends: Collection[Node] = (),
) -> Function:
    """The function from some nodes to others; `order` holds all behind the outputs.

    vectors  whether it may depend on vectors beside them
    ends     nodes that are given, whatever makes them
    Refused if it depends on any other tensor of more than one element.
    """
    needed, stack = set(), list(outputs)
    while stack:
        node = stack.pop()
        if node not in needed and node not in inputs:
            needed.add(node)
            behind = () if node in ends else node.all_input_nodes
            stack.extend(n for n in behind if not isinstance(n.meta.get("val"), SIZES))
    given, nodes, constants = [], [], {}
    for node in (n for n in order if n in needed):
        value = node.meta.get("val")
        if node in ends:
            given.append(node)
        elif node.op == "get_attr":
            held = attribute(node)
            if isinstance(held, FakeTensor):
                raise Refused(f"{node.name} is a constant of unknown value")
            constants[node] = held.detach().cpu()
            nodes.append(node)
        elif node.op == "placeholder":
            if isinstance(value, torch.Tensor):
                given.append(node)
                if value.numel() != 1 and not (vectors and value.dim() == 1):
                    raise Refused(f"the codes also depend on {node.name}, {describe(node)}")
        elif isinstance(value, (torch.Tensor, list, tuple)):
            nodes.append(node)
    given.sort(key=lambda n: n.meta["val"].numel() == 1)
    return Function(tuple(inputs), tuple(given), tuple(outputs), tuple(nodes), constants)


class Remembered:
    """A function that is run once for what has one name.

    runs  how many there were
    """

    def __init__(self, function: Function) -> None:
        self.function, self.runs = function, 0
        self._known: dict[Any, list[torch.Tensor]] = {}

    def __call__(
        self, name: Any, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """The outputs for inputs of this name."""
        if name not in self._known:
            self.runs += 1
            self._known[name] = self.function(tensors, given)
        return self._known[name]


class Prober:
    """Runs regions on probes; what is found out about equal ones is found out once.

    runs  of regions so far
    """

    def __init__(self) -> None:
        self.runs = 0
        self._known: dict[str, Any] = {}

    @contextlib.contextmanager
    def asking(self, region: Function) -> Iterator[Remembered]:
        """A region whose runs are counted."""
        asked = Remembered(region)
        try:
            yield asked
        finally:
            self.runs += asked.runs

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returns or how it refuses, for regions of one text."""
        if key not in self._known:
            try:
                self._known[key] = make()
            except Refused as refusal:
                self._known[key] = refusal
        found = self._known[key]
        if isinstance(found, Refused):
            raise found
        return found


class _Run:
    """One run: every node on the sizes that this run has."""

    def __init__(
        self,
        env: dict[Node, Any],
        symbols: Mapping[sympy.Symbol, int],
        instead: Mapping[Any, Callable[..., Any]],
    ) -> None:
        self.env, self.symbols, self.instead = env, symbols, instead

    def __call__(self, node: Node) -> Any:
        def real(value: Any) -> Any:
            if isinstance(value, Node):
                held = value.meta.get("val")
                return self.env[value] if value in self.env else number(held, self.symbols)
            if isinstance(value, torch.SymInt):
                return number(value, self.symbols)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        held: Any = torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), real)
        args, kwargs = held
        if not self.symbols and node.target in VIEWS | {aten.expand.default}:
            args = (args[0], self._sizes(node, self.env[node.all_input_nodes[0]]))
        if node.target is aten.div.Tensor and _by_number(node):
            wide = args[0].to(torch.float32)
            return (wide * torch.tensor(args[1]).reciprocal()).to(node.meta["val"].dtype)
        target: Any = self.instead.get(node.target, node.target)
        made: Any = target(*args, **kwargs)
        if node.target in EMPTY:  # what nothing has been written to is told from zeros
            made.untyped_storage().fill_(0x5A)
        return made

    def _sizes(self, node: Node, source: torch.Tensor) -> list[int]:
        """The sizes of a view of a source that has fewer rows than in the graph."""
        out = [int(size) for size in node.meta["val"].shape]
        traced = [int(size) for size in node.all_input_nodes[0].meta["val"].shape]
        changed = [i for i, size in enumerate(traced) if source.shape[i] != size]
        if not changed:
            return out
        (axis,) = changed
        start, end = math.prod(traced[:axis]), math.prod(traced[: axis + 1])
        if node.target is aten.expand.default:
            out[axis + len(out) - len(traced)] = source.shape[axis]
            return out
        ends = [math.prod(out[: i + 1]) for i in range(len(out))]
        inside = [i for i, e in enumerate(ends) if e > start and e // out[i] < end and out[i] > 1]
        largest = max(inside, key=out.__getitem__)
        out[largest] = out[largest] * source.shape[axis] // traced[axis]
        return out


def _by_number(node: Node) -> bool:
    """Whether CUDA multiplies by the reciprocal of a number, in float32, where a CPU divides."""
    value, (x, y) = node.meta["val"], node.args[:2]
    narrow = value.dtype in (torch.float32, torch.bfloat16, torch.float16)
    whole = isinstance(x, Node) and x.meta["val"].dtype == value.dtype
    return value.device.type == "cuda" and narrow and whole and isinstance(y, (int, float))


def same(ours: torch.Tensor, region: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one dtype hold the same bits, or nan both."""
    bits = BITS[ours.dtype.itemsize]
    equal: torch.Tensor = ours.contiguous().view(bits) == region.contiguous().view(bits)
    if ours.dtype.is_floating_point:
        equal = equal | (ours.float().isnan() & region.float().isnan())
    return equal


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What a region computes with: literals, and what it computes of them alone.

    bounds  those of them that it clamps by
    """

    every: list[float]
    bounds: list[float]


def numbers(region: Function) -> Numbers:
    """The numbers of a region."""
    every: set[float] = set()
    bounds: set[float] = set()
    run = _Run(dict(region.constants), {}, region.instead)

    def keep(value: Any, into: set[float]) -> None:
        value = run.env.get(value) if isinstance(value, Node) else value
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        if known and abs(value) <= MOST:
            into.add(float(value))

    for node in region.nodes:
        value: Any = node.meta.get("val")
        one = isinstance(value, torch.Tensor) and count(value) == 1
        if one and node not in run.env and all(n in run.env for n in node.all_input_nodes):
            run.env[node] = run(node)
        if node.op == "call_function" and node.target not in REDUCTIONS | MOVES:
            for into in (every, bounds) if node.target in CLAMPS else (every,):
                for argument in (*node.args, *node.kwargs.values()):
                    keep(argument, into)
    return Numbers(sorted(every), sorted(bounds))
