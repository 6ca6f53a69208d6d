"""The backend: `torch.compile(model, backend="qinductor")`, from Dynamo's graph to a callable.

One compile is: find and prove sites in the joint graph, before Inductor's own passes (`Matching`);
let Inductor compile what is left. At every call `Compiled` resolves the packed weights.
"""

import copy
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

from qinductor.errors import QinductorError, Refused, RequiredPatternError
from qinductor.freed import MESSAGE, is_freed, parts, unable
from qinductor.options import Options, unknown
from qinductor.passes import inductor_options, patches_of
from qinductor.pattern import Fusion, Lowering, Part, Pattern, where
from qinductor.regions import Leaf, Scope
from qinductor.report import Report, Site, remember
from qinductor.retrace import Retrace, names, scope_of
from qinductor.rewrite import fuse, restore, rewrite
from qinductor.runtime import Appending, Compiled, Variant
from qinductor.store import Slot, aliases
from qinductor.weights import Resolver, seed

SMALL = 64  # the part of its weight's bytes from which a leaf is freed


def qinductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Any = None,
    compiles: bool = True,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph. `compiles` False matches, and returns the graph to be run eagerly.

    Errors: OptionError for bad options; RequiredPatternError if a pattern set to `require` leaves a
    candidate unlowered (through torch.compile both arrive inside its BackendCompilerFailed).
    Anything else that goes wrong in here is a row of the report.
    """
    chosen = Options.of(options, mode)
    if (
        not compiles
        or inductor_options(chosen).get("triton.cudagraphs")
        or chosen.cudagraphs == "off"
    ):
        return _compile(gm, example_inputs, chosen, compiles)
    from qinductor.serving.runner import recordable

    return recordable(gm, example_inputs, chosen, _compile)


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], chosen: Options, compiles: bool = True
) -> Callable[..., Any]:
    retrace = Retrace(gm)
    freed = any(is_freed(part) for value in example_inputs for part in parts(value))
    matching = Matching(gm, example_inputs, chosen, packs=compiles or freed, runs=not compiles)
    compiled = _compiled(gm, example_inputs, matching)
    remember(matching.report)
    matching.finish()
    if not matching.packs:
        return retrace.graph
    if not matching.slots and not matching.reads:
        return compiled
    report = matching.report

    def another(arguments: Sequence[Any], reason: str) -> Variant | None:
        """One more variant of the graph, for weights that do not fit the others' contracts."""

        def again(gm: GraphModule, inputs: list[Any]) -> tuple[Callable[..., Any], Matching]:
            more = Matching(gm, arguments, chosen, packs=True)
            return _compiled(gm, inputs, more), more

        (compiled, more), holds = retrace(arguments, again)
        report.add(more.report, reason)
        more.finish()
        if not more.slots:
            return None
        return Variant(compiled, Resolver(more.slots, more.reads), more.frees, holds)

    @functools.cache
    def unfused() -> Callable[..., Any]:
        stock = inductor_options(chosen)
        return torch.compile(retrace.graph, backend="inductor", options=stock)

    first = Variant(compiled, Resolver(matching.slots, matching.reads), matching.frees)
    called = names(retrace.graph)
    return Compiled([first], another, unfused, report, matching.required, called)


def _compiled(gm: GraphModule, inputs: Sequence[Any], matching: "Matching") -> Callable[..., Any]:
    from qinductor.caches.disk import caches

    inner = matching.inner_compile if matching.packs else matching.skip_compile
    patches = patches_of(matching.options, matching)
    with caches(matching.packs):
        return compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)  # type: ignore[return-value]


class Matching:
    """Finds, proves and rewrites the sites of one graph, and writes its report.

    packs   whether the graph is rewritten, not only its report written
    runs    whether what is left is to be run as it is, not compiled
    slots   what the operators of the rewritten graph need at each call, in placeholder order
    fused   how many sites became an operator that needs none
    fakes   fake values of those placeholders
    frees   leaves that are read by no more than these operators: their memory may be freed
    reads   leaves that the graph reads, which another graph may free
    unread  places of their placeholders
    unable  freed tensors that the graph reads all the same
    """

    def __init__(
        self,
        gm: GraphModule,
        arguments: Sequence[Any],
        options: Options,
        *,
        packs: bool,
        runs: bool = False,
    ) -> None:
        from qinductor import load

        self.patterns = load()
        for name in dict(options.patterns):
            unknown("pattern", name, [pattern.name for pattern in self.patterns])
        self.gm, self.arguments, self.options = gm, arguments, options
        self.packs, self.runs = packs, runs
        self.report = Report(target=options.target or "cpu")
        self.replaces = options.weights == "replace"
        if self.replaces and (reason := unable()):
            self.replaces = False
            self.report.notes.append(f"originals stay in memory: {reason}")
        self.slots: list[Slot] = []
        self.fused = 0
        self.fakes: list[torch.Tensor] = []
        self.frees: list[Leaf] = []
        self.reads: list[Leaf] = []
        self.unread: list[int] = []
        self.unable: list[str] = []
        self.settings = {p.name: options.setting(p.name, p.default) for p in self.patterns}
        self.required = "require" in self.settings.values()
        self.ran = False
        self.failed: str | None = None
        self.rewritten: Graph | None = None
        self.together: dict[Node, tuple[Site, Part]] = {}  # products that an earlier site computes

    def __call__(self, graph: Graph) -> None:
        """The pass itself; also called on the bodies of higher-order operators."""
        started = time.perf_counter()
        try:
            self.ran = True
            blocked = self._blocked(graph)
            if not self.packs:
                owner, graph = graph.owning_module, copy.deepcopy(graph)
                graph.owning_module = owner
                self.rewritten = self.rewritten or graph
            self._match(graph, blocked)
        except Exception as error:
            self.failed = f"matching stopped: {type(error).__name__}: {error}"
            self.report.notes.append(self.failed)
        self.report.matching_seconds += time.perf_counter() - started

    def _match(self, graph: Graph, blocked: str | None) -> None:
        scope = scope_of(graph, self.gm, self.arguments)
        for pattern in self.patterns:
            if self.settings[pattern.name] == "off":
                continue
            for node in self._candidates(pattern, graph, scope):
                site = Site(where(node), pattern.name)
                self.report.sites.append(site)
                if node in self.together:
                    _join(site, *self.together.pop(node))
                    continue
                try:
                    if blocked is not None:
                        raise Refused(blocked)
                    self._lower(graph, pattern, node, scope, site)
                except Refused as refusal:
                    site.reason, site.contract = refusal.reason, refusal.contract
                except Exception as error:
                    site.reason = f"an error of qinductor's own: {type(error).__name__}: {error}"
                pattern.settled(node, site.reason)
            if self.slots or self.fused:  # or the next pattern would see what this one has replaced
                graph.eliminate_dead_code()
        for slot, fakes in () if blocked else restore(graph, scope):
            self.slots.append(slot)
            self.fakes.extend(fakes)
            self.report.notes.append(f"{slot.where}: the weight is freed; its packed form makes it")
        if self.slots or self.fused:
            graph.eliminate_dead_code()
            graph.lint()
        self._find_freeable(graph, scope)

    def _candidates(self, pattern: Pattern, graph: Graph, scope: Scope) -> list[Node]:
        """A pattern's anchors; none, and a note, where it fails: the others go on."""
        try:
            return list(pattern.candidates(graph, scope))
        except Exception as error:
            self.failed = f"{pattern.name} stopped: {type(error).__name__}: {error}"
            self.report.notes.append(self.failed)
            return []

    def _find_freeable(self, graph: Graph, scope: Scope) -> None:
        """Decides which leaves may be freed: large ones that only the packed operators stood for.

        Small ones (a table, say) may serve weights of other graphs, and are not worth it.
        """
        values = {leaf: node.meta["val"] for node, leaf in scope.leaves.items()}
        restorable = [slot for slot in self.slots if slot.weight is not None]
        elsewhere = {leaf for slot in self.slots for leaf in slot.leaves[len(slot.region[2]) :]}
        elsewhere |= {leaf for s in self.slots if s.weight is None for leaf in s.leaves}
        large: set[Leaf] = set()
        for slot in restorable:
            weight = {leaf: values[leaf].nbytes for leaf in slot.region[2] if leaf in values}
            large.update(leaf for leaf in weight if SMALL * weight[leaf] >= sum(weight.values()))
        called = names(self.gm)
        for i, node in enumerate(graph.find_nodes(op="placeholder")):
            leaf = scope.leaves.get(node)
            if leaf is None:
                continue
            freed = is_freed(leaf.of(self.arguments))
            if node.users and freed:
                self.unable.append(".".join([called[leaf.index], *leaf.attributes]))
            elif not node.users and (freed or (self.replaces and leaf in large - elsewhere)):
                self.frees.append(leaf)
                self.unread.append(i)
            elif node.users and self.replaces:
                self.reads.append(leaf)

    def _lower(self, graph: Graph, pattern: Pattern, node: Node, scope: Scope, site: Site) -> None:
        device = node.meta["val"].device
        target = self.options.target or _target(device)
        if self.packs and (target == "cpu") != (device.type == "cpu"):
            raise Refused(f"the target is {target}, yet the graph is on {device}: only explain can")
        self.report.target = target
        with unset_fake_temporarily(), torch.no_grad():  # regions run on real tensors
            lowering = pattern.lower(
                node,
                scope,
                lambda op, contract, m: dataclasses.replace(
                    op.plan(contract, target, m, self.options.dense), whole=self.replaces
                ),
            )
        site.contract = lowering.contract.summary
        site.evaluations = lowering.evaluations
        cost = lowering.op.cost(lowering.contract)
        site.cost = {name: str(value) for name, value in cost.items()}
        if isinstance(lowering, Fusion):
            fuse(graph, lowering)
            self.fused += 1
        else:
            self._pack(graph, lowering, site)
        site.lowered, site.provider = True, lowering.plan.summary
        site.rung = lowering.plan.rung
        parts = () if isinstance(lowering, Fusion) else lowering.parts
        for part in parts:
            self.together[part.product] = site, part
        if parts:
            site.contract = self.together.pop(node)[1].contract
            site.provider += f", {len(parts)} products of x as one"

    def _pack(self, graph: Graph, lowering: Lowering, site: Site) -> None:
        """Puts the operator into the graph, and its packed weight among the slots."""
        slot, *_ = [self._slot(each, site) for each in (lowering, *lowering.ahead)]
        self.fakes.extend(rewrite(graph, lowering))
        self.slots.append(slot)
        self._account(lowering)

    def _slot(self, lowering: Lowering, site: Site) -> Slot:
        """What the operator takes at each call; its weight is packed."""
        pack, packed = lowering.pack, lowering.packed
        if self.packs and self.options.packed == "disk":
            from qinductor.caches.packed import kept

            pack, packed = kept(lowering, self.arguments)
        slot = Slot(
            site.where,
            lowering.signature,
            lowering.leaves,
            tuple(lowering.plan.operands(lowering.op, lowering.contract)),
            pack,
            lowering.weight.key,
        )
        if self.replaces and lowering.op.weight is not None:
            slot.weight = lowering.op, lowering.op.weight(lowering.contract)[1]
        if self.packs:
            with unset_fake_temporarily(), torch.no_grad():
                seed(slot, self.arguments, packed)
        return slot

    def _account(self, lowering: Lowering) -> None:
        known = {(slot.signature, slot.leaves) for slot in self.slots[:-1]}
        if (lowering.signature, lowering.leaves) in known:
            return  # tied weights are packed once
        dense = {
            name
            for provider in lowering.plan.providers(lowering.op)
            if provider.dense
            for name in provider.operands(lowering.contract)
        }
        packed = lowering.plan.packs(lowering.op, lowering.contract)
        own = aliases(self.slots[-1], self.arguments)
        for name, (shape, dtype) in packed.items():
            size = int(torch.Size(shape).numel()) * dtype.itemsize * (name not in own)
            self.report.packed_bytes += size
            self.report.dense_bytes += size if name in dense else 0

    def _blocked(self, graph: Graph) -> str | None:
        """Why nothing in this graph can be rewritten, or None."""
        holders = [node for node in graph.nodes if node.op == "placeholder"]
        if any("desc" not in node.meta for node in holders):
            return (
                "it is in the body of a higher-order operator (cond, loop, checkpoint); only the "
                "outermost graph is rewritten"
            )
        if torch._inductor.config.freezing or dict(self.options.inductor).get("freezing"):
            return "freezing folds constant weights; wanted torch._inductor.config.freezing False"
        if any(isinstance(n.meta.get("desc"), descriptors.TangentAOTInput) for n in holders):
            return "a training graph; wanted torch.no_grad() or parameters that need no gradient"
        return None

    def inner_compile(self, gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Inductor's inner compile, with the packed inputs appended."""
        self._report_unpassed(gm)
        if kwargs.get("is_backward"):
            return compile_fx_inner(gm, inputs, **kwargs)
        if self.runs:
            return Appending(lambda inputs: gm.forward(*inputs), len(self.fakes))
        holders = gm.graph.find_nodes(op="placeholder")
        for i in self.unread:
            gm.graph.erase_node(holders[i])
        gm.recompile()
        read = [i for i in range(len(inputs)) if i not in set(self.unread)]
        static = {*kwargs.get("static_input_idxs", ())}
        kwargs["static_input_idxs"] = [
            *(place for place, i in enumerate(read) if i in static),
            *range(len(read), len(read) + len(self.fakes)),
        ]
        compiled = compile_fx_inner(gm, [*(inputs[i] for i in read), *self.fakes], **kwargs)
        return Appending(compiled, len(self.fakes), self.unread)

    def skip_compile(self, gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Stands in for Inductor's inner compile where nothing is to be compiled."""
        self._report_unpassed(gm)
        return gm.forward

    def _report_unpassed(self, gm: GraphModule) -> None:
        """Refuses every site where Inductor was told to run no joint passes."""
        if not self.ran:
            try:
                self._match(
                    gm.graph,
                    f"Inductor runs no joint passes (mode {self.options.mode!r}); wanted "
                    "use_joint_graph_passes True",
                )
            except Exception as error:
                self.report.notes.append(f"matching stopped: {type(error).__name__}: {error}")
            warnings.warn("qinductor lowers nothing: Inductor runs no joint passes", stacklevel=2)

    def finish(self) -> None:
        """RequiredPatternError if a required pattern was not lowered."""
        self.arguments = ()  # no weight is kept alive by what was compiled for it
        if self.unable:
            raise QinductorError(
                f"this graph reads {', '.join(self.unable)}; {MESSAGE}\n{self.report}"
            )
        required = [s for s in self.report.sites if self.settings[s.pattern] == "require"]
        missed = [site for site in required if not site.lowered]
        if self.failed and self.required:
            raise RequiredPatternError(f"a pattern is required, yet {self.failed}")
        if missed:
            raise RequiredPatternError(
                f"{len(missed)} sites of a required pattern were not lowered\n{self.report}"
            )


def _join(site: Site, first: Site, part: Part) -> None:
    """Fills the row of a product that is computed together with an earlier one."""
    site.lowered, site.contract, site.rung = True, part.contract, first.rung
    site.provider, site.evaluations = f"with {first.where}", first.evaluations


def _target(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
