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
Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a packed tensor


class Provider(Protocol):
    """One way to run an operator. Adding one means writing this in one file of `kernels/`.

    name       unique within its operator
    dense      whether its packed tensors hold the weight in its dense form: then it is chosen only
               where the user allows that, and the report says so
    reference  whether it is the specification itself: then it never justifies a rewrite

    It may also have `missing() -> str | None`: what this machine lacks for it, hardware or
    software, in one sentence; `python -m qinductor doctor` prints that.
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

    def operands(self, contract: Any) -> dict[str, Spec]:
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
    weight       contract -> (operator that makes the weight from the reference's packed tensors,
                 contract of the weight alone, which it takes)
    providers    by name
    """

    name: str
    contract: type
    reference: Callable[..., torch.Tensor]
    cost: Callable[[Any], dict[str, sympy.Expr]]
    weight: Callable[[Any], tuple[str, Any]]
    providers: dict[str, Provider] = dataclasses.field(default_factory=dict)

    def register(self, provider: Provider) -> None:
        """Adds a provider; ValueError if its name is taken."""
        if provider.name in self.providers:
            raise ValueError(f"{self.name} has a provider {provider.name!r} already")
        self.providers[provider.name] = provider

    def operands(self, contract: Any) -> dict[str, Spec]:
        """The packed tensors of the reference, from which `restored` makes what was packed."""
        return _stacked(contract, [self.specification])

    def restored(self, contract: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """What the pattern proved, bit for bit, from packed tensors that hold the reference's; one
        for each expert, if there are any."""
        one, experts = single(contract)
        packed = [tensors[name] for name in self.operands(contract)]
        parts = [[t[i] for t in packed] for i in range(experts)] if experts else [packed]
        return tuple(self.specification.whole(one, part) for part in parts)

    @property
    def specification(self) -> Any:
        """The provider that runs the reference."""
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


def single(contract: Any) -> tuple[Any, int]:
    """(the contract of one weight, how many weights the contract stacks or 0 if it is one)."""
    experts = getattr(contract, "experts", 0)
    return (dataclasses.replace(contract, experts=0), experts) if experts else (contract, 0)


def _stacked(contract: Any, providers: Sequence[Provider]) -> dict[str, Spec]:
    """What providers pack, for every expert if there are any: [experts, ...]."""
    one, experts = single(contract)
    found = {}
    for provider in providers:
        for name, (shape, dtype) in provider.operands(one).items():
            found[name] = (experts, *shape) if experts else shape, dtype
    return found


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
        words, below = [], ""
        for limit, name in self.steps:
            words.append(name + (below if limit >= INFINITE else f" (M <= {limit})"))
            below = f" (M > {limit})"
        return ", ".join(words)

    def operands(self, entry: Op, contract: Any) -> dict[str, Spec]:
        """All packed tensors that the plan's providers take, each once; for experts stacked."""
        return _stacked(contract, [entry.providers[name] for _, name in self.steps])

    def packs(self, entry: Op, contract: Any) -> dict[str, Spec]:
        """All packed tensors that are kept."""
        kept = entry.operands(contract) if self.whole else {}
        return {**self.operands(entry, contract), **kept}

    def pack(self, entry: Op, contract: Any, source: Any) -> dict[str, torch.Tensor]:
        """All packed tensors; `source` is a sequence of one for each expert where there are any.

        Errors: RuntimeError if a provider packs something else than it declares, ValueError for
        another number of experts than the contract has."""
        one, experts = single(contract)
        found: dict[str, torch.Tensor] = {}
        if experts and len(source) != experts:
            raise ValueError(f"{entry.name} has {experts} experts; got {len(source)} weights")
        providers = [entry.providers[provider] for _, provider in self.steps]
        providers += [entry.specification] if self.whole else []
        for i, part in enumerate(source if experts else [source]):
            for provider in providers:
                for name, tensor in provider.pack(one, part).items():
                    if not experts:
                        found[name] = tensor
                    else:  # one expert is packed at a time: memory holds no second copy
                        whole = found.get(name)
                        if whole is None:
                            whole = found[name] = tensor.new_empty((experts, *tensor.shape))
                        whole[i] = tensor
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
        """(largest M, provider, which of the packed tensors it takes), ascending; for experts of
        one expert, and `run` takes the contract of one."""
        contract, _ = single(contract)
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
