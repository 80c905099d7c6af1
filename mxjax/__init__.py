"""mxjax: training in MXFP4, with the precision of every GEMM of a linear layer as a pure argument."""

from mxjax import stats
from mxjax.numerics.array import MXArray, dequantize, pack, unpack
from mxjax.numerics.formats import FORMATS
from mxjax.numerics.hadamard import hadamard_matrix, random_signs, rotate
from mxjax.numerics.operand import Operand
from mxjax.numerics.quantize import quantize
from mxjax.policy.json import policy_from_json, policy_to_json, set_fields
from mxjax.policy.policy import Gemm, Policy, Rotation, with_scale_rule
from mxjax.products.dot import dot, dot_general
from mxjax.products.dot_general import DotGeneral, make_dot_general
from mxjax.products.einsum import einsum
from mxjax.products.ragged import ragged_dot
from mxjax.recipes import get_policy, policies
from mxjax.runtime.mesh import Layout
from mxjax.transform import transform

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "DotGeneral",
    "Gemm",
    "Layout",
    "MXArray",
    "Operand",
    "Policy",
    "Rotation",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "get_policy",
    "hadamard_matrix",
    "make_dot_general",
    "pack",
    "policies",
    "policy_from_json",
    "policy_to_json",
    "quantize",
    "ragged_dot",
    "random_signs",
    "rotate",
    "set_fields",
    "stats",
    "transform",
    "unpack",
    "with_scale_rule",
]
