"""What the inputs of a graph are: taken by address, written to, copied, or no tensors."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from qinductor.freed import parts
from qinductor.retrace import STATIC, holders, names
from qinductor.serving import cuda


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a graph.

    kind  "weight" and "static": taken by address, the latter of any shape; "written": too, and the
          graph writes to it; "copied"; "number": a scalar on the CPU beside a GPU's tensors, as
          Dynamo makes them of Python's floats, whose value is recorded; "value": no tensor
    """

    name: str
    kind: str


class Signature:
    """What a graph's inputs are; made before the compile, `finish`ed after it.

    reason    why the graph is not recorded, or None
    computes  where the graph computes with its sizes, or None
    """

    def __init__(self, gm: GraphModule, arguments: Sequence[Any]) -> None:
        alone = not any(isinstance(x, torch.Tensor) and not x.is_cpu for x in arguments)
        kinds = (_kind(*of, alone) for of in zip(holders(gm), arguments, strict=True))
        self.inputs = [Input(*pair) for pair in zip(names(gm), kinds, strict=True)]
        self.own = sum(1 for _ in gm.parameters()) + sum(1 for _ in gm.buffers())
        self.device, self.reason = _device(arguments)
        self.computes = computes_with_sizes(gm)

    def finish(self, arguments: Sequence[Any]) -> None:
        """Learns which inputs the graph writes to, from what AOTAutograd has noted."""
        context: Any = TracingContext.try_get()
        metadata = getattr(context, "fw_metadata", None)
        flat = [i for i, value in enumerate(arguments) for _ in _flat(value)]
        infos = [] if metadata is None else metadata.input_info[self.own :]
        if len(infos) != len(flat):
            self.reason = self.reason or "it is not known what the graph writes to"
            return
        for i, info in zip(flat, infos, strict=True):
            if info.mutates_metadata or info.mutates_storage_metadata:
                self.reason = f"the graph changes the shape of {self.inputs[i].name}"
            if info.mutates_data:
                self.inputs[i] = dataclasses.replace(self.inputs[i], kind="written")


def _flat(value: Any) -> Sequence[Any]:
    return list(parts(value)) if isinstance(value, torch.Tensor) else [value]


def _kind(node: Any, value: Any, alone: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return "value"
    if isinstance(value, torch.nn.Parameter):
        return "weight"
    if not value.dim() and value.is_cpu and not alone:
        return "number"
    return "static" if (node.meta.get("tensor_dict") or {}).get(STATIC) else "copied"


def _device(arguments: Sequence[Any]) -> tuple[torch.device | None, str | None]:
    """(the device of all tensors, why this is none to record on)."""
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    devices = {x.device for x in tensors if x.dim()} or {x.device for x in tensors}
    if len(devices) != 1:
        found = " and ".join(sorted(map(str, devices))) or "no device"
        return None, f"its inputs are on {found}"
    (device,) = devices
    return device, None if device.type in cuda.RECORDERS else f"it runs on {device}"


def left_to_inductor(gm: GraphModule, arguments: Sequence[Any]) -> str | None:
    """Why a graph is Inductor's trees' to record, which split it; None if it is ours, or nobody's.

    Something larger than a number is on a CPU, and the rest is not.
    """
    made = [node.meta.get("example_value") for node in gm.graph.nodes]
    values = [*arguments, *made]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    kinds = {tensor.device.type for tensor in tensors}
    if kinds & set(cuda.RECORDERS) and "cpu" in kinds:
        return "a part of the graph is on a CPU"
    return None


# Functions whose symbolic arguments are sizes, and no numbers to compute with.
SIZED = {
    "broadcast_to", "chunk", "empty", "expand", "flatten", "new_empty", "new_ones", "new_zeros",
    "ones", "rand", "randn", "repeat", "reshape", "split", "split_with_sizes", "tensor_split",
    "tile", "unflatten", "view", "zeros",
}  # fmt: skip


def computes_with_sizes(gm: GraphModule) -> str | None:
    """Where the numbers of a graph depend on its symbolic sizes, so that those of a larger call may
    be others; None where they do not."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        name = getattr(node.target, "__name__", str(node.target))
        if isinstance(value, torch.SymFloat) and _has_sizes(value):
            return f"the graph computes with its size ({name})"
        called = node.op in ("call_function", "call_method")
        if not called or not isinstance(value, (torch.Tensor, tuple)):
            continue
        if any(map(_is_symbolic, _numbers(node, name))):
            return f"the graph computes with its size ({name})"
    return None


def _has_sizes(value: torch.SymFloat) -> bool:
    """Whether a number is made of more than Python's floats, which Dynamo hands over as inputs."""
    kinds = SymT.FLOAT, SymT.UNBACKED_FLOAT
    return not all(symbol_is_type(symbol, kinds) for symbol in value.node.expr.free_symbols)


def _numbers(node: Node, name: str) -> list[Any]:
    """Arguments of a call that are numbers to compute with, if they are symbolic."""
    args, named = node.args, dict(node.kwargs)
    if name in ("full", "new_full"):
        return [*args[2 if name == "new_full" else 1 :], named.get("fill_value")]
    if name == "arange":
        end = 0 if len(args) == 1 else 1
        return [*args[:end], *args[end + 1 :], named.get("start"), named.get("step")]
    if name == "getitem":
        index = args[1] if isinstance(args[1], (tuple, list)) else [args[1]]
        return [one.start if isinstance(one, slice) else one for one in index]
    if name == "narrow":
        return [*args[2:3], named.get("start")]
    return [] if name in SIZED else [*args, *named.values()]


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_is_symbolic, value))
    return isinstance(value, Node) and isinstance(value.meta.get("example_value"), torch.SymInt)
