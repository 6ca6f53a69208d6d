"""Pattern families, in the order in which they look at a graph."""

from qinductor.pattern import Pattern
from qinductor.patterns.dequant_matmul import DequantMatmulPattern
from qinductor.patterns.expert_loops import ExpertLoopsPattern
from qinductor.patterns.quantize import NormQuantizePattern, QuantizePattern
from qinductor.patterns.router import RouterPattern
from qinductor.patterns.scaled_matmul import ScaledMatmulPattern

PATTERNS: tuple[Pattern, ...] = (
    ExpertLoopsPattern(),
    ScaledMatmulPattern("scaled_matmul_requantised", "off", near=False),
    ScaledMatmulPattern("scaled_matmul", "on", near=True),
    DequantMatmulPattern(),
    NormQuantizePattern(),
    QuantizePattern(),
    RouterPattern(),
)
