"""transformers' `generate` with a static cache, compiled by this backend: results, compiles."""

from importlib.util import find_spec

import pytest
import torch
from generating import (
    EVERY,
    LINEARS,
    build,
    compiled,
    dense,
    fp8,
    generate,
    int4,
    judge,
    prompts,
    torchao_fp8,
    torchao_int4,
    widened,
)
from served import Recorder
from torch._dynamo.utils import counters
from transformers import StaticCache

import qinductor
from qinductor.serving import cuda as recorders

BF16, FP32 = torch.bfloat16, torch.float32
BATCHES = (1, 2, 3, 4)
# Inductor calls the eager operator for what is not lowered, which spares a C++ compile.
EAGER_REST = {"inductor": {"fallback_by_default": True}}
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao quantises it")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")


class Compiles:
    """How many graphs of a model were compiled, of which at most `last` may be.

    Whatever else a first run compiles (the loop of a oneDNN kernel) may be compiled with them, and
    nothing once the last is there.
    """

    def __init__(self, last: int = 2) -> None:
        self.last = last
        self.settled: int | None = None

    def __call__(self) -> int:
        graphs, every = len(qinductor.reports()), counters["stats"]["unique_graphs"]
        assert self.settled in (None, every), "a later compile"
        self.settled = every if graphs >= self.last else None
        return graphs


def lowered(sites: int, graphs: int) -> None:
    """In each graph so many sites are lowered beside routers, for which a GPU alone has kernels. No
    other is left but the product of positions and frequencies, which some versions of transformers
    have as a matmul."""
    reports = list(qinductor.reports())
    assert len(reports) == graphs
    for report in reports:
        routers = [site for site in report.sites if site.pattern == "router"]
        assert all(site.lowered == (report.target != "cpu") for site in routers), report
        others = [site for site in report.sites if site.pattern != "router"]
        assert sum(site.lowered for site in others) == sites, report
        assert all(site.lowered or "rotary_emb" in site.where for site in others), report


@pytest.mark.parametrize("kind", LINEARS)
def test_tokens_are_eagers(kind):
    """In fp32 no two logits are within its error of each other: greedy tokens are eager's, each."""
    model, config, compiles = build(kind, FP32, int4), compiled(**EAGER_REST), Compiles()
    for turn, batch in enumerate((*BATCHES, 2, 1)):
        prompt = prompts(batch, 9, seed=turn)
        ours = generate(model, prompt, 10, config)
        assert torch.equal(ours.tokens, generate(model, prompt, 10).tokens)
        assert compiles() == min(turn + 1, 2)  # one for batch 1, one for all others
    lowered(LINEARS[kind], 2)


@pytest.mark.parametrize(
    ("kind", "quantise"),
    [
        pytest.param("deepseek", torchao_int4, marks=needs_torchao),
        pytest.param("llama", torchao_fp8, marks=needs_torchao),
        ("llama", dense),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_logits_are_as_exact_as_eagers(kind, quantise):
    """In bf16 two logits may tie: they are judged, on the path that was taken."""
    model = build(kind, BF16, quantise, **EVERY.get(kind, {}))
    exact, config, compiles = widened(model, FP32), compiled(), Compiles()
    for batch in BATCHES:
        prompt = prompts(batch, 9)
        judge(model, exact, prompt, generate(model, prompt, 8, config))
        assert compiles() == min(batch, 2)
    lowered(0 if quantise is dense else LINEARS[kind], 2)


def test_lengths_compile_once_more():
    """`generate` sizes its cache by the longest so far: a second size is symbolic from then on."""
    model, config, compiles = build("llama", FP32, int4), compiled(**EAGER_REST), Compiles(3)
    for turn, (longest, new) in enumerate([(9, 6), (9, 14), (5, 20), (12, 6), (16, 30), (9, 6)]):
        for batch in (2, 3):
            prompt = prompts(batch, longest, seed=turn)
            ours = generate(model, prompt, new, config)
            assert torch.equal(ours.tokens, generate(model, prompt, new).tokens)
            assert compiles() <= 2 + (turn > 0)
    lowered(LINEARS["llama"], compiles())


def test_own_cache_stays():
    """A cache of the caller's own keeps its addresses and its size: one compile serves all."""
    model, config, compiles = build("llama", FP32, int4), compiled(**EAGER_REST), Compiles(1)
    cache, places = StaticCache(config=model.config, max_cache_len=64), set()
    for turn, (longest, new) in enumerate([(9, 6), (9, 14), (5, 40), (12, 6)]):
        if turn:
            cache.reset()
        prompt = prompts(3, longest, seed=turn)
        ours = generate(model, prompt, new, config, cache=cache)
        assert torch.equal(ours.tokens, generate(model, prompt, new).tokens)
        places |= {(i, layer.keys.data_ptr()) for i, layer in enumerate(cache.layers)}
    assert len(places) == len(cache.layers)
    assert compiles() == 1
    lowered(LINEARS["llama"], 1)


def test_steps_that_were_warmed_up(monkeypatch):
    """`warmup` of a short `generate` on a cache of one's own: later steps are replayed."""
    monkeypatch.setitem(recorders.RECORDERS, "cpu", lambda device: Recorder(device, {}))
    model, config = build("llama", FP32, int4), compiled(**EAGER_REST)
    cache = StaticCache(config=model.config, max_cache_len=64)

    def short(ids: torch.Tensor, mask: torch.Tensor) -> None:
        cache.reset()
        generate(model, (ids, mask), 4, config, cache=cache)

    generate(model, prompts(3, 9), 4, cache=cache)  # makes the cache's tensors
    account = qinductor.warmup(short, *prompts(3, 9), quiet=True)
    for turn, (longest, new) in enumerate([(9, 6), (5, 20)]):
        cache.reset()
        prompt = prompts(3, longest, seed=turn)
        ours = generate(model, prompt, new, config, cache=cache)
        assert torch.equal(ours.tokens, generate(model, prompt, new).tokens)
    qinductor.release()
    assert account.replayed == 5 + 19 and not account.plain and account.captures == 1


@cuda
@pytest.mark.parametrize("quantise", [int4, fp8, dense])
@pytest.mark.parametrize("kind", LINEARS)
def test_a_gpu_as_well(kind, quantise):
    model = build(kind, BF16, quantise, "cuda", **EVERY.get(kind, {}))
    exact, config, compiles = widened(model, FP32), compiled(), Compiles()
    for batch in BATCHES:
        prompt = prompts(batch, 9, "cuda")
        judge(model, exact, prompt, generate(model, prompt, 8, config))
        assert compiles() == min(batch, 2)
    lowered(0 if quantise is dense else LINEARS[kind], 2)


@cuda
def test_graphs_of_inductor():
    """With Inductor's CUDA graphs, and a cache whose addresses stay, a replay is a plain call."""
    model, plain, graphs = build("llama", BF16, int4, "cuda"), compiled(), compiled()
    graphs.mode = "reduce-overhead"
    cache = StaticCache(config=model.config, max_cache_len=64)
    for turn in range(3):
        prompt = prompts(3, 9, "cuda", seed=turn)
        want = generate(model, prompt, 12, plain)
        cache.reset()
        ours = generate(model, prompt, 12, graphs, cache=cache)
        assert torch.equal(ours.logits, want.logits)
