"""The ahead-of-time builds of the kernel that carries packed operands in FP8."""

import jax.numpy as jnp

from mxjax.kernels.cases import shapes
from mxjax.kernels.cases.builds import Argument, Build, Expected
from mxjax.kernels.matmul.carry import BLOCKS, carry_kernel, constants_of, outputs_of, programs_of
from mxjax.numerics.formats import BLOCK
from mxjax.operands.carriers import CARRIER_DTYPES, Carrier
from mxjax.runtime.devices import Target

_ELEMENTS = "E2M1, eight a word, element 8 i + j in bits 4 j to 4 j + 3; [1, rows, 4 words a block of 32]"
_OUT = "the elements times 2**(scale byte - unit), 0 in place of lost ones"
_GROUPED = "as out with a unit for each GROUP blocks, in programs that lost elements; not used if GROUP is 0"
_GROUP_SCALES = "127 + the unit of a group - that of its row; where grouped is written"
_FAR = "as lost, of lost rows with elements that changed in grouped; not used if GROUP is 0"
_LOST_SUM = "192 times the sum of 2**shift of a row's lost blocks; where grouped is written"
_LOST = "bit i is 1 if a shift changed elements of row i of a program's ROWS rows of BLOCKS blocks"


def builds(target: Target) -> list[Build]:
    """Returns builds of Llama 3.1 8B's operands and small ones, for targets that multiply FP8 and not FP4."""
    if target.arch != "sm_90":
        return []
    tensors = [t for tokens in shapes.TOKENS for t in shapes.tensors(tokens)]
    sizes = {(t.rows, t.columns // BLOCK) for t in tensors} | {(t.columns, t.rows // BLOCK) for t in tensors}
    sizes |= {(1, 1), (33, 3), (1, BLOCKS + 1), (3, 2 * BLOCKS)}
    return [_build(*size, carrier, target) for size in sorted(sizes) for carrier in CARRIER_DTYPES]


def _build(n: int, blocks: int, carrier: Carrier, target: Target) -> Build:
    programs = programs_of(n, blocks)
    constants = constants_of(n, blocks, carrier, target, grouped=carrier == "e5m2")
    has_groups = constants["GROUP"] > 0
    grouped, group_scales, far, lost_sum = outputs_of(1, n, blocks, has_groups=has_groups)[3:]
    view = ((1, n, BLOCK * blocks), jnp.dtype(CARRIER_DTYPES[carrier]).name)
    sizes = {"rows": n, "blocks": blocks, "tile": [constants["ROWS"], constants["BLOCKS"]]}
    return Build(
        name=f"carry_{n}x{BLOCK * blocks}_{carrier}",
        kernel=carry_kernel,
        signature={
            "words": Argument((1, n, 4 * blocks), "int32", meaning=_ELEMENTS),
            "scales": Argument((1, n, blocks), "uint8", meaning="E8M0 bytes"),
            "out": Argument((1, n, 8 * blocks), "int32", "output", _OUT, view),
            "unit": Argument((1, n), "uint8", "output", "the scale byte that becomes a factor of 1"),
            "lost": Argument((1, programs), "uint32", "output", _LOST),
            "grouped": Argument(grouped.shape, grouped.dtype.name, "scratch", _GROUPED),
            "group_scales": Argument(group_scales.shape, group_scales.dtype.name, "scratch", _GROUP_SCALES),
            "far": Argument(far.shape, far.dtype.name, "output" if has_groups else "scratch", _FAR),
            "lost_sum": Argument(lost_sum.shape, lost_sum.dtype.name, "scratch", _LOST_SUM),
        },
        constants=constants,
        grid=(programs, 1),
        expected=Expected("carrier", sizes | {"carrier": carrier, "has_groups": has_groups}),
    )
