"""Operators and their providers: registration, and the choice of a provider by target and M."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import sympy
import torch

from qinductor.errors import Refused

M = sympy.Symbol("M", integer=True, nonnegative=True)
LIBRARY = torch.library.Library("qinductor", "DEF")
INFINITE = 1 << 62


class Provider(Protocol):
    """One way to run an operator. Adding one means writing this in one file of `kernels/`.

    name       unique within its operator
    dense      whether its packed tensors hold the weight in its dense form: then it is chosen only
               where the user allows that, and the report says so
    reference  whether it is the specification itself: then it never justifies a rewrite
    """

    name: str
    dense: bool
    reference: bool

    def runs_on(self, target: str) -> bool:
        """Whether this provider is for the target: "cpu", "sm_90", ..."""

    def why_not(self, contract: Any) -> str | None:
        """None, or one sentence with what the contract has and what this provider takes."""

    def limit(self, contract: Any, dense: bool = False) -> int:
        """Largest M up to which measurement prefers this provider over those that go further;
        `dense`: where a dense weight is allowed."""

    def operands(self, contract: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of each packed tensor that `run` takes, all contiguous, in order.

        A name means the same tensor for every provider of the operator."""

    def pack(self, contract: Any, source: Any) -> dict[str, torch.Tensor]:
        """The packed tensors, from what the pattern proved.

        That of the reference holds all of it: its `whole(contract, packed)` gives `source` back."""

    def run(self, contract: Any, x: torch.Tensor, packed: Sequence[torch.Tensor]) -> torch.Tensor:
        """The operator itself, on x of shape [M, K] with 1 <= M <= limit."""


@dataclasses.dataclass(eq=False)
class Op:
    """An operator: its name, its contract, its reference, what it costs, who can run it.

    reference    plain torch, the specification
    cost         contract -> {"bytes", "flops"} as sympy expressions in M
    providers    by name
    """

    name: str
    contract: type
    reference: Callable[..., torch.Tensor]
    cost: Callable[[Any], dict[str, sympy.Expr]]
    providers: dict[str, Provider] = dataclasses.field(default_factory=dict)

    def register(self, provider: Provider) -> None:
        """Adds a provider; ValueError if its name is taken."""
        if provider.name in self.providers:
            raise ValueError(f"{self.name} has a provider {provider.name!r} already")
        self.providers[provider.name] = provider

    def operands(self, contract: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The packed tensors of the reference, from which `restored` makes what was packed."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]]
        found = self._specification.operands(contract)
        return found

    def restored(self, contract: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        """What the pattern proved, bit for bit, from packed tensors that hold the reference's."""
        names = self.operands(contract)
        return self._specification.whole(contract, [tensors[name] for name in names])

    @property
    def _specification(self) -> Any:
        return next(provider for provider in self.providers.values() if provider.reference)

    def plan(self, contract: Any, target: str, m: int | None, dense: bool = False) -> "Plan":
        """The providers for every M, or for this one. Refused with every provider's reason."""
        reasons: list[str] = []
        able: list[tuple[int, bool, bool, str]] = []
        for name, provider in self.providers.items():
            if not provider.runs_on(target) or (provider.dense and not dense):
                continue
            reason = provider.why_not(contract)
            limit = provider.limit(contract, dense)
            if reason is None and m is not None and m > limit:
                reason = f"M is {m}; it takes up to {limit}"
            if reason is None:
                able.append((limit, provider.reference, not provider.dense, name))
            else:
                reasons.append(f"{name}: {reason}")
        # By the M up to which each is best, whichever file registered first; the reference last.
        steps: list[tuple[int, str]] = []
        for limit, _, _, name in sorted(able):
            if not steps or (m is None and limit > steps[-1][0]):
                steps.append((limit, name))
        if all(self.providers[name].reference for _, name in steps):
            raise Refused(
                f"no provider for {target} takes it: "
                + ("; ".join(reasons) or "only the reference is there, and Inductor is faster"),
                contract=contract.summary,
            )
        return Plan(tuple(steps))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which provider runs which M: (largest M, provider name), ascending.

    whole  whether the reference's tensors are packed as well, so that the weight can be restored
    """

    steps: tuple[tuple[int, str], ...]
    whole: bool = False

    def __str__(self) -> str:
        return ",".join(f"{limit}:{name}" for limit, name in self.steps)

    @staticmethod
    def parse(text: str) -> "Plan":
        """The plan that `str` wrote."""
        steps = (step.split(":") for step in text.split(","))
        return Plan(tuple((int(limit), name) for limit, name in steps))

    @property
    def summary(self) -> str:
        """The plan as the report prints it."""
        return ", ".join(
            name
            if limit >= INFINITE and len(self.steps) == 1
            else f"{name} (M > {self.steps[i - 1][0]})"
            if limit >= INFINITE
            else f"{name} (M <= {limit})"
            for i, (limit, name) in enumerate(self.steps)
        )

    def operands(self, entry: Op, contract: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """All packed tensors that the plan's providers take, each once."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for _, name in self.steps:
            found.update(entry.providers[name].operands(contract))
        return found

    def packs(self, entry: Op, contract: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """All packed tensors that are kept."""
        kept = entry.operands(contract) if self.whole else {}
        return {**self.operands(entry, contract), **kept}

    def pack(self, entry: Op, contract: Any, source: Any) -> dict[str, torch.Tensor]:
        """All packed tensors; RuntimeError if a provider packs something else than it declares."""
        found: dict[str, torch.Tensor] = {}
        for _, name in self.steps:
            found.update(entry.providers[name].pack(contract, source))
        if self.whole:
            found.update(entry._specification.pack(contract, source))
        for name, (shape, dtype) in self.packs(entry, contract).items():
            got = found[name]
            fits = tuple(got.shape) == shape and got.dtype == dtype and got.is_contiguous()
            if not fits or got.is_meta:  # meta: made from a tensor that was freed
                raise RuntimeError(
                    f"packed tensor {name!r} of {entry.name} must be a contiguous {dtype}"
                    f"{list(shape)}; got {got.dtype}{list(got.shape)}, strides {got.stride()}, "
                    f"on {got.device}"
                )
        return found

    def routes(self, entry: Op, contract: Any) -> tuple[tuple[int, Provider, tuple[int, ...]], ...]:
        """(largest M, provider, which of the packed tensors it takes), ascending."""
        place = {name: i for i, name in enumerate(self.operands(entry, contract))}
        found = []
        for limit, name in self.steps:
            provider = entry.providers[name]
            found.append((limit, provider, tuple(place[n] for n in provider.operands(contract))))
        return tuple(found)


OPS: dict[str, Op] = {}


def op(entry: Op) -> Op:
    """Adds an operator to the registry; its functional schema is defined by its kernel family."""
    if OPS.setdefault(entry.name, entry) is not entry:
        raise ValueError(f"operator {entry.name!r} is registered already")
    return entry


def costs(entry: Op, contract: Any) -> Mapping[str, str]:
    """The cost of one call, printed as expressions in M."""
    return {name: str(value) for name, value in entry.cost(contract).items()}
