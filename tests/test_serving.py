"""warmup and replay, with a recorder for the CPU: what is replayed, and what is not."""

import copy
import gc
import math
import re
import weakref

import numpy as np
import pytest
import torch
from models import BF16, Random
from served import Counting, Recorder, int4_layer
from torch._dynamo.utils import counters

import qinductor
from qinductor.serving import _sessions, cuda, examples, padding, session
from qinductor.serving.entries import LOOK
from qinductor.testing import product_oracle

SIZES = [2, 4, 8]


@pytest.fixture
def fails(monkeypatch):
    """Recording on the CPU; what it raises, by size."""
    found = {}
    monkeypatch.setitem(cuda.RECORDERS, "cpu", lambda device: Recorder(device, found))
    yield found
    qinductor.release()


class Two(torch.nn.Module):
    """Two results, of two inputs."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(16, 32).requires_grad_(False)

    def forward(self, x, y=None):
        h = torch.relu(self.a(x))
        return h if y is None else h + y, h.sum(-1)


class Function(torch.nn.Module):
    """A layer, and a function of its result and of x."""

    def __init__(self, function):
        super().__init__()
        self.a = torch.nn.Linear(16, 16).requires_grad_(False)
        self.function = function

    def forward(self, x):
        return self.function(self.a(x), x)


def compiled(model, **options):
    return torch.compile(model, backend="qinductor", options=options)


def rows(size, k=16, seed=0):
    return Random(seed).normal(size, k, dtype=torch.float32)


def held_to_eager(model, served, sizes, *more):
    for size in sizes:
        x = rows(size, seed=size)
        for want, got in zip(
            torch.utils._pytree.tree_leaves(model(x, *more)),
            torch.utils._pytree.tree_leaves(served(x, *more)),
            strict=True,
        ):
            torch.testing.assert_close(got, want)


def test_sizes_that_were_recorded_and_others(fails):
    model = Two()
    served = compiled(model)
    account = qinductor.warmup(served, rows(3), batch_sizes=SIZES, quiet=True)
    assert [(o.size, o.reason) for o in account.outcomes] == [(s, None) for s in (8, 4, 2, 1)]
    graphs = counters["stats"]["unique_graphs"]
    held_to_eager(model, served, [1, 2, 3, 4, 5, 6, 7, 8, 3, 5, 1])
    assert (account.replayed, account.plain, account.captures) == (11, {}, 4)
    held_to_eager(model, served, [9, 100])
    assert account.plain == {"no recorded size fits": 2}
    assert (counters["stats"]["unique_graphs"], account.captures) == (graphs, 4)


def test_results_are_the_caller_s_own(fails):
    served = compiled(Two())
    qinductor.warmup(served, rows(4), batch_sizes=[4], quiet=True)
    kept = served(rows(4, seed=1))
    first = [out.clone() for out in kept]
    second = served(rows(4, seed=2))
    assert all(map(torch.equal, kept, first)) and not torch.equal(second[0], first[0])
    kept[0].zero_()
    assert torch.equal(served(rows(4, seed=2))[0], second[0])


def test_strides_of_inputs(fails):
    model = Two()
    served = compiled(model)
    x = rows(16, 4).t()
    account = qinductor.warmup(served, x, rows(1, 32).expand(4, 32), quiet=True)
    x, y = rows(16, 4, seed=3).t(), rows(1, 32, seed=4).expand(4, 32)
    torch.testing.assert_close(served(x, y), model(x, y))
    assert account.replayed == 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda h, x: h - h.mean(0), "of result 0: it is another one"),
        (lambda h, x: h / h.shape[0], "the graph computes with its size (truediv)"),
        (lambda h, x: h * (1 + 1e-3 / h.shape[0]), "the graph computes with its size"),
        (lambda h, x: h + torch.arange(h.shape[0], 0, -1)[:, None], "computes with its size"),
        (lambda h, x: h + x[x.shape[0] - 2], "computes with its size (select)"),
        (lambda h, x: h + torch.full_like(h, math.sqrt(h.shape[0])), "computes with its size"),
        (lambda h, x: h - 0.5 * h.amax(0), "it depends on what is added"),
        (lambda h, x: torch.softmax(h @ h.t(), -1) @ h, "of result 0: it"),
        (lambda h, x: h @ h.t(), "no single axis grows"),
        (lambda h, x: h.sum(0), "of result 0: it is another one"),
        (lambda h, x: h + 1e-3 * h.sum(0), "of result 0: it depends on what is added"),
        (lambda h, x: torch.cat([h, x])[: h.shape[0] + 1], "no single axis grows"),
    ],
    ids=[
        "mean",
        "count",
        "slightly by count",
        "from the end",
        "an index",
        "a root",
        "largest",
        "attention",
        "pairs",
        "sum",
        "slightly",
        "one more",
    ],
)
def test_rows_that_are_not_independent_are_not_padded(fails, function, why):
    model = Function(function)
    served = compiled(model)
    account = qinductor.warmup(served, rows(3), batch_sizes=SIZES, quiet=True)
    held_to_eager(model, served, [2, 3, 4, 5, 8])
    assert account.replayed == 3 and sum(account.plain.values()) == 2
    assert all(reason.startswith("not padded: ") for reason in account.plain)
    assert any(why in reason for reason in account.plain)


def test_a_refutation_is_final(fails):
    """Though a call of another size between would be within the tolerance."""
    model = Function(lambda h, x: h + 0.04 * (h[-1] - h[0]).abs().sum() * (x[:1, :1] > 9))
    served = compiled(model)
    x = rows(2)
    account = qinductor.warmup(served, x, batch_sizes=[4, 64], quiet=True)
    held_to_eager(model, served, [2, 3, 4, 5, 40, 64])
    last = Function(lambda h, x: torch.cat([h[:-1], 2 * h[-1:]]))
    served = compiled(last)
    account = qinductor.warmup(served, rows(2), batch_sizes=[4, 64], quiet=True)
    held_to_eager(last, served, [2, 3, 4, 5, 40, 64])
    assert sum(account.plain.values()) == 4


@pytest.mark.parametrize("make", [torch.zeros, torch.ones], ids=["zeros", "ones"])
def test_an_example_whose_rows_are_alike(fails, make):
    """As most people's are: the added rows that it is tried with differ all the same."""
    model = Function(lambda h, x: h - 0.5 * h.mean(0))
    served = compiled(model)
    account = qinductor.warmup(served, make(1, 16), batch_sizes=SIZES, quiet=True)
    held_to_eager(model, served, [2, 3, 5, 8])
    assert account.replayed == 2

    table = torch.randn(9, 16)
    model = torch.nn.Module()
    model.forward = lambda ids: table[ids] - table[ids].mean(0)
    served = compiled(model)
    account = qinductor.warmup(served, make(1, dtype=torch.long), batch_sizes=SIZES, quiet=True)
    ids = torch.arange(3)
    torch.testing.assert_close(served(ids), model(ids))
    assert account.replayed == 0 and sum(account.plain.values()) == 1


def test_inputs_that_are_broadcast(fails):
    model = Two()
    served = compiled(model)
    y = rows(1, 32).expand(4, 32)
    account = qinductor.warmup(served, rows(4), y, batch_sizes=[2, 4], quiet=True)
    for size in (2, 3, 4):
        x, y = rows(size, seed=3), rows(1, 32, seed=4).expand(size, 32)
        torch.testing.assert_close(served(x, y), model(x, y))
    assert account.replayed == 3


def test_results_that_share_memory(fails):
    model = Function(lambda h, x: (h, h[:, :8], h[:1].expand(50, 16), x * 2))
    served = compiled(model)
    qinductor.warmup(served, rows(4), quiet=True)
    h, part, wide, _ = served(rows(4))
    assert h.stride() == part.stride() == (16, 1) and wide.stride() == (0, 1)
    h.zero_()
    assert not part.any() and not wide.any()


def test_states_know_that_they_were_written(fails):
    model = Counting()
    served = compiled(model)
    x, slots = rows(4, 32), torch.arange(4)
    account = qinductor.warmup(served, x, slots, quiet=True)
    before = model.last._version
    served(x, slots)
    assert account.replayed == 1 and model.last._version > before


def test_states_that_share_memory_are_restored(fails):
    held = torch.zeros(4, 16)
    part, whole = held[:2].data, held.data
    for state in (part, whole):
        torch._dynamo.mark_static_address(state)

    def step(x):
        part.add_(x[:2])
        torch._dynamo.graph_break()
        whole.mul_(2).add_(x)
        return whole + 1

    qinductor.warmup(compiled(step), rows(4), quiet=True)
    assert not held.any()


def test_no_rows(fails):
    model = Two()
    served = compiled(model)
    x = rows(4)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    qinductor.warmup(served, x, shapes=[(8, 16), (4, 16)], quiet=True)
    held_to_eager(model, served, [0, 3, 8])


def test_added_rows_stay_in_the_memory_of_states(fails):
    def step(x, cache):
        cache.add_(x)
        return cache * 2

    served = compiled(step)
    memory = np.zeros((8, 16), np.float32)
    big = torch.from_numpy(memory)
    caches = {size: big[:size] for size in range(1, 9)}
    account = qinductor.warmup(
        served, lambda size: ((rows(size), caches[size]), {}), batch_sizes=[2, 4],
        padding="repeat", quiet=True,
    )  # fmt: skip
    assert torch.equal(served(rows(3), caches[3]), rows(3) * 2)
    assert account.replayed == 1
    served(rows(3), torch.from_numpy(memory[:3]))  # whose storage ends with it
    assert account.plain == {"not padded: a state has no memory for the rows that are added": 1}


def test_other_padding_later(fails):
    model = Counting()
    served = compiled(model)
    slots = torch.arange(16)
    qinductor.warmup(served, rows(2, 32), slots[:2], batch_sizes=[2, 4], quiet=True)
    account = qinductor.warmup(
        served, rows(2, 32), slots[:2], batch_sizes=[2, 4], padding={"slots": 15}, quiet=True
    )
    captures = account.captures
    served(rows(3, 32), slots[:3])
    assert account.replayed == 1 and account.captures == captures and model.last[15].any()


@pytest.mark.parametrize("what", ["dtype", "grad", "stride"])
def test_graphs_that_were_not_recorded_are_counted(fails, what):
    served = compiled(Function(lambda h, x: h))
    with torch.no_grad():
        account = qinductor.warmup(served, rows(4), quiet=True)
    x = rows(4, seed=1)
    with torch.set_grad_enabled(what == "grad"):
        served(rows(16, 4).t() if what == "stride" else x.requires_grad_(what == "dtype"))
    assert sum(account.plain.values()) == 1


def test_the_limit_of_recompiles_is_told(fails):
    table = {size: float(size) for size in range(200)}
    model = Function(lambda h, x: h * table[h.shape[0]])
    served = compiled(model)
    with torch._dynamo.config.patch(recompile_limit=2):
        account = qinductor.warmup(served, rows(2), batch_sizes=range(1, 13), quiet=True)
    assert "Dynamo gave up" in str(account)
    held_to_eager(model, served, [1, 2, 7, 12])


def test_a_model_that_wants_pairs(fails):
    model = Function(lambda h, x: h.reshape(-1, 2, 16).sum(1))
    served = compiled(model)
    account = qinductor.warmup(served, rows(4), batch_sizes=[4, 8], quiet=True)
    held_to_eager(model, served, [4, 6, 8])
    assert "a call of size 1 was tried, too: " in account.notes[0]


def test_states(fails):
    model = Counting()
    served = compiled(model)
    slots = torch.arange(16)
    account = qinductor.warmup(served, rows(2, 32), slots[:2], batch_sizes=[2, 4], quiet=True)
    assert int(model.steps) == 0 and not model.last.any()
    twin = copy.deepcopy(model)
    for step, size in enumerate([2, 4, 3, 1, 4]):
        x = rows(size, 32, seed=step)
        at = slots[step : step + size]
        torch.testing.assert_close(served(x, at), twin(x, at))
    assert int(model.steps) == 5
    torch.testing.assert_close(model.last, twin.last)
    assert account.replayed == 4
    ((reason, _),) = account.plain.items()
    assert re.search(r"not padded: the graph writes to .*(steps|last).*; wanted padding=", reason)


@pytest.mark.parametrize("given", ["repeat", {"slots": 15, "x": 0.0}])
def test_states_with_declared_padding(fails, given):
    model = Counting()
    served = compiled(model)
    slots = torch.arange(16)
    example = rows(2, 32), slots[:2]
    account = qinductor.warmup(served, *example, batch_sizes=[2, 4], padding=given, quiet=True)
    twin = copy.deepcopy(model)
    for step in range(3):
        x, at = rows(3, 32, seed=step), slots[step : step + 3]
        torch.testing.assert_close(served(x, at), twin(x, at))
    assert account.replayed == 3
    torch.testing.assert_close(model.last, twin.last)


class TestWeights:
    """Of int4 codes that are packed."""

    def served(self):
        model = int4_layer()
        served = compiled(model)
        x = Random(1).normal(96, 128)
        account = qinductor.warmup(served, x, quiet=True)
        assert qinductor.last_report().lowered == 1
        return model, served, x, account

    def check(self, model, served, x):
        with torch.no_grad():
            w = model.codes.float().unflatten(1, (-1, 32)) * model.scale.float().unsqueeze(-1)
        product_oracle(served(x), model(x), x, w.flatten(1).to(BF16))

    def test_replayed(self, fails):
        model, served, x, account = self.served()
        self.check(model, served, x + 1)
        assert account.replayed == 1

    @pytest.mark.parametrize("how", ["in place", "load_state_dict", "assign", "buffer"])
    def test_stale_weights_are_not_replayed(self, fails, how):
        model, served, x, account = self.served()
        other = int4_layer(seed=5)
        if how == "in place":
            model.codes.copy_(other.codes)
        elif how == "buffer":
            model.codes = other.codes
        else:
            model.load_state_dict(other.state_dict(), assign=how == "assign")
        for _ in range(3):
            self.check(model, served, x)
        assert account.replayed == 0 and sum(account.plain.values()) == 3
        again = qinductor.warmup(served, x, quiet=True)
        self.check(model, served, x)
        assert again.replayed == 1

    def test_writes_that_bump_no_version_are_seen_as_soon(self, fails):
        model, served, x, account = self.served()
        self.check(model, served, x)
        model.codes.data.copy_(int4_layer(seed=5).codes)
        for _ in range(LOOK):
            served(x)
        self.check(model, served, x)
        assert "weights changed" in str(account.plain)

    def test_two_models_share_a_graph(self, fails):
        model, served, x, account = self.served()
        other = int4_layer(seed=7)
        second = compiled(other)
        self.check(other, second, x)
        qinductor.warmup(second, x, quiet=True)
        for _ in range(2):
            self.check(model, served, x)
            self.check(other, second, x)
        qinductor.release(model)
        self.check(model, served, x)
        self.check(other, second, x)

    def test_freed_originals(self, fails):
        model = int4_layer()
        served = compiled(model, weights="replace")
        x = Random(1).normal(96, 128)
        want = int4_layer()(x)
        account = qinductor.warmup(served, x, quiet=True)
        torch.testing.assert_close(served(x), want, atol=0.05, rtol=0.05)
        assert account.replayed == 1


def test_another_tensor_at_another_address(fails):
    model = Two()
    served = compiled(model)
    account = qinductor.warmup(served, rows(4), quiet=True)
    with torch.no_grad():
        model.a.weight = torch.nn.Parameter(model.a.weight + 1, requires_grad=False)
    held_to_eager(model, served, [4])
    assert account.plain == {"an input that is taken by its address is another tensor": 1}


def test_results_that_lie_in_inputs(fails):
    model = Function(lambda h, x: (h, x[:1]))
    served = compiled(model)
    account = qinductor.warmup(served, rows(4), quiet=True)
    assert re.search(r"result 1 is a view of .*x", account.outcomes[0].reason)
    held_to_eager(model, served, [4])

    class State(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.ones(4))

        def forward(self, x):
            return x + self.state, self.state[1:]

    model = State()
    served = compiled(model)
    account = qinductor.warmup(served, rows(4, 4), quiet=True)
    out = served(rows(4, 4))[1]
    assert account.replayed == 1 and out.data_ptr() == model.state[1:].data_ptr()


def test_graph_breaks(fails):
    def function(h, x):
        torch._dynamo.graph_break()
        return h.relu() + x

    model = Function(function)
    served = compiled(model)
    account = qinductor.warmup(served, rows(4), batch_sizes=SIZES, quiet=True)
    assert account.captures == 8
    held_to_eager(model, served, [1, 2, 3, 7, 8])
    assert account.replayed == 10


def test_release(fails):
    model = Two()
    served = compiled(model)
    account = qinductor.warmup(served, rows(4), batch_sizes=SIZES, quiet=True)
    qinductor.release(served)
    held_to_eager(model, served, [2, 3])
    assert account.replayed == 0
    qinductor.release(served)  # none is left
    again = qinductor.warmup(served, rows(4), batch_sizes=SIZES, quiet=True)
    held_to_eager(model, served, [2, 3])
    assert again.replayed == 2


def test_more_sizes_later(fails):
    model = Two()
    served = compiled(model)
    qinductor.warmup(served, rows(4), batch_sizes=[4], quiet=True)
    account = qinductor.warmup(served, rows(4), batch_sizes=[4, 16], quiet=True)
    assert account.captures == 3  # 4, 1, 16
    held_to_eager(model, served, [4, 16, 9, 1])
    assert account.replayed == 4


def test_out_of_memory(fails):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    fails[8] = full
    model = Two()
    served = compiled(model)
    account = qinductor.warmup(served, rows(4), batch_sizes=SIZES, quiet=True)
    found = {outcome.size: outcome.reason for outcome in account.outcomes}
    assert found[8] == "out of memory: CUDA out of memory. Tried to allocate 2 GiB"
    assert found[4] is None and "NOT CAPTURED at 8: out of memory" in str(account)
    held_to_eager(model, served, [8, 7, 4, 3])
    assert account.replayed == 2


def test_a_compile_while_recording_is_an_error(fails):
    fails[4] = lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    model = Two()
    served = compiled(model)
    with pytest.raises(qinductor.QinductorError, match="compiled while a CUDA graph was recorded"):
        qinductor.warmup(served, rows(4), quiet=True)
    held_to_eager(model, served, [4])


def test_what_fails_while_recording_runs_plainly(fails):
    def fail():
        try:
            raise ValueError("of the graph")
        except ValueError:
            raise RuntimeError("capture was invalidated") from None

    fails[4] = fail
    model = Two()
    served = compiled(model)
    account = qinductor.warmup(served, rows(4), quiet=True)
    assert account.outcomes[0].reason == "ValueError: of the graph"
    held_to_eager(model, served, [4])
    assert account.replayed == 0


def test_a_second_warmup_of_other_shapes(fails):
    """Whose sizes are no sizes of the first."""
    model = Function(lambda h, x: h)
    served = compiled(model)
    qinductor.warmup(served, torch.randn(1, 1, 16), batch_sizes=[3, 5], quiet=True)
    account = qinductor.warmup(
        served, torch.randn(2, 7, 16), shapes=[(2, 7, 16), (2, 9, 16)], quiet=True
    )
    for shape in ((3, 1), (4, 1), (5, 1), (2, 7), (2, 8), (2, 9)):
        x = torch.randn(*shape, 16)
        torch.testing.assert_close(served(x), model(x))
    assert account.replayed == 6


def test_recordings_end_with_their_model(fails):
    model, other = int4_layer(), int4_layer()
    served, kept = compiled(model), compiled(other)
    x = Random(1).normal(4, 128)
    qinductor.warmup(served, x, quiet=True)
    qinductor.warmup(kept, x, quiet=True)
    entries = [weakref.ref(entry) for entry in _sessions[id(model)][1].entries]
    assert entries
    del model, served
    gc.collect()
    assert not any(entry() for entry in entries) and len(_sessions) == 1


def test_a_function_that_calls_the_model(fails):
    model = Two()
    served = compiled(model)
    account = qinductor.warmup(lambda x: served(x)[0], rows(4), quiet=True)
    gc.collect()
    held_to_eager(model, served, [4])
    assert account.replayed == 1


def test_large_inputs_that_are_copied(fails):
    served = compiled(Function(lambda h, x: h))
    account = qinductor.warmup(served, rows(1 << 19), quiet=True)
    assert re.search(r"x.* is copied at every call, 32 MiB: .*mark_static", account.notes[0])


def test_shapes(fails):
    model = Two()
    served = compiled(model)
    given = [(2, 16), ((6, 16), (6, 32))]
    with pytest.raises(qinductor.OptionError, match="for more tensors than others"):
        qinductor.warmup(served, rows(2), rows(2, 32), shapes=given, quiet=True)
    given = [((2, 16), (2, 32)), ((6, 16), (6, 32))]
    account = qinductor.warmup(served, rows(2), rows(2, 32), shapes=given, quiet=True)
    for size in (2, 6, 5):
        x, y = rows(size), rows(size, 32)
        torch.testing.assert_close(served(x, y), model(x, y))
    assert account.replayed == 3


def test_a_function_of_examples_and_keywords(fails):
    model = Two()
    served = compiled(model)
    account = qinductor.warmup(
        served, lambda size: ((rows(size),), {"y": rows(size, 32)}), batch_sizes=[2, 4], quiet=True
    )
    for size in (1, 2, 3, 4):
        x, y = rows(size), rows(size, 32, seed=9)
        torch.testing.assert_close(served(x, y=y), model(x, y))
    assert account.replayed == 4
    again = qinductor.warmup(served, rows(8), kwargs={"y": rows(8, 32)}, quiet=True)
    x, y = rows(8), rows(8, 32, seed=9)
    torch.testing.assert_close(served(x, y=y), model(x, y))
    assert again.replayed == 5


def test_training_graphs_are_left(fails):
    model = torch.nn.Linear(16, 16)
    served = compiled(model)
    account = qinductor.warmup(served, rows(4), quiet=True)
    assert "a training graph; wanted" in account.outcomes[0].reason
    served(rows(4)).sum().backward()
    assert model.weight.grad is not None
    with torch.no_grad():
        account = qinductor.warmup(served, rows(4), quiet=True)
        torch.testing.assert_close(served(rows(4)), model(rows(4)))
    assert account.replayed == 1


def test_within_inference_mode(fails):
    model = Two()
    served = compiled(model)
    with torch.inference_mode():
        account = qinductor.warmup(served, rows(4), batch_sizes=[4], quiet=True)
        held_to_eager(model, served, [4, 3])
    assert account.replayed == 2


@pytest.mark.parametrize(
    "options", [{"cudagraphs": "off"}, {"cudagraphs": "inductor"}, {"mode": "reduce-overhead"}]
)
def test_graphs_that_are_not_ours_to_record(fails, options):
    served = compiled(Two(), **options)
    with pytest.raises(qinductor.QinductorError, match="no graph of qinductor ran; wanted"):
        qinductor.warmup(served, rows(4), quiet=True)


def test_without_a_gpu():
    model = Two()
    served = compiled(model, cudagraphs="buckets")
    account = qinductor.warmup(served, rows(4), batch_sizes=[2, 4], quiet=True)
    assert {outcome.reason for outcome in account.outcomes} == {"it runs on cpu"}
    graphs = counters["stats"]["unique_graphs"]
    held_to_eager(model, served, [1, 2, 3, 4])
    assert counters["stats"]["unique_graphs"] == graphs
    qinductor.release(model)


def test_what_is_printed(fails, capsys):
    served = compiled(Two())
    qinductor.warmup(served, rows(4), batch_sizes=[2, 4])
    text = re.sub(r"\d+\.\d\d", "0.00", capsys.readouterr().out)
    assert text == (
        "qinductor warm-up\n"
        "  phase                                 seconds  MiB predicted  MiB used\n"
        "  weights: match, prove, pack, compile     0.00            0.0       0.0\n"
        "  buffers of inputs                        0.00            0.0       0.0\n"
        "  runs until nothing compiles              0.00            0.0       0.0\n"
        "  CUDA graphs                              0.00            0.0       0.0\n"
        "  all                                      0.00            0.0       0.0\n"
        "  graph 1: 4, 2\n"
        "  graph 2: 1\n"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_sizes": []}, "batch_sizes is .*; wanted positive integers"),
        ({"batch_sizes": [0, 2]}, "batch_sizes is .*; wanted positive integers"),
        ({"batch_sizes": [2.5]}, "batch_sizes is .*; wanted positive integers"),
        ({"batch_sizes": [2], "shapes": [(2, 16)]}, "both given; wanted one"),
        ({"shapes": []}, "shapes is empty"),
        ({"shapes": [(2, 16, 3)]}, "the example's tensors are"),
        ({"shapes": [2]}, "wanted a shape"),
        ({"padding": "zero"}, "padding is 'zero'; wanted 'repeat'"),
        ({"padding": {"x": True}}, "padding is True; wanted"),
    ],
)
def test_bad_arguments(fails, given, message):
    with pytest.raises(qinductor.OptionError, match=message):
        qinductor.warmup(compiled(Two()), rows(4), quiet=True, **given)


def test_bad_models_and_examples(fails):
    with pytest.raises(qinductor.QinductorError, match="no graph of qinductor ran"):
        qinductor.warmup(Two(), rows(4), quiet=True)
    assert not _sessions
    with pytest.raises(qinductor.OptionError, match="no tensor with an axis"):
        qinductor.warmup(compiled(Two()), 3, quiet=True)
    with pytest.raises(qinductor.OptionError, match="wanted one of buckets, inductor, off"):
        qinductor.Options(cudagraphs="trees")
    with pytest.raises(qinductor.OptionError, match=r"wanted \(args, kwargs\)"):
        qinductor.warmup(compiled(Two()), lambda size: rows(size), batch_sizes=[2], quiet=True)
    with pytest.raises(qinductor.OptionError, match="is no input of a graph"):
        qinductor.warmup(compiled(Two()), rows(4), padding={"z": 0}, quiet=True)


def test_an_error_of_the_model_ends_the_warmup(fails):
    def function(h, x):
        if h.shape[0] == 2:
            raise RuntimeError("two rows")
        return h

    model = Function(function)
    served = compiled(model)
    with pytest.raises(RuntimeError, match="two rows"):
        qinductor.warmup(served, rows(4), batch_sizes=[2, 4], quiet=True)
    held_to_eager(model, served, [4])


def test_a_model_of_the_sizes_asked_for_alone(fails):
    model = Two()
    tables = {size: torch.full((size, 32), float(size)) for size in (1, 2, 4)}
    served = compiled(lambda x: model(x, tables[x.shape[0]]))
    account = qinductor.warmup(served, rows(4), batch_sizes=[1, 2, 4], quiet=True)
    for size in (1, 2, 4):
        x = rows(size, seed=size)
        torch.testing.assert_close(served(x), model(x, tables[size]))
    assert account.replayed == 3


def test_a_method_of_an_object_that_is_no_module(fails):
    class Engine:
        def __init__(self):
            self.model = Two()

        def step(self, x):
            return self.model(x)[0] + 1

    engine = Engine()
    served = torch.compile(engine.step, backend="qinductor")
    account = qinductor.warmup(served, rows(4), batch_sizes=[2, 4], quiet=True)
    for size in (2, 3, 4):
        torch.testing.assert_close(served(rows(size)), engine.step(rows(size)))
    assert account.replayed == 3
    qinductor.release(served)
    served(rows(4))
    assert account.replayed == 3


def test_small_states_are_restored_beside_large_ones(fails, monkeypatch):
    monkeypatch.setattr(session, "RESTORED", 64)
    model = Counting()
    served = compiled(model)
    slots = torch.arange(16)
    account = qinductor.warmup(served, rows(4, 32), slots[:4], quiet=True)
    assert int(model.steps) == 0 and model.last.any()
    assert account.notes == ["warm-up has written to states of more than 0 MiB"]


def test_what_grows():
    assert padding.axis_of({2: (2, 8), 4: (4, 8)}) == (0, 1)
    assert padding.axis_of({2: (8, 12), 4: (8, 24)}) == (1, 6)
    assert padding.axis_of({2: (8,), 4: (8,)}) is None
    for shapes in ({2: (3,), 4: (5,)}, {2: (2, 2), 4: (4, 4)}, {2: (4,), 4: (4,), 8: (8,)}):
        with pytest.raises(ValueError, match="no single axis grows in proportion"):
            padding.axis_of(shapes)


@pytest.mark.parametrize("each", [1, 3])
def test_added_rows(each):
    axis = padding.Axis(1, each)
    given = torch.arange(2 * 2 * each).reshape(2, 2 * each)
    held = torch.full((2, 4 * each), -1)
    padding.padded_into(held, given, axis, (2, 4), "repeat")
    last = given[:, each:]
    assert torch.equal(held, torch.cat([given, last, last], 1))
    assert not padding.padded_into(held, torch.zeros_like(given), axis, (2, 4), "repeat", True)
    assert padding.padded_into(held, given, axis, (2, 4), "repeat", noise=True)
    assert torch.equal(held[:, : 2 * each], given) and not torch.equal(held[:, 2 * each :], last)
    padding.padded_into(held, given, axis, (2, 4), 7)
    assert torch.equal(held, torch.cat([given, torch.full_like(given, 7)], 1))


def test_names_of_inputs():
    assert padding.named("x", "L['x']") and padding.named("ids", "L['kwargs']['ids']")
    assert padding.named("a.ids", "L['a'].ids") and not padding.named("ds", "L['ids']")


def test_sizes_between():
    calls = examples.calls_of([torch.ones(4, 2)], {}, [4, 8, 5], None)
    assert [call.size for call in calls] == [8, 5, 4, 1]
    assert [call.size for call in examples.between(calls)] == [2, 6]
    assert examples.between(calls)[1]()[0][0].shape == (6, 2)


def test_weights_of_a_subclass_are_known_by_their_parts(fails):
    """Whose own address is 0."""
    torchao = pytest.importorskip("torchao.quantization")

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=BF16))
        torchao.quantize_(model.requires_grad_(False), torchao.Int8WeightOnlyConfig())
        return model

    model, other, x = made(0), made(1), Random(1).normal(4, 64)
    served = compiled(model, patterns={"dequant_matmul": "off"})
    account = qinductor.warmup(served, x, quiet=True)
    torch.testing.assert_close(served(x), model(x), atol=0.02, rtol=0.02)
    model[0] = other[0]
    torch.testing.assert_close(served(x), other(x), atol=0.02, rtol=0.02)
    assert account.replayed == 1 and sum(account.plain.values()) == 1
