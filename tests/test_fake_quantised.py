"""Operands that are quantised and dequantised in floats: graphs, results, near misses."""

import functools
import math
import re
from collections.abc import Callable

import pytest
import torch
from fakes import (
    GRANULARITIES,
    SPELLINGS,
    WEIGHTS,
    K,
    by_group,
    by_token,
    divided,
    floored,
    int4_groups,
    int8_rows,
    layer,
    quantised,
    trained,
    widened,
)
from goldens import Golden, outcome
from models import BF16, FP16, FP32, Holder, Random
from quantisers import provided as quantises
from scaled import provided
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear

import qinductor
from qinductor.patterns.spelled import spell_out
from qinductor.testing import OUTPUTS, product_oracle, rewritten

M = 96  # rows of which a product has 4096 outputs and more
EXACT = {"emulate_precision_casts": True}  # codes are eager's
BY_NAME = {"patterns": {"scaled_matmul_requantised": "on"}, "inductor": EXACT}


@pytest.fixture(autouse=True)
def no_gradients():
    qinductor.load()  # all providers, before a test puts others in their place
    with torch.no_grad():
        yield


def rows(m: int, dtype: torch.dtype = FP32, seed: int = 1) -> torch.Tensor:
    return Random(seed).normal(m, K, dtype=dtype)


def agree(module: Holder, run: Callable, x: torch.Tensor) -> None:
    """The compiled result is as near to the product of the rounded operands as eager's."""
    ours, eager = run(x), module(x)
    assert (ours.shape, ours.dtype, ours.stride()) == (eager.shape, eager.dtype, eager.stride())
    if ours.numel() < OUTPUTS:
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.02)
    else:
        product_oracle(ours, eager, *module.operands(x))


def near(module: Holder, run: Callable, x: torch.Tensor) -> None:
    """As `agree`, where the graph rounds its operands and we do not."""
    ours, eager = run(x), module(x)
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    torch.testing.assert_close(ours, eager, rtol=0.03, atol=float(eager.abs().max()) * 0.01)


def lowered() -> list[tuple[str, str]]:
    """(pattern, contract) of the sites that were lowered last."""
    return [(s.pattern, s.contract) for s in qinductor.last_report().sites if s.lowered]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_activations_of_fp32(granularity: str, dynamic: bool) -> None:
    module = layer(GRANULARITIES[granularity])
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT}, dynamic=None)
    for m in (M, 5, 1):
        x = rows(m)
        if dynamic and m > 1:
            torch._dynamo.mark_dynamic(x, 0)
        agree(module, run, x)
        ((pattern, contract),) = lowered()
        size = "group-32" if granularity == "group" else granularity
        size = "tensor" if size == "token" and m == 1 else size
        assert pattern == "scaled_matmul", contract
        assert contract.startswith(f"int8 {size} scale fp32 x int8[48,128] channel"), contract


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_activations_of_16_bits_by_name(granularity: str, dtype: torch.dtype) -> None:
    module = layer(GRANULARITIES[granularity], dtype)
    run = torch.compile(module, backend="qinductor", options=BY_NAME)
    for m in (M, 5, 1):
        near(module, run, rows(m, dtype))
        ((pattern, contract),) = lowered()
        assert pattern == "scaled_matmul_requantised" and contract.startswith("int8 "), contract


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    module = layer(lambda x: by_token(x, SPELLINGS[spelling]))
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    for m in (M, 1):
        agree(module, run, rows(m))
        ((pattern, contract),) = lowered()
        assert (pattern, contract[:5]) == ("scaled_matmul", "int8 "), contract


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_quantisers_of_spellings(spelling: str) -> None:
    """With a product that takes the codes each is one operator, unless it does not round; integers
    of NaN are another number on every machine."""
    with provided(), quantises():
        module = layer(lambda x: by_token(x, SPELLINGS[spelling]))
        report = rewritten(lambda: module, rows(8)).report
    first, second = report.sites
    assert (first.pattern, first.lowered, second.pattern) == ("scaled_matmul", True, "quantize")
    if spelling in ("floored", "raised", "integers"):
        assert re.search("no codes of the family are the region's", second.reason)
    elif spelling == "divided":
        assert re.search("no scale of the family is the region's", second.reason)
    else:
        assert second.lowered, second.reason
        assert second.contract == "fp32 [128] -> int8 dynamic token scale fp32"


@pytest.mark.parametrize("shape", [(2, 5), (17,), (1,)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_both_operators_compiled(granularity: str, shape: tuple[int, ...]) -> None:
    """The product takes views of scales that the quantiser's operator gives."""
    module, x = layer(GRANULARITIES[granularity]), rows(M)[: math.prod(shape)].view(*shape, K)
    with quantises():
        run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)
    assert [pattern for pattern, _ in lowered()] == ["scaled_matmul", "quantize"]


@pytest.mark.parametrize("steps", [1, 2])
def test_scales_of_whole_octaves_alone_are_powers_of_two(steps: int) -> None:
    """Where both sides' are, a product in bf16 rounds nothing before it is taken."""

    def octaves(x: torch.Tensor) -> torch.Tensor:
        s = (x.float().abs().amax().clamp(min=1e-4) / 127).log2()
        s = torch.exp2(torch.ceil(s * steps) / steps).to(x.dtype)
        return (x / s).round().clamp(-128, 127) * s

    module = layer(octaves, BF16)
    module.s = torch.exp2(Random(3).integers(-8, -3, *module.s.shape, dtype=torch.int8).float()).to(
        BF16
    )
    first = rewritten(lambda: module, rows(M, BF16)).report.sites[0]
    assert (first.pattern, first.lowered) == ("scaled_matmul", steps == 1), first.reason
    assert steps == 1 or "the graph multiplies dequantised operands" in str(first.reason)


def site(fake: Callable, *more: torch.Tensor, options: dict | None = None) -> qinductor.Site:
    """The first site of a product of rows that are fake quantised."""
    with provided():
        return rewritten(lambda: layer(fake), rows(8), options=options).report.sites[0]


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 127


def static(x: torch.Tensor) -> torch.Tensor:
    return quantised(x, torch.full((1,), 0.02))


def without_floor(x: torch.Tensor) -> torch.Tensor:
    return quantised(x, x.abs().amax(-1, keepdim=True) / 127)


def where_there_is_some(x: torch.Tensor) -> torch.Tensor:
    amax = x.abs().amax(-1, keepdim=True)
    return quantised(x, torch.where(amax > 0, amax / 127, 1.0))


def bounded(x: torch.Tensor) -> torch.Tensor:
    """A scale that an infinity does not reach."""
    return quantised(x, x.abs().amax(-1, keepdim=True).clamp(1e-4, 1e4) / 127)


def without_clamp(x: torch.Tensor) -> torch.Tensor:
    s = tokens(x)
    return (x / s).round() * s


def beyond(x: torch.Tensor) -> torch.Tensor:
    s = tokens(x)
    return (x / s).round().clamp(-200, 200) * s


def unsigned(x: torch.Tensor) -> torch.Tensor:
    s = tokens(x)
    return (x / s).round().clamp(0, 255) * s


def clamped_one_side(x: torch.Tensor) -> torch.Tensor:
    s = tokens(x)
    return (x / s).round().clamp(max=127) * s


def halves(x: torch.Tensor) -> torch.Tensor:
    """Clamped to what is no whole number."""
    s = tokens(x)
    return (x / s).round().clamp(-127.5, 127.5) * s


def not_rounded(x: torch.Tensor) -> torch.Tensor:
    s = tokens(x)
    return (x / s).clamp(-128, 127) * s


def powers(x: torch.Tensor) -> torch.Tensor:
    """Rounded to powers of two."""
    s = tokens(x)
    return torch.exp2((x / s).abs().clamp(1, 127).log2().round()) * s


def shifted(x: torch.Tensor) -> torch.Tensor:
    """With a zero point that varies."""
    s = tokens(x)
    zero = x.mean(-1, keepdim=True).round()
    return ((x / s).round().clamp(-128, 127) - zero) * s


def asymmetric(x: torch.Tensor) -> torch.Tensor:
    """As QAT does it, the zero point an integer."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    s = ((high - low) / 255).clamp(min=1e-4)
    zero = (-128 - (low / s).round()).clamp(-128, 127).to(torch.int32)
    return (((x / s).round() + zero).clamp(-128, 127) - zero.to(x.dtype)) * s


@pytest.mark.parametrize("fake", [shifted, asymmetric], ids=lambda f: f.__name__)
def test_zero_points_of_codes_in_floats(fake: Callable) -> None:
    module = layer(fake)
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    for m in (M, 5, 1):
        x = rows(m)
        agree(module, run, x)
        ((pattern, contract),) = lowered()
        assert pattern == "scaled_matmul" and " zero " in contract, contract
        x[0, 3] = torch.nan
        assert run(x)[0].isnan().all() and module(x)[0].isnan().all()
        torch.testing.assert_close(run(x)[1:], module(x)[1:])


LOST = "int8 codes would lose that; the pattern scaled_matmul_requantised lowers it all the same"
REFUSED: dict[str, tuple[Callable, str]] = {
    f.__name__: (f, reason)
    for f, reason in (
        (static, r"where x holds -?(nan|inf) .* their scale is 0.02: " + LOST),
        (without_floor, r"where x holds 0 beside a largest 0 they are NaN, and .* 0: " + LOST),
        (where_there_is_some, r"where x holds nan .* they are NaN, and their scale is 1: " + LOST),
        (without_clamp, r"codes of x must be from -128 to 127; round_1 .* from -inf to inf"),
        (beyond, r"codes of x must be from -128 to 127; clamp_max .* from -200 to 200"),
        (unsigned, r"codes of x must be from -128 to 127; clamp_max .* from 0 to 255"),
        (clamped_one_side, r"codes of x must be .*; clamp_max .* from -inf to 127"),
    )
}


@pytest.mark.parametrize("name", REFUSED)
def test_near_misses(name: str) -> None:
    fake, reason = REFUSED[name]
    first = site(fake)
    assert first.pattern == "scaled_matmul" and not first.lowered
    assert re.search(reason, first.reason), first.reason


@pytest.mark.parametrize("fake", [halves, not_rounded, powers], ids=lambda f: f.__name__)
def test_what_is_no_code(fake: Callable) -> None:
    assert site(fake).pattern == "dequant_matmul"


@pytest.mark.parametrize("fake", [static, without_floor, where_there_is_some, bounded])
def test_what_loses_nan_by_name(fake: Callable) -> None:
    module = layer(fake)
    run = torch.compile(module, backend="qinductor", options=BY_NAME)
    for m in (M, 1):
        agree(module, run, rows(m))
        ((pattern, _),) = lowered()
        assert pattern == "scaled_matmul_requantised"


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nan_and_infinities_stay(granularity: str) -> None:
    module = layer(GRANULARITIES[granularity])
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    for value in (float("nan"), float("inf"), -float("inf")):
        x = rows(16)
        x[3, 5], x[7] = value, value
        ours, eager = run(x), module(x)
        assert torch.equal(ours.isfinite(), eager.isfinite())
        assert not ours[[3, 7]].isfinite().any()
        finite = eager.isfinite()
        torch.testing.assert_close(ours[finite], eager[finite], rtol=1e-4, atol=1e-3)
    assert lowered()[0][0] == "scaled_matmul"


# Weights.


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, dtype: torch.dtype) -> None:
    """Of floats that change: each state is packed again."""
    module = trained(WEIGHTS[name], dtype)
    run = torch.compile(module, backend="qinductor")
    for m in (M, 5, 1):
        agree(module, run, rows(m, dtype))
        ((pattern, contract),) = lowered()
        assert pattern == "dequant_matmul" and name.partition(",")[0] in contract, contract
    before = run(rows(M, dtype))
    module.w.mul_(1.5).add_(0.01)
    agree(module, run, rows(M, dtype))
    assert not torch.equal(run(rows(M, dtype)), before)
    module.w = trained(WEIGHTS[name], dtype, seed=3).w
    agree(module, run, rows(M, dtype))
    assert {report.variants for report in qinductor.reports()} == {1}


CODES = {  # of a weight, in a product of codes
    "int4[48,128] group-32": "int4[48,128] group-32",
    "int8[48,128] channel": "int8[48,128] channel",
    "int2[48,128] tensor": "int4[48,128] tensor",
    "int2[48,128] tensor, divided": "int4[48,128] tensor",
    "float8_e4m3fn[48,128] channel": "float8_e4m3fn[48,128] channel",
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("spelling", ["quantised", "divided"])
def test_both_sides(name: str, spelling: str) -> None:
    module = trained(WEIGHTS[name], FP32, activation=lambda x: by_token(x, SPELLINGS[spelling]))
    run = torch.compile(module, backend="qinductor", options={"inductor": EXACT})
    for m in (M, 5, 1):
        agree(module, run, rows(m))
        ((pattern, contract),) = lowered()
        words = f" x {CODES[name]} scale fp32 -> fp32"
        assert pattern == "scaled_matmul" and words in contract, contract
    before = run(rows(M))
    module.w.mul_(1.5).add_(0.01)
    agree(module, run, rows(M))
    assert not torch.equal(run(rows(M)), before)


def test_both_sides_of_16_bits_by_name() -> None:
    module = trained(int4_groups, BF16, activation=by_token)
    run = torch.compile(module, backend="qinductor", options=BY_NAME)
    for m in (M, 1):
        near(module, run, rows(m, BF16))
        ((pattern, contract),) = lowered()
        assert pattern == "scaled_matmul_requantised" and "int4[48,128] group-32" in contract


def test_by_default_the_weight_alone() -> None:
    """Operands of 16 bits are rounded: the distances of both products are in the reason."""
    module = trained(int4_groups, BF16, activation=by_token)
    report = rewritten(lambda: module, rows(8, BF16)).report
    first, second = report.sites
    assert (first.pattern, first.lowered) == ("scaled_matmul", False)
    assert re.search("rms error .* scaled_matmul_requantised", first.reason)
    assert (second.pattern, second.lowered) == ("dequant_matmul", True)


def test_what_is_refused_leaves_nothing() -> None:
    """The reciprocal that the product would take."""
    module = trained(int4_groups, BF16, activation=lambda x: by_token(x, divided))
    found = rewritten(
        lambda: module, rows(8, BF16), options={"patterns": {"dequant_matmul": "off"}}
    )
    (site,) = found.report.sites
    assert re.search("rms error .* scaled_matmul_requantised", site.reason)
    assert found.after == found.before


def test_a_weight_that_fits_fewer_bits() -> None:
    """The bounds of the graph say of how many bits codes are, not the codes of one weight."""
    r = Random()
    module = Holder(
        lambda m, x: linear(x, (m.w / m.s).round().clamp(-8, 7) * m.s),
        w=r.normal(48, K).clamp(-1, 1), s=torch.full((48, 1), 1.0, dtype=BF16),
    )  # fmt: skip
    (site,) = rewritten(lambda: module, rows(8, BF16)).report.sites
    assert site.lowered and "int4[48,128]" in site.contract, site


def test_zeros_of_both_signs() -> None:
    """Codes in floats may be -0.0, which the packed ones are not."""
    module = trained(int8_rows, FP32)
    module.w[::2] = -1e-9
    module.w[:, 0] = 1.0
    w = int8_rows(module.w)
    assert (w.signbit() & (w == 0)).any()
    run = torch.compile(module, backend="qinductor")
    agree(module, run, rows(M))
    assert len(lowered()) == 1


def wide(w: torch.Tensor) -> torch.Tensor:
    return (w / 0.001).round().clamp(-200, 200) * 0.001


def unbounded(w: torch.Tensor) -> torch.Tensor:
    return (w / 0.01).round() * 0.01


def by_element(w: torch.Tensor) -> torch.Tensor:
    """Scaled by what is no scale of a block."""
    return (w / 0.01).round().clamp(-8, 7) * (w.abs() + 0.01)


@pytest.mark.parametrize("fake", [wide, unbounded], ids=lambda f: f.__name__)
def test_weights_without_codes(fake: Callable) -> None:
    """Whole numbers of more than 8 bits are no codes, and the product is none of ours."""
    assert rewritten(lambda: trained(fake), rows(8, BF16)).report.sites == []


def test_a_scale_of_elements() -> None:
    (site,) = rewritten(lambda: trained(by_element), rows(8, BF16)).report.sites
    assert not site.lowered
    assert "has one entry for each element, so it is no scale of a block" in site.reason


def test_a_weight_that_is_read_elsewhere() -> None:
    def function(m: Holder, x: torch.Tensor) -> torch.Tensor:
        w = int4_groups(m.w)
        return linear(x, w) + w.sum()

    module = Holder(function, w=Random().normal(48, K))
    (site,) = rewritten(lambda: module, rows(8, BF16)).report.sites
    assert re.search("the dequantised weight must feed products alone", site.reason)


def test_a_quantised_weight_that_is_a_result() -> None:
    """As by a graph break between it and its product."""
    module = Holder(lambda m, x: (int4_groups(m.w), x + 1), w=Random().normal(48, K))
    (site,) = rewritten(lambda: module, rows(8, BF16)).report.sites
    assert re.search("a graph break in between makes", site.reason)


def test_floats_that_are_freed() -> None:
    """The packed form makes the weight for another graph, and for the next M."""
    module = trained(int4_groups)
    x = rows(M, BF16)
    eager, w = module(x), int4_groups(module.w)
    run = torch.compile(module, backend="qinductor", options={"weights": "replace"})
    product_oracle(run(x), eager, x, w)
    assert qinductor.last_report().freed_bytes == module.w.numel() * 2
    x = rows(5, BF16)
    torch.testing.assert_close(run(x), linear(x, w), rtol=0.02, atol=0.02)
    assert len(lowered()) == 1


def test_products_of_one_activation() -> None:
    """It is quantised once."""

    def function(m: Holder, x: torch.Tensor) -> torch.Tensor:
        x = by_token(x)
        return torch.cat([linear(x, int4_groups(w)) for w in (m.q, m.k, m.v)], -1)

    r = Random()
    module = Holder(function, **{n: r.normal(48, K, dtype=FP32) for n in "qkv"})
    with provided(), quantises():
        found = rewritten(lambda: module, rows(8), target="sm_90")
    assert found.report.lowered == len(found.report.sites) > 3, found.report
    assert found.after.count("qinductor.quantize.default") == 1
    assert "aten.round" not in found.after


# torch's own operators.


def of_numbers(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.02, 0, -128, 127)


def of_numbers_with_a_zero(m: Holder, x: torch.Tensor) -> torch.Tensor:
    """Codes without their zero are of 8 bits, too."""
    return torch.fake_quantize_per_tensor_affine(x, 0.02, 10, -100, 127)


def of_channels(m: Holder, low: int = -128, high: int = 127) -> torch.Tensor:
    return torch.fake_quantize_per_channel_affine(m.w, m.s, m.z, 0, low, high)


def prepared(activation: Callable, weight: Callable, zero: int = 0) -> Holder:
    r = Random()
    module = Holder(
        lambda m, x: linear(activation(m, x), weight(m)),
        w=r.normal(48, K, dtype=FP32, times=0.5), s=r.scales(48, dtype=FP32),
        z=torch.full((48,), zero, dtype=torch.int32), one=torch.tensor([0.02]),
    )  # fmt: skip
    module.operands = lambda x: (activation(module, x), weight(module))
    return module


@pytest.mark.parametrize("activation", [of_numbers, of_numbers_with_a_zero])
def test_torchs_operators(activation: Callable) -> None:
    """A NaN is a number to them, so that int8 codes lose nothing."""
    module = prepared(activation, of_channels)
    run = torch.compile(module, backend="qinductor")
    for m in (M, 5, 1):
        x = rows(m)
        agree(module, run, x)
        ((pattern, contract),) = lowered()
        assert pattern == "scaled_matmul", contract
        assert contract == "int8 tensor scale fp32 x int8[48,128] channel scale fp32 -> fp32"
    x = rows(16)
    x[3, 5], x[7], x[9] = torch.nan, torch.inf, -1e30
    torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("zero", [0, 3, -5])
def test_torchs_operators_of_weights(zero: int) -> None:
    module = prepared(lambda m, x: x, functools.partial(of_channels, low=-8, high=7), zero)
    run = torch.compile(module, backend="qinductor")
    for m in (M, 5, 1):
        agree(module, run, rows(m))
        ((pattern, contract),) = lowered()
        assert pattern == "dequant_matmul" and "int4[48,128] channel scale fp32" in contract


def test_a_zero_point_that_is_a_tensor() -> None:
    module = prepared(lambda m, x: torch.fake_quantize_per_tensor_affine(
        x, m.one, m.z.narrow(0, 0, 1), -128, 127), of_channels)  # fmt: skip
    agree(module, torch.compile(module, backend="qinductor"), rows(M))
    ((pattern, contract),) = lowered()
    assert pattern == "scaled_matmul" and "zero int32" in contract, contract


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("how", ["numbers", "tensors", "channels"])
def test_torchs_operators_are_spelled_out_bit_for_bit(how: str, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if how == "numbers":
            y = torch.fake_quantize_per_tensor_affine(x, 0.0213, 7, -128, 127)
        elif how == "tensors":
            y = torch.fake_quantize_per_tensor_affine(x, s[:1], z[:1], -128, 127)
        else:
            y = torch.fake_quantize_per_channel_affine(x, s, z, 0, -8, 7)
        return y @ x.t(), y

    r = Random()
    x = (r.normal(48, K, dtype=FP32) * torch.logspace(-6, 6, 48)[:, None]).to(dtype)
    x[5, :8] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 6e4, -6e4, 1e-30])
    given = x, r.scales(48, dtype=FP32), r.integers(-8, 8, 48, dtype=torch.int32)
    try:
        _, wanted = function(*given)
    except RuntimeError as error:
        pytest.skip(f"eager does not take {dtype}: {error}")
    made = make_fx(function, tracing_mode="fake")(*given)
    made.graph.eliminate_dead_code()
    spell_out(made.graph)
    made.graph.lint()
    made.recompile()
    assert "fake_quantize" not in made.code and "round" in made.code
    _, found = made(*given)
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_a_mask_that_is_read_keeps_the_operator() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y, mask = torch.ops.aten.fake_quantize_per_tensor_affine_cachemask(x, 0.02, 0, -128, 127)
        return (y @ x.t()) * mask.sum()

    made = make_fx(function, tracing_mode="fake")(rows(8))
    before = str(made.graph)
    spell_out(made.graph)
    assert str(made.graph) == before


def test_no_product_keeps_the_operator() -> None:
    module = Holder(lambda m, x: of_numbers(m, x) + 1)
    found = rewritten(lambda: module, rows(8))
    assert found.after == found.before and "fake_quantize" in found.after


class TestGolden(Golden):
    """A fake quantiser and its product become two operators."""

    def test_tokens(self) -> None:
        with provided(), quantises():
            found = rewritten(
                lambda: layer(lambda x: by_token(x, widened), BF16), rows(8, BF16),
                target="sm_90", dynamic=True, options={"patterns": BY_NAME["patterns"]},
            )  # fmt: skip
        self.expects(f"{found.before}\n{outcome(found.report)}\n{found.after}\n")("""\
%0: s0 = placeholder
%1: bfloat16[s0, 128]@cuda = placeholder
%2: int8[48, 128]@cuda = placeholder
%3: bfloat16[48, 1]@cuda = placeholder
%4: bfloat16[s0, 128]@cuda = aten.abs.default(%1)
%5: bfloat16[s0, 1]@cuda = aten.amax.default(%4, [-1], True)
%6: float32[s0, 1]@cuda = prims.convert_element_type.default(%5, torch.float32)
%7: float32[s0, 1]@cuda = aten.clamp_min.default(%6, 0.0001)
%8: bfloat16[s0, 1]@cuda = prims.convert_element_type.default(%7, torch.bfloat16)
%9: bfloat16[s0, 1]@cuda = aten.div.Tensor(%8, 127)
%10: float32[s0, 128]@cuda = prims.convert_element_type.default(%1, torch.float32)
%11: float32[s0, 1]@cuda = prims.convert_element_type.default(%9, torch.float32)
%12: float32[s0, 128]@cuda = aten.div.Tensor(%10, %11)
%13: float32[s0, 128]@cuda = aten.round.default(%12)
%14: float32[s0, 128]@cuda = aten.clamp_min.default(%13, -128)
%15: float32[s0, 128]@cuda = aten.clamp_max.default(%14, 127)
%16: bfloat16[s0, 128]@cuda = prims.convert_element_type.default(%15, torch.bfloat16)
%17: float32[s0, 128]@cuda = prims.convert_element_type.default(%16, torch.float32)
%18: float32[s0, 1]@cuda = prims.convert_element_type.default(%9, torch.float32)
%19: float32[s0, 128]@cuda = aten.mul.Tensor(%17, %18)
%20: bfloat16[s0, 128]@cuda = prims.convert_element_type.default(%19, torch.bfloat16)
%21: bfloat16[48, 128]@cuda = prims.convert_element_type.default(%2, torch.bfloat16)
%22: bfloat16[48, 128]@cuda = aten.mul.Tensor(%21, %3)
%23: bfloat16[128, 48]@cuda = aten.permute.default(%22, [1, 0])
%24: bfloat16[s0, 48]@cuda = aten.mm.default(%20, %23)
output [%24]
---- 2 of 2 lowered
%0: s0 = placeholder
%1: bfloat16[s0, 128]@cuda = placeholder
%2: int8[48, 128]@cuda = placeholder
%3: bfloat16[48, 1]@cuda = placeholder
%4: int8[48, 128]@cuda = placeholder packed_codes
%5: bfloat16[48, 1]@cuda = placeholder packed_scale
%6: list = qinductor.quantize.default([%1])
    k=128 x=bfloat16 source.y=bfloat16 codes=int8 group=128 scale=float32 qmax=127.0
      compute=bfloat16 inner=float32 low=-128.0 high=127.0 least=0.0001
    test.anywhere
%7: int8[s0, 128]@cuda = getitem(%6, 0)
%8: float32[s0, 1]@cuda = getitem(%6, 1)
%9: bfloat16[s0, 48]@cuda = qinductor.scaled_matmul.default(%7, %8, [%4, %5])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 a=int8 group=128 scale=float32 out=bfloat16
    test
output [%9]
""")

    def test_both_sides(self) -> None:
        """int8 groups of x, int4 groups of a weight that is stored in floats."""
        with provided(), quantises():
            module = trained(int4_groups, FP32, activation=by_group)
            found = rewritten(lambda: module, rows(8), target="sm_90")
        self.expects(f"{found.before}\n{outcome(found.report)}\n{found.after}\n")("""\
%0: float32[8, 128]@cuda = placeholder
%1: float32[48, 128]@cuda = placeholder
%2: float32[8, 4, 32]@cuda = aten.view.default(%0, [8, 4, 32])
%3: float32[8, 4, 32]@cuda = aten.abs.default(%2)
%4: float32[8, 4, 1]@cuda = aten.amax.default(%3, [-1], True)
%5: float32[8, 4, 1]@cuda = aten.clamp_min.default(%4, 0.0001)
%6: float32[8, 4, 1]@cuda = aten.div.Tensor(%5, 127)
%7: float32[8, 4, 32]@cuda = aten.div.Tensor(%2, %6)
%8: float32[8, 4, 32]@cuda = aten.round.default(%7)
%9: float32[8, 4, 32]@cuda = aten.clamp_min.default(%8, -128)
%10: float32[8, 4, 32]@cuda = aten.clamp_max.default(%9, 127)
%11: float32[8, 4, 32]@cuda = aten.mul.Tensor(%10, %6)
%12: float32[8, 128]@cuda = aten.view.default(%11, [8, 128])
%13: float32[48, 4, 32]@cuda = aten.view.default(%1, [48, 4, 32])
%14: float32[48, 4, 32]@cuda = aten.abs.default(%13)
%15: float32[48, 4, 1]@cuda = aten.amax.default(%14, [-1], True)
%16: float32[48, 4, 1]@cuda = aten.div.Tensor(%15, 7.5)
%17: float32[48, 4, 1]@cuda = aten.clamp_min.default(%16, 1e-06)
%18: float32[48, 4, 1]@cuda = aten.reciprocal.default(%17)
%19: float32[48, 4, 1]@cuda = aten.mul.Tensor(%18, 1.0)
%20: float32[48, 4, 32]@cuda = aten.mul.Tensor(%13, %19)
%21: float32[48, 4, 32]@cuda = aten.round.default(%20)
%22: float32[48, 4, 32]@cuda = aten.clamp_min.default(%21, -8)
%23: float32[48, 4, 32]@cuda = aten.clamp_max.default(%22, 7)
%24: float32[48, 4, 32]@cuda = aten.mul.Tensor(%23, %17)
%25: float32[48, 128]@cuda = aten.view.default(%24, [48, 128])
%26: float32[128, 48]@cuda = aten.permute.default(%25, [1, 0])
%27: float32[8, 48]@cuda = aten.mm.default(%12, %26)
output [%27]
---- 2 of 2 lowered
%0: float32[8, 128]@cuda = placeholder
%1: float32[48, 128]@cuda = placeholder
%2: int8[24, 128]@cuda = placeholder packed_halves
%3: float32[48, 4]@cuda = placeholder packed_scale
%4: list = qinductor.quantize.default([%0])
    k=128 x=float32 source.y=float32 codes=int8 group=32 scale=float32 qmax=127.0
      compute=float32 inner=float32 low=-128.0 high=127.0 inverse=True least=0.0001
    test.anywhere
%5: int8[8, 128]@cuda = getitem(%4, 0)
%6: int8[8, 4, 32]@cuda = aten.view.default(%5, [8, 4, 32])
%7: float32[8, 4]@cuda = getitem(%4, 1)
%8: int8[8, 128]@cuda = aten.reshape.default(%6, [-1, 128])
%9: float32[8, 48]@cuda = qinductor.scaled_matmul.default(%8, %7, [%2, %3])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 a=int8 group=32 scale=float32 out=float32
    test
output [%9]
""")

    @pytest.mark.skipif(torch.__version__ < (2, 13), reason="placeholders in another order")
    def test_a_weight_alone(self) -> None:
        module = trained(int4_groups)
        self.graph(lambda: module, rows(8, BF16))("""\
%0: bfloat16[48, 128] = placeholder
%1: bfloat16[8, 128] = placeholder
%2: bfloat16[48, 4, 32] = aten.view.default(%0, [48, 4, 32])
%3: bfloat16[48, 4, 32] = aten.abs.default(%2)
%4: bfloat16[48, 4, 1] = aten.amax.default(%3, [-1], True)
%5: bfloat16[48, 4, 1] = aten.div.Tensor(%4, 7.5)
%6: float32[48, 4, 1] = prims.convert_element_type.default(%5, torch.float32)
%7: float32[48, 4, 1] = aten.clamp_min.default(%6, 1e-06)
%8: bfloat16[48, 4, 1] = prims.convert_element_type.default(%7, torch.bfloat16)
%9: bfloat16[48, 4, 1] = aten.reciprocal.default(%8)
%10: bfloat16[48, 4, 1] = aten.mul.Tensor(%9, 1.0)
%11: bfloat16[48, 4, 32] = aten.mul.Tensor(%2, %10)
%12: bfloat16[48, 4, 32] = aten.round.default(%11)
%13: float32[48, 4, 32] = prims.convert_element_type.default(%12, torch.float32)
%14: float32[48, 4, 32] = aten.clamp_min.default(%13, -8)
%15: float32[48, 4, 32] = aten.clamp_max.default(%14, 7)
%16: bfloat16[48, 4, 32] = prims.convert_element_type.default(%15, torch.bfloat16)
%17: bfloat16[48, 4, 32] = aten.mul.Tensor(%16, %8)
%18: bfloat16[48, 128] = aten.view.default(%17, [48, 128])
%19: bfloat16[128, 48] = aten.permute.default(%18, [1, 0])
%20: bfloat16[8, 48] = aten.mm.default(%1, %19)
output [%20]
---- 1 of 1 lowered
%0: bfloat16[48, 128] = placeholder
%1: bfloat16[8, 128] = placeholder
%2: uint8[48, 64] = placeholder packed_int4pack
%3: bfloat16[4, 48, 2] = placeholder packed_int4pack_scales
%4: bfloat16[8, 48] = qinductor.dequant_matmul.default(%1, [%2, %3])
    weight.codes=int4 weight.n=48 weight.k=128 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False
    aten.int4pack_mm
output [%4]
""")

    def test_the_quantiser_stays_where_it_is_none_of_the_family(self) -> None:
        with provided(), quantises():
            found = rewritten(lambda: layer(lambda x: by_token(x, floored)), rows(8))
        self.expects(f"{outcome(found.report)}\n{found.after}\n")("""\
---- 1 of 2 lowered
no codes of the family are the region's: nearest is x*(1/s) in fp32, clamp -128 127 (3508 of
  8192 differ); for y -1.5550020060926073e-29 that gives 0.0, and the region -1.0
%0: float32[8, 128] = placeholder
%1: int8[48, 128] = placeholder
%2: float32[48, 1] = placeholder
%3: int8[48, 128] = placeholder packed_codes
%4: float32[48, 1] = placeholder packed_scale
%5: float32[8, 128] = aten.abs.default(%0)
%6: float32[8, 1] = aten.amax.default(%5, [-1], True)
%7: float32[8, 1] = aten.clamp_min.default(%6, 0.0001)
%8: float32[8, 1] = aten.div.Tensor(%7, 127)
%9: float32[8, 128] = aten.div.Tensor(%0, %8)
%10: float32[8, 128] = aten.floor.default(%9)
%11: float32[8, 128] = aten.clamp_min.default(%10, -128)
%12: float32[8, 128] = aten.clamp_max.default(%11, 127)
%13: int8[8, 128] = prims.convert_element_type.default(%12, torch.int8)
%14: float32[8, 48] = qinductor.scaled_matmul.default(%13, %8, [%3, %4])
    weight.codes=int8 weight.n=48 weight.k=128 weight.bn=1 weight.bk=128 weight.arithmetic=q*s
      weight.scale=float32 weight.zero=None weight.inner=float32 weight.compute=float32
      weight.dtype=float32 a=int8 group=128 scale=float32 out=float32
    test
output [%14]
""")
