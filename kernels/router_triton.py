"""Providers of router in Triton, for sm_80 and up: triton.router for few tokens, whose product and
choice are two launches, the second ready while the first runs; triton.select for any number.

The selection follows torch's operations on a GPU bit for bit; what may differ is the order in which
a product is summed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import sympy
import torch

from qinductor.kernels.configs import matched
from qinductor.kernels.router import FP32, ROUTER, Router, cost, results
from qinductor.kernels.router_triton_form import BF16, FP16, device_form, places, power, unsupported
from qinductor.kernels.triton_device import capability, has_triton, shared_memory
from qinductor.op import Spec
from qinductor.rates import BANDWIDTH, RATE, M

FEW = 64  # tokens up to which a product of our own is a choice
PARTS = 64  # parts of the columns, at most
CHUNK = 128  # columns whose sum stays in tensor cores, which cut its last bits off
DEPENDENT = (9, 0)  # compute capability from which a launch can wait on the device for the last one
# Largest number of tokens -> (experts of a tile, columns of a step, warps), the first guess first:
# of sums of products, and of tensor cores
SUMS = {
    1: ((1, 2048, 8), (1, 1024, 4), (2, 2048, 8), (2, 1024, 4), (4, 2048, 8)),
    4: ((1, 1024, 4), (2, 2048, 8), (2, 1024, 4), (1, 2048, 8), (4, 2048, 8)),
    16: ((2, 2048, 8), (4, 2048, 8), (2, 1024, 4)),
}
TILES = {
    8: ((16, 256, 4), (8, 512, 4), (4, 512, 4), (2, 1024, 8), (16, 512, 4), (16, 256, 2)),
    16: ((16, 256, 4), (8, 512, 4), (16, 512, 4), (16, 256, 2), (8, 512, 8), (4, 512, 4)),
    FEW: ((32, 256, 4), (32, 256, 8), (64, 256, 8), (16, 512, 8), (64, 128, 4)),
}
AHEAD = 512  # lines of 128 bytes that a program has fetched before it may read, at most
PROGRAMS = 132  # of one wave, about
SHARED = 160 << 10  # bytes of shared memory that a program's tiles may take, if there are as many


@functools.cache
def device() -> ModuleType:
    """The device code."""
    from qinductor.kernels import router_triton_kernels

    return router_triton_kernels


def _dependent(x: torch.Tensor) -> bool:
    return x.is_cuda and capability(x.device) >= DEPENDENT


@dataclasses.dataclass(frozen=True)
class Config:
    """Experts of a tile, columns of a step, parts of the columns, warps; stages of the pipeline of
    tensor cores, 0: sums of products are formed without them.

    ahead  whether the weight is fetched to the second-level cache before the launch before has
           ended"""

    bn: int
    bk: int
    split: int
    warps: int
    stages: int = 0
    ahead: bool = True

    def __str__(self) -> str:
        text = f"n{self.bn}.k{self.bk}.s{self.split}.w{self.warps}"
        return text + f".p{self.stages}" * (self.stages > 0) + ".late" * (not self.ahead)

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Config":
        """The config that `str` wrote; ValueError for any other text."""
        pattern = r"n(\d+)\.k(\d+)\.s(\d+)\.w(\d+)(?:\.p(\d+))?(\.late)?"
        match = matched(pattern, text, "n2.k1024.s1.w4", "triton.router")
        bn, bk, split, warps, stages = (int(word or 0) for word in match.groups()[:5])
        return Config(bn, bk, split, warps, stages, not match[6])

    def within(self, m: int, limit: int = SHARED) -> "Config":
        """This config of m tokens, or one of fewer stages, whose tiles fit in shared memory."""
        stage = (self.bn + tile_tokens(m, True)) * self.bk * 2
        stages = max(min(2, self.stages), min(self.stages, 1 + limit // stage))
        return dataclasses.replace(self, stages=stages)


def tile_tokens(m: int, dot: bool) -> int:
    """Tokens of a tile."""
    return max(8, min(16 if m <= 16 else FEW, power(m))) if dot else min(4, power(m))


def tensor_cores(x: torch.dtype | None, weight: torch.dtype | None) -> bool:
    """Whether tensor cores multiply these exactly, before they add in float32."""
    return x is weight and x in (BF16, FP16)


@functools.lru_cache(4096)
def product_configs(n: int, k: int, dot: bool, m: int) -> tuple[str, ...]:
    """Configs of the product of m tokens that are worth measuring, the best guess first."""
    found: list[Config] = []
    tiles = next((rows for limit, rows in TILES.items() if m <= limit), TILES[FEW])
    for bn, bk, warps in tiles if dot else ():
        bk = max(16 * warps, min(bk, power(k)))
        steps, across = -(-k // bk), -(-n // bn)
        aims = [PROGRAMS // across, PROGRAMS // across + 1, 2 * PROGRAMS // across]
        aims += [1] * (5 * across >= PROGRAMS)  # then a product alone is one launch
        # Parts of equal numbers of steps, none without any
        sizes = {-(-steps // max(1, min(aim, steps, PARTS))) for aim in aims}
        for size in sorted(sizes, key=lambda size: (-(-steps // size) * across > PROGRAMS, size)):
            stages = min(size + 1, 5 if bn > 8 else 8)
            found.append(Config(bn, bk, -(-steps // size), warps, stages).within(m))
    sums = next((rows for limit, rows in SUMS.items() if m <= limit), () if dot else SUMS[16])
    single = []
    for bn, bk, warps in sums:
        bk = max(32, min(bk, power(k)))
        warps = max(1, min(warps, bk // 256))  # a thread loads 16 bytes of bf16 at once
        steps = -(-k // bk)
        for split in (1, 2, 4, 8):
            each = -(-steps // split)
            if split <= steps and -(-n // bn) * split <= 4 * PROGRAMS and each <= 16:
                made = Config(bn, bk, -(-steps // each), warps)
                late = [dataclasses.replace(made, ahead=False)] * (split == 1 and bn < 4)
                single += [*late, made]
        if steps > 16:  # unrolled, these would be many
            single += [Config(bn, bk, min(PARTS, -(-steps // 16)), warps)]
    found = [*single, *found] if m <= 4 or not dot else [*found, *single]
    return tuple(dict.fromkeys(map(str, found)))


@functools.lru_cache(4096)
def product_constants(config: Config, m: int, k: int, itemsize: int) -> tuple[int, dict[str, Any]]:
    """(parts of the columns, constants of the kernel) of a product of m tokens and K columns of a
    weight, but for those that the device and the result decide."""
    dot, steps = config.stages > 0, -(-k // config.bk)
    each = -(-steps // min(config.split, steps))
    split = -(-steps // each)
    lines = min(power(-(-each * config.bk * itemsize // 128)), max(1, AHEAD // config.bn))
    return split, {
        "MT": tile_tokens(m, dot), "BN": config.bn, "BK": config.bk, "B": config.warps,
        "STEPS": each, "STAGES": max(1, config.stages), "DOT": dot,
        "LINES": lines if config.ahead else 0,
        "EVEN_K": split * each * config.bk == k,
    }  # fmt: skip


def rows_of(x: torch.Tensor, columns: int) -> torch.Tensor:
    """[..., columns] as [T, columns], whose rows are contiguous; a copy where no view is."""
    flat = x.reshape(-1, columns)
    return flat if flat.stride(1) == 1 or columns == 1 else flat.contiguous()


def launch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config,
    out: torch.Tensor | None = None,
    kernels: ModuleType | None = None,
) -> torch.Tensor:
    """The product of x [M, K] and weight [N, K], rows contiguous: rounded to `out` [M, N], else its
    float32 sums [parts, M, N], without the bias."""
    code, (m, k), n = kernels or device(), x.shape, weight.shape[0]
    config = config.within(m, shared_memory(x.device, SHARED) if x.is_cuda else SHARED)
    split, constants = product_constants(config, m, k, weight.itemsize)
    parts = out is None or split > 1
    sums = x.new_empty((split, m, n), dtype=FP32) if parts else None
    into = sums if sums is not None else out
    assert into is not None
    pdl = _dependent(x)
    with torch.cuda.device_of(x):
        code.product[(-(-n // config.bn), split, -(-m // constants["MT"]))](
            x, x.stride(0), weight, weight.stride(0), into if bias is None else bias, into,
            into.stride(-2), m, n, k,
            **constants, PARTS=parts, BIAS=bias is not None, PDL=pdl, num_warps=config.warps,
            enable_fp_fusion=True, launch_pdl=pdl,
        )  # fmt: skip
        if sums is None or out is None:
            return into
        block = 128
        code.sum_parts[(m, -(-n // block))](
            sums, sums if bias is None else bias, out, out.stride(0), m, n, SPLIT=split, B=block,
            BIAS=bias is not None, PDL=pdl, num_warps=1, launch_pdl=pdl,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def launch_select(
    contract: Router,
    logits: torch.Tensor,
    others: Sequence[torch.Tensor],
    warps: int = 1,
    sums: bool = False,
    after: bool = False,
    kernels: ModuleType | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, indices) of logits [M, N], or of float32 sums [parts, M, N] of them.

    others  biases of the logits and of the choice, as far as there are any
    after   whether the last launch of the stream was the product, which may still run"""
    c, code, m = contract, kernels or device(), logits.shape[-2]
    weights, indices = results(c, [logits[0] if sums else logits])
    groups, size = places(c)
    held = [bias.reshape(-1).contiguous() for bias in others]
    logit_bias = held.pop(0) if sums and c.logit_bias is not None else logits
    bias = held.pop(0) if c.bias is not None else logits
    pdl = after and _dependent(logits)
    with torch.cuda.device_of(logits):
        code.select[(m,)](
            logits, logit_bias, bias, weights, indices, m,
            F=device_form(c), SPLIT=logits.shape[0] if sums else 0, GP=groups, GS=size,
            KP=power(c.k), LIB=logits.is_cuda, PDL=pdl, num_warps=warps, launch_pdl=pdl,
            enable_fp_fusion=False, enable_reflect_ftz=False,
        )  # fmt: skip
    return weights, indices


class Family:
    """What both providers share."""

    dense = False
    reference = False
    version = 1

    def runs_on(self, target: str) -> bool:
        return target.startswith("sm_") and int(target[3:]) >= 80

    def missing(self) -> str | None:
        return None if has_triton() else "Triton is not installed"

    def operands(self, contract: Router) -> dict[str, Spec]:
        return {}

    def pack(self, contract: Router, source: None) -> dict[str, torch.Tensor]:
        return {}


class Fused(Family):
    """The product by tiles of experts and parts of the columns, then the selection."""

    name = "triton.router"

    def why_not(self, contract: Router) -> str | None:
        if not contract.hidden:
            return "the logits are given; it makes them"
        return unsupported(contract)

    def limit(self, contract: Router, dense: bool = False) -> int:
        return FEW if tensor_cores(contract.x, contract.weight) else 16

    def seconds(self, contract: Router) -> sympy.Expr:
        # An H200's 5.3, 6.1 and 6.6 us for 1, 8 and 16 tokens of DeepSeek-V3
        return 4.2e-6 + 8e-8 * M + cost(contract)["bytes"] / 0.7 / BANDWIDTH

    def configs(self, contract: Router, m: int) -> Sequence[str]:
        c = contract
        found = product_configs(c.n, c.hidden, tensor_cores(c.x, c.weight), m)
        # Parts cost nothing here: a second launch adds them anyway
        return sorted(found, key=lambda text: ".p" not in text) if m > 2 else found

    def run(
        self,
        contract: Router,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, *others = inputs
        if weight.stride(1) != 1 and contract.hidden > 1:  # a copy would take longer
            return SELECT.run(contract, inputs, packed)
        x = rows_of(x, contract.hidden)
        chosen = Config.parse(config or self.configs(contract, x.shape[0])[0])
        sums = launch_product(x, weight, None, chosen)
        return launch_select(contract, sums, others, sums=True, after=True)


class Select(Family):
    """The selection of given logits, or of those of a product of torch's own."""

    name = "triton.select"

    def why_not(self, contract: Router) -> str | None:
        return unsupported(contract)

    def seconds(self, contract: Router) -> sympy.Expr:
        c, spent = contract, cost(contract)
        cores = tensor_cores(c.x, c.weight)
        rate = RATE * (0.3 if cores else 0.04)
        launches = 2e-6 if not c.hidden else 7e-6 if cores else 25e-6
        return launches + sympy.Max(
            spent["bytes"] / 0.5 / BANDWIDTH, spent["flops"] / rate, evaluate=False
        )

    def configs(self, contract: Router, m: int) -> Sequence[str]:
        return ("w1", "w2", "w4") if contract.n > 64 else ("w1",)

    def run(
        self,
        contract: Router,
        inputs: Sequence[torch.Tensor],
        packed: Sequence[torch.Tensor],
        config: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        warps = _warps(config or "w1")
        if not contract.hidden:
            logits = inputs[0].reshape(-1, contract.n).contiguous()
            return launch_select(contract, logits, inputs[1:], warps)
        logits, others, sums = library_product(contract, inputs)
        return launch_select(contract, logits, others, warps, sums)


@functools.cache
def _warps(text: str) -> int:
    """Warps of a program, of which each has a token."""
    return int(matched(r"w(\d+)", text, "w1", "triton.select")[1])


def chunks(hidden: int) -> int:
    """Parts of the columns that are multiplied on their own, of equal sizes of about `CHUNK`: sums
    of more in tensor cores are less exact than those of float32 arithmetic. 1 if there are none."""
    least = min(PARTS, -(-hidden // CHUNK))
    fits = [parts for parts in range(least, PARTS + 1) if hidden % (8 * parts) == 0]
    return fits[0] if fits else 1


def library_product(
    contract: Router, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor], bool]:
    """(logits [M, N] or their sums [parts, M, N], biases that are not added yet, whether these are
    sums): the graph's own product, but for float32 sums of 16-bit operands in tensor cores."""
    c, (x, weight, *others) = contract, inputs
    x = x.reshape(-1, c.hidden)
    if c.logits is c.x is c.weight and c.logit_bias in (None, c.x):
        if c.logit_bias is None:
            return torch.mm(x, weight.t()), others, False
        return torch.addmm(others[0], x, weight.t()), others[1:], False
    if not tensor_cores(c.x, c.weight) or not x.is_cuda:
        return torch.mm(x.to(FP32), weight.to(FP32).t())[None], others, True
    return long_sums(x, weight), others, True


def long_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Float32 sums [parts, M, N] of 16-bit x [M, K] and weight [N, K], by the library."""
    parts = chunks(x.shape[1])
    if parts == 1:
        return torch.mm(x, weight.t(), out_dtype=FP32)[None]
    left = x.unflatten(1, (parts, -1)).transpose(0, 1)
    right = weight.unflatten(1, (parts, -1)).permute(1, 2, 0)
    return torch.bmm(left, right, out_dtype=FP32)


SELECT = Select()
ROUTER.register(Fused())
ROUTER.register(SELECT)
