"""What serving asks of a GPU: a call recorded as a CUDA graph, a rehearsal of it, memory."""

import contextlib
import dataclasses
import gc
import threading
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
        self.lock = threading.RLock()

    def rehearse(self, run: Run, pool: Any) -> Any:
        """Runs on our stream, with memory of a pool that is measured and dropped."""
        before = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(before)
        stream, memory = torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(pool, self.device)
        with self._workspaces(), stream, memory:
            out = run()
        before.wait_stream(self.stream)
        return out

    @contextlib.contextmanager
    def _workspaces(self) -> Iterator[None]:
        """cuBLAS takes its workspace of the pool within: outside, others may have it freed, as
        Inductor's trees do, and recorded products would go on writing to it."""
        torch.cuda.synchronize(self.device)
        torch._C._cuda_clearCublasWorkspaces()
        try:
            yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def record(self, run: Run) -> Recording:
        """Records a call. Errors: what capturing raises; what it took is free again."""
        graph = torch.cuda.CUDAGraph()
        enabled = gc.isenabled()
        gc.disable()  # a kernel that dies meanwhile would be unloaded
        try:
            with (
                self._workspaces(),
                torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ),
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
        with self.lock, torch.cuda.device(self.device):
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
        with self._workspaces():  # which are nobody's
            return torch.cuda.memory_allocated(self.device)

    def beside(self) -> int:
        """Bytes of the device that others than tensors take, CUDA graphs among them."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def free(self) -> None:
        """Gives memory that nothing uses back to the device."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


RECORDERS: dict[str, Callable[[torch.device], Any]] = {"cuda": Gpu}  # by type of device


def capturing() -> bool:
    """Whether somebody records what this thread does now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Compiles:
    """Counts what Dynamo compiles and Triton loads on one thread."""

    def __init__(self) -> None:
        self.count = 0
        self.thread = 0

    def _compiles(self, *arguments: Any) -> None:
        if threading.get_ident() == self.thread:
            self.count += 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Sees both within."""
        self.thread = threading.get_ident()
        handler: Any = torch._dynamo.callback.callback_handler
        handler.register_start_callback(self._compiles)
        try:
            from triton import knobs

            hooks: Any = knobs.runtime.kernel_load_start_hook
            hooks.add(self._compiles)
        except ImportError:
            hooks = None
        try:
            yield
        finally:
            handler.remove_start_callback(self._compiles)
            if hooks is not None:
                hooks.remove(self._compiles)

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Within it a compile is an error."""
        before, said = self.count, "something was compiled while a CUDA graph was recorded"
        try:
            yield
        except Exception as error:
            if self.count != before:
                raise QinductorError(f"{said}: {error}") from error
            raise
        if self.count != before:
            raise QinductorError(said)
