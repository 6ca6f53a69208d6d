"""`python -m qinductor tune`: measures the providers on this device and keeps the times."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

import qinductor
from qinductor import tables, timing
from qinductor.contracts import dequantize
from qinductor.dispatch import able
from qinductor.errors import QinductorError, Refused
from qinductor.formats import Contract, contract_of, op_of, rows_of, shape_of
from qinductor.kernels import scaled_matmul_cases as scaled
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL, Case
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, ScaledMatmul
from qinductor.op import GRID, OPS, Op, Plan, Provider, routes_of, single, split
from qinductor.testing import OUTPUTS, product_oracle

SHAPES = "4096x4096,28672x4096,4096x14336"
FORMATS = "int4-g128"
HOPELESS = 1.25  # times its provider's best: a config so slow is not tried at larger M
JUDGED = 32  # rows of a result that are compared with the reference: the first, and the last

Timer = Callable[[Sequence[timing.Call], str], float]
Factory = Callable[[str], tuple[Any, tuple[Any, ...], dict[str, Any]]]


def main(arguments: list[str], made: Factory) -> int:
    """Tunes what the arguments name; 0, 1 if a result was wrong, 130 if interrupted.

    made  what loads FILE.py:FACTORY
    Errors: QinductorError for bad input, or if the table cannot be written."""
    given = _parser().parse_args(arguments)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tuner = Tuner(device, pathlib.Path(given.out) if given.out else tables.own())
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
    stop = float("inf") if given.budget is None else time.monotonic() + given.budget
    try:
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
    parser.add_argument("--again", action="store_true", help="measures what is measured, too")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where it is")
    return parser


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


class Tuner:
    """Measures contracts on one device and keeps the times in one file.

    kept   rows (one M of one contract) that were measured and written
    wrong  what gave a wrong result or failed, in words
    """

    def __init__(
        self, device: str, folder: pathlib.Path, op: Op | None = None,
        timer: Timer | None = None,
    ) -> None:  # fmt: skip
        """op: in place of each contract's own."""
        self.device, self.op, self.timer = device, op, timer or timing.microseconds
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
            choice, *others = routes_of(weight.op.providers[name], weight.contract, m)
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


class Weight:
    """A random weight of a contract, packed for whichever provider is asked for."""

    def __init__(self, op: Op, contract: Any, device: str) -> None:
        self.op, self.contract, self.device = op, contract, device
        self.source = self.made()
        self.packed: dict[str, list[torch.Tensor]] = {}

    def made(self) -> Any:
        """The operands that providers pack."""
        source = moved(Case("", 1, self.contract).make()[1], self.device)
        self.w = dequantize(source.weight)
        return source

    def x(self, m: int, seed: int = 0) -> Any:
        """[m, K], always the same for a seed."""
        made = torch.Generator(self.device).manual_seed(seed)
        shape = m, self.contract.weight.k
        return torch.randn(shape, generator=made, device=self.device).to(self.contract.x)

    def dense(self, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, W) of the dense product of these sizes."""
        return self.x(m), self.w

    def judge(self, ours: torch.Tensor, xs: Sequence[Any], rows: torch.Tensor) -> None:
        """AssertionError if results, of these rows of each x, are not near enough."""
        x = torch.cat([x[rows] for x in xs])
        product_oracle(ours, torch.nn.functional.linear(x, self.w), x, self.w)

    def function(self, route: str) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
        """((x, packed) -> result, packed) of a route. Refused if this weight cannot be packed."""
        name, config = split(route)
        provider: Provider = self.op.providers[name]
        if name not in self.packed:
            found = provider.pack(self.contract, self.source)
            self.packed[name] = [found[held] for held in provider.operands(self.contract)]
        more = {} if config is None else {"config": config}
        return lambda x, packed: provider.run(self.contract, x, packed, **more), self.packed[name]

    def check(self, route: str, m: int) -> None:
        """AssertionError if a result is further from the exact product than the oracle allows."""
        run, packed = self.function(route)
        rows = torch.arange(m, device=self.device)
        rows = rows if m <= JUDGED else torch.cat([rows[: JUDGED // 2], rows[-JUDGED // 2 :]])
        count = -(-OUTPUTS // (len(rows) * self.contract.weight.n))
        xs = [self.x(m, seed) for seed in range(count)]
        self.judge(torch.cat([run(x, packed)[rows] for x in xs]), xs, rows)

    def calls(self, route: str, m: int) -> list[timing.Call]:
        """Calls of a route at m rows, for a timer."""
        run, packed = self.function(route)
        return timing.rotated(run, self.x(m), packed)


class ScaledWeight(Weight):
    """The same for products of codes: x is [codes, scale, (zero)]."""

    def made(self) -> Any:
        return moved(scaled.Case("", 1, self.contract).make()[2], self.device)

    def x(self, m: int, seed: int = 0) -> Any:
        a, scale = scaled.activation(self.contract, m, seed)
        scale = scale.t().contiguous().t()  # as quantisers write groups for matrix products
        return [t.to(self.device) for t in (a, scale, *scaled.zeros(self.contract, m, seed))]

    def dense(self, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        n, k = self.contract.weight.n, self.contract.weight.k
        x, w = (torch.randn(rows, k, device=self.device).bfloat16() for rows in (m, n))
        return x, w

    def judge(self, ours: torch.Tensor, xs: Sequence[Any], rows: torch.Tensor) -> None:
        contract, eager, wide = self.contract, [], []
        for a, *held in xs:
            a = a.view(torch.uint8)[rows].view(a.dtype)
            scale, *zero = (t[rows] if contract.group else t for t in held)
            given = contract, a, scale, self.source, *zero
            eager.append(scaled.eager(*given))
            x, w = scaled.wide(*given)
            wide.append(x)
        product_oracle(ours, torch.cat(eager), torch.cat(wide), w)


def weight_of(op: Op, contract: Contract, device: str) -> Weight:
    """A random weight of either operator."""
    kind = ScaledWeight if isinstance(contract, ScaledMatmul) else Weight
    return kind(op, contract, device)


def moved(source: Any, device: str) -> Any:
    """Random operands on another device."""

    def there(value: Any) -> Any:
        held = {n: t.to(device) for n, t in vars(value).items() if isinstance(t, torch.Tensor)}
        return dataclasses.replace(value, **held)

    return dataclasses.replace(there(source), weight=there(source.weight))


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
