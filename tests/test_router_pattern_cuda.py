"""Routers lowered on a GPU: the experts that eager chooses there, and their weights."""

import pytest
import torch
from quantisers import Of
from router_spellings import SPELLINGS
from routers import BF16, FP32, assert_close, distinct

import qinductor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run")
NAMES = [name for name in SPELLINGS if name != "stored_turned"]  # no rows of distinct logits


@pytest.mark.parametrize("name", NAMES)
def test_results(name):
    """One compile for every number of rows from the second on; logits of a row are different, and
    exact in every order of their sums."""
    case, (_, w) = SPELLINGS[name], distinct()
    tensors = {key: tensor.cuda() for key, tensor in case.tensors().items()}
    module = Of(case.function, w=w.cuda(), **tensors)
    torch._dynamo.reset()
    made = torch.compile(module, backend="qinductor", options={"patterns": {"router": "require"}})
    graphs = []
    with torch.no_grad():
        for rows in (6, 2, 16, 18, 64, 500, 4096):
            x = torch.cat([distinct(2)[0] for _ in range(rows // 2)]).cuda()
            assert_close(made(x), module(x))
            graphs.append(len(qinductor.reports()))
    assert qinductor.last_report().lowered == 1
    assert graphs[2:] == [graphs[2]] * (len(graphs) - 2)


@pytest.mark.parametrize("logits", [FP32, BF16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ties(score, logits):
    """Of few values: the experts are those of torch.topk there."""

    def router(x):
        scores = torch.softmax(x, -1, dtype=FP32) if score == "softmax" else x.float().sigmoid()
        return torch.topk(scores, 8, dim=-1)

    x = (torch.randint(-3, 4, (4096, 256)) / 4).to(logits).cuda()
    torch._dynamo.reset()
    made = torch.compile(router, backend="qinductor", options={"patterns": {"router": "require"}})
    with torch.no_grad():
        assert_close(made(x), router(x))


def test_a_replayed_graph_and_a_changed_bias():
    """Of a bias nothing is kept."""
    case, (x, w) = SPELLINGS["deepseek_v3"], distinct(16)
    b = case.tensors()["b"].cuda()
    module, x = Of(case.function, w=w.cuda(), b=b), x.cuda()
    torch._dynamo.reset()
    made = torch.compile(module, backend="qinductor", options={"mode": "reduce-overhead"})
    with torch.no_grad():
        for _ in range(4):
            assert_close(made(x), module(x))
            b.copy_(b[torch.randperm(len(b), device="cuda")])
