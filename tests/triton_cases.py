"""Contracts and configs on which the Triton family is tested, interpreted and on a GPU."""

from typing import Any

import torch

import qinductor
from qinductor.kernels.dequant_matmul import CASES, DEQUANT_MATMUL, NVFP4, DequantMatmul, case
from qinductor.kernels.dequant_matmul_experts import CASES as EXPERTS
from qinductor.kernels.dequant_matmul_triton import Config, widths

qinductor.load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MMA, CUBLAS = (DEQUANT_MATMUL.providers[f"triton.{name}"] for name in ("mma", "dequant_cublas"))
E8M0: dict[str, Any] = {"scale": torch.float8_e8m0fnu}
# What no case has: every width and float, odd sizes, groups, roundings and arithmetics.
CORNERS = (
    *(case(f"uint{bits}", 5, 33, 65, 1, 65) for bits in range(1, 9)),
    *(case(f"int{bits}", 3, 20, 100, 1, 16, FP16, bias=True) for bits in range(1, 9)),
    *(case(f"table{bits}", 2, 33, 100, 1, 48) for bits in range(1, 9)),
    case("int4", 3, 130, 65, 1, 16),
    case("int8", 3, 48, 640, 1, 512),  # of K, padded too, the last group is a part
    case("int4", 3, 64, 100, 1, 100, FP16, output_scale=True, bias=True),
    case("int4", 2, 64, 96, 64, 48, arithmetic="q/s"),
    case("uint4", 2, 200, 300, 96, 80, arithmetic="(q-z)*s", zero=torch.uint8),
    case("uint4", 2, 33, 65, 1, 32, arithmetic="q*s+z", zero=BF16, compute=FP32, scale=FP32),
    case("uint4", 2, 33, 64, 1, 16, FP16, arithmetic="q*s-z*s", zero=FP16, compute=FP32),
    case("uint4", 2, 33, 64, 1, 16, arithmetic="(q-z)*s", zero=FP32, inner=FP32, compute=FP32),
    case("uint4", 2, 33, 64, 1, 32, arithmetic="q/s/t", outer=FP32, scale=FP32, compute=FP32),
    case("uint3", 2, 33, 64, 1, 32, FP16, arithmetic="q*t+z", zero=FP16, outer=FP32),
    case("int8", 2, 48, 64, 1, 32, FP16, arithmetic="(q-z)/s", zero=FP16, compute=FP32),
    case("int8", 2, 48, 64, 8, 16, arithmetic="q-z", zero=torch.int8, scale=None, permuted=True),
    case("uint8", 2, 48, 64, 1, 32, FP16, arithmetic="(q-z)*s", zero=torch.int16),
    case("uint1", 2, 32, 64, 1, 32, arithmetic="q*s*t-z*s", zero=torch.uint8, outer=BF16),
    case("int4", 2, 64, 64, 1, 32, arithmetic="(q-z)*s", zero=torch.int8, inner=torch.int8),
    case("table4", 2, 32, 64, 1, 64, arithmetic="(q-z)*s", zero=torch.int8, permuted=True),
    case("table3", 2, 32, 64, 1, 64, table=FP32, scale=FP32, compute=FP32),
    case("table8", 2, 32, 64, 1, 32, FP16, table=BF16),
    *(
        case(f"float8_{kind}", 2, 72, 100, 32, 32, x)
        for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
        for x in (BF16, FP16)
    ),
    case("float8_e4m3fn", 2, 33, 64, 1, 16, arithmetic="(q-z)*s", zero=BF16, permuted=True),
    case("float8_e4m3fn", 2, 72, 128, 32, 32, scale=FP32, compute=FP32, output_scale=True),
    case("float8_e5m2fnuz", 2, 16, 32, 1, 32, **E8M0),
    case("float4_e2m1fn", 2, 33, 65, 1, 16, **E8M0),
    case("float4_e2m1fn", 2, 33, 100, 1, 16, FP16, arithmetic="q*s/t", **NVFP4),
)
TAKEN = [chosen for chosen in (*CASES, *CORNERS) if MMA.why_not(chosen.contract) is None]
SMALL = {
    "int4": case("int4", 1, 72, 384, 1, 64, bias=True),
    "int3": case("int3", 1, 72, 320, 1, 32, FP16, output_scale=True, bias=True),
    "fp8": case("float8_e4m3fn", 1, 130, 300, 128, 128),
    "nvfp4": case("float4_e2m1fn", 1, 72, 160, 1, 16, arithmetic="q*s*t", **NVFP4),
    "permuted": case(
        "uint4", 1, 72, 256, 1, 64, arithmetic="(q-z)*s", zero=torch.int8, permuted=True
    ),
}
CONFIGS = (
    "m16.n64.k256.s1.w4.p3",
    "m32.n128.k256.s3.w4.p2",
    "m64.n64.k64.s3.w4.p4",
    "m64.n128.k128.s1.w8.p3",
    "m16.n128.k64.s1.w4.p1",
)
STACKED = [chosen for chosen in EXPERTS if chosen.contract.x is not FP32] + [
    case("table4", 2, 33, 64, 1, 32, FP16, bias=True, experts=3),
    # Three tiles of columns, so that K has parts; a scale and bias are applied after their sum.
    case("int4", 2, 40, 384, 1, 64, experts=2),
    case("int8", 2, 40, 384, 40, 384, arithmetic="q", output_scale=True, bias=True, experts=3),
    case(
        "int4", 2, 72, 384, 1, 64, arithmetic="(q-z)*s*t", zero=torch.int8, outer=BF16, bias=True,
        experts=3,
    ),
]  # fmt: skip


def fitting(config: str, contract: DequantMatmul) -> str:
    """The config, with as many columns as the tiles of this contract's narrowest field need."""
    parsed = Config.parse(config)
    least = 256 // min(widths(contract.weight))
    return config if parsed.bk >= least else config.replace(f".k{parsed.bk}.", f".k{least}.")
