"""Named contracts of routers, and inputs for them: for tests, tuner and benchmark."""

import dataclasses
import math
from typing import Any

import torch

from qinductor.kernels.router import Router

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """name, tokens, contract"""

    name: str
    m: int
    contract: Router

    def inputs(self, seed: int = 0, device: str = "cpu", m: int = 0) -> list[torch.Tensor]:
        """Random inputs of `m` tokens, by default the case's. Sums of a product are exact: its
        operands are few whole numbers by a power of two."""
        g = torch.Generator().manual_seed(seed)
        return _inputs(self.contract, m or self.m, g, device)

    def hostile(self, device: str = "cpu") -> list[torch.Tensor]:
        """Rows of equal, tied, infinite, subnormal, huge logits, nan; `m` has no say in how many.

        Of a product those of zeros, of one token over and over, of numbers that are infinite."""
        g = torch.Generator().manual_seed(1)
        c = self.contract
        found = _inputs(c, 96, g, device)
        first = _hostile_rows(c.n, g).to(c.logits) if not c.hidden else _hostile_tokens(found[0])
        return [first.to(device), *found[1:]]


def _inputs(c: Router, m: int, g: torch.Generator, device: str) -> list[torch.Tensor]:
    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=g).float()

    if c.x is not None and c.weight is not None:
        unit = 2.0 ** -round(math.log2(2 * math.sqrt(c.hidden)))
        found = [whole(m, c.hidden).to(c.x), (whole(c.n, c.hidden) * unit).to(c.weight)]
    else:
        found = [(torch.randn(m, c.n, generator=g) * 3).to(c.logits)]
    if c.logit_bias is not None:
        found.append((whole(c.n) / 4).to(c.logit_bias))
    if c.bias is not None:
        found.append((torch.randn(c.n, generator=g) / 8).to(c.bias))
    return [tensor.to(device) for tensor in found]


def _hostile_rows(n: int, g: torch.Generator) -> torch.Tensor:
    random = torch.randn(n, generator=g)
    signs = torch.where(torch.rand(n, generator=g) < 0.5, -1.0, 1.0)
    rows = [torch.full((n,), v) for v in (0.0, -0.0, 1.0, -3e38, 2.0**-140, math.inf, math.nan)]
    rows += [torch.full((n,), -math.inf), torch.arange(n).float(), -torch.arange(n).float()]
    rows += [random * 2.0**e for e in (-140, -126, -30, -8, 3, 6, 8, 100)]
    rows += [(random * by).round() for by in (0.4, 1, 2)]  # ties
    rows += [signs * 0.0, signs * 2.0**-149, signs * 1.5, signs * 87.5, signs * 104.0]
    rows += [20 + random * 1e-5, -20 + random * 1e-5, 1 + random.round() * 2.0**-23]
    for value in (math.inf, -math.inf, math.nan):
        for step in (1, 2, 5, n):
            row = random.clone()
            row[torch.randperm(n, generator=g)[:: max(1, step)]] = value
            rows.append(row)
    mixed = random.clone()
    mixed[::3], mixed[1::7], mixed[2::11] = math.inf, -math.inf, math.nan
    return torch.stack([*rows, mixed, mixed.flip(0)])


def _hostile_tokens(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[::5] = 0  # all logits are equal
    x[1::5] = x[1]
    x[2, 0], x[7, -1], x[12] = math.inf, math.nan, -math.inf
    return x


def contract(n: int, k: int, dtype: torch.dtype = FP32, **fields: Any) -> Router:
    """A contract of given logits whose scores are computed in float32; `fields` are any others."""
    return Router(n, k, **{"logits": dtype, "compute": FP32, "out": FP32, **fields})


def of_product(
    c: Router, hidden: int, x: torch.dtype = BF16, weight: torch.dtype = BF16, **fields: Any
) -> Router:
    """The contract with the product that makes its logits."""
    return dataclasses.replace(c, hidden=hidden, x=x, weight=weight, **fields)


DEEPSEEK: dict[str, Any] = {
    "score": "sigmoid", "bias": FP32, "groups": 8, "kept": 4, "group_score": "top2",
    "normalised": "s+eps", "epsilon": 1e-20, "scale": 2.5,
}  # fmt: skip
KIMI = DEEPSEEK | {"groups": 1, "kept": 1, "group_score": "max", "scale": 2.827}
GPT_OSS: dict[str, Any] = {"order": "select-score", "compute": BF16, "out": BF16}
MODELS = {
    "deepseek v3": contract(256, 8, **DEEPSEEK),
    "deepseek v3 masked 0": contract(256, 8, masked=0.0, **DEEPSEEK),
    "kimi k2": contract(384, 8, **KIMI),
    "deepseek v4": contract(256, 6, **(KIMI | {"score": "sqrt_softplus", "scale": 1.5})),
    "deepseek v2": contract(
        160, 6, groups=8, kept=3, masked=0.0, taken="choice", normalised="", scale=16.0
    ),
    "mixtral": contract(8, 2, BF16, normalised="s+eps"),
    "qwen3": contract(128, 8, BF16, normalised="s+eps", out=BF16),
    "qwen2": contract(60, 4, BF16, out=BF16),
    "qwen3 next": contract(512, 10, BF16, normalised="s+eps", out=BF16),
    "gpt oss": contract(128, 4, BF16, **GPT_OSS),
    "llama 4": contract(128, 1, BF16, score="sigmoid", **GPT_OSS),
    "granite": contract(72, 10, order="select-score", out=BF16),
    "ernie": contract(64, 6, bias=FP32, normalised="max(s,eps)", epsilon=1e-12),
    "lfm2": contract(32, 4, score="sigmoid", bias=FP32, normalised="s+eps", epsilon=1e-6),
}
FIELDS = {
    "no scores": contract(40, 3, score="none"),
    "no scores, bias, choice": contract(
        40, 3, BF16, score="none", bias=BF16, taken="choice", out=BF16
    ),
    "sigmoid in bf16": contract(
        96, 8, BF16, score="sigmoid", compute=BF16, bias=BF16, groups=4, kept=2, out=BF16,
        group_score="top2", normalised="s+eps", epsilon=1e-20, scale=2.5,
    ),
    "sqrt softplus in bf16": contract(
        96, 8, BF16, score="sqrt_softplus", compute=BF16, normalised="s+eps", out=BF16
    ),
    "softmax in fp16": contract(
        33, 5, FP16, compute=FP16, normalised="max(s,eps)", epsilon=1e-4, out=FP16
    ),
    "scores rounded": contract(64, 6, scores=BF16, bias=FP32, out=FP32),
    "weights normalised in bf16": contract(
        64, 6, inner=BF16, normalised="s+eps", scale=0.3, out=FP32
    ),
    "bias, choice, groups": contract(
        48, 4, bias=FP32, groups=6, kept=1, taken="choice", normalised="s+eps"
    ),
    "more than the kept groups have": contract(32, 8, groups=8, kept=1, bias=FP32),
    "the same, masked 0": contract(32, 8, groups=8, kept=1, bias=FP32, masked=0.0),
    "one group kept of two": contract(14, 3, groups=2, group_score="top2", score="sigmoid"),
    "many chosen": contract(1000, 32, score="sigmoid", normalised="s+eps"),
    "all chosen": contract(7, 7, BF16, indices=torch.int32),
    "one expert": contract(1, 1, order="select-score"),
    "a bias, select, softmax": contract(24, 4, order="select-score", bias=FP32, scale=0.5),
    "groups, select, sigmoid": contract(
        24, 4, FP16, order="select-score", groups=4, kept=2, score="sigmoid", taken="choice"
    ),
}  # fmt: skip
PRODUCTS = {
    "deepseek v3": of_product(MODELS["deepseek v3"], 7168),
    "kimi k2": of_product(MODELS["kimi k2"], 7168),
    "deepseek v4 fp32 weight": of_product(MODELS["deepseek v4"], 4096, weight=FP32),
    "mixtral": of_product(MODELS["mixtral"], 4096),
    "qwen3": of_product(MODELS["qwen3"], 2048),
    "gpt oss": of_product(MODELS["gpt oss"], 2880, logit_bias=BF16),
    "odd": of_product(contract(67, 5), 513, logit_bias=FP32),
    "fp16": of_product(contract(48, 4, FP16, out=FP16), 320, FP16, FP16),
    "fp32": of_product(contract(48, 4, bias=FP32), 320, FP32, FP32),
    "bf16 rounded from fp16": of_product(contract(48, 4, BF16), 320, FP16, FP16),
    "no scores": of_product(contract(20, 3, score="none"), 64),
}
CASES = [
    *(Case(name, 6, made) for name, made in {**MODELS, **FIELDS}.items()),
    *(Case(f"{name} product", 3, made) for name, made in PRODUCTS.items()),
]
