"""What a row of the sweep is, how it is checked, and helpers of those who build the modules.

A name is `library/case`. A row says what must be true of the graphs that torch.compile makes of a
module of that library: how many products are lowered, and to which contracts; or why none can be.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
from packaging.requirements import Requirement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import qinductor
from qinductor.testing import OUTPUTS, product_oracle

N, K, M = 128, 256, 32  # output and input features, rows of x: 4096 outputs
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
OTHER_M = 40  # that a graph with symbolic M is called with next
INSTALL = "see the README, 'Test': how to install the libraries of the sweep"

# Why a case has no product to lower. The first two hold codes, and no graph shows what they mean.
BREAK = "a graph break stands between the dequantised weight and its product"
OPAQUE = "the library's own operator takes the codes: nothing is dequantised in the graph"
INTEGER = "the product takes codes that no contract has, or scales that are out of order"
DENSE = "the weights are bf16: there are no codes"
OUTSIDE = "the products run outside of any graph"
QUANTISER = "there is no product, only what quantises its operand"
ROUTER = "a router: its weight is dense, and a CPU has no provider"

# Why a case cannot be run here at all.
GPU = "the library's kernel needs a GPU"
OLD = "compressed-tensors 0.12: 0.20 has neither its CompressedLinear nor its unpacking"


@dataclasses.dataclass(frozen=True)
class Made:
    """A module, and what to call it with.

    args     number of rows of x -> arguments
    dynamic  (argument, dimension) pairs that depend on the number of rows
    exact    arguments -> the result with products in float64, where `Wide` cannot run the module
    inside   what it must run inside of
    """

    module: torch.nn.Module
    args: Callable[[int], tuple]
    dynamic: tuple[tuple[int, int], ...] = ((0, 0),)
    exact: Callable | None = None
    inside: contextlib.AbstractContextManager = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Case:
    """A row.

    make     builds the module, with random codes, scales and zeros; None: it cannot be built here
    lowered  how many products are lowered
    says     words that each contract has
    why      why nothing is lowered; None: it is
    reasons  regular expressions: the reasons that the report gives, in order
    codes    for each quantiser of an activation, in order: its contract, or why it has none
             (on a CPU no provider takes it)
    routers  for each router, in order: its contract (on a CPU no provider takes it, either)
    symbolic whether the number of rows is symbolic; it is called with a second one then
    dynamo   settings of Dynamo without which it makes no such graph
    casts    whether Inductor must round where eager does, because x is quantised in the graph
    extra    whether it is a variant of ours, beyond the catalogue
    rows     of x
    needs    requirements that the installed packages must meet beside the library
    """

    name: str
    make: Callable[[], Made] | None = None
    lowered: int = 0
    says: tuple[str, ...] = ()
    why: str | None = None
    reasons: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    symbolic: bool = False
    dynamo: tuple[tuple[str, bool], ...] = ()
    casts: bool = False
    extra: bool = False
    rows: int = M
    needs: tuple[str, ...] = ()

    @property
    def library(self) -> str:
        return self.name.partition("/")[0]

    def __str__(self) -> str:
        return self.name


def lower(name: str, make: Callable[[], Made], *says: str, lowered: int = 1, **more) -> Case:
    """A row whose products are lowered."""
    return Case(name, make, lowered, says, **more)


def leave(name: str, why: str, make: Callable[[], Made] | None = None, *reasons: str, **more):
    """A row that is left alone."""
    return Case(name, make, why=why, reasons=reasons, **more)


# Checks.

MODULES = {"optimum_quanto": "optimum.quanto", "plain_pytorch": "torch"}


def need(library: str) -> None:
    """Skips the test if the library is not installed."""
    name = MODULES.get(library, library)
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the package around it
        found = None
    if found is None:
        pytest.skip(f"{name} is not installed; {INSTALL}")


def meets(requirement: str) -> None:
    """Skips the test if a package, which is installed, does not meet the requirement."""
    wanted = Requirement(requirement)
    got = importlib.metadata.version(wanted.name)
    if not wanted.specifier.contains(got, prereleases=True):
        pytest.skip(f"{wanted.name} is {got}; wanted {wanted.specifier}")


@contextlib.contextmanager
def built(case: Case) -> Iterator[Made]:
    """What the row builds, from a seed of its own, inside of its settings."""
    assert case.make is not None
    need(case.library)
    for requirement in case.needs:
        meets(requirement)
    torch.manual_seed(zlib.crc32(case.name.encode()))
    with torch.no_grad(), torch._dynamo.config.patch(dict(case.dynamo)):
        made = case.make()
        made.module.requires_grad_(False)
        with made.inside:
            yield made


def check(case: Case) -> None:
    """Compiles a row's module, and holds report and result to what the row says."""
    with built(case) as made:
        run(made, functools.partial(hold, case), case.rows, case.symbolic, case.casts)


def check_left(case: Case) -> None:
    """Holds the report on a row that is left alone to what the row says; compiles nothing."""
    with built(case) as made:
        args = made.args(case.rows)
        made.module(*args)  # some libraries unpack and keep things at their first call
        hold(case, [qinductor.explain(made.module, *args)])


def check_routers(case: Case, target: str) -> None:
    """Holds the report for a GPU to the routers that a row has: each is lowered."""
    with built(case) as made:
        args = made.args(case.rows)
        made.module(*args)
        report = qinductor.explain(made.module, *args, options={"target": target})
        found = [site for site in report.sites if site.pattern == "router"]
        assert len(found) == len(case.routers), report
        for site, words in zip(found, case.routers, strict=True):
            assert site.lowered and words in site.contract, report


def run(
    made: Made, holds: Callable, rows: int = M, symbolic: bool = False, casts: bool = False
) -> None:
    """Compiles a module; `holds` judges the reports, eager and float64 the result."""
    inductor = {"emulate_precision_casts": True} if casts else {}
    with torch.no_grad():
        args = made.args(rows)
        eager = made.module(*args)
        compiled = torch.compile(made.module, backend="qinductor", options={"inductor": inductor})
        for argument, dimension in made.dynamic if symbolic else ():
            torch._dynamo.mark_dynamic(args[argument], dimension)
        ours = compiled(*args)
        holds(list(qinductor.reports()))
        compare(made, args, ours, eager)
        if symbolic:
            graphs = len(qinductor.reports())
            other = made.args(OTHER_M)
            compare(made, other, compiled(*other), made.module(*other))
            assert len(qinductor.reports()) == graphs, "another M compiled another graph"


def hold(case: Case, reports: list[qinductor.Report]) -> None:
    """Holds the reports of all its graphs to what the row says."""
    hold_lowered(reports, case.lowered, case.says)
    sites = [site for r in reports for site in r.sites]
    for pattern, expected in (("quantize", case.codes), ("router", case.routers)):
        found = [site.contract or site.reason for site in sites if site.pattern == pattern]
        assert len(found) == len(expected), table_of(reports)
        for got, words in zip(found, expected, strict=True):
            assert words in got, table_of(reports)
    others = [s for s in sites if s.pattern not in ("quantize", "router")]
    reasons = [s.reason for s in others if not s.lowered]
    assert len(reasons) == len(case.reasons), table_of(reports)
    for reason, wanted in zip(reasons, case.reasons, strict=True):
        assert re.search(wanted, reason), table_of(reports)


def hold_lowered(reports: list[qinductor.Report], count: int, says: tuple[str, ...]) -> None:
    """Holds the reports to a number of lowered products, and their contracts to words."""
    sites = [site for report in reports for site in report.sites if site.lowered]
    assert len(sites) == count, table_of(reports)
    for site in sites:
        missing = [word for word in says if word not in site.contract]
        assert not missing, f"not in the contract: {missing}\n{table_of(reports)}"


def table_of(reports: list[qinductor.Report]) -> str:
    return "\n".join(map(str, reports))


def compare(made: Made, args: tuple, ours, eager) -> None:
    """Holds each result to eager's accuracy against products in float64.

    What has no product in it must be equal; of few values the errors say little: within 2 %.
    """
    with Wide() if made.exact is None else contextlib.nullcontext():
        exact = (made.exact or made.module)(*args)
    results = zip(ours, eager, exact, strict=True) if isinstance(eager, tuple) else None
    for mine, theirs, wanted in results or ((ours, eager, exact),):
        if mine.numel() < OUTPUTS:
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)
        elif wanted.dtype == FP64:
            # the oracle multiplies: the product of `wanted` and the identity
            product_oracle(mine, theirs, wanted, torch.eye(mine.shape[-1]))
        else:
            assert torch.equal(mine, theirs)


aten = torch.ops.aten
CODE_PRODUCTS = (aten._int_mm.default, aten._scaled_mm.default, aten._scaled_mm_v2.default)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.mv.default)


class Wide(TorchDispatchMode):
    """Multiplies in float64, and keeps whatever becomes of a product in float64.

    The operands of a first product are as rounded as the module has them.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if set(types) - {torch.Tensor, torch.nn.Parameter}:  # a subclass takes itself apart first
            return NotImplemented
        if func is aten._to_copy.default and args[0].dtype == FP64:
            wanted = kwargs.get("dtype") or FP64
            return args[0] if wanted.is_floating_point else func(*args, **kwargs)
        if func.namespace == "quantized_decomposed":  # takes no other dtype
            args = tree_map(lambda a: a.float() if is_wide(a) else a, args)
        if func is aten._grouped_mm.default:
            x, w, ends = args[:3]
            parts = zip(x.double().tensor_split(ends[:-1].tolist()), w.double(), strict=True)
            return torch.cat([rows @ expert for rows, expert in parts])
        if func in CODE_PRODUCTS:
            return exact_sums(func, *args, **kwargs)
        if func in PRODUCTS:
            args = tree_map(lambda a: a.double() if isinstance(a, torch.Tensor) else a, args)
        return func(*args, **kwargs)


def exact_sums(func, a, b, *rest, **more) -> torch.Tensor:
    """What `func` makes of codes, in float64, rounded nowhere."""
    sums = a.double() @ b.double()
    if func is aten._int_mm.default:
        return sums
    version2 = func is aten._scaled_mm_v2.default
    sa, sb = (rest[0][0], rest[3][0]) if version2 else rest[:2]
    bias = more.get("bias", rest[6] if version2 else rest[2] if len(rest) > 2 else None)
    sums = sums * sa.double() * sb.double()
    return sums if bias is None else sums + bias.double()


def is_wide(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == FP64


# Random values.


def scales(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Between 0.002 and 0.022."""
    return (torch.rand(shape) * 0.02 + 0.002).to(dtype)


def exponents(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Biased exponents of powers of two, 2^-8 to 2^3."""
    return torch.randint(119, 131, shape).to(dtype)


def octets(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words(*shape: int) -> torch.Tensor:
    """int32, every bit random."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def float8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return (torch.randn(shape) * 40).to(dtype)


def spread(*modules: torch.nn.Module) -> None:
    """Gives linears weights whose size differs by row and by 16 columns, so that scales do."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, torch.nn.Linear):
                n, k = part.weight.shape
                size = torch.rand(n, k // 16, 1) + 0.2
                weight = torch.randn(n, k // 16, 16) * size / k**0.5
                part.weight.data = weight.view(n, k).to(part.weight.dtype)
                if part.bias is not None:
                    part.bias.data = torch.randn(n).to(part.bias.dtype)


# Arguments.


def flat(k: int = K, dtype: torch.dtype = BF16) -> Callable[[int], tuple]:
    """x of rank 2."""
    return lambda m: (torch.randn(m, k, dtype=dtype),)


def deep(k: int = K, dtype: torch.dtype = BF16) -> Callable[[int], tuple]:
    """x of rank 3: two sequences."""
    return lambda m: (torch.randn(2, m // 2, k, dtype=dtype),)


DEEP = ((0, 1),)  # what is symbolic there


def tokens(m: int) -> tuple:
    return (torch.randint(0, 512, (2, m // 2)),)


# Modules.


class MLP(torch.nn.Module):
    """silu(gate) * up, then down, and a residual; `make(n, k)` makes the layers."""

    def __init__(self, make: Callable[[int, int], torch.nn.Module]) -> None:
        super().__init__()
        self.gate, self.up, self.down = make(512, K), make(512, K), make(K, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def plain_layer(n: int, k: int, bias: bool = False, dtype: torch.dtype = BF16) -> torch.nn.Linear:
    layer = torch.nn.Linear(k, n, bias=bias, dtype=dtype)
    spread(layer)
    return layer


partial = functools.partial
