"""The ahead-of-time builds of the kernel that draws a policy's random words."""

from mxjax.kernels.cases.builds import Argument, Build, Expected
from mxjax.kernels.quantize.draws import GEMMS, constants_of, draw_kernel
from mxjax.runtime.devices import Target

_WORDS = "for lhs and rhs of each GEMM: two words of the operand's key, its GEMM's signs in four"


def builds(target: Target) -> list[Build]:
    """Returns builds for policies with and without rotations that draw signs, for every target."""
    del target
    return [_build(signs) for signs in ((1, 1, 1), (1, 64, 128), (16, 32, 1))]


def _build(signs: tuple[int, ...]) -> Build:
    return Build(
        name="draw_" + "_".join(map(str, signs)),
        kernel=draw_kernel,
        signature={
            "key": Argument((2,), "uint32", meaning="data of a Threefry key"),
            "words": Argument((GEMMS, 2, 6), "uint32", "output", _WORDS),
        },
        constants=constants_of(signs),
        grid=(GEMMS,),
        expected=Expected("draw", {"signs": list(signs)}),
        num_warps=1,
    )
