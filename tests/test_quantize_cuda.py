"""The Triton family of activation quantisers on a GPU: bitwise what eager computes there."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from products import poisoned
from quantised import BITS, TRITON, call, declared, plain, poison, wrong

from qinductor.kernels import quantize as op
from qinductor.kernels import quantize_cases as cases
from qinductor.kernels.quantize import Quantize, Source, reference, results
from qinductor.kernels.quantize_cases import BF16, CASES, E4M3, E5M2, FP16, FP32, INT8, UINT8
from qinductor.kernels.quantize_into import quantize_into
from qinductor.kernels.quantize_triton_form import unsupported

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")
BY_NAME = {case.name: case for case in CASES}
NORMED = [name for name, case in BY_NAME.items() if case.contract.source.norm]
contract = cases.contract


def large(name: str, k: int) -> Quantize:
    """A case's contract with other columns; its groups stay, but for one that was a row."""
    chosen = BY_NAME[name].contract
    group = k if chosen.group == chosen.k else chosen.group
    return dataclasses.replace(chosen, k=k, group=group)


LARGE = [
    cases.Case(f"{name} {m}x{k}", m, large(name, k))
    for name in ("group v2", "ue8m0 silu packed", "token guarded", "tensor dynamic", "asymmetric")
    for m, k in ((1, 7168), (130, 2048), (700, 7168))
] + [
    cases.Case("rows of 32768", 3, large("token guarded", 1 << 15)),
    cases.Case("rows of 32767", 3, large("token odd", (1 << 15) - 1)),
    cases.Case("silu, rows of 32768", 3, large("silu token", 1 << 15)),
    cases.Case("many rows", 70000, large("group v2", 256)),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: case.name)
def test_bitwise(case):
    """Norms of whole numbers: the sum of their squares is the same in any order."""
    normed = case.contract.source.norm
    for inputs in (case.inputs(device="cuda"), *([] if normed else [case.hostile("cuda")])):
        if normed:
            whole = [(t.float() * 4).round().clamp(-16, 16).to(t.dtype) for t in inputs]
            inputs = [old if old.dim() == 1 else t for old, t in zip(inputs, whole, strict=True)]
        before = [tensor.clone() for tensor in inputs]
        with poisoned():
            found = call(case.contract, inputs)
        declared(case.contract, inputs, found)
        assert not wrong(case.contract, inputs, found)
        for held, old in zip(inputs, before, strict=True):
            assert torch.equal(held.view(torch.uint8), old.view(torch.uint8)), "an input is changed"


@pytest.mark.parametrize("name", NORMED)
def test_norms_of_any_numbers(name):
    """Eager sums in another order: one code in a thousand may be the one beside it."""
    case = BY_NAME[name]
    chosen = dataclasses.replace(case, m=300)
    inputs = chosen.inputs(device="cuda")
    found, wanted = call(case.contract, inputs), reference(case.contract, inputs)
    steps = (found[0].view(INT8).int() - wanted[0].view(INT8).int()).abs()
    assert int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 1e-3
    if case.contract.residual:
        assert torch.equal(found[-1], wanted[-1])


@pytest.mark.parametrize("case", [*LARGE[:15], *(BY_NAME[n] for n in ("packed token", "add rms"))],
                         ids=lambda case: case.name)  # fmt: skip
def test_every_config_gives_the_same(case):
    inputs = case.inputs(device="cuda")
    first = call(case.contract, inputs)
    for config in TRITON.configs(case.contract, case.m):
        with poisoned():
            found = call(case.contract, inputs, config)
        for ours, other in zip(found, first, strict=True):
            assert torch.equal(plain(ours), plain(other)), config


@pytest.mark.parametrize("name", BY_NAME)
def test_captured_and_replayed_with_other_inputs(name):
    case = BY_NAME[name]
    inputs, graph = case.inputs(device="cuda"), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(case.contract, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found = call(case.contract, inputs)
    for seed in (1, 2, 3):
        for held, other in zip(inputs, case.inputs(seed, "cuda"), strict=True):
            held.copy_(other)
        poison(found)
        graph.replay()
        for ours, want in zip(found, call(case.contract, inputs), strict=True):
            assert torch.equal(plain(ours), plain(want))
        if not case.contract.source.norm:
            assert not wrong(case.contract, inputs, found)


def test_a_race_would_show_in_one_of_many_runs():
    case = next(case for case in LARGE if case.name == "tensor dynamic 700x7168")
    inputs = case.inputs(device="cuda")
    first = call(case.contract, inputs)
    for _ in range(50):
        for ours, other in zip(call(case.contract, inputs), first, strict=True):
            assert torch.equal(plain(ours), plain(other))


# Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", [E4M3, E5M2, INT8, UINT8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_codes_of_every_number(codes, dtype):
    every = torch.arange(1 << 16, device="cuda").to(torch.int16).view(dtype).reshape(256, 256)
    chosen = contract(256, codes, 0, dtype, source=Source(y=dtype), static=True)
    for scale in (1.0, 0.75, 2.0**-140, 3e38):
        inputs = [every, torch.tensor([scale], device="cuda")]
        assert not wrong(chosen, inputs, call(chosen, inputs)), scale
        if codes.is_floating_point:
            bare = dataclasses.replace(chosen, low=None, high=None)
            assert not wrong(bare, inputs, call(bare, inputs)), scale


@pytest.mark.parametrize("name", cases.ACTIVATIONS)
@pytest.mark.parametrize("inner", [BF16, FP16, FP32])
def test_activations_of_every_number(name, inner):
    """Through powers of two above each value: its exponent; and codes of the values themselves."""
    dtype = BF16 if inner is FP32 else inner
    every = torch.arange(1 << 16, device="cuda").to(torch.int16).view(dtype).reshape(-1, 1)
    every = every[every.isfinite()].reshape(-1, 1)
    chosen = contract(
        1, group=1, x=dtype, source=Source(FP32, name, inner=inner), qmax=1.0, quotient="x*(1/s)"
    )
    if name == "gelu_tanh" and inner is FP32:
        assert unsupported(chosen) is not None
        return
    # s is |y|, in every bit
    assert not wrong(chosen, [every], call(chosen, [every]))


@pytest.mark.parametrize("power", [p for p in op.POWERS if p])
def test_powers_of_two_beside_every_power(power):
    """s is amax here: 64 floats on either side of each power, and all small subnormal ones."""
    bits = torch.arange(0, 255)[:, None] * (1 << 23) + torch.arange(-64, 65)
    bits = torch.cat([bits.flatten().clamp_min(0), 1 << torch.arange(23), torch.arange(1, 999)])
    bits = torch.cat([bits, (torch.arange(255) << 23) + 0x3504F3, torch.tensor([0x7F800000])])
    if power == "log2_up":  # eager's exp2(-127) is a bit below the power
        bits = bits.clamp_min(1 << 23)
    s = torch.nn.functional.pad(bits, (0, -len(bits) % 64)).int().view(FP32).reshape(-1, 64)
    chosen = contract(64, E4M3, 1, FP32, source=Source(y=FP32), qmax=1.0, power=power)
    assert not wrong(chosen, [s.cuda()], call(chosen, [s.cuda()]))


def test_quotients_are_rounded_to_nearest():
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4096, 512, generator=g, device="cuda")
    x = x * torch.exp2(torch.randint(-120, 120, (4096, 1), generator=g, device="cuda").float())
    for codes in (E4M3, INT8):
        for qmax in (448.0, 127.0, 255.0, 3.0):
            for quotient in op.QUOTIENTS:
                for inverse in (False, True):
                    chosen = contract(
                        512, codes, 16, FP32, source=Source(y=FP32), qmax=qmax, inverse=inverse,
                        quotient=quotient,
                    )  # fmt: skip
                    assert not wrong(chosen, [x], call(chosen, [x])), (codes, qmax, quotient)


@pytest.mark.parametrize("codes", [E4M3, E5M2])
def test_quotients_beside_the_middle_of_two_codes(codes):
    """Where the code of a product with the reciprocal would be another."""
    every = torch.arange(256, device="cuda").to(UINT8).view(codes).float()
    every = every[every.isfinite() & (every >= 0)].unique()
    middle = torch.cat([(every[1:] + every[:-1]) / 2, every])
    g = torch.Generator("cuda").manual_seed(0)
    chosen = contract(
        len(middle) * 9, codes, 0, FP32, source=Source(y=FP32), static=True, qmax=float(every.max())
    )
    scales = torch.rand(64, generator=g, device="cuda") + 0.5
    for s in (*scales, *(scales[:8] * 2.0**-130), *(scales[:8] * 2.0**110)):
        y = (middle.double() * s.double()).float().view(torch.int32)
        y = (y[:, None] + torch.arange(-4, 5, device="cuda", dtype=torch.int32)).view(FP32)
        inputs = [torch.stack([y.flatten(), -y.flatten()]), s[None]]
        assert not wrong(chosen, inputs, call(chosen, inputs)), float(s)


def test_integers_of_nan_are_0():
    x = torch.full((1, 32), math.nan, device="cuda")
    x[:, :16] = 1.0
    for codes in (INT8, UINT8):
        chosen = contract(32, codes, 16, FP32, source=Source(y=FP32))
        found, _ = call(chosen, [x])
        assert found.tolist() == [[int(chosen.qmax)] * 16 + [0] * 16]


# Into given tensors ---------------------------------------------------------------------------

INTO: dict[str, Any] = {
    "group v2": contract(2048, **cases.V2),
    "silu ue8m0": contract(2048, source=cases.SILU, **cases.UE8M0),
    "silu packed": contract(
        640, source=cases.SILU, scale=torch.int32, layout="column_padded", **cases.UE8M0
    ),
    "int8": contract(256, INT8, truncate=True, source=cases.SILU, **cases.V2),
}


@pytest.mark.parametrize("layout", ["row", "column", "padded"])
@pytest.mark.parametrize("name", INTO)
def test_masked_rows_alone_are_written(name, layout):
    chosen, rows = INTO[name], 70
    wide = 2 * chosen.k if chosen.source.gate else chosen.k
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(6, rows, wide, generator=g, device="cuda").to(chosen.x)
    groups = results(chosen, [x])[1].shape[-1]
    made = {"dtype": chosen.scale, "device": "cuda"}
    scale = {
        "row": torch.empty(6, rows, groups, **made),
        "column": torch.empty(6, groups, rows, **made).mT,
        "padded": torch.empty(6, groups, 72, **made).mT[:, :rows],
    }[layout]
    into = [torch.empty(6, rows, chosen.k, dtype=chosen.codes, device="cuda"), scale]
    masked = torch.tensor([rows, 0, 3, 64, 99, 1], dtype=torch.int32, device="cuda")
    full = reference(chosen, [x])
    row = torch.arange(rows, device="cuda")[None, :, None] < masked[:, None, None]
    for limits in (masked, None):
        poison(into)
        untouched = [plain(t.clone()) for t in into]
        quantize_into(chosen, [x], into, limits)
        for ours, old, want in zip(into, untouched, full, strict=True):
            want = plain(want)
            want = want if limits is None else torch.where(row, want, old)
            assert torch.equal(plain(ours), want)
    assert set(BITS) >= {t.itemsize for t in into}
