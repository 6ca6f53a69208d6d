"""Estimates of time: a device's rates, and expressions in M, BANDWIDTH and RATE."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import sympy

M = sympy.Symbol("M", integer=True, nonnegative=True)
BANDWIDTH = sympy.Symbol("BANDWIDTH", positive=True)  # bytes a second of the device's memory
RATE = sympy.Symbol("RATE", positive=True)  # flops a second of bf16 matrix products


class Rates(NamedTuple):
    """What a device sustains, by measurement or, for sm_100, near what its maker states."""

    bandwidth: float
    rate: float


RATES = {
    "sm_80": Rates(1.9e12, 290e12),
    "sm_90": Rates(4.2e12, 790e12),
    "sm_100": Rates(7.5e12, 2000e12),
}


def rates(target: str) -> Rates | None:
    """The rates of a target, or of the next lower one that has some; None for a CPU."""
    if not target.startswith("sm_"):
        return None
    known = [name for name in RATES if int(name[3:]) <= int(target[3:])]
    return RATES[known[-1] if known else "sm_80"]


def roofline(cost: Mapping[str, sympy.Expr]) -> sympy.Expr:
    """Seconds that "bytes" and "flops" take at best, whichever take longer."""
    # Evaluated it would be simplified, in 40 ms.
    return sympy.Max(cost["bytes"] / BANDWIDTH, cost["flops"] / RATE, evaluate=False)


def evaluator(seconds: sympy.Expr) -> Callable[[int, Rates], float]:
    """(M, rates) -> the value of an expression in M, BANDWIDTH and RATE.

    As Python code, which takes 1 ms to make; sympy takes as long for each value."""
    code = compile(sympy.pycode(seconds), "seconds", "eval")
    known: dict[str, Any] = {"__builtins__": {"max": max, "min": min}, "math": math}

    def value(m: int, at: Rates) -> float:
        return float(eval(code, known, {"M": m, "BANDWIDTH": at.bandwidth, "RATE": at.rate}))

    return value
