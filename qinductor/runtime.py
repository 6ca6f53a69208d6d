"""What a compile leaves behind: a graph's compiled variants, and the choice of one at every call.

Layers of one class share a graph, yet their weights may have different contracts. A call runs the
variant that fits its weights; where none does, one more is compiled, up to `VARIANTS` in all.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock

from qinductor.errors import RequiredPatternError
from qinductor.report import Report
from qinductor.weights import KEPT, Resolver, Slot, Unfit

Runner = Callable[[list[Any]], Any]
Choice = tuple[Callable[..., Any], list[torch.Tensor]]  # what runs a call, its packed weights
VARIANTS = 4  # compiles of one graph, those that lowered nothing included
NOTES = 32  # of what happened at run time that a report keeps

_handed = threading.local()  # from `Compiled` to `Appending`, within one call


class Variant:
    """One compiled form of a graph.

    holds  arguments -> whether what its compile assumed of their sizes holds, or None
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        slots: Sequence[Slot],
        holds: Callable[[Sequence[Any]], bool] | None = None,
    ) -> None:
        self.compiled, self.resolver, self.holds = compiled, Resolver(slots), holds


class Compiled:
    """A graph's variants, those that lower most first; weights that fit none run unfused.

    another   arguments, reason -> a variant for these weights, or None if it would lower nothing;
              its decisions are in the report by then
    unfused   () -> the original graph on stock Inductor, which is right for every weight
    required  whether a weight that fits no variant is an error
    """

    def __init__(
        self,
        first: Variant,
        another: Callable[[Sequence[Any], str], Variant | None],
        unfused: Callable[[], Callable[..., Any]],
        report: Report,
        required: bool,
    ) -> None:
        self.variants, self.compiles = [first], 1
        self.another, self.unfused = another, unfused
        self.report, self.required = report, required
        self.leaf = first.resolver.slots[0].leaves[0]
        # By the identity of a weight's first leaf. A hint counts only while nothing has changed
        # since its variant was found, so one that is stale costs a lookup.
        self.hints: dict[int, Variant] = {}

    def __call__(self, *arguments: Any) -> Any:
        compiled, _handed.packed = self._chosen(arguments)
        return compiled(*arguments)

    def _chosen(self, arguments: Sequence[Any]) -> Choice:
        hint = self.hints.get(id(self.leaf.of(arguments)))
        if hint is not None and (hint.holds is None or hint.holds(arguments)):
            packed = hint.resolver(arguments, packs=False)
            if packed is not None:
                return hint.compiled, packed
        found, unfit = self._fitting(arguments)
        reason = ""
        if found is None:
            found, reason = self._compiled_for(arguments, unfit)
        return found or (self._unfused(reason), [])

    def _fitting(self, arguments: Sequence[Any]) -> tuple[Choice | None, list[Unfit]]:
        """(the first variant that takes these weights, with them packed; why others did not)."""
        unfit: list[Unfit] = []
        for variant in self.variants:
            if variant.holds is not None and not variant.holds(arguments):
                continue
            try:
                packed = variant.resolver(arguments)
            except Unfit as why:
                unfit.append(why)
                continue
            if packed is not None:
                if len(self.hints) >= KEPT:
                    self.hints.clear()
                self.hints[id(self.leaf.of(arguments))] = variant
                return (variant.compiled, packed), unfit
        return None, unfit

    def _compiled_for(
        self, arguments: Sequence[Any], unfit: Sequence[Unfit]
    ) -> tuple[Choice | None, str]:
        """(a new variant with these weights packed, or None; why the others do not take them)."""
        found = None
        # A variant passed over for its sizes would be compiled again as it was.
        odd = any(v.holds is not None and not v.holds(arguments) for v in self.variants)
        if not odd and not any(why.entry.settled for why in unfit):
            with compile_lock:
                found, unfit = self._fitting(arguments)  # another thread may have compiled it
                if found is None and self.compiles < VARIANTS:
                    found = self._another(arguments, unfit)
        reason = unfit[0].reason
        if self.compiles == VARIANTS:
            reason += f"; {VARIANTS} variants of a graph are compiled at most"
        return found, reason

    def _another(self, arguments: Sequence[Any], unfit: Sequence[Unfit]) -> Choice | None:
        self.compiles += 1
        found = None
        try:
            variant = self.another(arguments, unfit[0].reason)
            if variant is not None:
                variants = [*self.variants, variant]
                self.variants = sorted(variants, key=lambda v: -len(v.resolver.slots))
                found, unfit = self._fitting(arguments)
        except RequiredPatternError:
            raise
        except Exception as error:  # the model ran until now, and goes on
            self._note(f"compiling a variant stopped: {type(error).__name__}: {error}")
        finally:
            if found is None:
                for why in unfit:
                    why.entry.settled = True
        return found

    def _unfused(self, reason: str) -> Callable[..., Any]:
        note = f"at run time, not lowered: {reason}"
        if self.required:
            raise RequiredPatternError(f"a pattern is required, yet {note}\n{self.report}")
        self._note(note)
        return self.unfused()

    def _note(self, note: str) -> None:
        if note not in self.report.notes and len(self.report.notes) < NOTES:
            self.report.notes.append(note)


class Appending:
    """Inductor's compiled graph, called with the packed weights after its own inputs.

    A graph without packed weights is wrapped all the same: AOTAutograd caches what Inductor returns
    and skips our pass on a hit, though with other weights the same graph may well be lowered.
    """

    def __init__(self, compiled: Runner, packed: int) -> None:
        self.compiled, self.packed = compiled, packed
        self._boxed_call = True  # of the instance: `torch._dynamo.disable` copies only its dict

    def __call__(self, inputs: list[Any]) -> Any:
        if self.packed:
            inputs.extend(_handed.packed)
            _handed.packed = ()  # or it would outlive the model
        return self.compiled(inputs)
