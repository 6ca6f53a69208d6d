"""Operators and providers: every case by every provider, directly and dispatched, to the oracle."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import sympy
import torch
from products import activations, call, check, direct, hold, on, only, packed, poisoned, replays
from torch._dynamo.testing import CompileCounterWithBackend

import qinductor
import qinductor.kernels.dequant_matmul_onednn as onednn
from qinductor.contracts import dequantize, difference
from qinductor.errors import Refused
from qinductor.kernels.dequant_matmul import (
    CASES,
    DEQUANT_MATMUL,
    Case,
    DequantMatmul,
    Operands,
    Reference,
    case,
    reference,
)
from qinductor.kernels.dequant_matmul_experts import CASES as EXPERTS
from qinductor.op import INFINITE, OPS, M, Op, Plan, limit_of, op, routes_of, single, split
from qinductor.regions import FLOAT8

qinductor.load()
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PROVIDERS = list(DEQUANT_MATMUL.providers)
named = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_provider = pytest.mark.parametrize("name", PROVIDERS)


def usable(name: str, contract: DequantMatmul, target: str = "cpu") -> Any:
    """The provider; the test is skipped, with its sentence, where it does not run this contract."""
    provider = DEQUANT_MATMUL.providers[name]
    if not provider.runs_on(target):
        pytest.skip(f"{name} does not run on {target}")
    reason = provider.why_not(contract)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return provider


@named
@by_provider
def test_a_provider_directly_and_dispatched(case, name):
    contract, provider = case.contract, usable(name, case.contract)
    _, source = case.make()
    tensors = packed(only(name), contract, source)
    before = [t.clone() for t in tensors]
    m = min(case.m, limit_of(provider, contract))
    route = routes_of(provider, contract, m)[0]
    xs = activations(contract, m)
    ours = [direct(route, contract, x, tensors) for x in xs]
    for x, out in zip(xs, ours, strict=True):
        check(out, contract, m)
        copy = x.clone()
        with poisoned():
            assert not difference(call(x, tensors, contract, only(route)), out)
        assert torch.equal(x, copy), "x was written to"
    for t, old in zip(tensors, before, strict=True):
        assert not difference(t, old), "a packed tensor was written to"
    hold(contract, ours, xs, source)


@named
def test_every_m_by_the_plan(case):
    contract, plan = case.contract, DEQUANT_MATMUL.plan(case.contract, "cpu", None)
    _, source = case.make()
    tensors = packed(plan, contract, source)
    borders = {m for limit, _ in plan.steps for m in (limit, limit + 1) if m < INFINITE}
    for m in sorted({1, 2, 129} | borders):
        xs = activations(contract, m)
        ours = [call(x, tensors, contract, plan) for x in xs]
        for out in ours:
            check(out, contract, m)
        hold(contract, ours, xs, source)
    check(call(xs[0][:0], tensors, contract, plan), contract, 0)


@named
@by_provider
def test_x_that_is_not_contiguous(case, name):
    contract, provider = case.contract, usable(name, case.contract)
    k, m = contract.weight.k, min(10, limit_of(provider, contract))
    _, source = case.make()
    route = routes_of(provider, contract, m)[0]
    tensors = packed(only(route), contract, source)
    layouts = {
        "sliced": lambda x: torch.cat([x, x, x[:, :3]], 1)[:, 3 : k + 3],
        "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
        "transposed": lambda x: x.t().contiguous().t(),
        "one row, expanded": lambda x: x[:1].expand(m, k),
    }
    for layout, made in layouts.items():
        xs = [made(x) for x in activations(contract, m)]
        assert not xs[0].is_contiguous(), layout
        ours = [call(x, tensors, contract, only(route)) for x in xs]
        for out in ours:
            check(out, contract, m)
        hold(contract, ours, xs, source)


@named
def test_compiled_with_a_dynamic_m(case):
    contract, plan = case.contract, DEQUANT_MATMUL.plan(case.contract, "cpu", None)
    tensors = packed(plan, contract, case.make()[1])
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(x: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        return call(x, tensors, contract, plan).t()

    for m in (5, 2, 129):
        (x, *_) = activations(contract, m)
        torch._dynamo.mark_dynamic(x, 0)
        assert not difference(compiled(x, tensors).t(), call(x, tensors, contract, plan))
    assert counter.frame_count == 1, "another M compiled again"


def test_compiled_between_other_operators():
    chosen = CASES[0]
    contract, plan = chosen.contract, DEQUANT_MATMUL.plan(chosen.contract, "cpu", None)
    tensors = packed(plan, contract, chosen.make()[1])

    texts = str(contract), str(plan)

    def f(x: torch.Tensor) -> torch.Tensor:
        x = x.relu().t().contiguous().t()
        return torch.ops.qinductor.dequant_matmul(x, tensors, *texts)[:, ::2].abs()

    compiled = torch.compile(f, fullgraph=True, dynamic=True)
    for m in (1, 7, 40):
        (x, *_) = activations(contract, m)
        assert not difference(compiled(x), f(x))


# Packed tensors -------------------------------------------------------------------------------


@named
def test_packed_tensors_are_as_declared(case):
    _, source = case.make()
    seen: dict[str, torch.Tensor] = {}
    for provider in DEQUANT_MATMUL.providers.values():
        if not provider.runs_on("cpu") or provider.why_not(case.contract) is not None:
            continue
        found = provider.pack(case.contract, source)
        for name, (shape, dtype) in provider.operands(case.contract).items():
            assert (found[name].shape, found[name].dtype) == (shape, dtype), name
            assert found[name].is_contiguous()
            # A name means the same tensor for every provider.
            assert not difference(found[name], seen.setdefault(name, found[name]))
        assert set(found) == set(provider.operands(case.contract))


def test_a_plan_packs_each_tensor_once_and_checks_it():
    contract = CASES[9].contract
    plan = Plan(((4, "aten.int8pack_mm"), (INFINITE, "onednn.dequant_strips")))
    assert list(plan.operands(DEQUANT_MATMUL, contract)) == ["codes", "row_scale", "scale"]
    assert [route.take for route in plan.routes(DEQUANT_MATMUL, contract)] == [(0, 1), (0, 2)]

    class Wrong(Toy):
        def pack(self, contract: Any, source: Any) -> dict[str, torch.Tensor]:
            return {"w": torch.zeros(3, 2).t()}

    toy = toys(Wrong("wrong", INFINITE))
    with pytest.raises(RuntimeError, match=r"'w' of toy must be a contiguous torch.float32\[2, 3"):
        only("wrong").pack(toy, contract, None)


@named
def test_the_reference_is_the_products_of_its_docstring(case):
    """In float64, where every order of rounding gives the same digits to within 1e-9."""
    check_reference(case)


def check_reference(case: Case) -> None:
    contract = dataclasses.replace(case.contract, x=torch.float64, out=torch.float64)
    x, source = case.make()
    w = source.weight
    form = dataclasses.replace(contract.weight, dtype=torch.float64)
    wide = dequantize(dataclasses.replace(w, format=form))
    operands = Operands(
        dataclasses.replace(w, format=form),
        None if source.output_scale is None else source.output_scale.double(),
        None if source.bias is None else source.bias.double(),
    )
    out = reference(dataclasses.replace(contract, weight=form), x.double(), operands)
    want = torch.einsum("mk,nk->mn", x.double(), wide)
    want = want if operands.output_scale is None else want * operands.output_scale
    want = want if operands.bias is None else want + operands.bias
    assert torch.allclose(out, want, rtol=1e-9, atol=1e-9)


def extra(contract: DequantMatmul, **changes: Any) -> Case:
    return Case("extra", 4, dataclasses.replace(contract, **changes))


def weight_of(contract: DequantMatmul, **changes: Any) -> DequantMatmul:
    return dataclasses.replace(contract, weight=dataclasses.replace(contract.weight, **changes))


INT4 = case("int4", 4, 384, 384, 1, 64).contract
INT8 = case("int8", 4, 256, 512, 1, 512).contract
TABLE4 = case("table4", 4, 384, 384, 1, 64).contract
LESS_ZERO = case("uint4", 4, 64, 64, 1, 64, arithmetic="(q-z)*s", zero=torch.int8).contract
PAIR = {"bias": True, "output_scale": BF16}
# Contracts that no case has, for whatever provider says it takes them.
CORNERS = {
    "ragged groups of 64": extra(weight_of(INT4, n=64, k=96)),
    "ragged groups of 128": extra(weight_of(INT4, n=64, k=192, bk=128)),
    "ragged groups of 256": extra(weight_of(INT4, n=64, k=384, bk=256)),
    "blocks of rows and columns": extra(weight_of(INT4, bn=384)),
    "one row": extra(weight_of(INT8, n=1)),
    "one column": extra(weight_of(INT8, k=1, bk=1)),
    "int8, K is no multiple of 16": extra(weight_of(INT8, k=300, bk=300)),
    "int4, no scale at all": extra(weight_of(INT4, arithmetic="q", scale=None, bn=384, bk=384)),
    "int4, scale and bias of the product": extra(
        weight_of(INT4, arithmetic="q", scale=None, bn=384, bk=384), **PAIR
    ),
    "int8, scale and bias of the product": extra(
        weight_of(INT8, arithmetic="q", scale=None, bn=256), **PAIR
    ),
    "two scales": extra(INT4, output_scale=BF16),
    "computed in fp32": extra(weight_of(INT4, scale=FP32, compute=FP32)),
    "W in fp32, bf16 scale": extra(weight_of(INT8, compute=FP32)),
}


def test_scale_and_bias_of_one_product():
    """out = x . W * output_scale + bias, as `DequantMatmul` and the product oracle say."""
    check_reference(CORNERS["int8, scale and bias of the product"])


@pytest.mark.parametrize("corner", CORNERS)
@by_provider
def test_a_provider_runs_all_that_it_says_it_takes(corner, name):
    contract, provider = CORNERS[corner].contract, usable(name, CORNERS[corner].contract)
    # Its bf16 loop has no tail: other K read past the end (a wrong value, or the process dies).
    assert name != "aten.int8pack_mm" or contract.weight.k % 16 == 0, "K must be refused"
    _, source = CORNERS[corner].make()
    route = routes_of(provider, contract, 4)[0]
    tensors = packed(only(route), contract, source)
    xs = activations(contract, 4)
    hold(contract, [call(x, tensors, contract, only(route)) for x in xs], xs, source)


# Strips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [CASES[0], CASES[9], CASES[5]], ids=lambda case: case.name)
def test_strips_of_any_size(chosen, monkeypatch):
    contract, provider = chosen.contract, onednn.DequantStrips()
    _, source = chosen.make()
    tensors = packed(only(provider.name), contract, source)
    xs = activations(contract, 17)
    whole = [provider.run(contract, x, tensors) for x in xs]
    hold(contract, whole, xs, source)
    for rows in (1, 10, contract.weight.n // 2 - 1):
        monkeypatch.setattr(onednn, "STRIP", 2 * rows * contract.weight.k)
        other = onednn.DequantStrips()
        with poisoned():
            ours = [other.run(contract, x, tensors) for x in xs]
        for out in ours:
            check(out, contract, 17)
        hold(contract, ours, xs, source)


def test_a_format_s_loop_serves_every_shape_of_it():
    """Sizes that are 1, or equal, when the loop is compiled may be neither in the next weight."""
    provider = onednn.DequantStrips()
    for n, k, bk in ((64, 64, 64), (64, 192, 64), (48, 96, 32), (2, 32, 32), (40, 40, 40)):
        contract = case("int8", 4, n, k, 1, bk, FP16).contract
        _, source = Case("", 4, contract).make()
        tensors = packed(only(provider.name), contract, source)
        xs = activations(contract, 20)
        hold(contract, [provider.run(contract, x, tensors) for x in xs], xs, source)
        assert provider._bound[contract] is not None, f"{n}x{k} in blocks of {bk} fell back"


# Why not --------------------------------------------------------------------------------------


# (provider, contract, what the sentence says the contract has, what it says the provider takes)
WHY_NOT = (
    ("aten.int4pack_mm", INT8, "codes are int8", "it takes int4"),
    (
        "aten.int4pack_mm",
        weight_of(INT4, arithmetic="(q-z)*s", zero=torch.int8),
        "W is (q-z)*s",
        "takes q*s",
    ),
    ("aten.int4pack_mm", weight_of(INT4, bk=48), "48 of K = 384", "multiples of 32 that divide K"),
    ("aten.int4pack_mm", weight_of(INT4, n=40), "N is 40", "multiples of 16"),
    ("aten.int4pack_mm", dataclasses.replace(INT4, x=FP32), "x is fp32", "bf16 and fp16"),
    ("aten.int4pack_mm", weight_of(INT4, scale=FP32), "scale is fp32", "dtype of x, bf16"),
    (
        "aten.int4pack_mm",
        dataclasses.replace(INT4, output_scale=BF16),
        "weight and the product both have a scale",
        "takes one",
    ),
    ("aten.int4pack_mm", weight_of(INT4, bn=2), "blocks have 2 rows", "1 or all"),
    ("aten.int4pack_mm", weight_of(INT4, permuted=True), "in another order", "in their order"),
    ("aten.int4pack_mm", TABLE4, "codes are table4", "takes int4"),
    ("aten.int4pack_mm", weight_of(INT4, arithmetic="q*s*t", outer=BF16), "q*s*t", "takes q*s"),
    ("aten.int8pack_mm", weight_of(INT8, permuted=True), "in another order", "in their order"),
    ("aten.int8pack_mm", weight_of(INT8, arithmetic="q*s*t", outer=BF16), "q*s*t", "takes q*s"),
    ("aten.int8pack_mm", INT4, "codes are int4", "takes int8"),
    ("aten.int8pack_mm", weight_of(INT8, arithmetic="q/s"), "W is q/s", "takes q*s"),
    ("aten.int8pack_mm", weight_of(INT8, k=300, bk=300), "K is 300", "multiples of 16"),
    ("aten.int8pack_mm", weight_of(INT8, bk=128), "128 of K = 512", "one scale a row"),
    ("aten.int8pack_mm", dataclasses.replace(INT8, bias=True), "bias", "1.5 allowed"),
    ("aten.int8pack_mm", dataclasses.replace(INT8, x=FP32), "x is fp32", "bf16 and fp16"),
    ("aten.int8pack_mm", weight_of(INT8, scale=FP16), "scale is fp16", "dtype of x, bf16"),
    (
        "aten.int8pack_mm",
        dataclasses.replace(INT8, output_scale=BF16),
        "weight and the product both have a scale",
        "takes one",
    ),
    ("aten.int8pack_mm", weight_of(INT8, bn=16), "blocks have 16 rows", "1 or all"),
    *(
        (
            f"aten.{codes}pack_mm",
            case(codes, 4, 256, 512, 256, 512, FP16, arithmetic="q", output_scale=True).contract,
            "fp16 after the product",
            "bf16",
        )
        for codes in ("int4", "int8")
    ),
    ("aten.int4pack_mm_cuda", INT8, "codes are int8", "it takes int4"),
    ("aten.int4pack_mm_cuda", TABLE4, "codes are table4", "it takes int4"),
    ("aten.int4pack_mm_cuda", dataclasses.replace(INT4, experts=8), "8 experts", "one weight"),
    ("aten.int4pack_mm_cuda", weight_of(INT4, permuted=True), "another order", "in their order"),
    (
        "aten.int4pack_mm_cuda",
        weight_of(INT4, arithmetic="q*s+z", zero=BF16),
        "W is q*s+z",
        "takes q*s",
    ),
    ("aten.int4pack_mm_cuda", dataclasses.replace(INT4, x=FP16), "x is fp16", "takes bf16"),
    ("aten.int4pack_mm_cuda", weight_of(INT4, scale=FP32), "the scale fp32", "takes bf16"),
    ("aten.int4pack_mm_cuda", weight_of(INT4, dtype=FP32), "fp32", "takes bf16"),
    ("aten.int4pack_mm_cuda", dataclasses.replace(INT4, bias=True), "bias", "1.5 allowed"),
    (
        "aten.int4pack_mm_cuda",
        dataclasses.replace(INT4, output_scale=BF16),
        "product",
        "one for each group of one row",
    ),
    ("aten.int4pack_mm_cuda", weight_of(INT4, bn=2), "block-2x64", "each group of one row"),
    ("aten.int4pack_mm_cuda", weight_of(INT4, bk=48), "48 of K = 384", "multiples of 32"),
    ("aten.int4pack_mm_cuda", weight_of(INT4, n=36), "36x384", "multiples of 8 and 128"),
    ("aten.int4pack_mm_cuda", weight_of(INT4, k=448), "384x448", "multiples of 8 and 128"),
    ("gluon.wgmma", dataclasses.replace(INT4, experts=8), "8 experts", "one weight"),
    ("gluon.wgmma", INT8, "codes are int8", "int4 and uint4"),
    ("gluon.wgmma", TABLE4, "codes are table4", "int4 and uint4"),
    ("gluon.wgmma", weight_of(INT4, arithmetic="q*s+z", zero=BF16), "q*s+z", "q*s and (q-z)*s"),
    ("gluon.wgmma", weight_of(INT4, arithmetic="(q-z)*s", zero=BF16), "zeros are bf16", "integers"),
    ("gluon.wgmma", weight_of(INT4, compute=FP32), "computed in fp32", "the dtype of x"),
    ("gluon.wgmma", weight_of(INT4, bk=96), "96 columns share", "multiples of 64, or whole rows"),
    ("gluon.wgmma", weight_of(INT4, n=36), "36x384", "multiples of 8"),
    ("gluon.wgmma", weight_of(INT4, k=196), "384x196", "multiples of 8"),
    *(
        (name, contract, has, takes)
        for name in ("triton.mma", "triton.dequant_cublas")
        for contract, has, takes in (
            (dataclasses.replace(INT4, x=FP32, out=FP32), "x is fp32", "takes bf16 and fp16"),
            (weight_of(INT4, dtype=FP32), "W fp32", "takes one dtype"),
            (dataclasses.replace(INT4, out=FP16), "the result fp16", "takes one dtype"),
            (weight_of(INT4, k=0), "384x0", "no empty one"),
            (weight_of(INT4, compute=FP64), "bf16 and fp64", "takes up to fp32"),
            (weight_of(LESS_ZERO, inner=FP64), "fp64 and bf16", "takes up to fp32"),
            (weight_of(TABLE4, table=FP64), "table is fp64", "bf16, fp16 and fp32"),
            (weight_of(LESS_ZERO, zero=BF16, inner=torch.int8), "zero bf16", "integer zeros"),
            (
                weight_of(LESS_ZERO, codes="float8_e4m3fn", inner=torch.int8),
                "float8_e4m3fn less a zero in int8",
                "integer codes",
            ),
            (weight_of(INT4, bk=24), "24 columns share", "multiples of 16, or whole rows"),
            (weight_of(INT4, bk=1), "1 columns share", "multiples of 16, or whole rows"),
        )
    ),
)


@pytest.mark.parametrize(
    ("name", "contract", "has", "takes"),
    WHY_NOT,
    ids=[f"{name}: {has}" for name, _, has, _ in WHY_NOT],
)
def test_why_not_says_what_it_got_and_what_it_takes(name, contract, has, takes):
    reason = DEQUANT_MATMUL.providers[name].why_not(contract)
    assert reason is not None and has in reason and takes in reason, reason
    assert "\n" not in reason


def sentences(provider: Any) -> Iterator[str]:
    """A pattern for each sentence in the source of a provider's `why_not` and its helpers."""
    module = inspect.getmodule(type(provider))
    functions = [getattr(module, name) for name in vars(module) if name.startswith("_why")]
    for function in (type(provider).why_not, *functions):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if not isinstance(node, ast.Return):
                continue
            parts = getattr(node.value, "values", [node.value])
            words = [p.value if isinstance(p, ast.Constant) else None for p in parts]
            if any(isinstance(word, str) for word in words):
                yield "".join(".*" if word is None else re.escape(word) for word in words)


@by_provider
def test_every_why_not_clause_is_tested(name):
    provider = DEQUANT_MATMUL.providers[name]
    given = [str(provider.why_not(contract)) for other, contract, *_ in WHY_NOT if other == name]
    for pattern in sentences(provider):
        assert any(re.fullmatch(pattern, reason) for reason in given), pattern


@by_provider
def test_targets(name):
    provider = DEQUANT_MATMUL.providers[name]
    targets = [t for t in ("cpu", "sm_80", "sm_90", "sm_100") if provider.runs_on(t)]
    assert targets and (provider.reference == (provider.name == "reference"))


# Plans and the registry -----------------------------------------------------------------------


class Toy:
    """A provider that answers as it is told."""

    dense = reference = False

    def __init__(self, name: str, limit: int, reason: str | None = None, **flags: bool) -> None:
        self.name, self.largest, self.reason = name, limit, reason
        vars(self).update(flags)

    def runs_on(self, target: str) -> bool:
        return target == "cpu"

    def why_not(self, contract: Any) -> str | None:
        return self.reason

    def limit(self, contract: Any, dense: bool = False) -> int:
        return self.largest

    def operands(self, contract: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"w": ((2, 3), FP32), self.name: ((1,), FP32)}

    def run(self, contract: Any, x: torch.Tensor, packed: Sequence[torch.Tensor]) -> torch.Tensor:
        return x


def toys(*providers: Toy) -> Op:
    """An operator that is in no registry, the reference registered first."""
    toy = Op("toy", DequantMatmul, reference, DEQUANT_MATMUL.cost, DEQUANT_MATMUL.weight)
    for provider in (Toy("reference", INFINITE, reference=True), *providers):
        toy.register(provider)
    return toy


def test_a_plan_is_ordered_by_limit_whatever_registered_first():
    toys_of = [Toy("many", 64), Toy("few", 4), Toy("no", 9, "has no")]
    assert toys(*toys_of).plan(INT4, "cpu", None) == toys(*toys_of[::-1]).plan(INT4, "cpu", None)
    toy = toys(*toys_of)
    plan = toy.plan(INT4, "cpu", None)
    assert plan.steps == ((4, "few"), (64, "many"), (INFINITE, "reference"))
    assert plan.summary == "few (M <= 4), many (M <= 64), reference (M > 64)"
    assert toy.plan(INT4, "cpu", 4).steps == ((4, "few"),)
    assert toy.plan(INT4, "cpu", 5).steps[0] == (64, "many")
    assert list(plan.operands(toy, INT4)) == ["w", "few", "many", "reference"]
    routes = plan.routes(toy, INT4)
    assert [(route.limit, route.provider.name) for route in routes] == list(plan.steps)
    assert [route.take for route in routes] == [(0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize(
    ("steps", "text", "summary"),
    [
        (((INFINITE, "all"),), f"{INFINITE}:all", "all"),
        (((16, "a.b"),), "16:a.b", "a.b (M <= 16)"),
        (
            ((16, "a.b"), (INFINITE, "c")),
            f"16:a.b,{INFINITE}:c",
            "a.b (M <= 16), c (M > 16)",
        ),
        (((1, "a"), (8, "b")), "1:a,8:b", "a (M <= 1), b (M <= 8)"),
        (
            ((4, "a@n64.k8"), (9, "a@n16")),
            "4:a@n64.k8,9:a@n16",
            "a@n64.k8 (M <= 4), a@n16 (M <= 9)",
        ),
    ],
)
def test_plans_as_text(steps, text, summary):
    plan = Plan(steps)
    assert (str(plan), plan.summary) == (text, summary)
    assert Plan.parse(text) == plan and hash(Plan.parse(text)) == hash(plan)


@pytest.mark.parametrize("route", ["", "a@", "@n8", "a@n8@k8", "a@n 8", "a@n:8", "a,b", "a b"])
def test_a_route_that_a_plan_cannot_print(route):
    with pytest.raises(ValueError, match="no route: .*; wanted `provider` or `provider@config`"):
        only(route)


class Tiled(Toy):
    """A toy that can be told a tile; its own choice grows with M."""

    calls: list[tuple[Any, ...]]

    def configs(self, contract: Any, m: int) -> list[str]:
        return [f"t{min(16, 1 << (m - 1).bit_length())}", "t1", "t64"]

    def run(self, contract: Any, x: Any, packed: Any, config: str) -> torch.Tensor:
        self.calls.append((contract, x, packed, config))
        return x


def test_a_plan_binds_configs():
    tiled = Tiled("tiled", INFINITE, calls=[])
    toy = toys(tiled, Toy("few", 2))
    plan = toy.plan(INT4, "cpu", None)
    assert plan.steps == ((2, "few"), (5, "tiled@t4"), (11, "tiled@t8"), (INFINITE, "tiled@t16"))
    assert plan == Plan.parse(str(plan))
    assert toy.plan(INT4, "cpu", 9).steps == ((INFINITE, "tiled@t16"),)
    assert list(plan.operands(toy, INT4)) == ["w", "few", "tiled"]
    assert plan.providers(toy) == [toy.providers["few"], tiled]
    _, *routes = plan.routes(toy, INT4)
    for (limit, route), bound in zip(plan.steps[1:], routes, strict=True):
        bound.run(INT4, "x", "packed")
        assert tiled.calls.pop() == (INT4, "x", "packed", split(route)[1])
        assert bound == (limit, (0, 2), tiled, split(route)[1])


def test_a_provider_without_a_limit_takes_every_m():
    class Unlimited(Toy):
        limit = None

    assert toys(Unlimited("all", 3)).plan(INT4, "cpu", None).steps == ((INFINITE, "all"),)


def test_dispatch_at_the_border():
    contract, source = CASES[1].contract, CASES[1].make()[1]
    plan = Plan(((5, "aten.int4pack_mm"), (INFINITE, "onednn.dequant_strips")))
    tensors = packed(plan, contract, source)
    for m, (_, name) in zip((1, 5, 6), (plan.steps[0], *plan.steps), strict=True):
        (x, *_) = activations(contract, m)
        alone = call(x, packed(only(name), contract, source), contract, only(name))
        assert not difference(call(x, tensors, contract, plan), alone)


def test_an_m_beyond_the_plan_is_an_error():
    contract, plan = CASES[1].contract, Plan(((5, "aten.int4pack_mm"),))
    tensors = packed(plan, contract, CASES[1].make()[1])
    with pytest.raises(RuntimeError, match=r"plan 5:aten.int4pack_mm has no provider for M = 6"):
        call(activations(contract, 6)[0], tensors, contract, plan)


def test_refused_where_only_the_reference_would_run():
    toy = toys(Toy("one", 4, "codes are int4; it takes int8"), Toy("two", 8, "N is 3; it takes 4"))
    with pytest.raises(Refused) as caught:
        toy.plan(INT4, "cpu", None)
    assert "one: codes are int4; it takes int8; two: N is 3; it takes 4" in caught.value.reason
    assert caught.value.contract == INT4.summary
    with pytest.raises(Refused, match="few: M is 9; it takes up to 4"):
        toys(Toy("few", 4)).plan(INT4, "cpu", 9)
    with pytest.raises(Refused, match=r"no provider for sm_90 takes it"):
        toys(Toy("few", 4)).plan(INT4, "sm_90", None)
    wide = dataclasses.replace(weight_of(INT4, dtype=FP32), x=FP32, out=FP32)
    for target in ("sm_80", "sm_90", "sm_100"):
        with pytest.raises(Refused) as caught:
            DEQUANT_MATMUL.plan(wide, target, None)
        for name in ("aten.int4pack_mm_cuda", "triton.mma", "triton.dequant_cublas"):
            assert f"{name}: x is fp32" in caught.value.reason
    with pytest.raises(Refused, match=r"no provider for sm_75 takes it"):
        DEQUANT_MATMUL.plan(INT4, "sm_75", None)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="toy has a provider 'few' already"):
        toys(Toy("few", 4), Toy("few", 5))
    with pytest.raises(ValueError, match="'reference' already"):
        DEQUANT_MATMUL.register(Reference())
    with pytest.raises(ValueError, match="'dequant_matmul' is registered already"):
        op(dataclasses.replace(DEQUANT_MATMUL))
    assert OPS["dequant_matmul"] is op(DEQUANT_MATMUL)


def test_cost():
    """int4[384,384] in groups of 64: codes, scales of 2 bytes, then x and the result."""
    found = {name: str(value) for name, value in DEQUANT_MATMUL.cost(INT4).items()}
    assert found == {"bytes": "1536*M + 78336", "flops": "294912*M"}
    wide = DEQUANT_MATMUL.cost(weight_of(INT8, arithmetic="(q-z)*s", zero=torch.int8))
    assert wide["bytes"].subs(M, 2) == 256 * 512 + 256 * 3 + 2 * 2 * (512 + 256)
    assert wide["flops"] == sympy.Integer(2 * 256 * 512) * M


# Operators ------------------------------------------------------------------------------------


def samples() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(operator, arguments) for several contracts; sizes that opcheck makes dynamic."""
    for i, m in ((16, 4), (18, 5), (0, 3), (4, 1), (9, 20), (12, 7), (7, 2)):
        contract = CASES[i].contract
        plan = DEQUANT_MATMUL.plan(contract, "cpu", None)
        tensors = packed(plan, contract, CASES[i].make()[1])
        x = activations(contract, m)[0]
        yield "dequant_matmul", (x, tensors, str(contract), str(plan))
    yield "dequant_matmul", (x[:0], tensors, str(contract), str(plan))
    yield "dequant_matmul", (x.t().contiguous().t(), tensors, str(contract), str(plan))
    for chosen in EXPERTS[:2]:
        contract, plan = chosen.contract, DEQUANT_MATMUL.plan(chosen.contract, "cpu", None)
        sources = [chosen.make(expert)[1] for expert in range(contract.experts)]
        tensors, texts = packed(plan, contract, sources), (str(contract), str(plan))
        x = torch.stack([activations(contract, 5)[0] for _ in sources])
        yield "dequant_bmm", (x, tensors, *texts)
        yield "dequant_bmm", (x.mT.contiguous().mT, tensors, *texts)
        ends = torch.linspace(2, 5 * len(sources) - 1, len(sources)).int()
        yield "dequant_grouped_matmul", (x.flatten(0, 1), ends, tensors, *texts)
        yield "dequant_gathered_bmm", (x, torch.arange(len(sources)).flip(0), tensors, *texts)
    for chosen in (CASES[10], CASES[18], CASES[30], CASES[32], EXPERTS[1]):
        yield "dequant_weight", weight_alone(chosen)[0]


def weight_alone(chosen: Case) -> tuple[tuple[list[torch.Tensor], str, list[str]], torch.Tensor]:
    """(arguments of dequant_weight, the weight as the specification has it)."""
    operator, contract = DEQUANT_MATMUL.weight(chosen.contract)
    assert operator == "dequant_weight"
    experts = chosen.contract.experts
    sources = [chosen.make(expert)[1] for expert in range(max(1, experts))]
    plan = Plan(((INFINITE, "reference"),))
    held = plan.pack(DEQUANT_MATMUL, chosen.contract, sources if experts else sources[0])
    weights = [dequantize(source.weight) for source in sources]
    names = list(DEQUANT_MATMUL.specification.operands(single(contract)[0]))
    expected = torch.stack(weights) if experts else weights[0]
    return ([held[name] for name in names], str(contract), names), expected


@pytest.mark.parametrize("chosen", [*CASES, *EXPERTS], ids=lambda chosen: chosen.name)
def test_the_weight_alone(chosen):
    arguments, expected = weight_alone(chosen)
    got = torch.ops.qinductor.dequant_weight(*arguments)
    assert not difference(got, expected) and got.is_contiguous()


SAMPLES = list(samples())


# Operators whose samples are in test_scaled_matmul.py, test_scaled_matmul_experts.py,
# test_quantize_triton.py, test_router.py and test_sgl_*.py.
ELSEWHERE = {
    "scaled_matmul", "scaled_matmul_zero", "scaled_grouped_matmul", "scaled_bmm", "quantize",
    "sgl_per_token_group_quant_8bit",
    "sgl_per_tensor_quant_fp8", "sgl_per_token_quant_fp8", "fp8_scaled_mm", "int8_scaled_mm",
    "fp8_blockwise_scaled_mm", "bmm_fp8", "bmm_fp8.out", "fp8_gemm_nt", "router",
    "dsv3_router_gemm", "dsv3_fused_a_gemm", "dsv3_fused_a_gemm.out", "shuffle_rows",
    "get_cutlass_w4a8_moe_mm_data", "cutlass_w4a8_moe_mm",
}  # fmt: skip


def test_every_operator_has_samples():
    qualified = torch._C._dispatch_get_all_op_names()
    named = {n.removeprefix("qinductor::") for n in qualified if n.startswith("qinductor::")}
    assert named == {name for name, _ in SAMPLES} | ELSEWHERE
    # The contract and the providers of `dequant_matmul` are those of its five.
    assert set(OPS) == {"dequant_matmul", "quantize", "router", "scaled_matmul"}


@pytest.mark.parametrize("i", range(len(SAMPLES)), ids=lambda i: f"{SAMPLES[i][0]} {i}")
def test_opcheck(i):
    name, arguments = SAMPLES[i]
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests.append("test_aot_dispatch_dynamic")
    held = next(argument for argument in arguments if isinstance(argument, list))
    if any(t.dtype in FLOAT8 for t in held):
        tests.remove("test_schema")  # compares inputs by torch.allclose, which float8 has not
    operator = getattr(torch.ops.qinductor, name).default
    torch.library.opcheck(operator, arguments, test_utils=tests)


# CUDA -----------------------------------------------------------------------------------------


CUDA_CASES = (
    *CASES,
    case("int4", 16, 4096, 4096, 1, 128),
    case("int4", 5, 1024, 384, 1, 64),
    case("uint4", 1, 8, 128, 1, 32),
    case("uint4", 16, 4096, 4096, 1, 4096),
    *CORNERS.values(),
)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA providers need a GPU to run")
@pytest.mark.parametrize("i", range(len(CUDA_CASES)), ids=lambda i: f"{CUDA_CASES[i].name} {i}")
@by_provider
def test_on_cuda(name, i):
    contract = CUDA_CASES[i].contract
    major, minor = torch.cuda.get_device_capability()
    provider = usable(name, contract, f"sm_{major}{minor}")
    source = on(CUDA_CASES[i].make()[1], "cuda")
    tensors = packed(only(name), contract, source)
    for m in sorted({min(m, limit_of(provider, contract)) for m in (1, 7, 64)}):
        route = routes_of(provider, contract, m)[0]
        xs = activations(contract, m, "cuda")
        ours = [direct(route, contract, x, tensors) for x in xs]
        for x, out in zip(xs, ours, strict=True):
            check(out, contract, m)
            with poisoned():
                assert not difference(call(x, tensors, contract, only(route)), out)
        hold(contract, ours, xs, source)
        turned = [x.t().contiguous().t() for x in xs]
        hold(contract, [call(x, tensors, contract, only(route)) for x in turned], xs, source)
        replays(contract, only(route), tensors, xs[0])


@pytest.mark.parametrize("name", ["aten.int4pack_mm", "aten.int8pack_mm"])
def test_a_weight_that_overflows_is_not_packed(name):
    """The row kernels scale a sum, so they would be finite where eager is not."""
    contract = dataclasses.replace(INT4 if "int4" in name else INT8, x=FP16, out=FP16)
    contract = weight_of(contract, scale=FP16, inner=FP16, compute=FP16, dtype=FP16)
    _, source = Case("overflows", 4, contract).make()
    provider = usable(name, contract)
    assert provider.pack(contract, source)
    source.weight.scale.fill_(3e4)
    with pytest.raises(Refused, match="W must be finite in fp16; an element overflows"):
        provider.pack(contract, source)


def test_a_zero_that_is_rounded_is_not_packed():
    contract = case("uint8", 4, 64, 64, 1, 64, arithmetic="(q-z)*s", zero=torch.int16).contract
    _, source = Case("far zero", 4, contract).make()
    source.weight.zero.fill_(3000)
    with pytest.raises(Refused, match="q - z must be exact in torch.bfloat16, up to 256"):
        usable("onednn.dequant_strips", contract).pack(contract, source)
