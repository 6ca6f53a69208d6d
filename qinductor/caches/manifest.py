"""The manifest of a cache folder: which files are whole, by size and hash.

Processes that use a folder hold a lock on a file of their own in `live/`, which the system drops
when they die. Files that the manifest does not list, or lists with another content, are another's
work in progress if they are younger than the oldest living process; else they are removed.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import math
import os
import pathlib
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from qinductor.caches.files import replace

LIST, LOCK, LIVE, REMOVED = "manifest.json", "lock", "live", "removed"
PACKED = "packed"
APART = {LIST, LOCK, LIVE, PACKED}  # packed weights have a hash in each file
SETTLED = 1.0  # seconds after which a file that is not ours is no longer being written to
PATIENCE = 60.0  # seconds to wait for the lock
RARELY = 20  # times as long as the last recording took, until the next one of `soon`


class Row(NamedTuple):
    """What is known of a file. Nobody changes one in place: who rewrites it makes a new inode."""

    size: int
    changed: int
    inode: int
    digest: str


class Manifest:
    """The manifest of one folder in one process."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.process = folder, os.getpid()
        self.alive: int | None = None  # a descriptor, locked
        self.name = ""  # of its file
        self.last, self.took = -math.inf, 0.0

    def open(self) -> str:
        """Removes what is not whole: what that was, in words, or "". OSError if it cannot."""
        with self._locked():
            oldest = self._oldest()
            rows, problem = self._read()
            bad, unlisted = self._unfit(rows, oldest)
            units = sorted({self._unit(path) for path in (*bad, *unlisted)})
            for unit in units:
                self._remove(unit)
            if bad or problem:
                self._write({p: row for p, row in rows.items() if self._unit(p) not in units})
            for path in (self.folder / PACKED).glob("tmp*") if oldest == math.inf else ():
                path.unlink()  # half written
            self._live()
        said = [problem] if problem and unlisted else []
        for what, paths in (("not as written", bad), ("not known to be whole", unlisted)):
            if paths:
                names = ", ".join(sorted(paths)[:3]) + ", ..." * (len(paths) > 3)
                said.append(f"{len(paths)} files that are {what} ({names})")
        return "; ".join(said)

    def _unfit(self, rows: dict[str, Row], oldest: float) -> tuple[list[str], list[str]]:
        """(files that are not as listed, files that are not listed), older than `oldest`."""
        bad, unlisted, same = [], [], []
        found = dict(self._files())
        for path, status in found.items():
            old = status.st_mtime < oldest
            if path not in rows:
                unlisted += [path] * old
            elif status.st_size != rows[path].size or not stat.S_ISREG(status.st_mode):
                bad += [path] * old
            else:
                same.append((path, old))
        digests = self._digests([path for path, _ in same])
        bad += [p for p, old in same if old and digests[p] != rows[p].digest]
        # Triton takes a folder with its list of files for one that has them all.
        bad += [p for p in rows if p not in found and (self.folder / self._unit(p)).exists()]
        return bad, unlisted

    def record(self) -> None:
        """Lists the files that have come, and forgets those that are gone or changed in place."""
        if not self.folder.is_dir():  # cleared
            return
        started = time.monotonic()
        with self._locked():
            alone = self._oldest() == math.inf
            rows, _ = self._read()
            kept: dict[str, Row] = {}
            new: dict[str, os.stat_result] = {}
            for path, status in self._files():
                row = rows.get(path)
                now = (status.st_size, status.st_mtime_ns, status.st_ino)
                if row is not None and row[:3] == now:
                    kept[path] = row
                elif row is not None and row.inode == status.st_ino:
                    continue
                elif alone or time.time() - status.st_mtime > SETTLED:
                    new[path] = status
            for path, status in new.items():  # no threads: there are none at exit
                digest = self._digest(path)
                kept[path] = Row(status.st_size, status.st_mtime_ns, status.st_ino, digest)
            if kept != rows:
                self._write(kept)
        self.last = time.monotonic()
        self.took = self.last - started

    def is_recent(self) -> bool:
        """Whether it was recorded so lately that again would cost too much."""
        return time.monotonic() - self.last < RARELY * self.took

    def close(self) -> None:
        """Is no longer alive, and records: of several, the last one lists what all have made."""
        if self.alive is not None and self.process == os.getpid():
            os.close(self.alive)
            self.alive = None
            self.record()

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """All files but locks, by their path in the folder."""
        folders = [""]
        while folders:
            inside = folders.pop()
            try:
                entries = list(os.scandir(self.folder / inside))
            except FileNotFoundError:
                continue
            for entry in entries:
                path = f"{inside}/{entry.name}" if inside else entry.name
                if path in APART or entry.name.endswith(".lock"):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    yield path, entry.stat(follow_symlinks=False)

    def _digests(self, paths: list[str]) -> dict[str, str]:
        """The hash of each file; "" of one that is gone or cannot be read."""
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return dict(zip(paths, pool.map(self._digest, paths), strict=True))

    def _digest(self, path: str) -> str:
        try:
            descriptor = os.open(self.folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                return hashlib.sha256(file.read()).hexdigest()
        except OSError:
            return ""

    @staticmethod
    def _unit(path: str) -> str:
        """What goes with a file: of Triton's, the folder of its kernel."""
        parts = path.split("/")
        return "/".join(parts[:2]) if parts[0] == "triton" and len(parts) > 2 else path

    def _remove(self, unit: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            path = self.folder / unit
            if path.is_dir() and not path.is_symlink():  # at once, so that nobody reads half of it
                trash = tempfile.mkdtemp(prefix=REMOVED, dir=self.folder)
                path.rename(pathlib.Path(trash, path.name))
                shutil.rmtree(trash, ignore_errors=True)
            else:
                path.unlink()

    def _read(self) -> tuple[dict[str, Row], str]:
        """(rows, what is wrong with the manifest or "")."""
        try:
            rows = json.loads((self.folder / LIST).read_text())
            return {
                path: Row(int(a), int(b), int(c), str(d)) for path, (a, b, c, d) in rows.items()
            }, ""
        except FileNotFoundError:
            return {}, "there is no manifest"
        except (ValueError, TypeError, LookupError, AttributeError):
            return {}, "the manifest cannot be read"

    def _write(self, rows: dict[str, Row]) -> None:
        # In `live`, so that what an interruption leaves is no file of the cache.
        self._live_folder()
        replace(self.folder / LIST, [json.dumps(rows).encode()], self.folder / LIVE)

    def _live_folder(self) -> None:
        (self.folder / LIVE).mkdir(mode=0o700, exist_ok=True)

    def _live(self) -> None:
        """Makes this process one of the living."""
        import fcntl

        self._live_folder()
        self.alive, self.name = tempfile.mkstemp(f"-{self.process}", "", self.folder / LIVE)
        fcntl.flock(self.alive, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _oldest(self) -> float:
        """When the oldest other process that is alive began; infinity if there is none."""
        import fcntl

        oldest = math.inf
        for path in {*(self.folder / LIVE).glob("*")} - {pathlib.Path(self.name)}:
            with contextlib.suppress(FileNotFoundError), path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    oldest = min(oldest, os.fstat(file.fileno()).st_mtime)
        return oldest

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time. TimeoutError if another does not give it back."""
        import fcntl

        until = time.monotonic() + PATIENCE
        descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError(f"{file.name} is locked for {PATIENCE} s") from None
                    time.sleep(0.01)
            yield
