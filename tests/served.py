"""What tests of serving share: a recorder for the CPU, models, what a warm-up did."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import BF16, Holder, Random

from qinductor.serving import cuda
from qinductor.serving.padding import distinct


class Recorder:
    """Stands in for a GPU: a replay runs what was recorded, on the memory that it was recorded on.

    fails  sizes of first axes -> what recording them raises
    """

    def __init__(self, device: torch.device, fails: dict[int, Callable[[], Any]]) -> None:
        self.device, self.fails = device, fails
        self.lock = threading.RLock()

    def rehearse(self, run: Callable[[], Any], pool: Any) -> Any:
        return run()

    def record(self, run: Callable[[], Any]) -> cuda.Recording:
        outputs = run()
        self.fails.get(outputs[0].shape[0], lambda: None)()

        def replay() -> None:
            for held, out in zip(outputs, run(), strict=True):
                if isinstance(held, torch.Tensor):
                    distinct(held).copy_(distinct(out))

        return cuda.Recording(replay, outputs, lambda: None)

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        yield

    def scratch(self) -> Any:
        return None

    def held(self, pool: Any = None) -> int:
        return 0

    def allocated(self) -> int:
        return 0

    def beside(self) -> int:
        return 0

    def free(self) -> None:
        pass


def int4_layer(n: int = 48, k: int = 128, seed: int = 0, device: str = "cpu") -> Holder:
    """x -> x @ W.T of int4 codes in groups of 32."""
    random = Random(seed)
    codes = random.integers(-8, 8, n, k, dtype=torch.int8)

    def forward(m: Holder, x: torch.Tensor) -> torch.Tensor:
        w = m.codes.to(BF16).unflatten(1, (-1, 32)) * m.scale.unsqueeze(-1)
        return torch.nn.functional.linear(x, w.flatten(1))

    return Holder(forward, codes=codes, scale=random.scales(n, k // 32)).to(device)


class Counting(torch.nn.Module):
    """A layer that counts its calls, and keeps what it saw last in a row of each."""

    def __init__(self, rows: int = 16, k: int = 32, device: str = "cpu") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(k, k, device=device).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("last", torch.zeros(rows, k, device=device))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        out = self.layer(x) + self.last[slots]
        self.last.index_copy_(0, slots, x)
        return out
