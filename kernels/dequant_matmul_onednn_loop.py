"""The loop that makes dense rows of W from packed ones: written and compiled by Inductor.

Figures are of one thread of a Xeon with AMX, torch 2.13, other work on the machine.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from qinductor.caches.disk import caches
from qinductor.contracts import CODEBOOKS, WeightFormat, arithmetic, code_range
from qinductor.kernels import packing

# One operation, rounded once: exact without Inductor's emulation of every intermediate rounding,
# which halves the speed of the loop (0.53 against 0.23 ns an element).
ROUNDED_ONCE = ("q", "q-z", "q*s", "q/s", "q*t", "q/t", "(q-z)*s", "(q-z)/s", "(q-z)*t", "(q-z)/t")
# Up to this many bits an entry of a table is selected bit by bit; a gather does not vectorise (for
# 4 bits 0.8 against 2.2 ns an element; a gather from 256 entries takes 1.6).
SELECTED_BITS = 4
# Blocks along k up to this length have loops of their own: a loop over 16 elements is vectorised
# only where their number is known (0.4 against 0.6 ns an element).
FIXED_BLOCK = 64
NARROW = (torch.bfloat16, torch.float16)

Loop = Callable[..., torch.Tensor]


def exact_difference(form: WeightFormat) -> bool:
    """Whether q - z is one of integers, which the loop need not round where `inner` holds it."""
    integers = code_range(form.codes) is not None
    return integers and form.zero is not None and not form.zero.is_floating_point


def emulated(form: WeightFormat) -> bool:
    """Whether Inductor must round after every operation, which it does in fp32 anyway."""
    once = form.arithmetic in ROUNDED_ONCE and form.compute is form.dtype
    for dtype in (form.scale, form.outer, form.table):  # what is read must not be rounded first
        once &= dtype in (None, form.compute) or dtype.itemsize == 1
    if form.compute in NARROW and not once:
        return True
    centred = form.arithmetic.startswith(("q-", "(q-"))
    return centred and form.inner in NARROW and not exact_difference(form)


@functools.cache
def loop(form: WeightFormat, ones: tuple[bool, ...], bk: int) -> Loop:
    """(packed codes, scale, zero, outer, table) -> W [runs * rows, blocks, bk].

    codes, scale ...  [rows, (planes,) blocks, bk] and [runs, rows, blocks or 1, 1], or None
    form              with no sizes: one loop serves them all
    ones              which sizes are 1: Inductor takes those for constants
    bk                the block along k where it is short, else 0
    """
    looked_up = form.table is not None or form.codes in CODEBOOKS
    if form.bits == 8 and form.arithmetic == "q" and not looked_up:
        return lambda codes, *_: codes.to(form.compute).to(form.dtype)
    patches: dict[str, Any] = {"emulate_precision_casts": emulated(form)}
    if looked_up:  # else Inductor writes intermediates of a long expression out
        patches |= {"realize_opcount_threshold": 1 << 20, "realize_reads_threshold": 1 << 20}
    if form.bits in (4, 8) or not looked_up:
        return _compiled(form, functools.partial(_runs, form), patches, bk > 0)
    # One selection for all runs: eight take 20 s to compile, and run at a third of the speed.
    graph = torch.fx.symbolic_trace(lambda q: torch.cat(_runs(form, q)).to(torch.uint8))
    codes = Direct(graph, {}, bk > 0)
    value = _compiled(form, lambda q: [q], patches, bk > 0)

    def both(packed: Any, *given: Any) -> torch.Tensor:
        *grids, table = given
        rows = (grid if grid is None else grid.flatten(0, 1)[None] for grid in grids)
        return value(codes(packed), *rows, table)

    return both


def _compiled(
    form: WeightFormat, runs: Callable[[Any], list[Any]], patches: dict[str, Any], fixed: bool
) -> Loop:
    """What `loop` says, where `runs` makes the codes of each run from the packed ones."""

    def rows(packed: Any, s: Any, z: Any, t: Any, table: Any) -> torch.Tensor:
        # Each run goes through to W before they meet: a joint float buffer would be written out.
        parts = []
        for j, code in enumerate(runs(packed)):
            grids = {"s": (s, form.scale), "z": (z, form.zero), "t": (t, form.outer)}
            values = {name: grid[j] for name, (grid, dtype) in grids.items() if dtype is not None}
            parts.append(arithmetic(form, _decoded(form, code, table), values))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    # A graph of its own for each format: Dynamo counts recompiles by code object.
    graph = torch.fx.symbolic_trace(rows)
    return Direct(graph, patches, fixed)


def _runs(form: WeightFormat, packed: torch.Tensor) -> list[torch.Tensor]:
    """The codes of each run, as floats where they are packed: what `packing.unpack` does by shifts,
    which do not vectorise (1.1 against 0.3 ns an element)."""
    if form.bits == 8:
        return [packed]
    signed, half = form.storage is torch.int8, 1 << form.bits - 1
    if form.bits == 4:
        both = packed.float()
        high = torch.floor(both * 0.0625)
        low = both - high * 16
        return [high, low - half] if signed else [high + half, low]
    codes: list[Any] = [-half if signed else 0] * 8
    for width, first, place in packing.fields(form.bits):
        for plane in range(width):
            rest: Any = packed[:, first + plane].float()
            for j in range(plane, 8, width):
                above = torch.floor(rest * 0.5**width) if j + width < 8 else None
                field = rest if above is None else rest - above * (1 << width)
                codes[j] = field * (1 << place) + codes[j]
                rest = above
    return codes


def _decoded(form: WeightFormat, code: torch.Tensor, table: torch.Tensor) -> Any:
    """The values of codes, as `contracts.decoded`."""
    if form.codes in CODEBOOKS:
        # Each has a bit for the sign: half its values are enough.
        half = len(CODEBOOKS[form.codes]) // 2
        negative = code >= half
        code = torch.where(negative, code - half, code)
        value = _selected(code, list(CODEBOOKS[form.codes][:half]))
        return torch.where(negative, -value, value)
    if form.table is None:
        return code
    if form.bits > SELECTED_BITS:
        return table[code.to(torch.int64)]
    # Exact, and what Inductor selects in; a wider table stays as it is.
    entries = table.float() if form.table.itemsize < 4 else table
    return _selected(code.float(), [entries[i] for i in range(1 << form.bits)])


def _selected(code: torch.Tensor, entries: list[Any]) -> Any:
    """The entry of each code, by its bits from the highest."""
    while len(entries) > 1:
        half = len(entries) // 2
        upper = code >= half
        pairs = zip(entries[half:], entries[:half], strict=True)
        code = torch.where(upper, code - half, code)
        entries = [torch.where(upper, high, low) for high, low in pairs]
    return entries[0]


_compiling = threading.Lock()


class Direct:
    """A graph of tensors compiled once by Inductor, with symbolic sizes, and called without guards.

    A call through `torch.compile` costs 29 us where there is nothing to compute (one thread of a
    Xeon, torch 2.13), about what the loop takes for a small weight.
    Leaving them out is sound where every shape was compared with the reference on its first call.
    """

    def __init__(self, graph: torch.fx.GraphModule, patches: dict[str, Any], fixed: bool) -> None:
        self.run: Callable[[list[Any]], Sequence[torch.Tensor]] | None = None
        # What `run` takes, in its order: (which tensor, the axis whose size it is or None); or
        # (None, a number), where only a stride that no element depends on is as large.
        self.takes: list[tuple[int | None, int | None]] = []
        self.order: list[int] = []
        self.patches = patches
        self.fixed = fixed  # whether the last axis of the first tensor has one size ever
        self.first: tuple[torch.Tensor | None, ...] = ()
        self.compiled = torch.compile(graph, backend=self._backend, dynamic=True)

    def __call__(self, *tensors: Any) -> torch.Tensor:
        if self.run is None:
            with _compiling:
                result = self._compile(*tensors)
            if self.run is None:
                return result
        inputs = [
            axis if i is None else tensors[i] if axis is None else tensors[i].shape[axis]
            for i, axis in self.takes
        ]
        return self.run(inputs)[0]

    def _compile(self, *tensors: Any) -> torch.Tensor:
        """Compiles; where Dynamo is told not to, the graph runs eagerly, now and the next time."""
        self.first = tensors
        if self.fixed:
            torch._dynamo.mark_static(tensors[0], -1)
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
        with caches():
            return compile_fx(gm, inputs, inner_compile=self._keep, config_patches=self.patches)

    def _keep(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        place = iter(self.order)
        self.takes = [
            (next(place), None)
            if isinstance(value, torch.Tensor)
            else next(
                (
                    (i, axis)
                    for i, tensor in zip(self.order, tensors, strict=True)
                    for axis, size in enumerate(tensor.shape)
                    if str(size) == str(value)
                ),
                (None, value.node.hint),
            )
            for value in inputs
        ]
        self.run = compile_fx_inner(gm, inputs, **kwargs)
        return self.run
