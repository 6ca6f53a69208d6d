"""Dynamo's graph: what its inputs are, and further compiles of it for other weights."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.source import AttrSource, LocalSource
from torch._functorch._aot_autograd import descriptors
from torch._guards import ChainedSource, TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from qinductor.regions import Leaf, Scope
from qinductor.weights import restored

STATIC = "_dynamo_static_input_type"
SOURCE = "_dynamo_source"  # of a placeholder: what of the user's it is
Holds = Callable[[Sequence[Any]], bool]  # arguments -> whether a compile is good for their sizes


class Retrace:
    """Compiles a Dynamo graph again, with the sizes that Dynamo made symbolic still symbolic.

    Dynamo's guards cover what the first compile assumed of those sizes. What a later one assumes
    beyond that is an expression that is evaluated at every call.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.graph = copied(gm)
        self.examples = [node.meta.get("example_value") for node in holders(self.graph)]
        self.symbolic = [i for i, e in enumerate(self.examples) if isinstance(e, torch.SymInt)]
        self.guarded: int | None = None  # how many guards Dynamo has

    def __call__(
        self, arguments: Sequence[Any], compiles: Callable[[GraphModule, list[Any]], Any]
    ) -> tuple[Any, Holds]:
        """(what `compiles` makes of the graph and its inputs, when it may be used).

        The inputs are fake but for those of which Dynamo left no fake value.
        """
        inputs = [a if e is None else e for a, e in zip(arguments, self.examples, strict=True)]
        mode: Any = detect_fake_mode(inputs)
        shapes = mode.shape_env
        if self.guarded is None:
            self.guarded = len(shapes.guards)
        with _disable_current_modes(), tracing(TracingContext(mode)):
            made = compiles(copied(self.graph), inputs)
        assumed = shapes.guards[self.guarded :]
        symbols = [self.examples[i] for i in self.symbolic]
        code = shapes.produce_guards_expression(symbols, guards=assumed) if assumed else None

        def holds(arguments: Sequence[Any]) -> bool:
            sizes = [arguments[i] for i in self.symbolic]
            return code is None or bool(shapes.evaluate_guards_expression(code, sizes))

        return made, holds


def names(gm: GraphModule) -> list[str]:
    """What the user calls each input, such as `L['self'].weight`; else the placeholder's name."""
    found = []
    for node in holders(gm):
        source: Any = getattr(node, SOURCE, None)
        name = getattr(source, "name", node.name)  # a method until torch 2.11
        found.append(str(name() if callable(name) else name))
    return found


def holders(gm: GraphModule) -> list[Node]:
    """The placeholders of a graph."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def copied(gm: GraphModule) -> GraphModule:
    """A copy with what Dynamo has noted at the graph, without its weak references to inputs."""
    made: Any = GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta = dict(gm.meta)
    made._param_name_to_source = getattr(gm, "_param_name_to_source", {})
    for old, new in zip(holders(gm), holders(made), strict=True):
        setattr(new, SOURCE, getattr(old, SOURCE, None))
    for node in made.graph.nodes:
        node.meta.pop("grapharg", None)  # they forbid swap_tensors
    return made  # type: ignore[no-any-return]


def scope_of(graph: Graph, gm: GraphModule, arguments: Sequence[Any]) -> Scope:
    """Which placeholders hold constants, by what AOTAutograd and Dynamo say of them."""
    dynamo = holders(gm)
    written = {
        argument
        for node in graph.nodes
        if node.op == "call_function" and getattr(node.target, "_schema", None) is not None
        and node.target._schema.is_mutable
        for argument in node.all_input_nodes[:1]
    }  # fmt: skip
    scope = Scope({}, {}, arguments, lambda r: restored(r.key, arguments))
    for node in (n for n in graph.nodes if n.op == "placeholder"):
        leaf = _leaf(node.meta.get("desc"))
        if leaf is None or leaf.index >= len(dynamo):
            scope.why[node] = "is no input of the compiled function"
        elif node in written:
            scope.why[node] = "is written to by the graph"
        elif not isinstance(arguments[leaf.index], torch.Tensor):
            scope.why[node] = "is a number"
        elif not _is_static(dynamo[leaf.index], arguments[leaf.index]):
            scope.why[node] = "is an argument, no parameter, buffer, attribute or closure"
        else:
            scope.leaves[node] = leaf
    return scope


def _leaf(description: Any) -> Leaf | None:
    if isinstance(description, descriptors.SubclassGetAttrAOTInput):
        base = _leaf(description.base)
        return base and Leaf(base.index, (*base.attributes, description.attr))
    if isinstance(description, descriptors.PlainAOTInput):
        return Leaf(description.idx)
    return None


def _is_static(node: Node, value: Any) -> bool:
    """Whether a Dynamo placeholder is no argument: a parameter, buffer, attribute of a module or of
    the object whose method it is, closure, global.

    An attribute of another argument is a state (a cache's positions, say). The resolver looks at
    each of them again at every call, so none is trusted to stay as it is.
    """
    if STATIC in (node.meta.get("tensor_dict") or {}) or isinstance(value, torch.nn.Parameter):
        return True
    source: Any = getattr(node, SOURCE, None)
    kind = getattr(source, "guard_source", None)
    kind = kind() if callable(kind) else kind  # a method until torch 2.11
    if kind is not None and (kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module()):
        return True
    while isinstance(source, ChainedSource):
        attribute, source = isinstance(source, AttrSource), source.base
        if attribute and isinstance(source, LocalSource) and source.local_name == "self":
            return True
    if not isinstance(source, LocalSource):
        return source is not None
    return not source.is_input or source.is_derefed_cell_contents
