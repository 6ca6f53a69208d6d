"""Other libraries' products of codes, to compare with: none is needed, and none is installed.

| peer       | what it is                                    | found by                            |
|------------|-----------------------------------------------|-------------------------------------|
| torch      | torch._scaled_mm, _scaled_mm_v2 (cuBLASLt)    | the installed torch                 |
| sgl_kernel | fp8_scaled_mm, int8_scaled_mm,                | QINDUCTOR_SGL_KERNEL=PATH.so, else  |
|            | fp8_blockwise_scaled_mm (CUTLASS)             | the package                         |
| deep_gemm  | fp8_gemm_nt (compiles as it runs)             | the package                         |
| humming    | humming_gemm (compiles as it runs)            | the package                         |

What a library wants in another layout (a packed weight, scales in padded columns) is made before
a call is timed.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from qinductor.contracts import short
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Operands, ScaledMatmul

E4M3, INT8, BF16, FP16, FP32 = (
    torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float16, torch.float32,
)  # fmt: skip
LIBRARY = "QINDUCTOR_SGL_KERNEL"
Tensors = Sequence[torch.Tensor]


class Peer(Protocol):
    """A library's product.

    missing  why it cannot run here, in one sentence; None if it can
    version  what is installed, in words
    why_not  why it does not take a contract; None if it does
    seen     the operands as it rounds them: it is judged by these
    pack     the weight's tensors as it wants them
    arrange  (codes, scale) of a as it wants them
    run      the product [M, N] of what these two made
    """

    name: str

    def missing(self) -> str | None: ...

    def version(self) -> str: ...

    def why_not(self, contract: ScaledMatmul) -> str | None: ...

    def seen(self, source: Operands, contract: ScaledMatmul) -> Operands: ...

    def pack(self, contract: ScaledMatmul, source: Operands) -> list[torch.Tensor]: ...

    def arrange(self, contract: ScaledMatmul, x: Tensors) -> list[torch.Tensor]: ...

    def run(self, contract: ScaledMatmul, given: Tensors, packed: Tensors) -> torch.Tensor: ...


class Common:
    """What most peers share."""

    package = ""  # the distribution

    def version(self) -> str:
        return importlib.metadata.version(self.package)

    def seen(self, source: Operands, contract: ScaledMatmul) -> Operands:
        return source


def form(contract: ScaledMatmul) -> str:
    """What shares a scale on both sides: tensor, row, block128 or block32; "" for anything else."""
    c, w = contract, contract.weight
    plain = w.arithmetic == "q*s" and not w.permuted and w.bits == 8 and c.zero is None
    if not plain or c.experts or c.bias is not None or (c.scale, w.scale) != (FP32, FP32):
        return ""
    if c.group == 0 and w.bn >= w.n and w.bk >= w.k:
        return "tensor"
    if c.group == w.k and w.bn == 1 and w.bk >= w.k:
        return "row"
    square = w.bn == w.bk == c.group and c.group in (32, 128)
    return f"block{c.group}" if square else ""


def imported(name: str, package: str) -> str | None:
    """Why a module cannot be imported; None if it is there."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{package} is not installed (no module {error.name})"
    except Exception as error:  # whatever a library's own start raises
        return f"{package} cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
    return None


def columns(scale: torch.Tensor) -> torch.Tensor:
    """[G, M padded to a multiple of 4]: the columns of scales [M, G], each aligned for TMA."""
    pad = -scale.shape[0] % 4
    return torch.nn.functional.pad(scale.t(), (0, pad)).contiguous()


class Torch(Common):
    """The operators that our torch providers call, on operands that need no more copies."""

    name, package = "torch", "torch"

    def missing(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device is here"

    def _provider(self, contract: ScaledMatmul) -> Any:
        blocks = form(contract).startswith("block")
        return SCALED_MATMUL.providers[f"aten.scaled_mm{'_blocks' * blocks}"]

    def why_not(self, contract: ScaledMatmul) -> str | None:
        provider = self._provider(contract)
        missing = getattr(provider, "missing", lambda: None)()
        return missing or provider.why_not(contract)  # type: ignore[no-any-return]

    def pack(self, contract: ScaledMatmul, source: Operands) -> list[torch.Tensor]:
        provider = self._provider(contract)
        found = provider.pack(contract, source)
        return [found[name] for name in provider.operands(contract)]

    def arrange(self, contract: ScaledMatmul, x: Tensors) -> list[torch.Tensor]:
        a, scale = x
        if not form(contract).startswith("block"):
            return [a, scale]
        padded = torch.nn.functional.pad(a.view(INT8), (0, 0, 0, -a.shape[0] % 4)).view(a.dtype)
        return [padded, columns(scale).t()]

    def run(self, contract: ScaledMatmul, given: Tensors, packed: Tensors) -> torch.Tensor:
        out: torch.Tensor = self._provider(contract).run(contract, given, packed)
        return out


class SglKernel(Common):
    name, package = "sgl_kernel", "sgl-kernel"

    @functools.cache  # noqa: B019 - there is one of each peer
    def missing(self) -> str | None:
        path = os.environ.get(LIBRARY)
        if path is None:
            reason = imported("sgl_kernel", "sgl-kernel")
            return reason and f"{reason}, and {LIBRARY} names no library"
        try:
            torch.ops.load_library(path)
        except (OSError, RuntimeError) as error:
            return f"{path} ({LIBRARY}) cannot be loaded: {error}".splitlines()[0]
        return None

    def version(self) -> str:
        path = os.environ.get(LIBRARY)
        return super().version() if path is None else os.path.basename(path)

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c, w, kind = contract, contract.weight, form(contract)
        if kind not in ("row", "block128") or (c.a is INT8 and kind != "row"):
            return "it takes scales of rows, of float8 of blocks of 128, too"
        if c.a not in (E4M3, INT8) or w.storage is not c.a or c.out not in (BF16, FP16):
            return f"{short(c.a)} times {w.codes}; it takes float8_e4m3fn and int8"
        need = (128, 128) if kind == "block128" else (8, 16)
        if w.n % need[0] or w.k % need[1]:
            return f"W is {w.n}x{w.k}; it takes multiples of {need[0]} and {need[1]}"
        return None

    def pack(self, contract: ScaledMatmul, source: Operands) -> list[torch.Tensor]:
        scale = source.weight.scale
        assert scale is not None
        return [source.weight.codes.contiguous(), scale.contiguous()]

    def arrange(self, contract: ScaledMatmul, x: Tensors) -> list[torch.Tensor]:
        a, scale = x
        if form(contract) == "row":
            return [a, scale.reshape(-1).contiguous()]
        return [a, scale.t().contiguous().t()]

    def run(self, contract: ScaledMatmul, given: Tensors, packed: Tensors) -> torch.Tensor:
        (a, sa), (codes, sw), ops = given, packed, torch.ops.sgl_kernel
        if form(contract) == "block128":
            blocks: torch.Tensor = ops.fp8_blockwise_scaled_mm(
                a, codes.t(), sa, sw.t(), contract.out
            )
            return blocks
        product = ops.int8_scaled_mm if contract.a is INT8 else ops.fp8_scaled_mm
        out: torch.Tensor = product(a, codes.t(), sa, sw.view(-1), contract.out, None)
        return out


class DeepGemm(Common):
    name, package = "deep_gemm", "sgl-deep-gemm"

    @functools.cache  # noqa: B019
    def missing(self) -> str | None:
        return imported("deep_gemm", "DeepGEMM")

    def version(self) -> str:
        for package in (self.package, "deep-gemm", "deep_gemm"):
            try:
                return importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "of an unknown version"

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c = contract
        if form(c) != "block128" or c.a is not E4M3 or c.weight.storage is not E4M3:
            return "it takes float8_e4m3fn with scales of blocks of 128"
        return None if c.out is BF16 else f"the result is {short(c.out)}; it takes bf16"

    def pack(self, contract: ScaledMatmul, source: Operands) -> list[torch.Tensor]:
        scale = source.weight.scale
        assert scale is not None
        return [source.weight.codes.contiguous(), scale.contiguous()]

    def arrange(self, contract: ScaledMatmul, x: Tensors) -> list[torch.Tensor]:
        return [x[0], columns(x[1])]

    def run(self, contract: ScaledMatmul, given: Tensors, packed: Tensors) -> torch.Tensor:
        import deep_gemm

        (a, sa), (codes, sw) = given, packed
        out = a.new_empty((a.shape[0], codes.shape[0]), dtype=BF16)
        deep_gemm.fp8_gemm_nt((a, sa[:, : a.shape[0]].t()), (codes, sw), out)
        return out


class Humming(Common):
    """Its weights are packed, and kernels are compiled for N, K and a range of M."""

    name, package = "humming", "humming-kernels"

    @functools.cache  # noqa: B019
    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device is here"
        return imported("humming.transform", "humming")

    def why_not(self, contract: ScaledMatmul) -> str | None:
        c, w, kind = contract, contract.weight, form(contract)
        if kind not in ("tensor", "row", "block128") or {c.a, w.storage} != {E4M3}:
            return "it takes float8_e4m3fn with scales of tensors, rows and blocks of 128"
        if c.out is not BF16:
            return f"the result is {short(c.out)}; it is compared for bf16"
        size = 128 if kind == "block128" else 64
        if w.n % size or w.k % 128:
            return f"W is {w.n}x{w.k}; it takes multiples of {size} and 128"
        return None

    def seen(self, source: Operands, contract: ScaledMatmul) -> Operands:
        scale = source.weight.scale
        if form(contract) != "row" or scale is None:
            return source
        weight = dataclasses.replace(source.weight, scale=scale.to(BF16).to(FP32))
        return dataclasses.replace(source, weight=weight)

    @functools.cache  # noqa: B019
    def _layer(self, contract: ScaledMatmul) -> Any:
        """Its description of a product."""
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_layer_config

        kind, w = form(contract), contract.weight
        block = w.bk if kind == "block128" else 0
        modes = {"tensor": "static_tensor", "row": "dynamic_token"}
        weight = HummingWeightSchema(
            b_dtype="float8e4m3",
            bs_dtype="float32" if kind == "tensor" else None,  # of rows it takes bf16
            weight_scale_type={"tensor": "tensor", "row": "channel"}.get(kind, "block"),
            weight_scale_group_size=block,
            weight_scale_group_size_n=block,
        )
        x = HummingInputSchema(
            a_dtype="float8e4m3",
            input_scale_group_size=block,
            input_quant_mode=modes.get(kind, "dynamic_group"),
        )
        return prepare_layer_config(w.n, w.k, weight, x, torch_dtype=BF16)

    @functools.cache  # noqa: B019
    def _texts(self, contract: ScaledMatmul, m: int) -> tuple[str, str]:
        """(the product, its kernel's config at m rows)."""
        from humming.tune import get_heuristics_config

        layer = self._layer(contract)
        return layer.to_str(), json.dumps(get_heuristics_config(layer, shape_m=m))

    def pack(self, contract: ScaledMatmul, source: Operands) -> list[torch.Tensor]:
        from humming.transform import transform_humming_tensors

        codes, scale, kind = source.weight.codes, source.weight.scale, form(contract)
        assert scale is not None
        given = scale.to(BF16) if kind == "row" else scale
        given = scale.view(1) if kind == "tensor" else given
        made = transform_humming_tensors(
            self._layer(contract), {"weight": codes.view(torch.int32), "weight_scale": given}
        )
        locks = torch.zeros(2048, dtype=torch.int32, device=codes.device)
        return [made["weight"], made["weight_scale"], locks]

    def arrange(self, contract: ScaledMatmul, x: Tensors) -> list[torch.Tensor]:
        a, scale = x
        if form(contract) == "row":  # it may read whole vectors of 4
            return [a, torch.nn.functional.pad(scale.reshape(-1), (0, -a.shape[0] % 4))]
        return [a, scale.contiguous()]

    def run(self, contract: ScaledMatmul, given: Tensors, packed: Tensors) -> torch.Tensor:
        from humming import ops

        (a, sa), (weight, sw, locks) = given, packed
        m = a.shape[0]
        layer, config = self._texts(contract, m)
        out: torch.Tensor = ops.humming_gemm(
            layer_config=layer,
            tuning_config=config,
            inputs=a,
            weight=weight,
            weight_scale=sw,
            input_scale=sa[:m].view(m, 1) if form(contract) == "row" else sa,
            locks=locks,
        )
        return out


ALL: dict[str, Peer] = {peer.name: peer for peer in (Torch(), SglKernel(), DeepGemm(), Humming())}
