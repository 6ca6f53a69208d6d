"""A mixture of experts that is written as a loop over experts -> grouped products.

    for e in experts:                            ids -> sort -> tokens, offsets
        t, k = where(ids == e)                   x[tokens]
        y = mm(act(mm(x[t], W1[e])), W2[e])  ->  qinductor.dequant_grouped_matmul(W1), act, (W2)
        out[t] += y * weights[t, k]              out + rows of each token, in the order of experts

Probed: which tokens each turn takes, as a function of the choices. Compared: the turns, operator by
operator; each row must be computed by itself. Proved: the weight of every expert, bit for bit. A
loop is lowered whole, or stays as it is.
"""

import dataclasses
from collections.abc import Iterator

from torch.fx import Graph, Node

from qinductor.errors import Refused
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL
from qinductor.pattern import Lowering, Planner
from qinductor.patterns.dequant_matmul import proved
from qinductor.patterns.loops.choices import choices_of
from qinductor.patterns.loops.find import (
    Loop,
    Values,
    again,
    checks,
    loops,
    unknown,
    used_elsewhere,
)
from qinductor.patterns.loops.grouped import Grouped
from qinductor.patterns.loops.rows import PRODUCTS
from qinductor.patterns.loops.turns import Chain, chain_of
from qinductor.patterns.products import is_quantized, sides
from qinductor.patterns.siblings import Siblings
from qinductor.regions import Scope, behind, describe

FOUND = "qinductor loop"


class ExpertLoopsPattern:
    """Lowers loops over experts whose weights are constant and quantised."""

    name = "expert_loops"
    default = "on"

    def candidates(self, graph: Graph, scope: Scope) -> Iterator[Node]:
        """The products of the first turn of every loop; what it ends in, if turns differ."""
        if not any(map(unknown, graph.nodes)):
            return
        values = Values(graph)
        for loop in list(loops(graph, values)):
            found = _Found(loop, values)
            for node in found.sites:
                node.meta[FOUND] = found
                yield node

    def lower(self, node: Node, scope: Scope, planner: Planner) -> Lowering:
        """The lowering of the product of all turns, once all of the loop's are proved."""
        found: _Found = node.meta[FOUND]
        if found.reason is not None:
            raise Refused(found.reason)
        if not found.lowerings:
            found.lower(scope, planner)
        lowering = found.lowerings.pop(node)
        return dataclasses.replace(lowering, ahead=tuple(found.lowerings.values()))

    def settled(self, node: Node, reason: str | None) -> None:
        """Takes the turns out of the graph once all is lowered, or else the grouped form."""
        found: _Found = node.meta[FOUND]
        if reason is not None:
            found.refused(reason)
        elif not found.lowerings:
            found.finish()


class _Found:
    """One loop.

    sites      what its rows in the report stand for
    reason     why it is not lowered
    lowerings  of its products that are not in the graph yet
    grouped    the grouped form, which nothing reads until all products are lowered
    """

    def __init__(self, loop: Loop, values: Values) -> None:
        self.loop, self.values = loop, values
        self.reason: str | None = None
        self.sites: list[Node] = []
        self.lowerings: dict[Node, Lowering] = {}
        self.grouped: Grouped | None = None
        try:
            chain = chain_of(loop, values)
            products = [n for n in chain.steps if n.target in PRODUCTS]
            self.sites += [n for n in products if sides(n)[1] in chain.each]
        except Refused as refusal:
            self.reason = refusal.reason
            self.sites.append(loop.result)

    def lower(self, scope: Scope, planner: Planner) -> None:
        """Puts the grouped form beside the loop, with a lowering of each product. Refused where one
        cannot be lowered."""
        loop = again(self.loop, self.values)
        chain = chain_of(loop, self.values)
        _check_weights(chain, scope)
        other = used_elsewhere(loop, chain.inside)
        if other is not None:
            raise Refused(
                f"what a loop has in the midst of it must be used there alone; {other.name} "
                f"({other.target}) reads it, too"
            )
        if len({turn.adds for turn in loop.turns}) > 1:
            raise Refused("turns of the loop differ in how they add")
        self.grouped = Grouped(loop, chain, choices_of(loop, chain, self.values), scope)
        lower = Siblings(
            DEQUANT_MATMUL, lambda node: proved(node, scope), lambda node: sides(node)[0], planner
        )
        self.lowerings = {site: lower(node) for site, node in self.grouped.products.items()}

    def finish(self) -> None:
        """Puts the grouped form in place of the loop."""
        assert self.grouped is not None
        loop = self.grouped.loop
        loop.result.replace_all_uses_with(self.grouped.result)
        _erase(loop, self.grouped.chain)

    def refused(self, reason: str) -> None:
        """Takes the grouped form out again, and lowers none of the other products."""
        self.reason = reason
        self.lowerings.clear()
        if self.grouped is not None:
            self.grouped.undo()


def _check_weights(chain: Chain, scope: Scope) -> None:
    """Refused if the weight of a product is no constant of each turn's own that has codes."""
    for step in chain.steps:
        if step.target not in PRODUCTS:
            continue
        weight = sides(step)[1]
        if weight not in chain.each and weight not in chain.shared:
            raise Refused(f"{step.name} multiplies rows of a turn by {describe(weight)} of it")
        for node in chain.each.get(weight, ()):
            varying = behind(node, scope)[1]
            if varying:
                names = ", ".join(n.name for n in varying[:3])
                raise Refused(f"weights of experts must be made of constants; {names} varies")
            if not is_quantized(node, scope):
                raise Refused(
                    f"weights of experts must be quantised; {node.name} {describe(node)} is made "
                    "of no codes"
                )


def _erase(loop: Loop, chain: Chain) -> None:
    """Takes the turns out of the graph, with all that checks how many rows they have."""
    dead = set(chain.inside)
    stack = list(dead)
    while stack:
        for user in stack.pop().users:
            if user not in dead and checks(user):
                dead.add(user)
                stack.append(user)
    links = [turn.before for turn in loop.turns[1:]]
    while links:
        link = links.pop()
        if link not in dead and link is not loop.start:
            dead.add(link)
            links.extend(link.all_input_nodes)
    graph = loop.result.graph
    for node in reversed(list(graph.nodes)):
        if node in dead and not node.users:
            graph.erase_node(node)
