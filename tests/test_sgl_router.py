"""The products of few tokens of sgl-kernel's names: values, results in place, errors."""

import inspect

import pytest
import torch
from sgl import BF16, FP16, FP32, hold_equal

from qinductor.kernels import dsv3_fused_a_gemm, dsv3_router_gemm

ops = torch.ops.qinductor
SHAPES = ((256, 7168), (384, 7168), (2112, 1024), (2624, 512), (7, 8), (1, 256), (129, 1480))


@pytest.fixture
def device():
    return "cpu"


def whole(m, k, device):
    """Numbers whose sums have no rounding."""
    return torch.randint(-2, 3, (m, k), device=device).to(BF16) / 4


def wanted(x, w, dtype):
    return (x.double() @ w.double().t()).float().to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(device, shape):
    n, k = shape
    w = whole(n, k, device)
    for m in (1, 2, 5, 8, 16, 17, 70):
        x = whole(m, k, device)
        for dtype in (BF16, FP32):
            found = dsv3_router_gemm(x, w, dtype)
            assert found.is_contiguous()
            hold_equal(found, wanted(x, w, dtype), f"{m} {dtype}")
        hold_equal(dsv3_router_gemm(x, w), wanted(x, w, BF16))
        hold_equal(dsv3_fused_a_gemm(x, w.t()), wanted(x, w, BF16))
        out = torch.full((m, n), torch.nan, dtype=BF16, device=device)
        assert dsv3_fused_a_gemm(x, w.t(), out) is out
        hold_equal(out, wanted(x, w, BF16))


@pytest.mark.parametrize("m", [1, 4, 8, 15, 16, 40])
def test_random_values(device, m):
    """As the published tests have it, and as close as float32 sums are."""
    x, w = torch.randn(m, 7168, device=device).to(BF16), torch.randn(256, 7168, device=device)
    w = w.to(BF16)
    exact = x.double() @ w.double().t()
    torch.testing.assert_close(
        dsv3_router_gemm(x, w), torch.nn.functional.linear(x, w), rtol=1e-2, atol=1.0
    )
    found = dsv3_router_gemm(x, w, FP32).double()
    assert (found - exact).abs().max() <= 1e-4 * exact.abs().amax()


def test_rows_that_are_apart(device):
    x, w = whole(6, 64, device), whole(40, 64, device)
    held = torch.zeros(6, 80, dtype=BF16, device=device)
    held[:, 8:72] = x
    wide = torch.zeros(40, 96, dtype=BF16, device=device)
    wide[:, :64] = w
    hold_equal(dsv3_router_gemm(held[:, 8:72], wide[:, :64], FP32), wanted(x, w, FP32))
    hold_equal(dsv3_fused_a_gemm(held[:, 8:72], wide[:, :64].t()), wanted(x, w, BF16))


def test_empty(device):
    for m, n, k in ((0, 4, 8), (3, 0, 8), (3, 4, 0), (0, 0, 0)):
        x, w = (torch.ones(rows, k, dtype=BF16, device=device) for rows in (m, n))
        for found in (
            dsv3_router_gemm(x, w, FP32),
            dsv3_fused_a_gemm(x, w.t()),
            dsv3_fused_a_gemm(x, w.t(), torch.ones(m, n, dtype=BF16, device=device)),
        ):
            assert found.shape == (m, n) and not found.any()


def test_signatures():
    router = inspect.signature(dsv3_router_gemm).parameters
    assert list(router) == ["hidden_states", "router_weights", "out_dtype"]
    assert router["out_dtype"].default is BF16
    fused = inspect.signature(dsv3_fused_a_gemm).parameters
    assert list(fused) == ["mat_a", "mat_b", "output"] and fused["output"].default is None


@pytest.mark.parametrize(
    ("x", "w", "dtype", "text"),
    [
        (torch.ones(2, 16), torch.ones(4, 16, dtype=BF16), BF16, "is torch.float32.*bfloat16"),
        (torch.ones(2, 16).to(BF16), torch.ones(4, 16).to(FP16), BF16, "torch.float16"),
        (torch.ones(16).to(BF16), torch.ones(4, 16).to(BF16), BF16, "is 1-D.*wanted 2-D"),
        (torch.ones(2, 16).to(BF16), torch.ones(4, 24).to(BF16), BF16, "K is 16 of .*24 of"),
        (torch.ones(2, 12).to(BF16), torch.ones(4, 12).to(BF16), BF16, "K is 12; wanted a mul"),
        (torch.ones(16, 2).to(BF16).t(), torch.ones(4, 16).to(BF16), BF16, "wanted a row-major"),
        (torch.ones(2, 16).to(BF16), torch.ones(16, 4).to(BF16).t(), BF16, "strides"),
        (torch.ones(2, 16).to(BF16), torch.ones(4, 16).to(BF16), FP16, "out_dtype is torch.float1"),
    ],
)
def test_errors(x, w, dtype, text):
    with pytest.raises(RuntimeError, match=f"^dsv3_router_gemm: .*{text}"):
        dsv3_router_gemm(x, w, dtype)
    if dtype is BF16:
        text = text.replace("row-major", ".*-major")
        with pytest.raises(RuntimeError, match=f"^dsv3_fused_a_gemm: .*{text}"):
            dsv3_fused_a_gemm(x, w.t() if w.dim() == 2 else w)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (torch.ones(2, 4), r"output is torch.float32\[2, 4\]"),
        (torch.ones(2, 5).to(BF16), r"output is torch.bfloat16\[2, 5\].*wanted bfloat16\[2, 4\]"),
        (torch.ones(4, 2).to(BF16).t(), "output is .*strides .*contiguous"),
    ],
)
def test_errors_of_the_output(output, text):
    x, w = torch.ones(2, 16).to(BF16), torch.ones(4, 16).to(BF16)
    with pytest.raises(RuntimeError, match=f"^dsv3_fused_a_gemm: {text}"):
        dsv3_fused_a_gemm(x, w.t(), output)


@pytest.mark.parametrize(("x", "w"), [((), (16, 4)), ((2, 16), ()), ((16,), (16, 4))])
def test_errors_of_operands_with_an_output(x, w):
    x, w, output = (torch.ones(shape, dtype=BF16) for shape in (x, w, (2, 4)))
    with pytest.raises(RuntimeError, match="^dsv3_fused_a_gemm: mat_a is .-D, .*wanted 2-D"):
        dsv3_fused_a_gemm(x, w, output)


def cases(device):
    x, w = whole(5, 64, device), whole(24, 64, device)
    out = torch.empty(5, 24, dtype=BF16, device=device)
    return (
        (ops.dsv3_router_gemm.default, (x, w, FP32), {}),
        (ops.dsv3_fused_a_gemm.default, (x, w.t()), {}),
        (ops.dsv3_fused_a_gemm.out, (x, w.t()), {"output": out}),
    )


@pytest.mark.parametrize("i", range(3))
def test_opcheck(device, i):
    op, args, given = cases(device)[i]
    torch.library.opcheck(op, args, given)


def test_compiled(device):
    """Both take part in a graph; what is written in place is read afterwards."""
    x, w = whole(5, 64, device), whole(24, 64, device)

    def function(x, w):
        out = torch.zeros(5, 24, dtype=BF16, device=x.device)
        dsv3_fused_a_gemm(x, w.t(), out)
        return out + 1, dsv3_router_gemm(x, w, FP32) * 2

    with torch.no_grad():
        found = torch.compile(function, fullgraph=True)(x, w)
    for ours, want in zip(found, function(x, w), strict=True):
        assert torch.equal(ours, want)
