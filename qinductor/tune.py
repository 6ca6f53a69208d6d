"""`python -m qinductor tune`: measures the providers on this device and keeps the times."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

import qinductor
from qinductor import tables, timing
from qinductor.dispatch import able
from qinductor.errors import QinductorError, Refused
from qinductor.formats import Contract, contract_of, op_of, rows_of, shape_of
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, ScaledMatmul
from qinductor.op import GRID, OPS, Op, Plan, routes_of, single
from qinductor.trial import Weight, blank, spread, weight_of

SHAPES = "4096x4096,28672x4096,4096x14336"
FORMATS = "int4-g128"
MANY = 1 << 30
HOPELESS = 1.25  # times its provider's best: a config so slow is not tried at larger M

Timer = Callable[[Sequence[timing.Call], str], float]
Factory = Callable[[str], tuple[Any, tuple[Any, ...], dict[str, Any]]]


def main(arguments: list[str], made: Factory) -> int:
    """Tunes what the arguments name; 0, 1 if a result was wrong, 130 if interrupted.

    made  what loads FILE.py:FACTORY
    Errors: QinductorError for bad input, or if the table cannot be written."""
    given = _parser().parse_args(arguments)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    out = pathlib.Path(given.out) if given.out else tables.own()
    tuner = Tuner(device, out, most=most_of(given.configs))
    if given.factory:
        contracts = found_in(OPS[given.op], *made(given.factory))
    else:
        sizes = [shape_of(word) for word in given.shapes.split(",")]
        words = given.formats.split(",")
        contracts = [plain(contract_of(word, n, k)) for word in words for n, k in sizes]
    rows = rows_of(given.m) if given.m else list(GRID)
    if wrong := [m for m in rows if m not in GRID]:
        raise QinductorError(f"the dispatcher knows M of {list(GRID)}; got {wrong}")
    print(f"{len(contracts)} weights on {tuner.name}; the times go to {tuner.path}")
    try:
        if given.jobs:
            tuner.prepare(contracts, rows, given.jobs)
        stop = float("inf") if given.budget is None else time.monotonic() + given.budget
        with _progress(len(contracts) * len(rows)) as said:
            done = all(tuner.tune(each, rows, stop, given.again, said) for each in contracts)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {tuner.kept} rows were measured and kept in {tuner.path}")
        return 130
    except OSError as error:
        raise QinductorError(f"cannot write {tuner.path}: {error}") from error
    if not done:
        print("the budget is used up: the same command goes on from here")
    for text in tuner.wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    print(f"{tuner.kept} rows were measured and kept in {tuner.path}")
    return 1 if tuner.wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qinductor tune", description=__doc__)
    parser.add_argument(
        "factory", nargs="?", metavar="FILE.py:FACTORY",
        help="a function that returns (module, args, kwargs): tunes the weights found in it",
    )  # fmt: skip
    parser.add_argument(
        "--op", default=DEQUANT_MATMUL.name, choices=[DEQUANT_MATMUL.name, SCALED_MATMUL.name],
        help="which of the model's products FILE.py:FACTORY stands for; formats name their own",
    )  # fmt: skip
    parser.add_argument("--shapes", default=SHAPES, help=f"NxK,...; default {SHAPES}")
    parser.add_argument("--formats", default=FORMATS, help=f"default {FORMATS}")
    parser.add_argument("--m", help=f"default {','.join(map(str, GRID))}")
    parser.add_argument("--out", metavar="DIR", help=f"default {tables.own()}")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="starts no row after it")
    parser.add_argument(
        "--configs", default="", metavar="N|PROVIDER=N,...",
        help="measures the first N configs at an M alone, of a provider or of each; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=0, metavar="N", help="compiles in N processes first"
    )
    parser.add_argument("--again", action="store_true", help="measures what is measured, too")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where it is")
    return parser


def most_of(text: str) -> dict[str, int]:
    """{provider, "" for any other: N} of `N` or `PROVIDER=N,...`; QinductorError for other text."""
    found: dict[str, int] = {}
    known = {name for op in OPS.values() for name in op.providers}
    for word in filter(None, text.split(",")):
        name, _, number = word.rpartition("=")
        if name not in {"", *known} or re.fullmatch(r"[1-9]\d*", number) is None:
            raise QinductorError(
                f"no --configs: {word!r}; wanted N, or PROVIDER=N such as {min(known)}=4"
            )
        found[name] = int(number)
    return found


def found_in(op: Op, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The contracts of an operator that a model asks plans for, each once.

    Errors: QinductorError if there is none."""
    asked: dict[Any, None] = {}
    plan = Op.plan

    def recorded(self: Op, contract: Any, *rest: Any, **more: Any) -> Plan:
        if self is op:
            asked[plain(single(contract)[0])] = None
        return plan(self, contract, *rest, **more)

    with mock.patch.object(Op, "plan", recorded):
        report = qinductor.explain(module, *args, **kwargs)
    if not asked:
        raise QinductorError(f"nothing to tune in this model\n{report}")
    return list(asked)


def plain(contract: Contract) -> Contract:
    """The contract whose entry serves those with a bias or a scale of the product, too."""
    if isinstance(contract, ScaledMatmul):
        return dataclasses.replace(contract, bias=None)
    return dataclasses.replace(contract, bias=False, output_scale=None)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """(line, rows done) -> None, with a bar if tqdm is installed and somebody looks."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda line, rows: print(line, flush=True) if line else None
        return
    with tqdm(total=total, unit="row", disable=None) as bar:

        def said(line: str, rows: int) -> None:
            if line:
                bar.write(line)
            bar.update(rows)

        yield said


def versions(op: Op, names: Mapping[str, int]) -> dict[str, Any]:
    """What times depend on beside the device: torch, triton and the providers."""
    held = {name: getattr(op.providers[name], "version", 1) for name in sorted(names)}
    return {"torch": torch.__version__, "triton": triton(), **held}


def triton() -> str | None:
    """The version of Triton; None where there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def compiled(op: str, contract: Contract, route: str, m: int, device: str) -> None:
    """Runs a route once, in a process of its own."""
    qinductor.load()
    blank(OPS[op], contract, route, m, device)


class Tuner:
    """Measures contracts on one device and keeps the times in one file.

    kept   rows (one M of one contract) that were measured and written
    wrong  what gave a wrong result or failed, in words
    """

    def __init__(
        self, device: str, folder: pathlib.Path, op: Op | None = None,
        timer: Timer | None = None, most: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """op: in place of each contract's own; most: configs at an M, by provider, "" any other."""
        self.device, self.op, self.timer = device, op, timer or timing.microseconds
        self.most = most or {}
        self.target = "cpu"
        if device == "cuda":
            if not torch.cuda.is_available():
                raise QinductorError("no CUDA device is here; wanted --device cpu")
            self.target = "sm_{}{}".format(*torch.cuda.get_device_capability())
        self.name = tables.device(self.target) or self.target
        self.path = folder / tables.file_of(self.name)
        self.kept = 0
        self.wrong: list[str] = []

    def tune(
        self, contract: Contract, rows: Sequence[int], stop: float, again: bool,
        said: Callable[[str, int], None] = lambda line, rows: None,
    ) -> bool:  # fmt: skip
        """Measures a contract at each M, ascending, that is not measured yet; False if the time
        to stop came first. Each row is written as soon as it is measured."""
        limits = self.limits(contract)
        if not limits:
            said(f"{contract.summary}: no provider for {self.target}", len(rows))
            return True
        op = self.op_of(contract)
        key, now = tables.key(op.name, contract), versions(op, limits)
        entry = tables.read(self.path).get(key, {})
        known = set() if again or entry.get("versions") != now else set(map(int, entry["us"]))
        todo = [m for m in rows if m not in known]
        said("", len(rows) - len(todo))
        weight: Weight | None = None
        hopeless: set[str] = set()
        for m in sorted(todo):
            if time.monotonic() > stop:
                return False
            weight = weight or weight_of(op, contract, self.device)
            row = self.row(weight, m, limits, hopeless)
            if row:
                merge(self.path, self.name, key, now, {m: row})
                self.kept += 1
            best = min(row, key=row.__getitem__, default="nothing")
            said(f"{contract.summary} M={m}: {best} {row.get(best, 0):.1f} us", 1)
        return True

    def prepare(self, contracts: Sequence[Contract], rows: Sequence[int], jobs: int) -> None:
        """Has all routes compiled, in processes: one after the other takes most of the time."""
        tasks: dict[tuple[Any, ...], bool] = {}  # whether its kernel is compiled by one before
        seen: set[tuple[str, str]] = set()
        for contract in contracts:
            op, limits = self.op_of(contract), self.limits(contract)
            for m in rows:
                for name in (name for name, limit in limits.items() if m <= limit):
                    for route in self.tried(op, name, contract, m):
                        key = tables.family(contract)[0], route
                        tasks[op.name, contract, route, m, self.device] = key in seen
                        seen.add(key)
        started = time.monotonic()
        failed = spread(compiled, sorted(tasks, key=tasks.__getitem__), jobs)
        spent = time.monotonic() - started
        print(f"ran {len(tasks)} routes in {jobs} processes in {spent:.0f} s; {failed} failed")

    def tried(self, op: Op, name: str, contract: Contract, m: int) -> Sequence[str]:
        """The routes of a provider that are measured at m rows, its own choice first."""
        most = self.most.get(name, self.most.get("", MANY))
        return routes_of(op.providers[name], contract, m)[:most]

    def op_of(self, contract: Contract) -> Op:
        return self.op or op_of(contract)

    def limits(self, contract: Contract) -> dict[str, int]:
        """Largest M of each provider that can run a contract, the reference left out."""
        found: dict[str, int] = {}
        op = self.op_of(contract)
        for dense in (True, False):
            for name, limit in able(op, contract, self.target, None, dense)[0].items():
                if not op.providers[name].reference:
                    found[name] = max(limit, found.get(name, 0))
        return found

    def row(
        self, weight: "Weight", m: int, limits: Mapping[str, int], hopeless: set[str]
    ) -> dict[str, float]:
        """The best route of each provider at m rows, and its microseconds.

        Configs far slower than their provider's best are added to `hopeless`, and those in it are
        passed over unless they are the provider's own choice for this M."""
        best: dict[str, float] = {}
        for name in (name for name, limit in limits.items() if m <= limit):
            choice, *others = self.tried(weight.op, name, weight.contract, m)
            times: dict[str, float] = {}
            for route in [choice, *(other for other in others if other not in hopeless)]:
                try:
                    weight.check(route, m)
                    times[route] = self.timer(weight.calls(route, m), self.device)
                except Refused:
                    break  # these random weights are not for this provider
                except Exception as error:
                    self._failed(weight, route, m, error)
            if times:
                route = min(times, key=times.__getitem__)
                best[route] = round(times[route], 3)
                hopeless |= {r for r, us in times.items() if us > HOPELESS * times[route]}
        return best

    def _failed(self, weight: "Weight", route: str, m: int, error: Exception) -> None:
        text = f"{route} at M={m} of {weight.contract.summary}: {type(error).__name__}: {error}"
        print(f"\nDROPPED {text}", file=sys.stderr, flush=True)
        self.wrong.append(text)
        if self.device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as lost:
                raise QinductorError(f"the device is lost after {text}") from lost


def merge(
    path: pathlib.Path, name: str, key: str, now: Mapping[str, Any], us: tables.Times
) -> None:
    """Adds measured rows to a table, which other processes may read and write meanwhile.

    Rows of the entry that were measured in other versions are dropped."""
    import fcntl  # a lock that dies with its process; not everywhere, so not at the top

    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # code lies there, too
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = tables.read(path)
        if not entries and path.exists():  # what cannot be read is not written over
            os.replace(path, path.with_suffix(".bad"))
        before = entries.get(key, {})
        kept = before["us"] if before.get("versions") == dict(now) else {}
        rows = {**kept, **{str(m): row for m, row in us.items()}}
        rows = dict(sorted(rows.items(), key=lambda item: int(item[0])))
        entries[key] = {"versions": dict(now), "us": rows}
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"device": name, "entries": entries}, file, indent=1)
            os.chmod(temporary, 0o644)  # mkstemp lets nobody else read
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    tables.load.cache_clear()
