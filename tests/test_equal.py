"""Which nodes of a graph are one value."""

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from qinductor.patterns.equal import Equal


def traced(function: Callable, *args: torch.Tensor) -> tuple[list[Node], Equal, GraphModule]:
    """(results of a function as nodes of its graph, which of these are equal, the graph)."""
    made = make_fx(function, tracing_mode="fake")(*args)
    (results,) = made.graph.output_node().args
    return list(results), Equal(made.graph), made


def pairs(function: Callable, *args: torch.Tensor) -> list[bool]:
    """Of each result after the first, whether it equals the first."""
    (first, *others), equal, _ = traced(function, *args)
    found = [equal(first, other) for other in others]
    assert found == [equal(other, first) for other in others]
    assert all(equal(node, node) for node in (first, *others))
    return found


X, Y = torch.ones(4, 8), torch.ones(4, 8)


def test_equal_chains() -> None:
    assert pairs(lambda x, y: [(x.abs() + 1).to(torch.int8) for _ in range(3)], X, Y) == [True] * 2


def test_views_of_one_value() -> None:
    def function(x, y):
        q = [(x * 2).view(32) for _ in range(2)]
        return [q[0], q[1].view(8, 4), (x.view(32) * 2), q[1].view(8, 4).t().contiguous()]

    assert pairs(function, X, Y) == [True, False, False]


def test_what_differs() -> None:
    def function(x, y):
        return [
            x * 2, y * 2, x * 3, x * 2.0, x + 2, x.t() * 2, x.to(torch.int8) * 2,
            torch.mul(x, y), torch.mul(y, x),
        ]  # fmt: skip

    assert pairs(function, X, Y) == [False] * 8
    assert pairs(lambda x, y: [x * -0.0, x * 0.0], X, Y) == [False]


def test_parts_and_made_constants() -> None:
    def function(x, y):
        def part(i):
            return x.split(2)[i] / torch.full((), 3.0) + torch.arange(8)

        return [part(0), part(0), part(1)]

    assert pairs(function, X, Y) == [True, False]


def test_tensors_that_the_graph_holds() -> None:
    def function(x, y):
        return [x / torch.tensor(c) for c in (3.0, 3.0, 4.0)]

    assert pairs(function, X, Y) == [True, False]


def test_random_values_are_equal_to_none() -> None:
    def function(x, y):
        return [x + torch.rand_like(x), x + torch.rand_like(x)]

    assert pairs(function, X, Y) == [False]


def test_memory_that_is_written_to_in_between() -> None:
    def function(x, y):
        first, second = x * 2, x * 2
        x.add_(1)
        return [first, second, x * 2]

    (first, second, third), equal, made = traced(function, X, Y)
    assert first is not second and equal(first, second) and not equal(first, third)
    third.replace_input_with(third.args[0], first.args[0])  # as if the write had no result
    assert not Equal(made.graph)(first, third)


def test_long_chains_are_no_error() -> None:
    def function(x, y):
        results = []
        for _ in range(2):
            z = x
            for i in range(600):
                z = z * i
            results.append(z)
        return results

    assert pairs(function, X, Y) == [False]
