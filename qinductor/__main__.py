"""`python -m qinductor`: demo, explain, doctor, tune, bench, compare."""

import argparse
import importlib.util
import pathlib
import sys
from typing import Any

import torch

import qinductor
from qinductor.errors import QinductorError


def main(arguments: list[str]) -> int:
    """Runs one command; returns the exit status: 0, 2 for bad input, or the command's own."""
    parser = argparse.ArgumentParser(prog="python -m qinductor", description=qinductor.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="a real quantised model, end to end", add_help=False)
    commands.add_parser("doctor", help="what this machine has, what runs on it", add_help=False)
    commands.add_parser("tune", help="measures the providers on this device", add_help=False)
    commands.add_parser("bench", help="an operator's times by M, and others'", add_help=False)
    commands.add_parser("compare", help="products of codes beside other libraries'", add_help=False)
    explain = commands.add_parser("explain", help="what would be lowered, and why the rest not")
    explain.add_argument(
        "factory", metavar="FILE.py:FACTORY", help="a function that returns (module, args, kwargs)"
    )
    explain.add_argument(
        "--target", help="cpu, sm_80, sm_90 or sm_100; default: the model's device"
    )
    explain.add_argument("--dynamic", action="store_true", help="trace with dynamic shapes")
    given, rest = parser.parse_known_args(arguments)
    if given.command == "demo":
        from qinductor.demo import main as demo

        return demo(rest)
    if given.command == "doctor":
        from qinductor.doctor import main as doctor

        return doctor(rest)
    if given.command in ("tune", "bench", "compare"):
        return _measured(given.command, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        module, args, kwargs = _made(given.factory)
        options = {"target": given.target} if given.target else None
        report = qinductor.explain(
            module, *args, options=options, dynamic=given.dynamic or None, **kwargs
        )
    except QinductorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0


def _measured(command: str, arguments: list[str]) -> int:
    from qinductor import bench, compare, tune

    qinductor.load()
    try:
        if command == "compare":
            return compare.main(arguments)
        return bench.main(arguments) if command == "bench" else tune.main(arguments, _made)
    except QinductorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _made(text: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What the factory in `FILE.py:FACTORY` returns; QinductorError says what is wrong with it."""
    path, _, name = text.rpartition(":")
    file = pathlib.Path(path)
    if not path or not file.is_file():
        raise QinductorError(f"wanted FILE.py:FACTORY with an existing file, got {text!r}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise QinductorError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        names = ", ".join(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise QinductorError(f"{path} has no function {name!r}; it has: {names or 'none'}")
    made = factory()
    parts = made if isinstance(made, tuple) else (made,)
    if (
        len(parts) != 3
        or not callable(parts[0])
        or not isinstance(parts[1], (tuple, list))
        or not isinstance(parts[2], dict)
    ):
        got = ", ".join(type(part).__name__ for part in parts)
        raise QinductorError(f"{name}() must return (module, args, kwargs); it returned ({got})")
    return made[0], tuple(made[1]), dict(made[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
