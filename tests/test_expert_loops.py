"""Mixtures of experts that are written as loops over experts, in the spellings of people."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import BF16, Random, nibbles

import qinductor
from qinductor.testing import rewritten

H, INNER, E, K = 64, 32, 3, 2
GROUPED = "qinductor.dequant_grouped_matmul.default"


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    """Dynamo takes a loop as a whole."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def int4(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    w = (nibbles(codes).to(BF16) - 8).unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)
    return w.flatten(-2)


def high_first(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    w = torch.stack((codes >> 4, codes & 15), -1).flatten(-2).to(BF16) - 8
    return (w.unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2)


def rowwise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.to(BF16) * scale.unsqueeze(-1)


def blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    w = codes.float().unflatten(1, (-1, 32)).unflatten(0, (-1, 32)) * scale.unsqueeze(1).unsqueeze(
        3
    )
    return w.flatten(2).flatten(0, 1).to(BF16)


def mxfp4(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    w = torch.ldexp(
        table[nibbles(codes).int()].unflatten(-1, (-1, 32)), scale.int()[..., None] - 127
    )
    return w.to(BF16).flatten(-2)


def weights(kind: str, random: Random, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, n, k = shape
    if kind == "fp8_rows":
        return random.float8(*shape), random.scales(*lead, n)
    if kind == "int8_rows":
        return random.integers(-128, 128, *shape, dtype=torch.int8), random.scales(*lead, n)
    if kind == "fp8_blocks":
        return random.float8(*shape), random.scales(*lead, n // 32, k // 32).float()
    codes = random.integers(0, 256, *lead, n, k // 2)
    if kind == "mxfp4":
        return codes, random.integers(119, 123, *lead, n, k // 32)
    return codes, random.scales(*lead, n, k // 32)


FORMATS: dict[str, Callable] = {
    "int4": int4, "int4_high": high_first, "fp8_rows": rowwise, "int8_rows": rowwise,
    "fp8_blocks": blocks, "mxfp4": mxfp4,
}  # fmt: skip


class Experts(torch.nn.Module):
    """Experts in one stack, and the loop over them."""

    def __init__(self, loop: Callable, kind: str = "int4", bias: bool = False) -> None:
        super().__init__()
        random = Random(3)
        self.loop, self.kind = loop, kind
        for name, n, k in (("up", 2 * INNER, H), ("down", H, INNER)):
            codes, scale = weights(kind, random, E, n, k)
            self.register_buffer(name, codes)
            self.register_buffer(f"{name}_scale", scale)
            self.register_buffer(f"{name}_bias", random.normal(E, n) / 8 if bias else None)

    def linear(self, name: str, x: torch.Tensor, e: int) -> torch.Tensor:
        held = [getattr(self, name + end) for end in ("", "_scale", "_bias")]
        codes, scale, bias = (None if t is None else t.select(0, e) for t in held)
        return F.linear(x, FORMATS[self.kind](codes, scale), bias)

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        gate, up = self.linear("up", x, e).chunk(2, -1)
        return self.linear("down", F.silu(gate) * up, e)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
        return self.loop(self, x, ids, wt)


def mixtral(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    """The older block of transformers: the mask's axes swapped, x with one axis more."""
    shape = x.shape
    x = x.reshape(-1, shape[-1])
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, E).permute(2, 1, 0)
    for e in range(E):
        idx, top = torch.where(mask[e])
        current = x[None, top].reshape(-1, H)
        y = m.expert(current, e) * wt[top, idx, None]
        out.index_add_(0, top, y.to(x.dtype))
    return out.reshape(shape)


def where(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    """DeepSeek's: the sum in float32."""
    out = torch.zeros(x.shape, dtype=wt.dtype)
    for e in range(E):
        t, k = torch.where(ids == e)
        y = m.expert(x[t], e).to(wt.dtype) * wt[t, k].unsqueeze(-1)
        out.index_add_(0, t, y)
    return out.to(x.dtype)


def any_of(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    """Masks of tokens, a column of weights for each expert, a result that is there before."""
    out = x * 2
    for e in range(E):
        mask = (ids == e).any(-1)
        out[mask] += m.expert(x[mask], e) * (wt * (ids == e)).sum(-1)[mask][:, None]
    return out


def flat(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    """Numbers of all choices; no weights' axis."""
    out = torch.zeros_like(x)
    for e in range(E):
        f = (ids.flatten() == e).nonzero().squeeze(-1)
        t = f // K
        out.index_add_(0, t, m.expert(x[t], e) * wt.flatten()[f][:, None])
    return out


def arguments(tokens: int, seed: int = 0, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    seeded = torch.Generator().manual_seed(seed)
    x = Random(seed).normal(tokens, H)
    ids = torch.rand(tokens, E, generator=seeded).topk(K)[1]
    return x, ids, torch.rand(tokens, K, generator=seeded).to(dtype)


def near(ours: torch.Tensor, eager: torch.Tensor) -> None:
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    if ours.numel():
        error = (ours.float() - eager.float()).norm() / eager.float().norm()
        assert error < 0.01, f"{error}"


def check(module: torch.nn.Module, *args: torch.Tensor, products: int = 2, **options: Any) -> Any:
    """The graph has grouped products and no sizes that are not known."""
    found = rewritten(lambda: module, *args, **options)
    rows = [site.reason for site in found.report.sites if site.pattern != "router"]
    assert rows == [None] * products, str(found.report)
    assert found.after.count(GROUPED) == products, found.after
    assert "nonzero" not in found.after and "u0" not in found.after, found.after
    return found


def selected(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    """Without brackets, which fake CUDA tensors do not take."""
    out, read = torch.zeros_like(x), torch.ops.aten.index.Tensor
    for e in range(E):
        t, k = torch.where(ids == e)
        w = read(wt.flatten(), [t * K + k]).unsqueeze(-1)
        out = out.index_add(0, t, m.expert(read(x, [t]), e) * w)
    return out


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind):
    check(Experts(where, kind), *arguments(9))


def test_the_graph_for_a_gpu():
    found = check(Experts(selected, bias=True), *arguments(9), target="sm_90")
    assert all("triton.mma" in site.provider for site in found.report.sites), str(found.report)


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_on_a_gpu(kind):
    report = qinductor.explain(Experts(where, kind), *arguments(9), options={"target": "sm_90"})
    assert [site.lowered for site in report.sites] == [True, True], str(report)
    assert all(f"{E} experts" in site.contract for site in report.sites), str(report)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loop", [mixtral, where, any_of, flat, selected])
def test_spellings(loop, bias):
    check(Experts(loop, bias=bias), *arguments(9))


def served(module: torch.nn.Module, sizes: tuple[int, ...], dtype: torch.dtype = BF16) -> None:
    compiled = torch.compile(module, backend="qinductor")
    with torch.no_grad():
        for i, tokens in enumerate(sizes):
            args = arguments(tokens, i, dtype)
            near(compiled(*args), module(*args))


def test_served_for_any_number_of_tokens():
    served(Experts(mixtral, bias=True), (7, 5, 1, 2, 64, 0))
    rows = [[site.pattern for site in r.sites if site.lowered] for r in qinductor.reports()]
    # Of 7 tokens, of any number, of 1, of none, whose loop has nothing to show.
    assert rows[-4:-1] == [["expert_loops"] * 2] * 3, rows


def test_masks_and_repeated_choices():
    """Choices that are repeated, out of range or of no expert count as eager counts them."""
    for loop in (any_of, where):
        torch._dynamo.reset()
        module = Experts(loop)
        compiled = torch.compile(module, backend="qinductor")
        x, _, wt = arguments(16)
        with torch.no_grad():
            ids = torch.randint(-1, E + 1, (16, K), generator=torch.Generator().manual_seed(1))
            ids[:3] = torch.tensor([[1, 1], [-1, E], [2, 2]])
            near(compiled(x, ids, wt), module(x, ids, wt))
        assert qinductor.last_report().lowered == 2


class Linear(torch.nn.Module):
    """A linear layer in 4 bits."""

    def __init__(self, n: int, k: int, random: Random) -> None:
        super().__init__()
        self.codes, self.scale = map(torch.nn.Buffer, weights("int4", random, n, k))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, int4(self.codes, self.scale))


class Expert(torch.nn.Module):
    def __init__(self, random: Random) -> None:
        super().__init__()
        self.gate, self.up = Linear(INNER, H, random), Linear(INNER, H, random)
        self.down = Linear(H, INNER, random)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(torch.nn.Module):
    """A router and a list of experts, on a batch of sequences, as DeepSeek's code has it."""

    def __init__(self, turns: range = range(E)) -> None:
        super().__init__()
        random = Random(4)
        self.turns, self.router = turns, torch.nn.Linear(H, E, bias=False, dtype=BF16)
        self.experts = torch.nn.ModuleList(Expert(random) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, H)
        scores = self.router(rows).float().softmax(-1)
        wt, ids = torch.topk(scores, K, dim=-1)
        out = torch.zeros_like(rows)
        for e in self.turns:
            t, k = torch.where(ids == e)
            out[t] += self.experts[e](rows[t]) * wt[t, k, None].to(x.dtype)
        return out.view(x.shape)


def test_a_list_of_experts_with_its_router():
    module = Block().eval().requires_grad_(False)
    check(module, Random(1).normal(2, 6, H), products=3)
    compiled = torch.compile(module, backend="qinductor")
    with torch.no_grad():
        for tokens in (6, 3):
            x = Random(tokens).normal(2, tokens, H)
            near(compiled(x), module(x))
    assert qinductor.last_report().lowered == 3


def test_layers_one_after_the_other():
    module = torch.nn.Sequential(Block(), Block()).eval().requires_grad_(False)
    check(module, Random(1).normal(1, 6, H), products=6)


def test_originals_are_freed():
    module = Experts(mixtral)
    args, again = arguments(9), arguments(9, 1)
    with torch.no_grad():
        eager = module(*args), module(*again)
        compiled = torch.compile(module, backend="qinductor", options={"weights": "replace"})
        near(compiled(*args), eager[0])
        near(compiled(*again), eager[1])
    assert qinductor.last_report().freed_bytes > 0


def test_a_stack_of_weights_that_are_stored_by_themselves():
    """What torch.stack makes of a list of weights is read piece by piece."""

    class Stacked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Linear(INNER, H, Random(i)) for i in range(E))

        def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            w = torch.stack([int4(layer.codes, layer.scale) for layer in self.layers])
            return torch._grouped_mm(x, w.mT, offs=offsets)

    module, x = Stacked(), Random(1).normal(8, H)
    offsets = torch.tensor([5, 5, 8], dtype=torch.int32)
    check(module, x, offsets, products=1)
    with torch.no_grad():
        near(torch.compile(module, backend="qinductor")(x, offsets), module(x, offsets))


def test_a_part_of_the_experts():
    module = Block(range(1, E)).eval().requires_grad_(False)
    check(module, Random(1).normal(1, 6, H), products=3)


# What stays as it was.


def dense(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        out.index_add_(0, t, F.linear(x[t], m.dense[e]) * wt[t, k, None])
    return out


def mixing(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        y = m.expert(x[t], e)
        out.index_add_(0, t, (y - y.cumsum(0)) * wt[t, k, None])
    return out


def centred(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        y = m.expert(x[t], e)
        out.index_add_(0, t, (y - y.mean(0)) * wt[t, k, None])
    return out


def in_turn(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    """Each expert takes what the one before has added."""
    out = x.clone()
    for e in range(E):
        t, k = torch.where(ids == e)
        out = out.index_add(0, t, m.expert(out[t], e) * wt[t, k, None])
    return out


def unlike(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        y = m.expert(x[t], e)
        out.index_add_(0, t, (y.relu() if e == 1 else y.tanh()) * wt[t, k, None])
    return out


def other_tokens(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids >= e)
        out.index_add_(0, t, m.expert(x[t], e) * wt[t, k, None])
    return out


def counted(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> Any:
    out, first = torch.zeros_like(x), None
    for e in range(E):
        t, k = torch.where(ids == e)
        first = t if first is None else first
        out.index_add_(0, t, m.expert(x[t], e) * wt[t, k, None])
    return out, first


def limited(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    """Every expert takes 64 tokens at most, more than probes have."""
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = (rows[:64] for rows in torch.where(ids == e))
        out.index_add_(0, t, m.expert(x[t], e) * wt[t, k, None])
    return out


def counting(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    """The same, told by a mask."""
    out = torch.zeros_like(x)
    for e in range(E):
        mask = (ids == e).any(1)
        (t,) = torch.where(mask & (mask.long().cumsum(0) <= 64))
        out.index_add_(0, t, m.expert(x[t], e))
    return out


def by_number(m: Any, x: torch.Tensor, ids: torch.Tensor, wt: torch.Tensor) -> torch.Tensor:
    """A number of 0 axes leaves a product's dtype as it is, a column of them does not."""
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        y = m.expert(x[t], e) * m.dense.float()[e, 0, 0]
        out.index_add_(0, t, y * wt[t, k, None])
    return out


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (limited, "must take the tokens that chose their expert"),
        (counting, "must take the tokens that chose their expert"),
        (by_number, "of a column of numbers"),
        (dense, "weights of experts must be quantised"),
        (mixing, "each row of a turn must be computed by itself"),
        (centred, "must be used there alone"),
        (in_turn, "must be used there alone"),
        (unlike, "turns of the loop differ"),
        (other_tokens, "must take the tokens that chose their expert"),
        (counted, "must be used there alone"),
    ],
)
def test_what_is_left(loop, reason):
    module = Experts(loop)
    module.register_buffer("dense", Random(9).normal(E, H, H))
    found = rewritten(lambda: module, *arguments(9))
    ours = [site for site in found.report.sites if site.pattern == "expert_loops"]
    assert ours and all(reason in site.reason for site in ours), str(found.report)
    assert GROUPED not in found.after and found.after.count("aten.nonzero") == E
