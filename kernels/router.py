"""Routers of mixtures of experts: logits, scores, the k experts of each token and their weights.

| tensor     | shape            | dtype                                                           |
|------------|------------------|-----------------------------------------------------------------|
| inputs     | x [..., H] and   | `x`, `weight`; or the logits [..., N] alone where `hidden` is 0 |
|            | weight [N, H]    |                                                                 |
|            | logit bias [N]   | `logit_bias`, if there is one                                   |
|            | bias [N]         | `bias`, if there is one                                         |
| weights    | [T, k]           | `out`; T is the number of rows of x or of the logits            |
| indices    | [T, k]           | `indices`                                                       |

The k experts come in descending order of what they were chosen by, of equal ones the lower index
first; nan is the largest, and 0 is larger than -0: the sets are those of torch.topk on a GPU.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import sympy
import torch

from qinductor.contracts import Hashed, parse, render, short
from qinductor.op import LIBRARY, M, Op, Plan, Route, Spec, Specification, op

FP32, FP64 = torch.float32, torch.float64


def _softmax(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(FP32)
    e = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def _sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(FP32)
    return torch.where(wide > 20, wide, wide.exp().log1p()).to(x.dtype).sqrt()


# name -> scores of logits; each operation rounds to their dtype, of a softmax the last alone
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": _sqrt_softplus,
    "none": lambda x: x,
}
ORDERS = ("score-select", "select-score")
GROUP_SCORES = ("max", "top2")
NORMS = ("", "s+eps", "max(s,eps)")
TAKEN = ("scores", "choice")


@dataclasses.dataclass(frozen=True)
class Router(Hashed):
    """The k of n experts that are chosen for each token, and their weights.

    n, k         experts, and how many of them a token gets
    logits       dtype of the logits: float32 sums, and their bias if there is one, are rounded to
                 it once
    compute      dtype in which scores are computed from the logits
    out          dtype of the weights
    hidden       H of the product that makes the logits; 0 where they are given
    x, weight    dtypes of the operands of the product; None where there is none
    logit_bias   dtype of a bias of the product; None: there is none
    score        key of `SCORES`
    order        "score-select": scores of all experts, then the k of the largest;
                 "select-score": the k of the largest logits, then scores of these k alone
    scores       dtype that scores are rounded to; None: `compute`
    bias         dtype of a bias that is added to them for the choice; None: there is none
    groups       groups of n / groups experts each; 1: none
    kept         groups of which experts are chosen
    group_score  a group's score: "max", its largest, of zeros 0 and not -0 (torch has either);
                 "top2", the sum of its two largest
    masked       what is put for the experts of other groups
    taken        the weights are the chosen experts' "scores", or their "choice": with the bias, and
                 `masked` where the group is not kept
    inner        dtype in which weights are normalised and multiplied by `scale`, each operation
                 rounded in it; None: that of the scores
    normalised   "": they are not; "s+eps": divided by their sum and `epsilon`; "max(s,eps)": by the
                 larger of these
    """

    n: int
    k: int
    logits: torch.dtype
    compute: torch.dtype
    out: torch.dtype
    hidden: int = 0
    x: torch.dtype | None = None
    weight: torch.dtype | None = None
    logit_bias: torch.dtype | None = None
    score: str = "softmax"
    order: str = "score-select"
    scores: torch.dtype | None = None
    bias: torch.dtype | None = None
    groups: int = 1
    kept: int = 1
    group_score: str = "max"
    masked: float = -math.inf
    taken: str = "scores"
    inner: torch.dtype | None = None
    normalised: str = ""
    epsilon: float = 0.0
    scale: float = 1.0
    indices: torch.dtype = torch.int64

    __hash__ = Hashed.__hash__

    def __post_init__(self) -> None:
        for name, value, known in (
            ("score", self.score, tuple(SCORES)),
            ("order", self.order, ORDERS),
            ("group score", self.group_score, GROUP_SCORES),
            ("norm", self.normalised, NORMS),
            ("kind of weights", self.taken, TAKEN),
        ):
            if value not in known:
                raise ValueError(f"no {name}: {value!r}; wanted one of {known}")
        if not 1 <= self.k <= self.n:
            raise ValueError(f"k is {self.k}; wanted 1 to the {self.n} experts")
        least = 2 if self.group_score == "top2" and self.groups > 1 else 1
        if self.groups < 1 or self.n % self.groups or self.n // self.groups < least:
            raise ValueError(f"{self.groups} groups of {self.n} experts; wanted equal ones")
        if not 1 <= self.kept <= self.groups:
            raise ValueError(f"{self.kept} groups are kept; wanted 1 to all {self.groups}")
        if (self.hidden > 0) != (self.x is not None) or (self.x is None) != (self.weight is None):
            raise ValueError("a product has a hidden size and two dtypes; given logits have none")
        if self.logit_bias is not None and not self.hidden:
            raise ValueError("a bias of the product, and no product: given logits have it already")

    def __str__(self) -> str:
        return render(self)

    @property
    def ordered(self) -> torch.dtype:
        """The dtype of the scores."""
        return self.scores or self.compute

    @property
    def columns(self) -> int:
        """Columns of the first input."""
        return self.hidden or self.n

    @property
    def summary(self) -> str:
        """The contract as the report prints it, in the field's terms."""
        product = f"{short(self.x)} x {short(self.weight)}[{self.n},{self.hidden}] -> "
        score = "" if self.score == "none" else f"{self.score} in {short(self.compute)}"
        top = f"top {self.k} of {self.n}"
        groups = f"{self.kept} of {self.groups} groups by {self.group_score}"
        words = [
            (product if self.hidden else "") + f"{short(self.logits)} logits",
            "+bias" if self.logit_bias else "",
            *((top, score) if self.order == "select-score" else (score, top)),
            groups if self.groups > 1 else "",
            "bias for the choice" if self.bias else "",
            "normalised" if self.normalised else "",
            f"* {self.scale:g}" if self.scale != 1 else "",
            f"-> {short(self.out)}",
        ]
        return ", ".join(filter(None, words))


def product(contract: Router, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits [T, N] of x, its weight and maybe a bias: exact sums, rounded to float32."""
    x, weight, *others = inputs
    sums = (x.reshape(-1, contract.hidden).to(FP64) @ weight.to(FP64).t()).to(FP32)
    sums = sums + others[0].to(FP32) if contract.logit_bias is not None else sums
    return sums.to(contract.logits)


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of each row in descending order, of equal ones the lower first."""
    bits = values.to(FP32).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = torch.where(values.isnan(), 0x7FFFFFFF, keys)
    order: torch.Tensor = keys.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :k]


def kept(contract: Router, choice: torch.Tensor) -> torch.Tensor:
    """What experts are chosen by [T, N], `masked` in the groups that are not kept."""
    c = contract
    grouped = choice.unflatten(-1, (c.groups, -1))
    best = grouped.gather(-1, largest(grouped, 1 if c.group_score == "max" else 2))
    best = best.squeeze(-1) if c.group_score == "max" else best.sum(-1)
    keep = torch.zeros_like(best, dtype=torch.bool)
    keep = keep.scatter(-1, largest(best, c.kept), True)
    masked: torch.Tensor = grouped.masked_fill(~keep[..., None], c.masked)
    return masked.flatten(-2)


def weighted(contract: Router, taken: torch.Tensor) -> torch.Tensor:
    """The weights [T, k], of what was taken as such."""
    c = contract
    w = taken.to(c.inner or taken.dtype)
    if c.normalised:
        total = w.sum(-1, keepdim=True)
        if c.normalised == "max(s,eps)":
            total = total.clamp_min(c.epsilon)
        elif c.epsilon:
            total = total + c.epsilon
        w = w / total
    return (w if c.scale == 1 else w * c.scale).to(c.out)


def reference(
    contract: Router, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, indices), in plain torch: the specification."""
    c = contract
    logits = product(c, inputs) if c.hidden else inputs[0].reshape(-1, c.n)
    scores, score = logits.to(c.compute), SCORES[c.score]
    if c.order == "score-select":
        scores = score(scores).to(c.ordered)
    choice = scores if c.bias is None else (scores.to(FP32) + inputs[-1].to(FP32)).to(c.ordered)
    choice = kept(c, choice) if c.groups > 1 else choice
    indices = largest(choice, c.k)
    taken = (choice if c.taken == "choice" else scores).gather(-1, indices)
    if c.order == "select-score":
        taken = score(taken).to(c.ordered)
    return weighted(c, taken), indices.to(c.indices).contiguous()


def cost(contract: Router) -> dict[str, sympy.Expr]:
    """Bytes that must move and floating-point operations, in M tokens."""
    c, weight, row = contract, 0, contract.n * contract.logits.itemsize
    if c.x is not None and c.weight is not None:
        weight, row = c.n * c.hidden * c.weight.itemsize, c.hidden * c.x.itemsize
    row += c.k * (c.out.itemsize + c.indices.itemsize)
    flops = 2 * c.n * c.hidden + c.n * (8 + c.k)
    return {"bytes": sympy.Integer(weight) + M * row, "flops": M * flops}


ROUTER = op(Op("router", Router, reference, cost))

LIBRARY.define(
    "router(Tensor[] inputs, str contract, str plan) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


@torch.library.impl(LIBRARY, "router", "CompositeExplicitAutograd")
def router(
    inputs: Sequence[torch.Tensor], contract: str, plan: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [T, k], indices [T, k]) of the inputs; `contract` and `plan` are printed values."""
    form, routes = _prepared(contract, plan)
    rows = inputs[0].numel() // form.columns
    if not rows:
        return results(form, inputs)
    for route in routes:
        if rows <= route.limit:
            found: tuple[torch.Tensor, torch.Tensor] = route.run(form, inputs, ())
            return found
    raise RuntimeError(f"router: the plan {plan} has no provider for M = {rows}")


@functools.cache
def _prepared(contract: str, plan: str) -> tuple[Router, tuple[Route, ...]]:
    form = parse(Router, contract)
    return form, Plan.parse(plan).routes(ROUTER, form)


@torch.library.register_fake("qinductor::router", lib=LIBRARY)
def _(
    inputs: Sequence[torch.Tensor], contract: str, plan: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return results(parse(Router, contract), inputs)


def results(contract: Router, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty tensors for the weights and the indices."""
    x, k = inputs[0], contract.k
    rows = math.prod(x.shape[:-1])
    return x.new_empty((rows, k), dtype=contract.out), x.new_empty(
        (rows, k), dtype=contract.indices
    )


class Reference(Specification):
    """The specification itself."""

    def operands(self, contract: Router) -> dict[str, Spec]:
        return {}

    def pack(self, contract: Router, source: None) -> dict[str, torch.Tensor]:
        return {}

    def run(
        self, contract: Router, inputs: Sequence[torch.Tensor], packed: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference(contract, inputs)


ROUTER.register(Reference())
