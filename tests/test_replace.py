"""`weights="replace"`: packed weights take the place of the model's own, whose memory is freed."""

import copy
import gc
import threading
import weakref

import pytest
import torch

import qinductor
from qinductor import backend, freed
from qinductor.weights import CHECK_EVERY

N, K, GROUP = 96, 128, 32
X = torch.randn(4, K, generator=torch.Generator().manual_seed(1))
EAGER_REST = {"inductor": {"fallback_by_default": True}}
FREED = "memory was freed by qinductor"
# A view of a freed tensor cannot even be made.
UNREADABLE = f"{FREED}|storage of size 0"


class Linear(torch.nn.Module):
    """x . W^T + b with W = (codes - zero) * scale in groups."""

    def __init__(self, seed=0, low=0, high=16, zeros=False, dtype=torch.float32):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        codes = torch.randint(low, high, (N, K), generator=g, dtype=torch.int8)
        zero = torch.randint(0, 16, (N, K // GROUP), generator=g).to(dtype)
        scale = (torch.rand(N, K // GROUP, generator=g) * 0.02 + 0.01).to(dtype)
        self.register_buffer("codes", codes)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        self.register_buffer("zero", zero if zeros else torch.full_like(zero, 8))
        self.register_buffer("bias", torch.rand(N, generator=g).to(dtype))

    def weight(self):
        scale, zero = self.scale[:, :, None], self.zero[:, :, None]
        return ((self.codes.view(N, -1, GROUP).to(scale.dtype) - zero) * scale).view(N, K)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight(), self.bias)


LARGE = ("codes", "scale", "zero")
BYTES = N * K + 2 * 4 * N * K // GROUP


@pytest.fixture
def compiles(monkeypatch):
    """The graphs that Inductor compiled for us."""
    found = []

    def inner(*args, real=backend.compile_fx_inner, **kwargs):
        found.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_fx_inner", inner)
    return found


def compiled(model, **options):
    return torch.compile(model, backend="qinductor", options={"weights": "replace", **options})


def held(model):
    """Bytes that the tensors of a model hold."""
    tensors = [part for t in (*model.parameters(), *model.buffers()) for part in freed.parts(t)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def check(run, model, x=X):
    """`run` gives the result of `model`, which is another with the same weights."""
    close(run(x), model(x))


def close(out, expected):
    """Up to the rounding of sums."""
    torch.testing.assert_close(out, expected, rtol=0, atol=0.01 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_m_after_the_originals_are_gone(compiles, dtype, dynamic):
    """In bf16 a small M has a plan with other packed tensors, made from the restored weight."""
    model, kept = Linear(1, dtype=dtype), Linear(1, dtype=dtype)
    run = torch.compile(model, backend="qinductor", dynamic=dynamic, options={"weights": "replace"})
    beside = torch.compile(kept, backend="qinductor", dynamic=dynamic)
    for m in (4, 4, 1, 7, 33, 100, 1, 2):
        x = torch.randn(m, K, dtype=dtype)
        assert torch.equal(run(x), beside(x)), "the restored weight differs"
        check(run, kept, x)
        assert [getattr(model, n).untyped_storage().nbytes() for n in LARGE] == [0, 0, 0]
    assert held(model) == model.bias.nbytes
    ours, theirs = list(qinductor.reports())[::2], list(qinductor.reports())[1::2]
    assert len(ours) == len(theirs) == len(compiles) // 2
    assert all(report.lowered == 1 for report in ours)
    assert [report.freed_bytes for report in ours] == [held(kept) - held(model)] + [0] * (
        len(ours) - 1
    )
    assert all(r.sites[0].evaluations == (0, 0) for r in ours[1:]), "it was proved again"
    assert "originals freed 0.0" in str(ours[0]) and "originals freed" not in str(theirs[0])


def test_layers_that_share_a_graph(compiles):
    models, twins = ([Linear(seed) for seed in range(4)] for _ in "ab")
    runs = [compiled(model) for model in models]
    for _ in range(2):
        for run, model, twin in zip(runs, models, twins, strict=True):
            check(run, twin)
            assert held(model) == model.bias.nbytes
    for run, twin in zip(runs, twins, strict=True):
        check(run, twin, torch.randn(9, K))
    first, second = qinductor.reports()
    assert len(compiles) == 2, "a freed weight cost a compile"
    assert (first.freed_bytes, second.freed_bytes) == (4 * BYTES, 0)


def test_variants(compiles):
    kinds = [{}, {"low": -100, "high": 100}, {"zeros": True}] * 2
    models, twins = ([Linear(i, **kind) for i, kind in enumerate(kinds)] for _ in "ab")
    runs = [compiled(model) for model in models]
    for m in (4, 4, 9, 17):
        for run, model, twin in zip(runs, models, twins, strict=True):
            check(run, twin, torch.randn(m, K))
            assert held(model) == model.bias.nbytes
    assert [report.variants for report in qinductor.reports()] == [3, 3]
    assert len(compiles) == 6


def test_what_reads_a_freed_weight_says_so(tmp_path):
    model, twin = Linear(1), Linear(1)
    run = compiled(model)
    check(run, twin)
    for read in (
        lambda: model(X),
        lambda: torch.save(model.state_dict(), tmp_path / "model.pt"),
        lambda: torch.save(model, tmp_path / "model.pt"),
        lambda: model.to(torch.float64),
        lambda: model.bfloat16(),
        lambda: copy.deepcopy(model),
        lambda: model.load_state_dict(twin.state_dict()),
        lambda: model.scale.mul_(2),
        lambda: model.scale.data.fill_(2),
        lambda: model.codes.sum(),
        lambda: model.codes.numpy(),
        lambda: model.codes.data_ptr(),
        lambda: model.codes[0, 0].item(),
        lambda: model.codes.tolist(),
        lambda: torch.compile(model, backend="inductor")(X),
        lambda: torch.compile(model, backend="eager")(X),
    ):
        with pytest.raises(Exception, match=UNREADABLE):
            read()
    check(run, twin)
    for metadata in (
        lambda: repr(model),
        lambda: [p.shape for p in model.parameters()],
        lambda: model.codes.dtype,
        lambda: model.requires_grad_(False),
        lambda: model.eval(),
        lambda: model.to("cpu"),
        lambda: model.scale.numel() * model.scale.itemsize,
    ):
        metadata()
    check(run, twin)


def test_new_weights_by_assignment(compiles):
    model = Linear(1)
    run = compiled(model)
    check(run, Linear(1))
    for seed in (2, 3):
        model.load_state_dict(Linear(seed).state_dict(), assign=True)
        check(run, Linear(seed))
        assert held(model) == model.bias.nbytes
    model.codes = Linear(4).codes
    with pytest.raises(qinductor.QinductorError, match=FREED):
        run(X)  # these codes with scales that are gone
    model.load_state_dict(Linear(5).state_dict(), assign=True)
    check(run, Linear(5))
    model.scale.data = Linear(6).scale.data
    model.codes.data, model.zero.data = Linear(6).codes, Linear(6).zero
    model.bias.copy_(Linear(6).bias)
    check(run, Linear(6))
    assert held(model) == model.bias.nbytes


def test_refresh_and_fingerprints_leave_freed_weights_alone():
    qinductor.refresh()  # what other tests' models hold
    model, other, twin = Linear(1), Linear(2), Linear(1)
    run, keep = compiled(model), torch.compile(other, backend="qinductor")
    for _ in range(3):
        check(run, twin), keep(X)
    assert qinductor.refresh(model) == 0
    assert qinductor.refresh(other) == 1
    keep(X)
    assert qinductor.refresh() == 1
    for _ in range(2 * CHECK_EVERY):
        run(X)
    check(run, twin)


def test_freed_in_inference_mode():
    with torch.inference_mode():
        model, twin = Linear(1), Linear(1)
        run = compiled(model)
        for m in (4, 4, 9, 11):
            check(run, twin, torch.randn(m, K))
        assert held(model) == model.bias.nbytes


def test_another_graph_of_the_same_weights(compiles):
    model, twin = Linear(1), Linear(1)
    check(compiled(model), twin)

    def twice(module, x):
        return module(x) * 2

    run = compiled(twice)
    torch.testing.assert_close(run(model, X), twice(twin, X))
    assert qinductor.last_report().lowered == 1
    keep = torch.compile(lambda x: model(x) + 1, backend="qinductor")
    torch.testing.assert_close(keep(X), twin(X) + 1)
    assert len(compiles) == 3


def test_a_graph_that_keeps_leaves_a_freed_weight_restorable():
    """It packs other tensors of the same weight, under the same key."""
    dtype = torch.bfloat16
    model, twin = Linear(1, dtype=dtype), Linear(1, dtype=dtype)
    check(compiled(model), twin, torch.randn(100, K, dtype=dtype))
    torch._dynamo.reset()
    check(torch.compile(model, backend="qinductor"), twin, torch.randn(1, K, dtype=dtype))
    torch._dynamo.reset()
    check(compiled(model), twin, torch.randn(7, K, dtype=dtype))
    assert [report.lowered for report in qinductor.reports()] == [1, 1, 1]


def test_the_death_of_old_weights_leaves_the_new_ones_packed():
    """The other graph still knows the old ones, which had the same tensors for names."""
    model = Linear(1)
    old = [getattr(model, name).detach() for name in LARGE]  # which may not be freed, then
    run, other = compiled(model), compiled(lambda x: model(x))
    for each in (run, other):
        check(each, Linear(1))
    for name in LARGE:
        getattr(model, name).data = getattr(Linear(2), name).data
    model.bias.copy_(Linear(2).bias)
    check(run, Linear(2))
    assert held(model) == model.bias.nbytes
    del old
    gc.collect()
    for each in (run, other):
        check(each, Linear(2))


def broken(module, x):
    """The weight, and a product that is in another graph."""
    w = module.weight()
    torch._dynamo.graph_break()
    return w, x @ w.t()


def same_weight(got, expected):
    """Bit for bit, and in memory, too."""
    assert got.dtype == expected.dtype and got.stride() == expected.stride()
    bits = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    assert torch.equal(got.contiguous().view(bits), expected.contiguous().view(bits))


def restored():
    """How many weights the last graphs make from their packed form."""
    notes = [note for report in qinductor.reports() for note in report.notes]
    return sum("the weight is freed; its packed form makes it" in note for note in notes)


def packed():
    """Bytes of all packed tensors, each counted once."""
    entries = qinductor.store.ENTRIES.values()
    held = {t.data_ptr(): t.nbytes for entry in entries for t in entry.tensors.values()}
    return sum(held.values())


@pytest.mark.parametrize(
    "dtype, options", [(torch.float32, {}), (torch.bfloat16, EAGER_REST)], ids=["compiled", "eager"]
)
def test_a_graph_break_after_the_originals_are_gone(compiles, dtype, options):
    model, twin = (Linear(1, zeros=True, dtype=dtype) for _ in "ab")
    x = X.to(dtype)
    check(compiled(model), twin, x)
    before = packed()
    for _ in range(2):
        w, out = compiled(broken, **options)(model, x)
        same_weight(w, twin.weight())
        close(out, x @ twin.weight().t())
    assert (restored(), len(compiles), packed()) == (1, 3, before)
    assert held(model) == model.bias.nbytes
    check(compiled(model), twin, torch.randn(9, K, dtype=dtype))


def test_eager_code_takes_the_weight(compiles):
    @torch.compiler.disable
    def norm(w):
        return w.norm(dim=1)

    def scaled(module, x):
        return module(x) * norm(module.weight())

    model, twin = Linear(1), Linear(1)
    check(compiled(model), twin)
    close(compiled(scaled)(model, X), scaled(twin, X))
    assert restored() == 1


def test_explain_of_a_graph_break():
    model, twin = Linear(1), Linear(1)
    check(compiled(model), twin)
    report = qinductor.explain(lambda x: broken(model, x)[1], X)
    assert report.lowered == 0 and "its packed form makes it" in str(report)


def test_a_tied_embedding(compiles):
    """In one graph with the product, one weight is read by both."""

    class Tied(Linear):
        def forward(self, tokens):
            h = torch.nn.functional.embedding(tokens, self.weight())
            return torch.nn.functional.linear(h, self.weight(), self.bias)

    model, twin, tokens = Tied(1), Tied(1), torch.tensor([[3, 5, 95], [0, 1, 2]])
    run = compiled(lambda x: torch.nn.functional.linear(x, model.weight(), model.bias))
    check(run, Linear(1))
    assert held(model) == model.bias.nbytes
    tied = compiled(model)
    for _ in range(3):
        check(tied, twin, tokens)
    assert (qinductor.last_report().lowered, restored(), len(compiles)) == (1, 1, 2)


def test_a_graph_of_before_the_originals_were_gone(compiles):
    """The first graph reads what the second one frees, so it is compiled again."""

    class Tied(Linear):
        def forward(self, tokens):
            h = torch.nn.functional.embedding(tokens, self.weight())
            torch._dynamo.graph_break()
            return torch.nn.functional.linear(h, self.weight(), self.bias)

    models, twins = ([Tied(seed) for seed in range(3)] for _ in "ab")
    tokens, runs = torch.tensor([3, 5, 95]), [compiled(model) for model in models]
    for turn in range(3):
        for run, model, twin in zip(runs, models, twins, strict=True):
            assert (held(model) == held(twin)) == (turn == 0)
            check(run, twin, tokens)
            assert held(model) == model.bias.nbytes
    first, second = qinductor.reports()
    assert (first.variants, second.variants, restored(), len(compiles)) == (2, 1, 1, 3)
    assert any("a weight that it reads was freed" in note for note in first.notes)


def test_a_lowered_graph_that_reads_what_another_frees():
    def both(a, b, x):
        return a(x) + b.weight().sum(1)

    models, twins = ((Linear(1), Linear(2)) for _ in "ab")
    run, expected = compiled(both), both(*twins, X)
    close(run(*models, X), expected)
    assert [held(model) == model.bias.nbytes for model in models] == [True, False]
    check(compiled(models[1]), twins[1])
    assert held(models[1]) == models[1].bias.nbytes
    for _ in range(3):
        close(run(*models, X), expected)
    first = qinductor.reports()[0]
    assert (first.lowered, first.variants, restored()) == (2, 2, 1)


def test_a_later_graph_with_a_symbolic_m(compiles):
    def both(module, x):
        return module(x), module.weight()

    model, twin = Linear(1, dtype=torch.bfloat16), Linear(1, dtype=torch.bfloat16)
    check(compiled(model), twin, torch.randn(4, K, dtype=torch.bfloat16))
    run = torch.compile(both, backend="qinductor", dynamic=True, options={"weights": "replace"})
    for m in (4, 33, 5, 100):
        x = torch.randn(m, K, dtype=torch.bfloat16)
        out, w = run(model, x)
        check(lambda _, out=out: out, twin, x)
        same_weight(w, twin.weight())
    assert (qinductor.last_report().lowered, restored(), len(compiles)) == (1, 1, 2)


def test_layers_that_share_a_graph_that_needs_the_weight(compiles):
    """Of those still there it takes the original, and the packed form once they are gone."""
    models, twins = ([Linear(seed) for seed in range(3)] for _ in "ab")
    run, product = compiled(broken), compiled(lambda module, x: module(x))
    product(models[0], X)
    for gone in range(3):
        for model, twin in zip(models, twins, strict=True):
            same_weight(run(model, X)[0], twin.weight())
        assert [held(model) == model.bias.nbytes for model in models].count(True) == gone + 1
        product(models[min(gone + 1, 2)], X)
    assert restored() == 1


def test_a_weight_of_another_contract_is_another_variant(compiles):
    kinds = [{}, {"low": -100, "high": 100}, {"zeros": True}]
    models, twins = ([Linear(i, **kind) for i, kind in enumerate(kinds)] for _ in "ab")
    run, product = compiled(broken), compiled(lambda module, x: module(x))
    for model in models:
        product(model, X)
    for _ in range(2):
        for model, twin in zip(models, twins, strict=True):
            same_weight(run(model, X)[0], twin.weight())
    assert restored() == 3


class Stored(torch.nn.Module):
    """Codes that are stored as W or as its transpose, in a value of either memory order."""

    def __init__(self, turned, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        codes = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8)
        self.register_buffer("codes", codes.t().contiguous() if turned else codes)
        self.register_buffer("scale", torch.rand(N, 1, generator=g))
        self.turned = turned


WEIGHTS = {
    "W": (False, True, lambda m: m.codes.float() * m.scale),
    "W in column order": (True, False, lambda m: m.codes.t().float() * m.scale),
    "its transpose": (True, False, lambda m: (m.codes.float() * m.scale.t()).t()),
    "its transpose on the left": (True, True, lambda m: (m.codes.float() * m.scale.t()).t()),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_however_it_lies(name):
    turned, left, weight = WEIGHTS[name]
    model, twin = Stored(turned), Stored(turned)

    def product(m, x):
        return weight(m) @ x.t() if left else x @ weight(m).t()

    def other(m, x):
        w = weight(m)
        return w, w.t(), w.t().contiguous(), w.permute(1, 0).sum(0)

    close(compiled(product)(model, X), product(twin, X))
    assert model.codes.untyped_storage().nbytes() == 0
    *got, total = compiled(other)(model, X)
    *expected, sums = other(twin, X)
    for ours, theirs in zip(got, expected, strict=True):
        same_weight(ours, theirs)
    close(total, sums)
    assert restored() == 1


@pytest.mark.parametrize("first", ["W", "W.t()"])
def test_a_product_with_either_side_knows_the_weight(first):
    """Which is square, so that the axes alone tell x @ W from x @ W.t()."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (K, K), generator=g, dtype=torch.int8)
    scale = torch.rand(K, 1, generator=g)
    model, twin = (torch.nn.Module() for _ in "ab")
    for each in (model, twin):
        each.codes, each.scale = codes.clone(), scale.clone()

    def plain(m, x):
        return x @ (m.codes.float() * m.scale)

    def turned(m, x):
        return x @ (m.codes.float() * m.scale).t()

    def dense(m, x):
        return m.codes.float() * m.scale

    one, two = (plain, turned) if first == "W" else (turned, plain)
    close(compiled(one)(model, X), one(twin, X))
    close(compiled(one)(model, X[:3]), one(twin, X[:3]))
    same_weight(compiled(dense)(model, X), dense(twin, X))
    # What one side calls N is K for the other: a product of another weight, not lowered.
    close(compiled(two)(model, X), two(twin, X))
    assert (restored(), qinductor.last_report().lowered) == (2, 0)


def test_a_product_that_broadcasts_knows_the_weight():
    def product(m, x):
        return torch.bmm(x, m.weight().t().unsqueeze(0).expand(2, K, N))

    model, twin, x = Linear(1), Linear(1), torch.randn(2, 3, K)
    close(compiled(product)(model, x), product(twin, x))
    assert held(model) == model.bias.nbytes
    dense = compiled(lambda m: (m.weight(), m.weight().t().unsqueeze(0)))
    w, turned = dense(model)
    same_weight(w, twin.weight())
    same_weight(turned, twin.weight().t().unsqueeze(0))


@pytest.mark.parametrize("turned", [False, True])
def test_experts(turned):
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            g = torch.Generator().manual_seed(0)
            codes = torch.randint(-128, 128, (3, N, K), generator=g, dtype=torch.int8)
            self.register_buffer("codes", codes)
            self.register_buffer("scale", torch.rand(3, N, 1, generator=g).bfloat16())

        def weight(self):
            return self.codes.bfloat16() * self.scale

        def forward(self, x):
            w = self.weight()
            return torch.bmm(w, x.mT) if turned else torch.bmm(x, w.mT)

    model, twin = Experts(), Experts()
    x = torch.randn(3, 5, K, dtype=torch.bfloat16)
    check(compiled(model), twin, x)
    assert model.codes.untyped_storage().nbytes() == 0

    def dense(m):
        return m.weight(), m.weight().mT

    for ours, theirs in zip(compiled(dense)(model), dense(twin), strict=True):
        same_weight(ours, theirs)
    assert restored() == 2


@pytest.mark.parametrize("zeros", [False, True])
def test_what_a_graph_that_keeps_has_packed_is_no_reason_not_to_restore(zeros):
    """Its packed tensors may be all that is needed, but it does not know how to restore."""
    model, twin = Linear(1, zeros=zeros), Linear(1, zeros=zeros)
    check(torch.compile(model, backend="qinductor"), twin)
    torch._dynamo.reset()
    check(compiled(model), twin)
    assert held(model) == model.bias.nbytes
    torch._dynamo.reset()
    check(compiled(model), twin, X[:1])
    same_weight(compiled(broken)(model, X)[0], twin.weight())


def test_what_restores_dies_with_its_model():
    model = Linear(1)
    compiled(model)(X), compiled(broken)(model, X)
    gone = [
        weakref.ref(tensor)
        for entry in qinductor.store.ENTRIES.values()
        if any(reference == id(model.codes) for reference, _ in entry.references)
        for tensor in entry.tensors.values()
    ]
    assert len(gone) > len(set(gone)) > 0, "two entries share tensors"
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_a_graph_that_makes_another_weight_of_it_names_it(compiles):
    model, twin = Linear(1), Linear(1)
    check(compiled(model), twin)

    def dense(module):
        return module.weight(), module.codes.float().view(N, -1, GROUP) * module.scale[:, :, None]

    with pytest.raises(Exception, match=FREED) as error:
        compiled(dense)(model)
    assert isinstance(error.value.inner_exception, qinductor.QinductorError)
    assert "codes" in str(error.value) and "weights='keep'" in str(error.value)
    check(compiled(model), twin)


def test_a_training_graph_of_a_freed_weight_names_it():
    model, twin = Linear(1), Linear(1)
    run = compiled(model, **EAGER_REST)
    check(run, twin)
    with pytest.raises(Exception, match=FREED):
        run(X.clone().requires_grad_())
    check(run, twin)


def test_what_the_graph_reads_otherwise_stays():
    class Also(Linear):
        def forward(self, x):
            return super().forward(x) * self.scale.sum()

    model, twin = Also(1), Also(1)
    run = compiled(model)
    for m in (4, 4, 9):
        check(run, twin, torch.randn(m, K))
    assert [getattr(model, n).untyped_storage().nbytes() > 0 for n in LARGE] == [False, True, False]


def test_nothing_is_freed_where_a_site_is_refused():
    class Also(Linear):
        def forward(self, x):
            w = self.weight()
            return torch.nn.functional.linear(x, w) + w.sum()

    model, twin = Also(1), Also(1)
    check(compiled(model, **EAGER_REST), twin)
    assert held(model) == held(twin)
    assert qinductor.last_report().freed_bytes == 0


def test_small_leaves_stay():
    class Table(torch.nn.Module):
        """A table of shifts, which other layers may share."""

        def __init__(self):
            super().__init__()
            g = torch.Generator().manual_seed(0)
            self.register_buffer("codes", torch.randint(0, 256, (N, K // 2), generator=g).byte())
            self.register_buffer("shifts", torch.tensor([0, 4], dtype=torch.uint8))
            self.register_buffer("scale", torch.rand(N, K // GROUP, generator=g))

        def forward(self, x):
            q = (self.codes[:, :, None] >> self.shifts) & 15
            w = q.view(N, -1, GROUP).float() * self.scale[:, :, None]
            return x @ w.view(N, K).t()

    model, twin = Table(), Table()
    run = compiled(model)
    for m in (4, 9, 11):
        check(run, twin, torch.randn(m, K))
    assert qinductor.last_report().lowered == 1
    assert held(model) == model.shifts.nbytes == 2


@pytest.mark.parametrize("share", ["a state_dict", "a view", "a part", "an array"])
def test_memory_that_others_can_read_stays(share):
    model, twin = Linear(1), Linear(1)
    other = None
    if share == "a state_dict":
        other = model.state_dict()["codes"]
    elif share == "a view":
        other = model.codes.view(-1)
    elif share == "a part":
        other = torch.stack([model.codes, model.codes])
        model.codes = other[0]
    else:
        other = torch.from_numpy(model.codes.numpy().copy())
        model.codes = other
    run = compiled(model)
    for m in (4, 4, 9, 11):
        check(run, twin, torch.randn(m, K))
    assert other.sum() == twin.codes.sum() * (2 if share == "a part" else 1)
    assert model.codes.untyped_storage().nbytes() > 0
    first = qinductor.reports()[0]
    assert first.freed_bytes == BYTES - N * K
    (note,) = first.notes
    assert "codes" in note and "stays in memory" in note
    del other
    gc.collect()


def test_tied_weights():
    model, twin = (torch.nn.Sequential(Linear(1), torch.nn.Linear(N, K), Linear(1)) for _ in "ab")
    twin[1].load_state_dict(model[1].state_dict())
    for pair in (model, twin):
        pair.requires_grad_(False)
        for name in (*LARGE, "bias"):
            setattr(pair[2], name, getattr(pair[0], name))
    run = compiled(model)
    for m in (4, 4, 9, 11):
        check(run, twin, torch.randn(m, K))
    assert held(model[0]) == model[0].bias.nbytes
    assert [report.lowered for report in qinductor.reports()] == [2, 2]


@pytest.mark.parametrize("dense", [False, True])
def test_explain_and_dense(monkeypatch, dense):
    model, twin = Linear(1), Linear(1)
    run = compiled(model, dense=dense)
    check(run, twin)
    with monkeypatch.context() as patch:

        def fails(*args, **kwargs):
            raise AssertionError("a kernel was compiled")

        for module in ("qinductor.backend", "torch._inductor.compile_fx"):
            patch.setattr(f"{module}.compile_fx_inner", fails)
        report = qinductor.explain(model, torch.randn(3, K))
        assert (report.lowered, len(report.sites)) == (1, 1)
        joined = qinductor.explain(lambda x: model(x).relu(), torch.randn(3, K))
        assert joined.lowered == 1
    for m in (5, 7):
        check(run, twin, torch.randn(m, K))


def test_packed_weights_die_with_their_model():
    model = Linear(1)
    run = compiled(model)
    run(X), run(torch.randn(9, K))
    packed = [
        weakref.ref(tensor)
        for entry in qinductor.store.ENTRIES.values()
        if any(reference == id(model.codes) for reference, _ in entry.references)
        for tensor in entry.tensors.values()
    ]
    leaf = weakref.ref(model.codes)
    assert packed
    del model, run
    gc.collect()
    assert leaf() is None
    assert [reference() for reference in packed] == [None] * len(packed)


def test_threads_free_while_others_run():
    models, twins = ([Linear(seed) for seed in range(6)] for _ in "ab")
    runs = [compiled(model) for model in models]
    expected, wrong = [twin(X) for twin in twins], []
    runs[0](X)
    start = threading.Barrier(4)

    def work(_):
        start.wait()
        for _ in range(10):
            for run, out in zip(runs, expected, strict=True):
                if not torch.allclose(run(X), out, atol=1e-3):
                    wrong.append(run)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(map(held, models)) == sum(model.bias.nbytes for model in models)


def test_a_build_that_cannot_free_keeps(monkeypatch):
    monkeypatch.setattr(freed, "_forbid", lambda: "no compiler here")
    model, twin = Linear(1), Linear(1)
    check(compiled(model), twin)
    assert held(model) == held(twin)
    (note,) = qinductor.last_report().notes
    assert "originals stay in memory: no compiler here" in note
    check(model, twin)


def test_a_write_to_what_stayed_is_an_error():
    """The codes are gone, so a new scale cannot be packed with them."""

    class Channel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            g = torch.Generator().manual_seed(0)
            codes = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8)
            self.register_buffer("codes", codes)
            self.register_buffer("scale", torch.rand(N, 1, generator=g).bfloat16())

        def forward(self, x):
            return x @ (self.codes.to(x.dtype) * self.scale.to(x.dtype)).t()

    model, twin = Channel(), Channel()
    run = compiled(model)
    check(run, twin)
    assert held(model) == model.scale.nbytes
    dense = compiled(lambda m: m.codes.float() * m.scale.float())
    torch.testing.assert_close(dense(model), dense(twin))
    model.scale.mul_(2)
    for _ in range(2):
        for stale in (lambda: run(X), lambda: dense(model)):
            with pytest.raises(qinductor.QinductorError, match=FREED):
                stale()


@pytest.mark.parametrize("bits", [4, 8])
def test_torchao(bits):
    ao = pytest.importorskip("torchao.quantization")
    config = ao.Int8WeightOnlyConfig()
    if bits == 4:
        config = ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(GROUP))
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(K, N, dtype=torch.bfloat16))
        ao.quantize_(layer.requires_grad_(False), config)
        layers.append(layer)
    model, twin = layers
    run, before = compiled(model), held(model)
    for m in (4, 4, 1, 9, 11):
        check(run, twin, torch.randn(m, K, dtype=torch.bfloat16))
    assert model[0].weight.qdata.untyped_storage().nbytes() == 0
    first = qinductor.reports()[0]
    assert first.freed_bytes == before - held(model) >= N * K
    for read in (
        lambda: model(X.bfloat16()),
        lambda: model[0].weight.dequantize(),
        lambda: model[0].weight.qdata + 1,
        lambda: torch.compile(model, backend="inductor")(X.bfloat16()),
    ):
        with pytest.raises(Exception, match=UNREADABLE):
            read()
    check(run, twin, X.bfloat16())
    model.load_state_dict(twin.state_dict(), assign=True)
    check(run, twin, X.bfloat16())


def test_a_wrong_option():
    with pytest.raises(qinductor.OptionError, match="weights is 'free'; wanted one of keep, rep"):
        qinductor.Options(weights="free")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_on_a_gpu(mode):
    """Under CUDA graphs, too, nothing asks for the address of what was freed."""

    class Scaled(Linear):
        def forward(self, x):
            return (x + self.bias.sum()) @ self.weight().t()

    models, twins = ([Scaled(seed, dtype=torch.bfloat16).cuda() for seed in range(3)] for _ in "ab")
    runs = [compiled(model, mode=mode) for model in models]
    for m in (4, 4, 4, 4, 9, 9, 9, 33, 4):
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        for run, model, twin in zip(runs, models, twins, strict=True):
            with torch.no_grad():
                check(run, twin, x)
            assert held(model) == model.bias.nbytes
    assert all(report.lowered == 1 for report in qinductor.reports())
    with pytest.raises(Exception, match=UNREADABLE):
        models[0](x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_on_a_gpu():
    """What stays allocated of a large weight is 5 % above its codes and scales at most; another M
    is compiled from that, and its weight is the one that was freed."""

    class Large(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randint(0, 256, (8192, 2048)).byte().cuda())
            self.register_buffer("scale", torch.rand(8192, 32, device="cuda").bfloat16() / 64)

        def weight(self):
            q = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1).to(torch.int8) - 8
            q = q.to(self.scale.dtype).unflatten(1, (32, 128))
            return (q * self.scale[..., None]).flatten(1)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight())

    before = torch.cuda.memory_allocated()
    model = Large()
    quantised, weight = torch.cuda.memory_allocated() - before, model.weight()
    before += weight.nbytes
    run = compiled(model, cudagraphs="off")
    for m in (1, 1, 5, 64, 4096):
        x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
        close(run(x), x @ weight.t())
        del x
        assert torch.cuda.memory_allocated() - before <= 1.05 * quantised
    assert all(report.lowered == 1 for report in qinductor.reports())
    assert torch.equal(run(torch.eye(4096, device="cuda", dtype=torch.bfloat16)), weight.t())
