"""What the Triton family of routers takes, and a kernel's constants for a contract."""

import dataclasses
import functools
from typing import Any

import torch

from qinductor.contracts import Hashed, short
from qinductor.kernels.router import FP32, Router

BF16, FP16 = torch.bfloat16, torch.float16
FLOATS = (BF16, FP16, FP32)
EXPERTS, CHOSEN, GROUPS = 1024, 32, 64  # of a contract at most


@dataclasses.dataclass(frozen=True)
class Form(Hashed):
    """What is constant in the selection's kernel; dtypes are Triton's, other fields the contract's.

    size        experts of a group
    first       whether scores are computed of all experts, before some are chosen
    top2        whether a group's score is the sum of two
    choice      whether the weights are what experts were chosen by
    normalised, bounded   whether weights are divided by their sum, and that is at least epsilon
    """

    n: int
    k: int
    logits: Any
    compute: Any
    ordered: Any
    inner: Any
    score: str
    first: bool
    logit_bias: bool
    bias: bool
    groups: int
    size: int
    kept: int
    top2: bool
    masked: float
    choice: bool
    normalised: bool
    bounded: bool
    epsilon: float
    scale: float

    __hash__ = Hashed.__hash__  # it is hashed at every launch


@functools.cache
def device_form(contract: Router) -> Form:
    """The constants of the selection's kernel."""
    import triton.language as tl

    c = contract
    named = {BF16: tl.bfloat16, FP16: tl.float16, FP32: tl.float32}
    inner = c.inner or c.ordered
    bounded = c.normalised == "max(s,eps)"
    epsilon = float(torch.tensor(c.epsilon, dtype=inner)) if bounded else c.epsilon
    masked = float(torch.tensor(c.masked, dtype=c.ordered))
    return Form(
        c.n, c.k, named[c.logits], named[c.compute], named[c.ordered], named[inner], c.score,
        c.order == "score-select", c.logit_bias is not None, c.bias is not None, c.groups,
        c.n // c.groups, c.kept, c.group_score == "top2", masked, c.taken == "choice",
        bool(c.normalised), bounded, epsilon, c.scale,
    )  # fmt: skip


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def places(contract: Router) -> tuple[int, int]:
    """(groups, places of each) of a row, powers of two."""
    return power(contract.groups), power(contract.n // contract.groups)


def unsupported(contract: Router) -> str | None:
    """Why the selection's kernel does not take a contract; None if it does."""
    c = contract
    for name, dtype in (
        ("the logits", c.logits), ("the scores' arithmetic", c.compute), ("the scores", c.ordered),
        ("the weights' arithmetic", c.inner or FP32), ("the weights", c.out),
        ("the bias", c.bias or FP32), ("the logits' bias", c.logit_bias or FP32),
        ("x", c.x or FP32), ("the product's weight", c.weight or FP32),
    ):  # fmt: skip
        if dtype not in FLOATS:
            return f"{name}: {short(dtype)}; it takes bf16, fp16 and fp32"
    if c.indices not in (torch.int64, torch.int32):
        return f"indices are {short(c.indices)}; it takes int64 and int32"
    if c.n > EXPERTS or c.k > CHOSEN:
        return f"{c.k} of {c.n} experts; it takes up to {CHOSEN} of {EXPERTS}"
    if c.groups > GROUPS:
        return f"{c.groups} groups; it takes up to {GROUPS}"
    return None
