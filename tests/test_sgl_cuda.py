"""The functions of sgl-kernel's names on a GPU: the same tests, published shapes, capture."""

import inspect
import itertools
from collections.abc import Callable

import pytest
import test_sgl_matmul as matmul
import test_sgl_moe as moe
import test_sgl_quantize as quantize
import test_sgl_router as router
import torch
from sgl import (
    BF16,
    E4M3,
    FP16,
    INT8,
    blocks,
    hold_equal,
    hold_same,
    row_scaled,
    same,
    scales,
)

import qinductor.kernels as sgl_kernel
from qinductor.kernels import sgl_moe_matmul_triton as moe_family
from qinductor.kernels import sgl_moe_rows as moe_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")
TOKENS = (1, 4, 16, 64, 127, 128, 512, 1024, 4096, 8192)
HIDDEN = (512, 1024, 1536, 2048, 4096, 7168, 16384)

for _module in (matmul, quantize, moe, router):  # every test that asks for a device
    for _name, _test in list(vars(_module).items()):
        if _name.startswith("test_") and "device" in inspect.signature(_test).parameters:
            globals()[f"{_name}_{_module.__name__[9:]}"] = _test


@pytest.fixture
def device():
    return "cuda"


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=["e4m3", "int8"])
def test_published_shapes_of_groups(device, dtype, hidden):
    for tokens, layout in itertools.product(TOKENS, ("row", "column", "column padded", "packed")):
        x = torch.randn(tokens, hidden, device=device).to(BF16)
        q, s = quantize.grouped(x, 128, dtype, layout)
        codes, found = quantize.wanted_of(x, 128, dtype, layout)
        hold_same(s, found, f"scales {tokens} {layout}")
        hold_same(q, codes, f"codes {tokens} {layout}")


@pytest.mark.parametrize("experts", [8, 16, 32, 48])
def test_published_shapes_of_masks(device, experts):
    for tokens in (1, 4, 8, 32, 512, 2048, 6144):
        if experts * tokens > 1 << 17:
            tokens = (1 << 17) // experts
        x = torch.randn(experts, tokens, 4096, device=device).to(BF16)
        codes, found = quantize.wanted_of(x, 128, E4M3, "packed", silu=True)
        for counts in (
            torch.full((experts,), tokens),
            torch.zeros(experts),
            torch.randint(tokens + 1, (experts,)),
            torch.where(torch.arange(experts) == 1, tokens, 1),
        ):
            masked_m = counts.to(device, torch.int32)
            q, s = quantize.grouped(x, 128, layout="packed", silu=True, masked_m=masked_m)
            taken = torch.arange(tokens, device=device) < masked_m[:, None]
            q, wanted = q.view(torch.uint8), codes.view(torch.uint8)
            hold_same(q[taken], wanted[taken], f"codes {tokens}")
            hold_same(s[taken], found[taken], f"scales {tokens}")
            assert (q[~taken] == 0x55).all() and (s[~taken] == 77).all()


@pytest.mark.parametrize("source", [BF16, FP16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_published_shapes_of_rows_and_tensors(device, source):
    for tokens, hidden in itertools.product((1, 128, 512, 4096), (512, 1368, 2048, 4096, 7168)):
        x = torch.randn(tokens, hidden, device=device).to(source)
        q, s = quantize.codes_like(x, hidden), torch.empty(tokens, 1, device=device)
        sgl_kernel.sgl_per_token_quant_fp8(x, q, s)
        hold_same(s, quantize.rows(x)[1], f"scales {tokens} {hidden}")
        hold_same(q, quantize.rows(x)[0], f"codes {tokens} {hidden}")
        one = torch.full((1,), 1e6, device=device)
        sgl_kernel.sgl_per_tensor_quant_fp8(x, q, one, False)
        hold_same(one, quantize.whole(x)[1], f"scale {tokens} {hidden}")
        hold_same(q, quantize.whole(x)[0], f"codes {tokens} {hidden}")


@pytest.mark.parametrize("out", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("k", [512, 4096, 16384])
def test_published_shapes_of_products(device, k, out):
    for m, n in itertools.product((1, 128, 512, 1024, 4096), (16, 128, 512, 4096)):
        a, b, sa, sb = matmul.uniform(m, n, k, device)
        for bias in (None, torch.randn(n, device=device).to(out)):
            found = sgl_kernel.fp8_scaled_mm(a, b, sa, sb, out, bias)
            matmul.near(found, row_scaled(a, b, sa, sb, out, bias))
        if n % 128 == 0:
            sa = matmul.column_major(torch.randn(m, k // 128, device=device) * 0.001)
            sb = matmul.column_major(torch.randn(k // 128, n // 128, device=device) * 0.001)
            found = sgl_kernel.fp8_blockwise_scaled_mm(a, b, sa, sb, out)
            matmul.near(found, blocks(a, b.t(), sa, sb.t(), out, 128, 128))


@pytest.mark.parametrize("out", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("k", [512, 4096, 16384])
def test_published_shapes_of_int8_products(device, k, out):
    for m, n in itertools.product((1, 16, 32, 128, 1024, 8192), (16, 128, 1024, 8192)):
        a, b = (
            (torch.randn(rows, k, device=device) * 5).round().clamp(-128, 127).to(INT8)
            for rows in (m, n)
        )
        sa, sb = torch.randn(m, device=device), torch.randn(n, device=device)
        for bias in (None, torch.randn(n, device=device).to(out)):
            found = sgl_kernel.int8_scaled_mm(a, b.t(), sa, sb, out, bias)
            hold_equal(found, row_scaled(a, b.t(), sa, sb, out, bias), f"{m} {n}")


@pytest.mark.parametrize("shape", [(2048, 1024, 512), (2048, 2048, 512), (2048, 1024, 2048),
                                   (4096, 2048, 512)], ids=str)  # fmt: skip
def test_published_shapes_of_nt(device, shape):
    for name in ("32", "128"):
        given, (gn, gk) = matmul.RECIPES[name]
        a, b = matmul.nt(*shape, device, gn, gk)
        d = torch.empty(shape[:2], dtype=BF16, device=device)
        sgl_kernel.fp8_gemm_nt(a, (b[0], matmul.column_major(b[1])), d, **given)
        hold_equal(d, blocks(a[0], b[0], a[1], b[1], BF16, gn, gk), name)


@pytest.mark.parametrize(
    "shape", [(1152, 5120), (512, 5120), (5120, 288), (5120, 576), (4096, 1280)], ids=str
)
def test_layers_of_block_32_models(device, shape):
    n, k = shape
    for m in (1, 3, 64, 300):
        a, b = matmul.nt(m, n, k, device, 32, 32, exact=False)
        d = torch.empty(m, n, dtype=BF16, device=device)
        sgl_kernel.fp8_gemm_nt(a, b, d, recipe=(1, 32, 32))
        assert matmul.distance(d, blocks(a[0], b[0], a[1], b[1], BF16, 32, 32)) < 1e-3


def heads(m: int, n: int, k: int, device: str) -> tuple[torch.Tensor, ...]:
    a = matmul.integers((128, m, k), device)
    return a, matmul.integers((128, n, k), device).mT


def test_absorbed_heads(device):
    """The batched products of an absorbed latent attention, B in both orders."""
    one = torch.full((1,), 0.25, device=device)
    for (n, k), m in itertools.product(((512, 128), (128, 512)), (1, 16, 200)):
        a, b = heads(m, n, k, device)
        wanted = (torch.bmm(a.float(), b.float()) * 0.0625).to(BF16)
        for w in (b, b.contiguous()):
            hold_equal(sgl_kernel.bmm_fp8(a, w, one, one, BF16), wanted, f"{m} {n} {k}")


def test_batched_codes_that_are_no_numbers(device):
    one = torch.ones(1, device=device)
    b = torch.ones(1, 1, 16, device=device).to(E4M3)
    for dtype in (E4M3, torch.float8_e5m2):
        a = torch.arange(256, dtype=torch.uint8, device=device).view(dtype).reshape(1, 256, 1)
        found = sgl_kernel.bmm_fp8(a, b, one, one, BF16)
        hold_equal(found, a.to(BF16).expand(found.shape))


def calls(device: str) -> list[tuple[Callable[[], object], torch.Tensor, list[torch.Tensor]]]:
    """(a call in place, its first operand, its results) of every function."""
    found: list[tuple[Callable[[], object], torch.Tensor, list[torch.Tensor]]] = []
    x = torch.randn(4, 64, 1024, device=device).to(BF16)
    masked_m = torch.tensor([0, 5, 64, 33], dtype=torch.int32, device=device)
    for layout in ("row", "column", "packed"):
        pair = [torch.zeros_like(x, dtype=BF16).to(E4M3), scales((4, 64), 8, layout, device)]
        found.append((lambda p=pair, n=layout: quantize.grouped(x, 128, layout=n, into=p), x, pair))
    half = [torch.zeros(4, 64, 512, device=device).to(E4M3), scales((4, 64), 4, "packed", device)]
    more = {"layout": "packed", "silu": True, "masked_m": masked_m, "into": half}
    found.append((lambda: quantize.grouped(x, 128, **more), x, half))
    row = [torch.zeros_like(pair[0]), torch.zeros(256, device=device)]
    found.append((lambda: sgl_kernel.sgl_per_token_quant_fp8(x, *row), x, row))
    one = [torch.zeros_like(pair[0]), torch.zeros(1, device=device)]
    found.append((lambda: sgl_kernel.sgl_per_tensor_quant_fp8(x, *one, False), x, one))
    found.append((lambda: sgl_kernel.sgl_per_tensor_quant_fp8(x, *one, True), x, one[:1]))
    for i, (op, args, given) in enumerate(matmul.cases(device)):
        if given or i == 7:
            out = given.get("out", args[-2])
            found.append((lambda o=op, a=args, g=given: o(*a, **g), args[0], [out]))
        else:
            held = op(*args).clone()
            into = lambda o=op, a=args, h=held: h.copy_(o(*a))  # noqa: E731
            found.append((into, args[0], [held]))
    return found


@pytest.mark.parametrize("i", range(15))
def test_captured_and_replayed_with_other_inputs(device, i):
    call, x, results = calls(device)[i]
    first = x.clone()
    other = first * -2.5 if first.dtype is BF16 else first.view(INT8).flip(0).view(first.dtype)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    for value in (first, other, first):
        x.copy_(value)
        for result in results:
            result.zero_()
        call()
        wanted = [result.clone() for result in results]
        for result in results:
            result.zero_()
        graph.replay()
        for result, want in zip(results, wanted, strict=True):
            assert same(result, want)


@pytest.mark.parametrize("i", range(15))
def test_no_call_waits_for_the_device(device, i):
    call, *_ = calls(device)[i]
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tensors_on_two_devices_are_refused(device):
    x = torch.zeros(4, 128, dtype=BF16, device=device)
    q, s = torch.zeros(4, 128).to(E4M3), torch.zeros(4, 1)
    near = "tensors are on cuda:0 and cpu; wanted one device"
    with pytest.raises(RuntimeError, match=near):
        sgl_kernel.sgl_per_token_group_quant_8bit(x, q, s, 128, 1e-10, -448.0, 448.0)
    with pytest.raises(RuntimeError, match=near):
        sgl_kernel.sgl_per_token_quant_fp8(x, q, s)
    a = q.to(device)
    w = torch.zeros(128, 128).to(E4M3).t()
    with pytest.raises(RuntimeError, match=near):
        sgl_kernel.fp8_scaled_mm(a, w, s.to(device), s[:1], BF16)
    with pytest.raises(RuntimeError, match=near):
        sgl_kernel.dsv3_router_gemm(x, torch.zeros(8, 128, dtype=BF16))
    with pytest.raises(RuntimeError, match=near):
        sgl_kernel.dsv3_fused_a_gemm(x, x.t(), torch.zeros(4, 4, dtype=BF16))


# Experts ---------------------------------------------------------------------------------------

LADDER = tuple(dict.fromkeys(text for texts in moe_family.LADDER.values() for text in texts))
PARTS = ("m16.n64.k256.s4.w4.p4.l16", "m32.n64.k128.s3.w4.p3.l16")
LOADS = (
    (3, 5, 2, 7), (0, 40, 0, 1), (300, 0, 0, 1), (0, 0, 0, 0), (33, 64, 65, 128), (129, 17, 16, 9),
)  # fmt: skip


@pytest.mark.parametrize("config", [*LADDER, *PARTS])
def test_configs_of_experts(device, config):
    """Each is exact where sums are, run after run, whatever rows experts have."""
    chosen = moe_family.Config.parse(config)
    for n, k in ((256, 1024), (130, 768), (70, 640)):
        weights = moe.layer(4, n, k, device)
        b, scales = moe.bytes_of(weights[0]), moe.stored(weights[1])
        for counts in LOADS:
            a = moe.small(sum(counts) + 2, k, device)
            want = moe.wanted(a, weights, -0.5, counts, BF16)
            offsets, problems = moe.sizes(counts, n, k, device)
            for _ in range(5):
                d = torch.full_like(want, 77)
                scale = torch.tensor([-0.5], device=device)
                moe_family.launch(d, a, b, scale, scales, offsets, problems, chosen)
                hold_equal(d, want, f"{counts} {n} {k}")


@pytest.mark.parametrize("shape", [(7168, 2048), (2048, 7168)], ids=str)
def test_models_of_experts(device, shape):
    """Sums do not differ from run to run."""
    n, k = shape
    weights = moe.layer(8, n, k, device, exact=False)
    for counts in ((1,) * 8, (0, 9, 0, 0, 3, 20, 0, 0), (64,) * 8, (500, 20, 0, 1, 70, 7, 0, 100)):
        a = torch.randn(sum(counts), k, device=device).to(E4M3)
        found = moe.call(a, weights, 0.02, counts)
        want = moe.wanted(a, weights, 0.02, counts, BF16)
        assert matmul.distance(found, want) < 1e-4
        for _ in range(5):
            assert same(moe.call(a, weights, 0.02, counts), found)


@pytest.mark.parametrize("experts", [8, 257, 1024])
def test_data_of_many_entries(device, experts):
    for shape in ((32768, 8), (131072, 8), (5000, 6)):
        ids = torch.randint(-1, experts + 1, shape, dtype=torch.int32, device=device)
        found, want = (moe.empty_data(ids.numel(), experts, device) for _ in range(2))
        sgl_kernel.get_cutlass_w4a8_moe_mm_data(ids, *found, experts, 2048, 7168)
        moe_rows.data(ids, tuple(want), experts, 2048, 7168)
        for ours, theirs in zip(found, want, strict=True):
            assert torch.equal(ours, theirs)


def test_experts_captured_and_replayed_with_other_ids(device):
    model = moe.Experts(8, 1024, 512, device)
    x, ids, weights = moe.tokens(40, 8, 1024, device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(x, ids, weights)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = model(x, ids, weights)
    one = torch.zeros_like(ids)
    for routed in (ids.clone(), ids.flip(0), one, one - 1, torch.randint_like(ids, 8), one + 7):
        ids.copy_(routed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert same(out, model(x, ids, weights))
        want = model.formula(x, ids, weights)
        assert (out.float() - want).norm() <= 0.03 * want.norm()


def test_no_call_of_experts_waits_for_the_device(device):
    model = moe.Experts(8, 1024, 512, device)
    given = moe.tokens(40, 8, 1024, device)
    model(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_without_float8_is_refused(device, monkeypatch):
    monkeypatch.setattr(moe_family, "capability", lambda device: (8, 0))
    moe_family.missing.cache_clear()
    weights = moe.layer(2, 32, 256, device)
    with pytest.raises(RuntimeError, match=r"capability 8\.0; wanted 8\.9 or later"):
        moe.call(moe.small(3, 256, device), weights, 1.0, (1, 2))
    moe_family.missing.cache_clear()
