"""What is refused, or fails when it is first called, is run by another provider: same result."""

import itertools
import warnings

import block32
import pytest
import torch
from models import BF16, FP32
from scaled_products import call, layouts, made, only, packed

import qinductor
from qinductor import dispatch
from qinductor.contracts import difference
from qinductor.kernels import cute_cache, fallback, scaled_matmul_direct
from qinductor.kernels import scaled_matmul_cute as family
from qinductor.kernels import scaled_matmul_dots as dots
from qinductor.kernels import scaled_matmul_triton as triton
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, reference
from qinductor.kernels.scaled_matmul_cases import CASES, E8M0, FP8, case
from qinductor.kernels.scaled_matmul_direct import scaled_product
from qinductor.kernels.sgl_matmul import contract as sgl_contract
from qinductor.op import INFINITE, Plan, split
from qinductor.testing import untuned

qinductor.load()
PROVIDERS = SCALED_MATMUL.providers
CUTE, TRITON = PROVIDERS["cute.scaled_mma"], PROVIDERS["triton.scaled_mma"]
DOTS = PROVIDERS["cute.scaled_dots"]
TARGET = "sm_90"
LAYERS = list(itertools.product((1, 7, 8, 33, 64, 120, 128), (32, 288, 576, 2080, 2880, 48, 80)))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """What failed in one test is tried in the next."""
    monkeypatch.setattr(fallback, "_broken", set())
    monkeypatch.setattr(DOTS, "missing", lambda: "left out", raising=False)
    caches = fallback.others, family.prepared, dots.prepared, scaled_matmul_direct._routes
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def block(m, n, k, scale=FP32, out=BF16):
    return case(
        FP8, m, n, k, 32, 32, group=32, scale=scale, weight_scale=scale, out=out, powers=True
    )


def broken(*given, **more):
    raise RuntimeError("Failed to find C compiler.\nPlease specify one")


def fails(monkeypatch, *names):
    """Providers that raise when they are called."""
    for name in names:
        for function in ("run", "direct", "grouped", "batched"):
            if hasattr(PROVIDERS[name], function):
                monkeypatch.setattr(PROVIDERS[name], function, broken)


@pytest.mark.parametrize("scale", [FP32, E8M0], ids=str)
@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_every_block32_shape_has_a_kernel(n, k, scale):
    """On Hopper, and what CuTe DSL does not take Triton does."""
    contract = block(1, n, k, scale).contract
    assert TRITON.why_not(contract) is None
    native = n % 8 == 0 and k % 16 == 0 and (k > 32 or n < 32)  # else one block has all of K
    assert (CUTE.why_not(contract) is None) == native
    with untuned():
        plan = SCALED_MATMUL.plan(contract, TARGET, None)
    rows = {"aten.scaled_mm"} if k == 32 else set()  # where each has one scale
    assert {split(route)[0] for _, route in plan.steps} <= {CUTE.name, TRITON.name} | rows
    assert plan.steps[-1][0] == INFINITE
    for m in (1, 5, 17, 130, 1000):
        assert CUTE.why_not(contract) is not None or CUTE.configs(contract, m)
        assert TRITON.configs(contract, m)


@pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: chosen.name)
def test_what_cute_takes_another_provider_takes_of_the_same_tensors(chosen):
    if CUTE.why_not(chosen.contract) is not None:
        pytest.skip("CuTe DSL does not take it")
    first, *_, last = fallback.others(SCALED_MATMUL, CUTE.name, chosen.contract, TARGET)
    assert not first.reference and last.reference
    for other in (TRITON, last):
        assert other.operands(chosen.contract) == CUTE.operands(chosen.contract)


def test_no_provider_is_asked_for_what_it_does_not_take():
    """Groups of 64 and blocks of 96: CuTe DSL takes them, Triton does not."""
    contract = case(FP8, 1, 96, 192, 96, 96, group=64).contract
    assert CUTE.why_not(contract) is None and TRITON.why_not(contract) is not None
    names = [p.name for p in fallback.others(SCALED_MATMUL, CUTE.name, contract, TARGET)]
    assert names == ["reference"]


@pytest.mark.parametrize("lacking", ["nothing", "Triton", "a C compiler"])
@pytest.mark.parametrize("n", [64, 96])
def test_a_kernel_that_cannot_be_made(monkeypatch, lacking, n):
    """By Triton, and where that does not run either by the reference, each said once."""
    chosen = block(5, n, 160)
    contract, (a, scale, source) = chosen.contract, made(chosen, 5, True)
    want, seen = reference(contract, a, scale, source), []
    monkeypatch.setattr(fallback, "target_of", lambda device: TARGET)
    monkeypatch.setattr(family, "kernel", broken)

    def run(contract, inputs, packed, config=None):
        seen.append(contract)
        return want

    monkeypatch.setattr(TRITON, "run", broken if lacking == "a C compiler" else run)
    if lacking == "Triton":
        monkeypatch.setattr(TRITON, "missing", lambda: "Triton is not installed")
    plan = only(CUTE.name)
    tensors = packed(plan, contract, source)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert not difference(call(a, scale, tensors, contract, plan), want)
    texts = [str(w.message) for w in said]
    assert len(texts) == (2 if lacking == "a C compiler" else 1)
    assert all("cannot run: RuntimeError: Failed to find C compiler.; another" in t for t in texts)
    assert len(seen) == 2 * (lacking == "nothing")


@pytest.mark.parametrize("scale", [FP32, E8M0], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 7, 48), (5, 33, 80), (17, 64, 2080), (3, 40, 2880)])
def test_by_the_reference_where_all_others_fail(monkeypatch, m, n, k, scale):
    chosen = block(m, n, k, scale)
    contract, (a, s, source) = chosen.contract, made(chosen, m, True)
    fails(monkeypatch, "aten.mm_in_blocks", "aten.mm_dense")
    plan = SCALED_MATMUL.plan(contract, "cpu", None)
    tensors = packed(plan, contract, source)
    for x, held in [(a, s), *layouts(a, s).values()]:
        with pytest.warns(UserWarning, match="cannot run"):
            fallback._broken.clear()
            out = call(x, held, tensors, contract, plan)
        assert not difference(out, reference(contract, a, s, source))


def test_memory_that_runs_out_is_no_reason_to_take_another(monkeypatch):
    def full(*given, **more):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    chosen = block(5, 64, 96)
    contract, (a, s, source) = chosen.contract, made(chosen, 5, True)
    monkeypatch.setattr(PROVIDERS["aten.mm_in_blocks"], "run", full)
    plan = only("aten.mm_in_blocks")
    with pytest.raises(torch.OutOfMemoryError):
        call(a, s, packed(plan, contract, source), contract, plan)


def test_packed_tensors_that_no_other_takes(monkeypatch):
    """A dense weight has no scales: the error says so."""
    chosen = block(5, 64, 96)
    contract, (a, s, source) = chosen.contract, made(chosen, 5, True)
    fails(monkeypatch, "aten.mm_dense")
    plan = only("aten.mm_dense")
    with (
        pytest.warns(UserWarning, match="aten.mm_dense cannot run"),
        pytest.raises(RuntimeError, match="no other provider takes its packed dense"),
    ):
        call(a, s, packed(plan, contract, source), contract, plan)


@pytest.mark.parametrize("operator", ["scaled_grouped_matmul", "scaled_bmm"])
def test_experts(monkeypatch, operator):
    """One by one where the kernel of all of them cannot be made, then by the reference."""
    chosen = case(FP8, 4, 40, 96, 32, 32, group=32, experts=3)
    one = case(FP8, 4, 40, 96, 32, 32, group=32)
    sources = [one.make(seed, exact=True) for seed in range(3)]
    plan = only(TRITON.name)
    tensors = list(plan.pack(SCALED_MATMUL, chosen.contract, [s[2] for s in sources]).values())
    a, s = (torch.stack([source[i].float() for source in sources]) for i in (0, 1))
    a = a.to(sources[0][0].dtype)
    want = torch.stack([reference(one.contract, *source) for source in sources])
    given = (a, s, tensors)
    if operator == "scaled_grouped_matmul":
        ends = torch.tensor([4, 8, 12], dtype=torch.int32)
        given, want = (a.flatten(0, 1), s.flatten(0, 1), ends, tensors), want.flatten(0, 1)
    fails(monkeypatch, TRITON.name, "aten.mm_in_blocks", "aten.mm_dense")
    run = getattr(torch.ops.qinductor, operator)
    with pytest.warns(UserWarning, match="cannot run") as said:
        out = run(*given, str(chosen.contract), str(plan))
    assert "triton.scaled_mma cannot run" in str(said[0].message)
    assert not difference(out, want)


def on_hopper(monkeypatch):
    """Plans are those of a Hopper GPU; kernels of CuTe DSL are the specification."""
    calls = []
    monkeypatch.setattr(fallback, "target_of", lambda device: TARGET)
    monkeypatch.setattr(cute_cache, "missing", lambda: None)

    def prepared(contract, config, device):
        def kernel(a, scale, codes, held, bias, out, programs, early):
            assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (a, codes, out))
            weight = block32.QuantizedWeight(contract.weight, codes, held)
            out.copy_(reference(contract, a, scale, block32.Operands(weight, bias)))
            calls.append((out, early))

        return kernel, 132

    monkeypatch.setattr(family, "prepared", prepared)
    return calls


def nt(m, n, k):
    """(contract, a, its scale, codes of W, their scale, result) as `fp8_gemm_nt` has them."""
    form = sgl_contract(torch.float8_e4m3fn, torch.float8_e4m3fn, n, k, 32, (32, 32), BF16)
    a, s, source = block(m, n, k).make(exact=True)
    weight = source.weight
    return form, a, s, weight.codes, weight.scale, reference(form, a, s, source)


def preferred(monkeypatch):
    """CuTe DSL is estimated to be fastest."""
    monkeypatch.setattr(
        scaled_matmul_direct.SCALED_MATMUL,
        "plan",
        lambda contract, target, m: Plan(((INFINITE, CUTE.name),)),
    )


def test_cute_is_a_candidate_of_weights_that_are_not_packed(monkeypatch):
    calls = on_hopper(monkeypatch)
    fast = sgl_contract(torch.float8_e4m3fn, torch.float8_e4m3fn, 4096, 4096, 4096, (1, 4096), BF16)
    dispatch._planned.cache_clear()
    with untuned():
        route, *_ = scaled_matmul_direct._routes(fast, torch.device("cpu"))
    dispatch._planned.cache_clear()
    assert route.provider is CUTE and not calls


@pytest.mark.parametrize("scales", ["rows", "columns"])
@pytest.mark.parametrize("out", ["none", "its own", "strided", "misaligned"])
def test_direct(monkeypatch, out, scales):
    """No byte of the weight is copied; the result lies where it was asked for."""
    calls = on_hopper(monkeypatch)
    preferred(monkeypatch)
    form, a, s, codes, held, want = nt(5, 64, 96)
    held = held.t().contiguous().t() if scales == "columns" else held
    place = {
        "none": None,
        "its own": want.new_zeros(5, 64),
        "strided": want.new_zeros(5, 80)[:, :64],
        "misaligned": want.new_zeros(5 * 64 + 1)[1:].view(5, 64),
    }[out]
    found = scaled_product(form, a, s, codes, held, None, place)
    assert not difference(found, want) and (place is None or found is place)
    ((written, early),) = calls
    assert (written is place) == (out == "its own")
    assert early == 0  # the kernel in front may have written the weight


def test_a_packed_weight_is_fetched_early_unless_it_is_copied(monkeypatch):
    calls = on_hopper(monkeypatch)
    form, a, s, codes, held, want = nt(5, 64, 96)
    beside = torch.cat([codes.view(torch.uint8).flatten()[:1], codes.view(torch.uint8).flatten()])
    beside = beside[1:].view(codes.dtype).view(64, 96)
    for weight, early in ((codes, True), (beside, False)):
        assert not difference(CUTE.run(form, (a, s), [weight, held]), want)
        assert (calls[-1][1] > 0) is early


def test_two_that_fail_do_not_call_each_other(monkeypatch):
    """Both of CuTe DSL, and Triton's: then the reference."""
    monkeypatch.setattr(cute_cache, "missing", lambda: None)
    monkeypatch.setattr(DOTS, "missing", lambda: None)
    monkeypatch.setattr(fallback, "target_of", lambda device: TARGET)
    monkeypatch.setattr(family, "kernel", broken)
    monkeypatch.setattr(dots, "kernel", broken)
    fails(monkeypatch, TRITON.name)
    chosen = block(5, 64, 160)
    contract, (a, s, source) = chosen.contract, made(chosen, 5, True)
    for first in (CUTE, DOTS):
        fallback._broken.clear()
        plan = only(first.name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = call(a, s, packed(plan, contract, source), contract, plan)
        assert not difference(out, reference(contract, a, s, source))


@pytest.mark.parametrize("why", ["codes with strided rows", "misaligned codes", "no compiler"])
def test_direct_by_another(monkeypatch, why):
    calls, seen = on_hopper(monkeypatch), []
    preferred(monkeypatch)
    form, a, s, codes, held, want = nt(5, 64, 96)
    if why == "codes with strided rows":
        codes = torch.cat([codes.view(torch.uint8)] * 2, 1).view(codes.dtype)[:, :96]
    elif why == "misaligned codes":
        bits = torch.cat([codes.view(torch.uint8).flatten()[:1], codes.view(torch.uint8).flatten()])
        codes = bits[1:].view(codes.dtype).view(64, 96)
    else:
        monkeypatch.setattr(family, "prepared", lambda *given: None)

    def direct(contract, inputs, source, config, out):
        seen.append(source.weight.codes)
        return want

    monkeypatch.setattr(triton.ScaledMMA, "direct", staticmethod(direct))
    assert not difference(scaled_product(form, a, s, codes, held), want)
    assert not calls and seen[0] is codes


@pytest.mark.parametrize("place", [False, True])
def test_direct_by_the_reference(monkeypatch, place):
    on_hopper(monkeypatch)
    fails(monkeypatch, CUTE.name, TRITON.name)
    for m, n, k in ((1, 1, 32), (5, 7, 96), (3, 33, 48), (17, 40, 2080)):
        fallback._broken.clear()
        form, a, s, codes, held, want = nt(m, n, k)
        out = want.new_zeros(m, n + 3)[:, :n] if place else None
        with pytest.warns(UserWarning, match="cannot run"):
            found = scaled_product(form, a, s, codes, held, None, out)
        assert not difference(found, want) and (out is None or found is out)


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize(
    "off", [(), ("quantize",), ("scaled_matmul",), ("quantize", "scaled_matmul")]
)
@pytest.mark.parametrize("broke", [False, True])
def test_activations_are_rounded_to_powers_of_two_whatever_runs(monkeypatch, off, broke, m):
    """The data are exact, so that all agree bit for bit, and scales that are not rounded do not."""
    torch._dynamo.reset()
    module = block32.layer()
    random = torch.Generator().manual_seed(m)
    x = torch.randint(-100, 101, (m, 160), generator=random).to(BF16)
    want = block32.expected(module, x)
    assert difference(block32.expected(module, x, rounded=False), want)
    patterns = dict.fromkeys(off, "off") | {"dequant_matmul": "off"}
    run = torch.compile(module, backend="qinductor", options={"patterns": patterns})
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if broke:
            fails(monkeypatch, "aten.mm_in_blocks", "aten.mm_dense")
        out = run(x)
    lowered = {site.pattern for site in qinductor.last_report().sites if site.lowered}
    assert lowered.isdisjoint(off) and ("scaled_matmul" in lowered or "scaled_matmul" in off)
    assert any("cannot run" in str(w.message) for w in said) == (
        broke and "scaled_matmul" in lowered
    )
    assert not difference(out, want)
