"""The form of a weight that the Triton family's packed tensors are: it is restored from them."""

from collections.abc import Sequence

import torch

from qinductor.contracts import FLOAT_CODES, QuantizedWeight, code_range
from qinductor.kernels import fragments
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, DequantMatmul, Operands
from qinductor.kernels.dequant_matmul_triton_form import (
    Packed,
    group,
    offset,
    whole_zero,
    widths,
    zeros,
)
from qinductor.op import Spec

ROUNDED = ("scale", "zero", "outer")  # what packing may round
HELD_IN_FP32 = (torch.bfloat16, torch.float16, *FLOAT_CODES.values())


class Fragments(Packed):
    """Codes as the kernels take them; scales and zeros too, but for those that packing rounds."""

    name = "fragments"

    def operands(self, contract: DequantMatmul) -> dict[str, Spec]:
        found, plain = super().operands(contract), DEQUANT_MATMUL.specification.operands(contract)
        for name in ROUNDED:
            if name in plain and not self._keeps(contract, name, plain[name][1]):
                del found[f"fragments_{name}"]
                found[name] = plain[name]
        return found

    def pack(self, contract: DequantMatmul, source: Operands) -> dict[str, torch.Tensor]:
        found, names = super().pack(contract, source), self.operands(contract)
        found |= {n: getattr(source.weight, n).contiguous() for n in ROUNDED if n in names}
        return {name: found[name] for name in names}

    def whole(self, contract: DequantMatmul, packed: Sequence[torch.Tensor]) -> Operands:
        """The proved weight back from its packed tensors."""
        named, form = self._named(contract, packed), contract.weight
        n, k = fragments.padded(form.n, form.k, widths(form))
        place, codes = form.bits, torch.zeros((), dtype=torch.uint8)
        for width in widths(form):
            place -= width
            field = fragments.unpack_words(named[f"fragments{width}"], n, k, width)
            codes = codes.to(field.device) | field << place
        codes = codes[: form.n, : form.k]
        low, _ = code_range(form.codes) or (0, 0)
        if form.codes in FLOAT_CODES and form.bits == 8:
            codes = codes.contiguous().view(form.storage)
        else:
            codes = (codes.to(torch.int16) + low).to(form.storage)
        if (order := named.get("order")) is not None:
            codes = codes[:, order.argsort()]
        outer = named.get("outer")
        if outer is None and form.outer is not None:
            outer = named["fragments_outer"][: form.n].to(form.outer)
        scale, zero = (self._restored(contract, named, name) for name in ("scale", "zero"))
        weight = QuantizedWeight(form, codes, scale, zero, outer, named.get("table"), order)
        return Operands(weight, named.get("output_scale"), named.get("bias"))

    def _keeps(self, contract: DequantMatmul, name: str, dtype: torch.dtype) -> bool:
        """Whether the packed values are those of this dtype."""
        if name == "zero" and whole_zero(contract.weight):
            return True  # packing has checked that
        packed = _packed(contract, name)
        return dtype is packed or (packed is torch.float32 and dtype in HELD_IN_FP32)

    def _restored(
        self, contract: DequantMatmul, named: dict[str, torch.Tensor], name: str
    ) -> torch.Tensor | None:
        """A grid as it was before `Packed.pack`."""
        form, packed = contract.weight, named.get(f"fragments_{name}")
        if packed is None:
            return named.get(name)
        values = fragments.unpack_grid(packed, _packed(contract, name))[: form.n : form.bn]
        if group(form):
            values = values[:, :: form.bk // group(form)]
        values = values[:, : form.grid[1]]
        if name == "zero" and whole_zero(form):
            values = values.to(torch.int32) - offset(contract)
        return values.to(getattr(form, name)).clone(memory_format=torch.contiguous_format)


def _packed(contract: DequantMatmul, name: str) -> torch.dtype:
    """The dtype of a packed grid."""
    return zeros(contract) if name == "zero" else contract.weight.compute


DEQUANT_MATMUL.forms.append(Fragments())
