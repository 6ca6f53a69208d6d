"""Inductor's questions to the C++ compiler, answered once for a machine and not in every process.

For each of its ten ways to vectorise it builds a library, and in a process of its own loads it: on
two cores of a Xeon that takes a second process 17 s with torch 2.11, whose children import torch,
and 1.6 s with 2.13.
"""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from torch._inductor import cpu_vec_isa

from qinductor.caches.files import replace


@contextlib.contextmanager
def known(path: pathlib.Path) -> Iterator[None]:
    """Within, what was found to work is read from `path`; what was not is asked again.

    The file's folder stands for torch, Python and the CPU; an answer's key for the compiler, its
    flags and the question.
    """
    kind: Any = cpu_vec_isa.VecISA
    ask = kind.check_build
    works = _read(path)

    def check_build(self: Any, code: str) -> bool:
        compiler = cpu_vec_isa._get_isa_dry_compile_fingerprint(self.build_arch_flags())
        asked = f"{self}={compiler}={self.build_macro()}={code}"
        key = hashlib.sha256(asked.encode()).hexdigest()
        if key not in works:
            if not ask(self, code):
                return False
            works.add(key)
            _write(path, works | _read(path))
        return True

    kind.check_build = check_build
    try:
        yield
    finally:
        kind.check_build = ask


def _read(path: pathlib.Path) -> set[str]:
    try:
        found = json.loads(path.read_text())
        return {key for key in found if isinstance(key, str)}
    except (OSError, ValueError, TypeError):
        return set()


def _write(path: pathlib.Path, works: set[str]) -> None:
    with contextlib.suppress(OSError):  # asked again next time
        replace(path, [json.dumps(sorted(works)).encode()])
