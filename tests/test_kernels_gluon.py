"""gluon.wgmma: what its programs share out, how it takes codes apart, its machine code, and on an
H100 or H200 its products."""

import itertools
import re
import subprocess
import sys

import pytest
import torch
import triton
from test_kernels import (
    BF16,
    FP16,
    activations,
    call,
    check,
    direct,
    hold,
    on,
    only,
    packed,
    poisoned,
    replays,
)

import qinductor
from qinductor.contracts import dequantize, difference
from qinductor.kernels import dequant_matmul_gluon as host
from qinductor.kernels import dequant_matmul_gluon_kernels as device
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, case
from qinductor.kernels.dequant_matmul_triton_form import device_form
from qinductor.op import M
from qinductor.sass import early_writes

qinductor.load()
PROVIDER = DEQUANT_MATMUL.providers["gluon.wgmma"]
ZERO = {"arithmetic": "(q-z)*s", "zero": torch.int8}
CONFIGS = [
    host.Config(n, m, depth, split)
    for (n, m), tile in host.TILES.items()
    for depth in tile.depths
    for split in (False, True)
]
CASES = (
    case("int4", 1, 512, 1024, 1, 128),
    case("int4", 1, 512, 1024, 1, 128, FP16),
    case("uint4", 1, 512, 1024, 1, 64, **ZERO),
    case("uint4", 1, 512, 1024, 1, 64, FP16, **ZERO),
    case("uint4", 1, 512, 1024, 1, 256, FP16),
    case("int4", 1, 512, 1024, 1, 1024, bias=True),
    case("int4", 1, 512, 1024, 1, 128, bias=True, output_scale=True),
    case("uint4", 1, 512, 1024, 1, 128, permuted=True, **ZERO),
    case("int4", 1, 384, 1024, 1, 128),
    case("int4", 1, 264, 1024, 1, 192),
    case("int4", 1, 512, 4224, 1, 128),
    case("int4", 1, 512, 1000, 1, 1000, FP16),
    case("int4", 1, 512, 1024, 512, 128),
    case("int4", 1, 17152, 512, 1, 128),
    case("int4", 1, 8, 8, 1, 8),
)
by_case = pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: chosen.name)
by_config = pytest.mark.parametrize("config", CONFIGS, ids=str)
sm_90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="wgmma needs an sm_90 GPU",
)


# Configs and schedules ------------------------------------------------------------------------


@by_config
def test_a_config_as_text(config):
    assert host.Config.parse(str(config)) == config
    assert re.fullmatch(r"[a-z0-9.]+", str(config))


@pytest.mark.parametrize(
    "text", ["", "n128", "n128.m256.d1.s2", "n128.m256.d4.s1", "n64.m64.d4.s0"]
)
def test_a_config_that_is_none(text):
    with pytest.raises(ValueError, match="no config of gluon.wgmma: .*; wanted such as n128.m256"):
        host.Config.parse(text)


def test_the_configs_that_an_h200_preferred_are_tried():
    """Measured: (N, K, M) -> the fastest config."""
    best = {
        (28672, 4096, 128): "n256.m128.d4.s0",
        (28672, 4096, 256): "n128.m256.d1.s0",
        (28672, 4096, 512): "n128.m256.d1.s1",
        (28672, 4096, 1024): "n128.m256.d2.s0",
        (4096, 4096, 128): "n128.m64.d4.s1",
        (4096, 4096, 256): "n128.m128.d4.s1",
        (4096, 4096, 512): "n128.m128.d4.s0",
        (4096, 14336, 128): "n128.m128.d4.s1",
        (4096, 14336, 256): "n128.m128.d4.s1",
        (4096, 14336, 512): "n128.m256.d1.s1",
    }
    for (n, k, m), text in best.items():
        contract = case("int4", 1, n, k, 1, 128).contract
        configs = PROVIDER.configs(contract, m)
        assert text in configs, (n, k, m)
        chosen = host.Config.parse(configs[0])
        assert host.microseconds(n, k, m, chosen) <= host.microseconds(
            n, k, m, host.Config.parse(text)
        )


@by_case
def test_there_is_a_config_for_every_m(chosen):
    for m in (1, 2, 64, 65, 100, 128, 1000, 8192):
        configs = PROVIDER.configs(chosen.contract, m)
        assert configs and len(set(configs)) == len(configs)
        assert all(str(host.Config.parse(text)) == text for text in configs)


@by_config
def test_every_slice_of_every_tile_is_multiplied_once(config):
    """The units as the device code has them: `_unit`."""
    for tiles, k, programs in itertools.product(
        (1, 2, 7, 131, 132, 133, 200, 264, 448), (8, 128, 1000, 4096, 4224, 14336), (132, 114, 1)
    ):
        plan = host.scheduled(tiles, k, config, programs)
        assert plan.steps * host.SLICE >= k and plan.steps % config.depth == 0
        seen = []
        for t in range(plan.units):
            past = t - plan.whole
            tile = t if past < 0 else plan.whole + past % plan.rest
            first = 0 if past < 0 else past // plan.rest * plan.chunk
            end = plan.steps if past < 0 else min(first + plan.chunk, plan.steps)
            assert first < end and (end - first) % config.depth == 0
            assert past < plan.rest * plan.parts
            seen += [(tile, step) for step in range(first, end)]
        assert sorted(seen) == list(itertools.product(range(tiles), range(plan.steps)))
        if plan.parts > 1:  # in one turn of all programs
            assert config.split and plan.rest * plan.parts <= programs


def test_few_rows_are_estimated_as_many():
    seconds = PROVIDER.seconds(CASES[0].contract)
    assert seconds.subs(M, 1) == seconds.subs(M, 128) and seconds.subs(M, 129) != seconds.subs(M, 1)


def test_it_is_for_one_target():
    assert PROVIDER.missing() is None, "every Triton that we support has this Gluon"
    targets = ("cpu", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
    assert [target for target in targets if PROVIDER.runs_on(target)] == ["sm_90"]


ANOTHER = """
import sys
sys.modules["triton.experimental.gluon"] = None
import qinductor
qinductor.load()
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL
from qinductor.kernels import dequant_matmul_gluon_kernels as device
provider = DEQUANT_MATMUL.providers["gluon.wgmma"]
assert list(device.compile_checks()) == []
print(provider.missing())
"""


def test_a_triton_without_gluon():
    child = subprocess.run(
        [sys.executable, "-c", ANOTHER], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith(f"Gluon of triton {triton.__version__} is another: ")


def test_x_as_tma_reads_it():
    x = torch.randn(6, 64).bfloat16()
    wide = torch.randn(6, 72).bfloat16()
    assert host.fetchable(x) is x and host.fetchable(x[:1]).data_ptr() == x.data_ptr()
    assert host.fetchable(wide[:, :64]).data_ptr() == wide.data_ptr()
    for other in (x.t().contiguous().t(), wide[:, 1:65], x[:1].expand(6, 64), wide.view(-1)[4:68]):
        given = other if other.dim() == 2 else other[None]
        made = host.fetchable(given)
        assert torch.equal(made, given) and made.data_ptr() % 16 == 0 and made.stride(-1) == 1
        assert made.shape[0] == 1 or made.stride(0) % 8 == 0 and made.stride(0) >= 64


# Codes ----------------------------------------------------------------------------------------


def evaluated(text, dtype, q, s, z):
    """The four registers that the PTX gives, int32, from those of codes, scales and zeros."""
    registers = {"$4": q.to(torch.int64), "$5": s.to(torch.int64), "$7": z.to(torch.int64)}

    def value(name):
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    def halves(name):
        return value(name).to(torch.int32).expand(q.shape).contiguous().view(dtype).double()

    def packed_pair(values):
        return values.to(dtype).view(torch.int32).to(torch.int64) & 0xFFFFFFFF

    for line in filter(None, map(str.strip, re.sub(r"[{}]", "", text).split(";"))):
        operation, _, operands = line.partition(" ")
        out, *given = operands.replace(" ", "").split(",")
        if operation == ".reg":
            continue
        if operation == "mov.b32":
            registers[out] = value(given[0]) & 0xFFFFFFFF
        elif operation == "shr.b32":
            registers[out] = (value(given[0]) & 0xFFFFFFFF) >> int(given[1])
        elif operation == "lop3.b32":
            assert given[3] == "0xEA"
            registers[out] = value(given[0]) & value(given[1]) | value(given[2])
        elif operation == "prmt.b32":
            half = value(given[0]) >> {"0x1010": 0, "0x3232": 16}[given[2]] & 0xFFFF
            registers[out] = half << 16 | half
        elif operation == "fma.rn.bf16x2":
            a, b, c = map(halves, given)
            registers[out] = packed_pair(a * b + c)
        elif operation in ("sub.rn.f16x2", "mul.rn.f16x2"):
            a, b = map(halves, given)
            registers[out] = packed_pair(a - b if operation.startswith("sub") else a * b)
        else:
            raise AssertionError(line)
    return [registers[f"${j}"].to(torch.int32).view(dtype) for j in range(4)]


@pytest.mark.parametrize("chosen", CASES[:6], ids=lambda chosen: chosen.name)
def test_codes_become_the_weight_bit_by_bit(chosen):
    contract, source = chosen.contract, chosen.make()[1]
    n, k, form = contract.weight.n, contract.weight.k, device_form(contract)
    tensors = PROVIDER.pack(contract, source)
    # rows / 64, slices, warp, g, t, i: one register of two columns c
    q = tensors["fragments4"].view(torch.int32).reshape(n // 64, k // 64, 4, 8, 4, 4)

    def by_lane(grid):
        """Of the pair of rows g and g + 8 of a warp, in each slice."""
        grid = grid.repeat_interleave(k // 64 // grid.shape[0], 0).view(k // 64, n // 64, 4, 8)
        return grid.transpose(0, 1)[..., None, None].expand(q.shape)

    s = by_lane(tensors["fragments_scale"])
    z = by_lane(tensors["fragments_zero"]) if form.zero else s
    got = evaluated(device._decoding(form), contract.x, q, s, z)
    want = dequantize(source.weight)
    # rows / 64, warp, r, g, slices, i, half, t, c
    want = want.view(n // 64, 4, 2, 8, k // 64, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    for j, pair in enumerate(got):
        expected = want[..., j // 2, j % 2, :].contiguous()
        assert not difference(pair.view(expected.shape), expected), f"place {j}"


# Machine code ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "compile_one"), [*device.compile_checks()])
def test_compiles_without_spills_and_without_early_writes(name, compile_one):
    compile_one()


LOOP = """
.L_x_1:
        /*0100*/                   LDS.128 R{loaded}, [R2] ;
        /*0110*/                   {product} R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, {kept} ;
        /*0130*/               @P0 BRA `(.L_x_1) ;
        /*0140*/                   STS [R8], R9 ;
"""


@pytest.mark.parametrize(
    ("loaded", "kept", "early"),
    [(8, "0x0", 0), (8, "0x1", 1), (6, "0x1", 1), (11, "0x1", 1), (12, "0x1", 0), (4, "0x1", 0)],
)
@pytest.mark.parametrize("product", ["HGMMA.64x64x16.F32.BF16", "QGMMA.64x64x32.F32.E4M3.E4M3"])
def test_a_register_that_is_written_early(loaded, kept, early, product):
    found = early_writes(LOOP.format(loaded=loaded, kept=kept, product=product))
    assert found.left and len(found.writes) == early, found
    assert all("0100 LDS.128" in write and "read by 0110" in write for write in found.writes)


# On the GPU -----------------------------------------------------------------------------------


def on_gpu(chosen):
    """(contract, operands, packed tensors) on the GPU."""
    source = on(chosen.make()[1], "cuda")
    return chosen.contract, source, packed(only(PROVIDER.name), chosen.contract, source)


@sm_90
@by_config
@by_case
def test_products(chosen, config):
    contract, source, tensors = on_gpu(chosen)
    route = f"{PROVIDER.name}@{config}"
    for m in (1, 7, 64, 100, 129, 257, 1000):
        xs = activations(contract, m, "cuda")
        with poisoned():
            ours = [direct(route, contract, x, tensors) for x in xs]
            assert not difference(direct(route, contract, xs[0], tensors), ours[0])
        for out in ours:
            check(out, contract, m)
        hold(contract, ours, xs, source)
    replays(contract, only(route), tensors, xs[0])


@sm_90
@by_config
def test_fresh_inputs_many_times(config):
    """A register or a slice that is overwritten early shows now and then."""
    contract, source, tensors = on_gpu(case("int4", 1, 4096, 4096, 1, 128))
    w = dequantize(source.weight).float()
    torch.backends.cuda.matmul.allow_tf32 = False
    for m in (512, 77, 300) * 10:
        x = torch.randn(m, 4096, device="cuda", dtype=BF16)
        out = direct(f"{PROVIDER.name}@{config}", contract, x, tensors).float()
        want = x.float() @ w.t()
        assert (out - want).abs().max() < 6e-3 * want.abs().max()


@sm_90
def test_two_streams_at_once():
    """Parts of the sums of one launch are never those of another."""
    contract, _, tensors = on_gpu(case("int4", 1, 4096, 4096, 1, 128))
    route = f"{PROVIDER.name}@n128.m128.d4.s1"
    xs = [torch.randn(128, 4096, device="cuda", dtype=BF16) for _ in range(2)]
    alone = [direct(route, contract, x, tensors) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(50):
        outs = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(call(x, tensors, contract, only(route)))
        torch.cuda.synchronize()
        for out, want in zip(outs, alone, strict=True):
            assert not difference(out, want)


@sm_90
@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded", "one element on"])
def test_x_in_other_layouts(layout):
    contract, source, tensors = on_gpu(CASES[0])
    k = contract.weight.k
    x = torch.randn(65, k + 8, device="cuda", dtype=BF16)
    given = {
        "sliced": x[:, :k],
        "transposed": x[:, :k].t().contiguous().t(),
        "expanded": x[:1, :k].expand(65, k),
        "one element on": x[:, 1 : k + 1],
    }[layout]
    ours = direct(PROVIDER.name, contract, given, tensors)
    assert not difference(ours, direct(PROVIDER.name, contract, given.contiguous(), tensors))
    hold(contract, [ours], [given], source)


def test_this_triton_is_one_that_was_tried():
    assert tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
