"""The device code of a Triton family in Triton's interpreter, which runs it on the CPU."""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from qinductor.kernels import dequant_matmul_triton

# Of each family the device modules; later ones import from earlier ones.
_MODULES = {
    "dequant_matmul_triton": ("dequant_matmul_triton_decode", "dequant_matmul_triton_kernels"),
    "quantize_triton": ("quantize_triton_numbers", "quantize_triton_kernels"),
    "router_triton": ("quantize_triton_numbers", "router_triton_kernels"),
    "scaled_matmul_triton": ("scaled_matmul_triton_kernels",),
    "scaled_matmul_triton_groups": (
        "dequant_matmul_triton_decode",
        "dequant_matmul_triton_kernels",
        "scaled_matmul_triton_kernels",
        "scaled_matmul_triton_groups_kernels",
    ),
    "sgl_moe_matmul_triton": ("sgl_moe_matmul_kernels",),
    "sgl_moe_rows": ("sgl_moe_rows_kernels",),
}
_DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)  # what the interpreter has the bits of
_convert = interpreter._convert_float
_dot = interpreter.InterpreterBuilder.create_dot
_patch_lang, _patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


@contextlib.contextmanager
def device(host: ModuleType = dequant_matmul_triton) -> Iterator[ModuleType]:
    """Meanwhile the family's kernels are interpreted, and none can be compiled."""
    kernels = _kernels(host.__name__.rpartition(".")[2])
    with contextlib.ExitStack() as stack:
        for where, name, repaired in (
            (interpreter, "_convert_float", _rounded),
            (interpreter, "_patch_lang_tensor", _indexed),
            (interpreter.InterpreterBuilder, "create_dot", _summed),
            (interpreter.InterpreterBuilder, "get_bf16", _constant),
            # What Triton's own library is made of was compiled when it was imported.
            (JITFunction, "__call__", lambda self, *a, **k: _interpreted(self.fn)(*a, **k)),
            (host, "device", lambda: kernels),
        ):
            stack.enter_context(mock.patch.object(where, name, repaired, create=True))
        # At each call Triton would change its language, and change less of it back afterwards.
        stack.callback(_patch_lang(_LANGUAGE).restore)
        stack.enter_context(mock.patch.object(interpreter, "_patch_lang", _unchanged))
        stack.enter_context(triton.knobs.runtime.scope())
        triton.knobs.runtime.interpret = True
        yield kernels


@functools.cache
def _kernels(family: str) -> ModuleType:
    """Copies of the device modules, of which `triton.jit` made interpreted functions."""
    copies = {}
    with mock.patch.dict(sys.modules), triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        for name in (f"qinductor.kernels.{module}" for module in _MODULES[family]):
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.loader is not None
            copies[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(copies[name])
    return copies[name]


_interpreted = functools.cache(interpreter.InterpretedFunction)


def _rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """Conversions of narrow floats as torch has them; the interpreter's own carry no rounding
    over."""
    if not {source, target} & set(_NARROW) or not {source, target} <= set(_DTYPES):
        return _convert(data, source, target, mode)
    held = torch.from_numpy(np.array(data, order="C").view(f"i{data.itemsize}"))
    out = held.view(_DTYPES[source]).to(_DTYPES[target])
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[out.itemsize]
    return out.view(bits).numpy().view(f"u{out.itemsize}")


def _summed(self: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
    """tl.dot of narrow floats: the interpreter multiplies the bits."""
    if a.dtype.scalar not in _NARROW:
        return _dot(self, a, b, d, *more)
    wide = [
        interpreter.TensorHandle(
            _rounded(t.data, t.dtype.scalar, tl.float32, None).view("f4"), tl.float32
        )
        for t in (a, b)
    ]
    return _dot(self, *wide, d, *more)


def _constant(self: Any, value: float) -> Any:
    """A constant in bf16, which Triton 3.6 and 3.8 have not."""
    return self.cast_impl(self.get_fp32(value), tl.bfloat16)


def _unchanged(function: Any) -> Any:
    return interpreter._LangPatchScope()


def _indexed(tensor: Any, scope: Any) -> None:
    """NumPy 2.4 makes no number of the arrays of one element that Triton 3.6 has for scalars."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
