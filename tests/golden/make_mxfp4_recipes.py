"""Run the layers of two MXFP4 recipes from their authors' code and store what one linear layer gives.

Run with Python 3.11, torch 2.13.0+cpu, triton 3.9.0, numpy, scipy, packaging, on checkouts of
github.com/thu-ml/TetraJet-MXFP4Training at bbe9bd67a32bee254f630d34a5a25f5e9b491f56,
github.com/amazon-science/mxfp4-llm at 0cc57fecd911a1b4809201d6a9eddbc0157efb70, and
github.com/microsoft/microxcaling at 7bc41952de394f5cc5e782baf132e7c7542eb4e4 with
patch_override_scripts/microxcaling.patch of the second applied:

    python tests/golden/make_mxfp4_recipes.py TETRAJET AMAZON MICROXCALING

The layers are QuantLinear of quantization/QLinear.py, and the class that patch_override_scripts/Megatron-LM.patch
adds, taken from the patch. Writes mxfp4_recipes.npz next to this file:

    x [m, k], w [k, n], dy [m, n]       float32 inputs; w is the transpose of torch's
    tetrajet/{y,dx,dw}                  QuantLinear with every quantizer rounding to nearest
    amazon_no_hadamard_no_sr/{dx,dw}    BW_USE_MXFP4=2: nothing drawn
    amazon_no_sr/{dx,dw}                BW_USE_MXFP4=1, with the signs below
    amazon_no_sr/signs                  [2, 64] the signs of Dgrad and of Wgrad
    NAME/mean/{dx,dw}                   means over DRAWS runs: tetrajet, amazon (3), amazon_no_hadamard (4)
    NAME/std/{dx,dw}                    standard deviations of one run, float16
    drawn/{tetrajet,amazon}/{low,high}  smallest and largest of DRAWS quantizations of x along its last axis
    drawn/{tetrajet,amazon}/mean        their mean
    versions                            [n]  versions this file was made with
"""

import importlib
import os
import pathlib
import sys
import types

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from scipy.linalg import hadamard

M, K, N = 64, 32, 64
DRAWS = 64
HBS = 64


def tetrajet_layer(checkout: pathlib.Path):
    """Returns the module QLinear, the layer's function, and arguments as in its MXFP4 scripts."""
    package = types.ModuleType("quantization")  # without its __init__, which imports timm
    package.__path__ = [str(checkout / "quantization")]
    sys.modules["quantization"] = package
    module = importlib.import_module("quantization.QLinear")
    parts = ("f_a_in", "f_w_in", "b_dy", "b_dy_t", "b_a_rq", "b_w_rq")
    args = types.SimpleNamespace(
        **{f"qlinear_{part}": False for part in parts},  # qlinear_all stands for them
        row_blocksize=1, column_blocksize=32, symm=True, epsilon=1e-8, qlinear_all=True, tritonQ=False, mxscale=1,
        fabit=4, fwbit=4, babit=4, bwbit=4, faexp=2, fwexp=2, baexp=2, bwexp=2,
    )  # fmt: skip

    def run(x, w, dy):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = module.QuantLinear.apply(x, w, None, None, args, "", True)
        y.backward(dy)
        return y.detach(), x.grad, w.grad

    def quantize(x):
        return module.block_quant(
            module.block_cut(x, 1, 32), True, 4, exp_bits=2, stochastic=True, epsilon=1e-8, apply_quantize=True,
            MXScale=1,
        )[0].reshape(x.shape)  # fmt: skip

    return module, run, quantize


def amazon_layer(repository: pathlib.Path, microxcaling: pathlib.Path):
    """Returns `run(mode, x, w, dy)` of the layer in the patch, and its quantizer."""
    sys.path.insert(0, str(microxcaling))
    import mx
    from mx.mx_ops import quantize_mx_op

    specs = {}
    for mode in (1, 2, 3, 4):
        specs[mode] = mx.MxSpecs()
        specs[mode] |= {"scale_bits": 8, "w_elem_format": "fp4_e2m1", "a_elem_format": "fp4_e2m1"}
        specs[mode] |= {"block_size": 32, "bfloat": 0, "custom_cuda": False}
        if mode > 2:
            specs[mode]["round_mx_output"] = "dither_scale"
    patch = (repository / "patch_override_scripts" / "Megatron-LM.patch").read_text()
    added = [line[1:] for line in patch.splitlines() if line.startswith("+")]
    begin = next(i for i, line in enumerate(added) if line.startswith("class MXFP4Linear"))
    end = next(i for i, line in enumerate(added) if line.startswith("def mxfp4_linear_with"))
    plain = lambda function: function  # noqa: E731
    names = {"torch": torch, "mx": mx, "HBS": HBS, "custom_fwd": plain, "custom_bwd": plain}
    exec("\n".join(added[begin:end]), names)
    layer = names["MXFP4LinearWithGradAccumulationAndAsyncCommunication"]
    h = torch.FloatTensor(hadamard(HBS) / HBS**0.5)

    def run(mode, x, w, dy):
        names["BW_USE_MXFP4"], names["mxfp4"] = mode, specs[mode]
        x, w = x[:, None].clone().requires_grad_(), w.clone().requires_grad_()
        layer.apply(x, w, None, False, False, False, h).backward(dy[:, None])
        return x.grad[:, 0], w.grad

    def quantize(x):
        return quantize_mx_op(x, specs[4], elem_format="fp4_e2m1", axes=[-1], round="dither_scale")

    return run, quantize


def statistics(name, run):
    """Returns the mean and the standard deviation of dx and dw, as the arrays above."""
    drawn = [run() for _ in range(DRAWS)]
    found = {}
    for kind, i in (("dx", -2), ("dw", -1)):
        values = torch.stack([results[i] for results in drawn]).double()
        values = values.transpose(1, 2) if kind == "dw" else values
        found[f"{name}/mean/{kind}"] = values.mean(0).float()
        found[f"{name}/std/{kind}"] = values.std(0).half()
    return found


def extremes(name, quantize, x):
    """Returns the smallest and largest quantization of x, and their mean."""
    drawn = torch.stack([quantize(x) for _ in range(DRAWS)])
    return {
        f"drawn/{name}/low": drawn.amin(0),
        f"drawn/{name}/high": drawn.amax(0),
        f"drawn/{name}/mean": drawn.double().mean(0).float(),
    }


def main(tetrajet: pathlib.Path, amazon: pathlib.Path, microxcaling: pathlib.Path) -> None:
    module, run_tetrajet, quantize_tetrajet = tetrajet_layer(tetrajet)
    run_amazon, quantize_amazon = amazon_layer(amazon, microxcaling)
    torch.manual_seed(0)
    x, w, dy = torch.randn(M, K), torch.randn(N, K) * 0.05, torch.randn(M, N) * 0.01
    x[:, 3] *= 20
    arrays = {"x": x, "w": w.T, "dy": dy}
    arrays |= statistics("tetrajet", lambda: run_tetrajet(x, w, dy))
    arrays |= statistics("amazon", lambda: run_amazon(3, x, w, dy))
    arrays |= statistics("amazon_no_hadamard", lambda: run_amazon(4, x, w, dy))
    arrays |= extremes("tetrajet", quantize_tetrajet, x) | extremes("amazon", quantize_amazon, x)
    original = module.block_quant
    module.block_quant = lambda *args, **options: original(*args, **options | {"stochastic": False})
    y, dx, dw = run_tetrajet(x, w, dy)
    arrays |= {"tetrajet/y": y, "tetrajet/dx": dx, "tetrajet/dw": dw.T}
    for mode, name in ((2, "amazon_no_hadamard_no_sr"), (1, "amazon_no_sr")):
        torch.manual_seed(1)
        dx, dw = run_amazon(mode, x, w, dy)
        arrays |= {f"{name}/dx": dx, f"{name}/dw": dw.T}
    torch.manual_seed(1)
    arrays["amazon_no_sr/signs"] = torch.stack([(torch.randn(HBS) > 0).float() * 2 - 1 for _ in range(2)])
    versions = [f"torch {torch.__version__}", "TetraJet bbe9bd67", "mxfp4-llm 0cc57fec", "microxcaling 7bc41952"]
    path = pathlib.Path(__file__).with_name("mxfp4_recipes.npz")
    np.savez_compressed(path, versions=np.array(versions), **{k: v.numpy() for k, v in arrays.items()})
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:4]))
