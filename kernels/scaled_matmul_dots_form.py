"""What cute.scaled_dots is compiled for: the form of a contract, and how work is shared out."""

import dataclasses
import functools

from qinductor.kernels.configs import matched
from qinductor.kernels.scaled_matmul import ScaledMatmul
from qinductor.kernels.scaled_matmul_cute_form import SHARED, Form
from qinductor.kernels.scaled_matmul_cute_form import form_of as form_of_mma

LINE = 128  # columns that a warp takes at once, of each of its rows: a line of the L2 cache
PAD = 4  # numbers between columns of sums in shared memory, so that no two lanes share a bank
SCALES = 256 + 32  # bytes of a slot: 32 scales of a, 4 of W
THREADS = 2048  # of a multiprocessor


@functools.cache
def form_of(contract: ScaledMatmul) -> Form:
    """The form of a contract's kernels: sums are float32 whether they may be fast or not."""
    form = form_of_mma(contract)
    return form if grouped(form) else dataclasses.replace(form, step=0)


def grouped(form: Form) -> bool:
    """Whether scales change along k."""
    return form.rows == "group" or form.columns == "grid"


def halves(form: Form) -> int:
    """Groups of columns that the four lanes of a row read at once: then half of a tile's columns
    are sums of the first one, the others of the second."""
    return 2 if form.step == 32 else 1


@dataclasses.dataclass(frozen=True)
class Config:
    """How work is shared out.

    rows    of W that a program has
    q       rows of a
    warps   of a program; they share K
    ahead   lines of K that a warp fetches ahead
    split   programs that share K
    blocks  programs on a multiprocessor
    """

    rows: int
    q: int
    warps: int
    ahead: int
    split: int = 1
    blocks: int = 1

    def __str__(self) -> str:
        text = f"r{self.rows}.q{self.q}.w{self.warps}.a{self.ahead}"
        return f"{text}.s{self.split}.b{self.blocks}"

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Config":
        """The config that `str` wrote; ValueError for any other text."""
        pattern = r"r(\d+)\.q(\d+)\.w(\d+)\.a(\d+)\.s(\d+)\.b(\d+)"
        match = matched(pattern, text, "r16.q8.w8.a4.s1.b2", "cute.scaled_dots")
        config = Config(*map(int, match.groups()))
        if config.fault:
            raise ValueError(f"config {text!r} of cute.scaled_dots: {config.fault}")
        return config

    @property
    def fault(self) -> str:
        """Why there is no such kernel; empty if there is."""
        if self.rows not in (16, 32) or self.q not in (1, 2, 4, 8, 16):
            return "a program has 16 or 32 rows of W, and 1, 2, 4, 8 or 16 of a"
        if not 1 <= self.warps <= 16 or not 1 <= self.ahead <= 16:
            return "there are 1 to 16 warps, and 1 to 16 lines ahead"
        if self.split not in (1, 2, 4, 8):
            return "K has 1, 2, 4 or 8 parts"
        if self.blocks < 1 or self.threads * self.blocks > THREADS:
            return f"{self.blocks} programs of {self.threads} threads; {THREADS} are there"
        if self.shared() * self.blocks > SHARED:
            return f"{self.blocks} programs take {self.shared()} bytes each; {SHARED} are there"
        return ""

    def takes(self, form: Form) -> bool:
        """Whether there are at most two tiles of eight columns, and all fits into shared memory
        and into registers."""
        most = min(255, 65536 // (self.threads * self.blocks) // 8 * 8)
        fits = self.shared(form) * self.blocks <= SHARED and self.registers(form) <= most
        return self.q * halves(form) <= 16 and fits

    @property
    def threads(self) -> int:
        """Of a program."""
        return self.warps * 32

    def shared(self, form: Form | None = None) -> int:
        """Bytes of shared memory of a program, with what the driver keeps for itself; without a
        form those that every form takes."""
        slots = self.warps * self.ahead * Slot(form, self).size
        sums = 2 * self.warps * (columns(form, self) if form else self.q) * (self.rows + PAD) * 4
        return slots + sums + self.rows * self.q * 4 + 1024 + 256

    def registers(self, form: Form) -> int:
        """Of a thread, so that none spill: what ptxas made of some forms, rounded up."""
        scales = (24 if form.step == LINE else 32) if grouped(form) else 0
        return 64 + scales + 32 * (tiles(form, self) - 1) + 40 * (self.rows // 16 - 1)


def tiles(form: Form, config: Config) -> int:
    """Tiles of eight columns that a warp multiplies."""
    return max(1, config.q * halves(form) // 8)


def columns(form: Form, config: Config) -> int:
    """Columns of sums that warps add up: those of a tile that are no row of a are left out."""
    return config.q if halves(form) == 1 else tiles(form, config) * 8


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where what of a line lies in a warp's shared memory: bytes from the slot's beginning."""

    form: Form | None
    config: Config

    def w(self, h: int, i: int) -> int:
        """64 columns of eight rows of W, 16 bytes for each lane."""
        return (h * self.config.rows // 8 + i) * 512

    def a(self, h: int) -> int:
        """64 columns of the rows of a."""
        return self.config.rows * LINE + h * self.config.q * LINE // 2

    @property
    def sa(self) -> int:
        """Scales of a, [group][row]: a word with the scale, and at which bit of it that is."""
        return (self.config.rows + self.config.q) * LINE

    @property
    def sw(self) -> int:
        """Scales of W, one for each group of columns."""
        return self.sa + 256

    @property
    def size(self) -> int:
        """Bytes of a slot."""
        return self.sa + (SCALES if self.form and grouped(self.form) else 0)
