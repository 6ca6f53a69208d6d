"""What a compile leaves behind: a graph's compiled variants, and the choice of one at every call.

Layers of one class share a graph, yet their weights may have different contracts. A call runs the
variant that fits its weights; where none does, one more is compiled, up to `VARIANTS` in all.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock

from qinductor.errors import QinductorError, RequiredPatternError
from qinductor.freed import check
from qinductor.regions import Leaf
from qinductor.report import Report
from qinductor.weights import Resolver, Unfit, replace

Runner = Callable[[list[Any]], Any]
Choice = tuple[Callable[..., Any], list[torch.Tensor]]  # what runs a call, its packed weights
VARIANTS = 4  # compiles of one graph, those that lowered nothing included
NOTES = 32  # of what happened at run time that a report keeps

_handed = threading.local()  # from `Compiled` to `Appending`, within one call


@dataclasses.dataclass(eq=False)
class Variant:
    """One compiled form of a graph.

    frees  leaves whose memory is given back once they are packed
    holds  arguments -> whether what its compile assumed of their sizes beyond Dynamo's guards holds
    """

    compiled: Callable[..., Any]
    resolver: Resolver
    frees: Sequence[Leaf]
    holds: Callable[[Sequence[Any]], bool] = lambda arguments: True


@dataclasses.dataclass(eq=False)
class Compiled:
    """A graph's variants, those that lower most first; weights that fit none run unfused.

    another   arguments, reason -> a variant for these weights, or None if it would lower nothing;
              its decisions are in the report by then
    unfused   () -> the original graph on stock Inductor, which is right for every weight
    required  whether a weight that fits no variant is an error
    names     what the user calls each argument
    compiles  of the graph, those that lowered nothing included
    """

    variants: list[Variant]
    another: Callable[[Sequence[Any], str], Variant | None]
    unfused: Callable[[], Callable[..., Any]]
    report: Report
    required: bool
    names: Sequence[str]
    compiles: int = 1

    def __call__(self, *arguments: Any) -> Any:
        return self.called(self.choose(arguments), arguments)

    def called(self, choice: Choice, arguments: Sequence[Any]) -> Any:
        """Runs what was chosen."""
        compiled, _handed.packed = choice
        return compiled(*arguments)

    def choose(self, arguments: Sequence[Any]) -> Choice:
        """What runs a call, and its packed weights; packs and compiles what is wanted for it."""
        variants = self.variants
        for variant in variants:
            if variant.holds(arguments):
                packed = variant.resolver(arguments, packs=False)
                if packed is not None:
                    return variant.compiled, packed
        found, unfit = self._fitting(arguments)
        # A variant passed over for its sizes would be compiled again as it was.
        odd = not all(variant.holds(arguments) for variant in variants)
        if found is None and not odd and not any(why.entry.settled for why in unfit):
            with compile_lock:
                if self.variants is not variants:  # another thread may have compiled it
                    found, unfit = self._fitting(arguments)
                if found is None:
                    found = self._another(arguments, unfit)
        return found or (self._unfused(arguments, unfit[0].reason), [])

    def _fitting(self, arguments: Sequence[Any]) -> tuple[Choice | None, list[Unfit]]:
        """(the first variant that takes these weights, with them packed; why others did not)."""
        unfit: list[Unfit] = []
        for variant in self.variants:
            try:
                packed = variant.resolver(arguments) if variant.holds(arguments) else None
            except Unfit as why:
                unfit.append(why.with_traceback(None))  # whose frames would hold the arguments
                continue
            if packed is not None:
                self._free(variant, arguments)
                return (variant.compiled, packed), unfit
        return None, unfit

    def _another(self, arguments: Sequence[Any], unfit: Sequence[Unfit]) -> Choice | None:
        found = None
        try:
            variant = None
            if self.compiles < VARIANTS:
                self.compiles += 1
                variant = self.another(arguments, unfit[0].reason)
            else:
                self._note(f"{VARIANTS} variants of a graph are compiled at most")
            if variant is not None:
                variants = [*self.variants, variant]
                self.variants = sorted(variants, key=lambda v: -len(v.resolver.slots))
                found, unfit = self._fitting(arguments)
        except QinductorError:  # required, or freed
            raise
        except Exception as error:  # the model ran until now, and goes on
            self._note(f"compiling a variant stopped: {type(error).__name__}: {error}")
        finally:
            for why in unfit:
                why.entry.settled = why.entry.settled or found is None
        return found

    def _free(self, variant: Variant, arguments: Sequence[Any]) -> None:
        if variant.frees:
            with compile_lock:  # no compile reads them meanwhile
                size, stay = replace(variant.frees, arguments)
            self.report.freed_bytes += size
            for leaf, why in stay:
                self._note(f"{self.names[leaf.index]} stays in memory: {why}")

    def _unfused(self, arguments: Sequence[Any], reason: str) -> Callable[..., Any]:
        note = f"at run time, not lowered: {reason}"
        if self.required:
            raise RequiredPatternError(f"a pattern is required, yet {note}\n{self.report}")
        check(arguments, "the original graph has to run")
        self._note(note)
        return self.unfused()

    def _note(self, note: str) -> None:
        if note not in self.report.notes and len(self.report.notes) < NOTES:
            self.report.notes.append(note)


class Appending:
    """Inductor's compiled graph, called with the packed weights after its own inputs.

    Inputs that it does not read (`unread`, which may be freed) are left out.

    A graph without packed weights is wrapped all the same: AOTAutograd caches what Inductor returns
    and skips our pass on a hit, though with other weights the same graph may well be lowered.
    """

    def __init__(self, compiled: Runner, packed: int, unread: Sequence[int] = ()) -> None:
        self.compiled, self.packed = compiled, packed
        self.unread = sorted(unread, reverse=True)
        self._boxed_call = True  # of the instance: `torch._dynamo.disable` copies only its dict

    def __call__(self, inputs: list[Any]) -> Any:
        for i in self.unread:
            del inputs[i]
        if self.packed:
            inputs.extend(_handed.packed)
            _handed.packed = ()  # or it would outlive the model
        return self.compiled(inputs)
