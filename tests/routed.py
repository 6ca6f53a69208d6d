"""What tests of routers share: calls of one route, differences, the specification of given exp."""

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import torch

import qinductor
from qinductor.kernels import router as op
from qinductor.kernels.router import ROUTER, Router, reference, results
from qinductor.op import INFINITE, Plan

qinductor.load()
FUSED, SELECT = (ROUTER.providers[name] for name in ("triton.router", "triton.select"))
Pair = tuple[torch.Tensor, torch.Tensor]


def call(contract: Router, inputs: Sequence[torch.Tensor], route: str) -> Pair:
    """The operator as a compiled graph calls it."""
    plan = Plan(((INFINITE, route),))
    found: Pair = torch.ops.qinductor.router(inputs, str(contract), str(plan))
    return found


def declared(contract: Router, inputs: Sequence[torch.Tensor], found: Pair) -> None:
    """Shapes, dtypes and strides are those that the operator declares."""
    for ours, want in zip(found, results(contract, inputs), strict=True):
        assert (ours.shape, ours.dtype) == (want.shape, want.dtype)
        assert ours.stride() == want.stride()


def wrong(contract: Router, found: Pair, wanted: Pair, exact: bool = False) -> str:
    """What differs; empty if nothing does: all indices in their order, and weights but for a few of
    the last bits of what they are computed in, or every bit."""
    rows = (found[1] != wanted[1]).any(1).nonzero().flatten().tolist()
    if rows:
        r = rows[0]
        return f"experts of {len(rows)} rows; {r}: {found[1][r].tolist()} {wanted[1][r].tolist()}"
    ours, want = (w.double() for w in (found[0], wanted[0]))
    dtypes = {contract.compute, contract.ordered, contract.inner or contract.ordered, contract.out}
    step = 0.0 if exact else 8 * max(torch.finfo(dtype).eps for dtype in dtypes)
    near = torch.isclose(ours, want, rtol=step, atol=0 if exact else 1e-37, equal_nan=True)
    rows = (~near).any(1).nonzero().flatten().tolist()
    if rows:
        r = rows[0]
        return f"weights of {len(rows)} rows; {r}: {ours[r].tolist()} {want[r].tolist()}"
    return ""


def hold(
    contract: Router, inputs: Sequence[torch.Tensor], found: Pair, exact: bool = False
) -> None:
    """AssertionError unless they are as declared, and the specification's."""
    declared(contract, inputs, found)
    reason = wrong(contract, found, reference(contract, inputs), exact)
    assert not reason, reason


def exp(x: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(np.exp(x.numpy())))


def summed(e: torch.Tensor) -> torch.Tensor:
    """Sums [..., 1] in the order of torch's softmax on a GPU: every 32nd one after another, then
    halves of these 32. In another order the last bit may differ, and with it which scores are
    equal."""
    lanes = torch.nn.functional.pad(e, (0, -e.shape[-1] % 32)).unflatten(-1, (-1, 32))
    total = torch.zeros_like(lanes[..., 0, :])
    for row in lanes.unbind(-2):
        total = total + row
    while total.shape[-1] > 1:
        total = total.unflatten(-1, (2, -1)).sum(-2)
    return total


def softmax(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    e = exp(wide - wide.amax(-1, keepdim=True))
    return (e / summed(e)).to(x.dtype)


@contextlib.contextmanager
def numpy_scores() -> Iterator[None]:
    """The specification meanwhile has NumPy's exp, which Triton's interpreter has, too."""
    made = {
        "softmax": softmax,
        "sigmoid": lambda x: (1 / (1 + exp(-x.float()))).to(x.dtype),
    }
    with mock.patch.dict(op.SCORES, made):
        yield
