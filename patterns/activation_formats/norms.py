"""What makes y of its inputs, where that is an RMS norm, of a sum with a residual or not."""

import dataclasses

import torch

from qinductor.kernels.quantize import Source, value
from qinductor.patterns.activation_formats.identify import battery, plain
from qinductor.patterns.probe import Function, numbers, same

ROWS = 24  # of a run


def norm_of(region: Function) -> tuple[int, Source | None, bool]:
    """(runs it took, the norm that makes the output of the inputs or None, False)."""
    inputs = [node.meta["val"] for node in region.inputs]
    y, dtype = region.outputs[0].meta["val"], inputs[0].dtype
    k = int(y.shape[-1])
    weights = [node.meta["val"] for node in region.given if node.meta["val"].dim() == 1]
    fits = all((v.shape[-1], v.dtype) == (k, dtype) for v in inputs)
    if not fits or len(weights) != len(region.given) or [len(w) for w in weights] != [k]:
        return 0, None, False
    rows = region.rows(ROWS)
    seeded = torch.Generator().manual_seed(6)
    drawn = [torch.randn((rows, k), generator=seeded) for _ in inputs]
    size = torch.logspace(-4, 4, rows)[:, None]
    tensors = [(t * size).to(dtype) for t in drawn]
    tensors[0][::5] = battery(rows, k, dtype, [1.0], 7)[::5]
    weight = torch.randn(k, generator=seeded).to(weights[0].dtype)
    (wanted,) = region(tensors, [weight])
    norm = "rms" if len(inputs) == 1 else "add+rms"
    small = [v for v in numbers(region).every if 0 < v < 1]
    for eps in (*small, 0.0):
        source = Source(y=y.dtype, norm=norm, eps=eps)
        base = dataclasses.replace(plain(k, dtype, torch.int8, k, dtype), source=source)
        if same(value(base, [*tensors, weight])[0], wanted.reshape(rows, k)).all():
            return 1, source, False
    return 1, None, False
