"""Measured times: what each route took, by device, contract and M; shipped ones and the user's.

A file is one device's: {"device": name, "entries": {key: {"versions": {...}, "us": {M: {route:
microseconds}}}}}, where a key is "<operator> <N>x<K> <family>". `python -m qinductor tune` writes
them. A route of a provider whose `version` is not the recorded one is ignored.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import platform
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

SHIPPED = pathlib.Path(__file__).parent / "kernels" / "tuned"
LAUNCH = 2.0  # microseconds of a time that are about the same for a weight of any size
NEAR = 2.0  # doublings of N, and of K, within which one weight's times stand for another's
Times = dict[int, dict[str, float]]  # M -> route -> microseconds

_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """The times of one operator, family of contracts, N and K; `own`: measured by the user."""

    op: str
    family: str
    n: int
    k: int
    versions: dict[str, Any]
    times: Times
    own: bool


class Found(NamedTuple):
    """What a look-up gives: times by M, and the rung of the ladder in words."""

    times: Times
    rung: str


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What is known of a device; the user's entries come first."""

    name: str
    entries: tuple[Entry, ...]

    def find(self, op: str, contract: Any, versions: Mapping[str, Any]) -> Found | None:
        """The times that stand for a contract: its own, else those of the nearest N and K
        in its family, else of the nearest in a family of the same kin.

        versions  of the providers that are able; routes of others are left out
        """
        words, n, k = family(contract)
        ranked = []
        for place, entry in enumerate(self.entries):
            away = [abs(math.log2(a / b)) for a, b in ((n, entry.n), (k, entry.k)) if a and b]
            near = (
                entry.op == op
                and max(away, default=9) <= NEAR
                and _kin(entry.family) == _kin(words)
            )
            if near and (rows := _usable(entry, versions)):
                other = len(set(entry.family.split()) ^ set(words.split()))
                ranked.append(((other, sum(away)), place, entry, rows))
        if not ranked:
            return None
        ranked.sort(key=lambda item: item[:2])
        (other, distance), _, best, _ = ranked[0]
        times: Times = {}
        for rank, _, _, rows in reversed(ranked):  # the user's rows over those we ship
            if rank == ranked[0][0]:
                times.update(rows)
        rung = "tuned here" if best.own else f"tuned for {self.name}"
        if other or distance:
            rung += f", nearest {best.n}x{best.k}" + (f" of {_called(best)}" if other else "")
        size = n * k / (best.n * best.k)
        for m, row in times.items():
            times[m] = {r: us * (LAUNCH + us * size) / (LAUNCH + us) for r, us in row.items()}
        return Found(times, rung)


def device(target: str) -> str | None:
    """The name of the device of this target that is present; None if none is."""
    if target == "cpu":
        count = torch.get_num_threads()
        return f"{cpu_name()}, {count} thread{'s' * (count != 1)}"
    if not target.startswith("sm_") or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name() if target == f"sm_{major}{minor}" else None


@functools.cache
def cpu_name() -> str:
    """The CPU's model where the system tells it."""
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text())
        if match is not None:
            return match[1].strip()
    return platform.processor() or platform.machine()


def root() -> pathlib.Path:
    """The folder of all that is kept on disk."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("QINDUCTOR_CACHE") or pathlib.Path(cache, "qinductor"))


def own() -> pathlib.Path:
    """The folder of the user's tables."""
    return root() / "tuned"


def file_of(name: str) -> str:
    """The file that holds the times of a device."""
    return re.sub(r"[^\w.-]+", "_", name).strip("_") + ".json"


def family(contract: Any) -> tuple[str, int, int]:
    """(the contract in words without N and K, N, K).

    Blocks as long as N or K are "N" or "K" in it. A bias or a scale of the product, [N], is left
    out: it moves no more than one row of the result, and who cannot add it says so in `why_not`.
    """
    words = dict(word.split("=", 1) for word in str(contract).split(" "))
    n = words.pop("weight.n", "1")  # of a quantiser, whose K is its own
    k = words.pop("weight.k", None) or words.pop("k")
    for name, size, letter in (("weight.bn", n, "N"), ("weight.bk", k, "K"), ("group", k, "K")):
        if words.get(name) == size:
            words[name] = letter
    for name in ("bias", "output_scale", "powers"):
        words.pop(name, None)
    return " ".join("=".join(pair) for pair in words.items()), int(n), int(k)


def key(op: str, contract: Any) -> str:
    """The name of an entry."""
    text, n, k = family(contract)
    return f"{op} {n}x{k} {text}"


@functools.lru_cache(64)
def load(name: str, folder: pathlib.Path) -> Table:
    """All entries of a device: those in `folder`, which are the user's, then those we ship."""
    found: list[Entry] = []
    for path, mine in ((folder / file_of(name), True), (SHIPPED / file_of(name), False)):
        for text, entry in read(path).items():
            op, size, words = text.split(" ", 2)
            n, k = map(int, size.split("x"))
            found.append(Entry(op, words, n, k, entry["versions"], _times(entry["us"]), mine))
    return Table(name, tuple(found))


def read(path: pathlib.Path) -> dict[str, Any]:
    """The entries of a file, checked; none, and said so, where it cannot be read."""
    try:
        entries: dict[str, Any] = json.loads(path.read_text())["entries"]
        for text, entry in entries.items():
            known = re.fullmatch(r"\S+ [1-9]\d*x[1-9]\d*( [^\s=]+=\S+)+", text)
            if known is None or not isinstance(entry["versions"], dict):
                raise ValueError(f"no entry: {text!r}")
            _times(entry["us"])
        return entries
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        _ignored(path, f"{type(error).__name__}: {error}")
        return {}


@functools.cache
def _ignored(path: pathlib.Path, problem: str) -> None:
    """Says once what is wrong with a file."""
    _log.warning("ignored %s, which is no table of times: %s", path, problem)


def _times(us: Any) -> Times:
    times = {int(m): {str(r): float(t) for r, t in row.items()} for m, row in us.items()}
    if not all(t > 0 and math.isfinite(t) for row in times.values() for t in row.values()):
        raise ValueError("a time is not above 0")
    return times


def _called(entry: Entry) -> str:
    words = dict(word.split("=", 1) for word in entry.family.split(" "))
    return " ".join(words.get(f"weight.{name}", "?") for name in ("codes", "arithmetic", "bk"))


def _usable(entry: Entry, versions: Mapping[str, Any]) -> Times:
    """The times of the routes whose provider is there, in the version that was measured."""
    known = {name for name, version in versions.items() if entry.versions.get(name, 1) == version}
    kept = {
        m: {route: us for route, us in row.items() if route.partition("@")[0] in known}
        for m, row in entry.times.items()
    }
    return {m: row for m, row in kept.items() if row}


@functools.lru_cache(4096)
def _kin(words: str) -> tuple[str | None, ...]:
    """What families of one kin have in common: bits and kind of W's codes, dtype of x or of the
    codes of a, what shares a scale there, experts."""
    held = dict(word.split("=", 1) for word in words.split(" "))
    codes = held.get("weight.codes", "")
    for pattern, kind in ((r"u?int", "int"), (r"float4.*", "table4"), (r"float8.*", "float8")):
        codes = re.sub(f"^{pattern}", kind, codes)
    block = held.get("weight.bn") if "a" in held else None
    return codes, held.get("x"), held.get("a"), held.get("group"), block, held.get("experts")
