"""Small modules with random codes, scales and zeros, each spelling its weight in its own way."""

import dataclasses
from collections.abc import Callable

import torch
from torch.nn.functional import linear, pad

N, K, G = 48, 128, 32  # output and input features, group
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Make = Callable[[torch.nn.Module, torch.dtype], torch.Tensor]


class Holder(torch.nn.Module):
    """Buffers, and a function of them and the arguments."""

    def __init__(self, function: Callable, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(self, *args)


class Dequantised(Holder):
    """`product` of x and the weight that `make(self, dtype)` computes from the buffers."""

    def __init__(self, make: Make, product: Callable, **tensors: torch.Tensor) -> None:
        super().__init__(lambda m, x: product(m, x, make(m, x.dtype)), **tensors)
        self.make = make


class Random:
    """Random tensors from one seed."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, *shape: int, dtype=torch.uint8) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def words(self, *shape: int) -> torch.Tensor:
        """int32, every bit random."""
        return self.integers(-(2**31), 2**31, *shape, dtype=torch.int32)

    def scales(self, *shape: int, dtype=BF16) -> torch.Tensor:
        """Between 0.002 and 0.022."""
        return (torch.rand(shape, generator=self.generator) * 0.02 + 0.002).to(dtype)

    def normal(self, *shape: int, dtype=BF16, times: float = 1) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * times).to(dtype)

    def float8(self, *shape: int, dtype=torch.float8_e4m3fn) -> torch.Tensor:
        return self.normal(*shape, dtype=dtype, times=40)


def nibbles(packed: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """[N, K] codes 0..15 from two a byte."""
    pair = [packed & 15, packed >> 4]
    return torch.stack(pair[::-1] if high_first else pair, -1).flatten(1)


def grouped(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    """(q - zero) * scale, each one a group of a row; without brackets, for fake CUDA."""
    q = q.unflatten(1, (scale.shape[1], -1))
    q = q if zero is None else q - zero.unsqueeze(2)
    return (q * scale.unsqueeze(2)).flatten(1)


# Products.


def plain(m: Dequantised, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return linear(x, w)


def biased(m: Dequantised, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return linear(x, w, m.bias)


def mm(m: Dequantised, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w.t())


def addmm(m: Dequantised, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.addmm(m.bias, x, w.t())


def transposed(m: Dequantised, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """For a weight that is [K, N]."""
    return x @ w


def scaled(m: Dequantised, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return linear(x, w) * m.output_scale


# Weights.


def symmetric(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return grouped(nibbles(m.codes).to(dtype) - 8, m.scale)


def high_first(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return grouped(nibbles(m.codes, high_first=True).to(dtype) - 8, m.scale)


def unsigned(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return grouped(nibbles(m.codes).to(dtype), m.scale)


def signed_shifts(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return grouped(torch.stack([m.codes << 4 >> 4, m.codes >> 4], -1).flatten(1).to(dtype), m.scale)


def int32_words(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    codes = nibbles(m.codes.view(torch.uint8)).view(torch.int8) - 8
    return codes.to(dtype) * m.scale


def gptq(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    """[K, N] from int32 codes [K/8, N] and zeros [groups, N/8]; `order` gives each k its group."""
    codes = m.codes.unsqueeze(1).expand(-1, 8, -1) >> m.shifts.view(1, 8, 1)
    codes = (codes.to(torch.int8) & 15).flatten(0, 1)
    zero = m.zero.unsqueeze(2).expand(-1, -1, 8) >> m.shifts.view(1, 1, 8)
    zero = (zero.to(torch.int8) & 15).flatten(1)
    return m.scale.index_select(0, m.order) * (codes - zero.index_select(0, m.order))


def zeroed(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return grouped(nibbles(m.codes).to(dtype), m.scale, m.zero.to(dtype))


def packed_zero(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return grouped(nibbles(m.codes).to(dtype), m.scale, nibbles(m.zero).to(dtype))


def minimum(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    codes = nibbles(m.codes).to(dtype).unflatten(1, (m.scale.shape[1], -1))
    return (codes * m.scale.unsqueeze(2) + m.minimum.unsqueeze(2)).flatten(1)


def unscaled(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return m.codes.to(dtype)


def whole(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    """One scale for the tensor, a row or a column: what broadcasting makes of it."""
    return m.codes.to(dtype) * m.scale


def divided(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return m.codes.to(dtype) / m.scale


def in_groups(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return grouped(m.codes.to(dtype), m.scale)


def in_float32(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    return (m.codes.float() * m.scale).to(dtype)


def exponents(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    """Scales that are powers of two, stored as biased exponents."""
    return grouped(m.codes.to(dtype), torch.pow(2.0, m.scale.int() - 127).to(dtype))


def sliced_blocks(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    """Ragged blocks of 128 x 128: the scales are repeated, and cut to size."""
    n, k = m.codes.shape
    scale = m.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (m.codes.float() * scale.narrow(0, 0, n).narrow(1, 0, k)).to(dtype)


def padded_blocks(m: Dequantised, dtype: torch.dtype) -> torch.Tensor:
    """Ragged blocks of 128 x 128: the codes are padded, and the weight is cut to size."""
    (n, k), (rows, columns) = m.codes.shape, m.scale.shape
    codes = pad(m.codes.to(dtype), (0, 128 * columns - k, 0, 128 * rows - n))
    blocks = codes.view(rows, 128, columns, 128) * m.scale.to(dtype).view(rows, 1, columns, 1)
    return blocks.view(128 * rows, 128 * columns).narrow(0, 0, n).narrow(1, 0, k)


@dataclasses.dataclass(frozen=True)
class Case:
    """A weight and its product.

    tensors  what the module holds, from random numbers
    x, rank  dtype of the activation, and its rank
    k        input features
    """

    make: Make
    product: Callable
    tensors: Callable[[Random], dict[str, torch.Tensor]]
    x: torch.dtype = BF16
    rank: int = 2
    k: int = K

    def module(self, seed: int = 0) -> Dequantised:
        return Dequantised(self.make, self.product, **self.tensors(Random(seed))).eval()

    def weight(self, module: Dequantised) -> torch.Tensor:
        """W[N, K] as eager computes it."""
        w = module.make(module, self.x)
        return w.t() if self.product is transposed else w

    def activation(self, m: int, seed: int = 1) -> torch.Tensor:
        """[m, K], or for rank 3 [1, m, K]."""
        x = Random(seed).normal(m, self.k, dtype=self.x)
        return x if self.rank == 2 else x[None]


CASES = {
    "int4_low_first": Case(
        symmetric, plain,
        lambda r: {"codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, K // G)},
    ),
    "int4_high_first": Case(
        high_first, plain,
        lambda r: {"codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, K // G)},
        rank=3,
    ),
    "int4_signed_shifts": Case(
        signed_shifts, biased,
        lambda r: {
            "codes": r.integers(-128, 128, N, K // 2, dtype=torch.int8),
            "scale": r.scales(N, K // 64), "bias": r.normal(N),
        },
    ),
    "int4_int32_words": Case(
        int32_words, mm, lambda r: {"codes": r.words(N, K // 8), "scale": r.scales(N, 1)}
    ),
    "int4_unsigned": Case(
        unsigned, plain,
        lambda r: {"codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, K // G)},
    ),
    "int4_gptq": Case(
        gptq, transposed,
        lambda r: {
            "codes": r.words(K // 8, N), "zero": r.words(K // 64, N // 8),
            "shifts": torch.arange(0, 32, 4, dtype=torch.int32),
            "order": torch.arange(K, dtype=torch.int32) // 64,
            "scale": r.scales(K // 64, N, dtype=FP16),
        },
        FP16,
    ),
    "int4_zero": Case(
        zeroed, plain,
        lambda r: {
            "codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, K // G),
            "zero": r.integers(0, 16, N, K // G),
        },
    ),
    "int4_packed_zero": Case(
        packed_zero, biased,
        lambda r: {
            "codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, K // G),
            "zero": r.integers(0, 256, N, K // G // 2), "bias": r.normal(N),
        },
    ),
    "int4_float_zero": Case(
        zeroed, plain,
        lambda r: {
            "codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, K // G, dtype=FP16),
            "zero": r.normal(N, K // G, dtype=FP16, times=2) + 7,
        },
        FP16,
    ),
    "int4_minimum": Case(
        minimum, plain,
        lambda r: {
            "codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, K // G),
            "minimum": r.normal(N, K // G, times=0.1),
        },
    ),
    "int4_channel_fp32": Case(
        symmetric, plain,
        lambda r: {"codes": r.integers(0, 256, N, K // 2), "scale": r.scales(N, 1, dtype=FP32)},
        FP32,
    ),
    "int8_tensor": Case(
        whole, addmm,
        lambda r: {
            "codes": r.integers(-128, 128, N, K, dtype=torch.int8), "scale": r.scales(),
            "bias": r.normal(N),
        },
    ),
    "int8_channel": Case(
        whole, plain,
        lambda r: {
            "codes": r.integers(-128, 128, N, K, dtype=torch.int8),
            "scale": r.scales(N, 1, dtype=FP16),
        },
        FP16,
    ),
    "int8_group": Case(
        in_groups, plain,
        lambda r: {
            "codes": r.integers(-128, 128, N, K, dtype=torch.int8), "scale": r.scales(N, K // G),
        },
    ),
    "int8_input_channel": Case(
        whole, plain,
        lambda r: {
            "codes": r.integers(-128, 128, N, K, dtype=torch.int8),
            "scale": r.scales(1, K, dtype=FP32),
        },
        FP32,
    ),
    "int8_stored_transposed": Case(
        whole, transposed,
        lambda r: {
            "codes": r.integers(-128, 128, K, N, dtype=torch.int8), "scale": r.scales(N),
        },
    ),
    "int8_scale_after": Case(
        unscaled, scaled,
        lambda r: {
            "codes": r.integers(-128, 128, N, K, dtype=torch.int8), "output_scale": r.scales(N),
        },
    ),
    "int8_scale_after_rank3": Case(
        unscaled, scaled,
        lambda r: {
            "codes": r.integers(-128, 128, N, K, dtype=torch.int8), "output_scale": r.scales(N),
        },
        rank=3,
    ),
    "e4m3_channel": Case(
        whole, biased,
        lambda r: {"codes": r.float8(N, K), "scale": r.scales(N, 1), "bias": r.normal(N)},
    ),
    "e4m3_group": Case(
        in_groups, plain, lambda r: {"codes": r.float8(N, K), "scale": r.scales(N, K // G)}
    ),
    "e4m3_sliced_blocks": Case(
        sliced_blocks, plain,
        lambda r: {"codes": r.float8(144, 200), "scale": r.scales(2, 2, dtype=FP32)},
        k=200,
    ),
    "e4m3_padded_blocks": Case(
        padded_blocks, plain,
        lambda r: {"codes": r.float8(144, 200), "scale": r.scales(2, 2, dtype=FP32)},
        k=200,
    ),
    "e4m3_exponents": Case(
        exponents, plain,
        lambda r: {"codes": r.float8(N, K), "scale": r.integers(117, 123, N, K // G)},
    ),
    "e5m2_divided": Case(
        divided, plain,
        lambda r: {
            "codes": r.float8(N, K, dtype=torch.float8_e5m2), "scale": 1 / r.scales(dtype=FP16),
        },
        FP16,
    ),
    "e5m2_float32": Case(
        in_float32, plain,
        lambda r: {
            "codes": r.float8(N, K, dtype=torch.float8_e5m2), "scale": r.scales(N, 1, dtype=FP32),
        },
    ),
}  # fmt: skip
