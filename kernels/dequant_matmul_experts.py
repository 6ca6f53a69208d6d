"""stub"""
from qinductor.contracts import QuantizedWeight


def split(weight: QuantizedWeight, experts: int) -> list[QuantizedWeight]:
    n = weight.format.n // experts
    return [weight.rows(i * n, n) for i in range(experts)]
