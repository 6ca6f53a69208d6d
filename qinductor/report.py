"""What was lowered, and why the rest was not: one row per site, as text and as data."""

import collections
import dataclasses
import threading
from typing import Any

# Reports that a thread keeps: enough for a model with many graph breaks.
KEPT = 256


@dataclasses.dataclass
class Site:
    """One candidate: a row of the report.

    where     module path, and source line where the graph knows it
    pattern   name of the pattern that found it
    lowered   whether a provider runs it now
    contract  what it was proved to compute, in the field's terms; None if nothing was proved
    provider  what runs it, by range of M; None if it was left to Inductor
    rung      what that was chosen by: "tuned here" or "tuned for <device>", of the nearest N and K
              where its own were not measured, "heuristic", or the providers' "limits"
    reason    the first check that failed, with what was found and what was wanted; None if lowered
    cost      bytes and flops of the lowered operator, expressions in M
    evaluations  runs of the region that identification took: (on probes, whole)
    variant   which compile of the graph it is about, from 1; the later ones come at run time, for
              weights that did not fit the contracts of those before
    """

    where: str
    pattern: str
    lowered: bool = False
    contract: str | None = None
    provider: str | None = None
    rung: str | None = None
    reason: str | None = None
    cost: dict[str, str] | None = None
    evaluations: tuple[int, int] | None = None
    variant: int = 1


@dataclasses.dataclass
class Report:
    """The decisions about one compiled graph (`explain` joins all graphs of a model).

    target            "cpu", "sm_90", ...: what the providers were chosen for
    sites             a row for each candidate
    matching_seconds  time spent finding, identifying, proving and packing
    packed_bytes      bytes of packed weights held beside the model's own tensors
    dense_bytes       those of them that hold a weight in its dense form
    freed_bytes       bytes of the model's own tensors that were freed (`weights="replace"`)
    graphs            how many graphs it is about
    variants          how many times these were compiled, each for weights of other contracts
    notes             what concerns the graph and no single site
    """

    target: str = "cpu"
    sites: list[Site] = dataclasses.field(default_factory=list)
    matching_seconds: float = 0.0
    packed_bytes: int = 0
    dense_bytes: int = 0
    freed_bytes: int = 0
    graphs: int = 1
    variants: int = 1
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def lowered(self) -> int:
        """Number of sites that were lowered."""
        return sum(site.lowered for site in self.sites)

    def add(self, other: "Report", reason: str) -> None:
        """Appends the decisions of one more variant of the graph, compiled for `reason`."""
        self.variants += 1
        for site in other.sites:
            site.variant = self.variants
        self.notes.append(f"variant {self.variants} was compiled at run time: {reason}")
        self.include(other)

    def include(self, other: "Report") -> None:
        """Appends another report's sites and notes, and adds its seconds and bytes."""
        self.sites.extend(other.sites)
        self.notes.extend(other.notes)
        self.matching_seconds += other.matching_seconds
        self.packed_bytes += other.packed_bytes
        self.dense_bytes += other.dense_bytes
        self.freed_bytes += other.freed_bytes

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; `sites` holds one dict per row."""
        return {**dataclasses.asdict(self), "lowered": self.lowered}

    def __str__(self) -> str:
        freed = f", originals freed {self.freed_bytes / 1e6:.2f} MB" * (self.freed_bytes > 0)
        variants = f", {self.variants} variants" * (self.variants > self.graphs)
        head = (
            f"qinductor: {self.lowered} of {len(self.sites)} sites lowered for {self.target} "
            f"({self.graphs} graph{'s' * (self.graphs != 1)}{variants}; "
            f"matching {self.matching_seconds:.2f} s; packed weights "
            f"{self.packed_bytes / 1e6:.2f} MB, of them dense {self.dense_bytes / 1e6:.2f} MB"
            f"{freed})"
        )
        rows = [("where", "pattern", "contract", "lowered to, or why not")]
        for site in self.sites:
            outcome = f"{site.provider}{f' [{site.rung}]' if site.rung else ''}"
            outcome = outcome if site.lowered else f"NOT LOWERED: {site.reason}"
            where = f"{site.where} (variant {site.variant})" if site.variant > 1 else site.where
            rows.append((where, site.pattern, site.contract or "-", outcome))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        return "\n".join([head, *(lines if self.sites else ()), *self.notes])


_local = threading.local()


def remember(report: Report) -> None:
    """Makes `report` the last one of this thread."""
    reports().append(report)


def reports() -> "collections.deque[Report]":
    """The reports of this thread's last compiled graphs, oldest first; one per graph."""
    if not hasattr(_local, "reports"):
        _local.reports = collections.deque(maxlen=KEPT)
    kept: collections.deque[Report] = _local.reports
    return kept


def last_report() -> Report | None:
    """The report of the graph that this thread compiled last; None before the first."""
    return reports()[-1] if reports() else None


def joined(parts: list[Report]) -> Report:
    """One report over several graphs."""
    if len(parts) == 1:
        return parts[0]
    target = parts[0].target if parts else "cpu"
    whole = Report(target, graphs=len(parts), variants=sum(part.variants for part in parts))
    for part in parts:
        whole.include(part)
    return whole
