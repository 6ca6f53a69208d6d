"""The rewrite: one operator node for a proved site, checked against what it replaces."""

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.errors import Refused
from qinductor.pattern import Lowering


def rewrite(graph: Graph, lowering: Lowering) -> list[torch.Tensor]:
    """Puts the operator in place of the site and appends its packed inputs as placeholders.

    Returns their fake values. Refused, with the graph unchanged, if the operator's dtype, shape or
    strides are not those of the value it replaces.
    """
    replaced = lowering.replaced
    old = replaced.meta["val"]
    mode = old.fake_mode
    operands = lowering.plan.operands(lowering.op, lowering.contract)
    with mode:
        fakes = [
            torch.empty(shape, dtype=dtype, device=old.device) for shape, dtype in operands.values()
        ]
        texts = str(lowering.contract), str(lowering.plan)
        target = getattr(torch.ops.qinductor, lowering.operator).default
        new = target(*(node.meta["val"] for node in lowering.inputs), fakes, *texts)
    _check(old, new, str(replaced.target))
    for node, operand in lowering.bypassed:
        _check(node.meta["val"], operand.meta["val"], str(node.target))
    holders = [_placeholder(graph, name, fake) for name, fake in zip(operands, fakes, strict=True)]
    with graph.inserting_before(replaced):
        node = graph.call_function(target, (*lowering.inputs, holders, *texts))
    node.meta = {**replaced.meta, "val": new}
    for absorbed, operand in lowering.bypassed:
        absorbed.replace_all_uses_with(operand)
    replaced.replace_all_uses_with(node)
    return fakes


def _check(old: torch.Tensor, new: torch.Tensor, what: str) -> None:
    """Refused unless both values have one dtype, shape and strides."""
    if old.dtype != new.dtype:
        raise Refused(f"{what} gives {old.dtype}, the operator {new.dtype}")
    pairs = [
        *zip(old.shape, new.shape, strict=False),
        *zip(old.stride(), new.stride(), strict=False),
    ]
    if old.dim() != new.dim() or not all(statically_known_true(a == b) for a, b in pairs):
        raise Refused(
            f"{what} gives {list(old.shape)} with strides {list(old.stride())}, the operator "
            f"{list(new.shape)} with strides {list(new.stride())}"
        )


def _placeholder(graph: Graph, name: str, fake: torch.Tensor) -> Node:
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(holders[-1]):
        node = graph.placeholder(f"packed_{name}_{len(holders)}")
    node.meta["val"] = fake
    return node
