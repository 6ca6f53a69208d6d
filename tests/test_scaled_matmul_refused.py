"""Products of codes that differ in one field: each gets its own contract, or is refused."""

import re
from collections.abc import Callable

import pytest
import torch
from models import BF16, FP16, FP32, Holder, Random
from scaled import E4M3, E5M2, codes, integers, provided, scaled
from torch.nn.functional import linear

from qinductor.testing import rewritten

M, N, K = 16, 256, 256
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def one_provider():
    with provided():
        yield


def site(module: Holder, *args: torch.Tensor, target: str = "cpu"):
    """The first site of a graph, which is one of this family."""
    first = rewritten(lambda: module, *args, target=target).report.sites[0]
    assert first.pattern == "scaled_matmul"
    return first


def holds(module: Holder, wanted: str, *args: torch.Tensor) -> None:
    """The contract, or the reason of a refusal, on a GPU: a CPU does not run all of these."""
    found = site(module, *(args or (Random(1).normal(M, K),)), target="sm_90")
    said = found.contract if found.lowered else f"refused: {found.reason}"
    assert re.search(wanted, said), said


ROWS = r"^float8_e4m3fn token scale fp32 x float8_e4m3fn\[256,256\] channel scale fp32 -> bf16$"


def test_the_product_that_the_others_differ_from() -> None:
    holds(scaled(), ROWS)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"x": "tensor", "weight": "tensor"},
         r"^float8_e4m3fn tensor scale fp32 x float8_e4m3fn\[256,256\] tensor scale fp32 -> bf16$"),
        ({"x": "group", "weight": "block"}, r"^float8_e4m3fn group-128 .* block-128x128 scale"),
        ({"x": "group", "weight": "group"}, r"^float8_e4m3fn group-128 .* group-128 scale"),
        ({"dtype": E5M2}, r"^float8_e5m2 token scale fp32 x float8_e4m3fn\["),
        ({"codes_dtype": E5M2}, r"^float8_e4m3fn token scale fp32 x float8_e5m2\["),
        ({"out": FP16}, r"-> fp16$"),
        ({"out": FP32}, r"-> fp32$"),
        ({"out": None}, r"^refused: the result must be bf16, fp16 or fp32; it is .*float8_e4m3fn"),
        ({"bias": BF16}, r"-> bf16 \+bias$"),
        ({"fast": True}, r"-> bf16 fast sums$"),
        ({"result": True}, r"^refused: the result must have no scale of its own \(scale_result\)"),
    ],
    ids=str,
)  # fmt: skip
def test_one_field_of_scaled_mm(changes: dict, wanted: str) -> None:
    holds(scaled(**changes), wanted)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_the_bias_keeps_its_dtype(dtype: torch.dtype) -> None:
    module = integers(
        lambda m, y, s: (y.float() * s * m.s + m.b).to(BF16), b=torch.randn(N, dtype=dtype)
    )
    found = rewritten(lambda: module, Random(1).normal(M, K))
    assert found.report.sites[0].contract.endswith("-> bf16 +bias")
    assert f"bias={str(dtype).removeprefix('torch.')}" in found.after


def times(*names: str) -> Callable:
    """int8 sums times these, in this order."""

    def function(m, y, s):
        y = y.float()
        for name in names:
            y = y * (s if name == "x" else getattr(m, name))
        return y.to(BF16)

    return function


INT8 = r"^int8 token scale fp32 x int8\[256,256\] channel scale fp32 -> "
EPILOGUES: dict[str, tuple[Callable, str]] = {
    "x first": (times("x", "s"), INT8 + "bf16$"),
    "weight first": (times("s", "x"), INT8 + "bf16$"),
    "rounded between": (lambda m, y, s: ((y.float() * s).to(BF16) * m.s).to(BF16), INT8 + "bf16$"),
    "scale on the left": (lambda m, y, s: m.s * (s * y.float()), INT8 + "fp32$"),
    "rounded first": (lambda m, y, s: y.to(BF16) * s * m.s, INT8 + "fp32$"),
    "x alone": (times("x"), r"^int8 token scale fp32 x int8\[256,256\] no scale -> bf16$"),
    "weight alone": (times("s"), "refused: the sums must be multiplied by one scale of x and at "
                     r"most one constant scale of the weight; .* has \[column float32\[256\]\]"),
    "no scale": (lambda m, y, s: y, r"refused: the sums must be .* has \[\]"),
    "one for the tensor": (lambda m, y, s: y.float() * s.amax() * m.s,
                           r"^int8 tensor scale fp32 x int8\[256,256\] channel scale fp32 -> fp32"),
    "one for the weight": (lambda m, y, s: y.float() * s * m.one,
                           r"^int8 token scale fp32 x int8\[256,256\] tensor scale fp32 -> fp32"),
    "both one, constant": (lambda m, y, s: y.float() * m.one * m.other,
                           r"^int8 tensor scale fp32 x int8\[256,256\] tensor scale fp32 -> fp32"),
    "bf16 scale of x": (lambda m, y, s: (y.float() * s.to(BF16) * m.s).to(BF16),
                        r"^int8 token scale bf16 x"),
    "bf16 scale of the weight": (lambda m, y, s: (y.float() * s * m.s.to(BF16)).to(BF16),
                                 r"channel scale bf16 -> bf16$"),
    "widened in the end": (lambda m, y, s: (y.float() * s * m.s).to(BF16).float().exp(),
                           INT8 + "bf16$"),
    "fp16": (lambda m, y, s: (y.float() * s * m.s).to(FP16), INT8 + "fp16$"),
    # What is not of the form stays in the graph, behind a product that ends before it.
    "scaled twice by x": (times("x", "s", "x"), INT8 + "fp32$"),
    "scaled twice by the weight": (times("x", "s", "s"), INT8 + "fp32$"),
    "clamped": (lambda m, y, s: (y.float() * s * m.s).clamp(-1, 1), INT8 + "fp32$"),
    "activated": (lambda m, y, s: torch.relu(y.float() * s * m.s), INT8 + "fp32$"),
    "times a number": (lambda m, y, s: y.float() * s * m.s * 0.5, INT8 + "fp32$"),
    "a second addend": (lambda m, y, s: y.float() * s * m.s + m.s + m.s, INT8 + r"fp32 \+bias$"),
    "a residual": (lambda m, y, s: y.float() * s * m.s + m.r, INT8 + "fp32$"),
    "an addend that varies": (lambda m, y, s: y.float() * s * m.s + s.amax(), INT8 + "fp32$"),
    "scaled after the bias": (lambda m, y, s: (y.float() * s + m.s) * m.s,
                              r"no scale -> fp32 \+bias$"),
    "a number for a bias": (lambda m, y, s: y.float() * s * m.s + m.one, INT8 + "fp32$"),
    "cast to integers": (lambda m, y, s: (y.float() * s * m.s).to(torch.int8), INT8 + "fp32$"),
    # What comes before it is of no form at all.
    "a zero point": (lambda m, y, s: (y - m.sums).float() * s * m.s,
                     r"refused: .* has \[\], then aten.sub.Tensor takes it"),
    "halved first": (lambda m, y, s: y.float() * 0.5 * s * m.s,
                     r"refused: .* has \[\], then aten.mul.Tensor takes it"),
    "divided": (lambda m, y, s: y.float() / s * m.s,
                r"refused: .* has \[\], then aten.div.Tensor takes it"),
    "a scale for each element": (lambda m, y, s: y.float() * m.r * s,
                                 r"refused: .* has \[\], then aten.mul.Tensor takes it"),
    "a scale along x that varies": (lambda m, y, s: y.float() * s.narrow(0, 0, 1).expand(1, N) * s,
                                    r"refused: the sums must be multiplied by one scale of x"),
    "sums in fp16": (lambda m, y, s: y.to(FP16) * s * m.s,
                     "refused: scaling sums in fp32 once, to fp32, is less exact: rms error inf"),
    "scaled in fp64": (lambda m, y, s: (y.double() * s * m.s).float(),
                       "refused: scaling sums in fp32 once, to fp32, is less exact"),
    "the sums are used": (lambda m, y, s: (y.float() * s * m.s, y),
                          "refused: .* then it has 2 users"),
    "scaled sums are used": (lambda m, y, s: ((t := y.float() * s) * m.s, t),
                             r"^int8 token scale fp32 x int8\[256,256\] no scale -> fp32$"),
}  # fmt: skip


@pytest.mark.parametrize("name", EPILOGUES)
def test_what_follows_the_sums(name: str) -> None:
    function, wanted = EPILOGUES[name]
    r = Random(2)
    more = {
        "one": torch.tensor(0.3), "other": torch.tensor([0.7]), "r": r.normal(M, N, dtype=FP32),
        "sums": r.integers(0, 9, 1, N, dtype=torch.int32),
    }  # fmt: skip
    holds(integers(function, **more), wanted)


def of(function: Callable, **tensors: torch.Tensor) -> Holder:
    r = Random()
    return Holder(function, **{"w": r.float8(N, K), "s": r.scales(1, N, dtype=FP32), **tensors})


def product(a, w, sa, sb, out=BF16):
    return torch._scaled_mm(a, w.t(), scale_a=sa, scale_b=sb, out_dtype=out)


def test_a_weight_that_is_an_argument() -> None:
    module = of(lambda m, x, w: product(*_by_rows(x, w, m.s)))
    r = Random(1)
    holds(module, "refused: the weight must be made of constants; .* is an argument",
          r.normal(M, K), r.float8(N, K))  # fmt: skip


def test_a_scale_that_is_an_argument() -> None:
    module = of(lambda m, x, s: product(*_by_rows(x, m.w, s)))
    r = Random(1)
    holds(module, "refused: the weight's scale must be made of constants; .* is an argument",
          r.normal(M, K), r.scales(1, N, dtype=FP32))  # fmt: skip


def test_a_bias_that_is_an_argument() -> None:
    def function(m, x, b):
        q, w, s, t = _by_rows(x, m.w, m.s)
        return torch._scaled_mm(q, w.t(), scale_a=s, scale_b=t, bias=b, out_dtype=BF16)

    r = Random(1)
    holds(of(function), "refused: the bias must be made of constants; .* is an argument",
          r.normal(M, K), r.normal(N))  # fmt: skip


def test_a_product_of_two_constants() -> None:
    r = Random(1)
    sa = r.scales(N, 1, dtype=FP32)
    module = of(lambda m, x: x @ product(m.w, m.w, m.sa, m.s), sa=sa)
    holds(module, "refused: x must vary from call to call")


def test_codes_as_an_argument() -> None:
    r = Random(1)
    holds(of(lambda m, q, s: product(q, m.w, s, m.s)), ROWS,
          r.float8(M, K), r.scales(M, 1, dtype=FP32))  # fmt: skip


def test_a_weight_that_is_used_elsewhere() -> None:
    """Its codes stay where they are, so nobody else minds."""
    holds(of(lambda m, x: product(*_by_rows(x, m.w, m.s)) + m.w.float().sum()), ROWS)


def test_fnuz_codes() -> None:
    dtype = torch.float8_e4m3fnuz
    module = of(lambda m, q, s: product(q, m.w, s, m.s), w=Random().float8(N, K, dtype=dtype))
    r = Random(1)
    holds(module, "refused: codes of x must be .*, int8; they are float8_e4m3fnuz",
          r.float8(M, K, dtype=dtype), r.scales(M, 1, dtype=FP32))  # fmt: skip


def test_scales_that_are_exponents_in_an_order_of_their_own() -> None:
    """MXFP8: one for each 32 elements, in tiles of 128 x 4."""
    exponents = torch.full((2 * 128 * 8,), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    module = of(lambda m, q, s: product(q, m.w, s, m.s), s=exponents)
    holds(module, "refused: scales must be fp32, as they are; float8_e8m0fnu.*swizzled",
          Random(1).float8(M, K), exponents[: 128 * 8])  # fmt: skip


def _by_rows(x, w, s):
    q, sx = codes(x)
    return q, w, sx, s


def second(recipes: tuple, swizzles=((), ()), dims=(), fast=False, pad=0) -> Callable:
    """_scaled_mm_v2, as torch.nn.functional.scaled_mm calls it."""

    def function(m, q, s):
        return aten._scaled_mm_v2.default(
            q, m.w.t(), [s], recipes[0], swizzles[0], [m.t], recipes[1], swizzles[1], None, BF16,
            list(dims), fast,
        )  # fmt: skip

    return function


V2: dict[str, tuple[Callable, tuple, tuple, str]] = {
    "tensor": (second(([0], [0])), (1,), (1,), "tensor scale fp32 x .* tensor scale fp32 -> bf16$"),
    "row": (second(([1], [1])), (M, 1), (1, N), "token scale fp32 x .* channel scale fp32"),
    "row, fast": (second(([1], [1]), fast=True), (M, 1), (N, 1), "channel .* fast sums$"),
    "1x128": (second(([4], [4])), (2, M), (2, N), "group-128 scale fp32 x .* group-128 scale"),
    "128x128": (second(([4], [5])), (2, M), (2, 4), "group-128 .* block-128x128 scale fp32"),
    "128x128 of x": (second(([5], [4])), (1, 4), (2, N), r"refused: .* they are \[5\] and \[4\]"),
    "dimensions": (second(([1], [1]), dims=(1, 0)), (M, 1), (1, N),
                   r"refused: K must be the inner axes; contraction_dim is \[1, 0\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", V2)
def test_recipes(name: str) -> None:
    function, sa, sb, wanted = V2[name]
    r = Random(1)
    s, t = r.scales(*sa, dtype=FP32), r.scales(*sb, dtype=FP32)
    if "x128" in name:
        s, t = s.t(), t.t()
    holds(of(function, t=t), wanted, r.float8(128 if name.endswith("of x") else M, K), s)


def test_swizzled_recipes() -> None:
    exponents = torch.full((2 * 128 * 8,), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    function = second(([3], [3]), swizzles=([1], [1]))
    holds(of(function, t=exponents), r"refused: scales must be in order; they are swizzled",
          Random(1).float8(M, K), exponents[: 128 * 8])  # fmt: skip


def test_int4_that_is_unpacked_for_int_mm() -> None:
    """Codes that are stored in fewer bits are packed in as many, where all are in range."""

    def function(m, x):
        q, s = codes(x, torch.int8)
        w = torch.stack((m.w << 4 >> 4, m.w >> 4), -1).flatten(1)
        return (torch._int_mm(q, w.t()).float() * s * m.s).to(BF16)

    packed = Random().integers(-128, 128, N, K // 2, dtype=torch.int8)
    holds(of(function, w=packed), r"int8 token scale fp32 x int4\[256,256\] channel scale fp32")


def test_a_weight_that_another_product_makes() -> None:
    def function(m, x):
        return product(*_by_rows(x, linear(m.e, m.e).to(E4M3), m.s))

    holds(of(function, e=Random().normal(N, K)),
          "refused: the weight must be stored; mm is computed into it")  # fmt: skip


def test_a_weight_that_is_quantised_in_every_call() -> None:
    """Its codes are as constant as it is."""

    def function(m, x):
        return product(*_by_rows(x, (m.e / m.s.t()).to(E4M3), m.s))

    holds(of(function, e=Random().normal(N, K, dtype=FP32)), ROWS)


# Products of two dequantised operands; `q`, `s` are x's codes and scales by rows, `w` the weight.


def weight(m: Holder) -> torch.Tensor:
    return m.w.float() * m.s.t()


PAIR = r"^float8_e4m3fn token scale fp32 x float8_e4m3fn\[256,256\] channel scale fp32 -> "
OPERANDS: dict[str, tuple[Callable, str]] = {
    "by rows": (lambda m, q, s: linear(q.float() * s, weight(m)), PAIR + "fp32$"),
    "with a bias": (lambda m, q, s: linear(q.float() * s, weight(m), m.b), PAIR + r"fp32 \+bias$"),
    "rounded last": (lambda m, q, s: linear(q.float() * s, weight(m)).to(BF16), PAIR + "bf16$"),
    "zeros subtracted": (
        lambda m, q, s: linear((q.float() - torch.zeros_like(s)) * s, weight(m)), PAIR + "fp32$"),
    "scales after": (lambda m, q, s: linear(q.float(), m.w.float()) * s * m.s, PAIR + "fp32$"),
    "a scale of x after": (lambda m, q, s: linear(q.float(), weight(m)) * s, PAIR + "fp32$"),
    "a scale of the weight after": (
        lambda m, q, s: linear(q.float() * s, m.w.float()) * m.s, PAIR + "fp32$"),
    "one scale": (lambda m, q, s: linear(q.float() * s.amax(), weight(m)),
                  "^float8_e4m3fn tensor scale fp32 x"),
    "a view on the way": (
        lambda m, q, s: linear((q.view(4, 4, K).float() * s.view(4, 4, 1)), weight(m)),
        PAIR + "fp32$"),
    "groups": (lambda m, q, s: linear(
        (q.float().unflatten(1, (4, 64)) * s.expand(M, 4).unsqueeze(-1)).flatten(1), weight(m)),
        "^float8_e4m3fn group-64 scale fp32 x"),
    "groups of a flat view": (lambda m, q, s: linear(
        (q.float().view(-1, 64) * s.expand(M, 4).reshape(-1, 1)).view(M, K), weight(m)),
        "^float8_e4m3fn group-64 scale fp32 x"),
    "int8 for the weight": (lambda m, q, s: linear(q.float() * s, m.i.float() * m.s.t()),
                            r"x int8\[256,256\] channel scale"),
    "a zero point": (lambda m, q, s: linear((q.float() - s) * s, weight(m)),
                     r"^refused: x must have no zero point; float32\[16, 1\] is subtracted"),
    "a zero point that is stored": (
        lambda m, q, s: linear((q.float() - m.zero) * s, weight(m)),
        r"^refused: x must have no zero point; float32\[1\] is subtracted"),
    "scaled twice": (lambda m, q, s: linear(q.float() * s * s, weight(m)),
                     "^refused: x must be scaled once"),
    "a scale for each column": (lambda m, q, s: linear(q.float() * m.s, weight(m)),
                                "^refused: x must have a scale for each row, group or in all"),
    "weight scaled twice": (
        lambda m, q, s: linear(q.float() * s, weight(m)) * m.s,
        "^refused: the weight must be scaled once; it has a channel scale, and its product one"),
    "a weight with a zero": (
        lambda m, q, s: linear(q.float() * s, (m.i.float() - m.z.float()) * m.s.t()),
        "^refused: the weight must be integers from -128 to 127 or float8 codes, times"),
    "alpha": (lambda m, q, s: torch.addmm(m.b, q.float() * s, weight(m).t(), alpha=2),
              "^refused: aten.addmm.default must have beta = 1 and alpha = 1"),
    "a weight that is used": (
        lambda m, q, s: linear(q.float() * s, (w := weight(m))) + w.sum(),
        "^refused: the dequantised weight must feed products alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_are_dequantised(name: str) -> None:
    function, wanted = OPERANDS[name]
    r = Random()
    module = of(
        function, b=r.normal(N, dtype=FP32), zero=torch.zeros(1),
        i=r.integers(-128, 128, N, K, dtype=torch.int8),
        z=r.integers(-9, 9, N, 1, dtype=torch.int8),
    )  # fmt: skip
    holds(module, wanted, r.float8(M, K), r.scales(M, 1, dtype=FP32))
