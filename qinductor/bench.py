"""`python -m qinductor bench dequant_matmul` (or scaled_matmul): times by M of the providers, of
what the dispatcher picks, of stock Inductor's code and of the dense product, beside the device's
floor."""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qinductor import tables, timing
from qinductor.contracts import FLOAT_CODES, QuantizedWeight, dequantize
from qinductor.errors import QinductorError, Refused
from qinductor.formats import Contract, contract_of, op_of, rows_of, shape_of
from qinductor.kernels.dequant_matmul import DEQUANT_MATMUL
from qinductor.kernels.scaled_matmul import SCALED_MATMUL
from qinductor.op import Op, Plan, routes_of, single, split
from qinductor.rates import evaluator, rates, roofline
from qinductor.trial import ScaledWeight, Weight, weight_of
from qinductor.tune import Timer, Tuner, plain, triton

ROWS = "1,4,16,64,256,1024,4096"
FORMATS = {DEQUANT_MATMUL.name: "int4-g128", SCALED_MATMUL.name: "fp8-row"}  # the default ones
STOCK, DENSE, CHOSEN = "stock Inductor", "dense (torch linear)", "qinductor"


@dataclasses.dataclass
class Result:
    """What was measured: microseconds by contender and M.

    floor   least microseconds by M; empty where the device's rates are not known
    routes  what the dispatcher chose, by M; rung: by what
    """

    device: str
    contract: str
    us: dict[str, dict[int, float]]
    floor: dict[int, float]
    routes: dict[int, str]
    rung: str
    torch: str = torch.__version__
    triton: str | None = dataclasses.field(default_factory=triton)


def main(arguments: list[str]) -> int:
    """Measures, prints a table, writes what is asked for.

    Errors: QinductorError for bad input and for a plot without matplotlib."""
    parser = argparse.ArgumentParser(prog="python -m qinductor bench", description=__doc__)
    parser.add_argument("op", choices=list(FORMATS))
    parser.add_argument("--shape", default="4096x4096", metavar="NxK")
    parser.add_argument("--format", help=f"default {', '.join(FORMATS.values())}")
    parser.add_argument("--m", default=ROWS)
    parser.add_argument("--plot", metavar="OUT.png", help="draws the times; needs matplotlib")
    parser.add_argument("--json", metavar="OUT.json", help="writes the same as data")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where it is")
    given = parser.parse_args(arguments)
    word = given.format or FORMATS[given.op]
    contract = plain(contract_of(word, *shape_of(given.shape)))
    if op_of(contract).name != given.op:
        raise QinductorError(f"{word} is a format of {op_of(contract).name}, not of {given.op}")
    rows = rows_of(given.m)
    if given.plot:
        pyplot()  # an error before the work, not after it
    try:
        result = measured(contract, rows, given.device or _device())
    except Refused as refused:
        raise QinductorError(refused.reason) from refused
    print(text(result))
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps(dataclasses.asdict(result), indent=1))
    if given.plot:
        plot(result, given.plot)
    return 0


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def measured(
    contract: Contract, rows: Sequence[int], device: str, timer: Timer | None = None
) -> Result:
    """The times of every contender at each M."""
    op = op_of(contract)
    tuner = Tuner(device, tables.own(), op, timer)  # knows what can run here
    target, limits, timer = tuner.target, tuner.limits(contract), tuner.timer
    weight = weight_of(op, contract, device)
    plan = op.plan(contract, target, None)
    found = {name: weight.function(name)[1] for name in [p.name for p in plan.providers(op)]}
    us: dict[str, dict[int, float]] = {name: {} for name in (*limits, CHOSEN, STOCK, DENSE)}
    routes: dict[int, str] = {}
    for m in rows:
        _say(f"M={m}")
        for name in (name for name, limit in limits.items() if m <= limit):
            calls = weight.calls(best(op, contract, name, target, m), m)
            us[name][m] = timer(calls, device)
        routes[m] = next(route for limit, route in plan.steps if m <= limit)
        x = weight.x(m)
        tensors = _packed(op, plan, contract, found)
        us[CHOSEN][m] = timer(timing.rotated(_dispatched(op, contract, plan), x, tensors), device)
        if not isinstance(weight, ScaledWeight):
            us[STOCK][m] = timer(_stock(weight, x), device)
        dense = timing.rotated(torch.nn.functional.linear, *weight.dense(m))
        us[DENSE][m] = timer(dense, device)
    _say("")
    at, least = rates(target), evaluator(roofline(op.cost(contract)))
    floor = {} if at is None else {m: least(m, at) * 1e6 for m in rows}
    return Result(tuner.name, contract.summary, us, floor, routes, plan.rung)


def _say(line: str) -> None:
    """A line that the next one overwrites, if somebody looks."""
    if sys.stderr.isatty():
        print(f"\r{line:<20}", end="" if line else "\r", file=sys.stderr, flush=True)


def best(op: Op, contract: Any, name: str, target: str, m: int) -> str:
    """The fastest measured route of a provider at m rows, else the provider's own choice."""
    table = tables.load(tables.device(target) or target, tables.own())
    versions = {name: getattr(op.providers[name], "version", 1)}
    found = table.find(op.name, contract, versions)
    usable = routes_of(op.providers[name], contract, m)
    row = {} if found is None else {r: t for r, t in nearest(found, m).items() if r in usable}
    return min(row, key=row.__getitem__) if row else usable[0]


def nearest(found: tables.Found, m: int) -> dict[str, float]:
    """The row of the measured M that is nearest."""
    return found.times[min(found.times, key=lambda other: max(other / m, m / other))]


def _packed(
    op: Op, plan: Plan, contract: Any, found: dict[str, list[torch.Tensor]]
) -> list[torch.Tensor]:
    """The packed tensors of a plan, in its order, from those of its providers."""
    one = single(contract)[0]
    named: dict[str, torch.Tensor] = {}
    for name, tensors in found.items():
        named.update(zip(op.providers[name].operands(one), tensors, strict=True))
    return [named[name] for name in plan.operands(op, contract)]


def _dispatched(op: Op, contract: Any, plan: Plan) -> Callable[..., torch.Tensor]:
    """(x, packed) -> what the operator gives, as a compiled graph calls it."""
    operator = getattr(torch.ops.qinductor, op.name)
    texts = str(contract), str(plan)
    if op is SCALED_MATMUL:
        return lambda x, packed: operator(*x, packed, *texts)
    return lambda x, packed: operator(x, packed, *texts)


def _stock(weight: Weight, x: torch.Tensor) -> list[timing.Call]:
    """Calls of what stock Inductor makes of dequantising and multiplying: codes in a container as
    libraries have it (two 4-bit codes a byte, else one), scales and zeros as they are."""
    source = weight.source.weight
    form, codes = source.format, source.codes
    halves = form.bits == 4 and form.codes not in FLOAT_CODES and form.k % 2 == 0
    offset = 8 if halves and form.codes.startswith("int") else 0
    if halves:
        codes = (codes.to(torch.int16) + offset).to(torch.uint8)
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    parts = {
        name: tensor
        for name in ("scale", "zero", "outer", "table")
        if (tensor := getattr(source, name)) is not None
    }

    def linear(x: torch.Tensor, codes: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        if halves:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
            codes = codes.to(torch.int8) - offset if offset else codes
        held = dict(zip(parts, tensors, strict=True))
        return torch.nn.functional.linear(x, dequantize(QuantizedWeight(form, codes, **held)))

    torch._dynamo.reset()  # a graph of its own for every M
    compiled = torch.compile(linear, backend="inductor", dynamic=False)
    with torch.no_grad():
        compiled(x, codes, *parts.values())
    return timing.rotated(compiled, x, codes, *parts.values())


def text(result: Result) -> str:
    """The table: a row a contender, a column an M; microseconds, and their ratio to the floor."""
    rows = [("M", *map(str, result.routes))]
    times = {**result.us, "floor": result.floor} if result.floor else result.us
    for name, us in times.items():
        cells = []
        for m in result.routes:
            ratio = f" ({us[m] / result.floor[m]:.2f})" if m in us and m in result.floor else ""
            cells.append(f"{us[m]:.1f}{ratio}" if m in us else "-")
        rows.append((name, *cells))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    head = [
        f"{result.contract} on {result.device}; torch {result.torch}, triton {result.triton}",
        "us" + (" (ratio to the floor)" if result.floor else "") + ", operands in no cache",
    ]
    chosen = [f"{CHOSEN} ({result.rung}):"]
    before = None
    for m, route in result.routes.items():
        name, config = split(route)
        if route != before:
            chosen.append(f"  from M={m}: {name}{f' {config}' if config else ''}")
        before = route
    return "\n".join([*head, *lines, *chosen])


def pyplot() -> Any:
    """matplotlib.pyplot, without a display. QinductorError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise QinductorError("--plot needs matplotlib: pip install 'qinductor[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot(result: Result, path: str) -> None:
    """The times over M, both logarithmic, as a picture."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for name, us in result.us.items():
        if us:
            style = {"linewidth": 3} if name == CHOSEN else {"marker": ".", "linewidth": 1}
            axes.plot(list(us), list(us.values()), label=name, **style)
    if result.floor:
        axes.plot(list(result.floor), list(result.floor.values()), "k--", label="floor")
    axes.set(xscale="log", yscale="log", xlabel="M", ylabel="us")
    figure.suptitle(result.contract)
    axes.set_xticks(list(result.routes), list(map(str, result.routes)))
    axes.set_xticks([], minor=True)
    axes.set_title(f"{result.device}, torch {result.torch}", fontsize="small")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)
    plt.close(figure)
