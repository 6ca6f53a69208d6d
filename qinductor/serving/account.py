"""What warm-up did: seconds and bytes of each phase, what became of each graph and call."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

MIB = 1 << 20


@dataclasses.dataclass
class Phase:
    """One phase. Bytes of device memory that it took and keeps; None where there is none to tell.

    predicted  before they were taken
    used       after
    """

    name: str
    seconds: float = 0.0
    predicted: int | None = None
    used: int | None = None


@dataclasses.dataclass
class Outcome:
    """What became of one call of one graph at one size; `reason`: why it is not replayed."""

    size: int
    graph: str
    reason: str | None = None


@dataclasses.dataclass(eq=False)
class Account:
    """What `qinductor.warmup` did, and what calls do since.

    phases    in order
    outcomes  of every graph at every size
    notes     what else there is to know
    replayed  calls of graphs that were replayed since
    plain     those that ran plainly, by reason
    captures  recordings ever made; serving never makes one
    """

    phases: list[Phase] = dataclasses.field(default_factory=list)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    replayed: int = 0
    plain: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    captures: int = 0

    @property
    def predicted(self) -> int:
        """Bytes that phases were predicted to take."""
        return sum(phase.predicted or 0 for phase in self.phases)

    @property
    def used(self) -> int:
        """Bytes that they took."""
        return sum(phase.used or 0 for phase in self.phases if phase.predicted is not None)

    def note(self, text: str) -> None:
        """Adds a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def __str__(self) -> str:
        rows = [("phase", "seconds", "MiB predicted", "MiB used")]
        for phase in self.phases:
            rows.append(
                (phase.name, f"{phase.seconds:.2f}", _mib(phase.predicted), _mib(phase.used))
            )
        total = sum(phase.seconds for phase in self.phases)
        rows.append(("all", f"{total:.2f}", _mib(self.predicted), _mib(self.used)))
        lines = ["qinductor warm-up", *_table(rows)]
        for graph, sizes, reason in self._by_graph():
            text = ", ".join(map(str, sizes))
            lines.append(f"  {graph}: {f'NOT CAPTURED at {text}: {reason}' if reason else text}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _by_graph(self) -> list[tuple[str, list[int], str | None]]:
        found: dict[tuple[str, str | None], list[int]] = {}
        for outcome in self.outcomes:
            sizes = found.setdefault((outcome.graph, outcome.reason), [])
            if outcome.size not in sizes:
                sizes.append(outcome.size)
        return [(graph, sizes, reason) for (graph, reason), sizes in found.items()]


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in rows
    ]


@contextlib.contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """what is done next -> None; a bar if tqdm is installed and somebody looks."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda text: None
        return
    with tqdm(total=total, unit="run", disable=True if quiet else None, leave=False) as bar:

        def said(text: str) -> None:
            bar.set_description(text)
            bar.update()

        yield said
