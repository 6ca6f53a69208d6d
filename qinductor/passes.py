"""Inductor's options for one compile: the user's, with our pass in the slot for such passes."""

import functools
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from qinductor.options import Options


def inductor_options(options: Options) -> dict[str, Any]:
    """Inductor's options as the user gave them."""
    of_mode = torch._inductor.list_mode_options(options.mode) if options.mode else {}
    found = {**of_mode, **dict(options.inductor)}
    if options.cudagraphs is not None:
        found["triton.cudagraphs"] = options.cudagraphs == "inductor"
    return found


def patches_of(options: Options, ours: Callable[[Graph], None]) -> dict[str, Any]:
    """Inductor's options for this compile: the user's, and our pass after the user's own."""
    patches = inductor_options(options)
    before = patches.get(
        "joint_custom_pre_pass", getattr(torch._inductor.config, "joint_custom_pre_pass", None)
    )
    passes = list(before) if isinstance(before, (list, tuple)) else [before]
    patches["joint_custom_pre_pass"] = Passes([p for p in passes if p is not None], ours, options)
    # On CUDA it turns products of one row into mul and sum before any pass sees them.
    patches["coordinate_descent_tuning"] = False
    return patches


class Passes(CustomGraphPass):
    """The user's passes, then ours, in the one slot that torch 2.11 has."""

    def __init__(
        self,
        others: Sequence[Callable[[Graph], None]],
        ours: Callable[[Graph], None],
        options: Options,
    ) -> None:
        self.others, self.ours, self.options = others, ours, options

    def __call__(self, graph: Graph) -> None:
        for other in self.others:
            other(graph)
        self.ours(graph)

    def uuid(self) -> Any:
        """Names all that the rewritten graph depends on and does not itself contain.

        None (never cached) if a pass of the user's does not say what it is.
        """
        others = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.others]
        if any(other is None for other in others):
            return None
        return f"qinductor {sources()} {self.options} {others}"

    def __getstate__(self) -> Any:
        return self.uuid()


@functools.cache
def sources() -> str:
    """A digest of our own source, since a changed fake would make cached code stale."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parent
    paths = [*root.glob("*.py")]
    for folder in ("caches", "kernels", "patterns", "serving"):  # `**` does not follow links
        paths += (root / folder).rglob("*.py")
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()
