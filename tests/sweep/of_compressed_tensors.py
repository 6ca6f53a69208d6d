"""Rows of compressed-tensors 0.20: its own decompression, run in every forward."""

import torch
from table import (
    BREAK,
    DEEP,
    E4M3,
    MLP,
    OLD,
    Case,
    K,
    Made,
    N,
    deep,
    exponents,
    flat,
    float8,
    leave,
    lower,
    octets,
    partial,
    plain_layer,
    scales,
    words,
)


def scheme_of(preset: str | None = None, **weights):
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        preset_name_to_scheme,
    )

    if preset is not None:
        return preset_name_to_scheme(preset, ["Linear"])
    args = QuantizationArgs(symmetric=True, **weights)
    return QuantizationScheme(targets=["Linear"], weights=args)


def compressed(scheme, form: str, n: int, k: int, bias: bool) -> torch.nn.Module:
    """A linear that the library compressed, with random codes and parameters."""
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import initialize_module_for_quantization

    part = plain_layer(n, k, bias).requires_grad_(False)
    initialize_module_for_quantization(part, scheme)
    for name, parameter in part.named_parameters():
        if name.endswith("scale"):
            parameter.data = torch.ones(parameter.shape).to(parameter.dtype)
    part.quantization_format = form
    compress_module(part, form)
    for name, parameter in part.named_parameters():
        if name != "bias":
            parameter.data = value(name, parameter)
    return part


def value(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A random value for a parameter of a compressed module."""
    shape, dtype = parameter.shape, parameter.dtype
    if dtype == torch.int32 and name in ("weight_packed", "weight_zero_point"):
        return words(*shape)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype)
    if dtype == torch.uint8:
        return exponents(*shape) if name == "weight_scale" else octets(*shape)
    if name == "weight":
        return float8(*shape).to(dtype)
    if name.endswith("global_scale"):
        return (torch.rand(shape) * 100 + 20).to(dtype)
    if dtype == E4M3:
        return (torch.rand(shape) * 8 + 0.1).to(dtype)
    return scales(*shape, dtype=dtype) if name == "weight_scale" else parameter


class OnTheFly(torch.nn.Module):
    """Runs the library's `decompress` in every forward; x may be quantised and dequantised."""

    def __init__(self, part: torch.nn.Module, form: str, quantises: bool) -> None:
        from compressed_tensors.compressors import BaseCompressor

        super().__init__()
        self.part, self.scheme, self.quantises = part, part.quantization_scheme, quantises
        self.compressor = BaseCompressor.get_value_from_registry(form)
        shape = getattr(part, "weight_shape", None)
        self.shape = None if shape is None else tuple(map(int, shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from compressed_tensors.quantization import forward_quantize

        state = {name: p for name, p in self.part.named_parameters() if name != "bias"}
        if self.shape:
            state["weight_shape"] = self.shape
        w = self.compressor.decompress(state, self.scheme)["weight"]
        if self.quantises:
            x = forward_quantize(self.part, x, "input", self.scheme.input_activations)
        return torch.nn.functional.linear(x, w, self.part.bias)


def module(
    preset: str | None, form: str, n: int = N, k: int = K, bias: bool = False,
    quantises: bool = False, **weights,
) -> OnTheFly:  # fmt: skip
    scheme = scheme_of(preset, **weights)
    return OnTheFly(compressed(scheme, form, n, k, bias), form, quantises)


def layer(preset: str | None, form: str, rank: int = 3, **more) -> Made:
    made = module(preset, form, **more)
    return Made(made, flat()) if rank == 2 else Made(made, deep(), DEEP)


def mlp() -> Made:
    return Made(MLP(lambda n, k: module("W4A16", PACKED, n, k)), deep(), DEEP)


def frozen(preset: str) -> Made:
    """The library's own forward before compression: the weight is still bf16."""
    from compressed_tensors.quantization import (
        QuantizationStatus,
        initialize_module_for_quantization,
    )

    part = plain_layer(N, K).requires_grad_(False)
    initialize_module_for_quantization(part, scheme_of(preset))
    part.weight_scale.data = scales(*part.weight_scale.shape)
    part.quantization_status = QuantizationStatus.FROZEN
    return Made(part, flat())


PACKED, FLOAT, INT = "pack-quantized", "float-quantized", "int-quantized"
MXFP4, MXFP8, NVFP4 = "mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"
PARAMETER = (("graph_break_on_nn_param_ctor", False),)
# Of a product of bf16 operands, whose codes give a more exact one: by default it is left as it is.
ROUNDED = "the graph multiplies dequantised operands, .* rms error .* largest .* allowed 1.25 and 2"
APART = "the product must be in the graph of its dequantised weight; a graph break"

CASES: tuple[Case, ...] = (
    lower("compressed_tensors/w4a16_sym_group128", partial(layer, "W4A16", PACKED),
          "int4[128,256] group-128 scale bf16", symbolic=True),
    lower("compressed_tensors/w4a16_asym_group128", partial(layer, "W4A16_ASYM", PACKED),
          "int4[128,256] group-128 scale bf16 zero int8", symbolic=True),
    lower("compressed_tensors/w4a16_channel",
          partial(layer, None, PACKED, num_bits=4, type="int", strategy="channel"),
          "int4[128,256] channel scale bf16"),
    lower("compressed_tensors/w4a16_mlp", mlp, "int4[", "group-128 scale bf16", lowered=3),
    lower("compressed_tensors/fp8_weight_only_channel",
          partial(layer, None, FLOAT, bias=True, num_bits=8, type="float", strategy="channel"),
          "float8_e4m3fn[128,256] channel scale bf16", "+bias"),
    lower("compressed_tensors/fp8_dynamic_token_channel",
          partial(layer, "FP8_DYNAMIC", FLOAT, quantises=True),
          "float8_e4m3fn[128,256] channel scale bf16", casts=True, reasons=(ROUNDED,),
          codes=("bf16 [256] -> float8_e4m3fn dynamic token scale bf16",)),
    lower("compressed_tensors/fp8_block_128",
          partial(layer, "FP8_BLOCK", FLOAT, rank=2, n=256, quantises=True),
          "float8_e4m3fn[256,256] block-128x128 scale bf16", casts=True, reasons=(ROUNDED,),
          codes=("bf16 [256] -> float8_e4m3fn dynamic group-128 scale bf16",)),
    lower("compressed_tensors/w8a8_int8_dynamic_token",
          partial(layer, "W8A8", INT, quantises=True),
          "int8[128,256] channel scale bf16", casts=True, reasons=(ROUNDED,)),
    lower("compressed_tensors/mxfp8a16", partial(layer, "MXFP8A16", MXFP8),
          "float8_e4m3fn[128,256] group-32 scale", symbolic=True),
    lower("compressed_tensors/nvfp4a16_no_param_break",
          partial(layer, "NVFP4A16", NVFP4, bias=True),
          "float4_e2m1fn[128,256] group-16", "+bias", dynamo=PARAMETER, symbolic=True),
    lower("compressed_tensors/mxfp4a16, no break at parameters",
          partial(layer, "MXFP4A16", MXFP4),
          "float4_e2m1fn[128,256] group-32", dynamo=PARAMETER, extra=True),
    lower("compressed_tensors/nvfp4, no break at parameters",
          partial(layer, "NVFP4", NVFP4, quantises=True),
          "float4_e2m1fn[128,256] group-16", dynamo=PARAMETER, casts=True, extra=True),
    leave("compressed_tensors/nvfp4a16", BREAK, partial(layer, "NVFP4A16", NVFP4), APART, APART),
    leave("compressed_tensors/nvfp4", BREAK, partial(layer, "NVFP4", NVFP4, quantises=True),
          APART, APART),
    leave("compressed_tensors/mxfp4a16", BREAK, partial(layer, "MXFP4A16", MXFP4), APART, APART),
    leave("compressed_tensors/mxfp4", BREAK, partial(layer, "MXFP4", MXFP4, quantises=True),
          APART, APART),
    leave("compressed_tensors/w3a16_group128_packed", BREAK, partial(layer, "W3A16", PACKED)),
    leave("compressed_tensors/w8a16_channel_packed", BREAK, partial(layer, "W8A16", PACKED)),
    leave("compressed_tensors/frozen_qdq_fp8_dynamic", BREAK, partial(frozen, "FP8_DYNAMIC"), APART,
          codes=("bf16 [256] -> float8_e4m3fn dynamic tensor scale bf16",)),
    leave("compressed_tensors/frozen_qdq_w4a16", BREAK, partial(frozen, "W4A16"), APART),
    leave("compressed_tensors/v012_w4a16_sym", f"{BREAK}; {OLD}"),
    leave("compressed_tensors/v012_w4a16_act_order", f"{BREAK}; {OLD}"),
    leave("compressed_tensors/v012_fp8_block", f"{BREAK}; {OLD}"),
    leave("compressed_tensors/v012_nvfp4a16", f"{BREAK}; {OLD}"),
)  # fmt: skip
