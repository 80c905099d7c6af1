"""`Computed`: the operands of a GEMM that a kernel computes where it quantizes them."""

from mxjax.gated import Gated, GatedGradient
from mxjax.normed import Normed

Computed = Normed | Gated | GatedGradient
