"""Run MS-AMP's FP4 quantizer and gradient estimator and store what they give.

Run with Python 3.11, torch 2.13.0+cpu, numpy, g++ and CUDA's headers, on a checkout of github.com/Azure/MS-AMP
at commit 9746ea85289f8e6233646e73ace35f730d1245d5:

    python tests/golden/make_ms_fp4.py CHECKOUT [/usr/local/cuda/include]

The bodies of its two CUDA kernels, read from the checkout, are compiled for the CPU. MS-AMP rounds scales down
to powers of two where the paper divides by the largest magnitude, and rounds ties up. So each vector's largest
magnitude, after clipping, is 3, for which both scales are 2, and no element is a tie. Writes ms_fp4.npz:

    x [tokens, 200], w [200, n]    inputs, in bfloat16's values
    clip/part, clip/rest           _apply_quantile_clipping(x, 0.99, token_wise)
    x/clip, x/outliers             quantize_simulate_fp4_in_bf16(x), without and with residual
    w/quantized, w/derivative      the same of w, channel-wise, and apply_DGE_item
"""

import ctypes
import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import types

import numpy as np
import torch

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
HOST = """
#include <cmath>
#include <cuda_bf16.h>
struct Index { int x; };
static Index block_{0}, size_{1}, thread_{0};
#define blockIdx block_
#define blockDim size_
#define threadIdx thread_
BODIES
extern "C" void quantize(void* x, void* y, int n) {
    for (thread_.x = 0; thread_.x < n; ++thread_.x)
        quantize_bf16_kernel((const __nv_bfloat16*)x, (__nv_bfloat16*)y, n);
}
extern "C" void derivative(void* x, void* y, float k, float cap, int n) {
    for (thread_.x = 0; thread_.x < n; ++thread_.x)
        differentiable_quantize_derivative((const __nv_bfloat16*)x, (__nv_bfloat16*)y, k, cap, n);
}
"""


def compiled(checkout: pathlib.Path, include: str) -> ctypes.CDLL:
    """Returns the kernels of the checkout as a library for the CPU."""
    source = (checkout / "msamp/operators/fp4_quantize/quantize.cu").read_text()
    names = "quantize_bf16_kernel|power_derivative|differentiable_quantize_derivative"
    bodies = re.findall(rf"^__(?:global|device)__ (\w+ (?:{names})\(.*?^}})", source, re.DOTALL | re.MULTILINE)
    assert len(bodies) == 3, len(bodies)
    folder = pathlib.Path(tempfile.mkdtemp())
    text = HOST.replace("BODIES", "\n".join("static " + body for body in bodies))
    (folder / "host.cpp").write_text(text)
    command = ["g++", "-O1", "-shared", "-fPIC", f"-I{include}", "host.cpp", "-o", "host.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "host.so"))


class OnCuda(torch.Tensor):
    """A CPU tensor that passes MS-AMP's check."""

    is_cuda = True


def load(checkout: pathlib.Path, library: ctypes.CDLL):
    """Returns MS-AMP's FP4_QUANTIZER, which calls the library."""

    def pointer(t):
        return ctypes.c_void_p(t.data_ptr())

    kernels = types.ModuleType("msamp_quantize")
    kernels.quantize_bf16 = lambda x, y, n: library.quantize(pointer(x), pointer(y), n)
    kernels.launch_differentiable_quantize_derivative = lambda x, y, k, cap, n: library.derivative(
        pointer(x), pointer(y), ctypes.c_float(k), ctypes.c_float(cap), n
    )
    sys.modules["msamp_quantize"] = kernels
    meta_text = (checkout / "msamp/common/tensor/meta.py").read_text()
    rule = re.search(r"    @staticmethod\n(?:    @.*\n)*    def compute_scaling_factor.*?(?=\n    def )", meta_text, re.DOTALL)
    scope = {"torch": torch}
    exec("class ScalingMeta:\n" + re.sub(r"    @torch.*\n", "", rule[0]), scope)
    sys.modules["msamp.common.tensor"] = types.ModuleType("msamp.common.tensor")
    sys.modules["msamp.common.tensor"].ScalingMeta = scope["ScalingMeta"]
    path = checkout / "msamp/operators/fp4_quantize/fp4_quantize.py"
    spec = importlib.util.spec_from_file_location("fp4_quantize", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch = types.SimpleNamespace(**vars(torch))
    module.torch.ones = lambda *a, device=None, **k: torch.ones(*a, **k)
    return module.FP4_QUANTIZER


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x with outliers past its quantiles, and w, both without ties."""
    torch.manual_seed(0)
    x, w = torch.randn(24, 200).clamp(-2.9, 2.9), torch.randn(200, 12).clamp(-2.9, 2.9)
    x[:, 17], x[:, 90], x[:, 3], x[:, 150] = 11.0, 3.0, -8.0, -7.0
    w[40] = torch.where(torch.rand(12) < 0.5, -3.0, 3.0)
    x, w = x.bfloat16().float(), w.bfloat16().float()
    for t in (x, w):
        t[torch.isin(2 * t.abs(), TIES)] += 2**-5
        assert not torch.isin(2 * t.abs(), TIES).any()
    return x, w


def main(checkout: pathlib.Path, include: str = "/usr/local/cuda/include") -> None:
    fp4 = load(checkout, compiled(checkout, include))
    x, w = inputs()
    x16, w16 = (t.bfloat16().as_subclass(OnCuda) for t in (x, w))
    part, rest = fp4._apply_quantile_clipping(x16, 0.99, token_wise=True, return_residual=True)
    quantize = fp4.quantize_simulate_fp4_in_bf16
    clipped, outliers = (
        quantize(x16, "e2m1", token_wise=True, outlier_clip=True, residual_compensation=residual)
        for residual in (False, True)
    )
    wq, scaled = quantize(w16, "e2m1", channel_wise=True, return_scaled_input_for_bwd=True)
    arrays = {
        "x": x, "w": w, "clip/part": part, "clip/rest": rest, "x/clip": clipped, "x/outliers": outliers,
        "w/quantized": wq, "w/derivative": fp4.apply_DGE_item(scaled.contiguous().as_subclass(OnCuda)),
    }  # fmt: skip
    path = pathlib.Path(__file__).with_name("ms_fp4.npz")
    plain = {name: t.detach().as_subclass(torch.Tensor).float().numpy() for name, t in arrays.items()}
    np.savez_compressed(path, versions=np.array([f"torch {torch.__version__}", "MS-AMP 9746ea85"]), **plain)
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
