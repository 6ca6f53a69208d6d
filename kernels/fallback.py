"""What runs in place of a provider that turns out to be unable, where it is first called."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from qinductor.op import INFINITE, Op, Provider, Route, limit_of, missing_of

T = TypeVar("T")
_broken: set[tuple[str, str, Any]] = set()  # operator, provider, contract


@functools.cache
def target_of(device: torch.device) -> str:
    """ "cpu", or "sm_90" and the like."""
    if device.type != "cuda":
        return device.type
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def tried(entry: Op, provider: Provider, contract: Any, call: Callable[[], T]) -> T | None:
    """What `call` gives; None, after a warning, where the provider raised now or, for this
    contract, before: its compiler is missing or fails, say.

    Errors: those of the reference, of which there is no other, and torch's OutOfMemoryError."""
    key = entry.name, provider.name, contract
    if _broken and key in _broken:
        return None
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler raises
        if provider.reference:
            raise
        _broken.add(key)
        warn(provider.name, error)
        return None


def warn(name: str, error: Exception) -> None:
    """Says that a provider cannot run, and why."""
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    warnings.warn(f"qinductor: {name} cannot run: {what}; another runs instead", stacklevel=3)


def run(
    entry: Op, route: Route, contract: Any, inputs: Any, packed: Sequence[torch.Tensor]
) -> torch.Tensor:
    """What a route gives or, if it cannot, another provider of its packed tensors."""
    found = tried(entry, route.provider, contract, lambda: route.run(contract, inputs, packed))
    return other(entry, route.provider, contract, inputs, packed) if found is None else found


def other(
    entry: Op, provider: Provider, contract: Any, inputs: Any, packed: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The result by another provider of the same packed tensors; the reference last.

    This one is not tried again for this contract. Errors: RuntimeError where none takes them."""
    _broken.add((entry.name, provider.name, contract))  # or two would call each other
    device = packed[0].device
    names = list(provider.operands(contract))
    for another in others(entry, provider.name, contract, target_of(device)):
        needs = list(another.operands(contract))
        if set(needs) <= set(names):
            take = [packed[names.index(name)] for name in needs]
            found = tried(
                entry, another, contract, functools.partial(another.run, contract, inputs, take)
            )
            if found is not None:
                return found  # type: ignore[no-any-return]
    raise RuntimeError(
        f"{entry.name}: {provider.name} cannot run, and no other provider takes its packed "
        f"{', '.join(names)}; {contract.summary}"
    )


@functools.lru_cache(4096)
def others(entry: Op, name: str, contract: Any, target: str) -> tuple[Provider, ...]:
    """The other providers that take a contract on a target, the reference last."""
    able = [
        provider
        for provider in entry.providers.values()
        if provider.name != name
        and provider.runs_on(target)
        and not provider.dense
        and limit_of(provider, contract) == INFINITE  # M is not known here
        and missing_of(provider) is None
        and provider.why_not(contract) is None
    ]
    return tuple(sorted(able, key=lambda provider: provider.reference))
