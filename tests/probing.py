"""Regions of plain functions, and what identification and proof make of them."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from qinductor.contracts import QuantizedWeight, dequantize, short
from qinductor.patterns.weight_formats.identify import Structure, identify
from qinductor.patterns.weight_formats.probe import BUDGET
from qinductor.patterns.weight_formats.prove import difference, read
from qinductor.regions import Axes, Leaf, Region, Scope, behind, extract

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
BYTES = {"high": 256, "dtype": torch.uint8}
Function = Callable[..., torch.Tensor]
# Where the axes of W lie in the value.
NK, KN, ENK, EKN = Axes(0, 1), Axes(1, 0), Axes(1, 2, 0), Axes(2, 1, 0)


def region(
    f: Function, leaves: Sequence[torch.Tensor], axes: Axes = NK, decomposed: bool = True
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
    return extract(output, order, scope, axes)


def held(cut: Region, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those leaves that the region depends on, in its order."""
    return [leaf.of(leaves) for leaf in cut.leaves]


def identified(
    f: Function, leaves: Sequence[torch.Tensor], axes: Axes = NK
) -> tuple[Structure, QuantizedWeight]:
    """What identification and proof make of f(*leaves), checked against a plain call of f."""
    cut = region(f, leaves, axes)
    structure = identify(cut, held(cut, leaves))
    weight = stacked(read(cut, structure, held(cut, leaves)))
    value = f(*leaves)
    value = value.mT if axes in (KN, EKN) else value
    assert not difference(dequantize(weight), value.reshape(-1, value.shape[-1]))
    assert structure.evaluations <= BUDGET - 2
    return structure, weight


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The weights of experts under each other, which a format with whole blocks can say."""
    first = weights[0]
    if len(weights) == 1:
        return first
    assert len({weight.format for weight in weights}) == 1 and first.format.n % first.format.bn == 0
    names = [
        name for name in ("codes", "scale", "zero", "outer") if getattr(first, name) is not None
    ]
    parts = {name: torch.cat([getattr(weight, name) for weight in weights]) for name in names}
    form = dataclasses.replace(first.format, n=first.format.n * len(weights))
    return dataclasses.replace(first, format=form, **parts)


def words(weight: QuantizedWeight) -> str:
    """The format in a line: codes, blocks, arithmetic; dtypes of scale, zero, compute, W."""
    form = weight.format
    dtypes = " ".join(short(d) for d in (form.scale, form.zero, form.compute, form.dtype))
    extra = [
        f" {name}={short(value)}" for name in ("outer", "table") if (value := getattr(form, name))
    ]
    return (
        f"{form.codes} {form.granularity} {form.arithmetic} {dtypes}{''.join(extra)}"
        f"{' permuted' if form.permuted else ''}"
    )


# Leaves


def ints(*shape: int, high: int = 1 << 30, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """From 0, below `high`."""
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, high, shape, generator=g).to(dtype)


def words32(*shape: int) -> torch.Tensor:
    """int32, every bit random."""
    return (ints(*shape, high=1 << 32, dtype=torch.int64) - (1 << 31)).to(torch.int32)


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Between 0.5 and 1.5."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype) + 0.5


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def int8(*shape: int) -> torch.Tensor:
    return ints(*(shape or (64, 96)), high=256, dtype=torch.int16).sub(128).to(torch.int8)


def fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 20).to(E4M3)


def zeros(
    *shape: int, low: int = 0, high: int = 16, dtype: torch.dtype = torch.int8
) -> torch.Tensor:
    """Integer zeros; the first two are the limits."""
    found = ints(*shape, high=high - low, dtype=torch.int16) + low
    found.view(-1)[0], found.view(-1)[1] = low, high - 1
    return found.to(dtype)


# Parts of functions


def grouped(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """q * s, each s a group of a row."""
    return (q.to(s.dtype).unflatten(-1, (s.shape[-1], -1)) * s.unsqueeze(-1)).flatten(-2)


def centred(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """(q - z) * s, each s and z a group of a row."""
    blocks = q.to(s.dtype).unflatten(-1, (max(s.shape[-1], z.shape[-1]), -1))
    return ((blocks - z.unsqueeze(-1)) * s.unsqueeze(-1)).flatten(-2)


def nibbles(packed: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Codes 0..15 from two a byte of the last axis."""
    pair = [packed & 15, packed >> 4]
    return torch.stack(pair[::-1] if high_first else pair, -1).flatten(-2)


def gptq(
    words: torch.Tensor, zero_words: torch.Tensor, scale: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """[K, N]: eight codes of a column in a word; zeros less one, packed along N; group indices."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    zero = ((zero_words.unsqueeze(2) >> shifts) & 15).flatten(1) + 1
    q = ((words.unsqueeze(1) >> shifts[None, :, None]) & 15).reshape(-1, words.shape[1])
    return (q - zero[group]).to(scale.dtype) * scale[group]


def packed_words(codes: torch.Tensor, word: torch.dtype, order: list[int]) -> torch.Tensor:
    """Codes 0..15 [R, C] in words [R, C / per]; nibble j of a word holds element order[j]."""
    chunks = codes.view(codes.shape[0], -1, len(order)).long()
    return sum(chunks[:, :, i] << 4 * j for j, i in enumerate(order)).to(word)


def bits_of(codes: torch.Tensor, bits: int, high_first: bool = False) -> torch.Tensor:
    """int64 0 and 1 [..., C * bits]: the codes of the last axis as one stream of bits."""
    places = torch.arange(bits).flip(0) if high_first else torch.arange(bits)
    return (codes.long().unsqueeze(-1) >> places & 1).flatten(-2)


def stream(
    codes: torch.Tensor, bits: int, word: torch.dtype, high_first: bool = False
) -> torch.Tensor:
    """Codes [..., C] as one stream of bits in words [..., C * bits / size of a word]."""
    size = 8 * word.itemsize
    places = torch.arange(size).flip(0) if high_first else torch.arange(size)
    return (bits_of(codes, bits, high_first).unflatten(-1, (-1, size)) << places).sum(-1).to(word)


def unstreamed(packed: torch.Tensor, bits: int, high_first: bool = False) -> torch.Tensor:
    """The codes [..., C] of `stream`, as a model may unpack them: bit by bit."""
    size = 8 * packed.dtype.itemsize
    places = torch.arange(size, dtype=packed.dtype)
    powers = 1 << torch.arange(bits, dtype=packed.dtype)
    if high_first:
        places, powers = places.flip(0), powers.flip(0)
    found = (packed.unsqueeze(-1) >> places & 1).flatten(-2).unflatten(-1, (-1, bits))
    return (found * powers).sum(-1, dtype=packed.dtype)
