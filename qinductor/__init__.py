"""qinductor: lowers dequantised weights in traced models to fused kernels.

model = torch.compile(model, backend="qinductor")
print(qinductor.explain(model, x))
"""

import functools
import importlib
import pkgutil

from qinductor.errors import OptionError, QinductorError, RequiredPatternError
from qinductor.explain import explain
from qinductor.options import Options
from qinductor.pattern import Pattern
from qinductor.report import Report, Site, last_report, reports
from qinductor.serving import release, warmup
from qinductor.weights import refresh

__version__ = "0.1.0"
__all__ = [
    "OptionError",
    "Options",
    "QinductorError",
    "Report",
    "RequiredPatternError",
    "Site",
    "explain",
    "last_report",
    "refresh",
    "release",
    "reports",
    "warmup",
]


@functools.cache
def load() -> tuple[Pattern, ...]:
    """Imports kernels and patterns: the one place where the core knows of them.

    Every file of `kernels` is imported, so that a new provider is one new file.
    """
    import qinductor.kernels as kernels
    from qinductor.patterns import PATTERNS

    for file in pkgutil.iter_modules(kernels.__path__):
        try:
            importlib.import_module(f"{kernels.__name__}.{file.name}")
        except ModuleNotFoundError as error:  # device code; its providers say that it is missing
            if error.name not in ("triton", "cutlass"):
                raise

    return PATTERNS
