r"""logits of experts -> the k experts of each token and their weights, however it is spelled.

    x [T, H]   weight [n, H]                           x      weight
        \        /                                      |       |
    product, rounded to logits [T, n]                   |       |   bias
        |                                               |       |    |
    softmax, sigmoid, ...   bias [n]                   qinductor.router
        |     \            /                                |    |
        |      scores + bias, groups masked      ->    weights  indices
        |        |
        |      topk: indices [T, k]
        |     /         \
    gather, / sum, * scale     all that reads indices
        |
    weights [T, k]

Probed: the scores, whether they or the logits are chosen by, groups, how weights are made of what
was chosen. Proved: weights bit for bit and experts in order from the operator's reference, on
hostile rows: random, tied, extreme. The product is taken along where nothing else reads its logits
or the scores. Of a bias's values nothing is assumed.
"""

import contextlib
from collections.abc import Iterator

from torch.fx import Graph, Node

from qinductor.errors import Refused
from qinductor.kernels.router import ROUTER, Router
from qinductor.pattern import Fusion, Pattern, Planner
from qinductor.patterns.router_formats.anchors import candidates
from qinductor.patterns.router_formats.find import Finder, Found
from qinductor.patterns.router_formats.products import product_of
from qinductor.regions import Scope


class RouterPattern(Pattern):
    """Lowers routers of mixtures of experts."""

    name = "router"
    default = "on"

    def __init__(self) -> None:
        self._find = Finder()

    def candidates(self, graph: Graph, scope: Scope) -> Iterator[Node]:
        """What picks the k largest."""
        return candidates(graph)

    def lower(self, node: Node, scope: Scope, planner: Planner) -> Fusion:
        """The lowering of one router, or Refused."""
        found = self._find(node, scope)
        contract, inputs = found.contract, (found.logits,)
        if not found.needed and (made := product_of(contract, found.site.logits)) is not None:
            with contextlib.suppress(Refused):  # no provider has it: the product stays the graph's
                return _fusion(found, *made, planner)
        return _fusion(found, contract, inputs, planner)


def _fusion(found: Found, contract: Router, inputs: tuple[Node, ...], planner: Planner) -> Fusion:
    bias = found.site.bias
    inputs = inputs if bias is None else (*inputs, bias)
    product = (found.site.logits,) if contract.hidden else ()
    return Fusion(
        op=ROUTER,
        contract=contract,
        plan=planner(ROUTER, contract, found.m),
        inputs=inputs,
        replaced=found.replaced,
        region=(*product, *found.region),
        evaluations=(found.evaluations, 0),
    )
