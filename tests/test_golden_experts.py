"""Golden graphs of products with a stack of experts, and the same modules run for real.

EXPECTTEST_ACCEPT=1 python -m pytest tests/test_golden_experts.py   writes the texts anew.
"""

import re
from collections.abc import Callable

import pytest
import torch
from expecttest import TestCase
from models import BF16, Holder, Random, nibbles

import qinductor
from qinductor.testing import product_oracle, rewritten

E, N, K = 3, 48, 64
OFFSETS = torch.tensor([5, 5, 8], dtype=torch.int32)  # the second expert has no row


def float8(m: Holder) -> torch.Tensor:
    """[E, N, K], a scale for each row."""
    return m.codes.to(BF16) * m.scale[..., None]


def int4(m: Holder) -> torch.Tensor:
    """[E, N, K], groups of 32."""
    codes = (nibbles(m.codes.view(E * N, -1)).to(BF16) - 8).view(E, N, -1, 32)
    return (codes * m.scale[..., None]).view(E, N, K)


def stack(kind: str) -> dict[str, torch.Tensor]:
    random = Random()
    if kind == "float8":
        return {"codes": random.float8(E, N, K), "scale": random.scales(E, N)}
    codes = random.integers(0, 256, E, N, K // 2)
    return {"codes": codes, "scale": random.scales(E, N, K // 32)}


def bmm(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, m.dequantise(m).mT)


def einsum(m: Holder, x: torch.Tensor) -> torch.Tensor:
    """Weights on the left."""
    return torch.einsum("enk,emk->enm", m.dequantise(m), x)


def baddbmm(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(m.bias, x, m.dequantise(m).mT)


def grouped_mm(m: Holder, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, m.dequantise(m).mT, offs=offsets)


IDS = torch.tensor([2, 0, 0, 2, -1])  # no batch takes the second expert


def gathered(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights on the left, as transformers' `batched_mm` has them."""
    return torch.bmm(m.dequantise(m)[ids], x.mT).mT


def gathered_right(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Swapped before they are chosen."""
    return x @ m.dequantise(m).mT[ids]


def gathered_then_swapped(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, m.dequantise(m)[ids].transpose(1, 2))


def selected(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = torch.index_select(m.dequantise(m), 0, ids.remainder(E).int())
    return torch.einsum("bnk,bmk->bmn", chosen, x)


GATHERED = (gathered, gathered_right, gathered_then_swapped, selected)


# name: (product, weights, shape of x, whether it takes offsets)
FORMS: dict[str, tuple[Callable, str, tuple[int, ...], bool]] = {
    "bmm": (bmm, "int4", (E, 8, K), False),
    "einsum": (einsum, "float8", (E, 8, K), False),
    "baddbmm": (baddbmm, "float8", (E, 8, K), False),
    "grouped_mm": (grouped_mm, "int4", (8, K), True),
}


def made(name: str, rows: int = 8) -> tuple[Callable[[], Holder], tuple[torch.Tensor, ...]]:
    """(what makes the module, its arguments with `rows` for every 8 rows)."""
    product, kind, shape, grouped = FORMS[name]

    def module() -> Holder:
        tensors = stack(kind)
        if product is baddbmm:
            tensors["bias"] = Random(7).normal(E, 1, N)
        holder = Holder(product, **tensors)
        holder.dequantise = {"float8": float8, "int4": int4}[kind]
        return holder

    shape = tuple(rows if size == 8 else size for size in shape)
    x = Random(1).normal(*shape)
    return module, (x, OFFSETS * (rows // 8)) if grouped else (x,)


class Golden(TestCase):
    """What is left of the graph."""

    maxDiff = None

    def cpu(self, name: str, dynamic: bool | None = None) -> Callable[[str], None]:
        module, args = made(name)
        found = rewritten(module, *args, dynamic=dynamic)
        self.assertEqual([site.reason for site in found.report.sites], [None])
        return lambda expected: self.assertExpectedInline(found.after + "\n", expected, skip=1)

    def test_bmm(self) -> None:
        self.cpu("bmm")("""\
%0: uint8[3, 48, 32] = placeholder
%1: bfloat16[3, 48, 2] = placeholder
%2: bfloat16[3, 8, 64] = placeholder
%3: uint8[3, 48, 32] = placeholder packed_int4pack
%4: bfloat16[3, 2, 48, 2] = placeholder packed_int4pack_scales
%5: bfloat16[3, 8, 48] = qinductor.dequant_bmm.default(%2, [%3, %4])
    weight.codes=int4 weight.n=48 weight.k=64 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False experts=3
    aten.int4pack_mm
output [%5]
""")

    def test_bmm_dynamic(self) -> None:
        self.cpu("bmm", dynamic=True)("""\
%0: uint8[3, 48, 32] = placeholder
%1: bfloat16[3, 48, 2] = placeholder
%2: s0 = placeholder
%3: bfloat16[3, s0, 64] = placeholder
%4: uint8[3, 48, 32] = placeholder packed_int4pack
%5: bfloat16[3, 2, 48, 2] = placeholder packed_int4pack_scales
%6: int8[3, 24, 64] = placeholder packed_halves
%7: bfloat16[3, 48, 2] = placeholder packed_scale
%8: bfloat16[3, s0, 48] = qinductor.dequant_bmm.default(%3, [%4, %5, %6, %7])
    weight.codes=int4 weight.n=48 weight.k=64 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False experts=3
    aten.int4pack_mm, onednn.dequant_strips
output [%8]
""")

    def test_einsum(self) -> None:
        self.cpu("einsum")("""\
%0: float8_e4m3fn[3, 48, 64] = placeholder
%1: bfloat16[3, 48] = placeholder
%2: bfloat16[3, 8, 64] = placeholder
%3: float8_e4m3fn[3, 48, 64] = placeholder packed_codes
%4: bfloat16[3, 48, 1] = placeholder packed_scale
%5: bfloat16[3, 8, 64, 1] = aten.unsqueeze.default(%2, 3)
%6: bfloat16[3, 1, 8, 64] = aten.permute.default(%5, [0, 3, 1, 2])
%7: bfloat16[3, 64, 8, 1] = aten.permute.default(%6, [0, 3, 2, 1])
%8: bfloat16[3, 64, 8] = aten.view.default(%7, [3, 64, 8])
%9: bfloat16[3, 8, 64] = aten.permute.default(%8, [0, 2, 1])
%10: bfloat16[3, 8, 48] = qinductor.dequant_bmm.default(%9, [%3, %4])
    weight.codes=float8_e4m3fn weight.n=48 weight.k=64 weight.bn=1 weight.bk=64
      weight.arithmetic=q*s weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=False experts=3
    onednn.dequant_strips
%11: bfloat16[3, 48, 8] = aten.permute.default(%10, [0, 2, 1])
%12: bfloat16[3, 48, 8] = aten.clone.default(%11, memory_format=torch.contiguous_format)
%13: bfloat16[3, 48, 1, 8] = aten.view.default(%12, [3, 48, 1, 8])
%14: bfloat16[3, 48, 8, 1] = aten.permute.default(%13, [0, 1, 3, 2])
%15: bfloat16[3, 48, 8] = aten.view.default(%14, [3, 48, 8])
output [%15]
""")

    def test_baddbmm(self) -> None:
        self.cpu("baddbmm")("""\
%0: bfloat16[3, 1, 48] = placeholder
%1: float8_e4m3fn[3, 48, 64] = placeholder
%2: bfloat16[3, 48] = placeholder
%3: bfloat16[3, 8, 64] = placeholder
%4: float8_e4m3fn[3, 48, 64] = placeholder packed_codes
%5: bfloat16[3, 48, 1] = placeholder packed_scale
%6: bfloat16[3, 48] = placeholder packed_bias
%7: bfloat16[3, 8, 48] = qinductor.dequant_bmm.default(%3, [%4, %5, %6])
    weight.codes=float8_e4m3fn weight.n=48 weight.k=64 weight.bn=1 weight.bk=64
      weight.arithmetic=q*s weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16
      weight.compute=bfloat16 weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None
      bias=True experts=3
    onednn.dequant_strips
output [%7]
""")

    def test_grouped_mm(self) -> None:
        self.cpu("grouped_mm")("""\
%0: uint8[3, 48, 32] = placeholder
%1: bfloat16[3, 48, 2] = placeholder
%2: bfloat16[8, 64] = placeholder
%3: int32[3] = placeholder
%4: uint8[3, 48, 32] = placeholder packed_int4pack
%5: bfloat16[3, 2, 48, 2] = placeholder packed_int4pack_scales
%6: int8[3, 24, 64] = placeholder packed_halves
%7: bfloat16[3, 48, 2] = placeholder packed_scale
%8: bfloat16[8, 48] = qinductor.dequant_grouped_matmul.default(%2, %3, [%4, %5, %6, %7])
    weight.codes=int4 weight.n=48 weight.k=64 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False experts=3
    aten.int4pack_mm, onednn.dequant_strips
output [%8]
""")

    def test_grouped_mm_dynamic(self) -> None:
        self.cpu("grouped_mm", dynamic=True)("""\
%0: uint8[3, 48, 32] = placeholder
%1: bfloat16[3, 48, 2] = placeholder
%2: s0 = placeholder
%3: bfloat16[s0, 64] = placeholder
%4: int32[3] = placeholder
%5: uint8[3, 48, 32] = placeholder packed_int4pack
%6: bfloat16[3, 2, 48, 2] = placeholder packed_int4pack_scales
%7: int8[3, 24, 64] = placeholder packed_halves
%8: bfloat16[3, 48, 2] = placeholder packed_scale
%9: bfloat16[s0, 48] = qinductor.dequant_grouped_matmul.default(%3, %4, [%5, %6, %7, %8])
    weight.codes=int4 weight.n=48 weight.k=64 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False experts=3
    aten.int4pack_mm, onednn.dequant_strips
output [%9]
""")

    def test_gathered(self) -> None:
        found = rewritten(choosing(gathered), Random(1).normal(5, 1, K), IDS, dynamic=True)
        self.assertEqual([site.reason for site in found.report.sites], [None])
        self.assertExpectedInline(
            found.after + "\n",
            """\
%0: uint8[3, 48, 32] = placeholder
%1: bfloat16[3, 48, 2] = placeholder
%2: s0 = placeholder
%3: int64[s0] = placeholder
%4: bfloat16[s0, 1, 64] = placeholder
%5: uint8[3, 48, 32] = placeholder packed_int4pack
%6: bfloat16[3, 2, 48, 2] = placeholder packed_int4pack_scales
%7: int8[3, 24, 64] = placeholder packed_halves
%8: bfloat16[3, 48, 2] = placeholder packed_scale
%9: bfloat16[s0, 64, 1] = aten.permute.default(%4, [0, 2, 1])
%10: bfloat16[s0, 1, 64] = aten.permute.default(%9, [0, 2, 1])
%11: bfloat16[s0, 1, 48] = qinductor.dequant_gathered_bmm.default(%10, %3, [%5, %6, %7, %8])
    weight.codes=int4 weight.n=48 weight.k=64 weight.bn=1 weight.bk=32 weight.arithmetic=q*s
      weight.scale=bfloat16 weight.zero=None weight.inner=bfloat16 weight.compute=bfloat16
      weight.dtype=bfloat16 x=bfloat16 out=bfloat16 output_scale=None bias=False experts=3
    aten.int4pack_mm, onednn.dequant_strips
%12: bfloat16[s0, 48, 1] = aten.permute.default(%11, [0, 2, 1])
%13: bfloat16[s0, 48, 1] = aten.clone.default(%12, memory_format=torch.contiguous_format)
%14: bfloat16[s0, 1, 48] = aten.permute.default(%13, [0, 2, 1])
output [%14]
""",
            skip=0,
        )


def choosing(product: Callable, kind: str = "int4") -> Callable[[], Holder]:
    """What makes a module whose batches choose weights."""

    def module() -> Holder:
        holder = Holder(product, **stack(kind))
        holder.dequantise = {"float8": float8, "int4": int4}[kind]
        return holder

    return module


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["int4", "float8"])
@pytest.mark.parametrize("product", GATHERED, ids=lambda product: product.__name__)
def test_chosen_experts_are_as_accurate_as_eager(product, kind, dynamic):
    torch._dynamo.reset()
    holder = choosing(product, kind)()
    served = torch.compile(holder, backend="qinductor", dynamic=dynamic)
    ids = torch.tensor([2, 0, 0, 1, 2] if product is selected else [2, 0, 0, -1, 2])
    with torch.no_grad():
        w = holder.dequantise(holder)
        for m in (1, 90):
            x = Random(2).normal(len(ids), m, K)
            ours, eager = served(x, ids), holder(x, ids)
            assert ours.stride() == eager.stride()
            torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.03)
        for expert in set(ids.tolist()):
            rows = ids == expert
            product_oracle(*(t[rows].flatten(0, 1) for t in (ours, eager, x)), w[expert])
        assert qinductor.last_report().lowered == 1
        other = torch.tensor([1, 1, 0])
        torch.testing.assert_close(served(x[:3], other), holder(x[:3], other), rtol=0.02, atol=0.02)


def rows_of_each(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[B, E', N] of x[B, K] and every chosen weight of its token."""
    return torch.einsum("benk,bk->ben", m.dequantise(m)[ids], x)


def columns_of_each(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same, as columns of a product."""
    w = m.dequantise(m).mT[ids].permute(0, 2, 1, 3).flatten(2)
    return torch.bmm(x[:, None], w).view(len(x), -1, N)


def each_of_its_own(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[B, E', N] of x[B, E', K]."""
    return torch.einsum("benk,bek->ben", m.dequantise(m)[ids], x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["int4", "float8"])
@pytest.mark.parametrize("product", [rows_of_each, columns_of_each, each_of_its_own])
def test_tokens_that_choose_several_experts(product, kind, dynamic):
    torch._dynamo.reset()
    holder = choosing(product, kind)()
    served = torch.compile(holder, backend="qinductor", dynamic=dynamic)
    for tokens in (5, 3):
        ids = torch.randint(0, E, (tokens, 2))
        shape = (tokens, 2, K) if product is each_of_its_own else (tokens, K)
        x = Random(2).normal(*shape)
        with torch.no_grad():
            ours, eager = served(x, ids), holder(x, ids)
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.03)
        assert qinductor.last_report().lowered == 1


def added_up(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Products of all chosen weights of a token, added up by the product itself."""
    w = m.dequantise(m)[ids].permute(0, 2, 1, 3).flatten(2)  # [B, N, E' K]
    return torch.bmm(w, x.repeat(1, 2)[..., None])


def test_products_that_are_added_up_are_refused():
    found = rewritten(choosing(added_up), Random(2).normal(5, K), torch.randint(0, E, (5, 2)))
    assert [site.lowered for site in found.report.sites] in ([False], [])
    assert "dequant" not in found.after


def float8_first(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.bmm(m.codes[ids].to(BF16) * m.scale[ids][..., None], x.mT).mT


def int4_first(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    q, scale = m.codes.index_select(0, ids), m.scale.index_select(0, ids)
    codes = torch.stack((q & 15, q >> 4), -1).flatten(2).to(torch.int8) - 8
    w = codes.to(BF16).unflatten(2, (-1, 32)) * scale.unsqueeze(-1)
    return x @ w.flatten(2).transpose(1, 2)


def table_first(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    q = m.codes[ids]
    values = m.table[torch.cat((q & 15, q >> 4), 2).long()].unflatten(2, (-1, 32))
    return torch.bmm(x, (values * m.scale[ids][..., None]).flatten(2).mT)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("product", [float8_first, int4_first, table_first])
def test_codes_that_are_chosen_before_they_are_dequantised(product, dynamic):
    torch._dynamo.reset()
    holder = choosing(product, "float8" if product is float8_first else "int4")()
    holder.register_buffer("table", Random(3).normal(16))
    served = torch.compile(holder, backend="qinductor", dynamic=dynamic)
    for batches, m in ((5, 1), (4, 3)):
        ids, x = torch.randint(0, E, (batches,)), Random(2).normal(batches, m, K)
        with torch.no_grad():
            ours, eager = served(x, ids), holder(x, ids)
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.05)
        assert qinductor.last_report().lowered == 1
        assert f"{E} experts" in str(qinductor.last_report())


def float8_of_tokens(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    w = m.codes[ids].to(BF16) * m.scale[ids][..., None]
    return torch.einsum("teno,to->ten", w, x)


def int4_of_tokens(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    q, scale = m.codes[ids], m.scale[ids]
    codes = torch.stack((q & 15, q >> 4), -1).flatten(-2).to(torch.int8) - 8
    w = (codes.to(BF16).unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2)
    return (w @ x[:, None, :, None]).squeeze(-1)


def table_of_tokens(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    q = m.codes[ids]
    values = m.table[torch.cat((q & 15, q >> 4), -1).long()].unflatten(-1, (-1, 32))
    w = (values * m.scale[ids].unsqueeze(-1)).flatten(-2).transpose(-1, -2)
    return torch.matmul(x[:, None, None], w).squeeze(2)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("product", [float8_of_tokens, int4_of_tokens, table_of_tokens])
def test_codes_that_are_chosen_by_ids_of_two_axes(product, dynamic):
    torch._dynamo.reset()
    holder = choosing(product, "float8" if product is float8_of_tokens else "int4")()
    holder.register_buffer("table", Random(3).normal(16))
    served = torch.compile(holder, backend="qinductor", dynamic=dynamic)
    for tokens, k in ((5, 2), (3, 2)):
        ids, x = torch.randint(0, E, (tokens, k)), Random(2).normal(tokens, K)
        with torch.no_grad():
            ours, eager = served(x, ids), holder(x, ids)
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.05)
        assert qinductor.last_report().lowered == 1, qinductor.last_report()
        assert f"{E} experts" in str(qinductor.last_report())


def wide_of_tokens(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """In float64, which no operator takes."""
    w = m.codes[ids].double() * m.scale[ids].double()[..., None]
    return torch.einsum("teno,to->ten", w, x.double())


def test_what_is_chosen_by_two_axes_and_not_lowered_is_as_it_was():
    x, ids = Random(2).normal(5, K), torch.randint(0, E, (5, 2))
    found = rewritten(choosing(wide_of_tokens, "float8"), x, ids)
    (site,) = found.report.sites
    assert not site.lowered and "it is fp64" in site.reason, found.report
    lines = dict(line.strip().split(": ", 1) for line in found.after.splitlines() if ": " in line)
    live = re.findall(r"%\d+", found.after.rsplit("output", 1)[1])
    for name in live:
        live += [n for n in re.findall(r"%\d+", lines.get(name, "")) if n not in live]
    made = [lines[name] for name in live if name in lines]
    assert any("aten.bmm" in line for line in made)
    assert not any(line.startswith(f"float64[{E},") for line in made), found.after


def wide(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """In float64, which no operator takes."""
    return torch.bmm(x.double(), (m.codes[ids].double() * m.scale[ids][..., None]).mT)


def by_turns(m: Holder, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each batch has its own scale of the product's first batch: not each on its own."""
    scale = m.scale[ids]
    return torch.bmm(x, (m.codes[ids].to(BF16) * scale.cumsum(0)[..., None]).mT)


@pytest.mark.parametrize("product", [wide, by_turns])
def test_what_is_not_lowered_is_chosen_first_as_before(product):
    found = rewritten(choosing(product, "float8"), Random(2).normal(2, 5, K), torch.tensor([2, 0]))
    assert not any(site.lowered for site in found.report.sites)
    lines = [line for line in found.after.splitlines() if "aten.bmm" in line]
    used = lines[0].rsplit("(", 1)[1]
    made = [
        line for line in found.after.splitlines() if line.startswith(f"{used.split(', ')[1][:-1]}:")
    ]
    assert "permute" in made[0], found.after


def test_constant_choices_are_a_part_of_the_weight():
    def chosen(m: Holder, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, m.dequantise(m)[m.ids].mT)

    def module() -> Holder:
        holder = Holder(chosen, **stack("int4"), ids=torch.tensor([2, 0]))
        holder.dequantise = int4
        return holder

    found = rewritten(module, Random(1).normal(2, 5, K))
    assert [site.reason for site in found.report.sites] == [None]
    assert "dequant_bmm" in found.after and "gathered" not in found.after


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (lambda m, x, ids: torch.baddbmm(m.scale[:, :1, :1].sum().expand(5, 1, N), x,
                                         m.dequantise(m).mT[ids]), "must be without bias"),
        (lambda m, x, ids: torch.bmm(x, m.dequantise(m)[:, ids].mT[ids]), "made of constants"),
        (lambda m, x, ids: torch.bmm(x, (m.dequantise(m)[ids] * x.sum()).mT),
         "must be made of constants"),
    ],
)  # fmt: skip
def test_choices_that_are_refused(product, reason):
    found = rewritten(choosing(product), Random(1).normal(5, 1, K), IDS)
    assert [site.lowered for site in found.report.sites] in ([False], [])
    assert all(reason in site.reason for site in found.report.sites), str(found.report)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_experts_are_as_accurate_as_eager(name, dynamic):
    module, args = made(name, 256)
    holder = module()
    torch._dynamo.reset()
    with torch.no_grad():
        ours = torch.compile(holder, backend="qinductor", dynamic=dynamic)(*args)
        eager, w = holder(*args), holder.dequantise(holder)
    assert qinductor.last_report().lowered == 1
    x = args[0]
    if len(args) == 1:
        if name == "einsum":
            ours, eager = ours.mT, eager.mT
        for expert in range(E):
            bias = holder.bias[expert, 0] if name == "baddbmm" else None
            product_oracle(ours[expert], eager[expert], x[expert], w[expert], bias)
        return
    start = 0
    for expert, end in enumerate(args[1].tolist()):
        if end > start:
            rows = slice(start, end)
            product_oracle(ours[rows], eager[rows], x[rows], w[expert])
        start = end
    assert start == len(x)


def test_permuted_codes_of_8_bits_stay_as_they_are_packed():
    """They have the dtype and shape of the model's own, whose columns are in another order."""

    def product(m: Holder, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, (m.codes.float() * m.scale[:, :, m.groups]).mT)

    seeded = torch.Generator().manual_seed(0)
    held = {
        "codes": torch.randint(-128, 128, (E, N, K), dtype=torch.int8, generator=seeded),
        "scale": torch.rand(E, N, K // 16, generator=seeded),
        "groups": torch.randperm(K, generator=seeded) // 16,
    }
    module, x = Holder(product, **held), Random(1).normal(E, 5, K).float()
    torch._dynamo.reset()
    with torch.no_grad():
        ours, eager = torch.compile(module, backend="qinductor")(x), module(x)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=0.01)
    assert "permuted" in str(qinductor.last_report())
