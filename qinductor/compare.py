"""`python -m qinductor compare`: our products of codes beside other libraries', in one process.

A cell is a format, N x K and M. It has the time of each of our providers in its best known config,
of what the dispatcher picks, of each peer that is there (`qinductor.peers`), and the least by the
device's usual rates. Cells are written to a file as they are measured: the same command goes on
from there."""

import argparse
import contextlib
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import qinductor
from qinductor import cells, peers, tables, timing
from qinductor.bench import best, pyplot
from qinductor.cells import CHOSEN, CUTE, FAILED, Cell, Key, Page
from qinductor.contracts import QuantizedWeight
from qinductor.errors import QinductorError
from qinductor.formats import contract_of, op_of, rows_of, shape_of
from qinductor.kernels.scaled_matmul import SCALED_MATMUL, Operands, ScaledMatmul
from qinductor.rates import Rates, evaluator, rates, roofline
from qinductor.trial import ScaledWeight, blank, blank_x, spread
from qinductor.tune import Timer, Tuner

SHAPES = (
    "4096x4096,28672x4096,4096x14336,10240x8192,8192x28672,24576x1536,7168x16384,2112x7168,"
    "4096x7168"
)
FORMATS = "fp8-tensor-fast,fp8-row-fast,fp8-block128,fp8-block32,int8-row"
ROWS = "1,4,16,64,128,512,4096"
EIGHT = 1630 / 790  # products of 8-bit codes to bf16 ones a second, each at its best, on an H200


class Contender(NamedTuple):
    """What is timed: run(arrange(x), packed), judged by a weight."""

    weight: ScaledWeight
    arrange: Callable[[Any], Any]
    run: Callable[..., torch.Tensor]
    packed: list[torch.Tensor]

    def microseconds(self, m: int, timer: Timer, device: str) -> float:
        """AssertionError if it is further from the exact product than the tests allow."""
        self.weight.holds(lambda x: self.run(self.arrange(x), self.packed), m)
        given = self.arrange(self.weight.x(m))
        return timer(timing.rotated(self.run, given, self.packed), device)


def ours(weight: ScaledWeight, route: str) -> Contender:
    """A route of one of our providers."""
    run, packed = weight.function(route)
    return Contender(weight, lambda x: x, run, packed)


def theirs(weight: ScaledWeight, peer: peers.Peer) -> Contender:
    """A peer, judged by the operands as it rounds them."""
    contract = weight.contract
    seen = peer.seen(weight.source, contract)
    judge = weight if seen is weight.source else weight.of(seen)
    return Contender(
        judge,
        lambda x: peer.arrange(contract, x),
        lambda given, packed: peer.run(contract, given, packed),
        peer.pack(contract, seen),
    )


class Lost(QinductorError):
    """The device takes no more work."""


class Comparison:
    """Measures cells on one device; `again`: what is measured of ours, too."""

    def __init__(
        self, page: Page, tuner: Tuner, others: Sequence[peers.Peer], timer: Timer | None = None,
        again: bool = False,
    ) -> None:  # fmt: skip
        self.page, self.tuner, self.others = page, tuner, others
        self.timer, self.device = timer or timing.microseconds, tuner.device
        self.again = again
        for peer in others:
            if peer.missing() is None:
                page.versions[peer.name] = peer.version()

    def routes(self, contract: ScaledMatmul, m: int) -> dict[str, str]:
        """The best known route of each of our providers, and what the dispatcher picks."""
        target, limits = self.tuner.target, self.tuner.limits(contract)
        found = {
            n: best(SCALED_MATMUL, contract, n, target, m)
            for n, most in limits.items()
            if m <= most
        }
        plan = SCALED_MATMUL.plan(contract, target, None)
        found[CHOSEN] = next(route for limit, route in plan.steps if m <= limit)
        return found

    def measure(self, word: str, shape: str, m: int, held: dict[str, Any]) -> str:
        """Measures what a cell lacks; a line about it. `held`: what cells of one weight share."""
        contract = _contract(word, shape)
        cell = self.page.cells.setdefault(Key(word, shape, m), Cell())
        for name, route in self.routes(contract, m).items():
            known = cell.routes.get(name) == route and (name in cell.us or name in cell.notes)
            if known and not self.again:
                continue
            cell.routes[name] = route
            same = [other for other, text in cell.routes.items() if text == route and other != name]
            if name == CHOSEN and same and same[0] in cell.us:
                cell.us[name] = cell.us[same[0]]
                continue
            self._time(cell, name, m, held, lambda w, route=route: ours(w, route), route, contract)
        for peer in self.others:
            if peer.name in cell.us:
                continue
            reason = peer.missing() or peer.why_not(contract)
            if reason is not None:
                cell.notes[peer.name] = reason
            elif not cell.notes.get(peer.name, "").startswith(FAILED):
                self._time(
                    cell, peer.name, m, held, lambda w, p=peer: theirs(w, p), peer.name, contract
                )
        return f"{word} {shape} M={m}: {said(cell)}"

    def _time(
        self, cell: Cell, name: str, m: int, held: dict[str, Any],
        make: Callable[..., Contender], key: str, contract: ScaledMatmul,
    ) -> None:  # fmt: skip
        """One contender of one cell; what goes wrong is a note."""
        cell.us.pop(name, None)
        cell.notes.pop(name, None)
        try:
            if "weight" not in held:
                held["weight"] = ScaledWeight(SCALED_MATMUL, contract, self.device)
            if key not in held:
                held[key] = make(held["weight"])
            cell.us[name] = round(held[key].microseconds(m, self.timer, self.device), 3)
        except Exception as error:  # a library's, whatever it raises
            cell.notes[name] = f"{FAILED}: {type(error).__name__}: {error}".splitlines()[0]
            self._is_there(name)

    def _is_there(self, name: str) -> None:
        """Lost if the device takes no more work, after the note of what it was lost to is kept."""
        if self.device != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            self.page.save()
            raise Lost(
                f"the device is lost after {name}; run the command again: {error}"
            ) from error

    def run(
        self, asked: Sequence[tuple[str, str]], rows: Sequence[int], budget: float | None
    ) -> bool:
        """Measures what is not measured; whether that is all. A budget, seconds, starts no cell
        after it."""
        stop = float("inf") if budget is None else time.monotonic() + budget
        for word, shape in asked:
            held: dict[str, Any] = {}
            for m in rows:
                if time.monotonic() > stop:
                    return False
                print(self.measure(word, shape, m, held), flush=True)
                self.page.save()
            if held and self.device == "cuda":
                held.clear()
                torch.cuda.empty_cache()  # of graphs that are gone
        return True

    def prepare(
        self, words: Sequence[str], shapes: Sequence[str], rows: Sequence[int], jobs: int
    ) -> None:
        """Has what is to be timed compiled, in processes."""
        tasks: list[tuple[Any, ...]] = []
        there = [peer for peer in self.others if peer.missing() is None]
        for word in words:
            for shape in shapes:
                contract = _contract(word, shape)
                routes = {(r, m): None for m in rows for r in self.routes(contract, m).values()}
                tasks.append((word, shape, list(routes), None, self.device))
                tasks += [
                    (word, shape, [("", m) for m in rows], peer.name, self.device)
                    for peer in there
                    if peer.why_not(contract) is None
                ]
        started = time.monotonic()
        spread(prepared, tasks, jobs)
        print(f"prepared {len(tasks)} products in {time.monotonic() - started:.0f} s", flush=True)


def _contract(word: str, shape: str) -> ScaledMatmul:
    contract = contract_of(word, *shape_of(shape))
    if not isinstance(contract, ScaledMatmul):
        raise QinductorError(
            f"{word} is a format of {op_of(contract).name}; wanted fp8-row and such"
        )
    return contract


def prepared(
    word: str, shape: str, routes: Sequence[tuple[str, int]], peer: str | None, device: str
) -> None:
    """Runs routes, or a peer, once at each M on memory as it is, in a process of its own."""
    qinductor.load()
    contract = _contract(word, shape)
    form, grid = contract.weight, contract.weight.grid
    for route, m in routes:
        with contextlib.suppress(Exception):  # it is met again where it is timed
            if peer is None:
                blank(SCALED_MATMUL, contract, route, m, device)
                continue
            codes = torch.empty((form.n, form.k), dtype=form.storage, device=device)
            scale = torch.empty(grid, dtype=form.scale, device=device)
            other, source = peers.ALL[peer], Operands(QuantizedWeight(form, codes, scale))
            if other.missing() is None:
                x = other.arrange(contract, blank_x(contract, m, device))
                other.run(contract, x, other.pack(contract, source))


def said(cell: Cell) -> str:
    """A cell in a few words."""
    words = [f"{name} {cell.us[name]:.1f}" for name in (CUTE, CHOSEN) if name in cell.us]
    others, ratio = cell.peers(), cell.ratio(CHOSEN)
    if others:
        name = min(others, key=others.__getitem__)
        words.append(f"best peer {name} {others[name]:.1f}")
    if ratio is not None:
        words.append(f"ratio {ratio:.2f}")
    words += [f"{n} {note}" for n, note in cell.notes.items() if note.startswith(FAILED)]
    return ", ".join(words) or "nothing runs"


def floor(contract: ScaledMatmul, m: int, target: str) -> float | None:
    """The least microseconds by the device's rates; None where they are not known."""
    at = rates(target)
    if at is None:
        return None
    least = evaluator(roofline(SCALED_MATMUL.cost(contract)))
    return least(m, Rates(at.bandwidth, at.rate * EIGHT)) * 1e6


def main(arguments: list[str]) -> int:
    """Measures what is not measured, prints, and writes what is asked for; 0, 130 if interrupted.

    Errors: QinductorError for bad input, for a plot without matplotlib and for a lost device."""
    given = _parser().parse_args(arguments)
    words, shapes, rows = given.formats.split(","), given.shapes.split(","), rows_of(given.m)
    if wrong := [name for name in given.peers.split(",") if name and name not in peers.ALL]:
        raise QinductorError(f"no peer: {', '.join(wrong)}; wanted {','.join(peers.ALL)}")
    others = [peers.ALL[name] for name in given.peers.split(",") if name]
    asked = [(word, shape) for word in words for shape in shapes]
    for word, shape in asked:
        _contract(word, shape)  # an error before the work
    if given.plot:
        pyplot()
    path, status = pathlib.Path(given.json) if given.json else None, 0
    if given.show:
        if path is None or not path.exists():
            raise QinductorError("--show needs a --json FILE that was measured")
        page = Page(path)
    else:
        tuner = Tuner(
            given.device or ("cuda" if torch.cuda.is_available() else "cpu"), tables.own()
        )
        page = Page(path, tuner.name, tuner.target)
        comparison = Comparison(page, tuner, others, again=given.again)
        try:
            if given.jobs:
                comparison.prepare(words, shapes, rows, given.jobs)
            if not comparison.run(asked, rows, given.budget):
                print("the budget is used up: the same command goes on from here")
        except KeyboardInterrupt:
            print("\ninterrupted: the same command goes on from here")
            status = 130
    _written(page, [Key(*each, m) for each in asked for m in rows], given)
    return status


def _written(page: Page, keys: Sequence[Key], given: Any) -> None:
    """Prints the means, and writes the table and the plot, of the cells that were asked for."""
    path, target = pathlib.Path(given.published) if given.published else None, page.head["target"]
    found = {key: page.cells[key] for key in keys if key in page.cells}
    found = cells.scaled(found, page.cells, cells.published(path, page.head["device"]))
    floors = {key: floor(_contract(key.word, key.shape), key.m, target or "cpu") for key in found}
    print(cells.means(found))
    if given.table:
        pathlib.Path(given.table).write_text(cells.table(page, found, floors))
    if given.plot:
        cells.plot(page, found, given.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qinductor compare", description=__doc__)
    parser.add_argument("--shapes", default=SHAPES, help=f"NxK,...; default {SHAPES}")
    parser.add_argument("--formats", default=FORMATS, help=f"default {FORMATS}")
    parser.add_argument("--m", default=ROWS, help=f"default {ROWS}")
    parser.add_argument(
        "--peers", default=",".join(peers.ALL), help=f"default {','.join(peers.ALL)}"
    )
    parser.add_argument("--json", metavar="FILE", help="where cells are kept, and taken from")
    parser.add_argument("--table", metavar="OUT.md", help="writes all times")
    parser.add_argument("--plot", metavar="OUT.png", help="draws the ratios; needs matplotlib")
    parser.add_argument(
        "--published",
        metavar="FILE",
        help="other figures than those in kernels/measured/peers.json",
    )
    parser.add_argument(
        "--jobs", type=int, default=0, metavar="N", help="compiles in N processes first"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="starts no cell after it")
    parser.add_argument(
        "--again", action="store_true", help="measures ours that are measured, too; not peers"
    )
    parser.add_argument(
        "--show", action="store_true", help="measures nothing: prints and draws what FILE holds"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where it is")
    return parser
