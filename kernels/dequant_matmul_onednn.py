"""Provider of dequant_matmul on a CPU, for any format and M: strips of W, then oneDNN."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from qinductor.contracts import DequantMatmul, WeightFormat, arithmetic, by_row, dequantize
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, Reference
from qinductor.op import INFINITE
from qinductor.prove import difference

# Elements of W that are dense at a time. 2 MB in bf16 is what an L2 cache holds, and a buffer that
# size is reused by the allocator, where a larger one is mapped and faulted in at every call.
STRIP = 1 << 20
# One operation, rounded once: exact without Inductor's emulation of every intermediate rounding,
# which halves the speed of the loop (0.53 against 0.23 ns an element, one thread, torch 2.13).
ROUNDED_ONCE = ("q", "q-z", "q*s", "q/s", "(q-z)*s", "(q-z)/s")

Loop = Callable[..., torch.Tensor]


class DequantStrips(Reference):
    """W, a strip at a time, by one loop that Inductor writes; each strip is multiplied at once.

    A strip is bitwise the graph's own W, so the result is eager's but for the order of summation.
    That is checked on the first call of each contract; where it fails, the reference serves.
    """

    name = "onednn.dequant_strips"
    reference = False

    def __init__(self) -> None:
        self._loops: dict[WeightFormat, Loop | None] = {}

    def runs_on(self, target: str) -> bool:
        return target == "cpu"

    def why_not(self, contract: DequantMatmul) -> str | None:
        return None

    def limit(self, contract: DequantMatmul) -> int:
        return INFINITE

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        form = contract.weight
        if form not in self._loops:
            self._loops[form] = self._proved(contract, packed)
        loop = self._loops[form]
        if loop is None:
            return super().run(contract, x, packed)
        named = dict(zip(self.operands(contract), packed, strict=True))
        bias, scale, out = named.get("bias"), named.get("output_scale"), None
        for spans, w in _strips(form, named, loop):
            part = linear(x, w, None if bias is None else _rows(bias, spans))
            if w.shape[0] == form.n:
                out = part
                break
            if out is None:
                out = x.new_empty(x.shape[0], form.n, dtype=contract.out)
            for span, piece in zip(spans, part.chunk(len(spans), 1), strict=True):
                out[:, span] = piece
        assert out is not None
        return out if scale is None else out * scale

    def _proved(self, contract: DequantMatmul, packed: Sequence[torch.Tensor]) -> Loop | None:
        """The loop for this format, if its strips are bitwise the reference's."""
        form = contract.weight
        if form.k % form.bk or form.n * form.bits % 8 or not form.k:
            return None  # ragged blocks along K, or a row without a partner in its byte
        loop = _loop(dataclasses.replace(form, n=0, k=0, bn=0, bk=0))
        whole = self.whole(contract, packed).weight
        w = dequantize(form, whole.codes, whole.scale, whole.zero)
        named = dict(zip(self.operands(contract), packed, strict=True))
        strips = _strips(form, named, loop)
        return None if any(difference(ours, _rows(w, spans)) for spans, ours in strips) else loop


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[M, K] . w[N, K]^T + bias[N], rounded once; oneDNN adds the bias in the product's own loop."""
    if x.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
        return out
    return torch.nn.functional.linear(x, w, bias)


def _strips(
    form: WeightFormat, named: Mapping[str, torch.Tensor], loop: Loop
) -> Iterator[tuple[list[slice], torch.Tensor]]:
    """(rows of W, these rows dense), strip by strip; 4-bit codes come as two runs of rows."""
    codes = named["halves"] if form.bits == 4 else named["codes"]
    count = codes.shape[0]
    runs = form.n // count
    grids = [by_row(form, named[name], form.n) for name in ("scale", "zero") if name in named]
    step = max(1, STRIP // form.k // runs)
    for start in range(0, count, step):
        stop = min(start + step, count)
        spans = [slice(run * count + start, run * count + stop) for run in range(runs)]
        blocks = codes[start:stop].view(stop - start, -1, form.bk)
        w = loop(blocks, *(_rows(grid, spans)[:, :, None] for grid in grids))
        yield spans, w.view(-1, form.k)


def _rows(tensor: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    """These rows of a tensor, in order."""
    if sum(span.stop - span.start for span in spans) == tensor.shape[0]:
        return tensor
    return torch.cat([tensor[span] for span in spans])


@functools.cache
def _loop(form: WeightFormat) -> Loop:
    """(codes [rows, blocks, bk], scale [rows, blocks, 1], zero) -> W, compiled by Inductor."""

    def plain(codes: torch.Tensor) -> torch.Tensor:
        if form.bits == 8:
            return codes
        both = codes.float()
        high = torch.floor(both * 0.0625)
        parts = torch.cat([high, both - high * 16 - 8])
        return parts if form.codes == "int4" else parts + 8

    # A graph of its own for each format: Dynamo counts recompiles by code object.
    if form.zero is not None:
        graph = torch.fx.symbolic_trace(lambda q, s, z: arithmetic(form, plain(q), s, z))
        if form.scale is None:
            graph = torch.fx.symbolic_trace(lambda q, z: arithmetic(form, plain(q), None, z))
    elif form.scale is not None:
        graph = torch.fx.symbolic_trace(lambda q, s: arithmetic(form, plain(q), s, None))
    else:
        graph = torch.fx.symbolic_trace(lambda q: arithmetic(form, plain(q), None, None))
    # An integer zero makes q - z exact.
    whole_zero = form.zero is None or not form.zero.is_floating_point
    once = form.arithmetic in ROUNDED_ONCE and whole_zero
    narrow = form.compute not in (form.dtype, torch.float32)
    return Direct(graph, {"emulate_precision_casts": not once or narrow})


class Direct:
    """A graph of tensors compiled once by Inductor, with symbolic sizes, and called without guards.

    The guards of `torch.compile` cost 25 us a call, as much as the loop itself on a small weight.
    Leaving them out is sound where every shape was compared with the reference on its first call.
    """

    def __init__(self, graph: torch.fx.GraphModule, patches: dict[str, bool]) -> None:
        self.run: Callable[[list[Any]], Sequence[torch.Tensor]] | None = None
        self.sizes: list[tuple[int, int]] = []  # (tensor, axis) of each symbolic size it takes
        self.patches = patches
        self.compiled = torch.compile(graph, backend=self._backend, dynamic=True)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        if self.run is None:
            # A hit in AOTAutograd's cache would not call `_keep`.
            with torch._functorch.config.patch(enable_autograd_cache=False):
                self.compiled(*tensors)
        assert self.run is not None
        return self.run([*(tensors[i].shape[axis] for i, axis in self.sizes), *tensors])[0]

    def _backend(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return compile_fx(gm, inputs, inner_compile=self._keep, config_patches=self.patches)

    def _keep(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        for size in inputs[: len(inputs) - len(tensors)]:
            self.sizes.append(
                next(
                    (i, axis)
                    for i, tensor in enumerate(tensors)
                    for axis, other in enumerate(tensor.shape)
                    if str(other) == str(size)
                )
            )
        self.run = compile_fx_inner(gm, inputs, **kwargs)
        return self.run


DEQUANT_MATMUL.register(DequantStrips())
