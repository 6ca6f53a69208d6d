"""Cells of a comparison: the file that keeps them, published figures, means, a table, a plot."""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from qinductor import peers, tables
from qinductor.bench import pyplot
from qinductor.caches.files import replace
from qinductor.errors import QinductorError
from qinductor.tune import triton

CUTE, CHOSEN = "cute.scaled_mma", "dispatcher"
PUBLISHED = tables.SHIPPED.parent / "measured" / "peers.json"
SCALED = "DeepGEMM 0.2.5 (scaled)"  # the block-32 product, which needs torch 2.14
BLOCKS, SMALL_BLOCKS = "fp8-block128", "fp8-block32"
FAILED = "failed"  # what a note begins with where a contender ran and should have run well


@dataclasses.dataclass
class Cell:
    """One product.

    us      microseconds by contender
    routes  the route that was measured of each of our providers; what the dispatcher picked
    notes   why a contender has no time
    """

    us: dict[str, float] = dataclasses.field(default_factory=dict)
    routes: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

    def peers(self) -> dict[str, float]:
        """The times of others."""
        return {n: us for n, us in self.us.items() if n in peers.ALL or n == SCALED}

    def ratio(self, name: str) -> float | None:
        """A contender's time to the best peer's; None where one of them is not there."""
        others = self.peers().values()
        return self.us[name] / min(others) if name in self.us and others else None


class Key(NamedTuple):
    """What a cell is of: a format's word, N x K, M."""

    word: str
    shape: str
    m: int


Cells = dict[Key, Cell]
Figures = Mapping[str, Mapping[str, Mapping[str, tuple[float, str]]]]  # word, shape, M: us, of whom


class Page:
    """The cells of one device, kept in a file.

    device, target  which; None for whatever the file is of
    Errors: QinductorError for a file that is of another one, or of other versions, or is none."""

    def __init__(
        self, path: pathlib.Path | None, device: str | None = None, target: str = ""
    ) -> None:
        self.path = path
        self.head = {
            "device": device, "target": target, "torch": torch.__version__, "triton": triton(),
        }  # fmt: skip
        self.versions: dict[str, str] = {}  # of peers
        self.cells: Cells = {}
        if path is not None and path.exists():
            try:
                self._read(json.loads(path.read_text()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise QinductorError(f"{path} holds no comparison: {error!r}") from error

    def _read(self, held: dict[str, Any]) -> None:
        found = {name: held[name] for name in self.head}
        if self.head["device"] is None:
            self.head = found
        if found != self.head:
            raise QinductorError(
                f"{self.path} is of {found}, and here is {self.head}; name another file"
            )
        self.versions = held["peers"]
        for text, cell in held["cells"].items():
            word, shape, m = text.split(" ")
            self.cells[Key(word, shape, int(m))] = Cell(**cell)

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        if self.path is None:
            return
        cells = {" ".join(map(str, k)): dataclasses.asdict(c) for k, c in self.cells.items()}
        whole = {**self.head, "peers": self.versions, "cells": cells}
        replace(self.path, [json.dumps(whole, indent=1).encode()])
        self.path.chmod(0o644)  # a temporary file is the owner's alone


def published(path: pathlib.Path | None, device: str | None) -> Figures:
    """Figures that others may be scaled to; none where they are of another device.

    Errors: QinductorError for a file that is none of these."""
    try:
        held = json.loads((path or PUBLISHED).read_text())
        figures: Figures = held["cells"]
        return figures if held["device"] == device else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QinductorError(f"{path} holds no published figures: {error!r}") from error


def scaled(found: Cells, measured: Cells, figures: Figures) -> Cells:
    """The cells, those of blocks of 32 with a published figure.

    It is multiplied by what DeepGEMM's product with blocks of 128 takes here to what it took when
    the figure was made: in the same N x K and M, else by the median of all such factors."""
    factors: dict[tuple[str, int], float] = {}
    for (word, shape, m), cell in measured.items():
        us, whose = figures.get(BLOCKS, {}).get(shape, {}).get(str(m), (0.0, ""))
        if word == BLOCKS and whose == "DeepGEMM" and "deep_gemm" in cell.us:
            factors[shape, m] = cell.us["deep_gemm"] / us
    made: Cells = {}
    for key, cell in found.items():
        figure = figures.get(key.word, {}).get(key.shape, {}).get(str(key.m))
        if key.word == SMALL_BLOCKS and figure and factors:
            usual = statistics.median(factors.values())
            us = figure[0] * factors.get((key.shape, key.m), usual)
            cell = dataclasses.replace(cell, us={**cell.us, SCALED: round(us, 3)})
        made[key] = cell
    return made


def geometric(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _ratios(cells: Cells, name: str, **only: Any) -> dict[Key, float]:
    """A contender's ratios to the best peer, of the cells whose keys have these fields."""
    found = {
        key: cell.ratio(name)
        for key, cell in cells.items()
        if all(getattr(key, field) == value for field, value in only.items())
    }
    return {key: ratio for key, ratio in found.items() if ratio is not None}


def means(cells: Cells) -> str:
    """Geometric means of the ratios to the best peer, by format and M, and the worst cells."""
    words = list(dict.fromkeys(key.word for key in cells))
    rows = sorted({key.m for key in cells})
    lines = [
        "geometric means of the time to the best peer's (the worst cell)",
        "format | whose | all | worst | " + " | ".join(f"M={m}" for m in rows),
    ]
    for word in words:
        for name in (CUTE, CHOSEN):
            ratios = _ratios(cells, name, word=word)
            if not ratios:
                lines.append(f"{word} | {name} | nothing to compare")
                continue
            worst = max(ratios, key=ratios.__getitem__)
            texts = [f"{geometric(ratios.values()):.3f} of {len(ratios)}"]
            texts.append(f"{ratios[worst]:.2f} {worst.shape} M={worst.m}")
            for m in rows:
                part = [ratio for key, ratio in ratios.items() if key.m == m]
                texts.append(f"{geometric(part):.2f}" if part else "-")
            lines.append(" | ".join([word, name, *texts]))
    notes: dict[str, int] = {}
    for cell in cells.values():
        for name, note in cell.notes.items():
            notes[f"{name}: {note}"] = notes.get(f"{name}: {note}", 0) + 1
    lines += [f"no time in {count} cells: {note}" for note, count in notes.items()]
    return "\n".join(lines)


def table(page: Page, cells: Cells, floors: Mapping[Key, float | None]) -> str:
    """All times as Markdown: a table a format, a row N x K, a column M."""
    rows = sorted({key.m for key in cells})
    texts = []
    for word in dict.fromkeys(key.word for key in cells):
        mine = {key: cell for key, cell in cells.items() if key.word == word}
        names = dict.fromkeys(n for cell in mine.values() for n in cell.us)
        first = [name for name in (CHOSEN, CUTE) if name in names]
        columns = first + sorted(
            (name for name in names if name not in first), key=lambda n: n in {*peers.ALL, SCALED}
        )
        lines = [
            f"`{word}`: {' / '.join(columns)} / floor",
            "",
            f"| N x K | {' | '.join(map(str, rows))} |",
            "|---" * (len(rows) + 1) + "|",
        ]
        for shape in dict.fromkeys(key.shape for key in mine):
            line = [shape.replace("x", " x ")]
            for m in rows:
                key = Key(word, shape, m)
                us = mine[key].us if key in mine else {}
                least = floors.get(key)
                numbers = [_short(us.get(name)) for name in columns] + [_short(least)]
                line.append(" / ".join(numbers))
            lines.append(f"| {' | '.join(line)} |")
        texts.append("\n".join(lines))
    versions = ", ".join(f"{name} {version}" for name, version in page.versions.items())
    here = "{device}, torch {torch}, triton {triton}".format(**page.head)
    return "\n\n".join([f"{here}; {versions or 'no peers'}; microseconds", *texts]) + "\n"


def _short(us: float | None) -> str:
    """Three digits."""
    if us is None:
        return "-"
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def plot(page: Page, cells: Cells, path: str) -> None:
    """The ratios to the best peer as a picture: a field for each format, of N x K and M, for what
    the dispatcher picks and for the CuTe DSL kernel alone."""
    plt = pyplot()
    import numpy  # matplotlib brings both
    from PIL import Image

    words = list(dict.fromkeys(key.word for key in cells))
    rows = sorted({key.m for key in cells})
    shapes = list(dict.fromkeys(key.shape for key in cells))
    size = (1.6 + len(words) * (1.2 + 0.42 * len(rows)), 1.2 + 2 * (0.6 + 0.28 * len(shapes)))
    figure, fields = plt.subplots(
        2, len(words), figsize=size, dpi=90, squeeze=False, sharey=True, layout="constrained"
    )
    for line, name in enumerate((CHOSEN, CUTE)):
        for place, word in enumerate(words):
            axes, ratios = fields[line][place], _ratios(cells, name, word=word)
            grid = [[ratios.get(Key(word, shape, m), math.nan) for m in rows] for shape in shapes]
            image = axes.imshow(grid, cmap="RdYlGn_r", vmin=0.6, vmax=1.4, aspect="auto")
            for y, values in enumerate(grid):
                for x, value in enumerate(values):
                    if not math.isnan(value):
                        ink = "black" if 0.75 < value < 1.3 else "white"
                        axes.text(
                            x, y, f"{value:.2f}", ha="center", va="center", fontsize=6, color=ink
                        )
            mean = f": {geometric(ratios.values()):.2f}" if ratios else ""
            axes.set_title(f"{word}, {name}{mean}", fontsize=8)
            axes.set_xticks(range(len(rows)), list(map(str, rows)), fontsize=7)
            axes.set_yticks(range(len(shapes)), shapes, fontsize=7)
            axes.set_xlabel("M", fontsize=7)
    figure.colorbar(image, ax=fields, label="time / best peer's", fraction=0.02)
    figure.suptitle(
        f"{page.head['device']}, torch {page.head['torch']}: time to the best peer's", fontsize=9
    )
    figure.canvas.draw()
    drawn = Image.fromarray(numpy.asarray(figure.canvas.buffer_rgba())[..., :3])
    plt.close(figure)
    drawn.quantize(64).save(path, optimize=True)  # a quarter of the bytes of all colours
