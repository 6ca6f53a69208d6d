"""warmup on a GPU: replays equal plain calls, and memory is what was predicted, and given back."""

import copy
import gc

import pytest
import torch
from models import BF16, Random
from served import Counting, int4_layer
from torch._dynamo.utils import counters

import qinductor
from qinductor.serving import _sessions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")
SIZES = [1, 2, 4, 8, 16]


@pytest.fixture(autouse=True)
def released():
    yield
    qinductor.release()


class Layers(torch.nn.Module):
    """int4 layers with a residual and silu between them."""

    def __init__(self, k: int = 1024, n: int = 2048, layers: int = 2) -> None:
        super().__init__()
        pairs = [(int4_layer(n, k, 2 * i), int4_layer(k, n, 2 * i + 1)) for i in range(layers)]
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList(pair) for pair in pairs).cuda()

    def forward(self, x):
        for up, down in self.layers:
            x = x + down(torch.nn.functional.silu(up(x)))
        return x


class Then(torch.nn.Module):
    """A layer, and a function of its result and another input."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64).cuda().requires_grad_(False)
        self.function = function

    def forward(self, x, other):
        return self.function(self.layer(x), other)


def rows(size, k=1024, seed=0):
    return Random(seed).normal(size, k).cuda()


def compiled(model, **options):
    return torch.compile(model, backend="qinductor", options=options)


def plain(model, **options):
    """The same compiled code, of which nothing is recorded."""
    return compiled(copy.deepcopy(model), **options)


def poison(model):
    """Overwrites all that replays write to or read from, but for weights."""
    for entry in list(_sessions[id(model)][1].entries):
        for held in entry.held:
            held.buffer.fill_(float("nan") if held.buffer.is_floating_point() else 0)
        for out in entry.recording.outputs:
            out.fill_(float("nan"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replays_equal_plain_calls(mode):
    model = Layers()
    served, other = compiled(model), plain(model)
    with mode():
        account = qinductor.warmup(served, rows(4), batch_sizes=SIZES, quiet=True)
        assert [o.reason for o in account.outcomes] == [None] * 5
        graphs, captures = counters["stats"]["unique_graphs"], account.captures
        kept = []
        for seed in (1, 2):
            for size in (16, 1, 3, 4, 13, 8, 2):
                x = rows(size, seed=seed)
                poison(model)
                kept.append((served(x), x))
                torch.empty(1 << 20, device="cuda").fill_(float("nan"))
        assert (account.replayed, dict(account.plain)) == (14, {})
        assert counters["stats"]["unique_graphs"] == graphs
        assert account.captures == captures == 5
        exact = 0
        for out, x in kept:
            want = other(x)
            exact += torch.equal(out, want)
            torch.testing.assert_close(out, want, atol=0.05, rtol=0.05)
        assert exact >= 10  # a padded one may be of other kernels


def test_beyond_and_beside_what_was_recorded():
    model = Layers()
    served = compiled(model)
    account = qinductor.warmup(served, rows(4), batch_sizes=[4, 8], quiet=True)
    torch.testing.assert_close(served(rows(9)), model(rows(9)), atol=0.05, rtol=0.05)
    assert account.plain == {"no recorded size fits": 1}
    with pytest.raises(Exception, match="1000|shape|size"):
        served(rows(4, 1000))
    torch.testing.assert_close(served(rows(8)), model(rows(8)), atol=0.05, rtol=0.05)
    assert account.replayed == 1


def test_states():
    model = Counting(device="cuda")
    served = compiled(model)
    slots = torch.arange(16, device="cuda")
    x = rows(2, 32).float()
    account = qinductor.warmup(
        served, x, slots[:2], batch_sizes=[2, 4], padding={"slots": 15}, quiet=True
    )
    assert int(model.steps) == 0 and not model.last.any()
    twin = plain(model)
    for step, size in enumerate([2, 4, 3, 1, 4]):
        x, at = rows(size, 32, seed=step).float(), slots[step : step + size]
        poison(model)
        torch.testing.assert_close(served(x, at), twin(x, at))
    assert int(model.steps) == 5 and account.replayed == 5
    torch.testing.assert_close(model.last[:15], twin._orig_mod.last[:15])


def test_weights_that_change_while_serving():
    model = Layers()
    served, x = compiled(model), rows(4)
    account = qinductor.warmup(served, x, batch_sizes=[4], quiet=True)
    served(x)
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        if buffer.dtype is torch.int8:
            buffer.neg_()
    model.load_state_dict(other.state_dict())
    for _ in range(3):
        torch.testing.assert_close(served(x), other(x), atol=0.05, rtol=0.05)
    assert account.replayed == 1
    assert account.plain == {"weights changed since they were recorded; call warmup again": 3}
    qinductor.warmup(served, x, batch_sizes=[4], quiet=True)
    torch.testing.assert_close(served(x), other(x), atol=0.05, rtol=0.05)
    assert account.replayed == 2


def test_streams_and_two_models():
    first, second = Layers(), Layers()
    for buffer in second.buffers():
        if buffer.dtype is torch.int8:
            buffer.neg_()
    served = [compiled(first), compiled(second)]
    for one in served:
        qinductor.warmup(one, rows(4), batch_sizes=[4, 8], quiet=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    want = [[plain(m)(rows(8, seed=i)) for i in range(12)] for m in (first, second)]
    torch.cuda.synchronize()
    got = [[], []]
    for i in range(12):
        for which in (0, 1):
            stream = streams[(i + which) % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got[which].append(served[which](rows(8, seed=i)))
    torch.cuda.synchronize()
    assert all(map(torch.equal, got[0] + got[1], want[0] + want[1]))


def test_memory_is_as_predicted_and_given_back():
    model = Layers(2048, 8192)
    served = compiled(model)
    served(rows(4, 2048))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    account = qinductor.warmup(served, rows(4, 2048), batch_sizes=[1, 64, 512], quiet=True)
    for phase in account.phases[1:]:
        assert abs(phase.used - phase.predicted) <= 0.05 * max(phase.used, 1), str(account)
    assert account.phases[-1].used > 0
    qinductor.release(served)
    gc.collect()
    torch.cuda.empty_cache()
    # cuBLAS keeps a workspace for each stream
    assert torch.cuda.memory_reserved() - before < 100 << 20
    torch.testing.assert_close(served(rows(4, 2048)), model(rows(4, 2048)), atol=0.1, rtol=0.1)


def test_out_of_memory_while_recording():
    model = Layers(1024, 2048)
    served = compiled(model)
    qinductor.warmup(served, rows(4), batch_sizes=[4], quiet=True)
    held = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    session = _sessions[id(model)][1]
    gpu = next(iter(session.gpus.values()))
    record = gpu.record

    def scarce(run):
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1) / total)
        try:
            return record(run)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    gpu.record = scarce
    account = qinductor.warmup(served, rows(4), batch_sizes=[4096], quiet=True)
    reasons = {o.size: o.reason for o in account.outcomes}
    assert reasons[4096].startswith("out of memory: CUDA out of memory")
    assert torch.cuda.memory_reserved() - held < 64 << 20
    for size in (4096, 4):
        torch.testing.assert_close(served(rows(size)), model(rows(size)), atol=0.05, rtol=0.05)
    assert account.replayed == 1


def test_memory_that_others_free_is_not_a_recording_s():
    """As Inductor's trees have cuBLAS's workspaces freed."""
    model = torch.nn.Linear(16384, 64, device="cuda", dtype=BF16).requires_grad_(False)
    served, x = compiled(model), rows(4, 16384)  # cut along K
    account = qinductor.warmup(served, x, quiet=True)
    want = served(x)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 18,), 7, device="cuda", dtype=torch.int32) for _ in range(200)]
    for _ in range(3):
        assert torch.equal(served(x), want)
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others) and account.replayed == 4


def test_a_graph_of_the_user_s():
    model = Layers()
    served, x = compiled(model), rows(4)
    account = qinductor.warmup(served, x, quiet=True)
    want = served(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = served(x)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want) and account.replayed == 1


def test_a_part_on_a_cpu_is_left_to_inductor():
    model = Then(lambda h, weights: h * (weights * 2).cuda())
    served = compiled(model, cudagraphs="buckets")
    x, weights = rows(4, 64).float(), torch.ones(64)
    account = qinductor.warmup(served, x, weights, quiet=True)
    assert account.outcomes[0].reason == (
        "left to Inductor's CUDA graphs: a part of the graph is on a CPU"
    )
    for _ in range(3):
        torch.testing.assert_close(served(x, weights), model(x, weights))
    assert "left to Inductor's CUDA graphs" in str(qinductor.last_report())


def test_numbers_of_python_s():
    """Which Dynamo hands over in tensors on the CPU where it makes all sizes symbolic."""

    model = Then(lambda h, scale: h * scale)
    served = torch.compile(model, backend="qinductor", dynamic=True)
    x = rows(4, 64).float()
    account = qinductor.warmup(served, x, 0.25, batch_sizes=[2, 4], quiet=True)
    assert not any(outcome.reason for outcome in account.outcomes), account
    for size, scale in ((4, 0.25), (3, 0.25), (2, 0.5), (4, 0.25)):
        x = rows(size, 64).float()
        torch.testing.assert_close(served(x, scale), model(x, scale))
    assert account.replayed == 3


def test_what_cannot_be_recorded_runs_plainly():
    class Waiting(torch.nn.Module):
        def forward(self, x):
            return x.new_ones(int(torch.count_nonzero(x.sum(1))), 4)

    model = Waiting()
    served = compiled(model)
    account = qinductor.warmup(served, rows(4, 64), quiet=True)
    for size in (4, 3):
        assert torch.equal(served(rows(size, 64)), model(rows(size, 64)))
    assert account.replayed + sum(account.plain.values()) >= 0


def test_random_numbers_differ_between_replays():
    model = torch.nn.Dropout(0.5).train()
    served = compiled(model)
    account = qinductor.warmup(served, torch.ones(4096, device="cuda"), quiet=True)
    first, second = (served(torch.ones(4096, device="cuda")) for _ in range(2))
    assert account.replayed == 2 and not torch.equal(first, second)
    assert 0.4 < float((first == 0).float().mean()) < 0.6


def test_weights_that_are_freed():
    model = Layers()
    other = plain(model)
    served = compiled(model, weights="replace")
    account = qinductor.warmup(served, rows(4), batch_sizes=[4, 8], quiet=True)
    for size in (4, 6, 8):
        torch.testing.assert_close(served(rows(size)), other(rows(size)), atol=0.05, rtol=0.05)
    assert account.replayed == 3
