"""Continuous decoding of changing batch sizes on one static cache: eager's tokens, no recompile."""

import contextlib
from unittest import mock

import pytest
import torch
from generating import (
    LINEARS,
    SLOTS,
    Decoder,
    Request,
    build,
    generate,
    int4,
    requests,
    serve,
)
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import qinductor

pytest.importorskip("torchao", reason="it quantises the models")
BUCKETS = (1, 2, 4, 8)
FP32 = torch.float32
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")


def alone(model: PreTrainedModel, request: Request) -> list[int]:
    """What eager generates for this request by itself."""
    ids = request.prompt[None]
    return generate(model, (ids, torch.ones_like(ids)), request.wanted).tokens[0].tolist()


def warm(decoder: Decoder) -> None:
    """Every bucket once, the largest first; the rows are free yet, and zero."""
    for b in sorted(decoder.buckets, reverse=True):
        device = decoder.positions.device
        ids = torch.zeros(b, 1, dtype=torch.long, device=device)
        decoder.step(b, ids, torch.zeros(b, dtype=torch.long, device=device))


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 2), (False, len(BUCKETS))])
@pytest.mark.parametrize("kind", LINEARS)
def test_changing_batches(kind, dynamic, graphs):
    """One compile for a batch of 1 and one for the others, or one for each; then never again."""
    model = build(kind, FP32, int4)
    decoder = Decoder(model, BUCKETS, SLOTS)
    options = {"inductor": {"fallback_by_default": True}}  # spares a C++ compile
    decoder.compiled = torch.compile(
        decoder.forward, backend="qinductor", dynamic=dynamic, fullgraph=True, options=options
    )
    asked = requests(24)
    with torch.no_grad():
        warm(decoder)
        reports = list(qinductor.reports())
        assert [sum(s.lowered for s in r.sites) for r in reports] == [LINEARS[kind]] * graphs
        before = counters["stats"]["unique_graphs"]
        used = serve(decoder, asked)
    assert counters["stats"]["unique_graphs"] == before
    assert len(qinductor.reports()) == graphs
    assert set(used) == set(BUCKETS) and len(used) > 40
    for request in asked:
        assert request.tokens == alone(model, request)


@cuda
def test_captured_buckets():
    """Behind `warmup` a step is its bucket's replay: no compile, no capture, the same tokens."""
    model = build("llama", torch.bfloat16, int4, "cuda")
    captured, plain = Decoder(model, BUCKETS, SLOTS), Decoder(model, BUCKETS, SLOTS)
    for decoder, options in ((captured, {"cudagraphs": "buckets"}), (plain, None)):
        decoder.compiled = torch.compile(
            decoder.forward, backend="qinductor", dynamic=False, fullgraph=True, options=options
        )

    def step(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return captured.step(len(ids), ids, positions)

    ids, positions = torch.zeros(2, max(BUCKETS), dtype=torch.long, device="cuda")
    with torch.no_grad(), counted("capture_begin") as captures, counted("replay") as replays:
        qinductor.warmup(step, ids[:, None], positions, batch_sizes=list(BUCKETS))
        warm(plain)
        assert captures.call_count == len(BUCKETS)
        replays.reset_mock()
        before = counters["stats"]["unique_graphs"]
        asked, same = requests(24, "cuda"), requests(24, "cuda")
        used = serve(captured, asked)
        assert replays.call_count == len(used) and captures.call_count == len(BUCKETS)
        serve(plain, same)
    assert set(used) == set(BUCKETS)
    assert counters["stats"]["unique_graphs"] == before
    assert [request.tokens for request in asked] == [request.tokens for request in same]
    qinductor.release(step)


def counted(name: str) -> contextlib.AbstractContextManager[mock.Mock]:
    """Counts the calls of a method of CUDA graphs meanwhile."""
    kind = torch.cuda.CUDAGraph
    return mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name))
