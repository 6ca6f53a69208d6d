"""Rows: a prefix of a region's value is computed from prefixes of its inputs, and is the same."""

from collections.abc import Callable

import pytest
import torch
from probing import BYTES, held, ints, region
from torch.nn.functional import embedding, pad

from qinductor.patterns.weight_formats import rows as row_rules
from qinductor.patterns.weight_formats.prove import difference
from qinductor.patterns.weight_formats.rows import Prefix, Rows, Untracked
from qinductor.regions import Axes

aten = torch.ops.aten


def scattered(x: torch.Tensor, y: torch.Tensor, axis: int) -> torch.Tensor:
    out = torch.zeros_like(x)
    out.narrow(axis, 1, y.shape[axis]).copy_(y)
    return out


def strided_writes(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    out[:, 0::2], out[:, 1::2] = x & 15, x >> 4
    return out


def mask_put(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[m > 4] = 3
    return out


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
    "embedding": (
        lambda t, i: embedding(i, t), [ints(16, 3), ints(5, 4, high=16, dtype=torch.int64)],
        {0, 1, 2},
    ),
    "gather": (
        lambda t, i: t.gather(1, i), [ints(5, 16), ints(5, 4, high=16, dtype=torch.int64)], {0, 1},
    ),
    "gather of an expanded": (
        lambda t, i: t.expand(5, -1).gather(1, i),
        [ints(1, 16), ints(5, 4, high=16, dtype=torch.int64)], {0, 1},
    ),
    "gather rows": (
        lambda t, i: t.gather(0, i), [ints(5, 4), ints(7, 4, high=5, dtype=torch.int64)], {0, 1},
    ),
    "unsafe index": (
        lambda x, i: aten._unsafe_index(x, [None, i]),
        [ints(5, 4), ints(7, high=4, dtype=torch.int64)], {0, 1},
    ),
    "take": (lambda t, i: t.take(i), [ints(16), ints(5, 4, high=16, dtype=torch.int64)], set()),
    "mask written": (
        lambda x, m: x.masked_fill(m > 4, 3), [ints(5, 4), ints(5, 4, high=9)], {0, 1},
    ),
    "mask put": (mask_put, [ints(5, 4), ints(5, 4, high=9)], {0, 1}),
    "mask of rows put": (mask_put, [ints(5, 4), ints(5, high=9)], set()),
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
    "select_scatter": (
        lambda x, y: aten.select_scatter(x, y, 1, -1), [ints(5, 6, 3), ints(5, 3)], {0, 2},
    ),
    "select_scatter rows": (
        lambda x, y: aten.select_scatter(x, y, 0, 2), [ints(5, 6, 3), ints(6, 3)], {1, 2},
    ),
    "sum": (lambda x: x.sum(1), [ints(5, 4, 3)], {0, 1}),
    "sum of the last": (lambda x: x.sum(-1), [ints(5, 4, 3)], {0, 1}),
    "sum of two, kept": (lambda x: x.sum((0, -1), keepdim=True), [ints(5, 4, 3)], {0, 1, 2}),
    "sum of two": (lambda x: x.sum((0, 2)), [ints(5, 4, 3)], {0}),
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


@pytest.fixture
def untracked(monkeypatch):
    """Why nodes took all of their inputs, since it was cleared."""
    reasons, rule = [], row_rules._rule

    def recorded(node, want):
        try:
            return rule(node, want)
        except Untracked as reason:
            reasons.append(str(reason))
            raise

    monkeypatch.setattr(row_rules, "_rule", recorded)
    return reasons


@pytest.mark.parametrize("decomposed", [True, False], ids=["decomposed", "raw"])
@pytest.mark.parametrize("name", ROW_CASES)
def test_a_prefix_is_the_prefix_of_the_whole(name, decomposed, untracked):
    f, inputs, tracked = ROW_CASES[name]
    cut, whole = region(f, inputs, Axes(0), decomposed), f(*inputs)
    given = {**dict(zip(cut.inputs, held(cut, inputs), strict=True)), **cut.constants}
    for axis, length in enumerate(whole.shape):
        for size in range(1, length + 1):
            untracked.clear()
            rows = Rows(cut.nodes, cut.output, Prefix(axis, size))
            assert not untracked or not decomposed or axis not in tracked, untracked
            got = rows({node: rows.take(node, tensor) for node, tensor in given.items()})
            found = difference(got, whole.narrow(axis, 0, size))
            assert not found, f"first {size} along axis {axis}: {found}\n{cut.graph}"


def test_the_cases_reach_every_row_rule():
    reached = set()
    for f, inputs, _ in ROW_CASES.values():
        for decomposed in (True, False):
            reached |= {n.target for n in region(f, inputs, Axes(0), decomposed).nodes}
    missing = set(map(str, row_rules._HANDLERS)) - set(map(str, reached))
    assert not missing


def test_a_prefix_takes_no_more_than_it_needs():
    words, scales = ints(64, 16, dtype=torch.int64), torch.rand(16, 4)

    def f(words, scales):
        q = (words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        return q.view(64, 4, 32) * scales.repeat_interleave(4, 0).unsqueeze(-1)

    cut = region(lambda w, s: f(w, s).view(64, 128), [words, scales])
    rows = Rows(cut.nodes, cut.output, Prefix(0, 6))
    assert rows.take(cut.inputs[0], words).shape == (6, 16)
    assert rows.take(cut.inputs[1], scales).shape == (2, 4)


def test_an_operator_without_a_rule_takes_all_of_its_inputs(untracked):
    cut = region(lambda x, y: x.flip(0) + y, [ints(5, 4), ints(5, 4)], Axes(0))
    rows = Rows(cut.nodes, cut.output, Prefix(0, 2))
    assert untracked == ["prims.rev.default has no row rule"]
    x, y = cut.inputs
    given = {node: rows.take(node, ints(5, 4)) for node in (x, y)}
    assert given[x].shape == (5, 4) and given[y].shape == (2, 4)
    assert torch.equal(rows(given), (ints(5, 4).flip(0) + ints(5, 4))[:2])
