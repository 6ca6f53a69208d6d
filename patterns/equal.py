"""Which nodes of a graph are one value: equal operators on equal arguments."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from qinductor.regions import VIEWS, attribute, digest, pure

DEEP = 64  # operators of a chain that are compared: a norm, a gate and a quantiser are about 40


class Equal:
    """Nodes of one graph that are one value, as far as no memory is written to in between."""

    def __init__(self, graph: Graph) -> None:
        self.place: dict[Node, int] = {}
        self.writes: dict[Node, int] = {}  # before each node
        self._known: dict[Node, tuple[Node, ...]] = {}
        writes = 0
        for i, node in enumerate(graph.nodes):
            self.place[node], self.writes[node] = i, writes
            writes += _writes(node)

    def __call__(self, a: Node, b: Node) -> bool:
        """Whether both hold the same elements in the same order of rows, as whatever views."""
        return origin(b) in self.of(origin(a))

    def of(self, node: Node, depth: int = DEEP) -> tuple[Node, ...]:
        """The nodes that are one value with this one, itself among them."""
        if node not in self._known:
            self._known[node] = self._of(node, depth) if depth else (node,)
        return self._known[node]

    def _of(self, node: Node, depth: int) -> tuple[Node, ...]:
        if node.op == "get_attr":
            others = node.graph.find_nodes(op="get_attr")
            return tuple(n for n in others if n.target == node.target or _held(n) == _held(node))
        if node.op != "call_function" or not _repeats(node):
            return (node,)
        names: dict[Node, Node] = {}
        first: dict[Node, Node] = {}
        for source in node.all_input_nodes:
            same = dict.fromkeys(self.of(source, depth - 1), source)
            names, first = names | same, first or same
        users = {user: None for source in first for user in source.users}
        if not first:
            users = dict.fromkeys(node.graph.find_nodes(op="call_function", target=node.target))
        text = _text(node, names)
        return tuple(
            user
            for user in users
            if user.target == node.target
            and self._writes(user) == self._writes(node)
            and _text(user, names) == text
        )

    def _writes(self, node: Node) -> int | None:
        """Writes before a node, or before what one that was put in since is made of."""
        while node not in self.writes and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return self.writes.get(node)


def origin(x: Node) -> Node:
    """What x is a view of."""
    while x.target in VIEWS:
        source = x.args[0]
        assert isinstance(source, Node)
        x = source
    return x


def _repeats(node: Node) -> bool:
    """Whether the node would compute the same value again; what has no tensors does."""
    if isinstance(node.target, torch._ops.OpOverload):
        return pure(node)
    return pure(node) or isinstance(node.meta.get("val"), (int, float, *torch.types.py_sym_types))


def _writes(node: Node) -> bool:
    """Whether the node may write to memory."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return node.op == "call_function" and not _repeats(node)


def _text(node: Node, names: dict[Node, Node]) -> str:
    """What a node computes, in the names of its arguments."""
    return repr(torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: names.get(n, n)))


def _held(node: Node) -> str:
    """Equal for constants of one dtype, shape and value."""
    value = attribute(node)
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return node.name
    return f"{value.dtype} {list(value.shape)} {digest(value)}"
