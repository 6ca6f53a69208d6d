"""Which rows experts have, and rows in another order, under sgl-kernel's names.

| function                     | tensor                                | shape, dtype           |
|------------------------------|---------------------------------------|------------------------|
| shuffle_rows                 | input_tensor                          | [T, C]; see DTYPES     |
|                              | dst2src_map                           | [R], int32             |
|                              | result                                | [R, C], as the input   |
| get_cutlass_w4a8_moe_mm_data | topk_ids                              | any, topk last; int32  |
|                              | expert_offsets                        | [E + 1], int32         |
|                              | problem_sizes1, problem_sizes2        | [E, 3], int32          |
|                              | input_permutation, output_permutation | as many as ids, int32  |
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch

from qinductor.kernels.scaled_matmul import TAGS
from qinductor.kernels.sgl_checks import elsewhere, hold
from qinductor.kernels.triton_device import has_triton
from qinductor.op import LIBRARY
from qinductor.triton_compile import compiled

INT32 = torch.int32
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8)
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
COPIED = 1024  # words of a program
ENTRIES = 4096  # of a program at a time, at most
SHUFFLE, DATA = "shuffle_rows", "get_cutlass_w4a8_moe_mm_data"


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import sgl_moe_rows_kernels

    return sgl_moe_rows_kernels


def shuffle_rows(
    input_tensor: torch.Tensor, dst2src_map: torch.Tensor, output_tensor_shape: Sequence[int]
) -> torch.Tensor:
    """Rows map[0], map[1] ... of a tensor, [R, C].

    input_tensor  float16, bfloat16, float32, float8_e4m3fn or uint8 [T, C], rows contiguous
    dst2src_map   int32, contiguous, R elements or more; a row that is not there becomes zeros
    output_tensor_shape  (R, C)
    Errors: RuntimeError for anything else.
    """
    out: torch.Tensor = torch.ops.qinductor.shuffle_rows.default(
        input_tensor, dst2src_map, output_tensor_shape
    )
    return out


def get_cutlass_w4a8_moe_mm_data(
    topk_ids: torch.Tensor,
    expert_offsets: torch.Tensor,
    problem_sizes1: torch.Tensor,
    problem_sizes2: torch.Tensor,
    input_permutation: torch.Tensor,
    output_permutation: torch.Tensor,
    num_experts: int,
    n: int,
    k: int,
) -> None:
    """Writes how many rows each expert has, and where they come from.

    topk_ids            int32 [..., topk]: the expert of each entry; others than 0 to E - 1 are
                        ignored
    expert_offsets      int32 [E + 1]: first slot of each expert, and the number of slots
    problem_sizes1, problem_sizes2   int32 [E, 3]: (2 n, m, k) and (k, m, n) of an expert with m
    input_permutation   int32, as many as ids: i // topk of the entry i in each slot, else 0
    output_permutation  int32, as many as ids: the slot of each entry, 0 of one that is ignored
    num_experts         E; n is the experts' inner size, k the hidden one
    Slots are grouped by expert, and entries of an expert keep their order. Results are contiguous.
    Errors: RuntimeError for anything else.
    """
    torch.ops.qinductor.get_cutlass_w4a8_moe_mm_data.default(
        topk_ids, expert_offsets, problem_sizes1, problem_sizes2, input_permutation,
        output_permutation, num_experts, n, k,
    )  # fmt: skip


def run_shuffle(
    x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, kernels: ModuleType | None = None
) -> None:
    """`shuffle_rows` in Triton, into a contiguous out that is not empty."""
    width = next(
        width
        for width in WORDS
        if width >= x.itemsize
        and out.shape[1] * x.itemsize % width == 0
        and all(
            number % width == 0
            for number in (
                x.stride(0) * x.itemsize, x.storage_offset() * x.itemsize, x.data_ptr(),
                out.data_ptr(),
            )
        )
        or width == x.itemsize
    )  # fmt: skip
    words, into = x.view(WORDS[width]), out.view(WORDS[width])
    wide = min(COPIED, 1 << (into.shape[1] - 1).bit_length())
    high = COPIED // wide
    grid = -(-into.shape[0] // high), -(-into.shape[1] // wide)
    with torch.cuda.device_of(x):
        (kernels or device()).shuffle[grid](
            words, words.stride(0), rows, into, *words.shape[:1], *into.shape, BR=high, BW=wide,
            num_warps=4,
        )  # fmt: skip


def shuffled(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """`shuffle_rows` by torch."""
    rows = rows[: len(out)].long()
    there = (rows >= 0) & (rows < len(x))
    bits = WORDS[x.itemsize]
    if not len(x):
        out.view(bits).zero_()
        return
    found = x.view(bits)[torch.where(there, rows, 0)]
    out.view(bits).copy_(torch.where(there[:, None], found, 0))


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def run_data(
    ids: torch.Tensor, results: Results, experts: int, n: int, k: int,
    kernels: ModuleType | None = None,
) -> None:  # fmt: skip
    """`get_cutlass_w4a8_moe_mm_data` in Triton: one launch."""
    numel, topk = ids.numel(), ids.shape[-1] if ids.dim() else 1
    block = min(ENTRIES, max(128, 1 << (numel - 1).bit_length() if numel else 0))
    with torch.cuda.device_of(ids):
        (kernels or device()).order[(experts + 1,)](
            ids.contiguous(), *results, numel, max(topk, 1), experts, n, k, B=block,
            num_warps=8 if block > 1024 else 4,
        )  # fmt: skip


def grouped_by(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(where the slots of each expert end [E], the entry in each slot, the slot of each entry), of
    int32 ids [entries] from 0 to E - 1; nothing waits for the device."""
    sizes = [experts + 1, 3 * experts, 3 * experts, len(ids), len(ids)]
    offsets, first, second, entries, slots = ids.new_empty(sum(sizes)).split(sizes)
    results = offsets, first.view(-1, 3), second.view(-1, 3), entries, slots
    (run_data if ids.is_cuda and has_triton() else data)(ids[:, None], results, experts, 0, 0)
    return offsets[1:], entries, slots


def rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] of x [T, C], rows contiguous, and int32 rows, all there."""
    if not (x.is_cuda and has_triton()) or not x.shape[1]:
        return x[rows.long()]
    out = x.new_empty((len(rows), x.shape[1]))
    run_shuffle(x, rows, out)
    return out


def data(ids: torch.Tensor, results: Results, experts: int, n: int, k: int) -> None:
    """`get_cutlass_w4a8_moe_mm_data` by torch, without waiting for a device."""
    offsets, first, second, inputs, outputs = results
    topk, ids = ids.shape[-1] if ids.dim() else 1, ids.reshape(-1).long()
    key = torch.where((ids >= 0) & (ids < experts), ids, experts)
    counts = key.new_zeros(experts + 1).scatter_add_(0, key, torch.ones_like(key))[:experts]
    offsets.zero_()
    offsets[1:] = counts.cumsum(0)
    for sizes, (rows, columns) in ((first, (2 * n, k)), (second, (k, n))):
        sizes[:, 0], sizes[:, 1], sizes[:, 2] = rows, counts, columns
    entry = torch.sort(key, stable=True).indices
    slot = torch.arange(len(key), device=key.device)
    there = slot < offsets[-1]
    inputs.view(-1).copy_(torch.where(there, entry // max(topk, 1), 0))
    outputs.view(-1).scatter_(0, entry, torch.where(there, slot, 0).to(INT32))


def compiles() -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, check) of both kernels."""
    for target in (80, 90, 100):
        for kernel in ("shuffle", "order"):
            yield f"{kernel} sm_{target}", functools.partial(_check, kernel, target)


def _check(kernel: str, target: int) -> None:
    pointers = dict.fromkeys(("x_ptr", "out_ptr"), "*i64")
    names = "map", "ids", "offsets", "first", "second", "input", "output"
    types = {
        **pointers, **dict.fromkeys((f"{name}_ptr" for name in names), "*i32"),
        **dict.fromkeys(("x_row", "W"), "i32:16"),
        **dict.fromkeys(("rows", "R", "numel", "topk", "E", "n", "k"), "i32"),
    }  # fmt: skip
    function = getattr(device(), kernel)
    constants = {"BR": 1, "BW": COPIED, "B": ENTRIES}
    taken = {name: value for name, value in constants.items() if name in function.arg_names}
    made = compiled(function, types, taken, target, num_warps=4 if kernel == "shuffle" else 8)
    if made.spills:
        raise RuntimeError(f"{kernel}, sm_{target}: {made.spills} bytes spill")


LIBRARY.define(
    f"{SHUFFLE}(Tensor input_tensor, Tensor dst2src_map, SymInt[] output_tensor_shape) -> Tensor",
    tags=TAGS,
)
LIBRARY.define(
    f"{DATA}(Tensor topk_ids, Tensor(a!) expert_offsets, Tensor(b!) problem_sizes1, "
    "Tensor(c!) problem_sizes2, Tensor(d!) input_permutation, Tensor(e!) output_permutation, "
    "int num_experts, int n, int k) -> ()",
    tags=TAGS,
)


def _why_not_shuffle(x: torch.Tensor, rows: torch.Tensor, shape: Sequence[int]) -> str | None:
    if x.dim() != 2 or rows.dim() != 1 or len(shape) != 2:
        got = f"the input is {x.dim()}-D, the map {rows.dim()}-D, the result {len(shape)}-D"
        return f"{got}; wanted 2-D, 1-D and 2-D"
    if x.dtype not in DTYPES:
        return f"the input is {x.dtype}; wanted one of {', '.join(map(str, DTYPES))}"
    if rows.dtype is not INT32:
        return f"the map is {rows.dtype}; wanted int32"
    if not 0 <= shape[0] <= rows.shape[0] or shape[1] != x.shape[1]:
        got = f"output_tensor_shape is {list(shape)}"
        return f"{got}; wanted at most {rows.shape[0]} rows, of {x.shape[1]} columns"
    if x.shape[1] > 1 and x.stride(1) != 1 or not rows.is_contiguous():
        got = f"the input has strides {x.stride()}, the map {rows.stride()}"
        return f"{got}; wanted contiguous rows and a contiguous map"
    return elsewhere(x, rows)


@torch.library.impl(LIBRARY, SHUFFLE, "CompositeExplicitAutograd")
def _shuffle_rows(x: torch.Tensor, rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    hold(SHUFFLE, _why_not_shuffle(x, rows, shape))
    out = x.new_empty(tuple(shape))
    if out.numel():
        if x.stride(1) != 1:  # of one column
            x = x.contiguous()
        (run_shuffle if x.is_cuda and has_triton() else shuffled)(x, rows, out)
    return out


@torch.library.register_fake(f"qinductor::{SHUFFLE}", lib=LIBRARY)
def _(x: torch.Tensor, rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x.new_empty(tuple(shape))


def _why_not_data(ids: torch.Tensor, results: Results, experts: int) -> str | None:
    if ids.dtype is not INT32:
        return f"topk_ids is {ids.dtype}; wanted int32"
    if experts < 1:
        return f"num_experts is {experts}; wanted 1 or more"
    names = "expert_offsets", "problem_sizes1", "problem_sizes2"
    shapes = ((experts + 1,), (experts, 3), (experts, 3))
    for name, tensor, shape in zip(names, results, shapes, strict=False):
        if tensor.dtype is not INT32 or tensor.shape != shape or not tensor.is_contiguous():
            got = f"{name} is {tensor.dtype}{list(tensor.shape)}, strides {tensor.stride()}"
            return f"{got}; wanted int32{list(shape)}, contiguous, for {experts} experts"
    for name, tensor in zip(("input", "output"), results[3:], strict=True):
        wrong = tensor.dtype is not INT32 or tensor.numel() != ids.numel()
        if wrong or not tensor.is_contiguous():
            got = f"{name}_permutation is {tensor.dtype}{list(tensor.shape)}"
            return f"{got}, strides {tensor.stride()}; wanted {ids.numel()} contiguous int32"
    return elsewhere(ids, *results)


@torch.library.impl(LIBRARY, DATA, "CompositeExplicitAutograd")
def _data(
    ids: torch.Tensor, offsets: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
    inputs: torch.Tensor, outputs: torch.Tensor, num_experts: int, n: int, k: int,
) -> None:  # fmt: skip
    results = offsets, first, second, inputs, outputs
    hold(DATA, _why_not_data(ids, results, num_experts))
    (run_data if ids.is_cuda and has_triton() else data)(ids, results, num_experts, n, k)
    torch.autograd.graph.increment_version(results)


@torch.library.register_fake(f"qinductor::{DATA}", lib=LIBRARY)
def _(
    ids: torch.Tensor, offsets: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
    inputs: torch.Tensor, outputs: torch.Tensor, num_experts: int, n: int, k: int,
) -> None:  # fmt: skip
    pass
