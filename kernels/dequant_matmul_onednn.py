"""Provider of dequant_matmul on a CPU, for any format and M: strips of W, then oneDNN."""

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from qinductor.contracts import (
    QuantizedWeight,
    WeightFormat,
    arithmetic,
    by_row,
    dequantize,
    difference,
)
from qinductor.errors import Refused
from qinductor.kernels.dequant_matmul import (
    DEQUANT_MATMUL,
    DequantMatmul,
    Operands,
    Reference,
)

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
        self._bound: dict[DequantMatmul, Bound | None] = {}

    def runs_on(self, target: str) -> bool:
        return target == "cpu"

    def pack(self, contract: DequantMatmul, source: Operands) -> dict[str, torch.Tensor]:
        _check_zero(source.weight)
        return super().pack(contract, source)

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if contract not in self._bound:
            self._bound[contract] = self._proved(contract, packed)
        bound = self._bound[contract]
        return super().run(contract, x, packed) if bound is None else bound(x, packed)

    def _proved(self, contract: DequantMatmul, packed: Sequence[torch.Tensor]) -> "Bound | None":
        """The strips of this contract, if they are bitwise the reference's."""
        form = contract.weight
        plain = form.outer is None and form.table is None and not form.permuted
        if not plain or form.bits not in (4, 8) or form.codes.startswith("float4"):
            return None
        if not form.k or form.k % form.bk or form.n * form.bits % 8:
            return None  # ragged blocks along K, or a row without a partner in its byte
        bound = Bound(contract, list(self.operands(contract)))
        whole = self.whole(contract, packed).weight
        w = dequantize(whole)
        try:
            strips = [(spans, bound.strip(spans, packed)) for spans in bound.strips]
        except Exception as error:
            warnings.warn(f"{self.name} runs on its reference: {error}", stacklevel=2)
            return None
        differ = next(filter(None, (difference(o, _rows(w, spans)) for spans, o in strips)), "")
        if differ:
            warnings.warn(f"{self.name} runs on its reference: {differ}", stacklevel=2)
        return None if differ else bound


def _check_zero(weight: QuantizedWeight) -> None:
    """Refused where q - z is not exact: the loop does not round it, and is compared with the
    reference for the first weight of a contract only."""
    codes, zero, inner = weight.codes, weight.zero, weight.format.inner
    if zero is None or zero.is_floating_point() or not zero.numel():
        return
    low, high = codes.min().item() - zero.max().item(), codes.max().item() - zero.min().item()
    exact = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}.get(inner, 1 << 24)
    if max(-low, high) > exact:
        raise Refused(
            f"q - z must be exact in {inner}, up to {exact}; it reaches {max(-low, high)}"
        )


class Bound:
    """The operator for one contract: what can be worked out once is.

    strips  for each strip, the runs of rows of W in it: 4-bit codes come as two
    """

    def __init__(self, contract: DequantMatmul, names: list[str]) -> None:
        form = self.form = contract.weight
        self.out = contract.out
        self.grids = [names.index(name) for name in ("scale", "zero") if name in names]
        self.bias = names.index("bias") if contract.bias else None
        self.scale = names.index("output_scale") if contract.output_scale else None
        runs = 8 // form.bits
        count = form.n // runs
        step = max(1, STRIP // form.k // runs)
        self.strips = [
            [slice(run * count + i, run * count + min(i + step, count)) for run in range(runs)]
            for i in range(0, count, step)
        ]
        # Inductor takes a size of 1 for a constant, so such formats have loops of their own.
        ones = (count == 1, form.k == form.bk, form.bk == 1, count % step == 1)
        self.loop = _loop(dataclasses.replace(form, n=0, k=0, bn=0, bk=0), ones)

    def __call__(self, x: torch.Tensor, packed: Sequence[torch.Tensor]) -> torch.Tensor:
        added = None if self.bias is None else packed[self.bias]
        bias = added if self.scale is None else None  # a scaled product is rounded first
        if len(self.strips) == 1:
            out = linear(x, self.strip(self.strips[0], packed), bias)
        else:
            out = x.new_empty(x.shape[0], self.form.n, dtype=self.out)
            for spans in self.strips:
                w = self.strip(spans, packed)
                part = linear(x, w, None if bias is None else _rows(bias, spans))
                for span, piece in zip(spans, part.chunk(len(spans), 1), strict=True):
                    out[:, span] = piece
        if self.scale is None:
            return out
        out.mul_(packed[self.scale])
        return out if added is None else out.add_(added)

    def strip(self, spans: list[slice], packed: Sequence[torch.Tensor]) -> torch.Tensor:
        """These rows of W, dense."""
        form, codes = self.form, packed[0]
        if len(self.strips) > 1:
            codes = codes[spans[0]]
        grids = [by_row(form, packed[i], form.n) for i in self.grids]
        if len(self.strips) > 1:
            grids = [_rows(grid, spans) for grid in grids]
        blocks = codes.view(codes.shape[0], -1, form.bk)
        return self.loop(blocks, *[grid.unsqueeze(2) for grid in grids]).view(-1, form.k)


@functools.cache
def _bf16_linear() -> Any:
    """oneDNN's linear with a fused bias, where this machine has it in bf16; else None."""
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.ops.mkldnn._linear_pointwise.default
    return None


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[M, K] . w[N, K]^T + bias[N], rounded once; oneDNN adds the bias in its own loop."""
    if x.dtype is torch.bfloat16 and (fused := _bf16_linear()) is not None:
        return fused(x, w, bias, "none", [], "")  # type: ignore[no-any-return]
    return torch.nn.functional.linear(x, w, bias)


def _rows(tensor: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    """These rows of a tensor, in order."""
    return torch.cat([tensor[span] for span in spans])


@functools.cache
def _loop(form: WeightFormat, ones: tuple[bool, ...]) -> Loop:
    """(codes [rows, blocks, bk], scale [rows, blocks, 1], zero) -> W, compiled by Inductor."""
    if form.bits == 8 and form.arithmetic == "q":
        return lambda codes: codes.to(form.compute).to(form.dtype)

    def w(codes: torch.Tensor, *grids: torch.Tensor) -> torch.Tensor:
        s = grids[0] if form.scale is not None else None
        z = grids[-1] if form.zero is not None else None
        return arithmetic(form, codes, {n: t for n, t in (("s", s), ("z", z)) if t is not None})

    def strip(codes: torch.Tensor, *grids: torch.Tensor) -> torch.Tensor:
        if form.bits == 8:
            return w(codes, *grids)
        both, h = codes.float(), codes.shape[0]
        high = torch.floor(both * 0.0625)
        low = both - high * 16 - 8
        if form.codes == "uint4":
            high, low = high + 8, low + 8
        # Each half goes through to W before they meet: a joint float buffer would be written out.
        return torch.cat([w(high, *[g[:h] for g in grids]), w(low, *[g[h:] for g in grids])])

    # A graph of its own for each format: Dynamo counts recompiles by code object.
    count = (form.scale is not None) + (form.zero is not None)
    if count == 2:
        graph = torch.fx.symbolic_trace(lambda q, s, z: strip(q, s, z))
    elif count == 1:
        graph = torch.fx.symbolic_trace(lambda q, s: strip(q, s))
    else:
        graph = torch.fx.symbolic_trace(lambda q: strip(q))
    # An integer zero makes q - z exact.
    whole_zero = form.zero is None or not form.zero.is_floating_point
    once = form.arithmetic in ROUNDED_ONCE and whole_zero
    narrow = form.compute not in (form.dtype, torch.float32)
    return Direct(graph, {"emulate_precision_casts": not once or narrow})


_compiling = threading.Lock()


class Direct:
    """A graph of tensors compiled once by Inductor, with symbolic sizes, and called without guards.

    A call through `torch.compile` costs 29 us where there is nothing to compute (one thread of a
    Xeon, torch 2.13), about what the loop takes for a small weight.
    Leaving them out is sound where every shape was compared with the reference on its first call.
    """

    def __init__(self, graph: torch.fx.GraphModule, patches: dict[str, bool]) -> None:
        self.run: Callable[[list[Any]], Sequence[torch.Tensor]] | None = None
        # What `run` takes, in its order: (which tensor, the axis whose size it is or None).
        self.takes: list[tuple[int, int | None]] = []
        self.order: list[int] = []
        self.patches = patches
        self.first: tuple[torch.Tensor, ...] = ()
        self.compiled = torch.compile(graph, backend=self._backend, dynamic=True)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        if self.run is None:
            with _compiling:
                result = self._compile(*tensors)
            if self.run is None:
                return result
        inputs = [tensors[i] if axis is None else tensors[i].shape[axis] for i, axis in self.takes]
        return self.run(inputs)[0]

    def _compile(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Compiles; where Dynamo is told not to, the graph runs eagerly, now and the next time."""
        self.first = tensors
        # Every size a symbol of its own, though some be equal now; and a hit in AOTAutograd's cache
        # would not call `_keep`.
        with (
            symbolic_shapes_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            try:
                result: torch.Tensor = self.compiled(*tensors)
            finally:
                self.first = ()
        return result

    def _backend(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # Dynamo orders tensors by their first use.
        given = [value for value in inputs if isinstance(value, torch.Tensor)]
        self.order = [
            next(i for i, tensor in enumerate(self.first) if tensor is value) for value in given
        ]
        return compile_fx(gm, inputs, inner_compile=self._keep, config_patches=self.patches)

    def _keep(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        place = iter(self.order)
        self.takes = [
            (next(place), None)
            if isinstance(value, torch.Tensor)
            else next(
                (i, axis)
                for i, tensor in zip(self.order, tensors, strict=True)
                for axis, size in enumerate(tensor.shape)
                if str(size) == str(value)
            )
            for value in inputs
        ]
        self.run = compile_fx_inner(gm, inputs, **kwargs)
        return self.run


DEQUANT_MATMUL.register(DequantStrips())
