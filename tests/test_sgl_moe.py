"""The functions of a mixture of experts under sgl-kernel's names, against their formulas."""

import inspect

import pytest
import torch
from sgl import BF16, E4M3, FP16, FP32, INT8, hold_equal, hold_same, same

import qinductor.kernels as sgl_kernel

ops = torch.ops.qinductor
INT32, INT64, UINT8 = torch.int32, torch.int64, torch.uint8
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FAR = (2**31 - 1, -(2**31))


@pytest.fixture
def device():
    return "cpu"


# Rows ------------------------------------------------------------------------------------------


def rows_of(t, columns, dtype, device):
    if dtype is UINT8:
        return torch.randint(256, (t, columns), device=device).to(UINT8)
    return torch.randn(t, columns, device=device).to(dtype)


def gathered(x, places):
    """x[places], row by row; zeros where there is no such row."""
    out = torch.zeros(len(places), x.shape[1], dtype=x.dtype, device=x.device)
    for row, place in enumerate(places):
        if 0 <= place < len(x):
            out.view(INT8)[row] = x.contiguous().view(INT8)[place]
    return out


@pytest.mark.parametrize("columns", [1, 3, 8, 15, 100, 1024, 2304])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, E4M3, UINT8], ids=str)
def test_shuffle_rows(device, dtype, columns):
    places = [5, 0, 0, 4, 1, 5, 2, 5, 3, -1, 6, *FAR, 2]
    index = torch.tensor(places, dtype=INT32, device=device)
    for x in (
        rows_of(6, columns, dtype, device),
        rows_of(6, columns + 5, dtype, device)[:, 3 : 3 + columns],
        rows_of(11, columns, dtype, device)[1::2],
    ):
        before = x.clone()
        found = sgl_kernel.shuffle_rows(x, index, (len(places), columns))
        assert found.is_contiguous()
        hold_same(found, gathered(before, places))
        assert same(x, before), "the input was written to"
        few = sgl_kernel.shuffle_rows(x, index, torch.Size((3, columns)))
        hold_same(few, gathered(before, places[:3]))


def test_shuffle_many_rows(device):
    x = rows_of(300, 1040, E4M3, device)
    index = torch.randint(300, (5000,), dtype=INT32, device=device)
    found = sgl_kernel.shuffle_rows(x, index, (5000, 1040))
    hold_same(found.view(UINT8), x.view(UINT8)[index.long()])


def test_shuffle_nothing(device):
    none = torch.zeros(0, dtype=INT32, device=device)
    assert sgl_kernel.shuffle_rows(rows_of(4, 8, BF16, device), none, (0, 8)).shape == (0, 8)
    index = torch.zeros(3, dtype=INT32, device=device)
    assert sgl_kernel.shuffle_rows(rows_of(4, 0, BF16, device), index, (3, 0)).shape == (3, 0)
    assert not sgl_kernel.shuffle_rows(rows_of(0, 8, BF16, device), index, (3, 8)).any()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": torch.zeros(4, 8, 1)}, "the input is 3-D, the map 1-D, the result 2-D; wanted 2-D"),
        ({"index": torch.zeros(3, 1, dtype=INT32)}, "the map 2-D"),
        ({"shape": (3, 8, 1)}, "the result 3-D"),
        ({"x": torch.zeros(4, 8, dtype=torch.float64)}, "the input is torch.float64; wanted one"),
        ({"x": torch.zeros(4, 8, dtype=INT8)}, "the input is torch.int8; wanted one of"),
        ({"index": torch.zeros(3, dtype=INT64)}, "the map is torch.int64; wanted int32"),
        ({"shape": (3, 7)}, r"output_tensor_shape is \[3, 7\]; wanted at most 3 rows, of 8"),
        ({"shape": (4, 8)}, r"output_tensor_shape is \[4, 8\]; wanted at most 3 rows"),
        ({"shape": (-1, 8)}, r"output_tensor_shape is \[-1, 8\]"),
        ({"x": torch.zeros(8, 4).t()}, r"the input has strides \(1, 4\)"),
        ({"index": torch.zeros(6, dtype=INT32)[::2]}, r"the map \(2,\); wanted contiguous rows"),
    ],
    ids=str,
)
def test_refused_shuffles(changed, text):
    given = {"x": torch.zeros(4, 8), "index": torch.zeros(3, dtype=INT32), "shape": (3, 8)}
    assert sgl_kernel.shuffle_rows(*given.values()).shape == (3, 8)
    with pytest.raises(RuntimeError, match=f"shuffle_rows: .*{text}"):
        sgl_kernel.shuffle_rows(*{**given, **changed}.values())


# Which rows experts have -----------------------------------------------------------------------


def empty_data(numel, experts, device):
    shapes = (experts + 1,), (experts, 3), (experts, 3), (numel,), (numel,)
    return [torch.full(shape, -77, dtype=INT32, device=device) for shape in shapes]


def listed(ids, experts, n, k):
    """What the data should be, from lists of the entries of each expert."""
    topk = ids.shape[-1] if ids.dim() else 1
    entries = [[] for _ in range(experts)]
    for i, expert in enumerate(ids.flatten().tolist()):
        if 0 <= expert < experts:
            entries[expert].append(i)
    counts = [len(own) for own in entries]
    slots = [i for own in entries for i in own]
    inputs = [i // topk for i in slots] + [0] * (ids.numel() - len(slots))
    outputs = [0] * ids.numel()
    for slot, i in enumerate(slots):
        outputs[i] = slot
    found = (
        [sum(counts[:e]) for e in range(experts + 1)],
        [[2 * n, m, k] for m in counts],
        [[k, m, n] for m in counts],
        inputs,
        outputs,
    )
    return [torch.tensor(values, dtype=INT32) for values in found]


def hold_data(ids, experts, n=24, k=40):
    found = empty_data(ids.numel(), experts, ids.device)
    sgl_kernel.get_cutlass_w4a8_moe_mm_data(ids, *found, experts, n, k)
    for i, (ours, want) in enumerate(zip(found, listed(ids.cpu(), experts, n, k), strict=True)):
        assert torch.equal(ours.cpu(), want), f"result {i}: {ours} is not {want}"


@pytest.mark.parametrize("shape", [(5, 3), (64, 8), (1, 1), (2, 3, 4), (700,), (1, 129), (9000, 2)])
@pytest.mark.parametrize("experts", [1, 4, 37])
def test_data(device, shape, experts):
    hold_data(torch.randint(-1, experts + 1, shape, dtype=INT32, device=device), experts)
    hold_data(torch.full(shape, experts - 1, dtype=INT32, device=device), experts)


def test_data_of_other_ids(device):
    hold_data(torch.tensor([[3, -1], [FAR[0], 0], [FAR[1], 3]], dtype=INT32, device=device), 4)
    hold_data(torch.full((3, 2), -1, dtype=INT32, device=device), 2)
    hold_data(torch.zeros(0, 8, dtype=INT32, device=device), 3)
    hold_data(torch.tensor(1, dtype=INT32, device=device), 3)
    hold_data(torch.randint(9, (8, 6), dtype=INT32, device=device).t(), 9)
    hold_data(torch.randint(1024, (33, 8), dtype=INT32, device=device), 1024, 2048, 7168)


def test_data_writes_to_permutations_of_any_shape(device):
    ids = torch.randint(3, (4, 2), dtype=INT32, device=device)
    found = empty_data(8, 3, device)
    shaped = [tensor.view(4, 2) for tensor in found[3:]]
    sgl_kernel.get_cutlass_w4a8_moe_mm_data(ids, *found[:3], *shaped, 3, 24, 40)
    for ours, want in zip(found, listed(ids.cpu(), 3, 24, 40), strict=True):
        assert torch.equal(ours.cpu(), want)


@pytest.mark.parametrize(
    ("i", "tensor", "text"),
    [
        (0, torch.zeros(4, 2, dtype=INT64), "topk_ids is torch.int64; wanted int32"),
        (1, torch.zeros(3, dtype=INT32), r"expert_offsets is torch.int32\[3\].* wanted int32\[4\]"),
        (1, torch.zeros(4, dtype=INT64), r"expert_offsets is torch.int64\[4\]"),
        (1, torch.zeros(8, dtype=INT32)[::2], r"strides \(2,\); wanted int32\[4\], contiguous"),
        (2, torch.zeros(3, 4, dtype=INT32), r"problem_sizes1 is .*\[3, 4\].* wanted int32\[3, 3\]"),
        (3, torch.zeros(3, 3, dtype=INT32).t(), r"problem_sizes2 .* strides \(1, 3\)"),
        (4, torch.zeros(7, dtype=INT32), r"input_permutation .*\[7\].*; wanted 8 contiguous int32"),
        (5, torch.zeros(8, dtype=FP32), "output_permutation is torch.float32"),
        (5, torch.zeros(16, dtype=INT32)[::2], r"output_permutation .* strides \(2,\)"),
        (6, 0, "num_experts is 0; wanted 1 or more"),
    ],
    ids=str,
)
def test_refused_data(i, tensor, text):
    given = [torch.zeros(4, 2, dtype=INT32), *empty_data(8, 3, "cpu"), 3, 24, 40]
    given[i] = tensor
    with pytest.raises(RuntimeError, match=f"get_cutlass_w4a8_moe_mm_data: .*{text}"):
        sgl_kernel.get_cutlass_w4a8_moe_mm_data(*given)


# Products --------------------------------------------------------------------------------------


def bytes_of(codes):
    """int8 [.., K / 2] of values from -8 to 7: an even column is the lower half of a byte."""
    nibbles = codes.to(INT32) & 15
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(UINT8).view(INT8)


def stored(scales):
    """Scales [E, N, K / 128] as the interface has them."""
    experts, n, groups = scales.shape
    if groups % 4:
        return scales.transpose(1, 2).contiguous()
    out = scales.new_zeros(experts, groups // 4, 4 * n)
    for g in range(groups):
        out[:, g // 4, g % 4 :: 4] = scales[:, :, g]
    return out


def layer(experts, n, k, device, exact=True):
    """(codes, scales) of weights."""
    codes = torch.randint(-8, 8, (experts, n, k), device=device)
    shape = experts, n, k // 128
    if exact:
        return codes, torch.exp2(torch.randint(-3, 1, shape, device=device).float()).to(BF16)
    return codes, (0.005 * torch.randn(shape, device=device)).to(BF16)


def sizes(counts, n, k, device):
    """(first rows, problem sizes) of experts with so many rows, one behind the other."""
    first = [sum(counts[:e]) for e in range(len(counts))]
    rows = [[n, m, k] for m in counts]
    return (torch.tensor(v, dtype=INT32, device=device) for v in (first, rows))


def call(a, weights, scale, counts, out=BF16, d=None, first=None, **more):
    codes, scales = weights
    (experts, n, k), device = codes.shape, a.device
    offsets, problems = sizes(counts, n, k, device)
    d = torch.full((len(a), n), 77, dtype=out, device=device) if d is None else d
    strides = [
        torch.full((experts, 3), v, dtype=INT64, device=device) for v in (k, k, n, n)
    ]  # fmt: skip
    given = torch.tensor([scale, 3.0], device=device)
    sgl_kernel.cutlass_w4a8_moe_mm(
        d, a, bytes_of(codes), given, stored(scales), offsets if first is None else first,
        problems, *strides, **more,
    )  # fmt: skip
    return d


def product(x, codes, scales, scale, out):
    """What the rows of one expert should be, rounded once: exact where fp32 sums are."""
    w = codes.double() * scales.double().repeat_interleave(128, 1)
    return ((x.double() @ w.t()).float() * scale).to(out)


def wanted(a, weights, scale, counts, out):
    parts = a.split([*counts, len(a) - sum(counts)])
    rows = [
        product(x, *w, scale, out)
        for x, *w in zip(parts, *weights, strict=False)
    ]  # fmt: skip
    return torch.cat([*rows, torch.full((len(parts[-1]), rows[0].shape[1]), 77).to(rows[0])])


def small(rows, k, device):
    return torch.randint(-2, 3, (rows, k), device=device).float().to(E4M3)


SHAPES = (
    ((0, 2), 64, 512), ((3, 0, 17, 1), 96, 768), ((40, 5, 0), 70, 1024), ((1,), 16, 128),
    ((130, 0, 0, 7, 66), 33, 384), ((0, 0), 40, 256), ((2, 33, 1), 129, 640), ((70, 300), 128, 512),
    ((1,) * 9, 130, 1536),
)  # fmt: skip


@pytest.mark.parametrize("out", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("i", range(len(SHAPES)), ids=lambda i: str(SHAPES[i]))
def test_products(device, i, out):
    counts, n, k = SHAPES[i]
    a, weights = small(sum(counts) + 2, k, device), layer(len(counts), n, k, device)
    for scale in (0.5, -2.0):
        found = call(a, weights, scale, counts, out)
        hold_equal(found, wanted(a, weights, scale, counts, out), f"{scale}")


@pytest.mark.parametrize("out", [BF16, FP16], ids=["bf16", "fp16"])
def test_random_products(device, out):
    """The published test, and more experts."""
    for counts, n, k in (((0, 2), 1024, 512), ((9, 0, 31, 4), 256, 1536), ((5, 2, 66), 130, 768)):
        a = torch.randn(sum(counts), k, device=device).to(E4M3)
        weights, scale = layer(len(counts), n, k, device, exact=False), float(torch.randn(()))
        found = call(a, weights, 0.02 * scale, counts, out)
        want = wanted(a, weights, 0.02 * scale, counts, out)
        torch.testing.assert_close(found, want, rtol=1e-2, atol=0.1)
        error = (found.float() - want.float()).norm() / want.float().norm()
        assert error < 5e-3, error


def test_every_code_in_every_place(device):
    """Column k of x alone is 1: the result is column k of W."""
    k, n = 512, 32
    codes = (torch.arange(n)[:, None] + torch.arange(k)[None, :] * 3) % 16 - 8
    scales = torch.exp2(-torch.arange(4.0)).expand(1, n, 4).to(BF16)
    x = torch.eye(k).to(E4M3)
    found = call(x.to(device), (codes[None].to(device), scales.to(device)), 1.0, (k,))
    assert torch.equal(found.cpu(), (codes * scales[0].repeat_interleave(128, 1)).t().to(BF16))


def test_every_number_of_an_activation(device):
    numbers = torch.arange(256, dtype=UINT8).view(E4M3)
    x = torch.zeros(256, 128).to(E4M3)
    x[:, 77] = numbers
    codes = torch.ones(1, 16, 128, dtype=INT64, device=device)
    scales = torch.ones(1, 16, 1, dtype=BF16, device=device)
    found = call(x.to(device), (codes, scales), 1.0, (256,))
    hold_equal(found, numbers.to(device).to(BF16)[:, None].expand(256, 16))


def test_rows_of_no_expert_are_left_and_experts_lie_anywhere(device):
    counts, n, k = (3, 0, 17, 5), 48, 512
    a, weights = small(40, k, device), layer(4, n, k, device)
    first = torch.tensor([30, 40, 2, 20], dtype=INT32, device=device)
    wide = torch.full((40, n + 16), 77, dtype=BF16, device=device)
    call(a, weights, 0.5, counts, d=wide[:, 8 : 8 + n], first=first)
    want = torch.full_like(wide, 77)
    for e, (start, m) in enumerate(zip(first.tolist(), counts, strict=True)):
        rows = slice(start, start + m)
        want[rows, 8 : 8 + n] = product(a[rows], weights[0][e], weights[1][e], 0.5, BF16)
    hold_equal(wide, want)


def test_activations_of_strided_rows(device):
    counts, n, k = (3, 14), 48, 512
    weights = layer(2, n, k, device)
    for a in (small(17, k + 8, device)[:, 3 : 3 + k], small(34, k, device)[::2]):
        hold_equal(call(a, weights, 0.5, counts), wanted(a, weights, 0.5, counts, BF16))


def test_rows_and_sizes_outside_of_the_tensors_are_cut_off(device):
    n, k = 32, 256
    a, weights = small(9, k, device), layer(3, n, k, device)
    first = torch.tensor([0, 6, 50], dtype=INT32, device=device)
    found = call(a, weights, 0.5, (4, 100, 3), first=first)
    want = torch.full_like(found, 77)
    want[:4] = product(a[:4], weights[0][0], weights[1][0], 0.5, BF16)
    want[6:] = product(a[6:], weights[0][1], weights[1][1], 0.5, BF16)
    hold_equal(found, want)
    found = call(a, weights, 0.5, (4, -3, -(2**31)), first=first)
    want[6:] = 77
    hold_equal(found, want)


def test_a_nan_stays_in_its_row(device):
    counts, n, k = (5, 20), 32, 512
    a, weights = small(25, k, device), layer(2, n, k, device)
    a.view(UINT8)[7, 100] = 0x7F
    found, want = call(a, weights, 0.5, counts), wanted(a, weights, 0.5, counts, BF16)
    assert found[7].isnan().all()
    rest = [row for row in range(25) if row != 7]
    hold_equal(found[rest], want[rest])


def test_no_rows_and_no_columns(device):
    weights = layer(2, 32, 256, device)
    assert call(small(0, 256, device), weights, 1.0, (0, 0)).shape == (0, 32)
    none = layer(2, 0, 256, device)
    assert call(small(3, 256, device), none, 1.0, (1, 2)).shape == (3, 0)


def given_call():
    k, n = 256, 32
    offsets, problems = sizes((1, 2), n, k, "cpu")
    strides = {f"{name}_strides": torch.zeros(2, 3, dtype=INT64) for name in "abds"}
    return {
        "d": torch.zeros(3, n, dtype=BF16), "a": torch.zeros(3, k).to(E4M3),
        "b": torch.zeros(2, n, k // 2, dtype=INT8), "a_scales": torch.ones(1),
        "b_scales": torch.ones(2, 2, n, dtype=BF16), "experts_offsets": offsets,
        "problem_sizes": problems, **strides,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"d": torch.zeros(3, 32, 1, dtype=BF16)}, "d is 3-D; wanted 2-D"),
        ({"a": torch.zeros(1, 3, 256).to(E4M3)}, "a is 3-D; wanted 2-D"),
        ({"b": torch.zeros(32, 128, dtype=INT8)}, "b is 2-D; wanted 3-D"),
        ({"a_scales": torch.ones(1, 1)}, "a_scales is 2-D; wanted 1-D"),
        ({"b_scales": torch.ones(1, 2, 2, 32, dtype=BF16)}, "b_scales is 4-D; wanted 3-D"),
        ({"d": torch.zeros(3, 32)}, "d is torch.float32; wanted torch.float16 or torch.bfloat16"),
        ({"a": torch.zeros(3, 256).to(torch.float8_e5m2)}, "a is torch.float8_e5m2; wanted"),
        ({"b": torch.zeros(2, 32, 128, dtype=UINT8)}, "b is torch.uint8; wanted torch.int8"),
        ({"a_scales": torch.ones(1, dtype=BF16)}, "a_scales is torch.bfloat16; wanted"),
        ({"b_scales": torch.ones(2, 2, 32)}, "b_scales is torch.float32; wanted torch.bfloat16"),
        ({"b": torch.zeros(2, 32, 64, dtype=INT8)}, r"a is \[3, 256\], b \[2, 32, 64\]; wanted"),
        ({"d": torch.zeros(4, 32, dtype=BF16)}, r"d is \[4, 32\]; wanted \[3, 32\]"),
        ({"b_scales": torch.ones(2, 1, 64, dtype=BF16)}, r"\[2, 1, 64\]; wanted \[2, 2, 32\]"),
        ({"a_scales": torch.ones(0)}, "a_scales is empty; wanted one scale or more"),
        ({"chunk_size": 64}, "chunk_size is 64; wanted 128"),
        ({"experts_offsets": torch.zeros(3, dtype=INT32)}, r"int32\[3\]; wanted torch.int32\[2\]"),
        ({"problem_sizes": torch.zeros(2, 4, dtype=INT32)}, r"problem_sizes is .*\[2, 4\]; wanted"),
        ({"problem_sizes": torch.zeros(2, 3, dtype=INT64)}, "problem_sizes is torch.int64"),
        ({"a_strides": torch.zeros(2, dtype=INT64)}, r"a_strides is .*\[2\]; wanted .*\[2, 3\]"),
        ({"s_strides": torch.zeros(2, 3, dtype=INT32)}, "s_strides is torch.int32"),
        ({"b": torch.zeros(2, 128, 32, dtype=INT8).mT}, "b has strides .*; wanted a contiguous"),
        ({"b_scales": torch.ones(2, 32, 2, dtype=BF16).mT}, "b_scales has strides"),
        ({"d": torch.zeros(32, 3, dtype=BF16).t()}, "d has strides .*; wanted contiguous rows"),
        ({"d": torch.zeros(32, dtype=BF16).expand(3, 32)}, "d has strides .* that do not overlap"),
    ],
    ids=str,
)
def test_refused_products(changed, text):
    sgl_kernel.cutlass_w4a8_moe_mm(**given_call())
    with pytest.raises(RuntimeError, match=f"cutlass_w4a8_moe_mm: .*{text}"):
        sgl_kernel.cutlass_w4a8_moe_mm(**{**given_call(), **changed})


def test_refused_columns():
    for k in (0, 64, 200):
        shapes = {
            "a": torch.zeros(3, k).to(E4M3), "b": torch.zeros(2, 32, k // 2, dtype=INT8),
            "b_scales": torch.ones(2, 2, 32, dtype=BF16),
        }  # fmt: skip
        with pytest.raises(RuntimeError, match=f"K is {k}; wanted a multiple of 128, not 0"):
            sgl_kernel.cutlass_w4a8_moe_mm(**{**given_call(), **shapes})
    k = 512
    shapes["a"], shapes["b"] = torch.zeros(3, k).to(E4M3), torch.zeros(2, 32, 256, dtype=INT8)
    shapes["b_scales"] = torch.ones(2, 4, 32, dtype=BF16)
    with pytest.raises(RuntimeError, match=r"\[2, 4, 32\]; wanted \[2, 1, 128\] for N = 32, K"):
        sgl_kernel.cutlass_w4a8_moe_mm(**{**given_call(), **shapes})


# Operators -------------------------------------------------------------------------------------


def test_signatures():
    for name, text in {
        "shuffle_rows": "input_tensor dst2src_map output_tensor_shape",
        "get_cutlass_w4a8_moe_mm_data": "topk_ids expert_offsets problem_sizes1 problem_sizes2 "
        "input_permutation output_permutation num_experts n k",
        "cutlass_w4a8_moe_mm": "d a b a_scales b_scales experts_offsets problem_sizes a_strides "
        "b_strides d_strides s_strides chunk_size=128 topk=8",
    }.items():
        found = inspect.signature(getattr(sgl_kernel, name)).parameters.values()
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found]
        assert " ".join(shown) == text


def test_operators(device):
    index = torch.tensor([2, 0, 1], dtype=INT32, device=device)
    torch.library.opcheck(
        ops.shuffle_rows.default, (rows_of(3, 16, BF16, device), index, (3, 16))
    )  # fmt: skip
    ids = torch.tensor([[0, 2], [1, 2]], dtype=INT32, device=device)
    data = empty_data(4, 3, device)
    given = ids, *data, 3, 128, 256
    torch.library.opcheck(ops.get_cutlass_w4a8_moe_mm_data.default, given)
    versions = [tensor._version for tensor in data]
    sgl_kernel.get_cutlass_w4a8_moe_mm_data(*given)
    assert all(t._version > old for t, old in zip(data, versions, strict=True))
    moved = {n: t.to(device) for n, t in given_call().items()}
    arguments = *moved.values(), 128, 8
    torch.library.opcheck(ops.cutlass_w4a8_moe_mm.default, arguments, test_utils=CHECKS)
    version, before = moved["d"]._version, [t.clone() for t in list(moved.values())[1:]]
    sgl_kernel.cutlass_w4a8_moe_mm(*arguments)
    assert moved["d"]._version > version
    for now, old in zip(list(moved.values())[1:], before, strict=True):
        assert same(now, old), "an operand was written to"


class Experts:
    """A layer of experts as serving code writes it, and as its formula."""

    def __init__(self, experts, hidden, inner, device):
        self.experts, self.hidden, self.inner = experts, hidden, inner
        self.up = layer(experts, 2 * inner, hidden, device, exact=False)
        self.down = layer(experts, hidden, inner, device, exact=False)
        self.held = [(bytes_of(codes), stored(scales)) for codes, scales in (self.up, self.down)]
        self.s1, self.s2 = (torch.tensor([s], device=device) for s in (0.02, 0.01))
        self.strides = [torch.zeros(experts, 3, dtype=INT64, device=device)] * 4

    def quantised(self, x, scale):
        codes = torch.empty_like(x, dtype=E4M3)
        sgl_kernel.sgl_per_tensor_quant_fp8(x, codes, scale, True)
        return codes

    def multiplied(self, x, i, scale, offsets, problems):
        b, scales = self.held[i]
        d = x.new_zeros(x.shape[0], b.shape[1], dtype=BF16)
        sgl_kernel.cutlass_w4a8_moe_mm(
            d, x, b, scale, scales, offsets[:-1], problems, *self.strides
        )  # fmt: skip
        return d

    def __call__(self, x, ids, weights):
        numel, device, e = ids.numel(), x.device, self.experts
        shapes = (e + 1,), (e, 3), (e, 3), (numel,), (numel,)
        data = [torch.empty(shape, dtype=INT32, device=device) for shape in shapes]
        sgl_kernel.get_cutlass_w4a8_moe_mm_data(ids, *data, e, self.inner, self.hidden)
        offsets, first, second, source, slot = data
        rows = sgl_kernel.shuffle_rows(self.quantised(x, self.s1), source, (numel, self.hidden))
        gate, up = self.multiplied(rows, 0, self.s1, offsets, first).chunk(2, -1)
        between = torch.nn.functional.silu(gate.float()).to(BF16) * up
        out = self.multiplied(self.quantised(between, self.s2), 1, self.s2, offsets, second)
        there = (ids >= 0) & (ids < e)
        out = torch.where(there[..., None], out[slot.long()].view(*ids.shape, -1), 0)
        return (out.float() * weights[..., None]).sum(1).to(BF16)

    def formula(self, x, ids, weights):
        """Each token by itself, in float32."""

        def codes(v, scale):
            return (v / scale).clamp(-448, 448).to(E4M3).float() * scale

        def dense(weight, e):
            return weight[0][e].float() * weight[1][e].float().repeat_interleave(128, 1)

        out = torch.zeros_like(x, dtype=FP32)
        for t, j in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
            e = int(ids[t, j])
            if 0 <= e < self.experts:
                gate, up = (codes(x[t].float(), self.s1) @ dense(self.up, e).t()).chunk(2)
                between = torch.nn.functional.silu(gate) * up
                out[t] += weights[t, j] * (codes(between, self.s2) @ dense(self.down, e).t())
        return out


def tokens(count, experts, hidden, device):
    x = torch.randn(count, hidden, device=device).to(BF16)
    ids = torch.randint(-1, experts, (count, 2), dtype=INT32, device=device)
    return x, ids, torch.rand(count, 2, device=device)


def test_a_layer_of_experts(device):
    model = Experts(5, 512, 384, device)
    for count in (1, 7, 30):
        given = tokens(count, 5, 512, device)
        want = model.formula(*given)
        error = (model(*given).float() - want).norm() / want.norm().clamp(min=1e-9)
        assert error < 0.03, error  # its activations are rounded to e4m3 twice


def test_a_compiled_layer_of_experts(device):
    model = Experts(4, 256, 128, device)
    compiled = torch.compile(model.__call__, fullgraph=True, dynamic=True)
    for count in (5, 9, 12):
        given = tokens(count, 4, 256, device)
        torch.testing.assert_close(compiled(*given), model(*given), rtol=0.05, atol=0.05)
