"""For each field of a quantiser's contract: graphs that differ in it alone get another contract.

`spelled` writes every member of the family out in plain torch, without the reference; what the
family has no word for must be refused.
"""

import dataclasses

import pytest
import torch
from quantisers import BF16, E4M3, E5M2, FP16, FP32, found, gated, refused, rows
from torch.nn.functional import gelu, silu

from qinductor.kernels.quantize import Quantize

INT8, UINT8 = torch.int8, torch.uint8
K = 256


@dataclasses.dataclass(frozen=True)
class As:
    """How a quantiser is written."""

    codes: torch.dtype = E4M3
    group: int = K
    qmax: float = 448.0
    compute: torch.dtype = FP32
    stored: torch.dtype = FP32
    inner: torch.dtype = FP32
    inverse: bool = False
    blank: float | None = None
    least: float | None = None
    floor: float | None = None
    most: float | None = None
    empty: float | None = None
    power: str = ""
    quotient: str = "x/s"
    guard: bool = False
    plus: bool = False
    truncate: bool = False
    clamp: tuple[float, float] | None = (-448.0, 448.0)


def bits_up(s):
    bits = s.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return torch.where((s == 0) | ~s.isfinite(), s, (exponent << 23).view(FP32))


POWERS = {
    "log2_up": lambda s: torch.exp2(torch.ceil(torch.log2(s))),
    "up": bits_up,
    "down": lambda s: torch.where(
        (s == 0) | ~s.isfinite(), s, ((s.view(torch.int32) >> 23) << 23).view(FP32)
    ),
}


def spelled(how: As):
    def function(x):
        y = x.unflatten(-1, (-1, how.group)) if how.group else x
        amax = y.abs().amax(-1, keepdim=True) if how.group else y.abs().amax()
        amax = amax.to(how.compute)
        if how.blank is not None:
            amax = torch.where(amax > 0, amax, how.blank)
        if how.least is not None:
            amax = torch.clamp(amax, min=how.least)
        s = amax * (1 / how.qmax) if how.inverse else amax / how.qmax
        if how.floor is not None:
            s = torch.clamp(s, min=how.floor)
        if how.most is not None:
            s = torch.clamp(s, max=how.most)
        if how.empty is not None:
            s = torch.where(s == 0, how.empty, s)
        s = POWERS[how.power](s) if how.power else s
        t, v = s.to(how.inner), y.to(how.inner)
        if how.quotient == "x/s":
            v = v / t
        elif how.quotient == "x*(1/s)":
            v = v * (torch.where(t <= (how.floor or 0), 0.0, 1 / t) if how.guard else 1 / t)
        else:
            v = v * (torch.full_like(amax, how.qmax).to(how.inner) / amax.to(how.inner))
        v = v + 0.0 if how.plus else v
        if how.codes in (INT8, UINT8) and not how.truncate:
            v = torch.round(v)
        v = v if how.clamp is None else v.clamp(*how.clamp)
        stored = s.to(how.stored)
        return v.to(how.codes).flatten(-2) if how.group else v.to(how.codes), stored

    return function


# The fields that differ from As(); those of the contract, where they have other names or values.
FIELDS = (
    ({}, {}),
    ({"group": 128}, {}),
    ({"group": 64}, {}),
    ({"group": 32}, {}),
    ({"group": 16}, {}),
    ({"group": 0}, {}),
    ({"qmax": 447.0}, {}),
    ({"qmax": 240.0}, {}),
    ({"codes": E5M2, "qmax": 57344.0, "clamp": None}, {}),
    ({"codes": INT8, "qmax": 127.0, "clamp": (-128.0, 127.0)}, {}),
    ({"codes": INT8, "qmax": 127.5, "clamp": (-128.0, 127.0)}, {}),
    ({"codes": INT8, "qmax": 128.0, "clamp": (-128.0, 127.0)}, {}),
    ({"codes": INT8, "qmax": 126.0, "clamp": (-127.0, 127.0)}, {}),
    ({"codes": INT8, "qmax": 127.0, "clamp": (-128.0, 127.0), "truncate": True}, {}),
    ({"compute": BF16}, {}),
    ({"compute": BF16, "inner": BF16}, {}),
    ({"stored": BF16}, {}),
    ({"inner": BF16}, {}),
    ({"inverse": True}, {}),
    ({"blank": 1.0}, {}),
    ({"least": 1e-12}, {}),
    ({"least": 1e-10}, {}),
    ({"least": 1e-4}, {}),
    ({"floor": 1e-12}, {}),
    ({"floor": 1e-5}, {}),
    ({"empty": 1.0}, {}),
    ({"empty": 0.0078125}, {}),
    ({"power": "log2_up"}, {}),
    ({"power": "up", "least": 1e-4}, {}),
    ({"power": "down", "least": 1e-4}, {}),
    ({"quotient": "x*(1/s)"}, {}),
    ({"quotient": "x*(q/a)", "least": 1e-12}, {}),
    ({"quotient": "x*(1/s)", "guard": True}, {}),
    ({"quotient": "x*(1/s)", "guard": True, "floor": 1e-5}, {}),
    ({"power": "log2_up", "most": 2.0**127}, {}),
    ({"power": "log2_up", "most": 2.0**127, "floor": 1e-5}, {}),
    ({"plus": True}, {}),
    ({"clamp": None, "quotient": "x*(1/s)"}, {}),
    ({"clamp": (-440.0, 440.0)}, {}),
)


def name(fields):
    words = [f"{key} {str(value).removeprefix('torch.')}" for key, value in fields[0].items()]
    return ", ".join(words) or "plain"


def wanted(how: As, x: torch.dtype) -> dict:
    """The fields that the contract must have."""
    fields = {f.name: getattr(how, f.name) for f in dataclasses.fields(how)}
    low, high = fields.pop("clamp") or (None, None)
    scale = fields.pop("stored")
    return {**fields, "scale": scale, "low": low, "high": high, "k": K, "x": x}


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("fields", FIELDS, ids=name)
def test_each_field_is_told(fields, dtype):
    how = dataclasses.replace(As(), **fields[0])
    (contract,) = found(spelled(how), rows(dtype=dtype))
    expected = wanted(how, dtype)
    if dtype is BF16 and how.power == "log2_up":
        expected["power"] = "up"  # no amax in bf16 tells them apart
    got = {key: getattr(contract, key) for key in expected}
    assert got == expected


def test_all_of_them_are_different_contracts():
    contracts: list[Quantize] = []
    for fields in FIELDS:
        contracts += found(spelled(dataclasses.replace(As(), **fields[0])), rows(dtype=FP32))
    assert len(set(contracts)) == len(FIELDS)


def quotient(x, change):
    """A token quantiser of which `change` alters (y, s, v)."""
    y = x.float()
    s = y.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    y, s, v = change(y, s, y / s)
    return v.clamp(-448, 448).to(E4M3), s


OTHERS = {
    "rounded twice": lambda y, s, v: (y, s, v.to(BF16).float()),
    "rounded to fp16 between": lambda y, s, v: (y, s, v.to(FP16).float()),
    "scale of the row before": lambda y, s, v: (y, s.roll(1, 0), y / s.roll(1, 0)),
    "scale of another group": lambda y, s, v: (y, s, y / s.flip(0)),
    "nan removed": lambda y, s, v: (y, s, v.nan_to_num(0.0)),
    "half": lambda y, s, v: (y, s, v * 0.5),
    "shifted": lambda y, s, v: (y, s, v + 1),
    "magnitudes": lambda y, s, v: (y, s, v.abs()),
    "turned": lambda y, s, v: (y, s, v.flip(-1)),
    "rounded to whole codes": lambda y, s, v: (y, s, v.round()),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_what_has_no_contract_is_refused(change):
    for dtype in (FP32, BF16):
        reason = refused(lambda x: quotient(x, change), rows(dtype=dtype))
        said = ("of the family", "in the reference and", "comes from no one tensor")
        assert any(words in reason for words in said), reason


def test_powers_of_subnormal_scales_are_refused():
    """By bits they become the smallest normal number, which is no power above them."""
    for power in ("up", "down"):
        reason = refused(spelled(As(power=power)), rows(dtype=FP32))
        assert "no floor of the family" in reason, reason


def test_what_is_stored_of_the_scale_may_be_anything():
    for change in (lambda s: s * 1.0001, lambda s: s.sqrt(), lambda s: s.roll(1, 0)):
        (contract,) = found(lambda x, f=change: quotient(x, lambda y, s, v: (y, f(s), v)), rows())
        assert contract.least == 1e-12 and contract.quotient == "x/s"


def odd(make):
    def function(x):
        s = make(x.float()) / 448
        return (x.float() / s).clamp(-448, 448).to(E4M3), s

    return function


SCALES = {
    "largest, with its sign": lambda y: y.amax(-1, keepdim=True),
    "mean magnitude": lambda y: y.abs().mean(-1, keepdim=True),
    "range": lambda y: y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True),
    "largest of the first half": lambda y: y[..., :128].abs().amax(-1, keepdim=True),
    "squared": lambda y: y.square().amax(-1, keepdim=True),
    "of a column": lambda y: y.abs().amax(0, keepdim=True),
}


@pytest.mark.parametrize("make", SCALES.values(), ids=SCALES)
def test_other_scales_are_refused(make):
    reason = refused(odd(make), rows())
    assert "scale" in reason or "takes parts" in reason, reason


ONE = {
    "silu halves": (lambda x: gated(x), "silu", "halves", None, BF16),
    "silu swapped": (lambda x: x[..., :K] * silu(x[..., K:]), "silu", "swapped", None, BF16),
    "x*sigmoid": (
        lambda x: x[..., :K] * torch.sigmoid(x[..., :K]) * x[..., K:],
        "x*sigmoid", "halves", None, BF16,
    ),
    "gelu": (lambda x: gelu(x[..., :K]) * x[..., K:], "gelu", "halves", None, BF16),
    "gelu_tanh": (
        lambda x: gelu(x[..., :K], approximate="tanh") * x[..., K:],
        "gelu_tanh", "halves", None, BF16,
    ),
    "relu2": (
        lambda x: torch.relu(x[..., :K]).square() * x[..., K:], "relu2", "halves", None, BF16,
    ),
    "limit": (
        lambda x: silu(x[..., :K].clamp(max=7.0)) * x[..., K:].clamp(-7.0, 7.0),
        "silu", "halves", 7.0, BF16,
    ),
    "another limit": (
        lambda x: silu(x[..., :K].clamp(max=10.0)) * x[..., K:].clamp(-10.0, 10.0),
        "silu", "halves", 10.0, BF16,
    ),
    "float32": (
        lambda x: (silu(x[..., :K].float()) * x[..., K:].float()).to(BF16),
        "silu", "halves", None, FP32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE.values(), ids=ONE)
def test_each_field_of_the_source_is_told(case):
    make, activation, gate, limit, inner = case
    (contract,) = found(lambda x: spelled(As())(make(x)), rows(k=2 * K))
    source = contract.source
    assert (source.activation, source.gate, source.limit) == (activation, gate, limit)
    assert source.inner == inner and source.y == BF16 and contract.x == BF16


def test_y_is_not_rounded_where_the_graph_does_not():
    wide = lambda x: silu(x[..., :K].float()) * x[..., K:].float()  # noqa: E731
    (contract,) = found(lambda x: spelled(As())(wide(x)), rows(k=2 * K))
    assert contract.source.y == FP32 and contract.source.inner == FP32


NEITHER = {
    "limit of the gate alone": lambda x: silu(x[..., :K].clamp(max=7.0)) * x[..., K:],
    "limit on one side": lambda x: silu(x[..., :K].clamp(max=7.0)) * x[..., K:].clamp(max=7.0),
    "up + 1": lambda x: silu(x[..., :K]) * (x[..., K:] + 1),
    "steep": lambda x: x[..., :K] * torch.sigmoid(1.702 * x[..., :K]) * x[..., K:],
    "interleaved": lambda x: silu(x[..., ::2]) * x[..., 1::2],
    "tanh": lambda x: torch.tanh(x[..., :K]) * x[..., K:],
    "no activation": lambda x: x[..., :K] * x[..., K:],
}


@pytest.mark.parametrize("make", NEITHER.values(), ids=NEITHER)
def test_other_sources_stay_outside(make):
    (contract,) = found(lambda x: spelled(As())(make(x)), rows(k=2 * K))
    assert contract.source.activation == contract.source.gate == ""
    assert contract.k == K


def test_two_tensors_whichever_comes_first():
    for function in (lambda g, u: silu(g) * u, lambda g, u: u * silu(g), lambda u, g: u * silu(g)):
        (contract,) = found(lambda a, b, f=function: spelled(As())(f(a, b)), rows(), rows())
        assert (contract.source.activation, contract.source.gate) == ("silu", "two")


ASYMMETRIC = {
    (UINT8, 0, 255): torch.int32,
    (INT8, -128, 127): INT8,
    (INT8, -127, 127): torch.int32,
}


@pytest.mark.parametrize("case", ASYMMETRIC.items(), ids=str)
def test_asymmetric(case):
    (codes, low, high), zero = case

    def function(x):
        y = x.float()
        lowest = y.amin(-1, keepdim=True).clamp(max=0)
        s = ((y.amax(-1, keepdim=True).clamp(min=0) - lowest) / (high - low)).clamp(min=1e-8)
        z = (low - torch.round(lowest / s)).clamp(low, high)
        q = (torch.round(y / s) + z).clamp(low, high)
        return q.to(codes), s, z.to(zero)

    (contract,) = found(function, rows())
    assert contract.zero is not None and contract.codes == codes
    assert (contract.low, contract.high, contract.qmax) == (low, high, high - low)
    assert contract.floor == 1e-8


def test_asymmetric_zero_of_another_rounding_is_refused():
    def function(x):
        y = x.float()
        lowest = y.amin(-1, keepdim=True).clamp(max=0)
        s = ((y.amax(-1, keepdim=True).clamp(min=0) - lowest) / 255).clamp(min=1e-8)
        z = (0 - torch.floor(lowest / s)).clamp(0, 255)
        return (torch.round(y / s) + z).clamp(0, 255).to(UINT8), s, z

    refused(function, rows())
