"""The Triton family's packed order, configs, refusals and plans: nothing here runs a kernel."""

import dataclasses
import itertools

import pytest
import torch
from products import only
from triton_cases import CUBLAS, MMA, STACKED, TAKEN

from qinductor.contracts import dequantize, difference
from qinductor.errors import Refused
from qinductor.kernels import fragments
from qinductor.kernels.dequant_matmul import CASES, DEQUANT_MATMUL, NVFP4, case
from qinductor.kernels.dequant_matmul_triton import (
    SHARED,
    Config,
    candidates,
    heuristic,
    of_groups,
    widths,
)
from qinductor.op import GRID, INFINITE, Plan, nbytes, single

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_words_are_as_documented(width):
    """Each code, found where the docstring says it is."""
    n, k, steps = 128, 512, 16 // width
    field = torch.randint(0, 1 << width, (n, k)).to(torch.uint8)
    packed = fragments.words(field, width)
    assert packed.dtype is torch.int16
    assert packed.shape == fragments.words_shape(n, k, width) == (2, k // steps // 16, 1024)
    words, codes, seen = packed.tolist(), field.tolist(), set()
    for rows, tile, warp, g, t, i, c, j in itertools.product(
        range(2), range(k // steps // 16), range(4), range(8), range(4), range(4), range(2),
        range(steps),
    ):  # fmt: skip
        half, step = (i % 2, i // 2) if width == 8 else (j // 2 % 2, j // 4 * 4 + i)
        row = 64 * rows + 16 * warp + 8 * (j % 2) + g
        column = 16 * (steps * tile + step) + 8 * half + 2 * t + c
        word = words[rows][tile][((warp * 8 + g) * 4 + t) * 8 + i * 2 + c]
        assert word >> width * j & (1 << width) - 1 == codes[row][column], (row, column)
        seen.add((row, column))
    assert len(seen) == n * k


FORM = DEQUANT_MATMUL.forms[-1]


@pytest.mark.parametrize("chosen", TAKEN, ids=lambda chosen: chosen.name)
def test_the_weight_is_restored_from_fragments(chosen):
    """All that was proved, bit for bit; what packing has rounded is kept beside them."""
    contract, (_, source) = chosen.contract, chosen.make()
    packed = FORM.pack(contract, source)
    specs = {name: (tuple(t.shape), t.dtype) for name, t in packed.items()}
    assert specs == FORM.operands(contract) and all(t.is_contiguous() for t in packed.values())
    whole = FORM.whole(contract, list(packed.values()))
    for ours, given in ((whole, source), (whole.weight, source.weight)):
        for name, value in vars(given).items():
            back = getattr(ours, name)
            if isinstance(value, torch.Tensor):
                assert back.dtype == value.dtype and back.shape == value.shape, name
                assert torch.equal(back.view(torch.uint8), value.view(torch.uint8)), name
            elif name != "weight":
                assert back == value, name


@pytest.mark.parametrize("chosen", [*TAKEN, *STACKED], ids=lambda chosen: chosen.name)
def test_a_plan_that_restores_packs_codes_once(chosen):
    one, experts = single(chosen.contract)
    plan = Plan(((INFINITE, "triton.mma"),), whole=True)
    codes = next(iter(DEQUANT_MATMUL.specification.operands(one)))
    assert codes not in plan.packs(DEQUANT_MATMUL, chosen.contract)
    sources = [chosen.make(i)[1] for i in range(max(1, experts))]
    packed = plan.pack(DEQUANT_MATMUL, chosen.contract, sources if experts else sources[0])
    assert list(packed) == list(plan.packs(DEQUANT_MATMUL, chosen.contract))
    _, alone = DEQUANT_MATMUL.weight(chosen.contract)
    for source, whole in zip(sources, DEQUANT_MATMUL.restored(alone, packed), strict=True):
        assert not difference(dequantize(whole.weight), dequantize(source.weight))


@pytest.mark.parametrize(
    "made",
    [case("int4", 1, 4096, 4096, 1, 128), case("uint4", 1, 4096, 14336, 1, 128, arithmetic=
     "(q-z)*s", zero=torch.int8), case("int8", 1, 4096, 4096, 1, 4096),
     case("float8_e4m3fn", 1, 4096, 7168, 128, 128, scale=FP32, compute=FP32),
     case("float4_e2m1fn", 1, 4096, 4096, 1, 32)],
    ids=lambda made: made.name,
)  # fmt: skip
def test_memory_of_a_weight_that_was_replaced(made):
    """What is kept of a weight is what its codes and scales take, and 5 % at most."""
    plan = Plan(((INFINITE, "triton.mma"),), whole=True)
    kept = sum(nbytes(plan.packs(DEQUANT_MATMUL, made.contract)).values())
    quantised = sum(nbytes(DEQUANT_MATMUL.specification.operands(made.contract)).values())
    assert kept <= 1.05 * quantised, f"{kept / quantised:.3f} times"


@pytest.mark.parametrize(
    ("made", "times"),
    [(case("float4_e2m1fn", 1, 4096, 4096, 1, 16, arithmetic="q*s*t", **NVFP4), 1.34),
     (case("float4_e2m1fn", 1, 4096, 4096, 1, 32, scale=torch.float8_e8m0fnu), 1.12)],
    ids=["NVFP4", "MXFP4"],
)  # fmt: skip
def test_memory_where_scales_of_8_bits_become_wider(made, times):
    """As the README says."""
    plan = Plan(((INFINITE, "triton.mma"),), whole=True)
    kept = sum(nbytes(plan.packs(DEQUANT_MATMUL, made.contract)).values())
    quantised = sum(nbytes(DEQUANT_MATMUL.specification.operands(made.contract)).values())
    assert times - 0.02 < kept / quantised <= times


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_grid_of_16_bits_is_as_documented(dtype):
    values = torch.randn(128, 3).to(dtype)
    packed = fragments.grid(values)
    assert fragments.grid_spec(128, 3, dtype) == ((3, 64), torch.int32)
    assert packed.shape == (3, 64) and packed.dtype is torch.int32 and packed.is_contiguous()
    bits = (values.view(torch.int16).int() & 0xFFFF).tolist()
    for j, p, g in itertools.product(range(3), range(8), range(8)):
        word = int(packed[j, 8 * p + g]) & 0xFFFFFFFF
        assert word == bits[16 * p + g][j] | bits[16 * p + g + 8][j] << 16


def test_a_grid_of_fp32_is_as_documented():
    values = torch.randn(128, 3)
    assert fragments.grid_spec(128, 3, FP32) == ((3, 128), FP32)
    assert torch.equal(fragments.grid(values), values.t())


def test_padded():
    for bits, (n, k), want in (
        (4, (1, 1), (128, 128)),
        (3, (128, 256), (128, 256)),
        (3, (129, 257), (256, 512)),
        (8, (130, 4224), (256, 4224)),
        (7, (130, 4224), (256, 4352)),
    ):
        form = case(f"uint{bits}", 1, n, k, 1, k).contract.weight
        assert fragments.padded(n, k, widths(form)) == want


# Configs --------------------------------------------------------------------------------------


def test_configs_as_text():
    config = Config(bm=16, bn=64, bk=128, split=4, warps=8, stages=3)
    assert str(config) == "m16.n64.k128.s4.w8.p3" and Config.parse(str(config)) == config
    for text in ("", "m16.n64.k128.s4.w4", "m16.n64.k128.s4.w4.p3.", "m-1.n64.k128.s4.w4.p3", "m"):
        with pytest.raises(ValueError, match=r"no config of triton.mma: .*; wanted such as"):
            Config.parse(text)


SHAPES = ((8, 96), (8, 8192), (48, 64), (4096, 4096), (4096, 4224), (28672, 4096), (128256, 2048))
FORMATS = ("int1", "int2", "int3", "int4", "uint7", "int8", "float8_e4m3fn", "table4")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codes", FORMATS)
def test_every_candidate_is_legal(codes, shape):
    n, k = shape
    contract = case(codes, 1, n, k, 1, 32).contract
    least = 256 // min(widths(contract.weight))
    padded = fragments.padded(n, k, widths(contract.weight))[1]
    for m in GRID:
        texts = MMA.configs(contract, m)
        assert texts == candidates(contract, m) and len(set(texts)) == len(texts)
        found = [Config.parse(text) for text in texts]
        assert found[0] == heuristic(contract, m)
        for config in found:
            taken = min(config.bk, padded & -padded)  # as `launch` has it
            assert padded % taken == 0 and taken >= least, config
            assert config.bk & config.bk - 1 == 0 and config.bm in (16, 32, 64, 128)
            assert config.bn in (64, 128) and config.bn * config.bm <= 128 * 128
            assert config.warps in (4, 8) and config.stages > 1
            assert config.shared(contract) <= SHARED, config
            assert 1 <= config.split and config.split * taken <= max(k, taken), config
            only(f"triton.mma@{config}")


def test_few_rows_get_small_tiles_and_parts_fill_the_device():
    contract = case("int4", 1, 4096, 4096, 1, 128).contract
    tiles = [heuristic(contract, m).bm for m in (1, 16, 17, 32, 33, 64, 65, 8192)]
    assert tiles == [16, 16, 32, 32, 64, 64, 128, 128]
    assert heuristic(contract, 1).split > 1 == heuristic(contract, 8192).split


def test_experts_fill_the_device_without_parts():
    """Sums of parts of all experts' rows would be written and read again for nothing. Tiles hold
    twice the mean: one with more rows than a tile has its codes taken apart twice."""
    contract = case("int4", 1, 4096, 7168, 1, 128).contract
    for rows, bm in ((32, 16), (256, 16), (512, 32), (1024, 64), (4096, 128)):
        config = of_groups(contract, torch.empty(rows, 7168), ends := torch.empty(32))
        assert (config.bm, config.bn, config.split) == (bm, 128, 1)
    few = of_groups(contract, torch.empty(2, 7168), ends)  # of two experts
    assert few == heuristic(contract, 1, 2) and few.split > 1


def test_a_config_that_is_no_config_is_an_error():
    x, source = CASES[0].make()
    held = list(MMA.pack(CASES[0].contract, source).values())
    with pytest.raises(ValueError, match="no config of triton.mma: 'large'"):
        MMA.run(CASES[0].contract, x, held, "large")


# What is refused ------------------------------------------------------------------------------

ZERO = {"arithmetic": "(q-z)*s", "zero": torch.int16}


@pytest.mark.parametrize("codes", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"])
def test_codes_that_are_no_number(codes):
    contract = case(codes, 1, 32, 64, 1, 32).contract
    _, source = dataclasses.replace(CASES[0], contract=contract).make()
    assert MMA.pack(contract, source)
    bits = source.weight.codes.view(torch.uint8)
    bits[3, 5] = {"float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2": 0x7C}[codes]
    for provider in (MMA, CUBLAS):
        with pytest.raises(Refused, match="a code is no finite number"):
            provider.pack(contract, source)


@pytest.mark.parametrize(
    ("codes", "x", "inner", "zero", "reason"),
    [
        ("uint4", BF16, BF16, 128, None),
        ("uint4", BF16, BF16, 129, "zeros must be from -384 to 128; they are 129 to 129"),
        ("uint4", FP16, FP16, 1024, None),
        ("uint4", FP16, FP16, 1025, "zeros must be from -3072 to 1024; they are 1025 to 1025"),
        ("uint8", BF16, BF16, 256, None),
        ("uint8", BF16, BF16, 257, "zeros must be from -256 to 256; they are 257 to 257"),
        ("uint8", BF16, BF16, -2, "q - z must be exact in bf16; it spans 2 to 257"),
        ("uint8", BF16, FP32, -2, "q - z must be exact in fp32; it spans 2 to 257"),
        ("uint8", FP16, torch.int8, 100, "q - z must be exact in int8; it spans -100 to 155"),
        ("uint8", FP16, torch.int8, 128, None),
        ("int8", FP16, torch.int8, -1, "q - z must be exact in int8; it spans -127 to 128"),
        ("int8", FP16, torch.int16, -1, None),
        ("uint4", BF16, torch.uint8, 1, "q - z must be exact in uint8; it spans -1 to 14"),
        ("uint4", BF16, torch.uint8, 0, None),
    ],
)
def test_zeros_that_would_be_rounded_or_wrap(codes, x, inner, zero, reason):
    contract = case(codes, 1, 32, 64, 1, 32, x, inner=inner, **ZERO).contract
    _, source = dataclasses.replace(CASES[0], contract=contract).make()
    low, high = (-128, 127) if codes == "int8" else (0, 255 if codes == "uint8" else 15)
    source.weight.codes[0, :2] = torch.tensor([low, high])
    source.weight.zero.fill_(zero)
    for provider in (MMA, CUBLAS):
        if reason is None:
            assert provider.pack(contract, source)
            continue
        with pytest.raises(Refused) as caught:
            provider.pack(contract, source)
        assert reason in caught.value.reason


# Plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("chosen", TAKEN, ids=lambda chosen: chosen.name)
def test_no_plan_needs_the_reference(chosen, target):
    for m in (None, *GRID[::3]):
        plan = DEQUANT_MATMUL.plan(chosen.contract, target, m)
        assert not any(p.reference for p in plan.providers(DEQUANT_MATMUL)), plan
        assert Plan.parse(str(plan)) == plan


def test_w_is_written_out_for_many_rows_alone():
    contract = case("int4", 1, 28672, 4096, 1, 128, FP16).contract
    first, last = (DEQUANT_MATMUL.plan(contract, "sm_90", m).steps[0][1] for m in (1, 8192))
    assert first.startswith("triton.mma@") and last == "triton.dequant_cublas"


def test_what_no_provider_takes_says_why():
    refused = [chosen for chosen in CASES if MMA.why_not(chosen.contract) is not None]
    assert len(refused) == len(CASES) - sum(chosen in TAKEN for chosen in CASES) > 0
    for chosen in refused:
        with pytest.raises(Refused) as caught:
            DEQUANT_MATMUL.plan(chosen.contract, "sm_90", None)
        for provider in (MMA, CUBLAS):
            assert f"{provider.name}: {provider.why_not(chosen.contract)}" in caught.value.reason
