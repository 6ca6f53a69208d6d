"""Compile caches on disk: one private folder, whose files are checked before they are used.

`caches()` points Inductor, Triton and CuTe DSL to `<cache>/v1-<hash>`, where <cache> is
`tables.root()` and the hash is of all that what lies there depends on. These caches hold code and
pickles, so the folder must be this user's alone; and a process that is killed, or a disk, can leave
a broken file, so each is compared with a manifest when a process first uses the folder.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from qinductor import tables
from qinductor.caches import isa
from qinductor.caches.manifest import Manifest
from qinductor.passes import sources

VERSION = 1
NAMES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUTE_DSL_CACHE_DIR": "cute",
}
NOBODY = 65534  # how a user namespace shows owners that it does not know, root often among them

_lock = threading.RLock()
_undo = contextlib.ExitStack()  # what the outermost `caches` has changed
_depth = 0  # of all threads together: the environment is the process's


@contextlib.contextmanager
def caches(on: bool = True) -> Iterator[None]:
    """What is compiled within keeps its files in the folder. Variables that the user has set stay
    as they are, and all are restored at the end. Where there is no folder, or this is not `on`,
    nothing is changed."""
    global _depth
    if not on:
        yield
        return
    with _lock:
        if _depth == 0 and (place := folder()) is not None:
            _undo.callback(_restore, {name: os.environ.get(name) for name in NAMES})
            os.environ.update({n: str(place / NAMES[n]) for n in NAMES if not is_set_by_user(n)})
            _undo.enter_context(isa.known(place / "isa.json"))
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _undo.close()
                record(soon=True)


def folder() -> pathlib.Path | None:
    """The folder of this version, checked; a temporary one where it cannot be used; None where
    there are no owners of files (Windows)."""
    if not hasattr(os, "geteuid"):
        return None
    with _lock:
        path, _ = _opened(_root())
        if path is not None and not path.is_dir():  # cleared meanwhile
            _opened.cache_clear()
            path, _ = _opened(_root())
        return path


def record(soon: bool = False) -> None:
    """Writes down the files that are there, for the next process to trust. `soon`: unless that
    would take more than a twentieth of the time since the last one; it is done at exit anyway."""
    with _lock:
        if hasattr(os, "geteuid"):
            manifest = _opened(_root())[1]
            if manifest is not None and not (soon and manifest.is_recent()):
                with said("the files of the cache are not recorded"):
                    manifest.record()


@contextlib.contextmanager
def said(what: str) -> Iterator[None]:
    """An OSError within is a warning."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"qinductor: {what}: {error}", stacklevel=3)


def _root() -> str:
    try:
        return str(tables.root())
    except RuntimeError:  # a user without a home
        return ""


@functools.cache
def _opened(root: str) -> tuple[pathlib.Path | None, Manifest | None]:
    """(folder, its manifest; None of a temporary folder)."""
    try:
        if not root:
            raise FileNotFoundError("this user has no home folder")
        path = made(pathlib.Path(root))
        manifest = Manifest(path)
        removed = manifest.open()
        atexit.register(_close, manifest)
    except OSError as error:
        warnings.warn(
            f"qinductor: the cache {root} is not used: {error}; a temporary folder takes its place "
            "(QINDUCTOR_CACHE names another)",
            stacklevel=2,
        )
        try:
            path = pathlib.Path(tempfile.mkdtemp(prefix="qinductor-"))
        except OSError:
            return None, None
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        return path, None
    if removed:
        warnings.warn(
            f"qinductor: removed from the cache {path}, to be compiled again: {removed}",
            stacklevel=2,
        )
    return path, manifest


def _close(manifest: Manifest) -> None:
    with contextlib.suppress(OSError):
        manifest.close()


def made(root: pathlib.Path) -> pathlib.Path:
    """The folder of this version below root, made if need be. PermissionError if others could put
    files there."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = root.resolve()
    path = root / name()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    for place in (path, root, *root.parents):
        reason = _open_to_others(place, ours=place in (path, root), private=place == path)
        if reason is not None:
            raise PermissionError(reason)
    return path


def _open_to_others(path: pathlib.Path, ours: bool, private: bool) -> str | None:
    """Why somebody else may write to a folder; None if nobody may.

    ours     it must be this user's
    private  not even to a group that this user alone is in
    """
    status, user = path.lstat(), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is no folder, or a link to one"
    if status.st_uid != user and (ours or status.st_uid not in (0, NOBODY)):
        return f"{path} belongs to user {status.st_uid}, and this process runs as {user}"
    if not ours and status.st_mode & stat.S_ISVTX:
        return None  # as /tmp: who does not own an entry cannot replace it
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be written to by everybody; chmod go-w it"
    if status.st_mode & stat.S_IWGRP and (private or not _is_alone(status.st_gid)):
        return f"{path} can be written to by group {status.st_gid}; chmod go-w it"
    return None


def _is_alone(group: int) -> bool:
    """Whether this user is the only member of a group, as where each user has one of their own."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = user.pw_gid == group and found.gr_name == user.pw_name
    return own and set(found.gr_mem) <= {user.pw_name}


@functools.cache
def name() -> str:
    """The folder's name: the version of its format, and a hash of what its files depend on."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    cpu = platform.machine(), tables.cpu_name(), torch.backends.cpu.get_cpu_capability()
    made_of = [torch.__version__, torch.version.git_version, triton, sys.version, *cpu, sources()]
    return f"v{VERSION}-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]}"


def is_set_by_user(variable: str) -> bool:
    """Whether a variable names another place than the one that torch writes there by itself."""
    value = os.environ.get(variable)
    default = os.path.abspath(default_cache_dir())
    return value is not None and value != default and not value.startswith(f"{default}/triton/")


def _restore(before: dict[str, str | None]) -> None:
    for variable, value in before.items():
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value
