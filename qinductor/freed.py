"""Tensors whose memory was given back: who may be, how, and what reading one says.

A storage is resized to nothing and told to refuse its address: whatever reads it then, in Python or
C++, raises MESSAGE. Shape, dtype and identity stay, so guards hold and nothing is compiled again.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._inductor.codecache import CppCodeCache

from qinductor.errors import QinductorError

MESSAGE = (
    "this tensor's memory was freed by qinductor, as Options(weights='replace') asks: its weight "
    "is packed now, and only the compiled model can use it. Compile with weights='keep' to save, "
    "move or change the model, or load it again (load_state_dict(..., assign=True))"
)
# For builds of torch without CUDA, which have no binding of it.
FORBID = """
#include <c10/core/StorageImpl.h>
extern "C" void forbid(void* storage, const char* message) {
  auto* held = static_cast<c10::StorageImpl*>(storage);
  held->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}
"""


@functools.cache
def _forbid() -> Callable[[int], object] | str:
    """Makes all reading of a storage raise MESSAGE; or why this build of torch cannot."""
    bound = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if bound is not None:
        return lambda storage: bound(storage, MESSAGE)
    from qinductor.caches.disk import caches

    try:
        with caches():
            library = CppCodeCache.load(FORBID)
    except Exception as error:
        return f"freed memory must be made unreadable, which takes a C++ compiler: {error}"
    function, message = library.forbid, MESSAGE.encode()
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_char_p], None
    return lambda storage: function(storage, message)


def unable() -> str | None:
    """Why nothing can be freed here, or None."""
    found = _forbid()
    return found if isinstance(found, str) else None


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory was given back."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def why_not(tensor: torch.Tensor) -> str | None:
    """Why a tensor's memory cannot be given back: somebody else may read it; or None."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.itemsize:
        return "it is a part of a larger storage"
    if torch._C._storage_Use_Count(storage._cdata) > 2:  # the tensor and `storage`
        return "another tensor has its storage, a view of it or an entry of a state_dict, say"
    if not storage.resizable() or (tensor.is_cpu and storage.is_shared()):
        return (
            "its memory is not this process's own: an array's, a mapped file's, another process's"
        )
    return None


def free(tensor: torch.Tensor) -> int:
    """Gives a tensor's memory back; its bytes. The caller has asked `unable` and `why_not`."""
    forbid = _forbid()
    assert not isinstance(forbid, str)
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    forbid(storage._cdata)
    return size


def parts(value: Any) -> Iterable[torch.Tensor]:
    """The plain tensors that a tensor, or a subclass of it, is made of."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from parts(getattr(value, name))
        else:
            yield value


def check(arguments: Sequence[Any], what: str) -> None:
    """QinductorError if an argument was freed, where `what` would read it."""
    for value in arguments:
        if any(is_freed(part) for part in parts(value)):
            kind = f"{type(value).__name__} {list(value.shape)}"
            raise QinductorError(f"{what}, for which it needs a {kind}, yet {MESSAGE}")
