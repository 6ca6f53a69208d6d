"""The choice of what runs which M: by measured times, by estimates, or by the providers' limits."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qinductor import tables
from qinductor.errors import Refused
from qinductor.op import (
    GRID,
    INFINITE,
    Op,
    Plan,
    Provider,
    limit_of,
    missing_of,
    nbytes,
    routes_of,
    single,
    split,
)
from qinductor.rates import Rates, evaluator, rates, roofline

# A route this much slower than the best at an M may run it, where that saves a packed tensor.
SLACK = 1.05


def planned(entry: Op, contract: Any, target: str, m: int | None, dense: bool) -> Plan:
    """As `Op.plan`; an equal question is answered once."""
    name = tables.device(target)
    table = None if name is None else tables.load(name, tables.own())
    return _planned(entry, tuple(entry.providers.values()), contract, target, m, dense, table)


def able(
    entry: Op, contract: Any, target: str, m: int | None, dense: bool = False
) -> tuple[dict[str, int], list[str]]:
    """({name: largest M} of the providers that can run this, the reasons of all others)."""
    limits: dict[str, int] = {}
    reasons: list[str] = []
    for name, provider in entry.providers.items():
        if not provider.runs_on(target) or (provider.dense and not dense):
            continue
        reason = missing_of(provider) or provider.why_not(contract)
        limit = limit_of(provider, contract, dense)
        if reason is None and m is not None and m > limit:
            reason = f"M is {m}; it takes up to {limit}"
        if reason is None:
            limits[name] = limit
        else:
            reasons.append(f"{name}: {reason}")
    return limits, reasons


@functools.lru_cache(4096)
def _planned(
    entry: Op,
    providers: tuple[Provider, ...],
    contract: Any,
    target: str,
    m: int | None,
    dense: bool,
    table: tables.Table | None,
) -> Plan:
    """The plan; what it depends on beside the first argument is among the others."""
    limits, reasons = able(entry, contract, target, m, dense)
    if all(entry.providers[name].reference for name in limits):
        raise Refused(
            f"no provider for {target} takes it: "
            + ("; ".join(reasons) or "only the reference is there, and Inductor is faster"),
            contract=contract.summary,
        )
    one, _ = single(contract)
    versions = {name: getattr(entry.providers[name], "version", 1) for name in limits}
    found = None if table is None else table.find(entry.name, contract, versions)
    if table is not None and found is None:  # each expert's product is that of one weight
        found = table.find(entry.name, one, versions)
    if target == "cpu" and found is None:
        return Plan(tuple(_by_limit(entry, contract, limits, m)), rung="limits")
    points = [*GRID, INFINITE] if m is None else [m]
    rows, measured = [], []
    for point in points:
        row = _measured(entry, contract, limits, point, found)
        measured += [_near(point)] if row else []
        rows.append(row or _estimated(entry, contract, target, limits, point))

    routes = choose(rows, lambda r: nbytes(entry.providers[split(r)[0]].operands(one)))
    limit = {route: limits[split(route)[0]] for route in routes}
    steps = tuple(ranges(points, routes, limit.__getitem__, entry.specification.name))
    rung = unmeasured = "limits" if target == "cpu" else "heuristic"
    if found is not None and measured:
        some = f" for M {min(measured)} to {max(measured)}, else {unmeasured}"
        rung = found.rung + some * (len(measured) < len(points))
    us = tuple(row[route] for row, route in zip(rows, routes, strict=True))
    return Plan(steps, rung=rung, us=() if target == "cpu" else us)


def _near(m: int) -> int:
    """The grid's M that stands for this one."""
    return next((p for p in GRID if math.isqrt(2 * p * p) >= m), GRID[-1])


def _measured(
    entry: Op, contract: Any, limits: Mapping[str, int], m: int, found: tables.Found | None
) -> dict[str, float]:
    """The times measured at m rows, or at twice or half as many, of the providers that there are
    and that take as many.

    A config that is none for this contract (the times may be of another N and K) gives way to the
    provider's own choice: without the provider, a far slower one would be the fastest."""
    times, near = {} if found is None else found.times, _near(m)
    near = next((p for p in (near, 2 * near, near // 2) if p in times), near)
    row = times.get(near, {})
    kept: dict[str, float] = {}
    for route, us in sorted(row.items(), key=lambda item: item[1]):
        name, _ = split(route)
        if name in limits and m <= limits[name] and not entry.providers[name].reference:
            routes = routes_of(entry.providers[name], contract, near)
            if route in routes:
                kept[route] = us
            elif all(split(other)[0] != name for other in row if other in routes):
                kept.setdefault(routes[0], us)
    return kept


def _estimated(
    entry: Op, contract: Any, target: str, limits: Mapping[str, int], m: int
) -> dict[str, float]:
    """Microseconds at m rows by the providers' own estimates; the reference's if it is the only
    one.

    On a CPU there are no rates: the provider of the smallest limit, which is the preferred one."""
    at, m = rates(target), min(m, GRID[-1])
    takes = {name: limit for name, limit in limits.items() if m <= limit}
    others = [name for name in takes if not entry.providers[name].reference]
    if at is None or not others:
        first = entry.providers[min(others or takes, key=takes.__getitem__)]
        return {routes_of(first, contract, m)[0]: 1.0}
    row = {}
    for name in others:
        route = routes_of(entry.providers[name], contract, m)[0]
        row[route] = 1e6 * estimate(entry, name, contract)(m * max(1, single(contract)[1]), at)
    return row


@functools.lru_cache(4096)
def estimate(entry: Op, name: str, contract: Any) -> Callable[[int, Rates], float]:
    """(M, rates) -> the seconds that a provider takes, as it says or by the roofline."""
    seconds = getattr(entry.providers[name], "seconds", None)
    return evaluator(roofline(entry.cost(contract)) if seconds is None else seconds(contract))


def _by_limit(
    entry: Op, contract: Any, limits: Mapping[str, int], m: int | None
) -> Iterator[tuple[int, str]]:
    """Steps by the M up to which each provider is best, whichever file registered first; the
    reference last."""
    after = 0
    order = [(limit, entry.providers[name], name) for name, limit in limits.items()]
    for limit, provider, _ in sorted(
        order, key=lambda o: (o[0], o[1].reference, not o[1].dense, o[2])
    ):
        if limit > after:
            yield from _configured(provider, contract, after, limit, m)
            after = INFINITE if m is not None else limit


def _configured(
    provider: Provider, contract: Any, after: int, limit: int, m: int | None
) -> Iterator[tuple[int, str]]:
    """Steps by a provider for after < M <= limit, or for this m, in the configs it chooses."""
    if m is not None:
        yield limit, routes_of(provider, contract, m)[0]
        return
    points = [p for p in GRID if after < p <= limit] or [min(limit, GRID[-1])]
    routes = [routes_of(provider, contract, p)[0] for p in points]
    for (point, route), (above, other) in itertools.pairwise(zip(points, routes, strict=True)):
        if route != other:
            yield math.isqrt(point * above), route
    yield limit, routes[-1]


def choose(
    times: Sequence[Mapping[str, float]], packs: Callable[[str], Mapping[str, int]]
) -> list[str]:
    """For each of several M, given as route -> time, the route that runs it.

    packs  route -> {packed tensor: bytes}
    None is slower than SLACK times the best of its M. Of what that leaves open: the fewest packed
    bytes, then the fewest packed tensors, then the fastest.
    """
    good = [{r: t for r, t in row.items() if t <= SLACK * min(row.values())} for row in times]
    needs = {route: packs(route) for row in good for route in row}
    sets = list(dict.fromkeys(frozenset(needs[route]) for row in good for route in row))
    sizes = {name: size for each in needs.values() for name, size in each.items()}
    open_to = [{frozenset(needs[route]) for route in row} for row in good]

    def kept(count: int) -> Iterator[tuple[int, int, frozenset[str]]]:
        for some in itertools.combinations(sets, count):
            names = frozenset().union(*some)
            if all(any(need <= names for need in row) for row in open_to):
                yield sum(sizes[name] for name in names), len(names), names

    best = min((each for n in range(1, len(sets) + 1) for each in kept(n)), key=lambda e: e[:2])
    return [min((t, r) for r, t in row.items() if best[2] >= set(needs[r]))[1] for row in good]


def ranges(
    points: Sequence[int], routes: Sequence[str], limit: Callable[[str], int], last: str
) -> Iterator[tuple[int, str]]:
    """(largest M, route), ascending: equal neighbours are one range, borders lie in the middle.

    limit  route -> the largest M that it takes
    last   the route to be put off for as long as the one before it takes an M
    """
    pairs = list(zip(points, routes, strict=True))
    for (m, route), (above, other) in itertools.pairwise(pairs):
        if route != other:
            put_off = other == last or above > 2 * m
            yield limit(route) if put_off else min(math.isqrt(m * above), limit(route)), route
    yield limit(pairs[-1][1]), pairs[-1][1]
