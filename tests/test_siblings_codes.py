"""Products of codes of one activation, computed as one: results, and what keeps them apart."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from models import BF16, FP16, FP32, Holder, Random, grouped, nibbles
from scaled import E4M3, codes, provided

import qinductor
from qinductor.op import Op

qinductor.load()  # before `provided` stands for what is registered
K, SIZES = 256, (128, 32, 64)
PLAIN = {"patterns": {"quantize": "off"}}
REQUANTISED = {"patterns": {"quantize": "off", "scaled_matmul_requantised": "on"}}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product takes as long as any other, where a plan is asked for."""
    known = Op.plan

    def plan(self, contract, target, m, dense=False):
        return dataclasses.replace(known(self, contract, target, m, dense), us=(1.0,))

    monkeypatch.setattr(Op, "plan", plan)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def run(
    module: torch.nn.Module, *args: torch.Tensor, options: dict = PLAIN, dynamic: bool | None = None
) -> Sequence[torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(module, backend="qinductor", options=options, dynamic=dynamic)(*args)


def together() -> list[bool]:
    """Of each product that is lowered, whether it is computed by that of another row."""
    sites = qinductor.last_report().sites
    return [site.provider.startswith("with ") for site in sites if site.lowered]


def heads(
    product: Callable,
    sizes: Sequence[int] = SIZES,
    bias: Sequence[int] = (),
    **shared: torch.Tensor,
) -> Holder:
    """`product(m, x, i)` for each size, of the buffers w<i>, s<i> and b<i>."""
    r = Random()
    held = dict(shared)
    for i, n in enumerate(sizes):
        held[f"w{i}"] = r.float8(n, K)
        held[f"i{i}"] = r.integers(-128, 128, n, K, dtype=torch.int8)
        held[f"s{i}"] = r.scales(1, n, dtype=FP32)
        held[f"t{i}"] = r.scales(1, 1, dtype=FP32)
        held[f"g{i}"] = r.scales(-(-K // 128), -(-n // 128), dtype=FP32)
        if i in bias:
            held[f"b{i}"] = r.normal(n)
    return Holder(lambda m, *xs: tuple(product(m, *xs, i) for i in range(len(sizes))), **held)


def of(m: Holder, name: str, i: int) -> torch.Tensor | None:
    return getattr(m, f"{name}{i}", None)


def multiplied(m: Holder, q: torch.Tensor, s: torch.Tensor, i: int, out: torch.dtype = BF16):
    return torch._scaled_mm(
        q, of(m, "w", i).t(), scale_a=s, scale_b=of(m, "s", i), bias=of(m, "b", i), out_dtype=out
    )


def rows(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """Each quantises x again."""
    q, s = codes(x.flatten(0, 1))
    return multiplied(m, q, s, i).unflatten(0, x.shape[:2])


def tensor(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    q, s = codes(x.flatten(0, 1), dims=(0, 1))
    return torch._scaled_mm(q, of(m, "w", i).t(), scale_a=s, scale_b=of(m, "t", i), out_dtype=BF16)


def blocks(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    q, s = codes(x.flatten(0, 1).unflatten(-1, (-1, 128)))
    s = s.squeeze(-1).t().contiguous().t()
    return torch._scaled_mm(
        q.flatten(-2), of(m, "w", i).t(), scale_a=s, scale_b=of(m, "g", i), out_dtype=BF16
    )


def integers(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """With a view in the midst, and the scale of the weight in other places for each."""
    q, s = codes(x.flatten(0, 1), torch.int8)
    sums = torch._int_mm(q, of(m, "i", i).t()).float()
    y = sums * s * of(m, "s", i) if i else sums * of(m, "s", i) * s
    y, bias = y.unflatten(0, x.shape[:2]), of(m, "b", i)
    return (y if bias is None else y + bias).to(BF16)


def mixed(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """The first weight has one scale, the others one for each row."""
    q, s = codes(x.flatten(0, 1), torch.int8)
    return (torch._int_mm(q, of(m, "i", i).t()).float() * s * of(m, "s" if i else "t", i)).to(BF16)


def unscaled(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    q, s = codes(x.flatten(0, 1), torch.int8)
    return (torch._int_mm(q, of(m, "i", i).t()).float() * s).to(FP16)


def four_bits(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """Both sides dequantised, in groups of 32."""
    q, s = codes(x.flatten(0, 1), torch.int8)
    packed = of(m, "i", i)[:, : K // 2].view(torch.uint8)
    w = grouped(nibbles(packed).float() - 8, of(m, "s", i).reshape(-1, 1).expand(-1, K // 32))
    return (q.float() * s) @ w.t()


def static(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """The scale of x is stored."""
    q = (x.flatten(0, 1).float() / m.one).clamp(-448, 448).to(E4M3)
    return torch._scaled_mm(q, of(m, "w", i).t(), scale_a=m.one, scale_b=m.two, out_dtype=BF16)


def constant(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """The largest code is a tensor that the graph holds, once for each product."""
    y, largest = x.flatten(0, 1).float(), torch.tensor(448.0)
    s = y.abs().amax(-1, keepdim=True) / largest
    return multiplied(m, (y / s).clamp(-largest, largest).to(E4M3), s, i)


ONE, TWO = torch.full((), 0.02), torch.full((), 0.01)
CASES: dict[str, tuple[Callable[[], Holder], dict]] = {
    "rows": (lambda: heads(rows), PLAIN),
    "rows, bias": (lambda: heads(rows, bias=(0, 1, 2)), PLAIN),
    "tensor": (lambda: heads(tensor), PLAIN),
    "blocks": (lambda: heads(blocks, (256, 128, 384)), PLAIN),
    "integers, bias": (lambda: heads(integers, bias=(0, 1, 2)), PLAIN),
    "mixed": (lambda: heads(mixed), PLAIN),
    "unscaled": (lambda: heads(unscaled), PLAIN),
    "four bits": (lambda: heads(four_bits), REQUANTISED),
    "static": (lambda: heads(static, one=ONE, two=TWO), PLAIN),
    "constant": (lambda: heads(constant), PLAIN),
}
# `_scaled_mm` takes scales of blocks on CUDA alone, those of rows on a CPU since torch 2.13.
NO_EAGER = ("blocks", *("rows", "rows, bias", "constant") * (torch.__version__ < (2, 13)))


def x_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return Random(seed).normal(*shape, K)


def agree(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> None:
    for a, e in zip(ours, eager, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())
        torch.testing.assert_close(a, e, rtol=0.02, atol=0.02 * float(e.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_one_product_gives_what_several_do(name: str, request: pytest.FixtureRequest) -> None:
    """Bit for bit, by a provider that is exact."""
    make, options = CASES[name]
    module, x = make(), x_of(4, 16)
    with provided():
        apart = run(module, x, options=options)
        assert together() == [False] * 3
        request.getfixturevalue("timed")
        ours = run(module, x, options=options)
        assert together() == [False, True, True]
    agree(ours, apart if name in NO_EAGER else module(x))
    assert all(torch.equal(a, b) for a, b in zip(ours, apart, strict=True))


@pytest.mark.parametrize("name", ["rows", "integers, bias"])
def test_symbolic_rows(name: str, timed: None) -> None:
    make, _ = CASES[name]
    module = make()
    compiled = torch.compile(module, backend="qinductor", options=PLAIN, dynamic=True)
    with provided():
        for shape in ((4, 16), (3, 9)):
            x = x_of(*shape)
            ours = compiled(x)
            assert [t.shape[:2] for t in ours] == [shape] * 3
            if name not in NO_EAGER:
                agree(ours, module(x))
    assert together() == [False, True, True]
    assert len(qinductor.reports()) == 1


@pytest.mark.parametrize("name", ["rows", "integers, bias", "blocks", "tensor"])
def test_by_the_providers_of_a_cpu(name: str, request: pytest.FixtureRequest) -> None:
    make, options = CASES[name]
    module, x = make(), x_of(8, 16)
    apart = run(module, x, options=options)
    request.getfixturevalue("timed")
    for ours, wanted in zip(run(module, x, options=options), apart, strict=True):
        if name == "integers, bias":  # whose sums are exact
            assert torch.equal(ours, wanted)
        torch.testing.assert_close(ours, wanted, rtol=0.01, atol=1e-3 * float(wanted.abs().max()))
    assert together() == [False, True, True]


def test_results_that_are_made_in_another_order(timed: None) -> None:
    """The last product's result comes first, and is read before the first one has its scale."""

    def function(m: Holder, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, s = codes(x, torch.int8)
        sums = [torch._int_mm(q, of(m, "i", i).t()) for i in range(3)]
        found: list[torch.Tensor] = []
        for i in (2, 0, 1):
            found.append((sums[i].float() * s * of(m, "s", i)).to(BF16))
            found.append(torch.tanh(found[-1]))
        return tuple(found)

    module, x = heads(integers), x_of(64)
    module.function = function
    for ours, eager in zip(run(module, x), module(x), strict=True):
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride()
    q, k, v = qinductor.last_report().sites
    assert [site.contract.split()[5] for site in (q, k, v)] == [f"int8[{n},{K}]" for n in SIZES]
    assert q.provider.endswith("3 products of x as one")
    assert k.provider == v.provider == f"with {q.where}"


def test_weights_that_change_and_other_models(timed: None) -> None:
    first, second, x = heads(rows), heads(rows, bias=()), x_of(4, 16)
    for _, tensor in second.named_buffers():
        tensor.copy_(tensor.float().flip(0).to(tensor.dtype))
    with provided():
        compiled = torch.compile(Holder.forward, backend="qinductor", options=PLAIN)
        before, other = compiled(first, x), compiled(second, x)
        for name, tensor in first.named_buffers():
            tensor.copy_(second.get_buffer(name))
        changed = compiled(first, x)
        assert together() == [False, True, True]
    assert [torch.equal(a, b) for a, b in zip(changed, other, strict=True)] == [True] * 3
    assert not any(torch.equal(a, b) for a, b in zip(changed, before, strict=True))
    assert len(qinductor.reports()) == 1


def test_replaced_weights_are_alone(timed: None) -> None:
    run(heads(rows), x_of(4, 16), options={**PLAIN, "weights": "replace"})
    assert together() == [False] * 3


def test_without_times_each_is_alone() -> None:
    run(heads(rows), x_of(4, 16))
    assert together() == [False] * 3


# What keeps products apart.


def other_scale(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """Of x: stored, another one of the same value for the second product."""
    scale = m.other if i == 1 else m.one
    q = (x.flatten(0, 1).float() / scale).clamp(-448, 448).to(E4M3)
    return torch._scaled_mm(q, of(m, "w", i).t(), scale_a=scale, scale_b=m.two, out_dtype=BF16)


def other_scale_of_one_code(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """The same codes, times another scale."""
    q, s = codes(x.flatten(0, 1), torch.int8)
    s = s * 2 if i == 1 else s
    return (torch._int_mm(q, of(m, "i", i).t()).float() * s * of(m, "s", i)).to(BF16)


def other_source(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    return integers(m, x + 1 if i == 1 else x, i)


def other_limit(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """The scale is of a largest code of 127 or 128."""
    y = x.flatten(0, 1).float()
    s = y.abs().amax(-1, keepdim=True) / (128 if i == 1 else 127)
    q = (y / s).clamp(-127, 127).round().to(torch.int8)
    return (torch._int_mm(q, of(m, "i", i).t()).float() * s * of(m, "s", i)).to(BF16)


def other_rounding(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    y = x.flatten(0, 1).float()
    s = y.abs().amax(-1, keepdim=True) / 127
    q = (torch.trunc(y / s) if i == 1 else torch.round(y / s)).to(torch.int8)
    return (torch._int_mm(q, of(m, "i", i).t()).float() * s * of(m, "s", i)).to(BF16)


def other_rows(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """As many, in another order."""
    return integers(m, x.transpose(0, 1) if i == 1 else x, i)


def fewer_rows(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    return integers(m, x[1:] if i == 1 else x, i)


def other_out(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    q, s = codes(x.flatten(0, 1), torch.int8)
    y = torch._int_mm(q, of(m, "i", i).t()).float() * s * of(m, "s", i)
    return y.to(FP16 if i == 1 else BF16)


def other_operator(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """The second product takes its codes dequantised, exactly."""
    q, s = codes(x.flatten(0, 1), torch.int8)
    if i != 1:
        return torch._int_mm(q, of(m, "i", i).t()).float() * s * of(m, "s", i)
    return q.float() @ of(m, "i", i).float().t() * s * of(m, "s", i)


def written(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    """x is doubled in place before the second product, and halved after it."""
    y = m.x if i else x.clone()
    m.x = y
    if i == 1:
        y.mul_(2)
    found = integers(m, y, i)
    if i == 1:
        y.mul_(0.5)
    return found


def random(m: Holder, x: torch.Tensor, i: int) -> torch.Tensor:
    return integers(m, torch.nn.functional.dropout(x, 0.5) if i else x, i)


APART: dict[str, tuple[Callable[[], Holder], list[bool]]] = {
    "another scale": (
        lambda: heads(other_scale, one=ONE, two=TWO, other=ONE.clone()), [False, False, True]
    ),
    "another scale of the same codes": (
        lambda: heads(other_scale_of_one_code), [False, False, True]
    ),
    "another source": (lambda: heads(other_source), [False, False, True]),
    "another limit": (lambda: heads(other_limit), [False, False, True]),
    "another rounding": (lambda: heads(other_rounding), [False, False, True]),
    "rows in another order": (lambda: heads(other_rows), [False, False, True]),
    "fewer rows": (lambda: heads(fewer_rows), [False, False, True]),
    "another result": (lambda: heads(other_out), [False, False, True]),
    "one bias": (lambda: heads(integers, bias=(1,)), [False, False, True]),
    "another operator": (lambda: heads(other_operator), [False, False, True]),
    "written to": (lambda: heads(written), [False, False, False]),
    "random": (lambda: heads(random), [False, False, False]),
    "blocks that end within": (lambda: heads(blocks, (128, 192, 256)), [False, False, True]),
    "blocks of another size": (lambda: heads(blocks, (128, 64, 256)), [False, False, True]),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_those_that_differ_are_alone(name: str, timed: None) -> None:
    make, wanted = APART[name]
    module, x = make(), x_of(4, 16)
    with provided():
        torch.manual_seed(0)
        ours = run(module, x)
        flags = together()
    assert flags == wanted
    if name != "random" and "blocks" not in name:  # no eager result, or another one
        agree(ours, module(x))


def test_one_that_is_refused_stops_no_other(timed: None) -> None:
    def refused(m: Holder, x: torch.Tensor, w: torch.Tensor, i: int) -> torch.Tensor:
        q, s = codes(x.flatten(0, 1), torch.int8)
        weight = w if i == 1 else of(m, "i", i)
        return (torch._int_mm(q, weight.t()).float() * s * of(m, "s", i)).to(BF16)

    module, x = heads(refused), x_of(4, 16)
    w = Random(3).integers(-128, 128, SIZES[1], K, dtype=torch.int8)
    for ours, eager in zip(run(module, x, w), module(x, w), strict=True):
        torch.testing.assert_close(ours, eager)
    q, k, v = qinductor.last_report().sites
    assert k.reason.startswith("the weight must be made of constants")
    assert v.provider == f"with {q.where}"
