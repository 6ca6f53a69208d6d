"""What every pattern family asks of its constants."""

from collections.abc import Sequence

from torch.fx import Node

from qinductor.contracts import QuantizedWeight, WeightFormat
from qinductor.errors import Refused
from qinductor.regions import Scope


def check_constant(what: str, order: Sequence[Node], varying: Sequence[Node], scope: Scope) -> None:
    """Refused if anything behind the weight or bias varies; names the first three."""
    lowered = next((n for n in order if str(n.target).startswith("qinductor.")), None)
    if lowered is not None:  # its packed inputs are nothing that the user knows
        raise Refused(
            f"the {what} must be made of constants alone; a product that was lowered before, "
            f"{lowered.name}, is computed into it"
        )
    if varying:
        known = "; ".join(f"{n.name} {scope.why.get(n, f'is {n.target}')}" for n in varying[:3])
        raise Refused(f"the {what} must be made of constants; {known}")


def check_format(weight: QuantizedWeight, compiled: WeightFormat) -> None:
    """Refused if a weight seen at run time has another format than the compiled one."""
    if weight.format != compiled:
        raise Refused(f"this weight is {weight.format}, yet the graph was compiled for {compiled}")
