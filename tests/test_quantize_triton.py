"""The Triton family of activation quantisers, interpreted on a CPU: bitwise the specification."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import interpreted
import pytest
import torch
from products import poisoned
from quantised import (
    BY_NUMPY,
    TRITON,
    call,
    declared,
    in_float32,
    numpy_activations,
    plain,
    poison,
    wrong,
)

from qinductor.contracts import parse
from qinductor.errors import QinductorError
from qinductor.kernels import quantize as op
from qinductor.kernels import quantize_cases as cases
from qinductor.kernels import quantize_triton as family
from qinductor.kernels.quantize import QUANTIZE, Quantize, Source
from qinductor.kernels.quantize_cases import BF16, CASES, E4M3, E5M2, FP16, FP32, INT8, UINT8
from qinductor.kernels.quantize_into import quantize_into
from qinductor.op import INFINITE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BY_NAME = {case.name: case for case in CASES}
contract = cases.contract


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with interpreted.device(family), numpy_activations():
        yield


def test_the_cases_are_taken_and_have_names_of_their_own():
    assert {case.name: TRITON.why_not(case.contract) for case in CASES} == dict.fromkeys(BY_NAME)
    assert len(BY_NAME) == len(CASES) >= 75


@pytest.mark.parametrize("name", BY_NAME)
def test_bitwise(name):
    case = BY_NAME[name]
    first = family.candidates(case.contract, case.m)[0]
    many = dataclasses.replace(family.Config.parse(first), rows=64)  # fewer programs to interpret
    for inputs, config in ((case.inputs(), None), (case.hostile(), str(many))):
        before = [tensor.clone() for tensor in inputs]
        with poisoned():
            found = call(case.contract, inputs, config)
        declared(case.contract, inputs, found)
        assert not wrong(case.contract, inputs, found)
        for held, old in zip(inputs, before, strict=True):
            assert torch.equal(held.view(torch.uint8), old.view(torch.uint8)), "an input is changed"


def test_each_field_has_a_case_that_differs_in_it():
    for kind in (Quantize, Source):
        held = [case.contract if kind is Quantize else case.contract.source for case in CASES]
        for field in dataclasses.fields(kind):
            if field.name != "source":
                assert len({getattr(each, field.name) for each in held}) > 1, field.name
    for name, known in (("power", op.POWERS), ("quotient", op.QUOTIENTS), ("layout", op.LAYOUTS)):
        assert {getattr(case.contract, name) for case in CASES} == set(known)
    for name, known in (("gate", op.GATES), ("norm", op.NORMS), ("activation", op.ACTIVATIONS)):
        assert {getattr(case.contract.source, name) for case in CASES} >= set(known)


@pytest.mark.parametrize("name", BY_NUMPY)
def test_the_activations_are_torch_s_but_for_the_last_bits(name):
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([0.0, 88.0, -88.0, 1e-30])])
    ours = in_float32(BY_NUMPY[name])(x)
    theirs = getattr(torch.nn.functional, name.split("_")[0], None)
    want = x.double() * torch.sigmoid(x.double())
    if name.startswith("gelu") and theirs is not None:
        want = theirs(x.double(), approximate="tanh" if name == "gelu_tanh" else "none")
    assert torch.allclose(ours.double(), want, rtol=1e-4, atol=1e-6)


FEW = ("group v2", "ue8m0 silu packed", "token guarded", "tensor dynamic", "add rms packed",
       "asymmetric", "groups of 48", "packed token")  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_every_config_gives_the_same(name):
    case = BY_NAME[name]
    inputs, m = case.inputs(), case.m
    configs = [*TRITON.configs(case.contract, m), *TRITON.configs(case.contract, 4096)]
    assert len(set(configs)) > 2
    for config in dict.fromkeys(configs):
        with poisoned():
            assert not wrong(case.contract, inputs, call(case.contract, inputs, config)), config


@pytest.mark.parametrize("name", ["group v2", "silu token", "product", "add rms", "tensor dynamic"])
def test_inputs_with_other_strides(name):
    case = BY_NAME[name]
    inputs = case.inputs()
    rows = [t for t in inputs if t.dim() == 2]
    rest = inputs[len(rows) :]
    for laid in (
        [torch.cat([t, t[:, :3]], 1)[:, : t.shape[1]] for t in rows],
        [t.t().contiguous().t() for t in rows],
        [t.repeat_interleave(2, 0)[::2] for t in rows],
        [t[:1].expand(case.m, t.shape[1]) for t in rows],
    ):
        assert not laid[0].is_contiguous()
        assert not wrong(case.contract, [*laid, *rest], call(case.contract, [*laid, *rest]))
    for lead in ((1, case.m), (case.m, 1), (1, 1, case.m)):
        given = [*(t.reshape(*lead, -1) for t in rows), *rest]
        found = call(case.contract, given)
        declared(case.contract, given, found)
        assert not wrong(case.contract, given, found)


@pytest.mark.parametrize("name", ["group v2", "tensor static", "tensor dynamic", "ue8m0 packed"])
def test_no_rows(name):
    case = BY_NAME[name]
    inputs = [t[:0] if t.dim() == 2 else t for t in case.inputs()]
    found = call(case.contract, inputs)
    declared(case.contract, inputs, found)
    assert found[0].numel() == 0


# Numbers --------------------------------------------------------------------------------------


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a dtype of 16 bits, in rows of 256."""
    return torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype).reshape(256, 256)


@pytest.mark.parametrize("codes", [E4M3, E5M2, INT8, UINT8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_codes_of_every_number(codes, dtype):
    tile = "r64.c256.w8"
    chosen = contract(256, codes, 0, dtype, source=Source(y=dtype), static=True)
    for scale in (1.0, 0.75, 2.0**-140, 3e38):
        inputs = [every(dtype), torch.tensor([scale])]
        assert not wrong(chosen, inputs, call(chosen, inputs, tile)), scale
    if codes.is_floating_point:
        bare = dataclasses.replace(chosen, low=None, high=None)
        inputs = [every(dtype), torch.tensor([1.0])]
        assert not wrong(bare, inputs, call(bare, inputs, tile))


@pytest.mark.parametrize("codes", [E4M3, E5M2])
def test_codes_beside_every_tie(codes):
    numbers = torch.arange(256).to(torch.uint8).view(codes).float()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = ((numbers[1:].double() + numbers[:-1].double()) / 2).float()
    near = torch.cat([ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    x = torch.nn.functional.pad(near, (0, -len(near) % 64)).reshape(-1, 64)
    chosen, tile = contract(64, codes, 0, FP32, source=Source(y=FP32), static=True), "r64.c64.w4"
    inputs = [x, torch.tensor([1.0])]
    assert not wrong(chosen, inputs, call(chosen, inputs, tile))


@pytest.mark.parametrize("power", [p for p in op.POWERS if p])
def test_powers_of_two_beside_every_power(power):
    """s is amax here: 64 floats on either side of each power, and all small subnormal ones."""
    bits = torch.arange(0, 255)[:, None] * (1 << 23) + torch.arange(-64, 65)
    bits = torch.cat([bits.flatten().clamp_min(0), 1 << torch.arange(23), torch.arange(1, 999)])
    bits = torch.cat([bits, (torch.arange(255) << 23) + 0x3504F3, torch.tensor([0x7F800000])])
    s = torch.nn.functional.pad(bits, (0, -len(bits) % 64)).int().view(FP32).reshape(-1, 64)
    chosen = contract(64, E4M3, 1, FP32, source=Source(y=FP32), qmax=1.0, power=power)
    assert not wrong(chosen, [s], call(chosen, [s], "r64.c64.w8"))


def test_quotients_are_rounded_to_nearest():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 64, generator=g)
    for qmax in (448.0, 127.0, 255.0, 3.0):
        for inverse in (False, True):
            chosen = contract(64, E4M3, 16, FP32, source=Source(y=FP32), qmax=qmax, inverse=inverse)
            assert not wrong(chosen, [x], call(chosen, [x]))


def test_integers_of_nan_are_0():
    x = torch.full((1, 32), math.nan)
    x[:, :16] = 1.0
    for codes in (INT8, UINT8):
        chosen = contract(32, codes, 16, FP32, source=Source(y=FP32))
        found, scale = call(chosen, [x])
        assert found.tolist() == [[int(chosen.qmax)] * 16 + [0] * 16]
        assert scale.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("name", ["rms", "rms token", "add rms", "rms tensor", "rms relu2"])
def test_norms_of_whole_numbers(name):
    """Whose squares have the same sum in any order."""
    case = BY_NAME[name]
    g = torch.Generator().manual_seed(1)
    inputs = [
        t if t.dim() == 1 else (torch.randint(-9, 10, t.shape, generator=g) * 0.25).to(t.dtype)
        for t in case.inputs()
    ]
    assert not wrong(case.contract, inputs, call(case.contract, inputs))


# Into given tensors ---------------------------------------------------------------------------


def stacked(chosen: Quantize, layout: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(inputs [3, 5, ...], poisoned tensors to write into) with a layout of the scale."""
    g = torch.Generator().manual_seed(0)
    wide = 2 * chosen.k if chosen.source.gate else chosen.k
    inputs = [torch.randn(3, 5, wide, generator=g).to(chosen.x)]
    groups = -(-chosen.groups // 4) if chosen.scale is torch.int32 else chosen.groups
    scale = {
        "row": torch.empty(3, 5, groups, dtype=chosen.scale),
        "column": torch.empty(3, groups, 5, dtype=chosen.scale).mT,
        "padded": torch.empty(3, groups, 8, dtype=chosen.scale).mT[:, :5],
    }[layout]
    into = [torch.empty(3, 5, chosen.k, dtype=chosen.codes), scale]
    poison(into)
    return inputs, into


INTO: dict[str, Any] = {
    "group v2": contract(256, **cases.V2),
    "silu ue8m0": contract(256, source=cases.SILU, **cases.UE8M0),
    "silu packed": contract(
        640, source=cases.SILU, scale=torch.int32, layout="column_padded", **cases.UE8M0
    ),
    "int8": contract(256, INT8, truncate=True, source=cases.SILU, **cases.V2),
}


@pytest.mark.parametrize("layout", ["row", "column", "padded"])
@pytest.mark.parametrize("name", INTO)
def test_masked_rows_alone_are_written(name, layout):
    chosen = INTO[name]
    for limits in ([5, 0, 3], [0, 0, 0], [1, 7, 5]):
        masked = torch.tensor(limits, dtype=torch.int32)
        inputs, ours = stacked(chosen, layout)
        _, theirs = stacked(chosen, layout)
        family.launch(chosen, inputs, ours, "r8.c1024.w4", masked)
        quantize_into(chosen, inputs, theirs, masked)  # by the reference
        whole = call(chosen, inputs)
        for made, other, want in zip(ours, theirs, whole, strict=True):
            untouched = torch.empty_like(want)
            poison([untouched])
            row = torch.arange(5)[None, :, None] < masked[:, None, None]
            want = torch.where(row, plain(want), plain(untouched))
            assert torch.equal(plain(made), want) and torch.equal(plain(other), want)


@pytest.mark.parametrize("layout", ["row", "column", "padded"])
@pytest.mark.parametrize("name", INTO)
def test_strides_of_the_scale_are_the_given_ones(name, layout):
    chosen = INTO[name]
    inputs, ours = stacked(chosen, layout)
    family.launch(chosen, inputs, ours)
    assert not wrong(chosen, inputs, ours)
    inputs, theirs = stacked(chosen, layout)
    quantize_into(chosen, inputs, theirs)
    assert not wrong(chosen, inputs, theirs)
    flat = [t.flatten(0, 1) for t in inputs]
    ours = [t.flatten(0, 1) if layout == "row" else t for t in ours]
    if layout == "row":
        poison(ours)
        family.launch(chosen, flat, ours)
        assert not wrong(chosen, flat, ours)


def test_tensors_that_do_not_fit_are_refused():
    chosen = INTO["group v2"]
    inputs, (codes, scale) = stacked(chosen, "row")
    limits = torch.zeros(3, dtype=torch.int32)
    whole = contract(256, group=0)
    for given, into, masked, text in (
        (chosen, [codes], None, "1 tensors to write into; wanted 2"),
        (chosen, [codes[:, :4], scale], None, r"codes is .*\[3, 4, 256\]; wanted .*\[3, 5, 256\]"),
        (chosen, [codes.view(INT8), scale], None, "codes is torch.int8"),
        (chosen, [codes, scale[..., :1]], None, r"scale is .*\[3, 5, 1\]; wanted .*\[3, 5, 2\]"),
        (chosen, [codes, scale.double()], None, "scale is torch.float64"),
        (chosen, [codes.mT.contiguous().mT, scale], None, "codes has strides"),
        (chosen, [codes, scale], limits.long(), "masked_m is torch.int64"),
        (chosen, [codes, scale], limits[:2], r"masked_m is torch.int32\[2\]"),
        (whole, [codes, torch.empty(1)], limits, "dynamic scale of the whole tensor"),
    ):
        with pytest.raises(QinductorError, match=text):
            quantize_into(given, inputs, into, masked)


# The provider ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"x": torch.float64}, "the source has fp64"),
        ({"source": Source(y=torch.float64)}, "the source has fp64"),
        ({"source": cases.source("silu", inner=torch.float64)}, "the source has fp64"),
        ({"source": cases.source("silu", limit=-1.0)}, "limit is -1.0"),
        ({"source": dataclasses.replace(cases.SILU, norm="rms", eps=0.0)}, "a norm and a gate"),
        ({"k": 1 << 16, "group": 1 << 16}, "65536 elements"),
        ({"k": 1 << 16, "source": cases.RMS}, "65536 elements"),
        ({"k": 0}, "k is 0"),
        ({"compute": torch.float64}, "s is computed in"),
        ({"inner": torch.float64}, "s is computed in"),
        ({"scale": torch.float64}, "s is stored in"),
        ({"scale": torch.int32, "group": 0}, "in words of four"),
        ({"scale": UINT8, "group": 0, "static": True}, "a given scale that is an exponent"),
        ({"compute": BF16, "scale": UINT8}, "a power of two"),
        ({"compute": BF16, "power": "up"}, "a power of two"),
        ({"compute": BF16, "scale": torch.float8_e8m0fnu}, "a power of two"),
        ({"static": True}, "a given scale for groups of 128"),
        ({"static": True, "group": 0, "quotient": "x*(q/a)"}, "amax is not computed"),
        (
            {"static": True, "group": 0, "codes": UINT8, "low": 0.0, "high": 255.0, "zero": INT8},
            "a zero point that is not",
        ),
        ({"blank": 0.0}, "amax 0.0 where it is not above 0"),
        ({"source": cases.source("gelu_tanh", inner=FP32)}, "gelu_tanh in fp32"),
        ({"codes": torch.int16}, "codes are"),
        ({"zero": INT8}, "float codes and a zero point"),
        ({"codes": INT8, "low": None, "high": None}, "integer codes without a clamp"),
        ({"codes": INT8, "low": -129.0, "high": 127.0}, "from -129.0 to 127.0"),
        ({"codes": INT8, "low": -127.5, "high": 127.0}, "from -127.5 to 127.0"),
        ({"codes": INT8, "low": -127.0, "high": 126.5}, "from -127.0 to 126.5"),
        (
            {"codes": UINT8, "low": 0.0, "high": 255.0, "zero": INT8, "layout": "column"},
            "zero points in layout column",
        ),
        (
            {"codes": UINT8, "low": 0.0, "high": 255.0, "zero": torch.int64},
            "zero points .*; it takes up to 32 bits",
        ),
    ],
)
def test_refused(changes, text):
    fields: dict[str, Any] = {"k": 256, **changes}
    reason = TRITON.why_not(dataclasses.replace(contract(256), **fields))
    assert reason is not None
    assert re.search(text, reason), reason


def test_an_erf_of_other_bits_is_refused(monkeypatch):
    gelu = contract(256, source=cases.source("gelu"))
    for version, taken in ((None, True), ("13.0", True), ("12.8", False)):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert (TRITON.why_not(gelu) is None) == taken


def test_targets_and_estimates():
    assert [t for t in ("cpu", "sm_75", "sm_80", "sm_90", "sm_100") if TRITON.runs_on(t)] == [
        "sm_80", "sm_90", "sm_100"
    ]  # fmt: skip
    assert TRITON.name in str(QUANTIZE.plan(contract(256), "sm_90", None))


@pytest.mark.parametrize("name", BY_NAME)
def test_configs(name):
    chosen = BY_NAME[name].contract
    assert parse(Quantize, str(chosen)) == chosen
    for m in (1, 16, 128, 4096, 65536):
        configs = TRITON.configs(chosen, m)
        assert configs and len(set(configs)) == len(configs)
        for text in configs:
            config = family.Config.parse(text)
            assert str(config) == text and 1 <= config.warps <= 32
            size, wide, groups = family.tile(chosen, config.columns)
            assert wide >= size and config.rows * wide * groups <= 1 << 15


def test_a_text_that_is_no_config():
    for text in ("", "r1.c512", "r1.c512.w1.x", "r1 c512 w1"):
        with pytest.raises(ValueError, match="no config of triton.quantize"):
            family.Config.parse(text)


@pytest.mark.parametrize(
    "name", ["token int8", "asymmetric int8", "ue8m0 packed", "add rms packed"]
)
def test_opcheck(name):
    case = BY_NAME[name]
    arguments = case.inputs(), str(case.contract), f"{INFINITE}:reference"
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tests += ["test_schema"] * (case.contract.codes is INT8)  # which compares no float8
    torch.library.opcheck(torch.ops.qinductor.quantize.default, arguments, test_utils=tests)
