"""Random operands of products: calls of a route on them, and whether its results are right."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from qinductor import timing
from qinductor.contracts import dequantize
from qinductor.formats import Contract
from qinductor.kernels import scaled_matmul_cases as scaled
from qinductor.kernels.dequant_matmul import Case
from qinductor.kernels.scaled_matmul import ScaledMatmul
from qinductor.op import Op, Provider, split
from qinductor.testing import OUTPUTS, product_oracle

JUDGED = 32  # rows of a result that are compared with the reference: the first, and the last


class Weight:
    """A random weight of a contract, packed for whichever provider is asked for."""

    def __init__(self, op: Op, contract: Any, device: str) -> None:
        self.op, self.contract, self.device = op, contract, device
        self.source = self.made()
        self.packed: dict[str, list[torch.Tensor]] = {}
        self.rows = 0  # the last M
        self.sampled: dict[int, Any] = {}  # its x by seed

    def made(self) -> Any:
        """The operands that providers pack."""
        source = moved(Case("", 1, self.contract).make()[1], self.device)
        self.w = dequantize(source.weight)
        return source

    def x(self, m: int, seed: int = 0) -> Any:
        """[m, K], always the same for a seed. Those of the last m are kept: routes share them."""
        if m != self.rows:
            self.rows, self.sampled = m, {}
        if seed not in self.sampled:
            self.sampled[seed] = self.sample(m, seed)
        return self.sampled[seed]

    def sample(self, m: int, seed: int) -> Any:
        made = torch.Generator(self.device).manual_seed(seed)
        shape = m, self.contract.weight.k
        return torch.randn(shape, generator=made, device=self.device).to(self.contract.x)

    def dense(self, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, W) of the dense product of these sizes."""
        return self.x(m), self.w

    def judge(self, ours: torch.Tensor, xs: Sequence[Any], rows: torch.Tensor) -> None:
        """AssertionError if results, of these rows of each x, are not near enough."""
        x = torch.cat([x[rows] for x in xs])
        product_oracle(ours, torch.nn.functional.linear(x, self.w), x, self.w)

    def function(self, route: str) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
        """((x, packed) -> result, packed) of a route. Refused if this weight cannot be packed."""
        name, config = split(route)
        provider: Provider = self.op.providers[name]
        if name not in self.packed:
            found = provider.pack(self.contract, self.source)
            self.packed[name] = [found[held] for held in provider.operands(self.contract)]
        more = {} if config is None else {"config": config}
        return lambda x, packed: provider.run(self.contract, x, packed, **more), self.packed[name]

    def check(self, route: str, m: int) -> None:
        """AssertionError if a result is further from the exact product than the oracle allows."""
        run, packed = self.function(route)
        self.holds(lambda x: run(x, packed), m)

    def holds(self, run: Callable[[Any], torch.Tensor], m: int) -> None:
        """AssertionError if a function of x gives what is further from the exact product than the
        oracle allows, UserWarning where another provider had to run instead."""
        rows = torch.arange(m, device=self.device)
        rows = rows if m <= JUDGED else torch.cat([rows[: JUDGED // 2], rows[-JUDGED // 2 :]])
        count = -(-OUTPUTS // (len(rows) * self.contract.weight.n))
        xs = [self.x(m, seed) for seed in range(count)]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* runs instead")
            found = [run(x)[rows] for x in xs]
        self.judge(torch.cat(found), xs, rows)

    def calls(self, route: str, m: int) -> list[timing.Call]:
        """Calls of a route at m rows, for a timer."""
        run, packed = self.function(route)
        return timing.rotated(run, self.x(m), packed)


class ScaledWeight(Weight):
    """The same for products of codes: x is [codes, scale, (zero)]."""

    def made(self) -> Any:
        self.known: tuple[Any, ...] = ()  # what the last rows were judged by
        return scaled.Case("", 1, self.contract).make(device=self.device)[2]

    def of(self, source: Any) -> "ScaledWeight":
        """The same with other operands."""
        made = copy.copy(self)
        made.source, made.packed, made.known = source, {}, ()
        return made

    def sample(self, m: int, seed: int) -> Any:
        a, scale = scaled.activation(self.contract, m, seed, device=self.device)
        scale = scale.t().contiguous().t()  # as quantisers write groups for matrix products
        return [t.to(self.device) for t in (a, scale, *scaled.zeros(self.contract, m, seed))]

    def dense(self, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        n, k = self.contract.weight.n, self.contract.weight.k
        x, w = (torch.randn(rows, k, device=self.device).bfloat16() for rows in (m, n))
        return x, w

    def judge(self, ours: torch.Tensor, xs: Sequence[Any], rows: torch.Tensor) -> None:
        key = [(x[0].data_ptr(), x[0].shape) for x in xs], len(rows)
        if not self.known or self.known[0] != key:
            self.known = key, *self.expected(xs, rows)
        product_oracle(ours, *self.known[1:])

    def expected(
        self, xs: Sequence[Any], rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(eager's result, and what it multiplies, x and W in float64) of these rows of each x."""
        contract, eager, wide = self.contract, [], []
        for a, *held in xs:
            a = a.view(torch.uint8)[rows].view(a.dtype)
            scale, *zero = (t[rows] if contract.group else t for t in held)
            given = contract, a, scale, self.source, *zero
            eager.append(scaled.eager(*given))
            x, w = scaled.wide(*given)
            wide.append(x)
        return torch.cat(eager), torch.cat(wide), w


def weight_of(op: Op, contract: Contract, device: str) -> Weight:
    """A random weight of either operator."""
    kind = ScaledWeight if isinstance(contract, ScaledMatmul) else Weight
    return kind(op, contract, device)


def moved(source: Any, device: str) -> Any:
    """Random operands on another device."""

    def there(value: Any) -> Any:
        held = {n: t.to(device) for n, t in vars(value).items() if isinstance(t, torch.Tensor)}
        return dataclasses.replace(value, **held)

    return dataclasses.replace(there(source), weight=there(source.weight))


def blank(op: Op, contract: Any, route: str, m: int, device: str) -> None:
    """Runs a route once on memory as it is: all that it compiles is compiled, and kept on disk."""
    name, config = split(route)
    provider: Provider = op.providers[name]
    specs = provider.operands(contract).values()
    packed = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
    more = {} if config is None else {"config": config}
    provider.run(contract, blank_x(contract, m, device), packed, **more)


def blank_x(contract: Contract, m: int, device: str) -> Any:
    """x of a product, not written."""
    k = contract.weight.k
    if not isinstance(contract, ScaledMatmul):
        return torch.empty((m, k), dtype=contract.x, device=device)
    shape = (-(-k // contract.group), m) if contract.group else (1,)
    held = [contract.scale] if contract.zero is None else [contract.scale, contract.zero]
    made = [torch.empty(shape, dtype=dtype, device=device) for dtype in held]
    return [torch.empty((m, k), dtype=contract.a, device=device), *(t.t() for t in made)]


def spread(function: Callable[..., None], tasks: Iterable[tuple[Any, ...]], jobs: int) -> int:
    """Calls a function for each tuple of arguments in `jobs` processes that are started for it;
    how many calls failed. For what is kept on disk: a failure is met again where it matters."""
    failed = 0
    fresh = multiprocessing.get_context("spawn")  # a fork has no use of CUDA
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=fresh) as pool:
        try:
            for future in [pool.submit(function, *task) for task in tasks]:
                with contextlib.suppress(Exception):
                    future.result()
                failed += future.exception() is not None
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed
