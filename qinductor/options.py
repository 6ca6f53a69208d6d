"""Options of the backend: what the user asked for, checked, frozen and part of the compile key."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from qinductor.errors import OptionError

SETTINGS = ("on", "off", "require")
TARGETS = ("cpu", "sm_80", "sm_90", "sm_100")
WEIGHTS = ("keep", "replace")
PACKED = ("memory", "disk")
CUDAGRAPHS = ("buckets", "inductor", "off")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `torch.compile(model, backend="qinductor", options=...)`, as a dict or as this.

    patterns   {pattern name: "on" | "off" | "require"}; a name left out takes its default
    mode       one of torch.compile's modes (torch refuses `mode=` together with `options=`)
    target     "cpu", "sm_80", "sm_90" or "sm_100": whose kernels; None: the graph's device
    dense      whether a provider may keep a weight in its dense form where that is fastest: faster
               on a CPU, and no memory saved (the report says how many bytes)
    weights    "keep": packed weights lie beside the model's own. "replace": the memory of those
               whose packed form can restore them is freed, see the README
    packed     "disk": packed weights are kept in the cache folder for the next process, too
    cudagraphs "buckets": what `qinductor.warmup` records is replayed, and graphs that are partly on
               a CPU are left to Inductor's trees. "inductor": its trees record. "off": nobody does.
               None: "buckets", unless mode or Inductor's own options ask for its trees
    inductor   options passed on to Inductor
    Errors: OptionError for an unknown name (with the nearest known one) or value.
    """

    patterns: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    mode: str | None = None
    target: str | None = None
    dense: bool = False
    weights: str = "keep"
    packed: str = "memory"
    cudagraphs: str | None = None
    inductor: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for given in ("patterns", "inductor"):  # frozen, so that assignments raise
            items = _mapping(given, getattr(self, given)).items()
            vars(self)[given] = tuple(sorted(items))
        for name, setting in dict(self.patterns).items():
            if setting not in SETTINGS:
                raise OptionError(
                    f"option patterns[{name!r}] is {setting!r}; wanted one of {', '.join(SETTINGS)}"
                )
        _check("mode", self.mode, MODES)
        _check("target", self.target, TARGETS)
        _check("weights", self.weights, WEIGHTS)
        _check("packed", self.packed, PACKED)
        _check("cudagraphs", self.cudagraphs, CUDAGRAPHS)
        if not isinstance(self.dense, bool):
            raise OptionError(f"option dense is {self.dense!r}; wanted True or False")

    @classmethod
    def of(cls, options: "Mapping[str, Any] | Options | None", mode: str | None) -> "Options":
        """The options that the backend was called with; `mode` is torch.compile's own argument."""
        if isinstance(options, Options):
            return options if mode is None else dataclasses.replace(options, mode=mode)
        given = _mapping("options", options or {})
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            unknown("option", name, known)
        return cls(**{"mode": mode, **given})

    def setting(self, pattern: str, default: str) -> str:
        """`on`, `off` or `require` for this pattern."""
        return dict(self.patterns).get(pattern, default)


def unknown(what: str, name: str, known: list[str]) -> None:
    """OptionError with the nearest known name, unless `name` is known."""
    if name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise OptionError(f"unknown {what} {name!r}; {hint}known: {', '.join(known)}")


def _check(what: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise OptionError(f"option {what} is {value!r}; wanted one of {', '.join(known)}")


def _mapping(what: str, value: Any) -> dict[str, Any]:
    try:
        found = dict(value)
    except (TypeError, ValueError):
        raise OptionError(f"{what} must be a dict, got {value!r}") from None
    for name in found:
        if not isinstance(name, str):
            raise OptionError(f"{what} has the name {name!r}; names are strings")
    return found
