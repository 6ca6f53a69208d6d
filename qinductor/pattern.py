"""What a pattern family gives the core: candidates, and a lowering for each that is proved."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import Graph, Node

from qinductor.op import Op, Plan
from qinductor.regions import Leaf, Region, Scope

# (operator, contract, M or None where it is symbolic) -> the providers to run it, or Refused.
Planner = Callable[[Op, Any, int | None], Plan]


class Part(NamedTuple):
    """One of several products of an activation that one operator computes: `columns` of its result,
    viewed in `sizes`, are the value of `node`, which the candidate `product` leads to."""

    product: Node
    node: Node
    columns: int
    contract: str
    sizes: Sequence[int | Node] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Lowering:
    """A proved site, ready to be rewritten.

    op, contract, plan  what runs it
    operator            name of the torch operator: the op's own, or another form of it
    form                "plain"; "turned": the last two axes of activation and result are exchanged;
                        "batched": the rows of all batches are one product's; "turned batched"
    replaced            the node whose value the operator gives
    inputs              the operator's activations
    bypassed            (node, the operand that takes its place) for nodes the operator absorbs
    leaves, signature   the constants that are packed, and what is done with them
    weight              the region of the weight; its leaves come first in `leaves`
    pack                leaves' tensors -> {name: packed tensor}; proves again, or raises Refused. A
                        second argument is what `Op.restored` made of the weight, whose leaves then
                        hold no values
    packed              () -> the packed tensors of the present weights; explain does not call it
    evaluations         (on probes, whole) evaluations of the region that identification took now
    parts               the products that are computed together, in the order of their nodes,
                        `replaced` the first of these; none where there is one alone
    ahead               those of later candidates whose weights must be packed before this one's
                        operator is put into the graph
    """

    op: Op
    contract: Any
    plan: Plan
    operator: str
    form: str
    replaced: Node
    inputs: tuple[Node, ...]
    bypassed: tuple[tuple[Node, Node], ...]
    leaves: tuple[Leaf, ...]
    signature: str
    weight: Region
    pack: Callable[..., dict[str, torch.Tensor]]
    packed: Callable[[], dict[str, torch.Tensor]]
    evaluations: tuple[int, int]
    parts: tuple[Part, ...] = ()
    ahead: tuple["Lowering", ...] = ()
    views: tuple[Sequence[int | Node] | None, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Fusion:
    """A proved site whose operator takes no packed weight, and may have several results.

    op, contract, plan  what runs it; the torch operator bears the name of the op
    inputs              all that the operator takes, in its order; a number is a tensor of one
                        element, float32
    replaced            for each result in order the nodes that it takes the place of
    region              all nodes that the results depend on, up to the inputs
    evaluations         (on probes, whole) evaluations of the region that identification took now
    """

    op: Op
    contract: Any
    plan: Plan
    inputs: tuple[Node | float, ...]
    replaced: tuple[tuple[Node, ...], ...]
    region: tuple[Node, ...]
    evaluations: tuple[int, int]


class Pattern(Protocol):
    """A pattern family: one file in `patterns/`.

    name     its option
    default  "on" if everything it lowers is proved and within the product oracle, else "off"
    """

    name: str
    default: str

    def candidates(self, graph: Graph, scope: Scope) -> Iterable[Node]:
        """Anchors that a user would expect this family to lower."""

    def lower(self, node: Node, scope: Scope, planner: Planner) -> Lowering | Fusion:
        """The lowering of a candidate, or Refused with the first check that failed."""

    def settled(self, node: Node, reason: str | None) -> None:
        """What is left to do for a candidate that is lowered now (`reason` None). Of one that is
        not, whatever failed after `lower` perhaps: what was put into the graph for it comes out."""
        return None


def where(node: Node) -> str:
    """Module path and source line of a node, as far as the graph knows them."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = re.sub(r"^L\['\w+'\]\.?", "", stack[-1][0]) if stack else ""
    path = re.sub(r"(_modules|_parameters|_buffers)\['(\w+)'\]", r"\2", path)
    path = re.sub(r"\[(?:'(\w+)'|(\d+))\]", r".\1\2", path)
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    line = f"{lines[-1][0].rsplit('/', 1)[-1]}:{lines[-1][1]}" if lines else ""
    return " ".join(filter(None, [path or node.name, line]))
