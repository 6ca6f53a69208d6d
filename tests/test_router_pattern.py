"""Routers in graphs: the contract of each spelling, graphs before and after, results on a CPU."""

import pytest
import torch
from router_spellings import SPELLINGS, mixtral
from routers import (
    BF16,
    FP16,
    FP32,
    H,
    N,
    compiled,
    distinct,
    found,
    provided,
    sites,
    tokens,
    weight,
)

from qinductor.kernels.router import Router

PLAIN = {
    "n": N, "k": 4, "logits": BF16, "compute": FP32, "out": FP32, "hidden": H, "x": BF16,
    "weight": BF16,
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_contract(name):
    case = SPELLINGS[name]
    fields = {**PLAIN, "bias": case.buffers.get("b"), **case.fields}
    if not fields["hidden"]:
        fields |= {"x": None, "weight": None}
    assert found(case.function, tokens(), w=weight(), **case.tensors()) == Router(**fields)
