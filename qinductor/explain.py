"""`explain`: what the backend would lower in a model, without compiling a kernel."""

import types
from collections.abc import Callable
from typing import Any

import torch

from qinductor.backend import qinductor
from qinductor.options import Options, unknown
from qinductor.report import Report, joined, reports


def explain(
    model: Callable[..., Any], *args: Any, options: Any = None, dynamic: bool | None = None,
    **kwargs: Any,
) -> Report:  # fmt: skip
    """The report on every graph of `model(*args, **kwargs)`, which is run once, eagerly.

    model    a module or function, compiled or not
    options  as for torch.compile(backend="qinductor"); dynamic as for torch.compile
    Weights are identified and proved but not packed; freed ones are restored.
    Errors: OptionError for bad options.
    """
    from qinductor import load

    model = getattr(model, "_torchdynamo_orig_callable", getattr(model, "_orig_mod", model))
    for name in dict(Options.of(options, None).patterns):
        unknown("pattern", name, [pattern.name for pattern in load()])
    found: list[Report] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        run = qinductor(gm, inputs, options=options, compiles=False)
        found.append(reports().pop())
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # A code object of its own, so that the model's recompiles are not counted against these.
    fresh = types.FunctionType(call.__code__.replace(), globals(), closure=call.__closure__)
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    compiled = [(m, m._compiled_call_impl) for m in modules if m._compiled_call_impl is not None]
    try:
        for module, _ in compiled:  # compiled in place, by module.compile()
            module._compiled_call_impl = None
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1 << 20):
            torch.compile(fresh, backend=backend, dynamic=dynamic)(*args, **kwargs)
    finally:
        for module, impl in compiled:
            module._compiled_call_impl = impl
    report = joined(found)
    learns = any(p.requires_grad for m in modules[:1] for p in m.parameters())
    if learns and torch.is_grad_enabled():
        report.notes.append(
            "explained as under torch.no_grad(); called with gradients on, the model is compiled "
            "for training, and nothing is lowered"
        )
    return report
