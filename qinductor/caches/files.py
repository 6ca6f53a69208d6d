"""Files that are replaced at once: a reader sees the old one or the new one, whole."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterable


def replace(
    path: pathlib.Path, pieces: Iterable[bytes | memoryview], folder: pathlib.Path | None = None
) -> None:
    """Writes a file in `folder`, by default its own, and puts it in its place. What is raised
    meanwhile, an OSError say, leaves nothing behind."""
    with tempfile.NamedTemporaryFile(dir=folder or path.parent, delete=False) as file:
        try:
            file.writelines(pieces)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
