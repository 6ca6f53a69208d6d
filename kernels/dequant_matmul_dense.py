"""Provider of dequant_matmul on a CPU that trades memory for time: the weight is kept dense."""

from collections.abc import Sequence

import torch

from qinductor.contracts import dequantize
from qinductor.kernels.dequant_matmul import (
    DEQUANT_MATMUL,
    DequantMatmul,
    Operands,
    Reference,
)
from qinductor.kernels.dequant_matmul_onednn import linear
from qinductor.op import Spec


class DenseWeight(Reference):
    """W dequantised once, by the format's reference, and multiplied by oneDNN ever after.

    It runs only under `Options(dense=True)`; the report counts its bytes as dense.
    """

    name = "onednn.dense"
    dense = True
    reference = False

    def runs_on(self, target: str) -> bool:
        return target == "cpu"

    def operands(self, contract: DequantMatmul) -> dict[str, Spec]:
        w, kept = contract.weight, super().operands(contract).items()
        others = {name: spec for name, spec in kept if name in ("output_scale", "bias")}
        return {"dense": ((w.n, w.k), w.dtype), **others}

    def pack(self, contract: DequantMatmul, source: Operands) -> dict[str, torch.Tensor]:
        w = source.weight
        tensors = {
            "dense": dequantize(w),
            "output_scale": source.output_scale,
            "bias": source.bias,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def run(
        self, contract: DequantMatmul, x: torch.Tensor, packed: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if contract.output_scale is not None:
            out = linear(x, packed[0], None).mul_(packed[1])
            return out.add_(packed[2]) if contract.bias else out
        return linear(x, packed[0], packed[1] if contract.bias else None)


DEQUANT_MATMUL.register(DenseWeight())
