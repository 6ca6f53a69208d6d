"""For tests of lowerings: a graph before and after our pass as stable text; the product oracle.

Nothing here needs a GPU: a graph for another target is traced on fake CUDA tensors, while the
weights behind them, on which regions are evaluated, are real and on the CPU.
"""

import contextlib
import copy
import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qinductor import tables
from qinductor.backend import Matching
from qinductor.options import Options
from qinductor.oracle import errors
from qinductor.passes import patches_of
from qinductor.report import Report

WIDTH = 96  # columns of a graph's text
OUTPUTS = 4096  # that errors are measured over, at least


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """What our pass makes of one graph: its text before and after, and the report."""

    before: str
    after: str
    report: Report


def rewritten(
    make_module: Callable[[], torch.nn.Module],
    *args: Any,
    target: str = "cpu",
    options: Any = None,
    dynamic: bool | None = None,
) -> Rewritten:
    """Traces `make_module()(*args)` as torch.compile does, without gradients, and runs our pass.

    make_module  makes the module; its tensors and those of `args` are plain tensors on the CPU
    target       as in Options; for all but "cpu" the graph is traced on fake CUDA tensors, which a
                 torch without CUDA cannot index with brackets (write unsqueeze, narrow, select)
    options      the backend's other options; dynamic as for torch.compile
    The result is that of every machine: no table of measured times is read.
    Errors: what Dynamo raises for a graph break; OptionError for bad options.
    """
    chosen = dataclasses.replace(Options.of(options, None), target=target)
    module = make_module().eval()
    real: dict[int, torch.Tensor] = {}
    mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if target != "cpu":
        mode = FakeTensorMode(shape_env=ShapeEnv())
        module = copy.deepcopy(module)
        with mode:
            args, real = _on_fake_cuda(module, args)
    found: list[Rewritten] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        values = [real.get(id(value), value) for value in inputs]
        matching = _Recording(gm, values, chosen, packs=False)
        with mock.patch.object(joint_graph, "lazy_init"), contextlib.suppress(_Stop), untuned():
            compile_fx(gm, list(inputs), config_patches=patches_of(chosen, matching))
        found.append(Rewritten(matching.before, matching.after, matching.report))
        return gm.forward

    torch._dynamo.reset()
    with mode, torch.no_grad():
        torch.compile(module, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    torch._dynamo.reset()
    return found[0]


def untuned() -> contextlib.AbstractContextManager[Any]:
    """Plans made meanwhile are those of a machine of which no table knows."""
    return mock.patch.object(tables, "device", lambda target: None)


class _Stop(BaseException):
    """Ends a compile once our pass has run: Inductor's own passes would look for the device."""


class _Recording(Matching):
    """Our pass, with the text of the graph before and after it."""

    before = after = ""

    def __call__(self, graph: Graph) -> None:
        if any("desc" not in holder.meta for holder in graph.find_nodes(op="placeholder")):
            return super().__call__(graph)  # the body of a higher-order operator
        self.before, self.rewritten = text(graph), None
        super().__call__(graph)
        self.after = text(self.rewritten or graph)
        raise _Stop


def _on_fake_cuda(
    module: torch.nn.Module, args: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[int, torch.Tensor]]:
    """(fake arguments, id of a fake weight -> the real one); the module's tensors become fake."""
    fakes: dict[int, torch.Tensor] = {}
    real: dict[int, torch.Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in fakes:  # tied weights stay tied
            size, stride, dtype = value.size(), value.stride(), value.dtype
            made = torch.empty_strided(size, stride, dtype=dtype, device="cuda")
            if isinstance(value, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=False)
            fakes[id(value)], real[id(made)] = made, value
        return fakes[id(value)]

    given = tuple(fake(value) for value in args)
    real.clear()  # arguments have no value in the graph
    for part in module.modules():
        for held in (part._parameters, part._buffers, vars(part)):
            held.update({name: fake(value) for name, value in held.items()})
    return given, real


def text(graph: Graph) -> str:
    """A graph as stable text: one numbered line a node, symbols renamed s0, s1 in their order.

    A line is `%number: dtype[shape]@device = operator(arguments)`, without the device for the CPU.
    An operator of ours has its contract and its providers on lines of their own; the M up to which
    a provider is preferred is left out: it is measured, and no matter of the graph.
    """
    numbers = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    symbols: dict[sympy.Basic, sympy.Symbol] = {}
    return "\n".join(line for node in graph.nodes for line in _lines(node, numbers, symbols))


def _lines(
    node: Node, numbers: dict[Node, str], symbols: dict[sympy.Basic, sympy.Symbol]
) -> Iterator[str]:
    def show(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(show, value))}]"
        return numbers[value] if isinstance(value, Node) else _size(value, symbols)

    value = node.meta.get("val")
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        place = "" if value.device.type == "cpu" else f"@{value.device.type}"
        kind = f"{str(value.dtype).removeprefix('torch.')}{show(tuple(value.shape))}{place}"
    elif isinstance(value, (int, torch.SymInt)):
        kind = show(value)
    arguments = [show(a) for a in node.args] + [f"{k}={show(v)}" for k, v in node.kwargs.items()]
    below: list[str] = []
    if str(node.target).startswith("qinductor."):
        arguments, below = arguments[:-2], arguments[-2:]  # the packed tensors come before
        plan = re.sub(r"\d+:|@[^,]+", "", below[-1]).split(",")  # who runs it, not from which M
        below[-1] = ", ".join(dict.fromkeys(plan))
    target = node.target
    name = str(target) if isinstance(target, (str, torch._ops.OpOverload)) else target.__name__
    what = f"{name}({', '.join(arguments)})"
    if node.op == "placeholder":  # AOTAutograd's names depend on how many there are; ours do not
        ours = re.match(r"packed_\w+(?=_\d+$)", str(node.target))
        what = f"placeholder {ours[0]}" if ours else "placeholder"
    elif node.op != "call_function":
        what = f"{node.op} {', '.join(arguments) or node.target}"
    yield from _wrapped(f"{numbers[node]}: {kind} = {what}" if node.op != "output" else what)
    for line in below:
        yield from _wrapped(line, "    ")


def _wrapped(line: str, indent: str = "") -> list[str]:
    """The line, broken at blanks; continuation lines are indented."""
    return textwrap.wrap(
        line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _size(value: Any, symbols: dict[sympy.Basic, sympy.Symbol]) -> str:
    """A value as text; in symbolic sizes the symbols are renamed in the order they come in."""
    if not isinstance(value, torch.SymInt):
        return str(value)
    expression = value.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(symbol, sympy.Symbol(f"s{len(symbols)}", integer=True, positive=True))
    return str(expression.xreplace(symbols))


def product_oracle(
    ours: torch.Tensor,
    eager: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Holds a product to eager's accuracy: both against the float64 product of the same operands.

    ours, eager   [..., N], of one dtype; at least 4096 elements, or the errors say little
    x, w          [..., K] and [N, K], as rounded as the graph has them
    bias, scale   [N]: the result is x . w * scale + bias
    Ours may have 1.5 times eager's rms error and twice its largest one (nothing where eager is
    exact throughout), and must not be finite where eager is not.
    Errors: ValueError for operands that cannot be judged; AssertionError with the metric, its
    limit, the worst coordinate and both values there.
    """
    if ours.numel() < OUTPUTS:
        raise ValueError(f"wanted at least {OUTPUTS} outputs to measure over, got {ours.numel()}")
    if (ours.shape, ours.dtype) != (eager.shape, eager.dtype):
        raise AssertionError(
            f"ours is {ours.dtype}{list(ours.shape)}, eager {eager.dtype}{list(eager.shape)}"
        )
    exact = x.double() @ w.double().T
    exact = exact if scale is None else exact * scale.double()
    exact = exact if bias is None else exact + bias.double()
    found = errors(ours, eager, exact)
    over = found.over()
    if over is not None:
        at = found.at
        raise AssertionError(
            f"{over}; worst at {list(at)}: ours {float(ours[at])!r}, "
            f"eager {float(eager[at])!r}, float64 {float(exact[at])!r}"
        )
