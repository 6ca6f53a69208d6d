"""Operators and their providers: registration, and the choice of a provider by target and M."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import sympy
import torch

from qinductor.rates import M as M  # where kernels take it from

LIBRARY = torch.library.Library("qinductor", "DEF")
INFINITE = 1 << 62
Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a packed tensor
GRID = tuple(1 << i for i in range(14))  # the M at which providers are measured and compared
_ROUTE = re.compile(r"[^\s,:@]+(@[^\s,:@]+)?")


class Provider(Protocol):
    """One way to run an operator. Adding one means writing this in one file of `kernels/`.

    name       unique within its operator
    dense      whether its packed tensors hold the weight in its dense form: then it is chosen only
               where the user allows that, and the report says so
    reference  whether it is the specification itself: then it never justifies a rewrite

    It may also have:

    missing() -> str | None      what this machine lacks for it, hardware or software, in one
                                 sentence: the reason why it is passed over here, which
                                 `python -m qinductor doctor` prints too
    limit(contract, dense=False) -> int
                                 largest M that it takes, or up to which it is preferred over those
                                 that go further; `dense`: where a dense weight is allowed. Without
                                 this it takes every M
    seconds(contract) -> sympy expression in M, BANDWIDTH and RATE
                                 its own estimate of its time, where nothing was measured; without
                                 it, the roofline of the operator's cost
    version                      an integer; times measured with another one are ignored. 1 if
                                 there is none
    configs(contract, m) -> Sequence[str]
                                 what it can be told beside the contract (tile sizes, say), worth
                                 measuring at m rows, its own choice first; none where only `run`
                                 can choose, which then must not ask for `configs(...)[0]`. A text
                                 has no blank, comma, colon or @. The packed tensors are those of
                                 every config. `run` takes one more argument, `config`
    batched, grouped             `run` for all experts at once, of stacked packed tensors:
                                 `dequant_matmul_experts` and `scaled_matmul_experts` call them
    """

    name: str
    dense: bool
    reference: bool

    def runs_on(self, target: str) -> bool:
        """Whether this provider is for the target: "cpu", "sm_90", ..."""

    def why_not(self, contract: Any) -> str | None:
        """None, or one sentence with what the contract has and what this provider takes."""

    def operands(self, contract: Any) -> dict[str, Spec]:
        """Name, shape and dtype of each packed tensor that `run` takes, all contiguous, in order.

        A name means the same tensor for every provider of the operator."""

    def pack(self, contract: Any, source: Any) -> dict[str, torch.Tensor]:
        """The packed tensors, from what the pattern proved."""

    @property
    def run(self) -> Callable[..., Any]:
        """(contract, x [M, K], packed) -> the result, for 1 <= M <= limit; x is a sequence where
        the operator has several activations. Without a config, or where `configs` has none, it
        chooses."""


@dataclasses.dataclass(eq=False)
class Op:
    """An operator: its name, its contract, its reference, what it costs, who can run it.

    reference    plain torch, the specification
    cost         contract -> {"bytes", "flops"} as sympy expressions in M
    weight       contract -> (operator that makes the weight from the packed tensors of a form,
                 contract of the weight alone; it takes this and the tensors' names, too); None
                 where there is no weight
    providers    by name
    forms        which hold all that a pattern proved: `whole(contract, packed)` gives that back.
                 The reference, and what else is kept in its place where that takes less memory; as
                 a provider, but for `run`
    """

    name: str
    contract: type
    reference: Callable[..., Any]
    cost: Callable[[Any], dict[str, sympy.Expr]]
    weight: Callable[[Any], tuple[str, Any]] | None = None
    providers: dict[str, Provider] = dataclasses.field(default_factory=dict)
    forms: list[Any] = dataclasses.field(default_factory=list)

    def register(self, provider: Provider) -> None:
        """Adds a provider; ValueError if its name is taken."""
        if provider.name in self.providers:
            raise ValueError(f"{self.name} has a provider {provider.name!r} already")
        self.providers[provider.name] = provider
        self.forms += [provider] * provider.reference

    def form(self, contract: Any, names: Set[str]) -> Any:
        """The form that has the fewest bytes beside packed tensors of these names."""
        one, _ = single(contract)
        sizes = {form: nbytes(form.operands(one)) for form in self.forms if not form.why_not(one)}
        return min(sizes, key=lambda form: sum(sizes[form][n] for n in sizes[form].keys() - names))

    def restored(self, contract: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """What the pattern proved, bit for bit, from packed tensors that hold those of a form; one
        for each expert, if there are any."""
        one, experts = single(contract)
        form = self.form(contract, tensors.keys())
        packed = [tensors[name] for name in form.operands(one)]
        parts = [[t[i] for t in packed] for i in range(experts)] if experts else [packed]
        return tuple(form.whole(one, part) for part in parts)

    @property
    def specification(self) -> Any:
        """The provider that runs the reference."""
        return next(provider for provider in self.providers.values() if provider.reference)

    def plan(self, contract: Any, target: str, m: int | None, dense: bool = False) -> "Plan":
        """What runs every M, or this one. Refused with every provider's reason.

        By measured times where a table of the present device has some, else by the providers'
        limits on a CPU and by estimated times on a GPU.
        """
        from qinductor.dispatch import planned  # which imports this file

        return planned(self, contract, target, m, dense)


class Specification:
    """What the providers that run an operator's reference share: slow, never wrong."""

    name = "reference"
    dense = False
    reference = True

    def runs_on(self, target: str) -> bool:
        return True

    def why_not(self, contract: Any) -> str | None:
        return None


def split(route: str) -> tuple[str, str | None]:
    """(name of the provider, config or None) of a route, `name` or `name@config`."""
    name, _, config = route.partition("@")
    return name, config or None


def limit_of(provider: Provider, contract: Any, dense: bool = False) -> int:
    """Largest M that a provider takes."""
    found: Callable[..., int] | None = getattr(provider, "limit", None)
    return INFINITE if found is None else found(contract, dense)


def missing_of(provider: Provider) -> str | None:
    """What this machine lacks for a provider, in one sentence; None if nothing."""
    found: Callable[[], str | None] | None = getattr(provider, "missing", None)
    return None if found is None else found()


def routes_of(provider: Provider, contract: Any, m: int) -> Sequence[str]:
    """The routes by which a provider runs m rows, its own choice first."""
    found: Callable[..., Sequence[str]] | None = getattr(provider, "configs", None)
    if found is None:
        return (provider.name,)
    return [f"{provider.name}@{config}" for config in found(contract, m)] or (provider.name,)


def single(contract: Any) -> tuple[Any, int]:
    """(the contract of one weight, how many weights the contract stacks or 0 if it is one)."""
    experts = getattr(contract, "experts", 0)
    return (dataclasses.replace(contract, experts=0), experts) if experts else (contract, 0)


def stacked(contract: Any, providers: Sequence[Provider]) -> dict[str, Spec]:
    """What providers pack, for every expert if there are any: [experts, ...]."""
    one, experts = single(contract)
    found = {}
    for provider in providers:
        for name, (shape, dtype) in provider.operands(one).items():
            found[name] = (experts, *shape) if experts else shape, dtype
    return found


def nbytes(specs: Mapping[str, Spec]) -> dict[str, int]:
    """Bytes of tensors, by name."""
    return {n: math.prod(shape) * dtype.itemsize for n, (shape, dtype) in specs.items()}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs which M: (largest M, route), ascending; a route is `provider` or `provider@config`.

    whole  whether all is packed from which the weight can be restored
    rung   what it was chosen by: "tuned here", "tuned for <device>", "heuristic", "limits"
    us     microseconds that it is expected to take at this M, or at each of GRID and beyond; empty
           where nothing is known
    """

    steps: tuple[tuple[int, str], ...]
    whole: bool = False
    rung: str = dataclasses.field(default="", compare=False)
    us: tuple[float, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        for _, route in self.steps:
            if _ROUTE.fullmatch(route) is None:
                raise ValueError(f"no route: {route!r}; wanted `provider` or `provider@config`")

    def __str__(self) -> str:
        return ",".join(f"{limit}:{route}" for limit, route in self.steps)

    @staticmethod
    def parse(text: str) -> "Plan":
        """The plan that `str` wrote."""
        steps = (step.split(":") for step in text.split(","))
        return Plan(tuple((int(limit), route) for limit, route in steps))

    @property
    def summary(self) -> str:
        """The plan as the report prints it."""
        words, below = [], ""
        for limit, route in self.steps:
            words.append(route + (below if limit >= INFINITE else f" (M <= {limit})"))
            below = f" (M > {limit})"
        return ", ".join(words)

    def providers(self, entry: Op) -> list[Provider]:
        """The providers that the plan has, each once, in the order of its steps."""
        return [entry.providers[name] for name in dict.fromkeys(split(r)[0] for _, r in self.steps)]

    def operands(self, entry: Op, contract: Any) -> dict[str, Spec]:
        """All packed tensors that the plan's providers take, each once; for experts stacked."""
        return stacked(contract, self.providers(entry))

    def packs(self, entry: Op, contract: Any) -> dict[str, Spec]:
        """All packed tensors that are kept."""
        return stacked(contract, self._packers(entry, contract))

    def _packers(self, entry: Op, contract: Any) -> list[Any]:
        """The providers, and the form of which they lack something if the weight is restored."""
        found, names = self.providers(entry), self.operands(entry, contract)
        form = entry.form(contract, names.keys())
        has_all = names.keys() >= form.operands(single(contract)[0]).keys()
        return found if has_all or not self.whole else [*found, form]

    def pack(self, entry: Op, contract: Any, source: Any) -> dict[str, torch.Tensor]:
        """All packed tensors; `source` is a sequence of one for each expert where there are any.

        Errors: RuntimeError if a provider packs something else than it declares, ValueError for
        another number of experts than the contract has."""
        one, experts = single(contract)
        found: dict[str, torch.Tensor] = {}
        if experts and len(source) != experts:
            raise ValueError(f"{entry.name} has {experts} experts; got {len(source)} weights")
        for i, part in enumerate(source if experts else [source]):
            for provider in self._packers(entry, contract):
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

    def routes(self, entry: Op, contract: Any) -> "tuple[Route, ...]":
        """What to call for each range of M, ascending; for experts that of one expert, and `run`
        takes the contract of one."""
        contract, _ = single(contract)
        place = {name: i for i, name in enumerate(self.operands(entry, contract))}
        found = []
        for limit, route in self.steps:
            name, config = split(route)
            provider = entry.providers[name]
            take = tuple(place[operand] for operand in provider.operands(contract))
            found.append(Route(limit, take, provider, config))
        return tuple(found)


class Route(NamedTuple):
    """One step of a plan, ready to be called.

    limit  the largest M
    take   which of the plan's packed tensors it takes
    """

    limit: int
    take: tuple[int, ...]
    provider: Provider
    config: str | None

    def run(self, contract: Any, x: Any, packed: Sequence[torch.Tensor]) -> Any:
        """The result; takes the contract of one weight and the packed tensors in `take`."""
        if self.config is None:
            return self.provider.run(contract, x, packed)
        return self.provider.run(contract, x, packed, config=self.config)


OPS: dict[str, Op] = {}


def op(entry: Op) -> Op:
    """Adds an operator to the registry; its functional schema is defined by its kernel family."""
    if OPS.setdefault(entry.name, entry) is not entry:
        raise ValueError(f"operator {entry.name!r} is registered already")
    return entry
