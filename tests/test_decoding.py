"""Continuous decoding of changing batch sizes on one static cache: eager's tokens, no recompile."""

import contextlib
from typing import Any
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
from qinductor.serving import Account

BUCKETS = (1, 2, 4, 8)
FP32 = torch.float32
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")


def alone(model: PreTrainedModel, request: Request) -> list[int]:
    """What eager generates for this request by itself."""
    ids = request.prompt[None]
    return generate(model, (ids, torch.ones_like(ids)), request.wanted).tokens[0].tolist()


@pytest.fixture(autouse=True)
def released():
    yield
    qinductor.release()


def decoder(model: PreTrainedModel, **compiles: Any) -> Decoder:
    """Its steps are compiled."""
    made = Decoder(model, BUCKETS, SLOTS)
    made.compiled = torch.compile(made.forward, backend="qinductor", fullgraph=True, **compiles)
    return made


def warm(made: Decoder) -> Account:
    """Every bucket is warmed up, on rows that are free yet."""
    ids, positions = torch.zeros(2, max(BUCKETS), dtype=torch.long, device=made.positions.device)
    return qinductor.warmup(made, ids[:, None], positions, batch_sizes=BUCKETS, quiet=True)


@pytest.mark.parametrize(
    ("kind", "dynamic", "graphs"),
    [*((kind, True, 2) for kind in LINEARS), ("llama", False, len(BUCKETS))],
)
def test_changing_batches(kind, dynamic, graphs):
    """One compile for a batch of 1 and one for the others, or one for each; then never again."""
    model = build(kind, FP32, int4)
    options = {"inductor": {"fallback_by_default": True}}  # spares a C++ compile
    steps = decoder(model, dynamic=dynamic, options=options)
    asked = requests(24)
    with torch.no_grad():
        warm(steps)
        reports = list(qinductor.reports())
        assert [sum(s.lowered for s in r.sites) for r in reports] == [LINEARS[kind]] * graphs
        before = counters["stats"]["unique_graphs"]
        used = serve(steps, asked)
    assert counters["stats"]["unique_graphs"] == before
    assert len(qinductor.reports()) == graphs
    assert set(used) == set(BUCKETS) and len(used) > 40
    for request in asked:
        assert request.tokens == alone(model, request)


@cuda
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("kind", LINEARS)
def test_recorded_buckets(kind, dynamic):
    """Behind `warmup` a step is its bucket's replay: no compile, no capture, the same tokens."""
    model = build(kind, torch.bfloat16, int4, "cuda")
    recorded = decoder(model, dynamic=dynamic)
    plain = decoder(model, dynamic=dynamic, options={"cudagraphs": "off"})
    asked, same = requests(24, "cuda"), requests(24, "cuda")
    with torch.no_grad():
        serve(plain, same)
        account = warm(recorded)
        assert not any(outcome.reason for outcome in account.outcomes), account
        before = counters["stats"]["unique_graphs"], account.captures
        with counted("capture_begin") as captures:
            used = serve(recorded, asked)
    assert (counters["stats"]["unique_graphs"], account.captures) == before
    assert not account.plain and captures.call_count == 0
    assert account.captures == len(BUCKETS)
    assert account.replayed == len(used) and set(used) == set(BUCKETS)
    if kind != "mixtral":  # stock Inductor (2.11) gives others from one call of it to the next
        assert [request.tokens for request in asked] == [request.tokens for request in same]


def counted(name: str) -> contextlib.AbstractContextManager[mock.Mock]:
    """Counts the calls of a method of CUDA graphs meanwhile."""
    kind = torch.cuda.CUDAGraph
    return mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name))
