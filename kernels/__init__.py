"""Kernel families: operators, their references and their providers, one family a file.

Importing this package imports every file in it, so that a new provider is one new file.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
