"""Providers of scaled_matmul in torch's own operators, on CUDA and on a CPU."""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.nn import functional

from qinductor.contracts import by_row, short
from qinductor.errors import Refused
from qinductor.kernels import packing
from qinductor.kernels.scaled_matmul import (
    FP32,
    SCALED_MATMUL,
    Operands,
    Reference,
    ScaledMatmul,
    cost,
    longest,
    operands,
    pack,
    step_of,
)
from qinductor.kernels.scaled_matmul_sums import (
    added,
    centred,
    divided,
    experts_why_not,
    scaled,
    signed,
    totals,
    zeros_why_not,
)
from qinductor.op import Spec
from qinductor.rates import BANDWIDTH, RATE, M

INT8, UINT8, BF16, FP16 = torch.int8, torch.uint8, torch.bfloat16, torch.float16
FLOAT8 = E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SEEN = 17  # rows of a that _int_mm takes at least on CUDA
STRIP = 1 << 18  # codes of W that are float32 at a time on a CPU: what its L2 cache holds


def _whole(contract: ScaledMatmul) -> bool:
    """Whether no scale changes along k."""
    w = contract.weight
    return contract.group in (0, w.k) and (w.scale is None or w.bk >= w.k)


def _by_tensor(contract: ScaledMatmul) -> bool:
    """Whether a and W have one scale each."""
    w = contract.weight
    return contract.group == 0 and (w.scale is None or w.bn >= w.n)


class Float8:
    """What the providers of torch's float8 product share."""

    dense = False
    reference = False

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c, w = contract, contract.weight
        if c.zero is not None or c.experts:
            return experts_why_not(c) or "a has zero points; it takes none"
        if c.a not in FLOAT8 or w.storage not in FLOAT8:
            return f"{short(c.a)} times {w.codes}; it takes float8 with float8"
        if c.a is E5M2 and w.storage is E5M2:
            return "both codes are float8_e5m2; it takes one at most"
        if w.arithmetic not in ("q", "q*s") or w.permuted:
            return f"W is {w.arithmetic}{', permuted' * w.permuted}; it takes q and q*s"
        if c.scale is not FP32 or w.scale not in (None, FP32):
            return f"scales are {short(c.scale)} and {short(w.scale)}; it takes fp32"
        if not w.n * w.k or w.n % 16 or w.k % 16:
            return f"W is {w.n}x{w.k}; it takes multiples of 16"
        if c.bias is not None and (c.bias is not c.out or c.out not in (BF16, FP16)):
            return (
                f"the bias is {short(c.bias)}, the result {short(c.out)}; it takes bf16 or fp16 "
                "for both"
            )
        return None

    def pack(self, contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
        w = contract.weight
        found = pack(contract, source)
        scale = found.pop("scale", None)
        if scale is None:
            scale = source.weight.codes.new_ones(w.grid, dtype=FP32)
        return {"codes": found.pop("codes"), **self.scales(contract, scale), **found}

    def scales(self, contract: ScaledMatmul, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError


@functools.cache
def on_cpu() -> bool:
    """Whether this torch's _scaled_mm takes scales of rows on a CPU: 2.13 does, 2.11 does not."""
    a, scale = torch.zeros(16, 16).to(E4M3), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), scale, scale.t(), out_dtype=BF16)
    except (RuntimeError, ValueError):
        return False
    return True


class ScaledMM(Float8):
    """`aten._scaled_mm`: one scale for a tensor each, or one for each row of a and of W."""

    name = "aten.scaled_mm"

    def runs_on(self, target: str) -> bool:
        if target == "cpu":
            return on_cpu()
        return target.startswith("sm_") and int(target[3:]) >= 89

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c = contract
        if reason := super().why_not(contract):
            return reason
        if not _whole(c):
            return f"scales change along K ({c.granularity}, {c.weight.granularity})"
        if not _by_tensor(c) and c.out is not BF16:
            return f"rows have scales and the result is {short(c.out)}; then it takes bf16"
        if not _by_tensor(c) and c.weight.storage is E5M2:
            return "rows have scales and W is float8_e5m2; then it takes float8_e4m3fn"
        if c.out not in (BF16, FP16, FP32):
            return f"the result is {short(c.out)}; it takes bf16, fp16 and fp32"
        return None

    def seconds(self, contract: ScaledMatmul) -> sympy.Expr:
        spent = cost(contract)  # the rates are an H200's
        many = spent["flops"] / 1.7 / RATE
        if _by_tensor(contract):
            return 2.4e-6 + sympy.Max(spent["bytes"] / 0.96 / BANDWIDTH, many, evaluate=False)
        # Programs do not share K.
        few, tile = spent["bytes"] / 0.64 / BANDWIDTH, 2.6e-9 * contract.weight.k
        return 3e-6 + sympy.Max(few, many, tile, evaluate=False)

    def operands(self, contract: ScaledMatmul) -> dict[str, Spec]:
        plain = operands(contract)
        rows = 1 if _by_tensor(contract) else contract.weight.n
        found: dict[str, Spec] = {"codes": plain["codes"], "scale_of_rows": ((1, rows), FP32)}
        return found | {name: plain[name] for name in ("bias",) if name in plain}

    def scales(self, contract: ScaledMatmul, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        if not _by_tensor(contract):
            scale = by_row(contract.weight, scale, contract.weight.n)
        return {"scale_of_rows": scale.reshape(1, -1).contiguous()}

    def run(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        (a, scale), (codes, held, *bias) = inputs, packed
        if _by_tensor(contract):
            scale, held = scale.reshape(()), held.reshape(())
        else:
            scale = scale.reshape(-1).expand(a.shape[0]).contiguous().view(-1, 1)
        return torch._scaled_mm(
            _dense(a), codes.t(), scale, held, bias=bias[0] if bias else None,
            out_dtype=contract.out, use_fast_accum=contract.fast,
        )  # fmt: skip


class ScaledMMBlocks(Float8):
    """`aten._scaled_mm_v2`: a has a scale for 128 columns of a row, W for blocks of 128 x 128."""

    name = "aten.scaled_mm_blocks"

    def runs_on(self, target: str) -> bool:
        return target == "sm_90"

    def missing(self) -> str | None:
        if not hasattr(torch.ops.aten, "_scaled_mm_v2"):
            return f"torch {torch.__version__} has no _scaled_mm_v2 (2.10 has)"
        version = torch.version.cuda
        if version is not None and tuple(map(int, version.split(".")[:2])) < (12, 9):
            return f"cuBLAS of CUDA {version} has no scales of blocks (12.9 has)"
        return None

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c, w = contract, contract.weight
        if reason := super().why_not(contract):
            return reason
        if w.scale is None or (c.group, w.bk, w.bn) != (128, 128, 128):
            return f"scales are {c.granularity} and {w.granularity}; it takes 1x128 and 128x128"
        if {c.a, w.storage} != {E4M3}:
            return f"{short(c.a)} times {w.codes}; it takes float8_e4m3fn with float8_e4m3fn"
        if c.bias is not None or c.out not in (BF16, FP16, FP32):
            return f"the result is {short(c.out)}, the bias {short(c.bias)}; it takes no bias"
        if w.k % 512:
            return f"K is {w.k}; it takes multiples of 512 (four scales of a row of blocks)"
        return None

    def seconds(self, contract: ScaledMatmul) -> sympy.Expr:
        spent = cost(contract)
        few = spent["bytes"] / 0.75 / BANDWIDTH
        return 4e-6 + sympy.Max(few, spent["flops"] / 1.6 / RATE, evaluate=False)

    def operands(self, contract: ScaledMatmul) -> dict[str, Spec]:
        grid = contract.weight.grid
        return {"codes": operands(contract)["codes"], "scale_of_blocks": (grid, FP32)}

    def scales(self, contract: ScaledMatmul, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scale_of_blocks": scale.contiguous()}

    def run(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        (a, scale), (codes, held) = inputs, packed
        kinds = functional.ScalingType
        one, square = kinds.BlockWise1x128, kinds.BlockWise128x128
        m, a, pad = a.shape[0], _dense(a), -a.shape[0] % 4  # cuBLAS takes multiples of 4 rows
        if pad:
            a = functional.pad(a.view(torch.int8), (0, 0, 0, pad)).view(a.dtype)
            scale = functional.pad(scale.t(), (0, pad)).t()
        elif scale.stride() != (1, m):
            scale = scale.t().contiguous().t()
        out: torch.Tensor = torch.ops.aten._scaled_mm_v2(
            a, codes.t(), [scale], [one.value], [], [held.t()], [square.value], [],
            None, contract.out, [], contract.fast,
        )  # fmt: skip
        return out[:m]


class IntMM:
    """`aten._int_mm`: exact sums in int32; then the scales, in float32."""

    name = "aten.int_mm"
    dense = False
    reference = False

    def runs_on(self, target: str) -> bool:
        return target == "cpu" or target.startswith("sm_") and int(target[3:]) >= 80

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c, w = contract, contract.weight
        if c.a not in (INT8, UINT8) or w.codes != "int8":
            return f"{short(c.a)} times {w.codes}; it takes int8 and uint8 with int8"
        if reason := zeros_why_not(c) or experts_why_not(c):
            return reason
        if w.arithmetic not in ("q", "q*s") or w.permuted:
            return f"W is {w.arithmetic}{', permuted' * w.permuted}; it takes q and q*s"
        if not _whole(c):
            return f"scales change along K ({c.granularity}, {w.granularity})"
        if not w.n * w.k or w.n % 8 or w.k % 8:
            return f"W is {w.n}x{w.k}; it takes multiples of 8"
        if w.k > longest(c):
            return f"K is {w.k}; it takes up to {longest(c)} (sums are int32)"
        return None

    def seconds(self, contract: ScaledMatmul) -> sympy.Expr:
        spent = cost(contract)
        sums = 8 * contract.weight.n * M / BANDWIDTH  # written and read
        few, tile = spent["bytes"] / 0.75 / BANDWIDTH, 2.4e-9 * contract.weight.k
        return 1e-6 + sums + sympy.Max(few, spent["flops"] / RATE, tile, evaluate=False)

    def operands(self, contract: ScaledMatmul) -> dict[str, Spec]:
        return operands(contract) | added(contract)

    def pack(self, contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
        return pack(contract, source) | totals(contract, source)

    def run(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        (a, scale, *zero), m = inputs, inputs[0].shape[0]
        given = dict(zip(self.operands(contract), packed, strict=True))
        a = _dense(signed(a))
        if a.is_cuda and m < SEEN:
            a = functional.pad(a, (0, 0, 0, SEEN - m))
        sums = torch._int_mm(a, given["codes"].t())[:m]
        if a.is_cuda and (triton := _epilogue()) is not None:
            return triton.scaled(contract, sums, scale, given, *zero)  # type: ignore[no-any-return]
        return scaled(contract, sums, scale, given, *zero)


@functools.cache
def _epilogue() -> Any:
    """The module that applies scales in one launch; None where there is no Triton."""
    if not importlib.util.find_spec("triton"):
        return None
    from qinductor.kernels import scaled_matmul_triton

    return scaled_matmul_triton


def _dense(a: torch.Tensor) -> torch.Tensor:
    """a with rows that torch's products take: 16 bytes aligned, one after the other."""
    return a if a.is_contiguous() and not a.data_ptr() % 16 else a.clone(
        memory_format=torch.contiguous_format
    )  # fmt: skip


class MMInBlocks(Reference):
    """For any contract on a CPU: float32 products (int32 ones of int8) of strips of W.

    Codes of W become float32 a strip at a time; each block of k with one scale is summed alone."""

    name = "aten.mm_in_blocks"
    reference = False

    def runs_on(self, target: str) -> bool:
        return target == "cpu"

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c, w = contract, contract.weight
        if c.a not in (*FLOAT8, INT8, UINT8) or w.codes not in (
            "float8_e4m3fn", "float8_e5m2", "int8", "int4",
        ):  # fmt: skip
            return f"{short(c.a)} times {w.codes}; it takes float8, 8-bit integers and int4"
        integers = c.a in (INT8, UINT8) and w.storage is INT8
        if c.zero is not None and not integers:
            return f"{short(c.a)} times {w.codes} and zero points; then it takes integers"
        if reason := zeros_why_not(c):
            return reason
        if w.arithmetic not in ("q", "q*s") or w.permuted:
            return f"W is {w.arithmetic}{', permuted' * w.permuted}; it takes q and q*s"
        if not w.n * w.k or integers and w.k > longest(c):
            return f"W is {w.n}x{w.k}; it takes no empty one, of int8 K up to {longest(c)}"
        return None

    def operands(self, contract: ScaledMatmul) -> dict[str, Spec]:
        return super().operands(contract) | added(contract)

    def pack(self, contract: ScaledMatmul, source: Operands) -> dict[str, torch.Tensor]:
        codes = source.weight.codes
        if codes.dtype is E4M3 and not bool(_finite(codes)):
            raise Refused("a code is no finite number, which the kernel would take for one")
        return super().pack(contract, source) | totals(contract, source)

    def run(
        self,
        contract: ScaledMatmul,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        (a, scale, *zeros), c, w = inputs, contract, contract.weight
        given = dict(zip(self.operands(c), packed, strict=True))
        q = packed[0] if w.bits == 8 else packing.unpack(w, packed[0])
        a = signed(a)
        integers = a.dtype is INT8 and q.dtype is INT8
        x = a if integers else a.to(FP32)
        z = [divided(c, zero if c.group else zero.reshape(1, 1)) for zero in zeros]
        out = torch.zeros((a.shape[0], w.n), dtype=FP32)
        step = step_of(c)
        sa = scale.to(FP32).reshape(-1, 1) if not c.group else scale.to(FP32)
        sw = None if w.scale is None else by_row(w, given["scale"].to(FP32), w.n).t()
        rows = max(1, STRIP // w.k)
        for first in range(0, w.n, rows):
            strip = q[first : first + rows]
            y = strip if integers else _float(strip)
            place = out[:, first : first + rows]
            for start in range(0, w.k, step):
                columns = slice(start, min(start + step, w.k))
                part = _product(x[:, columns], y[:, columns])
                for inside, rest in z:
                    at = slice(start // (c.group or w.k), start // (c.group or w.k) + 1)
                    held = given["sums"][first : first + rows, start // step, None].t()
                    part = centred(part, inside[:, at], None if rest is None else rest[:, at], held)
                part = part.to(FP32)
                if sw is not None:
                    part = part * sw[start // w.bk, first : first + rows]
                place += part * sa[:, start // (c.group or w.k), None]
        bias = given.get("bias")
        return (out if bias is None else out + bias.to(FP32)).to(c.out)


def _finite(codes: torch.Tensor) -> torch.Tensor:
    return ((codes.view(INT8) & 127) != 127).all()


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x . y^T in float32, or of int8 in int32."""
    return torch._int_mm(x, y.t()) if x.dtype is INT8 else x @ y.t()


def _float(codes: torch.Tensor) -> torch.Tensor:
    """Finite codes in float32. Of float8 torch 2.13 converts one in 13 ns; as bits of float16 one
    takes 1 ns (one thread of a Xeon)."""
    if codes.dtype is E4M3:
        bits = codes.view(INT8).to(torch.int16)
        return (bits << 7 & ~(1 << 14)).view(FP16).to(FP32) * 256
    if codes.dtype is E5M2:
        return (codes.view(torch.uint8).to(torch.int16) << 8).view(FP16).to(FP32)
    return codes.to(FP32)


for provider in (ScaledMM(), ScaledMMBlocks(), IntMM(), MMInBlocks()):
    SCALED_MATMUL.register(provider)
