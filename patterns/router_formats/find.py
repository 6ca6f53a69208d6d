"""What a topk computes: the logits, how experts are chosen, their weights; proved."""

import contextlib
import dataclasses
import itertools
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qinductor.errors import Refused
from qinductor.kernels.router import Router, reference
from qinductor.patterns.activation_formats.sources import SCALINGS
from qinductor.patterns.failures import FAILURES, said
from qinductor.patterns.probe import Function, Prober, Remembered, fixed, function, numbers, same
from qinductor.patterns.router_formats.identify import (
    FEW,
    FP32,
    Answers,
    Known,
    apart,
    battery,
    biases,
    identify,
)
from qinductor.patterns.router_formats.sites import Site, beyond, is_narrowed, rows_of, site_of
from qinductor.regions import CASTS, FLOATS, VIEWS, Scope, aten, prims

PROBES = 96  # rows of a battery
PROOFS = (5, 400)  # rows of the runs of a proof, at least
MANY = 1 << 18  # logits of a search with one bias alone
TRIED = 6  # contracts that are proved
SEED = 20
SMALLEST = 5e-324  # in float64
COMPARISONS = {
    getattr(getattr(aten, name), kind)
    for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")
} | {aten.sign.default, aten.bucketize.Tensor, aten.searchsorted.Tensor}  # fmt: skip


def _check_compared(weights: Node, scores: Collection[Node], inside: Collection[Node]) -> None:
    """Refused where the graph compares weights with its own scores: their last bits may differ."""
    both = beyond([weights], inside) & beyond(scores, inside)
    compared = next((node for node in both if node.target in COMPARISONS), None)
    if compared is not None:
        raise Refused(
            f"{compared.name} compares the weights with the graph's own scores; the operator "
            "computes its own, whose last bits may be others"
        )


def _topk(
    values: torch.Tensor, k: int, dim: int = -1, top: bool = True, sort: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest, descending; nan before all, 0 before -0, of equal ones the first, as on a GPU:
    the `largest` of the specification, in operators that torch 2.11 can run in a batch."""
    if not top or dim not in (-1, values.dim() - 1):
        raise Refused("experts and their groups must be the largest along the last axis")
    minus = (values == 0) & values.signbit()
    keys = torch.where(minus, -SMALLEST, values.double())
    indices = keys.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    return values.gather(-1, indices), indices


INSTEAD = {
    aten.topk.default: _topk,
    prims.convert_element_type.default: lambda value, dtype: value.to(dtype),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A proved router.

    contract  with the logits given
    logits    of all their axes
    needed    whether the graph reads its logits or scores beside it
    replaced  nodes for weights and indices
    region    all that they depend on, but the logits
    m         rows, None where they are symbolic
    """

    contract: Router
    logits: Node
    site: Site
    needed: bool
    replaced: tuple[tuple[Node, ...], ...]
    region: tuple[Node, ...]
    m: int | None
    evaluations: int


class Finder(Prober):
    """Finds routers; equal regions are probed and proved once."""

    def __call__(self, anchor: Node, scope: Scope) -> Found:
        """The router whose experts a topk picks, proved; or Refused."""
        self.runs = 0
        try:
            return self._found(site_of(anchor, scope))
        except FAILURES as error:
            raise Refused(f"it cannot be run on probes: {said(error)}") from error
        finally:
            _sweep(anchor)

    def _found(self, site: Site) -> Found:
        outputs = [site.indices] if site.weights is None else [site.indices, site.weights]
        exact: list[Any] = [node.args[0] for node in outputs[1:] if is_narrowed(node)]
        graph = site.logits.graph
        ends = () if site.bias is None else (site.bias,)
        region = function([site.logits], [*outputs, *exact], list(graph.nodes), ends=ends)
        region = dataclasses.replace(region, whole=True, instead=INSTEAD)
        contract = self.once(region.text(), lambda: self._identified(region, site))
        inside = {*region.nodes, site.logits}
        indices = _narrowed(site.indices, inside)
        results = {*outputs, *(n for n in region.nodes if n.target is aten.topk.default)}
        needed = any(u not in inside for n in inside - results for u in n.users)
        if contract.score != "none" and site.weights is not None:
            _check_compared(site.weights, inside - results, inside)
        if indices is not site.indices:
            contract = dataclasses.replace(contract, indices=indices.meta["val"].dtype)
        weights = () if site.weights is None else (site.weights,)
        read = any(user not in inside for user in site.indices.users)
        return Found(
            contract=contract,
            logits=_viewed(site.logits, inside),
            site=site,
            needed=needed,
            replaced=(weights, (indices,) if read else ()),
            region=tuple(n for n in region.nodes if n.users),
            m=rows_of(site.logits),
            evaluations=self.runs,
        )

    def _identified(self, region: Function, site: Site) -> Router:
        """The contract of a region."""
        out = FP32 if site.weights is None else site.weights.meta["val"].dtype
        base = Router(
            n=site.n, k=site.k, logits=site.logits.meta["val"].dtype, compute=FP32,
            out=region.outputs[-1].meta["val"].dtype if region.outputs[1:] else FP32,
            bias=None if site.bias is None else site.bias.meta["val"].dtype,
        )  # fmt: skip
        known = Known(numbers(region).every, _dtypes(region), _groups(region, site))
        with self.asking(region) as asked:
            given = answers(asked, base, known, PROBES, SEED)
            refused: Refused | None = None
            try:
                for member in itertools.islice(identify(base, given, known), TRIED):
                    member = dataclasses.replace(member, out=out)
                    try:
                        prove(asked, member, known)
                        return member
                    except Refused as refusal:
                        refused = refused or refusal
            except Refused as refusal:
                refused = refusal
            assert refused is not None  # `identify` gives one or refuses
            raise Refused(_reason(asked, base, given, known) or refused.reason, refused.contract)


def answers(
    asked: Remembered, base: Router, known: Known, rows: int, seed: int, at: int = -1
) -> list[Answers]:
    """What a region answers to a battery; with each of some biases, if there is one.

    rows  of the battery, at least
    at    the output that holds the weights
    """
    held = [None] if base.bias is None else biases(base.n, base.bias, seed)
    rows = _whole(asked.function, rows)
    if at < 0 and rows * base.n > MANY:
        held = held[len(held) // 2 :][:1]  # of a search; a proof takes all
    return [
        _ask(asked, seed + turn, battery(base, rows, seed + turn, known.numbers), bias, at)
        for turn, bias in enumerate(held)
    ]


def _whole(region: Function, rows: int) -> int:
    """As many rows, or a few more, as some runs of a region take."""
    each = region.rows(rows)
    return each * max(1, -(-rows // each))


def _ask(
    asked: Remembered, name: Any, logits: torch.Tensor, bias: torch.Tensor | None, at: int
) -> Answers:
    """What a region answers to the rows of some runs, in one evaluation.

    The specification must be run on these rows, too, no fewer: on a CPU the last bit of a sigmoid
    depends on how many numbers there are.
    """
    rows = asked.function.rows(len(logits))
    given = logits if rows == len(logits) else logits.view(-1, rows, logits.shape[-1])
    shapes = [node.meta["val"].shape for node in asked.function.given]
    beside = [] if bias is None else [bias.view(shapes[0])]
    found = asked(name, [given], beside)
    indices, *weights = (out.reshape(len(logits), -1) for out in found)
    return Answers(logits, bias, indices, weights[at] if weights else None)


def prove(asked: Remembered, contract: Router, known: Known) -> None:
    """Refused with the first row for which a region and the reference differ."""
    counts = dict.fromkeys(_whole(asked.function, rows) for rows in PROOFS)
    for seed, rows in enumerate(counts, 1):
        for each in answers(asked, contract, known, rows, SEED * seed + 100, 0):
            weights, indices = reference(contract, each.inputs)
            equal = torch.equal(indices, each.indices)
            if each.weights is not None:
                equal = equal and bool(same(weights, each.weights).all())
            if not equal:
                raise Refused(
                    f"the region is not proved: {apart(contract, [each])}",
                    contract=contract.summary,
                )


def _reason(asked: Remembered, base: Router, given: list[Answers], known: Known) -> str | None:
    """Why a region is no router, if that is one of two reasons."""
    if _mixes(asked, base, given[0].bias):
        return (
            "a token's experts and weights must be computed of its own logits; they depend on "
            "those of other tokens, too"
        )
    wide, few = dataclasses.replace(base, logits=FP32), [each.first(FEW) for each in given[:1]]
    factors = [v for n in asked.function.nodes if n.target in SCALINGS for v in n.args[1:]]
    for value in dict.fromkeys(
        v for v in factors if isinstance(v, (int, float)) and v not in (0, 1)
    ):
        for word, scaled in (("multiplied", torch.mul), ("divided", torch.div)):
            other = [dataclasses.replace(a, logits=scaled(a.logits.float(), value)) for a in few]
            with contextlib.suppress(Refused):
                next(identify(wide, other, known))
                return f"scores must be those of the logits; they are {word} by {value:g} before"
    return None


def _mixes(asked: Remembered, base: Router, bias: torch.Tensor | None) -> bool:
    """Whether other answers are given to rows that are in other company."""
    if asked.function.rows(PROBES) == 1:
        return False
    rows = _whole(asked.function, PROBES)
    drawn = torch.randn((2, rows, base.n), generator=torch.Generator().manual_seed(SEED))
    drawn[1, ::2] = drawn[0, ::2]
    first, second = (
        _ask(asked, f"company {i}", part.to(base.logits), bias, -1) for i, part in enumerate(drawn)
    )
    if not torch.equal(first.indices[::2], second.indices[::2]):
        return True
    if first.weights is None or second.weights is None:
        return False
    return not same(first.weights[::2], second.weights[::2]).all()


def _groups(region: Function, site: Site) -> list[tuple[int, int]]:
    """(groups, groups that are kept) which a region may have; (1, 1) if it picks but once."""
    found: list[tuple[int, int]] = []
    for node in region.nodes:
        if node.target is aten.topk.default and node not in site.indices.all_input_nodes:
            value, k = node.args[0].meta["val"], node.args[1]  # type: ignore[union-attr]
            groups = fixed(value.shape[-1])
            if groups and isinstance(k, int) and groups < site.n and not site.n % groups:
                found.append((groups, k))
    return [*dict.fromkeys(found), (1, 1)]


def _dtypes(region: Function) -> list[torch.dtype]:
    """The dtypes of floats in which a region computes."""
    held = [n.meta.get("val") for n in (*region.inputs, *region.nodes)]
    found = [v.dtype for v in held if isinstance(v, torch.Tensor) and v.dtype in FLOATS]
    return list(dict.fromkeys(found))


def _viewed(logits: Node, inside: Collection[Node]) -> Node:
    """The logits as what follows takes them, of more axes than their product has."""
    views = [user for user in logits.users if user in inside and user.target in VIEWS]
    n = logits.meta["val"].shape[-1]
    whole = [view for view in views if statically_known_true(view.meta["val"].shape[-1] == n)]
    return whole[0] if whole else logits


def _sweep(result: Node) -> None:
    """Takes the results of a topk that nothing reads out of its graph."""
    for node in [n for n in result.all_input_nodes if n.target is aten.topk.default]:
        for user in [user for user in node.users if not user.users]:
            node.graph.erase_node(user)


def _narrowed(indices: Node, inside: Collection[Node]) -> Node:
    """The indices in int32, if nothing outside reads them wider."""
    casts = [u for u in indices.users if u.target in CASTS]
    others = [u for u in indices.users if u not in casts and u not in inside]
    one = len(casts) == 1 and casts[0].meta["val"].dtype is torch.int32
    return casts[0] if one and not others else indices
