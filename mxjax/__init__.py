"""mxjax: training in MXFP4, with the precision of every GEMM of a linear layer as a pure argument."""

from mxjax import stats
from mxjax.dot import dot, dot_general
from mxjax.einsum import einsum
from mxjax.formats import FORMATS
from mxjax.hadamard import hadamard_matrix, random_signs, rotate
from mxjax.layer_dot import DotGeneral, make_dot_general
from mxjax.operand import Operand
from mxjax.policy import Gemm, Policy, Rotation, with_scale_rule
from mxjax.policy_json import policy_from_json, policy_to_json, set_fields
from mxjax.quantize import MXArray, dequantize, pack, quantize, unpack
from mxjax.ragged import ragged_dot
from mxjax.recipes import get_policy, policies
from mxjax.transform import transform
from mxjax.weight_layout import Layout

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
