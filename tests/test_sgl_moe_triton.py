"""The Triton kernels of a mixture of experts: interpreted on a CPU, compiled for absent GPUs."""

import dataclasses
import itertools
import re
from types import SimpleNamespace
from typing import Any

import interpreted
import pytest
import test_sgl_moe as moe
import torch
from recorder import Recorder
from sgl import BF16, E4M3, FP16, hold_equal, hold_same

from qinductor.kernels import sgl_moe_matmul_checks as checks
from qinductor.kernels import sgl_moe_matmul_kernels as kernels
from qinductor.kernels import sgl_moe_matmul_triton as family
from qinductor.kernels import sgl_moe_rows as rows
from qinductor.kernels import sgl_moe_rows_kernels

INT32 = torch.int32
LADDER = tuple(dict.fromkeys(text for texts in family.LADDER.values() for text in texts))
ALL = dict([*kernels.compile_checks(), *sgl_moe_rows_kernels.compile_checks()])
SMALL = "m16.n64.k256.s1.w4.p3.l16"
FIRST = (LADDER[0], family.LADDER[family.MANY][0])
SOME = (*(f"product {text} sm_90" for text in FIRST), "m16.n128.k256.s1.w4.p4.l16 rows", "sm_89",
        "sm_100", "arrange 1024 sm_90", "s4", "sum_parts sm_90", "order", "shuffle")  # fmt: skip
FEW = [name for name in ALL if any(part in name for part in SOME)]


@pytest.fixture
def device_code():
    with interpreted.device(family) as made:
        yield made


@pytest.fixture
def rows_code():
    with interpreted.device(rows) as made:
        yield made


# Interpreted -----------------------------------------------------------------------------------


def launched(counts, n, k, config, out, code, scale=-0.5):
    """(what the kernels make of random operands, what they should)."""
    a, weights = moe.small(sum(counts) + 2, k, "cpu"), moe.layer(len(counts), n, k, "cpu")
    offsets, problems = moe.sizes(counts, n, k, "cpu")
    d = torch.full((len(a), n), 77, dtype=out)
    b, scales = moe.bytes_of(weights[0]), moe.stored(weights[1])
    chosen = None if config is None else family.Config.parse(config)
    family.launch(d, a, b, torch.tensor([scale]), scales, offsets, problems, chosen, code)
    return d, moe.wanted(a, weights, scale, counts, out)


@pytest.mark.parametrize("i", range(len(moe.SHAPES)), ids=lambda i: str(moe.SHAPES[i]))
def test_products(device_code, i):
    hold_equal(*launched(*moe.SHAPES[i], None, FP16, device_code))


@pytest.mark.parametrize(
    "config",
    [SMALL, "m16.n128.k256.s1.w8.p3.l16", "m32.n128.k128.s1.w4.p3.l16", "m64.n64.k128.s1.w4.p3.l16",
     "m16.n64.k256.s3.w4.p3.l16", "m32.n64.k128.s8.w4.p3.l16", "m64.n128.k128.s1.w8.p3.l64",
     "m128.n256.k256.s1.w8.p3.l32"],
)  # fmt: skip
def test_configs(device_code, config):
    for counts, n, k in (((3, 0, 40), 70, 512), ((129, 17), 33, 640)):
        hold_equal(*launched(counts, n, k, config, BF16, device_code))


def test_scales_that_are_not_aligned_to_words(device_code):
    """An odd number of scales, and N odd: two rows of a word are of different groups."""
    hold_equal(*launched((5,), 33, 384, SMALL, BF16, device_code))
    counts, n, k = (4, 2), 32, 512
    a, weights = moe.small(6, k, "cpu"), moe.layer(2, n, k, "cpu")
    offsets, problems = moe.sizes(counts, n, k, "cpu")
    stored = moe.stored(weights[1])
    held = torch.zeros(stored.numel() + 1, dtype=BF16)[1:].view(stored.shape).copy_(stored)
    b = moe.bytes_of(weights[0])
    shifted = torch.zeros(b.numel() + 1, dtype=torch.int8)[1:].view(b.shape).copy_(b)
    d = torch.empty(6, n, dtype=BF16)
    family.launch(d, a, shifted, torch.ones(1), held, offsets, problems, None, device_code)
    hold_equal(d, moe.wanted(a, weights, 1.0, counts, BF16))


@pytest.mark.parametrize("counts", [(0, 5, 16, 17, 0, 40), (0, 0), (1,), (200, 3), (1,) * 33])
def test_the_table_has_every_row_once(device_code, counts):
    """Tiles in the order of experts; columns of x where a weight's registers have theirs."""
    experts, k = len(counts), 256
    t = sum(counts) + 1
    x = torch.randint(256, (t, k)).to(torch.uint8)
    offsets, problems = moe.sizes(counts, 8, k, "cpu")
    tiles, bt = t // 16 + min(experts, t), 4
    tables = -(-tiles // bt)
    table, y = torch.full((3 * tiles + 1,), -9, dtype=INT32), torch.zeros_like(x)
    device_code.arrange[(tables + -(-t * k // 128 // 4),)](
        x.view(INT32), k // 4, y.view(INT32), offsets, problems, table, t, k, tiles, tables,
        experts, EP=1 << (experts - 1).bit_length(), BT=bt, BM=16, B=4, PDL=False,
    )  # fmt: skip
    want = []
    for expert, (first, m) in enumerate(zip(offsets.tolist(), counts, strict=True)):
        for row in range(first, first + m, 16):
            want.append([expert, row, min(row + 16, first + m)])
    assert int(table[-1]) == len(want) <= tiles
    assert table[: 3 * len(want)].view(-1, 3).tolist() == want
    parts = itertools.product(range(4), range(4), range(4), range(2))
    place = [32 * r + 16 * half + 4 * thread + byte for thread, r, byte, half in parts]
    assert torch.equal(y.view(t, 2, 128)[..., place], x.view(t, 2, 128))


def test_rows(rows_code):
    for dtype in rows.DTYPES:
        for columns in (1, 3, 16, 1100):
            x = moe.rows_of(6, columns, dtype, "cpu")
            index = torch.tensor([5, 0, 0, -1, 6, 3, 2], dtype=INT32)
            out, want = (torch.empty(7, columns, dtype=dtype) for _ in range(2))
            rows.run_shuffle(x, index, out, rows_code)
            rows.shuffled(x, index, want)
            hold_same(out, want)
            hold_same(want, moe.gathered(x, index.tolist()))


@pytest.mark.parametrize("shape", [(5, 3), (300, 2), (0, 2), (1,), (4100, 1)])
def test_data(rows_code, shape):
    for experts in (1, 7):
        ids = torch.randint(-1, experts + 1, shape, dtype=INT32)
        found = moe.empty_data(ids.numel(), experts, "cpu")
        rows.run_data(ids, tuple(found), experts, 24, 40, rows_code)
        for ours, want in zip(found, moe.listed(ids, experts, 24, 40), strict=True):
            assert torch.equal(ours, want)


# Configs ---------------------------------------------------------------------------------------


def test_configs_are_texts():
    for text in LADDER:
        config = family.Config.parse(text)
        assert str(config) == text
        assert config.bn % (16 * config.warps) == 0 and 16 <= config.least <= config.bm
        assert config.shared() <= family.SHARED and config.within(7168, family.SHARED) == config
    with pytest.raises(ValueError, match=r"no config: 'm16'; wanted such as 'm16\.n128"):
        family.Config.parse("m16")


def test_configs_fit():
    config = family.Config.parse("m128.n128.k256.s1.w8.p4.l32")
    assert config.within(640, 1 << 20).bk == 128
    less = config.within(1024, 150 << 10)
    assert less.bk == 256 and less.stages < 4 and less.shared() <= 150 << 10


def test_the_estimate_of_shared_memory_is_none_too_small():
    for text in FIRST:
        made = checks.build(text, 90)
        assert made.shared <= family.Config.parse(text).shared() + 2048, text


def test_more_rows_have_tiles_of_more_rows():
    counts = (1, 32, 256, 1024, 4096, 1 << 17)
    chosen = [family.heuristic(rows, 32, 4096, 7168).bm for rows in counts]
    assert chosen == sorted(chosen) and chosen[0] == 16 and chosen[-1] == 128


def test_few_experts_with_rows_have_programs_for_parts_of_k():
    for count in (32, 256, 4096):
        assert family.heuristic(count, 32, 4096, 7168).split == 1
    one = family.heuristic(1, 32, 4096, 7168)
    assert one.bn == 64 and one.split == 4
    assert family.heuristic(1, 256, 512, 7168).split == 4  # of 7 steps
    assert family.heuristic(8, 256, 2048, 7168).split == 2
    assert family.heuristic(1, 32, 4096, 768).split == 1
    assert family.Config.parse("m16.n64.k256.s8.w4.p3.l16").within(768, 1 << 20).split == 3


# Compiled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_compiled(name):
    ALL[name]()


def test_the_checks_have_every_config():
    for text in LADDER:
        assert f"moe product {text} sm_90" in ALL


@pytest.mark.parametrize(
    ("field", "old", "new", "fault"),
    [
        ("ttgir", "pendings = 0", "pendings = 1", "may still run"),
        ("ttgir", "async_copy_global_to_local", "copy", "waited for"),
        ("ttgir", "ttng.warp_group_dot_wait", "tt.load", "waited for"),
        ("ptx", "wgmma.fence", "shfl.sync.idx ; wgmma.fence", "W moves"),
        ("ptx", "wgmma.mma_async", "mma.sync", "no operand of wgmma in registers"),
    ],
)
def test_every_fault_is_found(field, old, new, fault):
    made = checks.build(SMALL, 90)
    assert not checks.faults(made, 90)
    text = getattr(made, field)
    changed = text.replace(old, new)
    assert changed != text
    assert fault in checks.faults(dataclasses.replace(made, **{field: changed}), 90)


def test_registers_that_are_written_early_are_found(monkeypatch):
    made, sass = checks.build(SMALL, 90), checks.disassembled
    if sass(made.cubin) is None:
        pytest.skip("this Triton has no nvdisasm")
    kept = re.compile(r"(WARPGROUP\.DEPBAR\.LE gsb0, 0x)0")
    monkeypatch.setattr(checks, "disassembled", lambda cubin: kept.sub(r"\g<1>1", sass(cubin)))
    assert "W's registers are written early" in checks.faults(made, 90)


def test_memory_that_does_not_suffice_is_found():
    with pytest.raises(RuntimeError, match=r"sm_90: \d+ bytes spill"):
        checks.held("m128.n256.k128.s1.w8.p2.l128", 90)
    made = dataclasses.replace(checks.build(SMALL, 90), shared=1 << 20)
    assert "1048576 bytes of shared memory of 232448" in checks.faults(made, 90)


TYPES = {"*i32": INT32, "*i8": torch.int8, "*fp8e4nv": E4M3, "*fp32": torch.float32, "*bf16": BF16}


@pytest.mark.parametrize("config", [SMALL, "m16.n64.k256.s2.w4.p3.l16"])
@pytest.mark.parametrize(("n", "k"), [(256, 512), (256, 768)])
def test_what_is_checked_is_what_is_launched(n, k, config, monkeypatch):
    recorder, compiled = Recorder("arrange", "product", "sum_parts"), {}

    def note(function: Any, types: Any, constants: Any, target: int, **options: Any) -> Any:
        compiled[function.__name__] = function.arg_names, types, constants, options
        return SimpleNamespace(spills=0)

    monkeypatch.setattr(checks, "compiled", note)
    launched((3, 2), n, k, config, BF16, recorder)
    checks.build(config, 90, k == 512)
    checks.laid(2, 90)
    if ".s2." in config:
        checks.summed(16, 90)
    assert set(compiled) == set(recorder.last)
    for name, (names, types, constants, options) in compiled.items():
        arguments, given = recorder.last[name]
        given = {key: v for key, v in given.items() if key != "launch_pdl"}
        assert set(given) == {*constants, *options}, name
        held = dict(zip(names, arguments, strict=False))
        assert set(held) == {each for each in names if each not in constants}, name
        for each, value in held.items():
            if types[each].startswith("*"):
                assert value.dtype is TYPES[types[each]], (name, each)
            elif types[each].endswith(":16"):
                assert value % 16 == 0, (name, each)
        for each in {*constants, *options} - {"PDL", "BT", "BM"}:
            wanted = (constants | options)[each]
            assert given[each] == wanted, (name, each, given[each], wanted)
