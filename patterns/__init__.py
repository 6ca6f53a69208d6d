"""Pattern families, in the order in which they look at a graph."""

from qinductor.pattern import Pattern
from qinductor.patterns.dequant_matmul import DequantMatmulPattern

PATTERNS: tuple[Pattern, ...] = (DequantMatmulPattern(),)
