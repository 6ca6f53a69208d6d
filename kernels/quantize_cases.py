"""Named contracts of activation quantisers, and inputs for them: for tests, tuner and benchmark."""

import dataclasses
import math
from typing import Any

import torch

from qinductor.kernels.quantize import Quantize, Source

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
INT8, UINT8 = torch.int8, torch.uint8
BOUNDS = {
    E4M3: (-448.0, 448.0, 448.0),
    E5M2: (-57344.0, 57344.0, 57344.0),
    INT8: (-128.0, 127.0, 127.0),
    UINT8: (0.0, 255.0, 255.0),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """name, rows, contract"""

    name: str
    m: int
    contract: Quantize

    def inputs(self, seed: int = 0, device: str = "cpu") -> list[torch.Tensor]:
        """Random inputs."""
        g = torch.Generator().manual_seed(seed)
        return [t.to(device) for t in _inputs(self.contract, self.m, g, hostile=False)]

    def hostile(self, device: str = "cpu") -> list[torch.Tensor]:
        """Rows of zeros, subnormals, powers of two and their neighbours, ties, one value, huge
        values, infinities, nan; `m` has no say in how many."""
        g = torch.Generator().manual_seed(0)
        return [t.to(device) for t in _inputs(self.contract, 0, g, hostile=True)]


def contract(
    k: int,
    codes: torch.dtype = E4M3,
    group: int = 128,
    x: torch.dtype = BF16,
    *,
    source: Source | None = None,
    clamped: bool = True,
    **fields: Any,
) -> Quantize:
    """A contract in float32, with the usual bounds of the codes; `fields` are any of its others."""
    low, high, qmax = BOUNDS[codes]
    found: dict[str, Any] = {
        "scale": FP32, "qmax": qmax, "compute": FP32, "inner": FP32,
        "low": low if clamped else None, "high": high if clamped else None,
    }  # fmt: skip
    found.update(fields)
    return Quantize(k, x, source or Source(y=x), codes, group, **found)


def source(
    activation: str = "", gate: str = "halves", x: torch.dtype = BF16, **more: Any
) -> Source:
    """A source, rounded as eager rounds in the dtype of x."""
    more = {"inner": x if activation else None, "y": x, **more}
    return Source(activation=activation, gate=gate, **more)


V2: dict[str, Any] = {"least": 1e-10, "inverse": True, "quotient": "x*(q/a)"}
UE8M0: dict[str, Any] = {"least": 1e-10, "inverse": True, "power": "up", "quotient": "x*(1/s)"}
MX: dict[str, Any] = {"power": "log2_up", "quotient": "x*(1/s)", "guard": True}
GUARDED: dict[str, Any] = {"inverse": True, "quotient": "x*(1/s)", "guard": True}
TENSOR: dict[str, Any] = {"group": 0, "quotient": "x*(1/s)", "guard": True}
ASYMMETRIC: dict[str, Any] = {"zero": torch.int32, "empty": 1.0}
SILU, RMS = source("silu"), Source(y=BF16, norm="rms", eps=1e-6)
ADDED = Source(y=BF16, norm="add+rms", eps=1e-5)


ACTIVATIONS = ("silu", "x*sigmoid", "gelu", "gelu_tanh", "relu2")
Named = dict[str, tuple[int, Quantize]]


def _of_sgl_kernel() -> Named:
    """name -> (rows, contract)"""
    return {
        "group v2": (5, contract(512, **V2)),
        "group v2 int8": (3, contract(384, INT8, truncate=True, **V2)),
        "group v2 columns": (5, contract(384, layout="column_padded", **V2)),
        "group 16 v2": (3, contract(80, group=16, x=FP16, source=Source(y=FP16), **V2)),
        "ue8m0": (5, contract(640, layout="column", **UE8M0)),
        "ue8m0 packed": (5, contract(640, scale=torch.int32, layout="column_padded", **UE8M0)),
        "ue8m0 silu packed": (
            6, contract(640, source=SILU, scale=torch.int32, layout="column_padded", **UE8M0)
        ),
        "token guarded": (5, contract(1000, group=1000, **GUARDED)),
        "token guarded fp32": (
            3, contract(516, group=516, x=FP32, source=Source(y=FP32), **GUARDED)
        ),
        "tensor static": (5, contract(1000, static=True, **TENSOR)),
        "tensor dynamic": (5, contract(1000, **TENSOR)),
    }  # fmt: skip


def _of_groups_and_codes() -> Named:
    return {
        **{f"group {g}": (3, contract(4 * g, group=g)) for g in (8, 16, 32, 64, 256, 96)},
        "groups of 48": (3, contract(240, group=48, layout="column")),
        "group 1": (3, contract(7, group=1, empty=1.0)),
        "token": (3, contract(2048, group=2048)),
        "token odd": (3, contract(1001, group=1001, x=FP16, source=Source(y=FP16))),
        "token e5m2": (3, contract(300, E5M2, 300)),
        "token int8": (4, contract(1536, INT8, 1536, low=-127.0)),
        "token int8 truncated": (4, contract(96, INT8, 96, truncate=True)),
        "token uint8": (4, contract(96, UINT8, 96)),
        "asymmetric": (4, contract(160, UINT8, 32, **ASYMMETRIC)),
        "asymmetric int8": (4, contract(160, INT8, 160, qmax=255.0, zero=INT8, floor=1e-5)),
        "asymmetric tensor": (4, contract(160, UINT8, 0, zero=FP32, floor=1e-5)),
        "asymmetric bf16": (
            4, contract(160, UINT8, 32, zero=BF16, compute=BF16, inner=BF16, scale=BF16, floor=1e-5)
        ),
        "asymmetric span in bf16": (
            4, contract(160, UINT8, 32, x=FP32, source=Source(y=FP32), zero=BF16, compute=BF16,
                        floor=1e-5)
        ),
        "blank": (4, contract(256, blank=1.0)),
        "plus": (4, contract(256, plus=True)),
        "times": (4, contract(256, group=0, static=True, quotient="x*s")),
        "unclamped": (4, contract(256, clamped=False)),
        "unclamped static": (4, contract(256, clamped=False, group=0, static=True)),
        "unclamped e5m2": (4, contract(256, E5M2, 0, clamped=False, static=True)),
        "narrow clamp": (4, contract(256, qmax=240.0, low=-240.0, high=240.0)),
        "wide clamp": (4, contract(256, low=-500.0, high=470.0, static=True, group=0)),
    }  # fmt: skip


def _of_scales() -> Named:
    return {
        "floor": (4, contract(256, floor=1e-6)),
        "least": (4, contract(256, least=1e-4)),
        "empty": (4, contract(256, empty=1.0)),
        "empty reciprocal": (4, contract(256, empty=1.0, quotient="x*(1/s)")),
        **{
            f"power {how}": (4, contract(256, power=how, scale=scale, empty=1.0))
            for how, scale in (("up", E8M0), ("down", FP32), ("nearest", E8M0), ("log2_up", E8M0))
        },
        "scale e8m0, rounded": (4, contract(256, scale=E8M0)),
        "scale bf16": (4, contract(256, scale=BF16)),
        "scale fp16": (4, contract(256, scale=FP16)),
        "packed token": (
            4, contract(96, scale=torch.int32, layout="column_padded", group=96, power="up")
        ),
        "packed 5 groups": (
            6, contract(640, scale=torch.int32, layout="column_padded", power="down", empty=1.0)
        ),
        "packed rows": (6, contract(640, scale=torch.int32, layout="row", power="up", empty=1.0)),
        "packed columns": (6, contract(640, scale=torch.int32, layout="column", **UE8M0)),
        "most": (4, contract(256, most=2.0**9)),
        "mx": (4, contract(256, group=32, scale=E8M0, floor=2.0**-127, most=2.0**127, **MX)),
        "mx of a floor": (4, contract(256, group=32, scale=BF16, floor=1e-3, **MX)),
        "bytes": (4, contract(256, scale=UINT8, power="up", empty=1.0)),
        "bytes, cut off": (6, contract(640, scale=UINT8, layout="column_padded")),
        "tensor bytes": (4, contract(96, group=0, scale=UINT8, power="up", empty=1.0)),
        "tensor e8m0": (4, contract(96, group=0, scale=E8M0, power="up")),
        "column": (6, contract(512, layout="column")),
        "padded": (6, contract(512, layout="column_padded")),
        "compute bf16": (4, contract(256, compute=BF16, inner=BF16, scale=BF16, floor=1e-5)),
        "compute bf16 reciprocal": (
            4, contract(256, compute=BF16, inner=BF16, quotient="x*(1/s)", guard=True)
        ),
        "compute fp16": (
            4, contract(
                256, x=FP16, source=Source(y=FP16), compute=FP16, inner=FP16, inverse=True,
                quotient="x*(q/a)", least=1e-3,
            )
        ),
        "int8 in bf16": (4, contract(256, INT8, 256, compute=BF16, inner=BF16, least=1e-5)),
        "y fp16 of bf16": (4, contract(256, source=Source(y=FP16))),
    }  # fmt: skip


def _of_sources() -> Named:
    return {
        **{f"{name}": (3, contract(256, source=source(name), **V2)) for name in ACTIVATIONS},
        **{
            f"{name} in fp32": (3, contract(256, source=source(name, inner=FP32, y=FP32)))
            for name in ACTIVATIONS
            if name != "gelu_tanh"  # eager's is another in its last bits
        },
        **{
            f"{name} of two, rounded after": (
                3, contract(96, INT8, 96, source=source(name, "two", inner=FP32))
            )
            for name in ("silu", "x*sigmoid")
        },
        "silu swapped": (3, contract(256, source=source("silu", "swapped"))),
        "silu fp16": (3, contract(256, x=FP16, source=source("silu", x=FP16))),
        "silu fp32": (3, contract(256, x=FP32, source=source("silu", x=FP32))),
        "silu limited": (3, contract(256, source=source("silu", limit=7.1))),
        "silu tensor": (5, contract(300, group=0, source=SILU, floor=1e-9)),
        "silu tensor static": (5, contract(300, group=0, static=True, source=SILU)),
        "silu token": (3, contract(1100, group=1100, source=SILU)),
        "relu2 alone": (3, contract(256, source=source("relu2", ""))),
        "gelu_tanh limited alone": (3, contract(256, source=source("gelu_tanh", "", limit=2.0))),
        "product": (3, contract(256, source=source("", "two"))),
        "rms": (4, contract(384, source=RMS, **V2)),
        "rms token": (4, contract(1000, group=1000, source=RMS)),
        "rms tensor": (4, contract(384, group=0, source=RMS, empty=1.0)),
        "rms relu2": (3, contract(256, source=source("relu2", "", norm="rms", eps=0.0))),
        "add rms": (4, contract(384, source=ADDED, **V2)),
        "add rms packed": (
            5, contract(640, source=ADDED, scale=torch.int32, layout="column_padded", **UE8M0)
        ),
        "add rms token fp16": (
            4, contract(512, INT8, 512, FP16, source=dataclasses.replace(ADDED, y=FP16))
        ),
    }  # fmt: skip


CASES = [
    Case(name, m, made)
    for named in (_of_sgl_kernel(), _of_groups_and_codes(), _of_scales(), _of_sources())
    for name, (m, made) in named.items()
]


def _inputs(c: Quantize, m: int, g: torch.Generator, hostile: bool) -> list[torch.Tensor]:
    wide = 2 * c.k if c.source.gate in ("halves", "swapped") else c.k
    count = 2 if c.source.gate == "two" or c.residual else 1

    def made(columns: int) -> torch.Tensor:
        if hostile:
            return battery(c, columns, g)
        spread = torch.exp2(torch.randint(-6, 7, (m, 1), generator=g).to(FP32))
        return (torch.randn(m, columns, generator=g) * spread).to(c.x)

    found = [made(wide) for _ in range(count)]
    if hostile and count == 2:  # other rows meet
        found[1] = found[1].roll(3, 0)
    if c.source.norm:
        found.append((torch.randn(c.k, generator=g) + 1).to(c.x))
    if c.static:
        found.append(torch.tensor([0.037], dtype=FP32).to(c.scale))
    return found


def battery(c: Quantize, columns: int, g: torch.Generator) -> torch.Tensor:
    """[M, columns] in the dtype of x: the hostile rows.

    Of a whole tensor, and where a row is normed, one nan would be everywhere: none is there."""
    dtype = c.x
    info = torch.finfo(dtype)
    unit = info.smallest_normal * info.eps
    random = torch.randn(columns, generator=g, dtype=torch.float64)
    signs = torch.where(torch.rand(columns, generator=g) < 0.5, -1.0, 1.0).double()
    position = torch.arange(columns)
    rows = [torch.zeros(columns).double(), -torch.zeros(columns).double()]
    rows += [random * 2.0**e for e in (-140, -126, -40, -20, -9, -1, 0, 3, 12, 60, 119)]
    rows += [signs * unit * n for n in (1, 3, 447, 600)]
    top = int(math.log2(info.max))
    for e in {-100, -24, -14, -3, 0, 1, 8, 13, 15, 100, top} - set(range(top + 1, 200)):
        near = [2.0**e * (1 + d * info.eps) for d in (-1, -0.5, 0, 1, 2)]
        rows += [random.clamp(-1, 1) * value for value in near]
        rows.append(random.clamp(-1, 1) * 448 * 2.0 ** (e - 10))
        rows += [random.clamp(-1, 1) * 127 * 2.0 ** (e - 9), signs * 2.0**e]
    rows += [torch.full((columns,), value).double() for value in (1.0, -0.3, 448.0, info.max)]
    rows += [
        signs * info.max,
        signs * 464,
        position.double() / 2 - 5,
        (position % 33).double() - 16,
    ]
    peaks = random.clone()  # the largest of each group is there twice, with both signs
    peaks[::8], peaks[1::8] = 7.0, -7.0
    spike = torch.zeros(columns).double()
    spike[columns // 3] = -1e-3
    rows += [peaks, spike, random.abs(), -random.abs()]
    if c.group and not c.source.norm:
        for value in (torch.inf, -torch.inf, torch.nan):
            row = random.clone()
            row[columns // 2] = value
            rows.append(row)
        rows.append(torch.full((columns,), torch.nan).double())
    return torch.stack(rows).to(dtype)
