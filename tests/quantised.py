"""What tests of activation quantisers share: calls of one route, the specification with given
activations, differences."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import numpy as np
import torch

import qinductor
from qinductor.contracts import difference
from qinductor.kernels import quantize as op
from qinductor.kernels.quantize import QUANTIZE, Quantize, reference, results
from qinductor.op import INFINITE, Plan

qinductor.load()
TRITON = QUANTIZE.providers["triton.quantize"]
NAMES = ("codes", "scale", "zero or sum", "sum")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def call(
    contract: Quantize, inputs: Sequence[torch.Tensor], config: str | None = None
) -> list[torch.Tensor]:
    """The operator as a compiled graph calls it."""
    route = TRITON.name if config is None else f"{TRITON.name}@{config}"
    plan = Plan(((INFINITE, route),))
    found: list[torch.Tensor] = torch.ops.qinductor.quantize(inputs, str(contract), str(plan))
    return found


def declared(contract: Quantize, inputs: Sequence[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Shapes, dtypes and strides are those that the operator declares."""
    wanted = results(contract, inputs)
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert [t.stride() for t in found] == [t.stride() for t in wanted]


def wrong(contract: Quantize, inputs: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str:
    """What differs from the specification, bit for bit; empty if nothing does. Of nan any bits."""
    wanted = reference(contract, inputs)
    if contract.zero is torch.int32:  # nan is 0, but to a cast on a CPU
        wanted[2] = torch.where(wanted[2] == torch.iinfo(torch.int32).min, 0, wanted[2])
    for name, ours, want in zip(NAMES, found, wanted, strict=False):
        if text := difference(plain(ours), plain(want)):
            return f"{name}: {text}"
    return ""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as integers, every nan with the same."""
    held = tensor.contiguous()
    if not held.is_floating_point():
        return held
    return torch.where(held.float().isnan(), -1, held.view(BITS[held.itemsize]).to(torch.int64))


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Values that no result has."""
    for tensor in tensors:
        tensor.view(BITS[tensor.itemsize]).fill_(0x5A)


@contextlib.contextmanager
def numpy_activations() -> Iterator[None]:
    """The specification meanwhile has exp and erf of NumPy, which Triton's interpreter has, too:
    torch's own differ from them in the last bit."""
    with mock.patch.dict(op.ACTIVATIONS, {n: in_float32(f) for n, f in BY_NUMPY.items()}):
        yield


def in_float32(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(x.float(), x.dtype).to(x.dtype)


def exp(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.exp(x.numpy()))


def erf(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.vectorize(math.erf, otypes=[np.float32])(x.numpy()))


def tanh(x: torch.Tensor) -> torch.Tensor:
    e = exp(-2 * x.abs())
    return torch.where(x < 0, -((1 - e) / (1 + e)), (1 - e) / (1 + e))


def gelu_tanh(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cube = x * x * x
    return 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * cube)))


BY_NUMPY = {
    "silu": lambda x, dtype: x / (1 + exp(-x)),
    "x*sigmoid": lambda x, dtype: x * (1 / (1 + exp(-x))).to(dtype).float(),
    "gelu": lambda x, dtype: x * 0.5 * (1 + erf(x * math.sqrt(0.5))),
    "gelu_tanh": gelu_tanh,
}
