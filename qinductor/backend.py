"""The backend: `torch.compile(model, backend="qinductor")`, from Dynamo's graph to a callable.

One compile is: find and prove sites in the joint graph, before Inductor's own passes (`Matching`);
let Inductor compile what is left. At every call `Compiled` resolves the packed weights.
"""

import copy
import functools
import hashlib
import pathlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.source import AttrSource, LocalSource
from torch._functorch._aot_autograd import descriptors
from torch._guards import ChainedSource
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

from qinductor.errors import Refused, RequiredPatternError
from qinductor.op import costs
from qinductor.options import Options, unknown
from qinductor.pattern import Lowering, Pattern, where
from qinductor.regions import Leaf, Scope
from qinductor.report import Report, Site, remember
from qinductor.retrace import SOURCE, Retrace
from qinductor.rewrite import rewrite
from qinductor.runtime import Appending, Compiled, Variant
from qinductor.weights import Slot, seed

STATIC = "_dynamo_static_input_type"


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
    retrace = Retrace(gm)
    matching = Matching(gm, example_inputs, chosen, packs=compiles)
    compiled = _compiled(gm, example_inputs, matching)
    remember(matching.report)
    matching.finish()
    if not compiles:
        return retrace.graph
    if not matching.slots:
        return compiled

    def another(arguments: Sequence[Any], reason: str) -> Variant | None:
        """One more variant of the graph, for weights that do not fit the others' contracts."""

        def again(gm: GraphModule, inputs: list[Any]) -> tuple[Callable[..., Any], Matching]:
            more = Matching(gm, arguments, chosen, packs=True)
            return _compiled(gm, inputs, more), more

        (compiled, more), holds = retrace(arguments, again)
        matching.report.add(more.report, reason)
        more.finish()
        return Variant(compiled, more.slots, holds) if more.slots else None

    @functools.cache
    def unfused() -> Callable[..., Any]:
        stock = _inductor_options(chosen)
        return torch.compile(retrace.graph, backend="inductor", options=stock)

    first = Variant(compiled, matching.slots)
    return Compiled(first, another, unfused, matching.report, matching.required)


def _compiled(gm: GraphModule, inputs: Sequence[Any], matching: "Matching") -> Callable[..., Any]:
    inner = matching.inner_compile if matching.packs else matching.skip_compile
    patches = _patches(matching.options, matching)
    compiled: Any = compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def _inductor_options(options: Options) -> dict[str, Any]:
    """Inductor's options as the user gave them."""
    of_mode = torch._inductor.list_mode_options(options.mode) if options.mode else {}
    return {**of_mode, **dict(options.inductor)}


def _patches(options: Options, matching: "Matching") -> dict[str, Any]:
    """Inductor's options for this compile: the user's, and our pass after the user's own."""
    patches = _inductor_options(options)
    before = patches.get(
        "joint_custom_pre_pass", getattr(torch._inductor.config, "joint_custom_pre_pass", None)
    )
    passes = list(before) if isinstance(before, (list, tuple)) else [before]
    patches["joint_custom_pre_pass"] = Passes([p for p in passes if p is not None], matching)
    # On CUDA it turns products of one row into mul and sum before any pass sees them.
    patches["coordinate_descent_tuning"] = False
    return patches


class Passes(CustomGraphPass):
    """The user's passes, then ours, in the one slot that torch 2.11 has."""

    def __init__(self, others: Sequence[Callable[[Graph], None]], ours: "Matching") -> None:
        self.others, self.ours = others, ours

    def __call__(self, graph: Graph) -> None:
        for other in self.others:
            other(graph)
        self.ours(graph)

    def uuid(self) -> Any:
        """Names all that the rewritten graph depends on and does not itself contain.

        None (never cached) if a pass of the user's does not say what it is.
        """
        others = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.others]
        if any(other is None for other in others):
            return None
        return f"qinductor {_sources()} {self.ours.options} {others}"

    def __getstate__(self) -> Any:
        return self.uuid()


@functools.cache
def _sources() -> str:
    """A digest of our own source, since a changed fake would make cached code stale."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parent
    for folder in (root, root / "kernels", root / "patterns"):  # `**` does not follow links
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Matching:
    """Finds, proves and rewrites the sites of one graph, and writes its report.

    slots   what the operators of the rewritten graph need at each call, in placeholder order
    fakes   fake values of those placeholders
    """

    def __init__(
        self, gm: GraphModule, arguments: Sequence[Any], options: Options, *, packs: bool
    ) -> None:
        from qinductor import load

        self.patterns = load()
        for name, _ in options.patterns:
            unknown("pattern", name, [pattern.name for pattern in self.patterns])
        self.gm, self.arguments, self.options, self.packs = gm, arguments, options, packs
        self.report = Report(target=options.target or "cpu")
        self.slots: list[Slot] = []
        self.fakes: list[torch.Tensor] = []
        settings = [options.setting(p.name, p.default) for p in self.patterns]
        self.required = "require" in settings
        self.ran = False
        self.failed: str | None = None
        self.rewritten: Graph | None = None

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
            setting = self.options.setting(pattern.name, pattern.default)
            if setting == "off":
                continue
            for node in list(pattern.candidates(graph, scope)):
                site = Site(where(node), pattern.name)
                self.report.sites.append(site)
                try:
                    if blocked is not None:
                        raise Refused(blocked)
                    self._lower(graph, pattern, node, scope, site)
                except Refused as refusal:
                    site.reason, site.contract = refusal.reason, refusal.contract
                except Exception as error:
                    site.reason = f"an error of qinductor's own: {type(error).__name__}: {error}"
        if self.slots:
            graph.eliminate_dead_code()
            graph.lint()

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
                lambda op, contract, m: op.plan(contract, target, m, self.options.dense),
            )
        site.contract = lowering.contract.summary
        site.evaluations = lowering.evaluations
        site.cost = dict(costs(lowering.op, lowering.contract))
        slot = Slot(
            site.where,
            lowering.signature,
            lowering.leaves,
            tuple(lowering.plan.operands(lowering.op, lowering.contract)),
            lowering.pack,
        )
        if self.packs:
            with unset_fake_temporarily(), torch.no_grad():
                seed(slot, self.arguments, lowering.packed)
        self.fakes.extend(rewrite(graph, lowering))
        self.slots.append(slot)
        site.lowered, site.provider = True, lowering.plan.summary
        self._account(lowering)

    def _account(self, lowering: Lowering) -> None:
        known = {(slot.signature, slot.leaves) for slot in self.slots[:-1]}
        if (lowering.signature, lowering.leaves) in known:
            return  # tied weights are packed once
        dense = {
            name
            for _, provider in lowering.plan.steps
            if lowering.op.providers[provider].dense
            for name in lowering.op.providers[provider].operands(lowering.contract)
        }
        operands = lowering.plan.operands(lowering.op, lowering.contract)
        for name, (shape, dtype) in operands.items():
            size = int(torch.Size(shape).numel()) * dtype.itemsize
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
        first = len(inputs)
        static = range(first, first + len(self.fakes))
        kwargs["static_input_idxs"] = [*kwargs.get("static_input_idxs", ()), *static]
        compiled = compile_fx_inner(gm, [*inputs, *self.fakes], **kwargs)
        return Appending(compiled, len(self.fakes))

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
        settings = {p.name: self.options.setting(p.name, p.default) for p in self.patterns}
        missed = [
            s for s in self.report.sites if settings[s.pattern] == "require" and not s.lowered
        ]
        if self.failed and self.required:
            raise RequiredPatternError(f"a pattern is required, yet {self.failed}")
        if missed:
            raise RequiredPatternError(
                f"{len(missed)} sites of a required pattern were not lowered\n{self.report}"
            )


def scope_of(graph: Graph, gm: GraphModule, arguments: Sequence[Any]) -> Scope:
    """Which placeholders hold constants, by what AOTAutograd and Dynamo say of them."""
    dynamo = [node for node in gm.graph.nodes if node.op == "placeholder"]
    written = {
        argument
        for node in graph.nodes
        if node.op == "call_function" and getattr(node.target, "_schema", None) is not None
        and node.target._schema.is_mutable
        for argument in node.all_input_nodes[:1]
    }  # fmt: skip
    scope = Scope({}, {}, arguments)
    for node in (n for n in graph.nodes if n.op == "placeholder"):
        leaf = _leaf(node.meta.get("desc"))
        if leaf is None or leaf.index >= len(dynamo):
            scope.why[node] = "is no input of the compiled function"
        elif node in written:
            scope.why[node] = "is written to by the graph"
        elif not isinstance(arguments[leaf.index], torch.Tensor):
            scope.why[node] = "is a number"
        elif not _is_static(dynamo[leaf.index], arguments[leaf.index]):
            scope.why[node] = "is an argument, no parameter, buffer, attribute or closure"
        else:
            scope.leaves[node] = leaf
    return scope


def _leaf(description: Any) -> Leaf | None:
    if isinstance(description, descriptors.SubclassGetAttrAOTInput):
        base = _leaf(description.base)
        return base and Leaf(base.index, (*base.attributes, description.attr))
    if isinstance(description, descriptors.PlainAOTInput):
        return Leaf(description.idx)
    return None


def _is_static(node: Node, value: Any) -> bool:
    """Whether a Dynamo placeholder is no argument: a parameter, buffer, attribute, closure, global.

    The resolver looks at each of them again at every call, so none is trusted to stay as it is.
    """
    if STATIC in (node.meta.get("tensor_dict") or {}) or isinstance(value, torch.nn.Parameter):
        return True
    source = getattr(node, SOURCE, None)
    while isinstance(source, ChainedSource) and not isinstance(source, AttrSource):
        source = source.base
    if not isinstance(source, LocalSource):
        return source is not None
    return not source.is_input or source.is_derefed_cell_contents


def _target(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
