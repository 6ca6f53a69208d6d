r"""activation -> codes and their scales, however it is spelled.

    x [.., 2 K]      gate, up                            x             gate, up
        |              |                                 |               |
    activation * up, rounded to y [.., K]                qinductor.quantize
        |        \                                         |       |      \
        |    amax / qmax, floors ... = s                 codes   scale   (zero)
        |        /        \                     ->
    y / s, rounded, clamped \
        |                    \
    cast to float8 or int8   all that reads s
        |

Probed: where y begins, what s is of the largest |y| of a token, group or tensor, how y is divided,
rounded and clamped, what makes y of the inputs. Proved: codes and scales, bit for bit, from the
operator's reference, on hostile rows. The farthest source that the operator has is taken along.
What else reads a node in between keeps it.
"""

from collections.abc import Iterator

from torch.fx import Graph, Node

from qinductor.errors import Refused
from qinductor.kernels.quantize import QUANTIZE
from qinductor.pattern import Fusion, Pattern, Planner
from qinductor.patterns.activation_formats.find import Finder
from qinductor.patterns.activation_formats.sources import candidates, is_normed
from qinductor.patterns.zero_points import is_quantiser
from qinductor.regions import Scope, behind


class QuantizePattern(Pattern):
    """Lowers quantisers of activations."""

    name = "quantize"
    default = "on"

    norms = False

    def __init__(self) -> None:
        self._find = Finder(self.norms)

    def candidates(self, graph: Graph, scope: Scope) -> Iterator[Node]:
        """Casts to codes of something that varies and was scaled before, and operators of libraries
        that quantise it."""
        yield from candidates(graph, scope)
        if not self.norms:
            yield from (n for n in graph.nodes if is_quantiser(n) and behind(n, scope)[1])

    def lower(self, node: Node, scope: Scope, planner: Planner) -> Fusion:
        """The lowering of one quantiser, or Refused."""
        if is_quantiser(node):
            raise Refused(
                f"a quantiser must be written in torch's operators; {node.target} takes its scale "
                "and zero point as they are, and computes in a way of its own"
            )
        found = self._find(node, scope)
        return Fusion(
            op=QUANTIZE,
            contract=found.contract,
            plan=planner(QUANTIZE, found.contract, found.m),
            inputs=found.inputs,
            replaced=found.replaced,
            region=found.region,
            evaluations=(found.evaluations, 0),
        )


class NormQuantizePattern(QuantizePattern):
    """Lowers quantisers of what an RMS norm makes, with the norm and the sum before it.

    Off unless it is asked for: a kernel adds the squares of a row in an order of its own, so that
    codes may differ from eager's by one step where a value lies next to the middle of two.
    """

    name = "norm_quantize"
    default = "off"
    norms = True

    def candidates(self, graph: Graph, scope: Scope) -> Iterator[Node]:
        """Those behind a mean and a reciprocal square root."""
        return (node for node in super().candidates(graph, scope) if is_normed(node))
