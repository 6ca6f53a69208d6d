"""Identification and proof of regions alone, on small real tensors: blocks, arithmetic, budget."""

import collections
from typing import Any

import pytest
import torch
from formats import FORMATS
from probing import (
    BF16,
    BYTES,
    E4M3,
    EKN,
    ENK,
    FP16,
    FP32,
    KN,
    NK,
    centred,
    fp8,
    gptq,
    grouped,
    held,
    identified,
    int8,
    ints,
    rand,
    region,
    words,
    zeros,
)
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

import qinductor.regions
from qinductor.contracts import dequantize
from qinductor.patterns.weight_formats.identify import ROW_COUNTS, identify
from qinductor.patterns.weight_formats.probe import BUDGET
from qinductor.patterns.weight_formats.prove import difference, read
from qinductor.patterns.weight_formats.rows import Rows
from qinductor.regions import Axes, Region


def blocked(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Ragged blocks of 16 x 32 by padding, a broadcast and a slice."""
    (n, k), (rows, columns) = q.shape, s.shape
    w = pad(q.float(), (0, columns * 32 - k, 0, rows * 16 - n)).view(rows, 16, columns, 32)
    return (w * s[:, None, :, None]).reshape(rows * 16, columns * 32)[:n, :k].bfloat16()


WORDS, GROUP = ints(12, 64, high=1 << 31), torch.arange(96) // 32
GPTQ = [WORDS, ints(3, 8, high=1 << 31), rand(3, 64, dtype=FP16), GROUP]
CHANNEL, GROUPS = rand(64, 1), rand(64, 3)
SHUFFLED = GROUP[torch.randperm(96, generator=torch.Generator().manual_seed(0))]
# name: (f, leaves, axes, what the format must say)
STRUCTURES: dict[str, tuple[Any, list[torch.Tensor], Axes, str]] = {
    "channel": (lambda q, s: q.bfloat16() * s, [int8(), CHANNEL], NK,
                "int8 channel q*s bf16 None bf16 bf16"),
    "channel as a vector": (lambda q, s: q.bfloat16() * s[:, None], [int8(), rand(64)], NK,
                            "int8 channel q*s bf16 None bf16 bf16"),
    "channel, in fp32": (lambda q, s: (q.float() * s).bfloat16(), [int8(), rand(64, 1, dtype=FP32)],
                         NK, "int8 channel q*s fp32 None fp32 bf16"),
    "tensor": (lambda q, s: q.half() * s, [int8(), rand(1, dtype=FP16)], NK,
               "int8 tensor q*s fp16 None fp16 fp16"),
    "tensor, no axis": (lambda q, s: q.bfloat16() * s, [fp8(64, 96), torch.tensor(0.5).bfloat16()],
                        NK, "float8_e4m3fn tensor q*s bf16 None bf16 bf16"),
    "input channel": (lambda q, s: q.float() * s, [int8(8, 5), rand(5, dtype=FP32)], NK,
                      "int8 input-channel q*s fp32 None fp32 fp32"),
    "groups": (grouped, [int8(), GROUPS], NK, "int8 group-32 q*s bf16 None bf16 bf16"),
    "groups, turned": (lambda q, s: grouped(q, s).t(), [int8(), GROUPS], KN,
                       "int8 group-32 q*s bf16 None bf16 bf16"),
    "groups, [G, N]": (lambda q, s: grouped(q, s.t()), [int8(), rand(3, 64)], NK,
                       "int8 group-32 q*s bf16 None bf16 bf16"),
    "groups, in e4m3": (lambda q, s: grouped(q, s.bfloat16()), [int8(), GROUPS.to(E4M3)], NK,
                        "int8 group-32 q*s float8_e4m3fn None bf16 bf16"),
    "groups by an index": (lambda q, s, g: q.bfloat16() * s[:, g], [int8(), GROUPS, GROUP], NK,
                           "int8 group-32 q*s bf16 None bf16 bf16"),
    "groups of 1.5 words": (lambda q, s: grouped(q, s), [int8(64, 96), rand(64, 8)], NK,
                            "int8 group-12 q*s bf16 None bf16 bf16"),
    "columns put in order": (lambda q, s, p: q[:, p].bfloat16() * s,
                             [int8(), CHANNEL, torch.randperm(96)], NK,
                             "int8 channel q*s bf16 None bf16 bf16"),
    "rows rolled": (lambda q, s: q.roll(3, 0).bfloat16() * s, [int8(), CHANNEL], NK,
                    "int8 channel q*s bf16 None bf16 bf16"),
    "rows flipped": (lambda q, s: q.flip(0).bfloat16() * s, [int8(), CHANNEL], NK,
                     "int8 channel q*s bf16 None bf16 bf16"),
    "gptq": (gptq, GPTQ, KN, "uint4 group-32 (q-z)*s fp16 int16 fp16 fp16"),
    "gptq, [N, K]": (lambda *leaves: gptq(*leaves).t(), GPTQ, NK,
                     "uint4 group-32 (q-z)*s fp16 int16 fp16 fp16"),
    "blocks": (blocked, [fp8(40, 80), rand(3, 3, dtype=FP32)], NK,
               "float8_e4m3fn block-16x32 q*s fp32 None fp32 bf16"),
    "blocks of rows": (lambda q, s: q.half() * s.repeat_interleave(24, 0)[:64, None],
                       [int8(), rand(3, dtype=FP16)], NK,
                       "int8 block-24xK q*s fp16 None fp16 fp16"),
    "divided": (lambda q, s: q.bfloat16() / s, [fp8(64, 96), CHANNEL], NK,
                "float8_e4m3fn channel q/s bf16 None bf16 bf16"),
    "multiplied by one over": (lambda q, s: q.bfloat16() * (1 / s), [fp8(64, 96), CHANNEL], NK,
                               "float8_e4m3fn channel q*s bf16 None bf16 bf16"),
    "no scale": (lambda q: q.bfloat16(), [int8()], NK, "int8 no scale q None None bf16 bf16"),
    "zero alone": (lambda q, z: q.bfloat16() - z, [int8(), zeros(64, 1, low=-9)], NK,
                   "int8 no scale q-z None int8 bf16 bf16"),
    "minimum": (lambda q, s, z: q.bfloat16() * s + z, [int8(), CHANNEL, CHANNEL - 1], NK,
                "int8 channel q*s+z bf16 bf16 bf16 bf16"),
    "minimum, taken away": (lambda q, s, z: s * q.bfloat16() - z, [int8(), CHANNEL, CHANNEL - 1],
                            NK, "int8 channel q*s+z bf16 bf16 bf16 bf16"),
    "divided, then added to": (lambda q, s, z: q.bfloat16() / s + z, [int8(), CHANNEL, CHANNEL - 1],
                               NK, "int8 channel q/s+z bf16 bf16 bf16 bf16"),
    "zero inside, divided": (lambda q, s, z: (q.bfloat16() - z) / s,
                             [int8(), CHANNEL, zeros(64, 1)], NK,
                             "int8 channel (q-z)/s bf16 int8 bf16 bf16"),
    "zero inside, in fp32": (
        lambda q, s, z: ((q.float() - z) * s).bfloat16(),
        [int8(), CHANNEL.float(), rand(64, 1, dtype=FP32)], NK,
        "int8 channel (q-z)*s fp32 fp32 fp32 bf16"),
    "zero inside, of another dtype": (
        lambda q, s, z: (q.bfloat16() - z).float() * s, [int8(), CHANNEL.float(), rand(64, 1)], NK,
        "int8 channel (q-z)*s fp32 bf16 fp32 fp32"),
    "zero inside, added": (lambda q, s, z: (q.bfloat16() + z) * s, [int8(), CHANNEL, zeros(64, 1)],
                           NK, "int8 channel (q-z)*s bf16 int16 bf16 bf16"),
    "zeros times scales": (lambda q, s, z: q.bfloat16() * s - z * s,
                           [int8(), CHANNEL, zeros(64, 1, high=256, dtype=torch.uint8)], NK,
                           "int8 channel q*s+z bf16 bf16 bf16 bf16"),
    "zeros times scales, at full size": (
        lambda q, s, z: q.bfloat16() * s.repeat_interleave(32, 1)
        - z.repeat_interleave(32, 1).bfloat16() * s.repeat_interleave(32, 1),
        [int8(), GROUPS, zeros(64, 3)], NK, "int8 group-32 q*s+z bf16 bf16 bf16 bf16"),
    "zeros times scales, in groups": (
        lambda q, s, z: (q.bfloat16().view(64, 3, 32) * s[..., None] - (z * s)[..., None])
        .view(64, 96),
        [int8(), GROUPS, zeros(64, 3)], NK, "int8 group-32 q*s+z bf16 bf16 bf16 bf16"),
    "zeros in e4m3": (lambda q, s, z: (q.bfloat16() - z.bfloat16()) * s,
                      [int8(), CHANNEL, rand(64, 1).to(E4M3)], NK,
                      "int8 channel (q-z)*s bf16 float8_e4m3fn bf16 bf16"),
    "a minimum in e4m3": (lambda q, s, z: q.bfloat16() * s - z.bfloat16(),
                          [int8(), CHANNEL, rand(64, 1).to(E4M3)], NK,
                          "int8 channel q*s+z bf16 bf16 bf16 bf16"),
    "zeros coarser than scales": (centred, [int8(), GROUPS, zeros(64, 1)], NK,
                                  "int8 group-32 (q-z)*s bf16 int8 bf16 bf16"),
    "scales coarser than zeros": (centred, [int8(), CHANNEL, zeros(64, 3)], NK,
                                  "int8 group-32 (q-z)*s bf16 int8 bf16 bf16"),
    "zeros all equal": (centred, [ints(64, 96, **BYTES), GROUPS, torch.full((64, 3), 128)], NK,
                        "int8 group-32 q*s bf16 None bf16 bf16"),
    "zeros of the whole of uint8": (
        centred, [ints(64, 96, **BYTES), GROUPS, zeros(64, 3, high=256, dtype=torch.uint8)], NK,
        "uint8 group-32 (q-z)*s bf16 uint8 bf16 bf16"),
    "a minimum of zeros": (lambda q, s, z: q.bfloat16() * s + z,
                           [int8(), CHANNEL, torch.zeros(64, 1, dtype=BF16)], NK,
                           "int8 channel q*s bf16 None bf16 bf16"),
    "zeros that the graph makes": (
        lambda q, s: (q - torch.full((64, 1), 8)) * s + torch.zeros(64, 1, dtype=BF16),
        [ints(64, 96, high=16, dtype=torch.int8), CHANNEL], NK,
        "int4 channel q*s bf16 None bf16 bf16"),
    "channel and tensor": (lambda q, s, t: q.bfloat16() * s * t, [int8(), CHANNEL, rand(1)], NK,
                           "int8 channel q*s*t bf16 None bf16 bf16 outer=bf16"),
    "tensor and channel": (lambda q, s, t: q.bfloat16() * t * s, [int8(), CHANNEL, rand(1)], NK,
                           "int8 channel q*t*s bf16 None bf16 bf16 outer=bf16"),
    "groups and channel": (lambda q, s, t: grouped(q, s) * t, [int8(), GROUPS, CHANNEL], NK,
                           "int8 group-32 q*s*t bf16 None bf16 bf16 outer=bf16"),
    "channel and groups": (lambda q, s, t: grouped(q.bfloat16() * t, s), [int8(), GROUPS, CHANNEL],
                           NK, "int8 group-32 q*t*s bf16 None bf16 bf16 outer=bf16"),
    "input and output channel": (lambda q, s, t: q.bfloat16() * s * t, [int8(), CHANNEL, rand(96)],
                                 NK, "int8 input-channel q*t*s bf16 None bf16 bf16 outer=bf16"),
    "groups, then divided": (lambda q, s, t: grouped(q, s) / t, [int8(), GROUPS, CHANNEL], NK,
                             "int8 group-32 q*s/t bf16 None bf16 bf16 outer=bf16"),
    "divided, then groups": (lambda q, s, t: grouped(q.bfloat16() / t, s),
                             [int8(), GROUPS, CHANNEL], NK,
                             "int8 group-32 q/t*s bf16 None bf16 bf16 outer=bf16"),
    "divided twice": (lambda q, s, t: q.bfloat16() / s / t, [int8(), CHANNEL, rand(1)], NK,
                      "int8 channel q/s/t bf16 None bf16 bf16 outer=bf16"),
    "two scales and a zero": (lambda q, s, z, t: centred(q, s, z) * t,
                              [int8(), GROUPS, zeros(64, 3), CHANNEL], NK,
                              "int8 group-32 (q-z)*s*t bf16 int8 bf16 bf16 outer=bf16"),
    "two scales and a minimum": (
        lambda q, s, z, t: grouped(q, s) * t + z, [int8(), GROUPS, CHANNEL - 1, CHANNEL], NK,
        "int8 group-32 q*s*t+z bf16 bf16 bf16 bf16 outer=bf16"),
    "act-order": (lambda q, s, g: q.bfloat16() * s[:, g], [int8(), GROUPS, SHUFFLED], NK,
                  "int8 group-32 q*s bf16 None bf16 bf16 permuted"),
    "act-order and a channel": (lambda q, s, g, t: q.bfloat16() * s[:, g] * t,
                                [int8(), GROUPS, SHUFFLED, CHANNEL], NK,
                                "int8 group-32 q*s*t bf16 None bf16 bf16 outer=bf16 permuted"),
    "act-order and zeros": (
        lambda q, s, z, g: (q.bfloat16() - z[:, g]) * s[:, g],
        [int8(), GROUPS, zeros(64, 3), SHUFFLED], NK,
        "int8 group-32 (q-z)*s bf16 int8 bf16 bf16 permuted"),
    "act-order and a zero a row": (
        lambda q, s, z, g: (q.bfloat16() - z) * s[:, g],
        [int8(), GROUPS, zeros(64, 1), SHUFFLED], NK,
        "int8 group-32 (q-z)*s bf16 int8 bf16 bf16 permuted"),
    "act-order gptq": (gptq, [*GPTQ[:3], SHUFFLED], KN,
                       "uint4 group-32 (q-z)*s fp16 int16 fp16 fp16 permuted"),
    "act-order of columns": (lambda q, s, p: grouped(q, s)[:, p],
                             [int8(), GROUPS, torch.randperm(96)], NK,
                             "int8 group-32 q*s bf16 None bf16 bf16 permuted"),
    "one row": (lambda q, s: q.bfloat16() * s, [int8(1, 96), rand(1, 1)], NK,
                "int8 tensor q*s bf16 None bf16 bf16"),
    "one row of groups": (grouped, [int8(1, 96), rand(1, 3)], NK,
                          "int8 group-32 q*s bf16 None bf16 bf16"),
    "one column": (lambda q, s: q.bfloat16() * s, [int8(64, 1), rand(64, 1)], NK,
                   "int8 channel q*s bf16 None bf16 bf16"),
    "one element": (lambda q, s: q.bfloat16() * s, [int8(1, 1), rand(1, 1)], NK,
                    "uint8 tensor q*s bf16 None bf16 bf16"),
    "two rows": (lambda q, s: q.bfloat16() * s, [int8(2, 96), rand(2, 1)], NK,
                 "int8 channel q*s bf16 None bf16 bf16"),
    "fewer rows than a block": (
        lambda q, s: q.float() * s.repeat_interleave(128, 0)[:40].repeat_interleave(32, 1),
        [fp8(40, 96), rand(1, 3, dtype=FP32)], NK,
        "float8_e4m3fn block-40x32 q*s fp32 None fp32 fp32"),
    "K not divisible by the group": (
        lambda q, s: q.bfloat16() * s.repeat_interleave(32, 1)[:, :80], [int8(64, 80), GROUPS], NK,
        "int8 group-32 q*s bf16 None bf16 bf16"),
    "experts, a tensor scale each": (lambda q, s: q.bfloat16() * s.view(-1, 1, 1),
                                     [int8(4, 64, 96), rand(4)], ENK,
                                     "int8 block-64xK q*s bf16 None bf16 bf16"),
    "experts, one scale": (lambda q, s: q.bfloat16() * s, [int8(4, 64, 96), rand(1)], ENK,
                           "int8 block-64xK q*s bf16 None bf16 bf16"),
    "experts, channel": (lambda q, s: q.bfloat16() * s, [fp8(4, 64, 96), rand(4, 64, 1)], ENK,
                         "float8_e4m3fn channel q*s bf16 None bf16 bf16"),
    "experts, [E, K, N], channel": (lambda q, s: q.bfloat16() * s, [fp8(4, 96, 64), rand(4, 1, 64)],
                                    EKN, "float8_e4m3fn channel q*s bf16 None bf16 bf16"),
    "experts, groups": (grouped, [int8(4, 64, 96), rand(4, 64, 3)], ENK,
                        "int8 group-32 q*s bf16 None bf16 bf16"),
    "experts, groups and zeros": (centred, [int8(4, 64, 96), rand(4, 64, 3), zeros(4, 64, 3)], ENK,
                                  "int8 group-32 (q-z)*s bf16 int8 bf16 bf16"),
    "experts, blocks": (
        lambda q, s: q.float() * s.repeat_interleave(32, 1).repeat_interleave(48, 2),
        [fp8(4, 64, 96), rand(4, 2, 2, dtype=FP32)], ENK,
        "float8_e4m3fn block-32x48 q*s fp32 None fp32 fp32"),
    "experts, groups and a tensor scale each": (
        lambda q, s, t: grouped(q, s) * t.view(-1, 1, 1),
        [int8(4, 64, 96), rand(4, 64, 3), rand(4)], ENK,
        "int8 group-32 q*s*t bf16 None bf16 bf16 outer=bf16"),
    "experts, turned groups": (lambda q, s: grouped(q, s).mT, [int8(4, 64, 96), rand(4, 64, 3)],
                               EKN, "int8 group-32 q*s bf16 None bf16 bf16"),
    "experts, shared scales": (lambda q, s: q.bfloat16() * s, [int8(4, 64, 96), rand(64, 1)], ENK,
                               "int8 channel q*s bf16 None bf16 bf16"),
    "one expert": (grouped, [int8(1, 64, 96), rand(1, 64, 3)], ENK,
                   "int8 group-32 q*s bf16 None bf16 bf16"),
    "not a number": (lambda q, s: q.bfloat16() * s,
                     [fp8(64, 96).fill_(float("nan")), CHANNEL * float("-inf")], NK,
                     "float8_e4m3fn channel q*s bf16 None bf16 bf16"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name):
    f, leaves, axes, said = STRUCTURES[name]
    structure, weight = identified(f, leaves, axes)
    assert words(weight) == said
    assert structure.zero is not None or weight.zero is None
    assert len(structure.scales) == (weight.scale is not None) + (weight.outer is not None)


def test_codes_scales_and_zeros_are_those_that_went_in():
    words, zero_words, scale, _ = GPTQ
    _, weight = identified(gptq, GPTQ, KN)
    shifts = torch.arange(0, 32, 4)
    codes = ((words[:, None] >> shifts[:, None]) & 15).reshape(96, 64).t()
    zero = ((zero_words[..., None] >> shifts) & 15).reshape(3, 64).t() + 1
    assert torch.equal(weight.codes, codes.to(torch.int8))
    assert torch.equal(weight.zero, zero.int()) and torch.equal(weight.scale, scale.t())


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
# name: (f, its leaves, axes)
BUDGETS: dict[str, tuple[Any, list[torch.Tensor], Axes]] = {
    "groups and zeros": (centred, [int8(TALL, 64), rand(TALL, 2), zeros(TALL, 2)], NK),
    "channel": (lambda q, s: q.bfloat16() * s, [int8(TALL, 64), rand(TALL, 1)], NK),
    "tensor": (lambda q, s: q.bfloat16() * s, [int8(TALL, 64), rand(1)], NK),
    "turned": (lambda q, s: (q.bfloat16() * s).t(), [int8(TALL, 64), rand(TALL, 1)], KN),
    "stored turned": (lambda q, s: q.bfloat16() * s, [int8(64, TALL), rand(TALL)], KN),
    "blocks": (blocked, [fp8(TALL - 8, 80), rand(TALL // 16, 3)], NK),
    "blocks of 128": (
        lambda q, s: q.bfloat16() * s.repeat_interleave(128, 0).repeat_interleave(32, 1),
        [fp8(TALL, 64), rand(TALL // 128, 2)], NK,
    ),
    "two scales and zeros": (
        lambda q, s, z, t: centred(q, s, z) * t,
        [int8(TALL, 64), rand(TALL, 2), zeros(TALL, 2), rand(TALL, 1)], NK,
    ),
    "gptq": (gptq, [ints(8, TALL, high=1 << 31), ints(2, TALL // 8, high=1 << 31),
                    rand(2, TALL, dtype=FP16), torch.arange(64) // 32], KN),
    "experts": (centred, [int8(64, 64, 64), rand(64, 64, 2), zeros(64, 64, 2)], ENK),
    "experts, stored turned": (lambda q, s: q.bfloat16() * s, [int8(64, 64, 64), rand(64, 1, 64)],
                               EKN),
    **{
        name: (FORMATS[name].f, FORMATS[name].leaves(TALL, 256 if name == "q4_k" else 96),
               FORMATS[name].axes)
        for name in FORMATS
        # What precedes a part of the rows is evaluated with it; so are rows written in blocks.
        if not name.startswith("part by") and "blocks of rows" not in name
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_only_two_evaluations_are_of_the_whole_weight(name, monkeypatch):
    f, leaves, axes = BUDGETS[name]
    cut = region(f, leaves, axes)
    (n, k), probed, worked = cut.shape, list[int](), list[int]()
    run = Rows.__call__

    def counted(rows: Rows, given: Any) -> torch.Tensor:
        probed.append(0)  # the region may not take what it is given
        with Sizes() as sizes:
            value = run(rows, given)
        probed[-1] = value.numel() // k
        worked.extend(size for op, size in sizes.seen if op in WORK)
        return value

    monkeypatch.setattr(Rows, "__call__", counted)
    structure = identify(cut, held(cut, leaves))
    assert structure.evaluations == len(probed) <= BUDGET - 2
    most = max(*ROW_COUNTS, 2 * cut.row_axis[1])  # two experts are the least of a stack
    assert max(probed) <= most
    assert max(worked) <= most * k * 5 // 4
    runs: collections.Counter[Any] = collections.Counter()
    call = qinductor.regions.call

    def counting(node: Any, *rest: Any) -> torch.Tensor:
        value = call(node, *rest)
        runs[node] += value.numel() >= n * k
        return value

    monkeypatch.setattr(qinductor.regions, "call", counting)
    read(cut, structure, held(cut, leaves))
    assert max(runs.values()) == runs[cut.output] == 2


def test_evaluation_leaves_every_leaf_as_it_was():
    before = [leaf.clone() for leaf in GPTQ]
    identified(gptq, GPTQ, KN)
    assert all(torch.equal(a, b) for a, b in zip(before, GPTQ, strict=True))


def test_a_structure_serves_other_weights_of_its_signature():
    other = [ints(12, 64, high=1 << 20), ints(3, 8, high=1 << 20), GPTQ[2] * 3, GROUP]
    one, two = region(gptq, GPTQ, KN), region(gptq, other, KN)
    assert one.signature == two.signature
    assert one.signature != region(gptq, GPTQ, NK).signature
    structure = identify(one, held(one, GPTQ))
    (weight,) = read(two, structure, held(two, other))
    ours = dequantize(weight)
    assert not difference(ours, gptq(*other).t())


def test_constants_are_part_of_the_signature():
    def by(shift: int) -> Region:
        return region(lambda q: q >> torch.tensor([0, shift], dtype=torch.int8), [int8(4, 2)])

    assert by(4).signature == by(4).signature != by(3).signature
