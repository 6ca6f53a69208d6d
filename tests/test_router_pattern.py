"""Routers in graphs: the contract of each spelling, graphs before and after, results on a CPU."""

from unittest import mock

import pytest
import torch
from goldens import Golden, outcome
from quantisers import Of
from router_spellings import SPELLINGS, deepseek_v3, mixtral, normal, returns_logits
from routers import (
    BF16,
    FP16,
    FP32,
    H,
    N,
    assert_close,
    compiled,
    distinct,
    found,
    provided,
    sites,
    tokens,
    weight,
)

import qinductor
from qinductor.kernels.router import Router, largest
from qinductor.patterns.router_formats.find import INSTEAD
from qinductor.patterns.router_formats.identify import battery
from qinductor.testing import rewritten

PLAIN = {
    "n": N, "k": 4, "logits": BF16, "compute": FP32, "out": FP32, "hidden": H, "x": BF16,
    "weight": BF16,
}  # fmt: skip


class TestGolden(Golden):
    """Graphs for a GPU, before and after."""

    def gpu(self, function, *x, dynamic=None, **buffers):
        with provided():
            made = rewritten(lambda: Of(function, **buffers), *x, target="sm_90", dynamic=dynamic)
        return self.expects(f"{made.before}\n{outcome(made.report)}\n{made.after}\n")

    def test_softmax(self) -> None:
        self.gpu(mixtral, tokens(8), w=weight())("""\
%0: bfloat16[16, 64]@cuda = placeholder
%1: bfloat16[8, 64]@cuda = placeholder
%2: bfloat16[64, 16]@cuda = aten.permute.default(%0, [1, 0])
%3: bfloat16[8, 16]@cuda = aten.mm.default(%1, %2)
%4: float32[8, 16]@cuda = prims.convert_element_type.default(%3, torch.float32)
%5: float32[8, 1]@cuda = aten.amax.default(%4, [-1], True)
%6: float32[8, 16]@cuda = aten.sub.Tensor(%4, %5)
%7: float32[8, 16]@cuda = aten.exp.default(%6)
%8: float32[8, 1]@cuda = aten.sum.dim_IntList(%7, [-1], True)
%9: float32[8, 16]@cuda = aten.div.Tensor(%7, %8)
%10: tuple = aten.topk.default(%9, 4)
%11: float32[8, 4]@cuda = getitem(%10, 0)
%12: int64[8, 4]@cuda = getitem(%10, 1)
%13: float32[8, 1]@cuda = aten.sum.dim_IntList(%11, [-1], True)
%14: float32[8, 4]@cuda = aten.div.Tensor(%11, %13)
%15: bfloat16[8, 4]@cuda = prims.convert_element_type.default(%14, torch.bfloat16)
output [%15, %12]
---- 1 of 1 lowered
%0: bfloat16[16, 64]@cuda = placeholder
%1: bfloat16[8, 64]@cuda = placeholder
%2: tuple = qinductor.router.default([%1, %0])
    n=16 k=4 logits=bfloat16 compute=float32 out=bfloat16 hidden=64 x=bfloat16 weight=bfloat16
      normalised=s+eps
    test.anywhere
%3: bfloat16[8, 4]@cuda = getitem(%2, 0)
%4: int64[8, 4]@cuda = getitem(%2, 1)
output [%3, %4]
""")

    def test_groups_of_symbolic_rows(self) -> None:
        self.gpu(deepseek_v3, tokens(8), dynamic=True, w=weight(), b=torch.zeros(N))("""\
%0: bfloat16[16, 64]@cuda = placeholder
%1: s0 = placeholder
%2: bfloat16[s0, 64]@cuda = placeholder
%3: float32[16]@cuda = placeholder
%4: float32[s0, 64]@cuda = prims.convert_element_type.default(%2, torch.float32)
%5: float32[16, 64]@cuda = prims.convert_element_type.default(%0, torch.float32)
%6: float32[64, 16]@cuda = aten.permute.default(%5, [1, 0])
%7: float32[s0, 16]@cuda = aten.mm.default(%4, %6)
%8: float32[s0, 16]@cuda = aten.sigmoid.default(%7)
%9: float32[s0, 16]@cuda = aten.add.Tensor(%8, %3)
%10: float32[s0, 4, 4]@cuda = aten.view.default(%9, [-1, 4, 4])
%11: tuple = aten.topk.default(%10, 2)
%12: float32[s0, 4, 2]@cuda = getitem(%11, 0)
%13: float32[s0, 4]@cuda = aten.sum.dim_IntList(%12, [-1])
%14: tuple = aten.topk.default(%13, 2, -1, True, False)
%15: int64[s0, 2]@cuda = getitem(%14, 1)
%16: float32[s0, 4]@cuda = aten.full.default([%1, 4], 0, dtype=torch.float32,
  layout=torch.strided, device=cuda:0, pin_memory=False)
%17: float32[s0, 4]@cuda = aten.scatter.value(%16, 1, %15, 1)
%18: float32[s0, 4, 1]@cuda = aten.unsqueeze.default(%17, -1)
%19: float32[s0, 4, 4]@cuda = aten.expand.default(%18, [-1, 4, 4])
%20: float32[s0, 4, 4]@cuda = aten.clone.default(%19, memory_format=torch.contiguous_format)
%21: float32[s0, 16]@cuda = aten.view.default(%20, [%1, 16])
%22: bool[s0, 16]@cuda = prims.convert_element_type.default(%21, torch.bool)
%23: bool[s0, 16]@cuda = aten.bitwise_not.default(%22)
%24: float32[]@cuda = aten.scalar_tensor.default(-inf, dtype=torch.float32,
  layout=torch.strided, device=cuda:0)
%25: float32[s0, 16]@cuda = aten.where.self(%23, %24, %9)
%26: tuple = aten.topk.default(%25, 4, -1, True, False)
%27: int64[s0, 4]@cuda = getitem(%26, 1)
%28: float32[s0, 4]@cuda = aten.gather.default(%8, 1, %27)
%29: float32[s0, 1]@cuda = aten.sum.dim_IntList(%28, [-1], True)
%30: float32[s0, 1]@cuda = aten.add.Tensor(%29, 1e-20)
%31: float32[s0, 4]@cuda = aten.div.Tensor(%28, %30)
%32: float32[s0, 4]@cuda = aten.mul.Tensor(%31, 2.5)
output [%32, %27]
---- 1 of 1 lowered
%0: bfloat16[16, 64]@cuda = placeholder
%1: s0 = placeholder
%2: bfloat16[s0, 64]@cuda = placeholder
%3: float32[16]@cuda = placeholder
%4: tuple = qinductor.router.default([%2, %0, %3])
    n=16 k=4 logits=float32 compute=float32 out=float32 hidden=64 x=bfloat16 weight=bfloat16
      score=sigmoid bias=float32 groups=4 kept=2 group_score=top2 normalised=s+eps epsilon=1e-20
      scale=2.5
    test.anywhere
%5: float32[s0, 4]@cuda = getitem(%4, 0)
%6: int64[s0, 4]@cuda = getitem(%4, 1)
output [%5, %6]
""")

    def test_logits_that_are_returned(self) -> None:
        self.gpu(returns_logits, tokens(8), w=weight())("""\
%0: bfloat16[16, 64]@cuda = placeholder
%1: bfloat16[8, 64]@cuda = placeholder
%2: bfloat16[64, 16]@cuda = aten.permute.default(%0, [1, 0])
%3: bfloat16[8, 16]@cuda = aten.mm.default(%1, %2)
%4: float32[8, 16]@cuda = prims.convert_element_type.default(%3, torch.float32)
%5: float32[8, 1]@cuda = aten.amax.default(%4, [-1], True)
%6: float32[8, 16]@cuda = aten.sub.Tensor(%4, %5)
%7: float32[8, 16]@cuda = aten.exp.default(%6)
%8: float32[8, 1]@cuda = aten.sum.dim_IntList(%7, [-1], True)
%9: float32[8, 16]@cuda = aten.div.Tensor(%7, %8)
%10: tuple = aten.topk.default(%9, 4)
%11: float32[8, 4]@cuda = getitem(%10, 0)
%12: int64[8, 4]@cuda = getitem(%10, 1)
%13: float32[8, 1]@cuda = aten.sum.dim_IntList(%11, [-1], True)
%14: float32[8, 1]@cuda = aten.add.Tensor(%13, 0.0)
%15: float32[8, 4]@cuda = aten.div.Tensor(%11, %14)
%16: bfloat16[8, 4]@cuda = prims.convert_element_type.default(%15, torch.bfloat16)
output [%3, %16, %12]
---- 1 of 1 lowered
%0: bfloat16[16, 64]@cuda = placeholder
%1: bfloat16[8, 64]@cuda = placeholder
%2: bfloat16[64, 16]@cuda = aten.permute.default(%0, [1, 0])
%3: bfloat16[8, 16]@cuda = aten.mm.default(%1, %2)
%4: tuple = qinductor.router.default([%3])
    n=16 k=4 logits=bfloat16 compute=float32 out=bfloat16 normalised=s+eps
    test.anywhere
%5: bfloat16[8, 4]@cuda = getitem(%4, 0)
%6: int64[8, 4]@cuda = getitem(%4, 1)
output [%3, %5, %6]
""")


@pytest.mark.parametrize("name", SPELLINGS)
def test_contract(name):
    case = SPELLINGS[name]
    fields = {**PLAIN, "bias": case.buffers.get("b"), **case.fields}
    if not fields["hidden"]:
        fields |= {"x": None, "weight": None}
    assert found(case.function, tokens(), w=weight(), **case.tensors()) == Router(**fields)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_gpu_has_a_provider(name):
    case = SPELLINGS[name]
    made = rewritten(
        lambda: Of(case.function, w=weight(), **case.tensors()), tokens(), target="sm_90"
    )
    (site,) = made.report.sites
    assert site.lowered and site.provider.startswith("triton."), made.report


def test_a_cpu_has_none():
    made = rewritten(lambda: Of(mixtral, w=weight()), tokens())
    (site,) = made.report.sites
    assert not site.lowered and "no provider for cpu takes it" in site.reason
    assert site.contract == "bf16 logits, softmax in fp32, top 4 of 16, normalised, -> bf16"


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("rows", [1, 2, 3, 100, 5000])
def test_static_rows(rows, target):
    x, b = tokens(rows), torch.zeros(N)
    first = found(deepseek_v3, tokens(7), w=weight(), b=b)
    assert found(deepseek_v3, x, w=weight(), b=b, target=target) == first
    assert found(mixtral, x, w=weight(), target=target).normalised == "s+eps"


def test_many_static_rows_without_a_bias():
    """Of a search over so many logits some batteries are left out, never all."""

    def router(x):
        return torch.topk(torch.softmax(x, -1, dtype=torch.float32), 8)

    assert found(router, torch.randn(4096, 256)).k == 8


def test_a_bias_with_an_axis_before_its_own():
    def router(m, x):
        scores = torch.nn.functional.linear(x, m.w).sigmoid()
        indices = (scores + m.b).topk(4)[1]
        return scores.gather(1, indices), indices

    same = found(router, tokens(), w=weight(), b=torch.zeros(N))
    assert found(router, tokens(), w=weight(), b=torch.zeros(1, N)) == same
    assert same.bias is torch.float32


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_symbolic_rows(shape, target):
    def of_rank(m, x):
        weights, indices = deepseek_v3(m, x.view(-1, H))
        return weights.view(*x.shape[:-1], 4), indices

    x = torch.randn(*shape, H).to(BF16)
    more = {"w": weight(), "b": torch.zeros(N)}
    expected = found(deepseek_v3, tokens(), **more)
    assert found(of_rank, x, target=target, dynamic=True, **more) == expected
    if len(shape) > 1:  # the product takes views of x
        assert found(mixtral, x, target=target, dynamic=True, **more).hidden == H
        assert not found(returns_logits, x, target=target, dynamic=True, **more).hidden


@pytest.mark.parametrize("n, k", [(2, 1), (8, 2), (60, 4), (128, 8), (160, 6), (384, 8), (16, 16)])
def test_experts(n, k):
    def router(m, x):
        weights, indices = torch.softmax(torch.nn.functional.linear(x, m.w).float(), -1).topk(k)
        return weights / weights.sum(-1, keepdim=True), indices

    contract = found(router, tokens(), w=weight(n))
    assert (contract.n, contract.k) == (n, k)
    assert contract.normalised == "s+eps"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n, k", [(7, 3), (60, 6), (347, 7)])
@pytest.mark.parametrize("rows", [1, 5, 131])
def test_odd_sizes(rows, n, k, threads):
    """On a CPU the last bit of a sigmoid depends on how many there are, and on which thread."""

    def router(m, x):
        made = torch.nn.functional.linear(x.float(), m.w.float())
        picked, first = made.topk(k)
        gates = torch.sigmoid(made)
        second = (gates + m.b).topk(k)[1]
        picked, weights = picked.sigmoid(), gates.gather(1, second)
        return normal(picked), first, normal(weights), second

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        report, found = sites(router, tokens(rows), w=weight(n), b=torch.zeros(n))
    finally:
        torch.set_num_threads(before)
    assert report.lowered == len(report.sites) == 2, report
    assert {contract.order for contract in found} == {"select-score", "score-select"}
    assert {contract.normalised for contract in found} == {"s+eps"}


@pytest.mark.parametrize("x, w", [(FP16, FP16), (FP32, FP32), (BF16, FP32)])
def test_dtypes(x, w):
    def router(m, x):
        product = torch.nn.functional.linear(x.to(m.w.dtype), m.w)
        return torch.softmax(product.float(), -1).topk(4)

    contract = found(router, tokens(dtype=x), w=weight(dtype=w))
    assert (contract.x, contract.weight, contract.logits) == (x, w, w)


@pytest.mark.parametrize("shape", [(6, N), (2, 3, N)])
def test_given_logits(shape):
    def router(logits):
        return torch.softmax(logits.float(), -1).topk(4)

    contract = found(router, torch.randn(*shape).to(BF16))
    assert contract == Router(n=N, k=4, logits=BF16, compute=FP32, out=FP32)


def test_logits_of_two_products():
    def router(m, x):
        product = torch.nn.functional.linear
        return torch.softmax((product(x, m.w) + product(x, m.v)).float(), -1).topk(4)

    contract = found(router, tokens(), w=weight(), v=weight())
    assert contract == Router(n=N, k=4, logits=BF16, compute=FP32, out=FP32)


def test_logits_within_a_wider_product():
    def router(m, x):
        logits = torch.nn.functional.linear(x, m.w)
        return torch.softmax(logits[:, :N].float(), -1).topk(4), logits[:, N:]

    contract = found(router, tokens(), w=weight(3 * N))
    assert contract == Router(n=N, k=4, logits=BF16, compute=FP32, out=FP32)


def test_a_product_that_no_provider_has_stays_the_graphs():
    """The selection is lowered alone."""

    def given(self, contract):
        return "no product" if contract.hidden else None

    with mock.patch("routers.Anywhere.why_not", given):
        report, (contract,) = sites(mixtral, tokens(), w=weight())
    assert report.lowered == 1 and not contract.hidden


def test_experts_are_sorted_by_a_mixture_that_stays():
    """As grouped products want them: what reads indices and weights reads the operator's."""

    def mixture(m, x):
        weights, indices = mixtral(m, x)
        order = torch.argsort(indices.reshape(-1))
        rows = torch.ops.aten.index.Tensor(x, [order // 4])
        return rows * torch.ops.aten.index.Tensor(weights.reshape(-1), [order]).unsqueeze(-1)

    assert found(mixture, tokens(), w=weight()).normalised == "s+eps"


@pytest.mark.parametrize("wide", [False, True])
def test_indices_of_32_bits(wide):
    """Only where nothing reads them in 64: there is one choice of experts."""

    def router(m, x):
        weights, indices = mixtral(m, x)
        narrow = indices.to(torch.int32)
        return weights, narrow, m.e.expand(len(x), N).gather(1, indices) if wide else None

    contract = found(router, tokens(), w=weight(), e=torch.randn(N))
    assert contract.indices is (torch.int64 if wide else torch.int32)


def test_equal_regions_are_probed_once():
    def layers(m, x):
        return (*mixtral(m, x), *mixtral(Of(None, w=m.v), x), *deepseek_v3(m, x))

    def run():
        report, _ = sites(layers, tokens(8), w=weight(), v=weight(), b=torch.zeros(N))
        assert report.lowered == 3
        return [site.evaluations[0] for site in report.sites]

    with mock.patch.object(
        next(p for p in qinductor.load() if p.name == "router"), "_find", fresh()
    ):
        first, second, third = run()
        assert 0 < first <= 8 and second == 0 and 0 < third <= 20
        assert run() == [0, 0, 0]


def fresh():
    from qinductor.patterns.router_formats.find import Finder

    return Finder()


def test_a_graph_without_a_topk_is_run_on_no_probe():
    report, _ = sites(lambda x: torch.softmax(x.float(), -1).argmax(-1), tokens())
    assert not report.sites


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_topk_of_probes_is_that_of_the_specification(rows, dtype):
    """In a batch of runs, too."""
    topk = INSTEAD[torch.ops.aten.topk.default]
    x = battery(Router(n=N, k=4, logits=dtype, compute=FP32, out=FP32), 28 * rows, 3)
    assert x.isnan().any() and (x == 0).any()
    expected = largest(x, 4)
    values, indices = topk(x, 4)
    assert torch.equal(indices, expected)
    assert torch.equal(values.nan_to_num(7), x.gather(-1, expected).nan_to_num(7))
    batched = torch.vmap(lambda x: topk(x, 4)[1])(x.view(28, rows, N))
    assert torch.equal(batched.view(-1, 4), expected)


# Results, compiled for a CPU with the reference.


def test_results():
    """Of every spelling, in one graph: logits of a row are different, and exact."""
    names = [name for name in SPELLINGS if name != "stored_turned"]  # no rows of distinct logits

    def every(m, x):
        found = []
        for name in names:
            held = {key: getattr(m, f"{name}_{key}") for key in SPELLINGS[name].buffers}
            found.append(SPELLINGS[name].function(Of(None, w=m.w, **held), x))
        return found

    x, w = distinct(12)
    tensors = {
        f"{name}_{key}": tensor
        for name in names for key, tensor in SPELLINGS[name].tensors().items()
    }  # fmt: skip
    _, ours, report = compiled(every, x, w=w, **tensors)
    assert report.lowered == len(report.sites) == len(names)
    for name, mine, theirs in zip(names, ours, every(Of(None, w=w, **tensors), x), strict=True):
        assert_close(mine, theirs, name)


def test_other_rows_and_a_changed_bias():
    """One compile serves all; of a bias nothing is kept."""
    x, w = distinct()
    torch._dynamo.mark_dynamic(x, 0)
    b = torch.randperm(N) / 64
    compiled_module, _, report = compiled(deepseek_v3, x, w=w, b=b)
    module = Of(deepseek_v3, w=w, b=b)
    assert report.lowered == 1
    graphs = len(qinductor.reports())
    for rows in (6, 3, 200):
        held = distinct(rows)[0]
        with torch.no_grad(), provided():
            for _ in range(2):
                assert_close(compiled_module(held), module(held))
                b.copy_(torch.randperm(N) / 32)
    assert len(qinductor.reports()) == graphs


def test_ties_go_to_the_lower_expert():
    x, w = torch.zeros(3, H, dtype=BF16), weight()
    _, (weights, indices), report = compiled(mixtral, x, w=w)
    assert report.lowered == 1
    assert indices.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.equal(weights, torch.full((3, 4), 0.25, dtype=BF16))


def test_off_and_required():
    x, w = distinct()
    _, ours, report = compiled(mixtral, x, w=w, options={"patterns": {"router": "off"}})
    assert not report.sites
    assert_close(ours, mixtral(Of(None, w=w), x))
    with pytest.raises(Exception, match="the largest scores must be picked"):
        compiled(lambda x: x.topk(2, largest=False), x, options={"patterns": {"router": "require"}})
