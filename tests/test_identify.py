"""Identification and proof of regions alone, on small real tensors; the row rules they run on."""

import collections
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

import qinductor.regions
import qinductor.rows
from qinductor.contracts import QuantizedWeight, dequantize, short
from qinductor.errors import Refused
from qinductor.identify import ROW_COUNTS, Structure, identify
from qinductor.probe import BUDGET
from qinductor.prove import difference, read
from qinductor.regions import Axes, Leaf, Region, Scope, behind, extract
from qinductor.rows import Prefix, Rows, Untracked

aten = torch.ops.aten
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def region(
    f: Callable[..., torch.Tensor],
    leaves: Sequence[torch.Tensor],
    n_axis: int = 0,
    decomposed: bool = True,
) -> Region:
    """The region that AOTAutograd would hand to us for f(*leaves), all leaves constant."""
    graph = make_fx(
        torch.func.functionalize(f),
        decomposition_table=select_decomp_table() if decomposed else None,
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )(*leaves).graph
    holders = list(graph.find_nodes(op="placeholder"))
    (output,) = next(iter(graph.find_nodes(op="output"))).all_input_nodes
    scope = Scope({node: Leaf(i) for i, node in enumerate(holders)}, {}, leaves)
    order, varying = behind(output, scope)
    assert not varying
    return extract(output, order, scope, Axes(n_axis, 1 - n_axis))


def held(cut: Region, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those leaves that the region depends on, in its order."""
    return [leaf.of(leaves) for leaf in cut.leaves]


def identified(
    f: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], n_axis: int = 0
) -> tuple[Structure, QuantizedWeight]:
    """What identification and proof make of f(*leaves), checked against a plain call of f."""
    cut = region(f, leaves, n_axis)
    structure = identify(cut, held(cut, leaves))
    weight = read(cut, structure, held(cut, leaves))
    value = f(*leaves)
    ours = dequantize(weight)
    assert not difference(ours, value.t() if n_axis else value)
    assert structure.evaluations <= BUDGET - 2
    return structure, weight


# Row rules ------------------------------------------------------------------------------------


def ints(*shape: int, high: int = 1 << 30, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, high, shape, generator=g).to(dtype)


def scattered(x: torch.Tensor, y: torch.Tensor, axis: int) -> torch.Tensor:
    out = torch.zeros_like(x)
    out.narrow(axis, 1, y.shape[axis]).copy_(y)
    return out


def strided_writes(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    out[:, 0::2], out[:, 1::2] = x & 15, x >> 4
    return out


BYTES = {"high": 256, "dtype": torch.uint8}
# name: (function, its inputs, axes of the result along which a prefix must be tracked)
ROW_CASES: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor], set[int]]] = {
    "pointwise": (lambda x, y: (x + y) >> 1, [ints(6, 4), ints(4)], {0, 1}),
    "broadcast": (lambda x, y: x * y, [ints(6, 1), ints(1, 5)], {0, 1}),
    "casts": (lambda x: x.to(torch.float64).to(torch.int64) + 1, [ints(5, 3)], {0, 1}),
    "view merges": (lambda x: x.view(12, 5), [ints(3, 4, 5)], {0, 1}),
    "view merges the last": (lambda x: x.view(3, 20), [ints(3, 4, 5)], {0, 1}),
    "view splits": (lambda x: x.view(3, 4, 5), [ints(12, 5)], {0, 2}),
    "view splits the last": (lambda x: x.view(3, 4, 5), [ints(3, 20)], {0, 1}),
    "view regroups": (lambda x: x.view(4, 6), [ints(6, 4)], {0}),
    "view regroups inside": (lambda x: x.view(2, 4, 3, 5), [ints(2, 3, 4, 5)], {0, 1, 3}),
    "view from flat": (lambda x: x.view(7, 6), [ints(42)], {0}),
    "view to flat": (lambda x: x.view(-1), [ints(7, 6)], {0}),
    "view adds ones": (lambda x: x.view(1, 5, 1, 4), [ints(5, 4)], {0, 1, 3}),
    "view drops ones": (lambda x: x.view(5, 4), [ints(1, 5, 1, 4)], {0, 1}),
    "reshape of a transposed": (lambda x: x.t().reshape(2, 15), [ints(5, 6)], {0}),
    "permute": (lambda x: x.permute(2, 0, 1), [ints(3, 4, 5)], {0, 1, 2}),
    "permute negative": (lambda x: x.permute(-1, 0, -2), [ints(3, 4, 5)], {0, 1, 2}),
    "transpose": (lambda x: x.transpose(0, -1), [ints(3, 4, 5)], {0, 1, 2}),
    "t": (lambda x: x.t(), [ints(3, 4)], {0, 1}),
    "t of a vector": (lambda x: x.t() + 1, [ints(3)], {0}),
    "expand a one": (lambda x: x.expand(-1, 7) + 1, [ints(5, 1)], {0, 1}),
    "expand a new axis": (lambda x: x.expand(3, 5, 4) + 1, [ints(5, 4)], {0, 1, 2}),
    "repeat_interleave rows": (lambda x: x.repeat_interleave(3, 0), [ints(5, 4)], {0, 1}),
    "repeat_interleave columns": (lambda x: x.repeat_interleave(3, 1), [ints(5, 4)], {0, 1}),
    "repeat_interleave both": (
        lambda x: x.repeat_interleave(4, 0).repeat_interleave(2, 1)[:18, :5], [ints(5, 3)], {0, 1},
    ),
    "unsqueeze": (lambda x: x.unsqueeze(1), [ints(5, 4)], {0, 1, 2}),
    "unsqueeze last": (lambda x: x.unsqueeze(-1), [ints(5, 4)], {0, 1, 2}),
    "squeeze one": (lambda x: x.squeeze(1), [ints(5, 1, 4, 1)], {0, 1, 2}),
    "squeeze several": (lambda x: x.squeeze((1, -1)), [ints(5, 1, 4, 1)], {0, 1}),
    "squeeze what is no one": (lambda x: x.squeeze(0) + 1, [ints(5, 1, 4)], set()),
    "cat": (lambda x, y: torch.cat([x, y], -1), [ints(5, 4), ints(5, 2)], {0}),
    "cat rows": (lambda x, y: torch.cat([x, y]), [ints(5, 4), ints(2, 4)], {1}),
    "stack and merge": (
        lambda x: torch.stack([x & 15, x >> 4], -1).flatten(-2), [ints(5, 4)], {0, 1},
    ),
    "stack and merge rows": (
        lambda x: torch.stack([x & 15, x >> 4], 1).view(10, 4), [ints(5, 4)], {0},
    ),
    "slice": (lambda x: x[1:-1, 2:], [ints(7, 5)], {0, 1}),
    "slice with steps": (lambda x: x[1::3, ::2], [ints(11, 5)], {0, 1}),
    "slice past the end": (lambda x: x[-4:100], [ints(7, 5)], {0, 1}),
    "select": (lambda x: x[:, 1], [ints(4, 3, 5)], {0, 1}),
    "select first": (lambda x: x[-1], [ints(4, 3, 5)], {0, 1}),
    "pad the end": (lambda x: pad(x, (0, 2, 0, 3), value=7), [ints(5, 4)], {0, 1}),
    "pad columns": (lambda x: pad(x, (2, 1)), [ints(5, 4)], {0}),
    "pad the front": (lambda x: pad(x, (0, 0, 2, 1)), [ints(5, 4)], {1}),
    "pad with less than nothing": (lambda x: pad(x, (0, 0, 0, -2)), [ints(5, 4)], {0, 1}),
    "pad a slice": (lambda x: pad(x[:3], (0, 0, 0, 4)), [ints(6, 4)], {0, 1}),
    "pad a strided slice": (lambda x: pad(x[1:6:2], (0, 0, 0, 4)), [ints(9, 4)], {0, 1}),
    "pad an expanded": (lambda x: pad(x.expand(3, 4), (0, 0, 0, 2)), [ints(1, 4)], {0, 1}),
    "pad a padded": (
        lambda x: pad(pad(x, (0, 0, 0, 2), value=3), (0, 0, 0, 2), value=5), [ints(3, 4)], {0, 1},
    ),
    "pad a view": (lambda x: pad(x.view(4, 3), (0, 0, 0, 2)), [ints(2, 6)], {0}),
    "pad and slice": (lambda x: pad(x, (0, 3, 0, 3)).view(4, 2, 7)[:3].flatten(0, 1)[:5] + 1,
                      [ints(5, 4)], {0, 1}),
    "index rows": (lambda x, i: x[i], [ints(5, 4), ints(7, high=5, dtype=torch.int64)], {0, 1}),
    "index columns": (
        lambda x, i: x[:, i], [ints(5, 4), ints(7, high=4, dtype=torch.int64)], {0, 1},
    ),
    "index by a matrix": (
        lambda x, i: x[:, i], [ints(5, 4, 2), ints(3, 6, high=4, dtype=torch.int64)], {0, 1, 2, 3},
    ),
    "table": (lambda x, i: x[i], [ints(16), ints(5, 4, high=16, dtype=torch.int64)], {0, 1}),
    "index by two": (
        lambda x, i: x[i, i], [ints(5, 5), ints(3, high=5, dtype=torch.int64)], set(),
    ),
    "view as narrower": (lambda x: x.view(torch.uint8), [ints(5, 3)], {0, 1}),
    "view as wider": (lambda x: x.view(torch.int32), [ints(5, 12, **BYTES)], {0, 1}),
    "view as wide": (lambda x: x.view(torch.float32), [ints(5, 3, high=1 << 23)], {0, 1}),
    "view as wider, split": (
        lambda x: x.view(torch.int16).unsqueeze(-1).view(torch.uint8).flatten(1),
        [ints(5, 12, **BYTES)], {0, 1},
    ),
    "slice_scatter": (lambda x, y: scattered(x, y, 1), [ints(5, 6), ints(5, 3)], {0}),
    "slice_scatter rows": (lambda x, y: scattered(x, y, 0), [ints(5, 6), ints(3, 6)], {1}),
    "slice_scatter with steps": (strided_writes, [ints(5, 6)], {0}),
    "copy": (lambda x, y: aten.copy(x, y), [ints(5, 4), ints(4)], {0, 1}),
    "makers": (
        lambda x: torch.where(torch.arange(4) > 1, x, torch.full((5, 4), 3)) + torch.ones(5, 1),
        [ints(5, 4)], {0, 1},
    ),
    "both axes at once": (lambda x: x + x.t(), [ints(5, 5)], {0, 1}),
    "two parts of one": (lambda x: x[:3] + x[2:5] * x[1:6:2], [ints(6, 4)], {0, 1}),
    "groups": (
        lambda q, s: (q.view(6, 4, 3) * s.unsqueeze(-1)).view(6, 12).t(),
        [ints(6, 12), ints(6, 4)], {0, 1},
    ),
    "groups on rows": (
        lambda q, s: (q.view(4, 3, 6) * s.unsqueeze(1)).view(12, 6), [ints(12, 6), ints(4, 6)],
        {0, 1},
    ),
    "words on rows": (
        lambda w: ((w.unsqueeze(1) >> torch.arange(0, 32, 4)[None, :, None]) & 15).reshape(-1, 6),
        [ints(3, 6)], {0, 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("decomposed", [True, False], ids=["decomposed", "raw"])
@pytest.mark.parametrize("name", ROW_CASES)
def test_a_prefix_is_the_prefix_of_the_whole(name, decomposed):
    f, inputs, tracked = ROW_CASES[name]
    cut, whole = region(f, inputs, decomposed=decomposed), f(*inputs)
    given = {**dict(zip(cut.inputs, held(cut, inputs), strict=True)), **cut.constants}
    for axis, length in enumerate(whole.shape):
        for size in range(1, length + 1):
            try:
                rows = Rows(cut.nodes, cut.output, Prefix(axis, size))
            except Untracked:
                assert not decomposed or axis not in tracked, f"axis {axis} is not tracked"
                break
            got = rows({node: rows.take(node, tensor) for node, tensor in given.items()})
            found = difference(got, whole.narrow(axis, 0, size))
            assert not found, f"first {size} along axis {axis}: {found}\n{cut.graph}"


def test_the_cases_reach_every_row_rule():
    reached = set()
    for f, inputs, _ in ROW_CASES.values():
        for decomposed in (True, False):
            reached |= {n.target for n in region(f, inputs, decomposed=decomposed).nodes}
    assert set(qinductor.rows._HANDLERS) <= reached


def test_a_prefix_takes_no_more_than_it_needs():
    words, scales = ints(64, 16, dtype=torch.int64), torch.rand(16, 4)

    def f(words, scales):
        q = (words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        return q.view(64, 4, 32) * scales.repeat_interleave(4, 0).unsqueeze(-1)

    cut = region(lambda w, s: f(w, s).view(64, 128), [words, scales])
    rows = Rows(cut.nodes, cut.output, Prefix(0, 6))
    assert rows.take(cut.inputs[0], words).shape == (6, 16)
    assert rows.take(cut.inputs[1], scales).shape == (2, 4)


def test_an_operator_without_a_rule_is_untracked():
    cut = region(lambda x: x.flip(0) + 1, [ints(5, 4)])
    with pytest.raises(Untracked, match="prims.rev.default has no row rule"):
        Rows(cut.nodes, cut.output, Prefix(0, 2))
    whole = Rows(cut.nodes, cut.output, None)
    assert torch.equal(whole({cut.inputs[0]: ints(5, 4)}), ints(5, 4).flip(0) + 1)


# Structures -----------------------------------------------------------------------------------


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype) + 0.5


def int8(n: int = 64, k: int = 96) -> torch.Tensor:
    return ints(n, k, high=256, dtype=torch.int16).sub(128).to(torch.int8)


def fp8(n: int, k: int) -> torch.Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * 20).to(E4M3)


def zeros(
    *shape: int, low: int = 0, high: int = 16, dtype: torch.dtype = torch.int8
) -> torch.Tensor:
    """Integer zeros; the first two are the limits."""
    found = ints(*shape, high=high - low, dtype=torch.int16) + low
    found.view(-1)[0], found.view(-1)[1] = low, high - 1
    return found.to(dtype)


def grouped(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (q.to(s.dtype).view(len(q), s.shape[1], -1) * s.unsqueeze(-1)).view_as(q)


def centred(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    blocks = q.to(s.dtype).view(len(q), max(s.shape[1], z.shape[1]), -1)
    return ((blocks - z.unsqueeze(-1)) * s.unsqueeze(-1)).view_as(q)


def blocked(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Ragged blocks of 16 x 32 by padding, a broadcast and a slice."""
    (n, k), (rows, columns) = q.shape, s.shape
    w = pad(q.float(), (0, columns * 32 - k, 0, rows * 16 - n)).view(rows, 16, columns, 32)
    return (w * s[:, None, :, None]).reshape(rows * 16, columns * 32)[:n, :k].bfloat16()


def gptq(
    words: torch.Tensor, zero_words: torch.Tensor, scale: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """[K, N]: eight codes of a column in a word; zeros less one, packed along N; group indices."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    zero = ((zero_words.unsqueeze(2) >> shifts) & 15).flatten(1) + 1
    q = ((words.unsqueeze(1) >> shifts[None, :, None]) & 15).reshape(-1, words.shape[1])
    return (q - zero[group]).to(scale.dtype) * scale[group]


WORDS, GROUP = ints(12, 64, high=1 << 31), torch.arange(96) // 32
GPTQ = [WORDS, ints(3, 8, high=1 << 31), rand(3, 64, dtype=FP16), GROUP]
CHANNEL, GROUPS = rand(64, 1), rand(64, 3)
# name: (f, leaves, n_axis, what the format must say, (axis, step, base) of scale and of zero)
STRUCTURES: dict[str, tuple[Any, list[torch.Tensor], int, str, Any, Any]] = {
    "channel": (lambda q, s: q.bfloat16() * s, [int8(), CHANNEL], 0,
                "int8 channel q*s bf16 None bf16 bf16", (0, 1, [[0], [0]]), None),
    "channel as a vector": (lambda q, s: q.bfloat16() * s[:, None], [int8(), rand(64)], 0,
                            "int8 channel q*s bf16 None bf16 bf16", (0, 1, [[0]]), None),
    "channel, in fp32": (lambda q, s: (q.float() * s).bfloat16(), [int8(), rand(64, 1, dtype=FP32)],
                         0, "int8 channel q*s fp32 None fp32 bf16", (0, 1, [[0], [0]]), None),
    "tensor": (lambda q, s: q.half() * s, [int8(), rand(1, dtype=FP16)], 0,
               "int8 tensor q*s fp16 None fp16 fp16", (0, 0, [[0]]), None),
    "tensor, no axis": (lambda q, s: q.bfloat16() * s, [fp8(64, 96), torch.tensor(0.5).bfloat16()],
                        0, "float8_e4m3fn tensor q*s bf16 None bf16 bf16", None, None),
    "input channel": (lambda q, s: (q.float() * s), [int8(8, 5), rand(5, dtype=FP32)], 0,
                      "int8 input-channel q*s fp32 None fp32 fp32", (0, 0, [[0, 1, 2, 3, 4]]),
                      None),
    "groups": (grouped, [int8(), GROUPS], 0, "int8 group-32 q*s bf16 None bf16 bf16",
               (0, 1, [[0, 0, 0], [0, 1, 2]]), None),
    "groups, turned": (lambda q, s: grouped(q, s).t(), [int8(), GROUPS], 1,
                       "int8 group-32 q*s bf16 None bf16 bf16", (0, 1, [[0, 0, 0], [0, 1, 2]]),
                       None),
    "groups of equal scales": (grouped, [int8(), torch.full((64, 3), 0.5)], 0,
                               "int8 group-32 q*s fp32 None fp32 fp32",
                               (0, 1, [[0, 0, 0], [0, 1, 2]]), None),
    "groups, [G, N]": (lambda q, s: grouped(q, s.t()), [int8(), rand(3, 64)], 0,
                       "int8 group-32 q*s bf16 None bf16 bf16", (1, 1, [[0, 1, 2], [0, 0, 0]]),
                       None),
    "groups, in e4m3": (lambda q, s: grouped(q, s.bfloat16()), [int8(), GROUPS.to(E4M3)], 0,
                        "int8 group-32 q*s float8_e4m3fn None bf16 bf16",
                        (0, 1, [[0, 0, 0], [0, 1, 2]]), None),
    "groups by an index": (lambda q, s, g: q.bfloat16() * s[:, g], [int8(), GROUPS, GROUP], 0,
                           "int8 group-32 q*s bf16 None bf16 bf16", (0, 1, [[0, 0, 0], [0, 1, 2]]),
                           None),
    "columns put in order": (lambda q, s, p: q[:, p].bfloat16() * s,
                             [int8(), CHANNEL, torch.randperm(96)], 0,
                             "int8 channel q*s bf16 None bf16 bf16", (0, 1, [[0], [0]]), None),
    "rows rolled": (lambda q, s: q.roll(3, 0).bfloat16() * s, [int8(), CHANNEL], 0,
                    "int8 channel q*s bf16 None bf16 bf16", (0, 1, [[0], [0]]), None),
    "gptq": (gptq, GPTQ, 1, "uint4 group-32 (q-z)*s fp16 int32 fp16 fp16",
             (1, 1, [[0, 1, 2], [0, 0, 0]]), (1, 1, [[0, 1, 2], [0, 0, 0]])),
    "blocks": (blocked, [fp8(40, 80), rand(3, 3, dtype=FP32)], 0,
               "float8_e4m3fn block-16x32 q*s fp32 None fp32 bf16",
               (0, 1, [[0, 0, 0], [0, 1, 2]]), None),
    "blocks of rows": (lambda q, s: q.half() * s.repeat_interleave(24, 0)[:64, None],
                       [int8(), rand(3, dtype=FP16)], 0,
                       "int8 block-24xK q*s fp16 None fp16 fp16", (0, 1, [[0]]), None),
    "divided": (lambda q, s: q.bfloat16() / s, [fp8(64, 96), CHANNEL], 0,
                "float8_e4m3fn channel q/s bf16 None bf16 bf16", (0, 1, [[0], [0]]), None),
    "no scale": (lambda q: q.bfloat16(), [int8()], 0, "int8 no scale q None None bf16 bf16", None,
                 None),
    "zero alone": (lambda q, z: q.bfloat16() - z, [int8(), zeros(64, 1, low=-9)], 0,
                   "int8 no scale q-z None int8 bf16 bf16", None, (0, 1, [[0], [0]])),
    "minimum": (lambda q, s, z: q.bfloat16() * s + z, [int8(), CHANNEL, CHANNEL - 1], 0,
                "int8 channel q*s+z bf16 bf16 bf16 bf16", (0, 1, [[0], [0]]), (0, 1, [[0], [0]])),
    "zeros coarser than scales": (centred, [int8(), GROUPS, zeros(64, 1)], 0,
                                  "int8 group-32 (q-z)*s bf16 int8 bf16 bf16",
                                  (0, 1, [[0, 0, 0], [0, 1, 2]]), (0, 1, [[0], [0]])),
    "scales coarser than zeros": (centred, [int8(), CHANNEL, zeros(64, 3)], 0,
                                  "int8 group-32 (q-z)*s bf16 int8 bf16 bf16",
                                  (0, 1, [[0], [0]]), (0, 1, [[0, 0, 0], [0, 1, 2]])),
    "zeros all equal": (centred, [ints(64, 96, **BYTES), GROUPS, torch.full((64, 3), 128)], 0,
                        "int8 group-32 q*s bf16 None bf16 bf16", (0, 1, [[0, 0, 0], [0, 1, 2]]),
                        (0, 1, [[0, 0, 0], [0, 1, 2]])),
    "zeros of the whole of uint8": (
        centred, [ints(64, 96, **BYTES), GROUPS, zeros(64, 3, high=256, dtype=torch.uint8)], 0,
        "uint8 group-32 (q-z)*s bf16 uint8 bf16 bf16", (0, 1, [[0, 0, 0], [0, 1, 2]]),
        (0, 1, [[0, 0, 0], [0, 1, 2]])),
    "one row": (lambda q, s: q.bfloat16() * s, [int8(1, 96), rand(1, 1)], 0,
                "int8 tensor q*s bf16 None bf16 bf16", (0, 0, [[0], [0]]), None),
    "not a number": (lambda q, s: q.bfloat16() * s,
                     [fp8(64, 96).fill_(float("nan")), CHANNEL * float("-inf")], 0,
                     "float8_e4m3fn channel q*s bf16 None bf16 bf16", (0, 1, [[0], [0]]), None),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name):
    f, leaves, n_axis, words, scale, zero = STRUCTURES[name]
    structure, weight = identified(f, leaves, n_axis)
    form = weight.format
    dtypes = " ".join(short(d) for d in (form.scale, form.zero, form.compute, form.dtype))
    assert f"{form.codes} {form.granularity} {form.arithmetic} {dtypes}" == words
    for parameter, want in ((structure.scale, scale), (structure.zero, zero)):
        if want is not None:
            axis, step, base = want
            strides = [math.prod(parameter.shape[i + 1 :]) for i in range(len(parameter.shape))]
            assert parameter.step == step * strides[axis]
            assert parameter.base.tolist() == [
                sum(a * b for a, b in zip(at, strides, strict=True))
                for at in zip(*base, strict=True)
            ]
    assert (structure.zero is None) == (zero is None)
    assert (structure.scale is None) == (form.scale is None)


def test_codes_scales_and_zeros_are_those_that_went_in():
    words, zero_words, scale, _ = GPTQ
    _, weight = identified(gptq, GPTQ, 1)
    shifts = torch.arange(0, 32, 4)
    codes = ((words[:, None] >> shifts[:, None]) & 15).reshape(96, 64).t()
    zero = ((zero_words[..., None] >> shifts) & 15).reshape(3, 64).t() + 1
    assert torch.equal(weight.codes, codes.to(torch.int8))
    assert torch.equal(weight.zero, zero.int()) and torch.equal(weight.scale, scale.t())


def twice(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (q.bfloat16() - z - z) * s


def terms(q: torch.Tensor, s: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    w = q.bfloat16() * s
    for term in rest:
        w = w + term
    return w


ORDER = torch.tensor([0] * 32 + [1] * 16 + [2] * 48)
# name: (f, its leaves, what the reason must match)
REFUSED: dict[str, tuple[Any, list[torch.Tensor], str]] = {
    "a codebook": (
        lambda q, t, s: t[torch.stack([q & 15, q >> 4], -1).view(64, -1).long()] * s,
        [ints(64, 48, **BYTES), torch.randn(16), CHANNEL],
        r"W must depend on the codes .* it is 1 for code 3 and for code 5 \(a codebook",
    ),
    "a curve": (
        lambda q, s: (q.bfloat16() * q.bfloat16()) * s, [int8(), CHANNEL],
        r"codes 0, 1, 2, 4 must be a straight line; it is \[0.0, 1.0, 4.0, 16.0\]",
    ),
    "act-order": (
        lambda q, s, g: q.bfloat16() * s[:, g], [int8(), GROUPS, ORDER],
        r"bfloat16\[64, 3\] must change along K in equal blocks; the first has 32 .* k = \d+ \(act",
    ),
    "unequal blocks of rows": (
        lambda q, s, g: q.bfloat16() * s[g],
        [int8(8), rand(3, 1), torch.tensor([0] * 3 + [1] * 2 + [2] * 3)],
        r"bfloat16\[3, 1\] must change along N in equal blocks; with blocks of 3, row 5",
    ),
    "a scale for each element": (
        lambda q, s: q.bfloat16() * s, [int8(), rand(64, 96)],
        r"bfloat16\[64, 96\] has one entry for each element, so it is no scale of a block",
    ),
    "two scales": (
        lambda q, s, t: q.bfloat16() * s * t, [int8(), CHANNEL, rand(96)],
        r"wanted at most one scale, found 2: bfloat16\[\d.*\] and bfloat16\[",
    ),
    "two zeros": (
        terms, [int8(), CHANNEL, rand(64, 1), rand(96)],
        r"wanted at most one zero, found 2: bfloat16\[\d.*\] and bfloat16\[",
    ),
    "a zero taken twice": (
        twice, [int8(), CHANNEL, rand(64, 1)], r"a zero of 1 must move W by 1 .*; it moves by -2.0"
    ),
    "a scale taken twice": (
        lambda q, s: (q.bfloat16() * s) * s, [int8(), CHANNEL],
        r"doubling bfloat16\[64, 1\] must double, halve or keep .*; it makes it 4 times as large",
    ),
    "divided, then added to": (
        lambda q, s, z: q.bfloat16() / s + z, [int8(), CHANNEL, rand(64, 1)],
        r"a scale that divides, with a minimum that is added",
    ),
    "a mask of elements": (
        lambda q, m, s: torch.where(m, q.bfloat16() * s, 0.0),
        [int8(), ints(64, 96) % 2 > 0, CHANNEL],
        r"W must be equal everywhere; for code 3 W\[0,0\] = \d and W\[\d+,\d+\] = \d",
    ),
    "blocks across each other": (
        lambda q, s, z: (q.bfloat16() - z.repeat_interleave(48, 1)) * s.repeat_interleave(32, 1),
        [int8(), GROUPS, zeros(64, 2)], r"scale and zero have blocks of 48 and 32",
    ),
    "two-bit codes": (
        lambda q, s: ((q[:, :, None] >> torch.arange(0, 8, 2)) & 3).view(64, 96).bfloat16() * s,
        [ints(64, 24, **BYTES), CHANNEL],
        r"no tensor holds codes: wanted .* 4 bits for each of 64x96 .*, found uint8\[64, 24\], bfl",
    ),
    "no codes": (
        lambda w, s: w * s, [rand(64, 96), CHANNEL],
        r"no tensor holds codes.*found bfloat16\[64, 96\]",
    ),
    "halved codes": (
        lambda q, s: (q.bfloat16() / 2) * s, [int8(), CHANNEL],
        r"codes must be whole numbers; under unit scales W has -?\d+\.5",
    ),
    "codes beyond a byte": (
        lambda q, s: (q.bfloat16() * 2 - 255) * s, [ints(64, 96, **BYTES), CHANNEL],
        r"codes must fit int8 or uint8; they run from -255 to 255",
    ),
    "wrapping codes": (
        lambda q, s, z: (q - z).bfloat16() * s, [int8(), CHANNEL, zeros(64, 1, high=100)],
        r"not bitwise equal .*W\[\d+,\d+\] is .* in the reference and .* in the region \(\d+ of 6",
    ),
    "a clamp": (
        lambda q, s: (q.bfloat16() * s).clamp(max=40), [int8(), CHANNEL],
        r"not bitwise equal .*int8 channel q\*s in .* in the reference and 40.0 in the region",
    ),
    "too many tensors": (
        terms, [int8(), CHANNEL, *[CHANNEL.clone() for _ in range(20)]],
        f"identification needs more than {BUDGET} evaluations",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_was_found_and_what_was_wanted(name):
    f, leaves, words = REFUSED[name]
    with pytest.raises(Refused, match=words):
        identified(f, leaves)


class Sizes(TorchDispatchMode):
    """The elements that each operator's result has, largest of each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen.append((str(func), out.numel()))
        return out


# A region's own arithmetic; a pad to whole blocks may add to the 256 rows of the second attempt.
WORK = ("aten.mul.Tensor", "aten.sub.Tensor", "prims.convert_element_type.default")
TALL = 4096
# name: (f, its leaves, n_axis)
BUDGETS: dict[str, tuple[Any, list[torch.Tensor], int]] = {
    "groups": (grouped, [int8(TALL, 64), rand(TALL, 2)], 0),
    "groups and zeros": (centred, [int8(TALL, 64), rand(TALL, 2), zeros(TALL, 2)], 0),
    "channel": (lambda q, s: q.bfloat16() * s, [int8(TALL, 64), rand(TALL, 1)], 0),
    "tensor": (lambda q, s: q.bfloat16() * s, [int8(TALL, 64), rand(1)], 0),
    "turned": (lambda q, s: (q.bfloat16() * s).t(), [int8(TALL, 64), rand(TALL, 1)], 1),
    "stored turned": (lambda q, s: q.bfloat16() * s, [int8(64, TALL), rand(TALL)], 1),
    "blocks": (blocked, [fp8(TALL - 8, 80), rand(TALL // 16, 3)], 0),
    "blocks of 128": (
        lambda q, s: q.bfloat16() * s.repeat_interleave(128, 0).repeat_interleave(32, 1),
        [fp8(TALL, 64), rand(TALL // 128, 2)], 0,
    ),
    "gptq": (gptq, [ints(8, TALL, high=1 << 31), ints(2, TALL // 8, high=1 << 31),
                    rand(2, TALL, dtype=FP16), torch.arange(64) // 32], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_only_two_evaluations_are_of_the_whole_weight(name, monkeypatch):
    f, leaves, n_axis = BUDGETS[name]
    cut = region(f, leaves, n_axis)
    probed: list[int] = []
    run = Rows.__call__

    def counted(rows: Rows, given: Any) -> torch.Tensor:
        value = run(rows, given)
        probed.append(value.shape[n_axis])
        return value

    monkeypatch.setattr(Rows, "__call__", counted)
    with Sizes() as probes:
        structure = identify(cut, held(cut, leaves))
    n, k = cut.shape
    assert structure.evaluations == len(probed) <= BUDGET - 2
    assert max(probed) <= max(ROW_COUNTS)
    assert max(size for op, size in probes.seen if op in WORK) <= max(ROW_COUNTS) * k * 5 // 4
    runs: collections.Counter[Any] = collections.Counter()
    call = qinductor.regions.call

    def counting(node: Any, *rest: Any) -> torch.Tensor:
        value = call(node, *rest)
        runs[node] += value.numel() >= n * k
        return value

    monkeypatch.setattr(qinductor.regions, "call", counting)
    read(cut, structure, held(cut, leaves))
    assert max(runs.values()) == runs[cut.output] == 2


def test_an_operator_without_a_row_rule_is_probed_on_the_whole():
    structure, weight = identified(lambda q, s: q.flip(0).bfloat16() * s, [int8(), CHANNEL])
    assert weight.format.granularity == "channel" and structure.scale.bn == 1
    assert torch.equal(weight.codes, int8().flip(0))


def test_evaluation_leaves_every_leaf_as_it_was():
    before = [leaf.clone() for leaf in GPTQ]
    identified(gptq, GPTQ, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, GPTQ, strict=True))


def test_a_structure_serves_other_weights_of_its_signature():
    other = [ints(12, 64, high=1 << 20), ints(3, 8, high=1 << 20), GPTQ[2] * 3, GROUP]
    one, two = region(gptq, GPTQ, 1), region(gptq, other, 1)
    assert one.signature == two.signature
    assert one.signature != region(gptq, GPTQ, 0).signature
    structure = identify(one, held(one, GPTQ))
    weight = read(two, structure, held(two, other))
    ours = dequantize(weight)
    assert not difference(ours, gptq(*other).t())


def test_constants_are_part_of_the_signature():
    def by(shift: int) -> Region:
        return region(lambda q: q >> torch.tensor([0, shift], dtype=torch.int8), [int8(4, 2)])

    assert by(4).signature == by(4).signature != by(3).signature


# Random formats -------------------------------------------------------------------------------


def packed_words(codes: torch.Tensor, word: torch.dtype, order: list[int]) -> torch.Tensor:
    """Codes 0..15 [R, C] in words [R, C / per]; nibble j of a word holds element order[j]."""
    chunks = codes.view(codes.shape[0], -1, len(order)).long()
    return sum(chunks[:, :, i] << 4 * j for j, i in enumerate(order)).to(word)


def unpacking(spelling: str, order: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The inverse of `packed_words`, as a model may write it."""
    shifts = [4 * order.index(i) for i in range(len(order))]

    def by_tensor(w: torch.Tensor) -> torch.Tensor:
        return ((w.unsqueeze(-1) >> torch.tensor(shifts, dtype=w.dtype)) & 15).reshape(len(w), -1)

    def by_stack(w: torch.Tensor) -> torch.Tensor:
        return torch.stack([(w >> shift) & 15 for shift in shifts], -1).flatten(-2)

    def by_writes(w: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(w), w.shape[1] * len(shifts), dtype=w.dtype)
        for i, shift in enumerate(shifts):
            out[:, i :: len(shifts)] = (w >> shift) & 15
        return out

    def by_rows(w: torch.Tensor) -> torch.Tensor:
        wide = w.t().unsqueeze(1) >> torch.tensor(shifts, dtype=w.dtype)[None, :, None]
        return (wide & 15).reshape(-1, len(w)).t()

    return {"tensor": by_tensor, "stack": by_stack, "writes": by_writes, "rows": by_rows}[spelling]


class Random:
    """A random way to store and dequantise a weight: its leaves, function and codes.

    turned   whether it is stored, and computed, as [K, N]
    unpacks  whether codes are nibbles of a word, element i of a word in nibble order.index(i)
    late     whether a scale is converted after it is spread
    refused  what the reason must match, where the format is none of ours
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        pick = random.Random(seed)
        self.turned, self.late = pick.random() < 0.4, pick.random() < 0.5
        self.n, self.k = pick.choice([32, 48, 64, 96]), pick.choice([64, 96, 128, 192])
        self.group = pick.choice([16, 32, self.k // 2, self.k])
        self.arithmetic = pick.choice(["q*s", "q/s", "(q-z)*s", "(q-z)*s", "q*s-z*s", "q*s+m"])
        self.unpacks = pick.random() < 0.75
        words = [torch.uint8, torch.int16, torch.int32, torch.int32, torch.int64]
        self.word = pick.choice(words if self.unpacks else [torch.int8, torch.uint8])
        self.order = list(range(torch.iinfo(self.word).bits // 4))
        pick.shuffle(self.order)
        self.spelling = pick.choice(["tensor", "stack", "writes", "rows"])
        self.offset = 8 if self.unpacks and pick.random() < 0.5 else 0
        self.scale = pick.choice([BF16, FP16, FP32, E4M3])
        self.compute = pick.choice([BF16, FP16, FP32])
        self.dtype = pick.choice([self.compute, BF16])
        self.zero = pick.choice(["int8", "float", "plus one", "packed"])
        self.zero = "float" if self.arithmetic == "q*s+m" else self.zero
        self.nibbles = list(range(8))
        pick.shuffle(self.nibbles)
        if self.k // self.group % 8 and self.zero == "packed":
            self.zero = "int8"
        self.stored = pick.choice(["plain", "transposed", "with a one"])
        self.spread = pick.choice(["view", "repeat", "expand"])
        # z * s of full size is one number for each element: no scale and no zero of a block.
        computed = self.arithmetic == "q*s-z*s" and self.spread != "view"
        shape = rf"\[{self.n}, {self.k}\]|\[{self.k}, {self.n}\]"
        self.refused = f"({shape}) has one entry for each element" if computed else ""
        self.text = " ".join(f"{name}={value}" for name, value in vars(self).items())
        self.codes, self.leaves = self._weight()

    def _weight(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        low, high = {torch.int8: (-128, 128)}.get(self.word, (0, 256))
        low, high = (0, 16) if self.unpacks else (low, high)
        codes = torch.randint(low, high, (self.n, self.k))
        grid = self.n, self.k // self.group
        scale = (torch.rand(grid) + 0.2) * (1 if self.scale is E4M3 else 0.05)
        words = codes.t().contiguous() if self.turned else codes
        words = packed_words(words, self.word, self.order) if self.unpacks else words.to(self.word)
        leaves = [words, self._store(scale.to(self.scale))]
        zero = torch.randint(0, 15, grid)
        if self.zero == "float":
            leaves.append(self._store((zero + torch.rand(grid)).to(self.compute)))
        elif self.zero == "packed":
            leaves.append(packed_words(zero, torch.int32, self.nibbles))
        else:
            leaves.append(self._store(zero.to(torch.int8) - int(self.zero == "plus one")))
        return codes, leaves if self.arithmetic not in ("q*s", "q/s") else leaves[:2]

    def _store(self, grid: torch.Tensor) -> torch.Tensor:
        if self.stored == "with a one":
            return grid.unsqueeze(-1)
        turned = self.turned != (self.stored == "transposed")
        return grid.t().contiguous() if turned else grid

    def _load(self, leaf: torch.Tensor) -> torch.Tensor:
        """The grid, turned as W is."""
        if self.stored == "with a one":
            return leaf.squeeze(-1).t() if self.turned else leaf.squeeze(-1)
        return leaf.t() if self.stored == "transposed" else leaf

    def _whole(self, grid: torch.Tensor) -> torch.Tensor:
        """A grid at the size of W, or what broadcasts to its groups."""
        axis = int(not self.turned)
        if self.spread == "repeat":
            return grid.repeat_interleave(self.group, axis)
        grid = grid.unsqueeze(axis + 1)
        if self.spread == "view":
            return grid
        shape = [-1, -1, -1]
        shape[axis + 1] = self.group
        return grid.expand(shape).flatten(axis, axis + 1)

    def _zeros(self, leaf: torch.Tensor) -> torch.Tensor:
        if self.zero == "packed":
            z = unpacking("tensor", self.nibbles)(leaf)
            z = z.t() if self.turned else z
        else:
            z = self._load(leaf) + int(self.zero == "plus one")
        return self._whole(z.to(self.compute))

    def __call__(self, words: torch.Tensor, scale: torch.Tensor, *rest: torch.Tensor) -> Any:
        q = unpacking(self.spelling, self.order)(words) if self.unpacks else words
        if self.offset and self.spelling in ("stack", "writes"):
            q = (q.to(torch.int8) - self.offset).to(self.compute)
        else:
            q = q.to(self.compute) - self.offset
        s = self._load(scale)
        s = self._whole(s).to(self.compute) if self.late else self._whole(s.to(self.compute))
        z = self._zeros(rest[0]) if rest else 0
        whole = q.shape
        if self.spread == "view":
            q = q.unflatten(int(not self.turned), (-1, self.group))
        w = {
            "q*s": lambda: q * s,
            "q/s": lambda: q / s,
            "(q-z)*s": lambda: (q - z) * s,
            "q*s-z*s": lambda: q * s - z * s,
            "q*s+m": lambda: q * s + z,
        }[self.arithmetic]()
        return w.reshape(whole).to(self.dtype)


@pytest.mark.parametrize("seed", range(60))
def test_random_formats(seed):
    made = Random(seed)
    print(made.text)
    if made.refused:
        with pytest.raises(Refused, match=made.refused):
            identified(made, made.leaves, int(made.turned))
        return
    _, weight = identified(made, made.leaves, int(made.turned))
    moved = weight.codes.long() - made.codes
    assert (moved == moved[0, 0]).all(), f"other codes than were packed, by {moved.unique()}"
