"""The kernel of `bmm_fp8`: interpreted on a CPU, and compiled for GPUs that are not here."""

import importlib.util

import interpreted
import pytest
import torch
from sgl import BF16, E4M3, E5M2, FP16, hold_equal, summed
from test_sgl_matmul import integers, powers

from qinductor.kernels import sgl_batched, sgl_batched_cute, sgl_batched_kernels
from qinductor.kernels.scaled_matmul_cute_form import step_of

PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
CHECKS = dict(sgl_batched_kernels.compile_checks())


@pytest.fixture
def kernels():
    spec = importlib.util.find_spec(sgl_batched_kernels.__name__)
    made = importlib.util.module_from_spec(spec)
    with interpreted.device():
        spec.loader.exec_module(made)
        yield made


@pytest.mark.parametrize("shape", [(2, 3, 128, 16), (1, 16, 40, 70), (3, 40, 130, 128)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_products(kernels, pair, shape):
    batches, m, k, n = shape
    a = integers((batches, m, k), "cpu", pair[0])
    sa, sb = powers((1,), "cpu"), powers((), "cpu")
    for out_dtype in (BF16, FP16):
        b = integers((batches, k, n), "cpu", pair[1])
        wanted = (summed(a, b) * (sa * sb)).to(out_dtype)
        for w in (b, b.mT.contiguous().mT):
            for x in (a, a.transpose(0, 1).contiguous().transpose(0, 1)):
                out = torch.full((batches, m, n), torch.nan, dtype=out_dtype)
                sgl_batched.launch(x, w, sa, sb, out, kernels)
                hold_equal(out, wanted)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_number(kernels, dtype):
    """One product an output. (Triton's interpreter makes numbers of codes that are nan, and 0 of
    subnormal e5m2; a test on a GPU has all codes.)"""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    size = codes.float().abs()
    codes = codes[size.isfinite() & ((size == 0) | (size >= 2**-14))]
    one, count = torch.ones(1), len(codes)
    a, b = codes.reshape(1, count, 1), torch.ones(1, 1, 16).to(E4M3)
    out = torch.empty(1, count, 16, dtype=BF16)
    sgl_batched.launch(a, b, one, one, out, kernels)
    hold_equal(out, a.to(BF16).expand(out.shape))
    out = torch.empty(1, 16, count, dtype=BF16)
    sgl_batched.launch(b.mT, a.mT, one, one, out, kernels)
    hold_equal(out, a.mT.to(BF16).expand(out.shape))


@pytest.mark.parametrize("name", [name for name in CHECKS if "sm_90" in name])
def test_compiled(name):
    CHECKS[name]()


def test_a_code_that_reads_registers_late_is_found(monkeypatch):
    """Tiles of 64 rows go to wgmma."""
    monkeypatch.setattr(sgl_batched, "TILES", ((1 << 62, 64),))
    with pytest.raises(RuntimeError, match="64 rows, sm_90: .* wgmma: True"):
        next(check for name, check in CHECKS.items() if "sm_90" in name)()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"n": 260}, "n is 260"),
        ({"k": 136}, "k 136"),
        ({"b": lambda b: b.contiguous()}, "B has strides"),
        ({"a": lambda a: a.mT.contiguous().mT}, "A has strides"),
        ({"a": lambda a: a.view(-1)[1:129].view(1, 1, 128).expand(2, 3, 128)}, "A has strides"),
        ({"out": torch.float32}, "the result is torch.float32"),
        ({"offset": 4}, "at 8 past a multiple of 16 bytes"),
        ({"capability": (9, 1)}, "not of sm_90"),
        ({"missing": "CuTe DSL is not installed"}, "CuTe DSL is not installed"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_what_tma_takes(monkeypatch, change, reason):
    """Of A [b, m, k] and B [b, k, n]; the rest is Triton's."""
    n, k = change.get("n", 256), change.get("k", 128)
    a, b = torch.zeros(2, 3, k, dtype=E4M3), torch.zeros(2, n, k, dtype=E4M3).mT
    a, b = change.get("a", lambda a: a)(a), change.get("b", lambda b: b)(b)
    offset = change.get("offset", 0)
    out = torch.empty(6 * n + offset, dtype=change.get("out", BF16))[offset:].view(2, 3, n)
    capability = change.get("capability", (9, 0))
    monkeypatch.setattr(sgl_batched_cute, "capability", lambda device: capability)
    monkeypatch.setattr(sgl_batched_cute.cute_cache, "missing", lambda: change.get("missing"))
    found = sgl_batched_cute.why_not(a, b, out)
    assert found is None if reason is None else reason in found


def test_parts_of_k_only_where_batches_leave_the_device_idle():
    def split(batches, m):
        contract = sgl_batched_cute._contract(E4M3, E4M3, 512, 4096, BF16, batches)
        return sgl_batched_cute.chosen(contract, m).split

    assert split(1, 1) > 1 and split(128, 64) == 1


def test_codes_of_128_columns_are_one_sum():
    steps = [
        step_of(sgl_batched_cute._contract(E4M3, E4M3, 512, k, BF16, 4)) for k in (64, 128, 144)
    ]
    assert steps == [0, 0, 128]
