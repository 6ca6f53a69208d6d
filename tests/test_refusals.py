"""Near misses: what must be left alone, the reason with its values, and results that stay right."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from models import BF16, FP16, G, Holder, K, N, Random, grouped, nibbles
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

import qinductor
from qinductor.errors import Refused, RequiredPatternError
from qinductor.regions import Leaf, Scope

aten = torch.ops.aten

M = 32
ORDER = torch.randperm(K, generator=Random(7).generator)  # act-order: which k is quantised when


def int4(r: Random) -> dict[str, torch.Tensor]:
    return {"codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, K // G)}


def int8(r: Random) -> dict[str, torch.Tensor]:
    return {"codes": r.integers(-128, 128, N, K, dtype=torch.int8), "scale": r.scales(N, 1)}


def weight(m: Holder) -> torch.Tensor:
    """The int4 weight that would be lowered."""
    return grouped(nibbles(m.codes).to(BF16) - 8, m.scale)


def run(
    module: Holder, *args: torch.Tensor, options: dict | None = None, tolerance: float = 0.01
) -> list[qinductor.Site]:
    """The sites of one compiled call, whose result must be eager's."""
    eager = copy.deepcopy(module)(*args)
    ours = torch.compile(module, backend="qinductor", options=options)(*args)
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    assert (ours - eager).abs().max() <= tolerance * eager.abs().max()
    return [site for report in qinductor.reports() for site in report.sites]


def plain(m: Holder, x: torch.Tensor) -> torch.Tensor:
    return linear(x, weight(m))


def weight_as_argument(m, x, codes, scale):
    return linear(x, grouped(nibbles(codes).to(BF16) - 8, scale))


def scale_as_argument(m, x, codes, scale):
    return linear(x, grouped(nibbles(m.codes).to(BF16) - 8, scale))


def mask_multiplied(m, x):
    return linear(x, weight(m) * m.mask)


def mask_selected(m, x):
    return linear(x, torch.where(m.mask, weight(m), 0))


def scale_of_elements(m, x):
    return linear(x, m.codes.to(BF16) * m.scale)


def two_zeros(m, x):
    return linear(x, grouped(nibbles(m.codes).to(BF16), m.scale, m.zero) - m.offset)


def zero_that_wraps(m, x):
    return linear(x, (m.codes - m.zero).to(BF16) * m.scale)


def lora(m, x):
    return linear(x, weight(m) + m.b @ m.a)


def product_of_two(m, x):
    """The inner product has a constant on both sides, and is lowered."""
    return x[:, :N] @ (weight(m) @ m.dense)


def returned(m, x):
    w = weight(m)
    return linear(x, w) + 0 * w.sum()


def doubled(m, x):
    w = weight(m)
    return linear(x, w) + linear(x, w * 2)


def divided_by_its_norm(m, x):
    w = weight(m)
    return linear(x, w / w.norm(dim=1, keepdim=True))


def alpha(m, x):
    return torch.addmm(m.bias, x, weight(m).t(), alpha=2)


def bias_from_x(m, x):
    return torch.addmm(x[0, :N], x, weight(m).t())


def bias_of_rows(m, x):
    return torch.addmm(m.bias, x, weight(m).t())


def bias_beside_a_weight_on_the_left(m, x):
    return torch.addmm(m.bias, weight(m), x.t()).t()


def convolution(m, x):
    return torch.nn.functional.conv1d(x.t()[None], weight(m)[:, :, None])[0].t()


def stack_of_a_batch(m, x):
    w = (m.codes.to(BF16) * m.scale).mT
    return torch.matmul(x.view(2, 1, -1, K), w).flatten(0, 2)


def grouped_of_stacks(m, x):
    return torch._grouped_mm(x.view(2, -1, K), (m.codes.to(BF16) * m.scale).mT).flatten(0, 1)


def part_of_a_sort(m, x):
    return linear(x, weight(m).sort(1)[0])


def clamped_floats(m, x):
    scale = m.weight.abs().amax(1, keepdim=True) / 7
    return linear(x, (m.weight / scale).clamp(-8, 7) * scale)


def float64(m, x):
    return linear(x.double(), weight(m).double())


def both(most: str, one: str, other: str) -> str:
    """A regular expression that finds two tensors, in either order."""
    return f"at most {most}, found 2: (?=.*{one})(?=.*{other})"


CONSTANTS = r"the weight must be made of constants; arg\d_1 is an argument, n"
# function, what its module holds, arguments after x, the reason
MISSES: list[tuple[Callable, Callable, Callable | None, str]] = [
    (weight_as_argument, lambda r: {}, lambda r: int4(r).values(), CONSTANTS),
    (scale_as_argument, int4, lambda r: int4(r).values(), CONSTANTS),
    (mask_multiplied, lambda r: int4(r) | {"mask": r.integers(0, 2, N, K, dtype=BF16)}, None,
     r"bfloat16\[48, 128\] has one entry for each element"),
    (mask_selected, lambda r: int4(r) | {"mask": r.integers(0, 2, N, K, dtype=torch.bool)}, None,
     r"W must depend on its codes everywhere; W\[\d+,\d+\] is 0 for all that were tried"),
    (scale_of_elements, lambda r: int8(r) | {"scale": r.scales(N, K)}, None,
     r"bfloat16\[48, 128\] has one entry for each element"),
    (two_zeros, lambda r: int4(r) | {"zero": r.normal(N, K // G), "offset": r.normal(N, 1)}, None,
     both("1 zero", r"bfloat16\[48, 4", r"bfloat16\[48, 1\]")),
    (zero_that_wraps,
     lambda r: int8(r) | {"zero": r.integers(0, 100, N, 1, dtype=torch.int8)}, None,
     r"not bitwise equal to its nearest format, int8 channel .*: "
     r"W\[\d+,\d+\] is \S+ in the reference and \S+ in the region \(\d+ of 6144 differ\)"),
    (lora, lambda r: int4(r) | {"a": r.normal(4, K, times=0.1), "b": r.normal(N, 4, times=0.1)},
     None, r"must be made of codes alone; mm \(aten.mm.default\) is computed into it"),
    (returned, int4, None, r"must feed products alone; \w+ also feeds sum_1 \(aten.sum.default\)"),
    (divided_by_its_norm, int4, None,
     "under unit scales W takes 362 values and more; 4 bits an element tell at most 16 apart"),
    (part_of_a_sort, int4, None, "the weight is taken from the results of aten.sort.default"),
    (alpha, lambda r: int4(r) | {"bias": r.normal(N)}, None,
     r"addmm.default must have beta = 1 and alpha = 1; it has {'beta': 1, 'alpha': 2}"),
    (bias_from_x, int4, None, r"the bias must be made of constants; arg0_1 is an argument"),
    (bias_of_rows, lambda r: int4(r) | {"bias": r.normal(M, N)}, None,
     r"the bias must have shape \[48\]; it has \[32, 48\]"),
    (bias_beside_a_weight_on_the_left, lambda r: int4(r) | {"bias": r.normal(N, 1)}, None,
     r"the weight must be the right operand of aten.addmm.default; it is the left one"),
    (convolution, int4, None, "the product must be of matrices; it is aten.convolution.default"),
    (stack_of_a_batch,
     lambda r: {"codes": r.integers(-128, 128, 3, N, K, dtype=torch.int8), "scale": r.scales(1)},
     None, r"a stack of \[3\] weights is broadcast along a batch \[6\]"),
    (grouped_of_stacks,
     lambda r: {"codes": r.integers(-128, 128, 2, N, K, dtype=torch.int8), "scale": r.scales(1)},
     None, r"must be of x\[T, K\] with W\[E, K, N\] and offsets; it is of bf"),
    (float64, int4, None, r"x must be bf16, fp16 or fp32; it is fp64"),
]  # fmt: skip


@pytest.mark.parametrize("miss", MISSES, ids=lambda miss: miss[0].__name__)
def test_refused(miss: tuple[Callable, Callable, Callable | None, str]) -> None:
    function, tensors, arguments, reason = miss
    r = Random()
    module = Holder(function, **tensors(r))
    with torch.no_grad():
        (site,) = run(module, r.normal(M, K), *(arguments(r) if arguments else ()))
    assert not site.lowered
    assert re.search(reason, site.reason), site.reason


def test_random_weight() -> None:
    """A weight that is another in every call."""
    module = Holder(lambda m, x: linear(x, weight(m) + torch.rand(N, K).to(BF16)), **int4(Random()))
    with torch.no_grad():
        (site,) = qinductor.explain(module, Random().normal(M, K)).sites
    assert re.search(r"must be made of constants; \w*rand\w* is aten.rand", site.reason), (
        site.reason
    )


def test_weight_without_rows() -> None:
    module = Holder(lambda m, x: linear(x, m.codes.to(BF16) * m.scale), **int8(Random()))
    module.codes = module.codes[:0]
    module.scale = module.scale[:0]
    with torch.no_grad():
        (site,) = qinductor.explain(module, Random().normal(M, K)).sites
    assert site.reason == "the weight must hold values; it is bfloat16[128, 0] on ['cpu']"


def product(bias: bool = False, **devices: str) -> tuple[torch.fx.Node, Scope]:
    """x . (codes * scale)^T as a graph, with tensors on these devices; all but x are constant."""
    graph = torch.fx.Graph()
    shapes = {"x": (M, K), "codes": (N, K), "scale": (N, 1), "bias": (N,)}
    held: dict[str, torch.fx.Node] = {}

    def empty(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        with FakeTensorMode():  # a device that is not there
            return torch.empty(shape, dtype=dtype, device=device)

    for name, shape in shapes.items():
        dtype = torch.int8 if name == "codes" else FP16 if name == "bias" else BF16
        held[name] = graph.placeholder(name)
        held[name].meta["val"] = empty(*shape, dtype=dtype, device=devices.get(name, "cpu"))
    w = graph.call_function(aten.mul.Tensor, (held["codes"], held["scale"]))
    w.meta["val"] = empty(N, K, dtype=BF16, device=devices.get("codes", "cpu"))
    turned = graph.call_function(aten.t.default, (w,))
    turned.meta["val"] = w.meta["val"].t()
    arguments = (held["x"], turned)
    if bias:
        node = graph.call_function(aten.addmm.default, (held["bias"], *arguments))
    else:
        node = graph.call_function(aten.mm.default, arguments)
    node.meta["val"] = empty(M, N, dtype=BF16)
    values = [held[name].meta["val"] for name in ("codes", "scale", "bias")]
    leaves = {held[name]: Leaf(i) for i, name in enumerate(("codes", "scale", "bias"))}
    return node, Scope(leaves, {}, values)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"codes": "meta", "scale": "meta"}, r"must hold values; it is .* on \['meta'\]"),
        ({"codes": "meta"}, r"must hold values; it is .* on \['cpu', 'meta'\]"),
        ({"codes": "cuda"}, r"tensors must lie on one device; found \['cpu', 'cuda:0'\]"),
        ({"x": "cuda"}, "weight and x must be on one device; cpu and cuda"),
        ({"bias": True}, "the bias must be bf16; it is fp16"),
    ],
    ids=str,
)
def test_graphs_that_eager_would_not_run(arguments: dict, reason: str) -> None:
    node, scope = product(**arguments)
    (pattern,) = (p for p in qinductor.load() if p.name == "dequant_matmul")
    assert node in list(pattern.candidates(node.graph, scope))
    with pytest.raises(Refused, match=reason):
        pattern.lower(node, scope, lambda *_: pytest.fail("it has a plan"))


def test_floats_are_no_site() -> None:
    """A weight that is stored in bf16 and never rounded to codes."""
    r = Random()
    with torch.no_grad():
        module, x = Holder(clamped_floats, weight=r.normal(N, K)), r.normal(M, K)
        assert run(module, x, tolerance=0.1) == []


def test_near_hit() -> None:
    """The weight that the misses vary is lowered."""
    r = Random()
    with torch.no_grad():
        (site,) = run(Holder(plain, **int4(r)), r.normal(M, K))
    assert site.lowered, site.reason


def test_written_scale() -> None:
    """A graph that writes to a weight sees its own writes."""

    def step(m, x):
        m.scale.mul_(1.5)
        return linear(x, weight(m))

    r = Random()
    module, x = Holder(step, **int4(r)), r.normal(M, K)
    other = copy.deepcopy(module)
    compiled = torch.compile(module, backend="qinductor")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), other(x), rtol=0.02, atol=0.02)
    assert torch.equal(module.scale, other.scale)
    ((site,),) = (report.sites for report in qinductor.reports())
    assert not site.lowered
    assert re.search(r"made of constants; arg\d_1 is written to by the graph", site.reason)


def test_graph_break() -> None:
    def broken(m, x):
        w = weight(m)
        torch._dynamo.graph_break()
        return linear(x, w)

    r = Random()
    with torch.no_grad():
        (site,) = run(Holder(broken, **int4(r)), r.normal(M, K))
    assert not site.lowered
    assert "a graph break in between makes bfloat16[48, 128] an output" in site.reason
    assert len(qinductor.reports()) == 2


@pytest.mark.parametrize("how", ["option", "config"])
def test_freezing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"inductor": {"freezing": True}} if how == "option" else None
    if how == "config":
        monkeypatch.setattr(torch._inductor.config, "freezing", True)
    r = Random()
    with torch.no_grad():
        (site,) = run(Holder(plain, **int4(r)), r.normal(M, K), options=options)
    assert not site.lowered
    assert "freezing folds constant weights; wanted torch._inductor.config.freezing False" in (
        site.reason
    )


def test_training() -> None:
    """Gradients are eager's; the same module without gradients is lowered."""
    r = Random()
    module = Holder(lambda m, x: linear(x, weight(m), m.bias), **int4(r))
    module.bias = torch.nn.Parameter(r.normal(N))
    x = r.normal(M, K)
    (site,) = run(module, x)
    assert not site.lowered
    assert "a training graph; wanted torch.no_grad()" in site.reason
    other = copy.deepcopy(module)
    torch.compile(module, backend="qinductor")(x).square().sum().backward()
    other(x).square().sum().backward()
    torch.testing.assert_close(module.bias.grad, other.bias.grad, rtol=0.02, atol=0.5)
    qinductor.reports().clear()
    with torch.no_grad():
        (site,) = run(module, x)
    assert site.lowered, site.reason


def test_off() -> None:
    r = Random()
    options = {"patterns": {"dequant_matmul": "off"}}
    with torch.no_grad():
        assert run(Holder(plain, **int4(r)), r.normal(M, K), options=options) == []


def test_require() -> None:
    """The compile fails with the table; what can be lowered passes."""
    r = Random()
    options = {"patterns": {"dequant_matmul": "require"}}
    module = Holder(alpha, bias=r.normal(N), **int4(r))
    x = r.normal(M, K)
    with torch.no_grad():
        compiled = torch.compile(module, backend="qinductor", options=options)
        with pytest.raises(BackendCompilerFailed, match="1 sites of a required pattern") as error:
            compiled(x)
        assert isinstance(error.value.inner_exception, RequiredPatternError)
        assert re.search(
            r"dequant_matmul +- +NOT LOWERED: aten.addmm.default must", str(error.value)
        )
        qinductor.reports().clear()
        (site,) = run(Holder(plain, **int4(r)), x, options=options)
    assert site.lowered


@pytest.mark.parametrize("of", ["weight", "bias"])
def test_product_of_constants_behind_a_product(of: str) -> None:
    """The inner product is lowered first; the reason names no packed tensor of ours."""

    def function(m, x):
        inner = weight(m) @ m.dense
        if of == "weight":
            return x[:, :N] @ inner
        return torch.addmm(inner[0], x, weight(m).t())

    r = Random()
    module = Holder(function, **int4(r), dense=r.normal(K, N, times=0.1))
    with torch.no_grad():
        inner, outer = run(module, r.normal(M, K), tolerance=0.02)
    assert inner.lowered and not outer.lowered
    assert re.fullmatch(
        f"the {of} must be made of constants alone; a product that was lowered before, "
        "dequant_matmul_default, is computed into it",
        outer.reason,
    )


def test_beside_a_branch() -> None:
    """Bodies of a branch are left alone; the product in the outermost graph is lowered."""

    def forked(m, x):
        y = linear(x, weight(m))
        return torch.cond(x.sum() > 0, lambda y: plain(m, y @ m.back), lambda y: y * 3, [y])

    r = Random()
    with torch.no_grad():
        outer, inner = sorted(
            run(Holder(forked, back=r.normal(N, K, times=0.1), **int4(r)), r.normal(M, K)),
            key=lambda site: not site.lowered,
        )
    assert not inner.lowered and "it is in the body of a higher-order operator" in inner.reason
    assert outer.lowered, outer.reason


# Lowered or not: what is not finite in eager is so here, in the same places and in the same way.


def same_kinds(ours: torch.Tensor, eager: torch.Tensor) -> bool:
    """Whether NaN, inf and -inf are in the same places."""
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    return all(torch.equal(kind(ours), kind(eager)) for kind in kinds)


@pytest.mark.parametrize("m", [4, M])
@pytest.mark.parametrize("function", [plain, scale_of_elements])
def test_nan_scale(function: Callable, m: int) -> None:
    r = Random()
    module = Holder(function, **(int4(r) if function is plain else int8(r)))
    module.scale[3, 0] = torch.nan
    x = r.normal(m, K)
    with torch.no_grad():
        ours, eager = torch.compile(module, backend="qinductor")(x), module(x)
    assert eager[:, 3].isnan().all() and same_kinds(ours, eager)


@pytest.mark.parametrize("m", [4, M])
def test_nan_activation(m: int) -> None:
    r = Random()
    module, x = Holder(plain, **int4(r)), r.normal(m, K)
    x[0, 5], x[1, 6] = torch.inf, torch.nan
    with torch.no_grad():
        ours, eager = torch.compile(module, backend="qinductor")(x), module(x)
    assert same_kinds(ours, eager)


@pytest.mark.parametrize("m", [4, M])
def test_infinite_bias(m: int) -> None:
    """A bias of -inf masks an output, such as a padded entry of a vocabulary."""
    r = Random()
    module = Holder(lambda m, x: linear(x, weight(m), m.bias), bias=r.normal(N), **int4(r))
    module.bias[5] = -torch.inf
    x = r.normal(m, K)
    with torch.no_grad():
        ours, eager = torch.compile(module, backend="qinductor")(x), module(x)
    assert same_kinds(ours, eager), ours[0, 5]


@pytest.mark.parametrize("m", [4, M])
def test_scale_near_overflow(m: int) -> None:
    """8 * scale overflows in fp16, W does not."""
    r = Random()
    module = Holder(lambda m, x: linear(x, grouped(nibbles(m.codes).to(FP16), m.scale)), **int4(r))
    module.codes &= 0x77
    module.scale = torch.full_like(module.scale, 8200, dtype=FP16)
    x = r.normal(m, K, dtype=FP16, times=1e-4)
    with torch.no_grad():
        ours, eager = torch.compile(module, backend="qinductor")(x), module(x)
    assert eager.isfinite().all() and same_kinds(ours, eager)
