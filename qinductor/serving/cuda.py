"""What serving asks of a GPU: a call recorded as a CUDA graph, a rehearsal of it, memory."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qinductor.errors import QinductorError

Run = Callable[[], Any]


@dataclasses.dataclass(eq=False)
class Recording:
    """A recorded call: `outputs` lie in memory that every replay writes."""

    replay: Callable[[], None]
    outputs: Any
    reset: Callable[[], None]


class Gpu:
    """One device, a stream of our own, and the pool that all recordings share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.last: torch.cuda.Stream | None = None  # on which a replay was started

    def ready(self) -> None:
        """cuBLAS takes its workspaces now, one for each stream, or they would be counted."""
        for stream in (torch.cuda.current_stream(self.device), self.stream):
            with torch.cuda.stream(stream):
                for dtype in (torch.bfloat16, torch.float32):
                    one = torch.ones(16, 16, device=self.device, dtype=dtype)
                    torch.addmm(one, one, one)
        torch.cuda.synchronize(self.device)

    def rehearse(self, run: Run, pool: Any) -> Any:
        """Runs on our stream, with memory of a pool that is measured and dropped."""
        before = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(pool, self.device):
            out = run()
        before.wait_stream(self.stream)
        return out

    def record(self, run: Run) -> Recording:
        """Records a call. Errors: what capturing raises; what it took is free again."""
        graph = torch.cuda.CUDAGraph()
        enabled = gc.isenabled()
        gc.disable()  # a kernel that dies meanwhile would be unloaded
        try:
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                outputs = run()
        except BaseException:
            del graph
            torch.cuda.empty_cache()
            raise
        finally:
            if enabled:
                gc.enable()
        return Recording(graph.replay, outputs, graph.reset)

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """On any stream: replays share memory, so one waits for another's end."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            if self.last is not None and self.last != stream:
                stream.wait_stream(self.last)
            self.last = stream
            yield

    def scratch(self) -> Any:
        """A pool for `rehearse`."""
        return torch.cuda.MemPool()

    def held(self, pool: Any = None) -> int:
        """Bytes of a pool, by default of that of the recordings."""
        handle = self.pool if pool is None else pool.id
        return sum(part["total_size"] for part in torch.cuda.memory_snapshot(handle))

    def allocated(self) -> int:
        """Bytes of all tensors on the device."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)

    def free(self) -> None:
        """Gives memory that nothing uses back to the device."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


RECORDERS: dict[str, Callable[[torch.device], Any]] = {"cuda": Gpu}  # by type of device


def capturing() -> bool:
    """Whether somebody records what this thread does now."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Compiles:
    """Counts Dynamo's compiles and kernels that Triton loads; raises for one while `forbidden`."""

    def __init__(self) -> None:
        self.loaded = 0
        self.forbidden = False

    @property
    def count(self) -> int:
        """Both until now."""
        return self.loaded + int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def _load(self, module: Any, function: Any, name: str, *rest: Any) -> None:
        self.loaded += 1
        if self.forbidden:
            raise QinductorError(f"{name} was to be loaded while a CUDA graph was recorded")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Sees what Triton loads."""
        try:
            from triton import knobs
        except ImportError:
            yield
            return
        hooks: Any = knobs.runtime.kernel_load_start_hook
        hooks.add(self._load)
        try:
            yield
        finally:
            hooks.remove(self._load)

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Within it a compile is an error."""
        before, self.forbidden = self.count, True
        try:
            yield
            if self.count != before:
                raise QinductorError("a graph was compiled while a CUDA graph was recorded")
        finally:
            self.forbidden = False
