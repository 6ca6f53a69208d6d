"""A Dynamo graph kept for further compiles, which see all that the first saw but the weights."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

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
    ) -> tuple[Any, Holds | None]:
        """(what `compiles` makes of the graph and its inputs, when it may be used).

        The inputs are fake but for those of which Dynamo left no fake value.
        """
        inputs = [a if e is None else e for a, e in zip(arguments, self.examples, strict=True)]
        mode: Any = detect_fake_mode(inputs)
        shapes = mode.shape_env
        if self.guarded is None:
            self.guarded = len(shapes.guards)
        frozen, shapes.frozen = shapes.frozen, False  # or it would drop what is assumed from now on
        try:
            with _disable_current_modes(), tracing(TracingContext(mode)):
                made = compiles(copied(self.graph), inputs)
        finally:
            shapes.frozen = frozen
        assumed = shapes.guards[self.guarded :]
        symbols = [self.examples[i] for i in self.symbolic]
        code = shapes.produce_guards_expression(symbols, guards=assumed) if assumed else None
        if code is None:
            return made, None

        def holds(arguments: Sequence[Any]) -> bool:
            sizes = [arguments[i] for i in self.symbolic]
            return bool(shapes.evaluate_guards_expression(code, sizes))

        return made, holds


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
