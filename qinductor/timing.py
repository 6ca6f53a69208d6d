"""Times of calls: CUDA-graph replays on a GPU, a clock on a CPU; operands come from cold caches."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

COLD = 256 << 20  # bytes that calls rotate over, more than any cache holds
MOST = 64  # copies of the operands, at most
WINDOW = 2e-3  # seconds that one sample takes at least, where calls are shorter
SAMPLES = 7

Call = Callable[[], Any]


def copies(nbytes: int) -> int:
    """How many sets of operands of this size calls must rotate over to find them in no cache."""
    return max(2, min(MOST, -(-COLD // max(1, nbytes))))


def rotated(
    function: Callable[..., Any], *operands: torch.Tensor | Sequence[torch.Tensor]
) -> list[Call]:
    """Calls of a function, each on its own copy of the operands."""

    def held(operand: Any) -> list[torch.Tensor]:
        return [operand] if isinstance(operand, torch.Tensor) else list(operand)

    def copied(operand: Any) -> Any:
        made = [tensor.clone() for tensor in held(operand)]
        return made[0] if isinstance(operand, torch.Tensor) else made

    nbytes = sum(tensor.nbytes for operand in operands for tensor in held(operand))
    sets = [operands, *(tuple(map(copied, operands)) for _ in range(copies(nbytes) - 1))]
    return [lambda given=given: function(*given) for given in sets]  # type: ignore[misc]


def microseconds(calls: Sequence[Call], device: str) -> float:
    """Median microseconds of one of these calls, made in turn after all were made once."""
    return _by_graph(calls) if device == "cuda" else _by_clock(calls)


def _by_clock(calls: Sequence[Call]) -> float:
    def once() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start

    once()
    repeats = max(1, min(50, int(WINDOW / once())))
    return statistics.median(
        sum(once() for _ in range(repeats)) / (repeats * len(calls)) * 1e6 for _ in range(SAMPLES)
    )


def _by_graph(calls: Sequence[Call]) -> float:
    """The calls are captured several times over in one graph, which is replayed: neither Python
    nor a launch from the host is in the time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and takes memory that the capture must not ask for
            call()
        once = _elapsed(stream, lambda: [call() for call in calls])
        repeats = max(1, min(50, int(WINDOW / max(once, 1e-6))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for call in calls:
                    call()
        for _ in range(2):
            graph.replay()
        samples = [_elapsed(stream, graph.replay) for _ in range(SAMPLES)]
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(samples) / (repeats * len(calls)) * 1e6


def _elapsed(stream: torch.cuda.Stream, function: Call) -> float:
    """Seconds of device time between the stream's reaching the call and its end."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream.synchronize()
    start.record(stream)
    function()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
