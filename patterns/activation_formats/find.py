"""What a cast to codes computes: where y begins, how it is quantised, what makes it."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from qinductor.contracts import parse
from qinductor.errors import Refused
from qinductor.kernels.quantize import Quantize, Source
from qinductor.patterns.activation_formats.candidates import (
    GROUPS,
    SCALES,
    again,
    answers,
    group_of,
    is_zero,
    nearness,
    scales_among,
)
from qinductor.patterns.activation_formats.gates import source_of
from qinductor.patterns.activation_formats.identify import Answers, battery, identify, near, plain
from qinductor.patterns.activation_formats.layouts import proves, stored_as
from qinductor.patterns.activation_formats.norms import norm_of
from qinductor.patterns.activation_formats.prove import prove
from qinductor.patterns.activation_formats.sources import (
    PARTIAL,
    Site,
    beginning,
    is_reduced,
    site_of,
)
from qinductor.patterns.failures import FAILURES, said
from qinductor.patterns.probe import (
    GIVEN,
    Function,
    Numbers,
    Prober,
    Remembered,
    fixed,
    function,
    numbers,
)
from qinductor.regions import FLOATS, INTEGER, Scope, aten, describe

TRIED = 8  # contracts of one batch of answers that are proved
# The contract; the places of codes, scale and zero among the outputs; a static scale that is a
# number in the region.
Identified = tuple[Quantize, tuple[tuple[int, ...], ...], float | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A proved quantiser.

    inputs, replaced, region  as in `Fusion`
    m                         rows, None where they are symbolic
    """

    contract: Quantize
    inputs: tuple[Node | float, ...]
    replaced: tuple[tuple[Node, ...], ...]
    region: tuple[Node, ...]
    m: int | None
    evaluations: int


@dataclasses.dataclass(frozen=True, eq=False)
class Quantiser:
    """What follows y: its contract, and the nodes that hold codes, scale and zero.

    numbers  that it computes with
    literal  the static scale, where it is one of them
    """

    contract: Quantize
    outputs: tuple[tuple[Node, ...], ...]
    numbers: Numbers
    literal: float | None


class Finder(Prober):
    """Finds quantisers; equal regions are probed and proved once. norms: of RMS norms alone."""

    def __init__(self, norms: bool = False) -> None:
        super().__init__()
        self.norms = norms

    def __call__(self, codes: Node, scope: Scope) -> Found:
        """The farthest source of a cast that the operator has, proved; or Refused."""
        self.runs = 0
        try:
            return self._found(site_of(codes, scope, self.norms))
        except FAILURES as error:
            raise Refused(f"it cannot be run on probes: {said(error)}") from error

    def _found(self, site: Site) -> Found:
        at = beginning(site)
        y = site.cuts[at][0]
        k = y.meta["val"].shape[-1]
        if fixed(k) is None:
            raise Refused(f"the last size of what is quantised must be a number; it is {k}")
        after = self._quantiser(site, y)
        for cut in reversed(site.cuts[at:]):
            source, inputs = self._source(site, cut, y)
            if source is not None:
                break
        assert source is not None  # the last cut is y itself
        if self.norms and not source.norm:
            raise Refused("what is quantised is made by no RMS norm x * rsqrt(mean(x^2) + eps) * w")
        contract = dataclasses.replace(after.contract, source=source, x=inputs[0].meta["val"].dtype)
        _check_inputs(inputs)
        outputs, sums = [nodes[0] for nodes in after.outputs], _sums(site, inputs, source)
        region = function(inputs, [*outputs, *sums], site.order, self.norms)
        if inputs != (y,):
            self.once(
                f"{region.text()}\n{contract}",
                lambda: self._proved_whole(region, contract, after),
            )
        added = _added(inputs[0]) if source.norm == "rms" else None
        if added is not None:  # by the operator that was put in for another quantiser
            inputs, sums = added, []
            contract = dataclasses.replace(
                contract, source=dataclasses.replace(source, norm="add+rms")
            )
        shape = [fixed(size) for size in inputs[0].meta["val"].shape[:-1]]
        literal = () if after.literal is None else (after.literal,)
        form, replaced = self._stored(site, after)
        return Found(
            contract=dataclasses.replace(contract, scale=form.scale, layout=form.layout),
            inputs=(*inputs, *region.given, *literal),
            replaced=(*replaced, *((node,) for node in sums)),
            region=tuple(n for n in site.order if n in site.varying and n not in inputs),
            m=None if None in shape else math.prod(size or 0 for size in shape),
            evaluations=self.runs,
        )

    def _proved_whole(self, region: Function, contract: Quantize, after: Quantiser) -> None:
        with self.asking(region) as asked:
            places = range(len(region.outputs))
            prove(asked, places, contract, after.numbers.every, after.literal)

    def _stored(
        self, site: Site, after: Quantiser
    ) -> tuple[Quantize, tuple[tuple[Node, ...], ...]]:
        """The contract of a quantiser with the form in which its scale is read, and the nodes that
        hold codes, scale in this form, zero."""
        contract = after.contract
        if len(after.outputs) != 2 or not contract.group:
            return contract, after.outputs
        inside = {n for n in site.order if n not in site.side}

        def has_form(part: Function, member: Quantize) -> bool:
            with self.asking(part) as asked:
                return proves(asked, contract, member, after.numbers.every)

        form, node = stored_as(
            contract, after.outputs[1], site.codes, inside,
            lambda part, member: self.once(
                f"{part.text()}\n{contract}\n{member}", lambda: has_form(part, member)
            ),
        )  # fmt: skip
        nodes = (after.outputs[0], (node,))
        return form, after.outputs if node is after.outputs[1][0] else nodes

    def _quantiser(self, site: Site, y: Node) -> Quantiser:
        """What follows y."""
        inside, after = set(site.order), site.after(y)
        parts = [n for n in after if n.target in PARTIAL]
        if parts:
            raise Refused(f"{parts[0].name} ({parts[0].target}) takes parts of what is quantised")
        reduced = [n for n in after if is_reduced(n, site.codes)]
        used = [n for n in reduced if any(user not in inside for user in n.users)]
        within = [n for n in reduced if n not in site.side]
        scales = scales_among([*reversed(used), *reversed(within)], used)
        whole = sorted(reduced, key=lambda n: (n not in used, _dtype(n) not in INTEGER))
        zeros = [n for n in whole if n in used or _dtype(n) in INTEGER][:SCALES]
        region = function([y], [site.codes, *reduced], site.order)
        known = numbers(region)
        places = tuple([region.outputs.index(n) for n in found] for found in (scales, zeros))
        read = [region.outputs.index(n) for n in used]
        contract, outputs, literal = self.once(
            f"{region.text()}\n{places} {read}",
            lambda: self._identified(region, places, read, known),
        )
        nodes = tuple(tuple(region.outputs[i] for i in each) for each in outputs)
        return Quantiser(contract, nodes, known, literal)

    def _identified(
        self, region: Function, places: tuple[list[int], ...], used: list[int], known: Numbers
    ) -> Identified:
        """The contract of a region; `used` are the outputs that are read elsewhere."""
        scales, zeros = places
        value = region.inputs[0].meta["val"]
        base = plain(int(value.shape[-1]), value.dtype, _dtype(region.outputs[0]), 0, torch.float32)
        if not scales:
            return self._static(region, base, known)
        refusals: list[tuple[tuple[bool, int], Refused]] = []
        whole = [i for i in zeros if _dtype(region.outputs[i]) in INTEGER]
        order = [*whole, None, *(i for i in zeros if i not in whole)]
        with self.asking(region) as asked:
            for zero, scale in itertools.product(order, scales):
                group = group_of(region, region.outputs[scale])
                if group is None or not (zero is None or is_zero(region, zero, scale, group)):
                    continue
                dtype = None if zero is None else _dtype(region.outputs[zero])
                member = dataclasses.replace(
                    base, group=group, scale=_dtype(region.outputs[scale]), zero=dtype
                )
                chosen = (0, scale) if zero is None else (0, scale, zero)
                try:
                    given = answers(asked, member, chosen, known)
                    contract = self._proved(asked, member, given, chosen, known)
                    equal = again(asked, contract, scale, used, known)
                    return contract, ((0,), (scale, *equal), *((i,) for i in chosen[2:])), None
                except Refused as refusal:
                    refusals.append(((scale in used, nearness(refusal)), refusal))
        if refusals:
            raise max(refusals, key=operator.itemgetter(0))[1]
        raise Refused(
            f"no scale belongs to groups of {describe(region.inputs[0])}: found "
            f"{', '.join(describe(region.outputs[i]) for i in scales)}"
        )

    def _proved(
        self,
        asked: Remembered,
        base: Quantize,
        given: Answers,
        places: Sequence[int],
        known: Numbers,
        literal: float | None = None,
    ) -> Quantize:
        """The first contract of these answers that stands the proof."""
        dtypes = [n.meta["val"].dtype for n in asked.function.nodes if _is_float(n)]
        refused: Refused | None = None
        for member in itertools.islice(identify(base, given, known, dtypes), TRIED):
            try:
                prove(asked, places, member, known.every, literal)
            except Refused as refusal:
                refused = refused or refusal
            else:
                return member
        assert refused is not None  # `identify` gives one or refuses
        raise refused

    def _static(self, region: Function, base: Quantize, known: Numbers) -> Identified:
        """As `_identified`, of a region whose scale is given."""
        if len(region.given) > 1:
            raise Refused(f"a quantiser has one scale; it reads {len(region.given)}")
        scale, values = torch.float32, [v for v in known.every if v > 0]
        if region.given:
            scale, values = _dtype(region.given[0]), [GIVEN]
        refused: Refused | None = None
        rows = region.rows(GROUPS[0])
        member = dataclasses.replace(base, static=True, scale=scale)
        with self.asking(region) as asked:
            for value in values:
                y = near(battery(rows, base.k, base.x, [*known.every, value], 0), value, 0)
                codes = asked(value, [y], region.filled(value))[0].reshape(y.shape)
                found = Answers(y, codes, None, given=torch.tensor(value).to(scale))
                literal = None if region.given else value
                try:
                    contract = self._proved(asked, member, found, [0], known, literal)
                    return contract, ((0,),), literal
                except Refused as refusal:
                    refused = refused or refusal
        raise refused or Refused("a quantiser must have a scale; it has none")

    def _source(
        self, site: Site, cut: tuple[Node, ...], y: Node
    ) -> tuple[Source | None, tuple[Node, ...]]:
        """(what makes y of the nodes of a cut or None, these nodes in the operator's order)."""
        dtype = y.meta["val"].dtype
        if cut == (y,):
            return Source(y=dtype), cut
        if any(fixed(n.meta["val"].shape[-1]) is None for n in cut):
            return None, cut
        try:
            region = function(cut, [y], site.order, self.norms)
        except Refused:
            return None, cut
        if region.given and not self.norms:
            return None, cut
        make = norm_of if self.norms else source_of
        runs, source, turned = self.once(region.text(), lambda: make(region))
        self.runs += runs
        return source, cut[::-1] if turned else cut


def _sums(site: Site, inputs: Sequence[Node], source: Source) -> list[Node]:
    """The node that adds a residual, if the source does."""
    if source.norm != "add+rms":
        return []
    return [n for n in site.order if n.target is aten.add.Tensor and {*n.args} == {*inputs}][:1]


def _added(node: Node) -> tuple[Node, ...] | None:
    """The two tensors of which a node is the sum, where a quantiser's operator made it."""
    made = node.args[0] if node.target is operator.getitem else None
    if not isinstance(made, Node) or made.target is not torch.ops.qinductor.quantize.default:
        return None
    inputs, text, _ = made.args
    contract = parse(Quantize, str(text))
    last = 2 + (contract.zero is not None)
    assert isinstance(inputs, (list, tuple))
    added = tuple(n for n in inputs[:2] if isinstance(n, Node))
    return added if contract.residual and node.args[1] == last else None


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS


def _check_inputs(inputs: Sequence[Node]) -> None:
    for node in inputs:
        value = node.meta["val"]
        if value.stride(-1) != 1:
            raise Refused(f"rows must be contiguous; {node.name} has strides {value.stride()}")


def _dtype(node: Node) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found
