"""The products of sgl-kernel's names: values, layouts, results in place, errors."""

import functools
import inspect

import pytest
import torch
from sgl import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    INT8,
    blocks,
    distance,
    hold_equal,
    row_scaled,
    same,
    summed,
)

import qinductor.kernels as sgl_kernel
from qinductor.kernels import (
    bmm_fp8,
    fp8_blockwise_scaled_mm,
    fp8_gemm_nt,
    fp8_scaled_mm,
    int8_scaled_mm,
)

ops = torch.ops.qinductor
# float8 has no multiplication, with which the schema's check compares
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
NT_SHAPES = (
    (1, 8, 32), (17, 40, 96), (65, 72, 160), (129, 96, 224), (128, 32, 2048), (64, 1024, 512),
    (33, 128, 288), (5, 200, 576), (3, 17, 100), (2, 130, 1), (1, 1, 129),
)  # fmt: skip


@pytest.fixture
def device():
    return "cpu"


def integers(shape, device, dtype=E4M3, most=2):
    """Codes whose sums every format of a sum holds."""
    return torch.randint(-most, most + 1, shape, device=device).float().to(dtype)


def powers(shape, device):
    """Scales from 2^-3 to 2^0."""
    return torch.exp2(torch.randint(-3, 1, shape, device=device).float())


def near(found, wanted, rtol=0.02, atol=1.0):
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def uniform(m, n, k, device):
    """Operands of the published test: codes over the whole range, scales of either sign."""
    a = ((torch.rand(m, k, device=device) * 2 - 1) * 448).to(E4M3)
    b = ((torch.rand(n, k, device=device) * 2 - 1) * 448).to(E4M3)
    sa, sb = (torch.randn(count, device=device) * 0.001 for count in (m, n))
    return a, b.t(), sa, sb


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 512), (33, 128, 1024), (128, 512, 4096)])
def test_fp8(device, m, n, k, out, bias):
    a, b, sa, sb = uniform(m, n, k, device)
    beside = torch.randn(n, device=device).to(out) if bias else None
    found = fp8_scaled_mm(a, b, sa, sb, out, beside)
    assert found.is_contiguous()
    near(found, row_scaled(a, b, sa, sb, out, beside))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("function", ["fp8_scaled_mm", "int8_scaled_mm"])
def test_scales_of_every_shape(device, function, out, bias):
    """On data that every sum holds exactly; as many scales as rows, or one."""
    m, n, k = 5, 24, 256
    dtype = E4M3 if function == "fp8_scaled_mm" else INT8
    a, b = integers((m, k), device, dtype), integers((n, k), device, dtype).t()
    beside = torch.randn(n, device=device).to(out) if bias else None
    call = getattr(sgl_kernel, function)
    for of_a in ((m,), (m, 1), (1, m), (1,), (1, 1), ()):
        for of_b in ((n,), (1, n), (n, 1), (1,), ()):
            sa, sb = torch.randn(of_a, device=device), torch.randn(of_b, device=device)
            wanted = row_scaled(a, b, sa, sb, out, beside)
            hold_equal(call(a, b, sa, sb, out, beside), wanted, f"{of_a} {of_b}")


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 512), (16, 128, 1024), (67, 136, 4112)])
def test_int8(device, m, n, k, out, bias):
    a, b = (
        (torch.randn(rows, k, device=device) * 5).round().clamp(-128, 127).to(INT8)
        for rows in (m, n)
    )
    sa, sb = torch.randn(m, device=device), torch.randn(n, device=device)
    beside = torch.randn(n, device=device).to(out) if bias else None
    found = int8_scaled_mm(a, b.t(), sa, sb, out, beside)
    hold_equal(found, row_scaled(a, b.t(), sa, sb, out, beside))


def test_int8_sums_are_exact(device):
    """4096 products of -128 and -128, and of 127 and -128, no float32 sum of which is."""
    k = 4096
    a = torch.full((3, k), -128, dtype=INT8, device=device)
    a[1], a[2, ::2] = 127, 1
    b = torch.full((8, k), -128, dtype=INT8, device=device)
    b[3] = 127
    one = torch.full((1,), 2.0**-20, device=device)
    found = int8_scaled_mm(a, b.t(), one, torch.ones(1, device=device), FP16)
    hold_equal(found, row_scaled(a, b.t(), one, torch.ones(1, device=device), FP16))
    assert found[0, 0] == 64 and found[1, 0] == -63.5


def test_the_bias_is_added_before_the_rounding(device):
    """In one operation with the scale: what the product loses in float32 is what is left."""
    a = torch.zeros(1, 16, dtype=INT8, device=device)
    b = torch.zeros(8, 16, dtype=INT8, device=device)
    a[0, 0], b[:, 0] = 3, 43
    third = torch.full((1,), 1 / 3, device=device)
    bias = torch.full((8,), -43.0, dtype=FP16, device=device)
    found = int8_scaled_mm(a, b.t(), third, torch.ones(1, device=device), FP16, bias)
    left = 129 * float(third) - 43
    assert 0 < abs(left) < 1e-5
    assert found.tolist() == [[float(torch.tensor(left, dtype=FP16))] * 8]


@pytest.mark.parametrize("function", ["fp8_scaled_mm", "int8_scaled_mm"])
def test_nothing_and_strided_rows(device, function):
    dtype = E4M3 if function == "fp8_scaled_mm" else INT8
    call = functools.partial(getattr(sgl_kernel, function), out_dtype=BF16)
    a, b = integers((6, 64), device, dtype), integers((32, 64), device, dtype)
    sa, sb = torch.rand(6, device=device), torch.rand(32, device=device)
    bias = torch.randn(32, device=device).to(BF16)
    assert call(a[:0], b.t(), sa[:0], sb).shape == (0, 32)
    assert call(a, b[:0].t(), sa, sb[:0]).shape == (6, 0)
    assert not call(a[:, :0], b[:, :0].t(), sa, sb).any()
    hold_equal(call(a[:, :0], b[:, :0].t(), sa, sb, bias=bias), bias.expand(6, 32))
    strided = call(a[::2, :32], b[8:24, 16:48].t(), sa[:3], sb[:16])
    wanted = row_scaled(a[::2, :32], b[8:24, 16:48].t(), sa[:3], sb[:16], BF16)
    hold_equal(strided, wanted)


def column_major(scales):
    return scales.t().contiguous().t()


@pytest.mark.parametrize("out", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 128, 512), (33, 256, 1024), (6, 512, 128), (128, 128, 2048)]
)
def test_blockwise(device, m, n, k, out):
    a, b, *_ = uniform(m, n, k, device)
    sa = column_major(torch.randn(m, k // 128, device=device) * 0.001)
    sb = column_major(torch.randn(k // 128, n // 128, device=device) * 0.001)
    near(fp8_blockwise_scaled_mm(a, b, sa, sb, out), blocks(a, b.t(), sa, sb.t(), out, 128, 128))
    a, b = integers((m, k), device), integers((n, k), device).t()
    sa, sb = column_major(powers(sa.shape, device)), column_major(powers(sb.shape, device))
    found = fp8_blockwise_scaled_mm(a, b, sa, sb, out)
    hold_equal(found, blocks(a, b.t(), sa, sb.t(), out, 128, 128))


def test_blockwise_scales_with_other_strides(device):
    """Padded columns as the quantiser writes them; none where there is one row or one group."""
    a, b = integers((6, 512), device), integers((256, 512), device).t()
    sa = torch.full((4, 8), torch.nan, device=device).t()[:6]
    sa.copy_(powers((6, 4), device))
    sb = column_major(powers((4, 2), device))
    wanted = blocks(a, b.t(), sa, sb.t(), BF16, 128, 128)
    hold_equal(fp8_blockwise_scaled_mm(a, b, sa, sb, BF16), wanted)
    row = sa[:1].contiguous()
    hold_equal(fp8_blockwise_scaled_mm(a[:1], b, row, sb, BF16), wanted[:1])
    one, w = powers((6, 1), device), b[:128, :128]
    found = fp8_blockwise_scaled_mm(a[:, :128], w, one, sb[:1, :1], BF16)
    hold_equal(found, blocks(a[:, :128], w.t(), one, sb[:1, :1], BF16, 128, 128))
    assert fp8_blockwise_scaled_mm(a[:0], b, sa[:0], sb, BF16).shape == (0, 256)


def test_batched(device):
    for of_a, of_b in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)):
        for out in (BF16, FP16):
            a, b = torch.randn(16, 48, 64, device=device), torch.randn(16, 80, 64, device=device)
            codes, scales = [], []
            for x, dtype in ((a, of_a), (b, of_b)):
                factor = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-12)
                codes.append((x * factor).to(dtype))
                scales.append(factor.reciprocal().reshape(1))
            found = bmm_fp8(codes[0], codes[1].mT, *scales, out)
            wanted = torch.bmm(codes[0].double(), codes[1].mT.double())
            wanted = wanted * (scales[0] * scales[1]).double()
            size = wanted.abs().amax(-1, keepdim=True)
            near(found.double() / size, wanted / size, rtol=1e-2, atol=1e-2)
            flat = found.double().flatten(), torch.bmm(a, b.mT).double().flatten()
            assert torch.cosine_similarity(*flat, dim=0) > 0.99


@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
@pytest.mark.parametrize("shape", [(3, 5, 32, 48), (1, 1, 16, 16), (4, 7, 40, 24), (2, 3, 5, 7)])
def test_batched_exactly(device, shape, given):
    """B in either order, in a larger tensor; A with strided rows and heads."""
    heads, m, k, n = shape
    sa, sb = powers((1,), device), powers((), device)
    a, b = integers((heads, m, k), device), integers((heads, k, n), device, E5M2)
    wanted = (summed(a, b) * (sa * sb)).to(BF16)
    wide = integers((heads, k + 1, n), device, E5M2)[:, 1:]
    wide.copy_(b)
    for x in (a, a.transpose(0, 1).contiguous().transpose(0, 1)):
        for w in (b, b.mT.contiguous().mT, wide):
            out = torch.full((heads, m, n), 9.0, dtype=BF16, device=device) if given else None
            found = bmm_fp8(x, w, sa, sb, BF16, out)
            assert out is None or found is out
            assert found.is_contiguous()
            hold_equal(found, wanted)


def test_batched_nothing(device):
    one = torch.ones(1, device=device)
    a, b = integers((2, 3, 16), device), integers((2, 16, 16), device)
    assert bmm_fp8(a[:0], b[:0], one, one, BF16).shape == (0, 3, 16)
    assert bmm_fp8(a[:, :0], b, one, one, BF16).shape == (2, 0, 16)
    assert not bmm_fp8(a[:, :, :0], b[:, :0], one, one, BF16).any()


def nt(m, n, k, device, gn=128, gk=128, exact=True):
    """(a, its scales), (b, its scales)."""
    grids = (m, -(-k // gk)), (-(-n // gn), -(-k // gk))
    if exact:
        return [
            (integers((rows, k), device), powers(grid, device))
            for rows, grid in zip((m, n), grids, strict=True)
        ]
    return [
        (torch.randn(rows, k, device=device).to(E4M3), torch.rand(grid, device=device) + 0.1)
        for rows, grid in zip((m, n), grids, strict=True)
    ]


RECIPES = {
    "default": ({}, (128, 128)),
    "128": ({"recipe": (1, 128, 128)}, (128, 128)),
    "channel": ({"recipe": [1, 1, 128]}, (1, 128)),
    "32": ({"recipe": (1, 32, 32)}, (32, 32)),
    "128 split": ({"recipe_a": (1, 128), "recipe_b": (128, 128)}, (128, 128)),
    "channel split": ({"recipe_a": (1, 128), "recipe_b": (1, 128)}, (1, 128)),
    "32 split": ({"recipe_a": (1, 32), "recipe_b": (32, 32)}, (32, 32)),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", NT_SHAPES, ids=str)
def test_nt_exactly(device, shape, name):
    given, (gn, gk) = RECIPES[name]
    poison = torch.full(shape[:2], torch.nan, dtype=BF16, device=device)
    a, b = nt(*shape, device, gn, gk)
    wanted = blocks(a[0], b[0], a[1], b[1], BF16, gn, gk)
    for of_a in (a[1], column_major(a[1])):
        for of_b in (b[1], column_major(b[1])):
            d = poison.clone()
            assert fp8_gemm_nt((a[0], of_a), (b[0], of_b), d, **given) is None
            hold_equal(d, wanted)


@pytest.mark.parametrize("name", ["128", "channel", "32"])
def test_nt_of_random_numbers(device, name):
    given, (gn, gk) = RECIPES[name]
    for shape in ((64, 256, 512), (7, 192, 1088)):
        a, b = nt(*shape, device, gn, gk, exact=False)
        d = torch.empty(shape[:2], dtype=BF16, device=device)
        fp8_gemm_nt(a, b, d, compiled_dims="mnk", disable_ue8m0_cast=True, **given)
        assert distance(d, blocks(a[0], b[0], a[1], b[1], BF16, gn, gk)) < 1e-4


def test_nt_writes_to_strided_rows_alone(device):
    a, b = nt(5, 40, 96, device, 32, 32)
    held = torch.full((7, 64), 9.0, dtype=BF16, device=device)
    d = held[1:6, 8:48]
    version = held._version
    fp8_gemm_nt(a, b, d, recipe=(1, 32, 32))
    assert held._version > version
    hold_equal(d, blocks(a[0], b[0], a[1], b[1], BF16, 32, 32))
    held[1:6, 8:48] = 9
    assert (held == 9).all(), "something beside d was written to"


def test_nt_takes_operands_of_strided_rows(device):
    a, b = nt(5, 40, 96, device, 32, 32)
    d, wanted = (torch.empty(5, 40, dtype=BF16, device=device) for _ in range(2))
    fp8_gemm_nt(a, b, wanted, recipe=(1, 32, 32))
    wide = [torch.cat([x, x], 1)[:, :96] for x in (a[0], b[0])]
    strided = [torch.cat([s, s], 1)[:, : s.shape[1]] for s in (a[1], b[1])]
    fp8_gemm_nt((wide[0], strided[0]), (wide[1], strided[1]), d, recipe=(1, 32, 32))
    hold_equal(d, wanted)


@pytest.mark.parametrize("name", ["128", "channel", "32"])
def test_nt_of_nothing(device, name):
    given, (gn, gk) = RECIPES[name]
    for m, n in ((0, 40), (5, 0), (0, 0)):
        d = torch.empty(m, n, dtype=BF16, device=device)
        assert fp8_gemm_nt(*nt(m, n, 64, device, gn, gk), d, **given) is None
    d = torch.full((5, 40), torch.nan, dtype=BF16, device=device)
    fp8_gemm_nt(*nt(5, 40, 0, device, gn, gk), d, **given)
    assert not d.any()


def refused_nt(text, error=RuntimeError, **changed):
    a, b = nt(5, 40, 256, "cpu")
    call = {"a": a, "b": b, "d": torch.zeros(5, 40, dtype=BF16)}
    fp8_gemm_nt(**call)  # what is not changed works
    call["d"].fill_(7)
    with pytest.raises(error, match=f"^fp8_gemm_nt: .*{text}"):
        fp8_gemm_nt(**{**call, **changed})
    assert (call["d"] == 7).all()


@pytest.mark.parametrize(
    "recipe", [(32, 32, 32), (128, 128, 128), (128, 1, 128), (1, 64, 64), (1, 32, 128), (1, 128)]
)
def test_refused_recipes(recipe):
    refused_nt("wanted one of", recipe=recipe)


@pytest.mark.parametrize(
    "given",
    [
        {"recipe": (1, 128, 128), "recipe_a": (1, 128), "recipe_b": (128, 128)},
        {"recipe": (1, 128, 128), "recipe_a": (1, 128)},
        {"recipe": (1, 128, 128), "recipe_b": (128, 128)},
        {"recipe_a": (1, 32)},
        {"recipe_b": (32, 32)},
    ],
    ids=str,
)
def test_recipes_are_given_once(given):
    refused_nt("wanted recipe alone, or recipe_a with recipe_b", **given)


def test_recipes_agree():
    refused_nt("as many columns for both", recipe_a=(1, 32), recipe_b=(128, 128))
    refused_nt("wanted one of", recipe_a=(32, 32), recipe_b=(32, 32))


def test_what_is_more_than_a_product_is_refused():
    for more in ({"c": torch.zeros(5, 40)}, {"alpha": 2.0}, {"epilogue": "relu"}):
        refused_nt("wanted none of them", NotImplementedError, **more)
    (a, b), d = nt(5, 40, 256, "cpu"), torch.zeros(5, 40, dtype=BF16)
    fp8_gemm_nt(a, b, d, c=None, alpha=1.0, epilogue=None)


def test_refused_nt():
    a, b = nt(5, 40, 256, "cpu")
    wide = torch.zeros(40, 5, dtype=BF16).t()
    for text, changed in {
        r"wanted \[M, K\] and \[N, K\]": {"a": (a[0][:, :128], a[1])},
        "a is torch.int8": {"a": (a[0].to(INT8), a[1])},
        "b torch.float8_e5m2": {"b": (b[0].to(E5M2), b[1])},
        "the scale of a is torch.bfloat16": {"a": (a[0], a[1].to(BF16))},
        r"the scale of a is torch.float32\[5, 1\]": {"a": (a[0], a[1][:, :1])},
        "the scale of a is torch.int32": {"a": (a[0], a[1].int())},
        r"the scale of b is torch.float32\[2, 1\]": {"b": (b[0], b[1].t())},
        "d is torch.float16": {"d": torch.zeros(5, 40, dtype=FP16)},
        "d is torch.float32": {"d": torch.zeros(5, 40)},
        r"d is torch.bfloat16\[40, 5\]": {"d": wide.t()},
        "d has strides": {"d": wide},
        "rows that do not overlap": {"d": torch.zeros(1, 40, dtype=BF16).expand(5, 40)},
        "a has strides": {"a": (a[0].t().contiguous().t(), a[1])},
        "b has strides": {"b": (b[0].t().contiguous().t(), b[1])},
        "the scale of b is": {"recipe": (1, 32, 32), "a": (a[0], torch.ones(5, 8))},
    }.items():
        refused_nt(text, **changed)


def zeros(*shape, dtype=FP32):
    return torch.zeros(shape, dtype=dtype)


OPERANDS = {
    "a of one size": ({"mat_a": zeros(32, dtype=E4M3)}, "mat_a is 1-D"),
    "b of three": ({"mat_b": zeros(1, 32, 16, dtype=E4M3)}, "mat_b 3-D"),
    "a of another type": ({"mat_a": zeros(4, 128, dtype=BF16)}, "mat_a is torch.bfloat16"),
    "b e5m2": ({"mat_b": zeros(128, 128, dtype=E5M2)}, "mat_b torch.float8_e5m2"),
    "inner size": ({"mat_a": zeros(4, 64, dtype=E4M3)}, "wanted one inner size"),
    "a by columns": ({"mat_a": zeros(128, 4, dtype=E4M3).t()}, "wanted a row-major tensor"),
    "b by rows": ({"mat_b": zeros(128, 128, dtype=E4M3)}, "wanted a column-major tensor"),
    "N": ({"mat_b": zeros(12, 128, dtype=E4M3).t()}, "N 12; wanted multiples of"),
    "K": (
        {"mat_a": zeros(4, 72, dtype=E4M3), "mat_b": zeros(128, 72, dtype=E4M3).t()},
        "K is 72, .*; wanted multiples of",
    ),
    "out_dtype": ({"out_dtype": FP32}, "out_dtype is torch.float32"),
    "out_dtype int8": ({"out_dtype": INT8}, "out_dtype is torch.int8"),
}
ROW_SCALED = {
    **OPERANDS,
    "scales_a": ({"scales_a": zeros(3)}, "scales_a has 3 elements; wanted 4 or 1"),
    "scales_b": ({"scales_b": zeros(129)}, "scales_b has 129 elements; wanted 128 or 1"),
    "scales_a bf16": ({"scales_a": zeros(4, dtype=BF16)}, "scales_a is torch.bfloat16"),
    "scales_b bf16": ({"scales_b": zeros(128, dtype=BF16)}, "scales_b is torch.bfloat16"),
    "scales_a strided": ({"scales_a": zeros(8)[::2]}, "scales_a has strides"),
    "scales_b strided": ({"scales_b": zeros(256)[::2]}, "scales_b has strides"),
    "bias fp32": ({"bias": zeros(128)}, "bias is torch.float32; wanted out_dtype"),
    "bias size": ({"bias": zeros(1, dtype=BF16)}, "bias is .1."),
    "bias strided": ({"bias": zeros(256, dtype=BF16)[::2]}, "bias is .128., strides .2"),
}
BLOCKS = {
    **OPERANDS,
    "a by columns": ({"mat_a": zeros(256, 4, dtype=E4M3).t()}, "wanted a row-major tensor"),
    "b by rows": ({"mat_b": zeros(256, 256, dtype=E4M3)}, "wanted a column-major tensor"),
    "K": (
        {"mat_a": zeros(4, 144, dtype=E4M3), "mat_b": zeros(128, 144, dtype=E4M3).t()},
        "K is 144, .*; wanted multiples of 128",
    ),
    "N": (
        {"mat_b": zeros(136, 256, dtype=E4M3).t(), "mat_a": zeros(4, 256, dtype=E4M3)},
        "N 136; wanted multiples of 128",
    ),
}


@pytest.mark.parametrize("function", ["fp8_scaled_mm", "int8_scaled_mm"])
@pytest.mark.parametrize("name", ROW_SCALED)
def test_refused_products(function, name):
    changed, text = ROW_SCALED[name]
    call = {
        "mat_a": zeros(4, 128, dtype=E4M3),
        "mat_b": zeros(128, 128, dtype=E4M3).t(),
        "scales_a": zeros(4),
        "scales_b": zeros(128),
        "out_dtype": BF16,
    }
    if function == "int8_scaled_mm":
        as_int8 = {k: v.view(INT8) for k, v in changed.items() if getattr(v, "dtype", 0) is E4M3}
        call = {**call, "mat_a": call["mat_a"].view(INT8), "mat_b": call["mat_b"].view(INT8)}
        changed = {**changed, **as_int8}
    assert getattr(sgl_kernel, function)(**call).shape == (4, 128)  # what is not changed works
    with pytest.raises(RuntimeError, match=f"^{function}: .*{text}"):
        getattr(sgl_kernel, function)(**{**call, **changed})


def block_call(**changed):
    call = {
        "mat_a": zeros(4, 256, dtype=E4M3),
        "mat_b": zeros(256, 256, dtype=E4M3).t(),
        "scales_a": zeros(2, 4).t(),
        "scales_b": zeros(2, 2).t(),
        "out_dtype": BF16,
    }
    fp8_blockwise_scaled_mm(**call)  # what is not changed works
    return {**call, **changed}


@pytest.mark.parametrize("name", BLOCKS)
def test_refused_blockwise_operands(name):
    changed, text = BLOCKS[name]
    with pytest.raises(RuntimeError, match=f"^fp8_blockwise_scaled_mm: .*{text}"):
        fp8_blockwise_scaled_mm(**block_call(**changed))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"scales_a": zeros(4, 2)}, "scales_a has strides .2, 1.; wanted a column-major"),
        ({"scales_b": zeros(2, 2)}, "scales_b has strides .2, 1.; wanted a column-major"),
        ({"scales_a": zeros(3, 4).t()}, r"scales_a is \[4, 3\]; wanted \[4, 2\]"),
        ({"scales_b": zeros(1, 2).t()}, r"scales_b is \[2, 1\]; wanted \[2, 2\]"),
        ({"scales_a": zeros(2, 4, dtype=BF16).t()}, "scales_a is torch.bfloat16"),
        ({"scales_b": zeros(2, 2, dtype=FP16).t()}, "scales_b is torch.float16"),
        ({"scales_a": zeros(4)}, r"scales_a is \[4\]"),
    ],
    ids=str,
)
def test_refused_blockwise_scales(changed, text):
    with pytest.raises(RuntimeError, match=f"^fp8_blockwise_scaled_mm: {text}"):
        fp8_blockwise_scaled_mm(**block_call(**changed))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"A": zeros(2, 4, 32, dtype=E5M2), "B": zeros(2, 32, 16, dtype=E5M2)}, "not both"),
        ({"A": zeros(2, 4, 32, dtype=INT8)}, "A is torch.int8"),
        ({"B": zeros(2, 32, 16, dtype=BF16)}, "B torch.bfloat16"),
        ({"A": zeros(3, 4, 32, dtype=E4M3)}, "wanted .b, m, k. and .b, k, n."),
        ({"A": zeros(2, 4, 16, dtype=E4M3)}, "wanted .b, m, k. and .b, k, n."),
        ({"A": zeros(4, 32, dtype=E4M3)}, "A is 2-D"),
        ({"A": zeros(2, 32, 4, dtype=E4M3).mT}, "A has strides .*; wanted k contiguous"),
        ({"B": zeros(2, 32, 32, dtype=E4M3)[..., ::2]}, "B has strides"),
        ({"A_scale": zeros(2)}, r"A_scale is torch.float32\[2\]"),
        ({"B_scale": zeros(1, dtype=BF16)}, r"B_scale is torch.bfloat16\[1\]"),
        ({"dtype": FP32}, "dtype is torch.float32"),
        ({"out": zeros(2, 4, 15, dtype=BF16)}, r"out is torch.bfloat16\[2, 4, 15\]"),
        ({"out": zeros(2, 4, 16, dtype=FP16)}, "out is torch.float16"),
        ({"out": zeros(2, 16, 4, dtype=BF16).mT}, "out is .*, contiguous"),
    ],
    ids=str,
)
def test_refused_batches(changed, text):
    call = {
        "A": zeros(2, 4, 32, dtype=E4M3),
        "B": zeros(2, 32, 16, dtype=E4M3),
        "A_scale": zeros(1),
        "B_scale": zeros(1),
        "dtype": BF16,
    }
    bmm_fp8(**call)  # what is not changed works
    with pytest.raises(RuntimeError, match=f"^bmm_fp8: .*{text}"):
        bmm_fp8(**{**call, **changed})


def test_signatures():
    for name, text in {
        "fp8_scaled_mm": "mat_a mat_b scales_a scales_b out_dtype bias=None",
        "int8_scaled_mm": "mat_a mat_b scales_a scales_b out_dtype bias=None",
        "fp8_blockwise_scaled_mm": "mat_a mat_b scales_a scales_b out_dtype",
        "bmm_fp8": "A B A_scale B_scale dtype out=None",
        "fp8_gemm_nt": "a b d c=None recipe=None recipe_a=None recipe_b=None compiled_dims=nk "
        "disable_ue8m0_cast=False alpha=None epilogue=None",
    }.items():
        found = inspect.signature(getattr(sgl_kernel, name)).parameters.values()
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found]
        assert " ".join(shown) == text


def cases(device):
    """(operator, arguments, keywords) of every operator."""
    one, bias = torch.ones(1, device=device), torch.zeros(24, dtype=BF16, device=device)
    for op, dtype in ((ops.fp8_scaled_mm, E4M3), (ops.int8_scaled_mm, INT8)):
        a, b = integers((5, 64), device, dtype), integers((24, 64), device, dtype).t()
        yield op.default, (a, b, powers((5,), device), one, BF16), {}
        yield op.default, (a, b, one, powers((24,), device), BF16, bias), {}
    a, b = integers((5, 256), device), integers((128, 256), device).t()
    of_a, of_b = (column_major(powers(shape, device)) for shape in ((5, 2), (2, 1)))
    yield ops.fp8_blockwise_scaled_mm.default, (a, b, of_a, of_b, FP16), {}
    batch = integers((2, 5, 16), device), integers((2, 24, 16), device).mT, one, one, BF16
    yield ops.bmm_fp8.default, batch, {}
    out = torch.zeros(2, 5, 24, dtype=BF16, device=device)
    yield ops.bmm_fp8.out, batch, {"out": out}
    a, b = nt(5, 24, 256, device)
    yield ops.fp8_gemm_nt.default, (*a, *b, out[0], [1, 128, 128]), {}


@pytest.mark.parametrize("i", range(8))
def test_operators(device, i):
    op, args, more = list(cases(device))[i]
    checks = {} if args[0].dtype is INT8 else {"test_utils": CHECKS}
    torch.library.opcheck(op, args, more, **checks)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    version = args[-2]._version if op is ops.fp8_gemm_nt.default else None
    op(*args, **more)
    if version is not None:
        assert args[-2]._version > version
    for now, old in list(zip(args, before, strict=True))[:4]:
        assert same(now, old), "an operand was written to"


def every(codes, ints, scale, weights):
    """Every product of the two operands."""
    w8, i8, of_w, of_block, of_out = weights
    column = scale[:, None].expand(-1, 2).t().contiguous().t()
    first = sgl_kernel.fp8_scaled_mm(codes, w8.t(), scale, of_w, BF16)
    second = sgl_kernel.int8_scaled_mm(ints, i8.t(), scale, of_w, FP16)
    third = sgl_kernel.fp8_blockwise_scaled_mm(codes, w8.t(), column, of_block.t(), BF16)
    fourth = sgl_kernel.bmm_fp8(codes[None], w8.t()[None], scale[:1], scale[:1], BF16)
    fifth = torch.empty_like(fourth)
    sgl_kernel.bmm_fp8(codes[None], w8.t()[None], scale[:1], of_out, BF16, out=fifth)
    d = torch.zeros(codes.shape[0], 300, dtype=BF16, device=codes.device)
    sgl_kernel.fp8_gemm_nt((codes, column), (w8, of_block), d[:, 8:136], recipe=(1, 128, 128))
    return first, second, third, fourth, fifth, d


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_compiled(device, dynamic):
    compiled = torch.compile(every, fullgraph=True, dynamic=dynamic)
    w = integers((128, 256), device), integers((128, 256), device, INT8), powers((128,), device)
    weights = *w, powers((1, 2), device), powers((1,), device)
    for m in (4, 5, 17):
        inputs = integers((m, 256), device), integers((m, 256), device, INT8), powers((m,), device)
        wanted = every(*inputs, weights)
        for i, found in enumerate(compiled(*inputs, weights)):
            hold_equal(found, wanted[i], f"{i}, M = {m}")
