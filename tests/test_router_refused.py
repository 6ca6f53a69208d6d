"""What looks like a router and is none of the family: left, with the reason."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from router_spellings import kept, normal, wide
from routers import FP32, H, N, found, refused, tokens, weight
from torch.nn.functional import linear, one_hot, softplus

OTHERS = "a token's experts and weights must be computed of its own logits"
NO_CHOICE = "no choice of the family is the region's: nearest is"
NO_WEIGHTS = "no weights of the family are the region's: nearest is"
ALONE = r"a router reads its logits and one bias \[16\] alone; this reads"
ONE_TOPK = "the experts must be picked by one topk"

Made = Callable[..., Any]
CASES: dict[str, tuple[Made, str, dict[str, torch.Tensor]]] = {}


def case(says: str, **buffers: torch.Tensor) -> Callable[[Made], Made]:
    """Adds a function of m, with the weight w and maybe buffers, and x to the table."""

    def add(function: Made) -> Made:
        CASES[function.__name__] = function, says, buffers
        return function

    return add


def logits(m, x):
    return linear(x, m.w).float()


def scores(m, x):
    return torch.softmax(logits(m, x), -1)


@case(OTHERS)
def normalised_over_the_tokens(m, x):
    weights, indices = scores(m, x).topk(2)
    return weights / weights.sum(0, keepdim=True), indices


@case(OTHERS)
def normalised_over_all(m, x):
    weights, indices = scores(m, x).topk(2)
    return weights / weights.sum(), indices


@case(NO_WEIGHTS)
def normalised_by_all_experts(m, x):
    gates = torch.sigmoid(logits(m, x))
    weights, indices = gates.topk(2)
    return weights / gates.sum(-1, keepdim=True), indices


@case(NO_WEIGHTS)
def normalised_by_the_root_of_squares(m, x):
    weights, indices = scores(m, x).topk(2)
    return weights / weights.norm(dim=-1, keepdim=True), indices


@case(NO_WEIGHTS)
def squared(m, x):
    weights, indices = scores(m, x).topk(2)
    return normal(weights * weights), indices


@case(NO_WEIGHTS + ".*; weight .* there, and 0.0 in the region")
def small_weights_are_dropped(m, x):
    weights, indices = scores(m, x).topk(2)
    return torch.where(weights > 0.1, weights, 0.0), indices


@case(NO_WEIGHTS)
def picked_first_and_scored_among_all(m, x):
    """The experts are those of the logits, also where scores are equal."""
    made = logits(m, x)
    indices = made.topk(4)[1]
    return torch.softmax(made, -1).gather(1, indices), indices


@case(NO_WEIGHTS)
def rounded_twice(m, x):
    """By a logarithm that is taken back."""
    return torch.log_softmax(logits(m, x), -1).exp().topk(2)


@case(OTHERS)
def scores_over_the_tokens(m, x):
    return torch.softmax(logits(m, x), 0).topk(2)


@case("experts must lie along the last axis of two or more; topk picks along axis 0")
def picked_among_the_tokens(m, x):
    return scores(m, x).topk(2, dim=0)


@case("experts must lie along the last axis of two or more; topk picks along axis -1 of float32")
def one_token(m, x):
    return torch.softmax(logits(m, x.view(-1, H)[0]), -1).topk(2)


@case("the largest scores must be picked; topk has largest=False")
def the_smallest(m, x):
    return scores(m, x).topk(2, largest=False)


@case(NO_CHOICE)
def softplus_of_another_threshold(m, x):
    return softplus(wide(m, x), threshold=30.0).sqrt().topk(2)


@case(NO_CHOICE)
def clamped_logits(m, x):
    return torch.softmax(wide(m, x).clamp(-10, 10), -1).topk(2)


@case(NO_CHOICE + "|" + NO_WEIGHTS)
def sigmoid_by_its_formula(m, x):
    """Of other bits."""
    return (1 / (1 + torch.exp(-wide(m, x)))).topk(2)


@case(NO_CHOICE)
def one_expert_is_never_picked(m, x):
    gates = torch.softmax(wide(m, x), -1)
    return gates.masked_fill(torch.arange(N, device=x.device) == 0, 0.0).topk(2)


@case(NO_WEIGHTS)
def the_first_has_all_weight(m, x):
    weights, indices = scores(m, x).topk(2)
    return torch.where(torch.arange(2, device=x.device) == 0, 1.0, weights), indices


@case(NO_WEIGHTS)
def nan_is_replaced(m, x):
    weights, indices = scores(m, x).topk(2)
    return torch.nan_to_num(weights), indices


@case("scores must be those of the logits; they are divided by 0.7 before")
def temperature(m, x):
    return torch.softmax(logits(m, x) / 0.7, -1).topk(2)


@case("scores must be those of the logits; they are multiplied by 1.25 before")
def inverse_temperature(m, x):
    return torch.softmax(1.25 * logits(m, x), -1).topk(2)


@case(ALONE, t=torch.ones(1))
def learned_temperature(m, x):
    return torch.softmax(logits(m, x) / m.t, -1).topk(2)


@case(NO_CHOICE)
def capped_logits(m, x):
    return torch.softmax(30 * torch.tanh(logits(m, x) / 30), -1).topk(2)


@case(NO_CHOICE)
def magnitudes(m, x):
    return logits(m, x).abs().topk(2)


@case("a router has one bias for the choice; this reads", b=torch.zeros(N))
def half_of_the_bias_in_the_weights(m, x):
    gates = torch.sigmoid(logits(m, x))
    indices = (gates + m.b).topk(2)[1]
    return (gates + 0.5 * m.b).gather(1, indices), indices


@case(NO_CHOICE, b=torch.ones(N))
def scores_times_a_vector(m, x):
    return (scores(m, x) * m.b).topk(2)


@case("a router has one bias for the choice; this reads", b=torch.zeros(N), c=torch.ones(N))
def two_vectors(m, x):
    gates = torch.sigmoid(logits(m, x))
    indices = (gates + m.b).topk(2)[1]
    return (gates * m.c).gather(1, indices), indices


@case(ALONE, b=torch.zeros(6, N))
def bias_of_two_axes(m, x):
    return (torch.sigmoid(logits(m, x)) + m.b).topk(2)


@case("experts must be picked by their logits alone; randn_like is random|randn is random")
def noise(m, x):
    made = logits(m, x)
    return torch.softmax(made + torch.randn_like(made), -1).topk(2)


@case("experts must be picked by their logits alone; .* is random")
def noise_of_a_size_of_its_own(m, x):
    made = logits(m, x)
    return torch.softmax(made + torch.rand_like(made) * softplus(linear(x, m.w)), -1).topk(2)


@case(OTHERS + "; cumsum counts those of other tokens, too, as a capacity does")
def capacity(m, x):
    weights, indices = scores(m, x).topk(2)
    taken = torch.zeros_like(logits(m, x)).scatter(1, indices, 1.0).cumsum(0)
    return weights * (taken.gather(1, indices) <= 1000), indices


@case(OTHERS + "; cumsum")
def capacity_by_one_hot(m, x):
    weights, indices = scores(m, x).topk(1)
    taken = one_hot(indices[:, 0], N).cumsum(0)
    return weights * (taken.gather(1, indices) <= 1000), indices


@case("a router has at most 1024 experts; topk picks among 2560")
def samples_of_a_vocabulary(m, x):
    return torch.softmax(x.repeat(1, 40).float(), -1).topk(50)


@case(NO_CHOICE)
def groups_of_other_sizes(m, x):
    gates = scores(m, x)
    best = torch.stack([gates[:, :4].amax(-1), gates[:, 4:].amax(-1)], -1).topk(1)[1]
    keep = torch.cat([(best == 0).expand(-1, 4), (best == 1).expand(-1, 12)], -1)
    return gates.masked_fill(torch.logical_not(keep), 0.0).topk(2)


@case(NO_CHOICE)
def groups_by_three_experts(m, x):
    gates = scores(m, x)
    best = gates.view(-1, 4, 4).topk(3)[0].sum(-1)
    return kept(gates, best, 4, 0.0).topk(2)


@case(NO_CHOICE)
def groups_by_their_mean(m, x):
    gates = scores(m, x)
    return kept(gates, gates.view(-1, 4, 4).mean(-1), 4, 0.0).topk(2)


@case(NO_CHOICE)
def groups_of_every_fourth_expert(m, x):
    gates = scores(m, x)
    best = gates.view(-1, 4, 4).amax(1)
    at = best.topk(2)[1]
    keep = torch.zeros_like(best).scatter(1, at, 1.0).unsqueeze(1).expand(-1, 4, 4).reshape(-1, N)
    return gates.masked_fill(keep == 0, 0.0).topk(2)


@case("experts and their groups must be the largest along the last axis")
def the_least_groups(m, x):
    gates = scores(m, x)
    best = -gates.view(-1, 4, 4).amax(-1)
    at = best.topk(2, largest=False)[1]
    keep = torch.zeros_like(best).scatter(1, at, 1.0).unsqueeze(-1).expand(-1, 4, 4).reshape(-1, N)
    return gates.masked_fill(keep == 0, 0.0).topk(2)


@case(ONE_TOPK + "; sort is a sort of all")
def sorted_and_cut(m, x):
    values, indices = torch.sort(scores(m, x), dim=-1, descending=True)
    return values[:, :2], indices[:, :2]


@case(ONE_TOPK + "; argmax_1 is one maximum after the other")
def the_largest_twice(m, x):
    """As DeepSpeed and NLLB pick two."""
    gates = scores(m, x)
    first = gates.argmax(-1)
    second = gates.masked_fill(one_hot(first, N).bool(), float("-inf")).argmax(-1)
    return gates.gather(1, first.unsqueeze(1)), first, second


@case(ONE_TOPK + "; max_2 is one maximum after the other")
def sparsemixer(m, x):
    """Of Phi-3.5-MoE."""
    made, found = logits(m, x), []
    for _ in range(2):
        largest, at = made.max(-1, keepdim=True)
        apart = (largest - made) / made.abs().clamp(min=largest)
        gates = torch.softmax(made.masked_fill(apart > 0.02, float("-inf")), -1)
        found += [gates.gather(1, at), at]
        made = made.scatter(-1, at, float("-inf"))
    return found


@case("experts are picked by scores in floats; it is int64")
def integers(m, x):
    return (logits(m, x) * 100).long().topk(2)


@case("experts are picked by scores in floats; it is float64")
def float64(m, x):
    return torch.softmax(logits(m, x).double(), -1).topk(2)


@case("experts must be picked by one tensor .* of logits; found")
def logits_of_two_sources(m, x):
    return torch.softmax(logits(m, x) + x[:, :N].float(), -1).topk(2)


@case("all weights must go through one node; what is read are")
def weights_of_two_kinds(m, x):
    """Those that the choice is made by, and those without its bias."""
    gates = torch.sigmoid(logits(m, x))
    values, indices = (gates + 1.0).topk(2)
    return values, gates.gather(1, indices) * 2, indices


@case("ge compares the weights with the graph's own scores")
def scores_from_the_least_weight_on(m, x):
    gates = scores(m, x)
    values, indices = gates.topk(2)
    return torch.where(gates >= values.amin(-1, keepdim=True), gates, 0.0), indices


@case("sign compares the weights with the graph's own scores")
def signs(m, x):
    gates = scores(m, x)
    values, indices = gates.topk(2)
    return (gates - values.amin(-1, keepdim=True)).sign(), indices


@case("each row of logits must have its experts; .* has 6 rows, and .* experts of 1")
def experts_of_the_last_token(m, x):
    return scores(m, x).split([5, 1])[1].topk(2)


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    function, says, buffers = CASES[name]
    reason = refused(function, tokens(), w=weight(), **buffers)
    assert re.search(says, reason), reason


def test_no_tokens():
    def router(m, x):
        return scores(m, x).topk(2)

    assert "there must be tokens" in refused(router, tokens(0), w=weight())


def test_k_must_be_a_number():
    def router(m, x):
        return scores(m, x).topk(x.shape[0] // 3)

    assert "k must be a number" in refused(router, tokens(), w=weight(), dynamic=True)


def test_other_tokens_matter_where_their_number_is_symbolic():
    for name in ("normalised_over_the_tokens", "scores_over_the_tokens", "capacity"):
        function, says, _ = CASES[name]
        assert says.partition(";")[0] in refused(function, tokens(), w=weight(), dynamic=True)


def test_a_scale_that_is_given_stays_the_graphs():
    """Its value may change from call to call; the choice before it is lowered."""

    def router(m, x):
        weights, indices = scores(m, x).topk(4)
        return normal(weights) * m.s, indices

    contract = found(router, tokens(), w=weight(), s=torch.tensor(2.5))
    assert (contract.normalised, contract.scale) == ("s+eps", 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_weights_of_another_dtype_stay_the_graphs(dtype):
    """They are made of the operator's."""

    def router(m, x):
        weights, indices = scores(m, x).topk(4)
        return normal(weights).to(dtype), indices

    contract = found(router, tokens(), w=weight())
    assert (contract.normalised, contract.out) == ("s+eps", FP32)


def test_what_follows_the_weights_stays_the_graphs():
    """A gate of each token, say."""

    def router(m, x):
        weights, indices = scores(m, x).topk(4)
        return weights * torch.sigmoid(x[:, :1].float()), indices

    assert found(router, tokens(), w=weight()).out is FP32


def test_experts_up_to_a_share_of_the_weights():
    """A sum along a token's own experts is no capacity."""

    def router(m, x):
        weights, indices = scores(m, x).topk(4)
        return weights * (weights.cumsum(-1) <= 0.9), indices

    assert found(router, tokens(), w=weight()).out is FP32


def test_each_half_of_a_product_is_as_it_is():
    """The router reads another half of the columns than those that come first."""

    def router(m, x):
        return torch.softmax(wide(m, x)[:, N:], -1).topk(4)

    contract = found(router, tokens(), w=weight(2 * N))
    assert not contract.hidden and contract.logits is FP32
