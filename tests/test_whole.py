"""What the values of a graph may be: its bounds hold for hostile inputs, and are no wider."""

import math
from collections.abc import Callable

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from qinductor.patterns.whole import Span, span

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = math.inf, math.nan
HOSTILE = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 126.5, 127.4, 127.5, -128.5, -129.0, 255.5, 1e4, -6e4,
           INF, -INF, NAN]  # fmt: skip


def spans(function: Callable[..., torch.Tensor], dtype: torch.dtype = FP32) -> Span:
    """The span of what a function makes of x, which all that it does make is held to."""
    x = torch.tensor(HOSTILE).to(dtype)
    graph = make_fx(
        function, decomposition_table=select_decomp_table(), tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )(x).graph  # fmt: skip
    (output,) = graph.find_nodes(op="output")[0].all_input_nodes
    found, value = span(output, {}), function(x).double()
    number = value[~value.isnan()]
    assert ((found.low <= number) & (number <= found.high)).all(), (found, number)
    assert found.nan or not value.isnan().any()
    assert not found.whole or (number == number.round()).all()
    return found


WHOLE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[float, float]]] = {
    "round": (lambda x: x.round(), (-INF, INF)),
    "rounded, clamped": (lambda x: x.round().clamp(-128, 127), (-128, 127)),
    "clamped, rounded": (lambda x: x.clamp(-128, 127).round(), (-128, 127)),
    "halves to even": (lambda x: x.clamp(-128.5, 126.5).round(), (-128, 126)),
    "floor": (lambda x: x.clamp(-127.5, 127.5).floor(), (-128, 127)),
    "ceil": (lambda x: x.clamp(-127.5, 127.5).ceil(), (-127, 128)),
    "trunc": (lambda x: x.clamp(-127.5, 127.5).trunc(), (-127, 127)),
    "one side": (lambda x: x.round().clamp(max=127), (-INF, 127)),
    "bounds at odds": (lambda x: x.round().clamp(5, 3), (3, 3)),
    "tensors": (
        lambda x: torch.clamp(x, torch.tensor(-8.0), torch.tensor(7.0)).round(), (-8, 7)),
    "minimum and maximum": (
        lambda x: torch.maximum(torch.minimum(x.round(), torch.full_like(x, 7)),
                                torch.zeros_like(x)), (0, 7)),
    "casts": (lambda x: x.clamp(-128, 127).to(BF16).round().float(), (-128, 127)),
    "a cast that rounds a bound": (lambda x: x.round().clamp(-257, 257).to(BF16), (-256, 256)),
    "int32": (lambda x: x.to(torch.int32).clamp(-128, 127), (-128, 127)),
    "int8": (lambda x: x.clamp(-9, 9).to(torch.int8), (-128, 127)),  # NaN may be any number
    "a zero added": (lambda x: x.round().clamp(-8, 7) + torch.zeros_like(x), (-8, 7)),
    "a shift": (lambda x: x.round().clamp(0, 15) - 8, (-8, 7)),
    "a negative": (lambda x: -x.round().clamp(-8, 7), (-7, 8)),
    "of two": (lambda x: x.round().clamp(0, 15) - x.floor().clamp(0, 15), (-15, 15)),
    "chosen": (lambda x: torch.where(x > 0, x.round().clamp(0, 9), -1.0), (-1, 9)),
    "views": (lambda x: x.round().clamp(-8, 7).view(1, -1).expand(2, -1), (-8, 7)),
    "bool": (lambda x: (x > 0).to(x.dtype), (0, 1)),
}  # fmt: skip
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda x: x.clamp(-128, 127),
    "half a bound": lambda x: x.round().clamp(-127.5, 127.5),
    "scaled": lambda x: x.round().clamp(-8, 7) * 0.5,
    "half added": lambda x: x.round().clamp(-8, 7) + 0.5,
    "times two": lambda x: torch.add(x.round().clamp(-8, 7), x.round(), alpha=0.5),
    "chosen": lambda x: torch.where(x > 0, x.round(), x),
    "exp": lambda x: x.round().exp(),
}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers(name: str, dtype: torch.dtype) -> None:
    function, bounds = WHOLE[name]
    found = spans(function, dtype)
    assert found.whole
    if name != "a cast that rounds a bound":
        assert (found.low, found.high) == bounds
    assert found.within(*bounds) and not found.within(0.25, 0.75)


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers(name: str) -> None:
    assert not spans(OTHERS[name]).whole


def test_numbers_that_are_never_nan() -> None:
    assert spans(lambda x: x.round().clamp(-8, 7)).nan
    assert not spans(lambda x: x.to(torch.int32).clamp(-8, 7).float()).nan
    assert not spans(lambda x: torch.full_like(x, 3)).nan
    assert spans(lambda x: x.round().clamp(torch.tensor(NAN), torch.tensor(7.0))).nan
    assert spans(lambda x: x.round() - x.round()).nan


def test_a_long_chain_ends() -> None:
    """As the sums of many layers do."""

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2000):
            x = x + x.round()
        return x

    assert not spans(layers).whole
