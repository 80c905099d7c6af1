"""Run Quartet's own quantizers and backward scheme and store what one linear layer gives.

Run with Python 3.11, torch 2.13.0+cpu, triton 3.6.0, numpy, on a checkout of github.com/IST-DASLab/Quartet
at commit 00ccd38e544ac5fd56b7837844a427114b884ef8:

    python tests/golden/make_quartet.py CHECKOUT

Its Triton kernel runs in Triton's interpreter. Writes quartet.npz next to this file:

    x [m, k], w [k, n], dy [m, n]   float32 inputs; w is the transpose of torch's
    forward/{x,w}                   QuestMXFP4Quantizer's rotated, dequantized operands
    y, dx, dw                       the layer with AlbertTsengQuantizer(stochastic=False), signs as drawn
    mean/{dx,dw}                    means over DRAWS stochastic runs
    std/{dx,dw}                     standard deviations of one run
    signs                           [32] the signs of the run that gave dx and dw
    versions                        [n]  versions this file was made with
"""

import os
import pathlib
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
import triton

M, K, N = 64, 64, 32
DRAWS = 64


def load(checkout: pathlib.Path):
    """Imports the repository's modules, with a stand-in for a CUDA extension that none of them calls here."""
    extension = types.ModuleType("fast_hadamard_transform")
    extension.hadamard_transform = None
    sys.modules["fast_hadamard_transform"] = extension
    package = checkout / "src" / "models" / "quantization"
    for name, folder in (
        ("models", package.parent),
        ("models.quantization", package),
        ("models.quantization.quantizers", package / "quantizers"),
    ):
        module = types.ModuleType(name)  # without their __init__, which import other quantizers
        module.__path__ = [str(folder)]
        sys.modules[name] = module
    sys.modules["models.quantization.quantizers"].NoQuantizer = None
    import models.quantization.backward as backward
    import models.quantization.quantizers.mxfp4 as mxfp4
    import models.quantization.quantizers.mxfp4_triton as kernels

    kernels.mxfp4_forward_kernel = _Untuned(kernels.mxfp4_forward_kernel.fn)
    return mxfp4, backward


class _Untuned:
    """The kernel with one block size: its autotuner needs a GPU."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(**arguments):
            return self.kernel[grid({"BLOCK_SIZE": 1024})](**arguments, BLOCK_SIZE=1024)

        return launch


def hadamard(n: int) -> torch.Tensor:
    """Returns Sylvester's matrix over sqrt(n), as fast_hadamard_transform gives it."""
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * n**-0.5


class Gradients:
    """AlbertTsengQuantizer as the backward scheme calls it, without the matrix that it makes on a GPU."""

    def __init__(self, mxfp4, stochastic: bool):
        self.function, self.stochastic, self.matrix = mxfp4.AlbertTsengQuantizerFn, stochastic, hadamard(32)
        self.signs = torch.ones(32)

    def __call__(self, x):
        return self.function.apply(x, self.matrix, self.stochastic)

    def re_randomize(self):
        self.signs = torch.randint(0, 2, (32,)).float() * 2 - 1
        self.matrix = hadamard(32) @ torch.diag(self.signs)


def layer(mxfp4, backward, x, w, dy, stochastic: bool):
    """Returns y, dx, dw, the operands that the forward GEMM multiplies, and the gradient quantizer."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    quantizer = Gradients(mxfp4, stochastic)
    xq = mxfp4.QuestMXFP4QuantizerFn.apply(x, hadamard(32))
    wq = mxfp4.QuestMXFP4QuantizerFn.apply(w, hadamard(32))
    y = backward.QEQWtt_QEtQXttFn.apply(xq, wq, quantizer)
    y.backward(dy)
    return y.detach(), x.grad, w.grad, xq.detach(), wq.detach(), quantizer


def main(checkout: pathlib.Path) -> None:
    mxfp4, backward = load(checkout)
    torch.manual_seed(0)
    x, w, dy = torch.randn(M, K), torch.randn(N, K) * 0.05, torch.randn(M, N) * 0.01
    x[:, 3] *= 20
    y, dx, dw, xq, wq, quantizer = layer(mxfp4, backward, x, w, dy, stochastic=False)
    drawn = [layer(mxfp4, backward, x, w, dy, stochastic=True)[1:3] for _ in range(DRAWS)]
    dxs, dws = (torch.stack(t).double() for t in zip(*drawn))
    arrays = {
        "x": x, "w": w.T, "dy": dy, "forward/x": xq, "forward/w": wq.T, "y": y, "dx": dx, "dw": dw.T,
        "mean/dx": dxs.mean(0).float(), "mean/dw": dws.mean(0).T.float(),
        "std/dx": dxs.std(0).float(), "std/dw": dws.std(0).T.float(), "signs": quantizer.signs,
    }  # fmt: skip
    versions = np.array([f"torch {torch.__version__}", f"triton {triton.__version__}", "Quartet 00ccd38e"])
    path = pathlib.Path(__file__).with_name("quartet.npz")
    np.savez_compressed(path, versions=versions, **{k: v.numpy() for k, v in arrays.items()})
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
