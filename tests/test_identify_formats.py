"""Identification of formats that are in use: packing, codebooks, exponents, parts of leaves."""

import pytest
import torch
from formats import FORMATS
from probing import centred, grouped, identified, ints, rand, stream, unstreamed, words

from qinductor.contracts import decoded


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    form = FORMATS[name]
    n, k = 64, 256 if name == "q4_k" else 96
    _, weight = identified(form.f, form.leaves(n, k), form.axes)
    assert words(weight) == form.said


@pytest.mark.parametrize("word", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("high_first", [False, True], ids=["low first", "high first"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_streams_of_bits(bits, high_first, word):
    """Codes over the borders of words where their size does not divide them."""
    codes, offset = ints(48, 128, high=1 << bits), (1 << bits - 1) * (bits > 1)
    packed = stream(codes, bits, word, high_first)
    assert packed.numel() * packed.itemsize * 8 == codes.numel() * bits

    def f(packed, scale):
        q = unstreamed(packed, bits, high_first).to(torch.int16) - offset
        return grouped(q, scale)

    _, weight = identified(f, [packed, rand(48, 4)])
    assert words(weight) == f"{'int' if offset else 'uint'}{bits} group-32 q*s bf16 None bf16 bf16"
    assert torch.equal(weight.codes.int(), codes - offset)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_codes_on_the_other_axis(bits):
    """A stream down each column, as GPTQ has it."""
    codes = ints(48, 128, high=1 << bits)
    packed = stream(codes, bits, torch.int32).t().contiguous()
    f = lambda p, s: grouped(unstreamed(p.t(), bits), s)  # noqa: E731
    _, weight = identified(f, [packed, rand(48, 4)])
    assert weight.format.codes == f"uint{bits}" and torch.equal(weight.codes.int(), codes)


@pytest.mark.parametrize("entries", [2, 3, 5, 16, 17, 200, 256])
def test_tables_hold_what_went_in(entries):
    """Codes and table come back in another order, and stand for the same values."""
    codes, table = ints(64, 96, high=entries, dtype=torch.uint8), torch.randn(entries)
    _, weight = identified(lambda q, t, s: grouped(t[q.int()], s), [codes, table, rand(64, 3)])
    assert torch.equal(decoded(weight.format, weight.codes, weight.table), table[codes.int()])
    assert weight.format.codes.startswith("table") and weight.format.bits in (2, 4, 8)


def test_a_value_that_is_there_twice():
    """Two codes of one value are one code."""
    table = torch.tensor([1.0, -0.0, 0.0, 1.0, 0.1, 0.2, 0.3, 0.4])
    codes = ints(64, 96, high=8, dtype=torch.uint8)
    _, weight = identified(lambda q, t, s: grouped(t[q.int()], s), [codes, table, rand(64, 3)])
    assert weight.table[:7].tolist() == sorted(table[1:].tolist())
    assert weight.table[:2].signbit().tolist() == [True, False]


@pytest.mark.parametrize("word", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("how", ["converted", "viewed"])
def test_words_without_a_sign(word, how):
    """Codes and zeros in words that torch can convert, and nothing else."""
    signed = getattr(torch, str(word).removeprefix("torch.u"))
    each = word.itemsize * 2
    codes = ints(48, 128, high=16)
    packed = stream(codes, 4, signed).view(word)
    zero = ints(48, 4, high=16, dtype=torch.int16).to(word)

    def f(packed, scale, zero):
        q = packed.view(signed) if how == "viewed" else packed.long()
        q = (q.unsqueeze(-1) >> torch.arange(0, 4 * each, 4, dtype=q.dtype) & 15).flatten(1)
        return centred(q, scale, zero.long())

    _, weight = identified(f, [packed, rand(48, 4), zero])
    assert words(weight) == "uint4 group-32 (q-z)*s bf16 int16 bf16 bf16"
    assert torch.equal(weight.codes.int(), codes)
