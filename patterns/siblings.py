"""Products of one activation: found, and their weights put one below the other."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Node

from qinductor.contracts import QuantizedWeight, WeightFormat, by_row
from qinductor.errors import Refused
from qinductor.op import Op, Plan
from qinductor.pattern import Lowering, Part, Planner
from qinductor.patterns.constants import check_format
from qinductor.patterns.equal import Equal, origin
from qinductor.regions import VIEWS, Leaf, Region

T = TypeVar("T")  # the operands of an operator: its weight, and vectors [N]


@dataclasses.dataclass(frozen=True, eq=False)
class Proved:
    """One product, proved.

    product     the anchor
    value       the node whose value the operator gives
    inputs      its activations; those of siblings are equal
    regions     of its constants, that of the weight first
    operands    what they make; one for each expert, if there are any
    read        the same of other tensors; holds no weights. A second argument is as for
                `Lowering.pack`
    m           its rows; None where they are symbolic
    text        what else is to be equal where the same is proved of the same leaves
    alone       whether it can be computed by itself only
    Others as in `Lowering`; the last of `views` is that of the result.
    """

    product: Node
    value: Node
    inputs: tuple[Node, ...]
    regions: Sequence[Region]
    contract: Any
    operands: tuple[Any, ...]
    evaluations: tuple[int, int]
    read: Callable[..., tuple[Any, ...]]
    m: int | None
    operator: str
    text: str = ""
    alone: bool = False
    form: str = "plain"
    bypassed: tuple[tuple[Node, Node], ...] = ()
    views: tuple[Sequence[int | Node] | None, ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Those of the regions, in their order."""
        return tuple(leaf for region in self.regions for leaf in region.leaves)

    @property
    def signature(self) -> str:
        """Equal for products of which the same is proved of the same leaves."""
        return "\n".join([*(r.signature for r in self.regions), str(self.contract), self.text])

    @property
    def part(self) -> Part:
        """What it is among the products that are computed as one."""
        sizes = self.views[-1] if self.views else None
        return Part(self.product, self.value, self.contract.weight.n, self.contract.summary, sizes)


class Siblings:
    """A family's products, each computed with those of the same activation where that is expected
    to be faster.

    prove  the product of a candidate, or Refused
    left   the activation of a product; None for what is no candidate
    """

    def __init__(
        self,
        op: Op,
        prove: Callable[[Node], Proved],
        left: Callable[[Node], Node | None],
        planner: Planner,
    ) -> None:
        self.op, self.prove, self.left, self.planner = op, prove, left, planner

    def __call__(self, node: Node) -> Lowering:
        """The lowering of one product, and of those that are computed with it; or Refused."""
        first = self.prove(node)
        plan = self._plan(first, first.contract)
        sites, contract = [first], first.contract
        if plan.us and not plan.whole and not first.alone:
            sites, contract, plan = self._together(first, plan)
        return _lowering(self.op, first, sites, contract, plan)

    def _plan(self, first: Proved, contract: Any) -> Plan:
        """The plan of a contract for the rows of this product."""
        return self.planner(self.op, contract, first.m)

    def _together(self, first: Proved, plan: Plan) -> tuple[list[Proved], Any, Plan]:
        """(the products that are computed as one, in the order of their results, as what, how)."""
        equal = Equal(first.product.graph)
        found = [(first, plan)]
        for node in self._later(first.product, equal):
            try:
                other = self.prove(node)
            except Exception:  # it has a row of its own, which says why
                continue
            with contextlib.suppress(Refused):
                joined_contract([first.contract, other.contract])  # then both have as many inputs
                pairs = zip(first.inputs, other.inputs, strict=True)
                if other.alone or not all(equal(a, b) for a, b in pairs):
                    continue
                check_tables([site.operands[0].weight for site in (first, other)])
                found.append((other, self._plan(first, other.contract)))
        found.sort(key=lambda pair: equal.place[pair[0].value])
        sites = [site for site, _ in found]
        if len(sites) > 1:
            with contextlib.suppress(Refused):  # no provider takes them as one
                contract = joined_contract([site.contract for site in sites])
                whole = self._plan(first, contract)
                if _is_faster(whole, [alone for _, alone in found]):
                    return sites, contract, whole
        return [first], first.contract, plan

    def _later(self, product: Node, equal: Equal) -> Iterator[Node]:
        """Candidates after a product, in graph order, that multiply the same activation by the same
        operator, before memory is written to."""
        left = self.left(product)
        assert left is not None
        stack = list(equal.of(origin(left)))
        seen = set(stack)
        while stack:
            views = {user for user in stack.pop().users if user.target in VIEWS} - seen
            seen |= views
            stack.extend(views)
        users = {user for node in seen for user in node.users if user.target is product.target}
        for user in sorted(users, key=equal.place.__getitem__):
            later = equal.place[user] > equal.place[product]
            if later and equal.writes[user] == equal.writes[product] and self.left(user) in seen:
                yield user


def _lowering(
    op: Op, first: Proved, sites: Sequence[Proved], contract: Any, plan: Plan
) -> Lowering:
    """The lowering of a product that is computed with some others, or alone."""
    start, several = sites[0], len(sites) > 1

    def packed(found: Sequence[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
        operands = found[0] if not several else (joined([one for (one,) in found], contract),)
        if not _experts(contract):
            return plan.pack(op, contract, operands[0])
        return in_place(plan.pack(op, contract, operands), operands)

    readers = [(len(site.leaves), site.read, site.contract.weight) for site in sites]

    def pack(tensors: Sequence[torch.Tensor], known: Any = None) -> dict[str, torch.Tensor]:
        if several and known is not None:
            raise Refused("the weight of one of several products that are computed as one is freed")
        rest, found = list(tensors), []
        for count, read, form in readers:
            found.append(read([rest.pop(0) for _ in range(count)], known))
            check_format(found[-1][0].weight, form)
        return packed(found)

    return Lowering(
        op=op,
        contract=contract,
        plan=plan,
        operator=start.operator,
        form=start.form,
        replaced=start.value,
        inputs=start.inputs,
        bypassed=tuple(pair for site in sites for pair in site.bypassed),
        leaves=tuple(leaf for site in sites for leaf in site.leaves),
        signature="\n".join([*(site.signature for site in sites), str(contract)]),
        weight=start.regions[0],
        pack=pack,
        packed=lambda: packed([site.operands for site in sites]),
        evaluations=first.evaluations,
        parts=tuple(site.part for site in sites if several),
        views=(*start.views[:-1], None) if several and start.views else start.views,
    )


def in_place(tensors: dict[str, torch.Tensor], operands: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Packed tensors of experts; codes that are packed as they are, in the memory that they have
    where that is one, as the model's own often is."""
    first, packed = operands[0].weight.codes, tensors.get("codes")
    apart = first.numel() * first.itemsize
    turned = operands[0].weight.order is not None  # they may be packed in another order
    if turned or packed is None or (packed.dtype, packed.shape[1:]) != (first.dtype, first.shape):
        return tensors
    for i, part in enumerate(operands):
        codes = part.weight.codes
        same = codes.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (
            same and codes.is_contiguous() and codes.data_ptr() == first.data_ptr() + i * apart
        ):
            return tensors
    return tensors | {"codes": first.as_strided(packed.shape, packed.stride())}


def _experts(contract: Any) -> int:
    return getattr(contract, "experts", 0)


def joined_contract(contracts: Sequence[Any]) -> Any:
    """The contract of all products as one; Refused if they differ in more than N and in how many
    rows share a scale of whole rows."""
    n = sum(contract.weight.n for contract in contracts)
    formats = [_by_rows(contract.weight) for contract in contracts]
    first = dataclasses.replace(contracts[0], weight=dataclasses.replace(formats[0], n=n))
    for contract, w in zip(contracts, formats, strict=True):
        if dataclasses.replace(contract, weight=dataclasses.replace(w, n=n)) != first:
            raise Refused(f"products of {contracts[0]} and {contract} are not computed as one")
        if _experts(contract) or w.permuted or w.n % w.bn:
            raise Refused(f"{contract} is computed by itself")
    if first.weight.scale is None:  # then all is one block
        return dataclasses.replace(first, weight=dataclasses.replace(first.weight, bn=n))
    return first


def _by_rows(form: WeightFormat) -> WeightFormat:
    """The format with a scale for each row, where rows that share one have no other."""
    return dataclasses.replace(form, bn=1) if form.bk >= form.k else form


def check_tables(weights: Sequence[QuantizedWeight]) -> None:
    """Refused if weights of one format have tables of other values: one product has one table."""
    tables = [weight.table for weight in weights if weight.table is not None]
    if not all(torch.equal(tables[0], other) for other in tables):
        raise Refused("the tables of products that are computed as one differ")


def joined(parts: Sequence[T], contract: Any) -> T:
    """The operands of products that are computed as one: weights and all vectors one below the
    other. Refused if their tables differ."""
    form, first = contract.weight, parts[0]
    weights = [part.weight for part in parts]  # type: ignore[attr-defined]
    check_tables(weights)

    def grid(name: str) -> torch.Tensor | None:
        grids = [(weight.format, getattr(weight, name)) for weight in weights]
        return _below([g if g is None or f.bn == form.bn else by_row(f, g, f.n) for f, g in grids])

    outer = _below([weight.outer for weight in weights])
    codes = _below([weight.codes for weight in weights])
    assert codes is not None
    weight = QuantizedWeight(form, codes, grid("scale"), grid("zero"), outer, weights[0].table)
    names = [field.name for field in dataclasses.fields(first)][1:]  # type: ignore[arg-type]
    vectors = {name: _below([getattr(part, name) for part in parts]) for name in names}
    return dataclasses.replace(first, weight=weight, **vectors)  # type: ignore[type-var]


def _below(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    held = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(held) if held else None


def _is_faster(whole: Plan, alone: Sequence[Plan]) -> bool:
    """Whether one product is expected to take less time than several, at every M."""
    sums = [sum(times) for times in zip(*(plan.us for plan in alone), strict=True)]
    return bool(whole.us) and all(a < b for a, b in zip(whole.us, sums, strict=True))
