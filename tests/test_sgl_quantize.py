"""The quantisers of sgl-kernel's names: codes and scales bit for bit, layouts, masks, errors."""

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
    LAYOUTS,
    LIMITS,
    groups,
    hold_same,
    hostile,
    rows,
    same,
    scales,
    silu_mul,
    up,
    whole,
    words,
)

import qinductor.kernels as sgl_kernel
from qinductor.kernels import (
    sgl_per_tensor_quant_fp8,
    sgl_per_token_group_quant_8bit,
    sgl_per_token_quant_fp8,
)

ops = torch.ops.qinductor
# float8 has no multiplication, with which the schema's check compares
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture
def device():
    return "cpu"


def codes_like(x, columns, dtype=E4M3):
    """Codes [..., columns] that no test expects."""
    held = torch.full((*x.shape[:-1], columns), 0x55, dtype=torch.uint8, device=x.device)
    return held.view(dtype)


def grouped(x, group, dtype=E4M3, layout="row", silu=False, masked_m=None, flat=False, into=None):
    """(codes, output_s) of the function, from its documented arguments."""
    h = x.shape[-1] // 2 if silu else x.shape[-1]
    lead = (x.shape[:-1].numel(),) if flat else x.shape[:-1]
    q, s = into or (codes_like(x, h, dtype), scales(lead, h // group, layout, x.device))
    ue8m0 = not layout.startswith(("row", "column"))
    low, high = LIMITS[dtype]
    found = sgl_per_token_group_quant_8bit(
        x, q, s, group, 1e-10, low, high, ue8m0, silu, masked_m
    )  # fmt: skip
    assert found is None
    return q, s


def wanted_of(x, group, dtype, layout, silu=False):
    """What the oracle says of it."""
    y = silu_mul(x) if silu else x
    q, s = groups(y, group, dtype, not layout.startswith(("row", "column")))
    return q, words(s) if layout.startswith("packed") else s


def hold_groups(x, group, dtype=E4M3, layout="row", silu=False):
    before = x.clone()
    q, s = grouped(x, group, dtype, layout, silu)
    codes, found = wanted_of(x, group, dtype, layout, silu)
    hold_same(s, found, "scales")
    hold_same(q, codes, "codes")
    assert same(x, before), "the input was written to"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("source", [BF16, FP16], ids=["bf16", "fp16"])
def test_groups(device, source, dtype, layout):
    for m, h, group in ((1, 512, 128), (5, 1536, 128), (7, 256, 16), (4, 96, 32), (3, 192, 64)):
        x = (torch.randn(m, h) * 3).to(source).to(device)
        hold_groups(x, group, dtype, layout)
    hold_groups(torch.randn(9, 1280).to(source).to(device), 256, dtype, layout)


@pytest.mark.parametrize("group", [16, 128])
@pytest.mark.parametrize("layout", ["row", "ue8m0 row", "packed"])
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("source", [BF16, FP16], ids=["bf16", "fp16"])
def test_hostile_groups(device, source, dtype, layout, group):
    infinite = dtype is E4M3  # an integer of a nan is anything
    hold_groups(hostile(source, 2 * group, device, infinite), group, dtype, layout)


def test_a_nan_stays_in_its_group(device):
    x = torch.randn(4, 512, dtype=BF16, device=device)
    x[1, 200] = torch.nan
    for layout in ("row", "ue8m0 row", "packed"):
        hold_groups(x, 128, E4M3, layout)
        q, s = grouped(x, 128, E4M3, layout)
        assert q.float().isnan().sum() == 128 and q[1, 128:256].float().isnan().all()
        if layout != "packed":
            assert s.isnan().sum() == 1 and s[1, 1].isnan()


def test_groups_of_zeros_have_the_smallest_scale(device):
    x = torch.zeros(2, 128, dtype=BF16, device=device)
    for dtype, byte in ((E4M3, 85), (INT8, 87)):
        q, s = grouped(x, 128, dtype)
        assert not q.float().any()
        least = torch.tensor(1e-10) * torch.tensor(1 / LIMITS[dtype][1])
        assert s.flatten().tolist() == [float(least)] * 2
        q, s = grouped(x, 128, dtype, "packed")
        assert not q.float().any() and s.flatten().tolist() == [byte] * 2


def test_integers_are_truncated_and_floats_rounded(device):
    x = torch.zeros(1, 128, dtype=BF16, device=device)
    x[0, :6] = torch.tensor([127, 1.75, -1.75, 0.99, -0.99, 126.5], device=device)
    q, _ = grouped(x, 128, INT8)
    assert q[0, :6].tolist() == [127, 1, -1, 0, 0, 126]
    x[0, :6] = torch.tensor([448, 17, 19, -17, 0.25, 400], device=device)
    q, _ = grouped(x, 128, E4M3)
    assert q.float()[0, :6].tolist() == [448, 16, 20, -16, 0.25, 384]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flat", [False, True], ids=["batch of scales", "rows of scales"])
def test_leading_sizes(device, layout, flat):
    for lead in ((), (6,), (2, 3), (2, 1, 5)):
        x = torch.randn(*lead, 256, device=device).to(BF16)
        h, count = 2, x.numel() // 256
        s = scales((count,) if flat or not lead else lead, h, layout, device)
        q, s = grouped(x, 128, E4M3, layout, into=(codes_like(x, 256), s))
        codes, found = wanted_of(x, 128, E4M3, layout)
        hold_same(q, codes, "codes")
        hold_same(s.reshape(found.shape), found, "scales")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_scales_that_lie_anywhere(device, layout):
    """No one stride leads from batch to batch: the two leading sizes are swapped in memory."""
    x = torch.randn(2, 3, 5, 256, device=device).to(BF16)
    s = scales((3, 2, 5), 2, layout, device).transpose(0, 1)
    q, s = grouped(x, 128, E4M3, layout, into=(codes_like(x, 256), s))
    codes, found = wanted_of(x, 128, E4M3, layout)
    hold_same(q, codes, "codes")
    hold_same(s, found, "scales")


def test_one_row_of_scales_for_one_row(device):
    x = torch.randn(256, device=device).to(BF16)
    for layout in ("row", "packed row"):
        s = scales((1,), 2, layout, device)[0]
        q, s = grouped(x, 128, E4M3, layout, into=(codes_like(x, 256), s))
        codes, found = wanted_of(x, 128, E4M3, layout)
        hold_same(q, codes, "codes")
        hold_same(s, found, "scales")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_written_beside_the_scales(device, layout):
    x = torch.randn(5, 640, device=device).to(BF16)
    q = codes_like(x, 640)
    s = scales((9,), 5, layout, device)[2:7]
    held = s.new_empty(0).set_(s.untyped_storage())
    before = held.clone()
    grouped(x, 128, E4M3, layout, into=(q, s))
    inside = torch.zeros_like(held, dtype=torch.bool)
    inside.as_strided(s.shape, s.stride(), s.storage_offset()).fill_(True)
    assert same(held[~inside], before[~inside])
    hold_same(s, wanted_of(x, 128, E4M3, layout)[1], "scales")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("source", [BF16, FP16], ids=["bf16", "fp16"])
def test_silu_mul_is_fused_in_every_layout(device, source, dtype, layout):
    x = torch.randn(6, 1024, device=device).to(source)
    hold_groups(x, 128, dtype, layout, silu=True)
    x = (torch.randn(2, 3, 512, device=device) * 20).to(source)
    hold_groups(x, 32, dtype, layout, silu=True)


def test_the_activation_is_rounded_before_the_product(device):
    x = torch.randn(64, 2048, device=device).to(BF16)
    gate, value = x.float().chunk(2, -1)
    once = (gate / (1 + torch.exp(-gate)) * value).to(BF16)
    q, _ = grouped(x, 128, silu=True)
    assert not same(q, groups(once, 128, E4M3, False)[0]), "the inputs tell nothing"
    hold_same(q, groups(silu_mul(x), 128, E4M3, False)[0], "codes")


@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=["e4m3", "int8"])
def test_masked_rows_are_left_alone(device, dtype, layout, silu):
    experts, tokens, h, group = 5, 6, 384, 128
    x = torch.randn(experts, tokens, 2 * h if silu else h, device=device).to(BF16)
    counts = [0, 1, tokens, 4, 0]
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    for e, count in enumerate(counts):
        x[e, count:] = torch.nan  # what is masked is not looked at
    q, s = codes_like(x, h, dtype), scales((experts, tokens), h // group, layout, device)
    old = q.clone(), s.clone()
    grouped(x, group, dtype, layout, silu, masked_m, into=(q, s))
    codes, found = wanted_of(x.nan_to_num(), group, dtype, layout, silu)
    for e, count in enumerate(counts):
        for now, before, new in ((q, old[0], codes), (s, old[1], found)):
            hold_same(now[e, :count], new[e, :count], f"expert {e}")
            assert same(now[e, count:], before[e, count:]), "a masked row was written to"


def test_every_distribution_of_tokens(device):
    experts, tokens, h = 8, 32, 256
    x = torch.randn(experts, tokens, 2 * h, device=device).to(BF16)
    codes, found = wanted_of(x, 128, E4M3, "packed", silu=True)
    first = torch.arange(experts)
    for counts in (
        torch.full((experts,), tokens),
        torch.zeros(experts),
        torch.where(first == 3, tokens, 0),
        first % 2 * tokens // 2,
        torch.randint(tokens + 1, (experts,)),
        torch.full((experts,), tokens + 5),  # no more than there are
        torch.full((experts,), -1),
    ):
        masked_m = counts.to(torch.int32).to(device)
        q, s = grouped(x, 128, layout="packed", silu=True, masked_m=masked_m)
        taken = torch.arange(tokens, device=device) < counts[:, None].to(device)
        bits, wanted = q.view(torch.uint8), codes.view(torch.uint8)
        assert same(bits[taken], wanted[taken]) and same(s[taken], found[taken])
        assert (bits[~taken] == 0x55).all() and (s[~taken] == 77).all()


def test_aliases_and_versions_are_one_function(device):
    x = torch.randn(3, 256, device=device).to(BF16)
    wanted = groups(x, 128, E4M3, False)
    for name in ("8bit", "fp8", "int8"):
        function = getattr(sgl_kernel, f"sgl_per_token_group_quant_{name}")
        for version in (None, False, True):
            q, s = codes_like(x, 256), scales((3,), 2, "row", device)
            function(x, q, s, 128, 1e-10, -448, 448, enable_v2=version)
            hold_same(q, wanted[0], name)
            hold_same(s, wanted[1], name)


def test_signatures():
    text = {
        sgl_per_token_group_quant_8bit: "input output_q output_s group_size eps fp8_min fp8_max "
        "scale_ue8m0=False fuse_silu_and_mul=False masked_m=None enable_v2=None",
        sgl_per_tensor_quant_fp8: "input output_q output_s is_static",
        sgl_per_token_quant_fp8: "input output_q output_s",
    }
    for function, words_ in text.items():
        found = inspect.signature(function).parameters.values()
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found]
        assert " ".join(shown) == words_


def group_call(device="cpu", **changed):
    """A call that works, with some of its arguments changed."""
    x = torch.randn(4, 256, device=device).to(BF16)
    call = {
        "input": x, "output_q": codes_like(x, 256), "output_s": scales((4,), 2, "row", device),
        "group_size": 128, "eps": 1e-10, "fp8_min": -448.0, "fp8_max": 448.0,
    }  # fmt: skip
    return {**call, **changed}


def zeros(*shape, dtype=FP32, strides=None):
    made = torch.zeros(shape, dtype=dtype)
    return made if strides is None else made.as_strided(shape, strides)


MASK = functools.partial(zeros, dtype=torch.int32)
BATCH = {
    "input": zeros(2, 4, 256, dtype=BF16),
    "output_q": zeros(2, 4, 256, dtype=E4M3),
    "output_s": zeros(2, 4, 2),
}
REFUSED = {
    "float32 input": ({"input": zeros(4, 256)}, "input is torch.float32"),
    "empty": (
        {"input": zeros(0, 256, dtype=BF16), "output_q": zeros(0, 256, dtype=E4M3)},
        r"input is \[0, 256\]",
    ),
    "no columns": (
        {"input": zeros(4, 0, dtype=BF16), "output_q": zeros(4, 0, dtype=E4M3)},
        r"input is \[4, 0\]",
    ),
    "e5m2 codes": ({"output_q": zeros(4, 256, dtype=E5M2)}, "output_q is torch.float8_e5m2"),
    "columns": ({"output_q": zeros(4, 128, dtype=E4M3)}, "wanted equal shapes"),
    "rows": ({"output_q": zeros(5, 256, dtype=E4M3)}, "wanted equal shapes"),
    "not twice": ({"fuse_silu_and_mul": True}, "wanted twice as many columns"),
    "group": ({"group_size": 96}, "group_size is 96; wanted one of"),
    "group of 8": ({"group_size": 8}, "group_size is 8"),
    "no group": ({"group_size": 0}, "group_size is 0"),
    "part of a group": (
        {"input": zeros(4, 192, dtype=BF16), "output_q": zeros(4, 192, dtype=E4M3)},
        "rows have 192 elements; wanted a multiple of group_size, 128",
    ),
    "eps": ({"eps": 1e-4}, "eps is 0.0001; wanted 1e-10"),
    "eps nearby": ({"eps": 1.01e-10}, "eps is"),
    "eps nan": ({"eps": float("nan")}, "eps is nan"),
    "range": ({"fp8_max": 240.0}, "fp8_min, fp8_max are"),
    "range of int8": ({"output_q": zeros(4, 256, dtype=INT8)}, "wanted .-128.0, 127.0."),
    "symmetric int8": (
        {"output_q": zeros(4, 256, dtype=INT8), "fp8_min": -127, "fp8_max": 127},
        "wanted .-128.0, 127.0.",
    ),
    "input strided": ({"input": zeros(256, 4, dtype=BF16).t()}, "wanted contiguous tensors"),
    "codes strided": ({"output_q": zeros(256, 4, dtype=E4M3).t()}, "wanted contiguous tensors"),
    "half scales": ({"output_s": zeros(4, 2, dtype=FP16)}, "output_s is torch.float16"),
    "packed alone": ({"output_s": MASK(4, 1)}, "wanted scale_ue8m0=True"),
    "packed columns": ({"output_s": MASK(4, 2), "scale_ue8m0": True}, r"output_s is \[4, 2\]"),
    "scale columns": ({"output_s": zeros(4, 3)}, r"output_s is \[4, 3\]; wanted \[4, 2\]"),
    "scale rows": ({"output_s": zeros(8, 2)}, r"output_s is \[8, 2\]"),
    "scales 1-D": ({"output_s": zeros(8)}, r"output_s is \[8\]"),
    "mask of rows": ({"masked_m": MASK(4)}, "wanted .experts, tokens, ...."),
    "mask int64": (
        {**BATCH, "masked_m": zeros(2, dtype=torch.int64)},
        r"masked_m is torch.int64\[2\]; wanted int32\[2\]",
    ),
    "mask size": ({**BATCH, "masked_m": MASK(3)}, r"masked_m is torch.int32\[3\]"),
    "mask 2-D": ({**BATCH, "masked_m": MASK(2, 1)}, r"masked_m is torch.int32\[2, 1\]"),
    "masked rows of scales": (
        {**BATCH, "output_s": zeros(8, 2), "masked_m": MASK(2)},
        "output_s 2-D",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_groups(name):
    changed, text = REFUSED[name]
    call = group_call(**changed)
    sgl_per_token_group_quant_8bit(**group_call())  # what is not changed works
    before = call["output_q"].clone(), call["output_s"].clone()
    with pytest.raises(RuntimeError, match=f"^sgl_per_token_group_quant_8bit: .*{text}"):
        sgl_per_token_group_quant_8bit(**call)
    assert same(call["output_q"], before[0]) and same(call["output_s"], before[1])


@pytest.mark.parametrize("source", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("columns", [4, 512, 1368, 2052])
def test_rows(device, source, columns):
    for m in (1, 7, 64):
        x = (torch.randn(m, columns, device=device) * 5).to(source)
        x[-1] = 0
        for shape in ((m,), (m, 1)):
            q, s = codes_like(x, columns), torch.full(shape, 9.0, device=device)
            assert sgl_per_token_quant_fp8(x, q, s) is None
            codes, found = rows(x)
            hold_same(q, codes, "codes")
            hold_same(s, found.reshape(shape), "scales")
        assert not s[-1].any() and not q[-1].float().any()


def normal(x):
    """The rows whose scale has a reciprocal: 1 / s of a smaller one is infinite."""
    return x[(x.float().abs().amax(-1) == 0) | (x.float().abs().amax(-1) > 2**-116)]


@pytest.mark.parametrize("source", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_hostile_rows(device, source):
    x = normal(hostile(source, 64, device, infinite=True))
    x = torch.cat([x, torch.full_like(x[:1], torch.nan)])
    q, s = codes_like(x, 64), torch.empty(len(x), 1, device=device)
    sgl_per_token_quant_fp8(x, q, s)
    codes, found = rows(x)
    hold_same(s, found, "scales")
    hold_same(q, codes, "codes")


def test_rows_of_any_leading_sizes(device):
    for lead in ((2, 3), (2, 1, 4), (0,), (2, 0)):
        x = torch.randn(*lead, 128, device=device).to(BF16)
        q, s = codes_like(x, 128), torch.empty(*lead, 1, device=device)
        sgl_per_token_quant_fp8(x, q, s)
        codes, found = rows(x)
        hold_same(q, codes, "codes")
        hold_same(s, found, "scales")


@pytest.mark.parametrize("source", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", [(128, 512), (3, 7, 20), (1000,), (1,), ()], ids=str)
def test_tensors(device, source, shape):
    x = (torch.randn(shape, device=device) * 3).to(source)
    q, s = codes_like(x.reshape(*shape, 1), 1).reshape(shape), torch.full((1,), 9.0, device=device)
    assert sgl_per_tensor_quant_fp8(x, q, s, False) is None
    codes, found = whole(x)
    hold_same(s, found, "scale")  # overwritten, though it was larger
    hold_same(q, codes, "codes")
    for value in (0.01, 1.0, 0.0073):
        s.fill_(value)
        sgl_per_tensor_quant_fp8(x, q, s, True)
        hold_same(q, whole(x, s)[0], "codes")
        assert s.tolist() == torch.tensor([value]).tolist(), "a scale that was given was changed"


def test_a_tensor_of_zeros(device):
    x = torch.zeros(4, 64, dtype=BF16, device=device)
    for static in (False, True):
        q, s = codes_like(x, 64), torch.zeros(1, device=device)
        sgl_per_tensor_quant_fp8(x, q, s, static)
        assert not q.float().any() and s.tolist() == [0]
    q, s = codes_like(x[:0], 64), torch.ones((), device=device)
    sgl_per_tensor_quant_fp8(x[:0], q, s, False)
    assert s == 0
    q, s = codes_like(x, 64), torch.ones((), device=device)
    sgl_per_tensor_quant_fp8(x + 56, q, s, False)
    assert s == 0.125 and (q.float() == 448).all()


@pytest.mark.parametrize("source", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_hostile_tensors(device, source):
    x = normal(hostile(source, 64, device, infinite=True))
    s = torch.empty(1, device=device)
    for value in (1.0, 448.0, 2.0**-9, 3.7e-3):
        q = codes_like(x, 64)
        sgl_per_tensor_quant_fp8(x, q, s.fill_(value), True)
        hold_same(q, whole(x, s)[0], "codes")
    for row in x[:: max(1, len(x) // 60)]:
        row, q = row[None].contiguous(), codes_like(row[None], 64)
        sgl_per_tensor_quant_fp8(row, q, s, False)
        codes, found = whole(row)
        hold_same(s, found, "scale")
        hold_same(q, codes, "codes")


X, Q = zeros(4, 64, dtype=BF16), zeros(4, 64, dtype=E4M3)
REFUSED_OTHERS = {
    "input dtype": ((zeros(4, 64, dtype=torch.float64), Q), "input is torch.float64"),
    "codes dtype": ((X, zeros(4, 64, dtype=INT8)), "output_q is torch.int8"),
    "shapes": ((X, zeros(4, 32, dtype=E4M3)), "wanted equal shapes"),
    "input strided": ((zeros(64, 4, dtype=BF16).t(), Q), "wanted contiguous tensors"),
    "codes strided": ((X, zeros(64, 4, dtype=E4M3).t()), "wanted contiguous tensors"),
}


@pytest.mark.parametrize("name", REFUSED_OTHERS)
def test_refused_rows_and_tensors(name):
    (x, q), text = REFUSED_OTHERS[name]
    with pytest.raises(RuntimeError, match=f"^sgl_per_token_quant_fp8: .*{text}"):
        sgl_per_token_quant_fp8(x, q, zeros(4, 1))
    for static in (False, True):
        with pytest.raises(RuntimeError, match=f"^sgl_per_tensor_quant_fp8: .*{text}"):
            sgl_per_tensor_quant_fp8(x, q, zeros(1), static)


@pytest.mark.parametrize("columns", [1, 2, 6, 1366])
def test_rows_are_whole_words(columns):
    x, q = zeros(4, columns, dtype=BF16), zeros(4, columns, dtype=E4M3)
    with pytest.raises(RuntimeError, match="wanted rows of a multiple of 4 elements"):
        sgl_per_token_quant_fp8(x, q, zeros(4))


@pytest.mark.parametrize(
    "s", [zeros(3), zeros(4, 2), zeros(4, dtype=FP16), zeros(8)[::2]], ids=lambda s: str(s.shape)
)
def test_refused_scales_of_rows(s):
    with pytest.raises(RuntimeError, match="^sgl_per_token_quant_fp8: output_s is"):
        sgl_per_token_quant_fp8(X, Q, s)


@pytest.mark.parametrize(
    "s", [zeros(2), zeros(0), zeros(1, dtype=BF16)], ids=lambda s: f"{s.shape} {s.dtype}"
)
def test_refused_scale_of_a_tensor(s):
    with pytest.raises(RuntimeError, match="^sgl_per_tensor_quant_fp8: output_s is"):
        sgl_per_tensor_quant_fp8(X, Q, s, False)


def test_a_tensor_without_rows_has_no_scales_of_rows():
    with pytest.raises(RuntimeError, match="^sgl_per_token_quant_fp8: input is"):
        sgl_per_token_quant_fp8(zeros(64), zeros(64, dtype=E4M3), zeros(1))


def cases(device):
    """(operator, arguments) of every form."""
    x = torch.randn(2, 4, 256, device=device).to(BF16)
    e4m3, int8 = (-448.0, 448.0), (-128.0, 127.0)
    masked_m = torch.tensor([1, 4], dtype=torch.int32, device=device)
    s = functools.partial(scales, device=device)
    group, row, tensor = (
        getattr(ops, f"sgl_{name}").default
        for name in ("per_token_group_quant_8bit", "per_token_quant_fp8", "per_tensor_quant_fp8")
    )
    one = torch.ones(1, device=device)
    yield group, (x, codes_like(x, 256), s((8,), 2, "row"), 128, 1e-10, *e4m3)
    yield group, (x, codes_like(x, 256, INT8), s((2, 4), 2, "column"), 128, 1e-10, *int8)
    silu = s((2, 4), 1, "packed"), 128, 1e-10
    yield group, (x, codes_like(x, 128), *silu, *e4m3, True, True, masked_m)
    yield group, (x, codes_like(x, 128, INT8), *silu, *int8, True, True, masked_m, True)
    yield row, (x, codes_like(x, 256), torch.zeros(8, device=device))
    yield tensor, (x, codes_like(x, 256), one, False)
    yield tensor, (x, codes_like(x, 256), one, True)


@pytest.mark.parametrize("i", range(7))
def test_operators(device, i):
    op, args = list(cases(device))[i]
    checks = {"test_utils": CHECKS} if args[1].dtype is E4M3 else {}
    torch.library.opcheck(op, args, **checks)


@pytest.mark.parametrize("i", range(7))
def test_what_is_written_to_has_a_new_version(device, i):
    op, args = list(cases(device))[i]
    old = [a._version for a in args[:3]]
    op(*args)
    now = [a._version for a in args[:3]]
    static = args[-1] is True and len(args) == 4
    assert now[0] == old[0] and now[1] > old[1] and (now[2] > old[2] or static)


def every(x, masked_m):
    """Every quantiser on results that are made here."""
    h = x.shape[-1]
    found = []
    for dtype, layout in ((E4M3, "row"), (INT8, "column"), (E4M3, "packed")):
        q = torch.empty(x.shape, dtype=dtype, device=x.device)
        s = torch.zeros(*x.shape[:-1], h // 128, device=x.device)
        if layout == "packed":
            s = torch.zeros(x.shape[0], 1, up(x.shape[1], 4), dtype=torch.int32, device=x.device)
            s = s.transpose(1, 2)[:, : x.shape[1]]
        low, high = LIMITS[dtype]
        sgl_kernel.sgl_per_token_group_quant_8bit(
            x, q, s, 128, 1e-10, low, high, scale_ue8m0=layout == "packed"
        )
        found += [q, s]
    q = torch.zeros(*x.shape[:-1], h // 2, dtype=torch.int8, device=x.device).view(E4M3)
    s = torch.zeros(*x.shape[:-1], h // 256, device=x.device)
    sgl_kernel.sgl_per_token_group_quant_fp8(
        x, q, s, 128, 1e-10, -448.0, 448.0, fuse_silu_and_mul=True, masked_m=masked_m
    )
    found += [q, s]
    q, s = torch.empty(x.shape, dtype=E4M3, device=x.device), torch.zeros(1, device=x.device)
    sgl_kernel.sgl_per_tensor_quant_fp8(x, q, s, False)
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    rows = torch.zeros(x.shape[:-1], device=x.device)
    sgl_kernel.sgl_per_token_quant_fp8(x, q, rows)
    return [*found, q, s, rows]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_compiled(device, dynamic):
    compiled = torch.compile(every, fullgraph=True, dynamic=dynamic)
    masked_m = torch.tensor([1, 4], dtype=torch.int32, device=device)
    for tokens in (4, 5, 9):
        x = torch.randn(2, tokens, 512, device=device).to(BF16)
        for found, wanted in zip(compiled(x, masked_m), every(x, masked_m), strict=True):
            hold_same(found, wanted, str(tokens))


def test_strides_that_a_call_hands_out_are_honoured_in_compiled_code(device):
    """The column-major results are arguments of the graph."""

    @functools.partial(torch.compile, fullgraph=True)
    def quantised(x, q, s):
        sgl_per_token_group_quant_8bit(x, q, s, 128, 1e-10, -448.0, 448.0, scale_ue8m0=True)
        return q.float().sum()

    x = torch.randn(6, 512, device=device).to(BF16)
    q, s = codes_like(x, 512), scales((6,), 4, "packed", device)
    quantised(x, q, s)
    codes, found = wanted_of(x, 128, E4M3, "packed")
    hold_same(q, codes, "codes")
    hold_same(s, found, "scales")
