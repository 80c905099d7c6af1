"""Run the public implementations of NVFP4 recipes and store what they give.

Run with Python 3.11, torch 2.13.0+cpu, triton 3.9.0, numpy, scipy, on checkouts of

    mit-han-lab/fouroversix           dadfad6901d473a734fe71e0b082e70ee993e23a
    NVIDIA/TransformerEngine          d0067d0da6cb01811b8072a7d304f0e00344ce2b
    IST-DASLab/Quartet-II             8776a90b7aa0c0a400ad858a3c05a66f7ec55b73
    thu-ml/TetraJet-v2-NVFP4Training  ca5953f643d85c793fb3a210bf21f17fc88ce83e

    python tests/golden/make_nvfp4.py FOUROVERSIX TRANSFORMER_ENGINE QUARTET_II TETRAJET

Writes nvfp4.npz next to this file. x, w and dy, [128, 128] float32, are those of `inputs` below.

    fouroversix/RULE/BLOCK/{codes,scales}   x by its PyTorch quantizer; RULE mse, mae, BLOCK 1d, 2d
    fouroversix/{y,dx,dw}                   its linear layer, gradients rounded to nearest; first 16 rows
    fouroversix/unbiased                    mean of x[:16] over DRAWS stochastic draws with factor 16/17
    te/{1d,2d,RULE-MAX}/{codes,scales}      x by TransformerEngine's NVFP4QuantizerRef; RULE-MAX mae-448, ...
    te/{y,dx,dw}                            three GEMMs by its qgemm, gradients rounded to nearest; first 16 rows
    te/signs                                its signs of the Hadamard transform
    quartet/{rtn,four_over_six}             x by Quartet-II's Triton kernels, dequantized; first 16 rows
    quartet/{signs,low,high,mean}           x by its MS-EDEN kernel after H128 with `signs`: smallest, largest and
                                            mean value over DRAWS seeds; first 16 rows
    quartet/{y,dx,dw}                       its linear layer, gradients' mean over LAYER_DRAWS draws of signs and
                                            scales; first 16 rows
    quartet/{dx,dw}_noise                   mean over draws of |d - mean|^2 / |mean|^2, of all rows
    tetrajet/nearest                        x by TetraJet-v2's Triton kernel for fake quantization; first 16 rows
    tetrajet/{low,high,mean}                x by its stochastic kernel, over DRAWS draws; first 16 rows
    tetrajet/y                              product of x and w by the kernel for nearest; first 16 rows

codes are [128, 64] uint8, first element in the low nibble; scales [128, 8] or [8, 8] uint8, E4M3.

The inputs are not rounded to bfloat16: among such values there are exact ties between elements, which the
order of float32 operations decides, so that any two of these implementations differ in one of 10,000 codes.
Triton's interpreter runs the kernels. Its cast to float8e4nv does not carry into the exponent, so torch's is
put in its place, and CUDA tensors become CPU tensors. Nothing else of the implementations is changed.
"""

import importlib.util
import os
import pathlib
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter

DRAWS = 256
LAYER_DRAWS = 64
ROWS = 16


def inputs():
    """Returns x, w and dy, whose size varies between neighbours."""
    rng = np.random.RandomState(0)
    draw = lambda: rng.standard_normal((128, 128)) * np.exp(rng.standard_normal((128, 128)))
    return [draw().astype(np.float32) for _ in range(3)]


def package(name, folder=None, **attributes):
    """Makes an empty package, so that a submodule is imported without its parent's __init__."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)] if folder else []
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def fouroversix(root, x, w, dy, out):
    source = pathlib.Path(root) / "src" / "fouroversix"
    package("fouroversix", source)
    package("fouroversix.model", source / "model")
    package("fouroversix.model.modules", source / "model" / "modules")
    import fouroversix.quantize.pytorch.backend as backend
    import fouroversix.quantize.utils as utils
    from fouroversix.model.config import ModuleQuantizationConfig
    from fouroversix.quantize.pytorch.reference import quantize
    from fouroversix.utils import DataType, RoundStyle, ScaleRule

    backend.get_rht_matrix = lambda: utils.get_rht_matrix(device="cpu")
    for rule in ("mse", "mae"):
        for block in ("1d", "2d"):
            codes, scales, _ = quantize(
                x, scale_rule=ScaleRule(rule), block_scale_2d=block == "2d", use_blackwell_scale_layout=False
            )
            scales = scales.view(torch.uint8).reshape(128, 8)
            out[f"fouroversix/{rule}/{block}/codes"] = codes.numpy()
            out[f"fouroversix/{rule}/{block}/scales"] = (scales[::16] if block == "2d" else scales).numpy()

    package("fouroversix.model.quantize", QuantizedModule=types.SimpleNamespace(register=lambda _: lambda c: c))
    function = module("fouroversix.model.modules.linear", source / "model/modules/linear.py").FourOverSixLinearFunction
    config = ModuleQuantizationConfig(
        scale_rule="mse",
        weight_scale_2d=True,
        gradient_round_style=RoundStyle.nearest,
        matmul_backend="pytorch",
        quantize_backend="pytorch",
        output_dtype=DataType.float32,
    )
    x_ = x[None].clone().requires_grad_()
    w_ = torch.nn.Parameter(w.T.contiguous())
    y = function.apply(config, x_, w_)
    y.backward(dy[None])
    for name, t in (("y", y[0]), ("dx", x_.grad[0]), ("dw", w_.grad.T)):
        out[f"fouroversix/{name}"] = t.detach()[:ROWS].numpy()

    from fouroversix.quantize.pytorch.reference import compute_nv_scale_factors, fake_quantize_to_e2m1

    style = RoundStyle.stochastic_unbiased
    amax, blocks = x.abs().max(), x.reshape(-1, 16)
    scaled, scales = compute_nv_scale_factors(
        blocks, amax, fp4_format=DataType.nvfp4, scale_rule=ScaleRule.static_6, round_style=style
    )
    torch.manual_seed(0)
    mean = sum(fake_quantize_to_e2m1(scaled[: 8 * ROWS], round_style=style) for _ in range(DRAWS)) / DRAWS
    values = mean * scales[: 8 * ROWS, None].float() * amax / (6 * 448 * style.adjustment_factor)
    out["fouroversix/unbiased"] = values.reshape(ROWS, 128).numpy()


def transformer_engine(root, x, w, dy, out):
    source = pathlib.Path(root) / "transformer_engine" / "pytorch"
    package("transformer_engine")
    package("transformer_engine.pytorch", source)
    package("transformer_engine.pytorch.custom_recipes", source / "custom_recipes")

    class Quantizer:
        def __init__(self, rowwise, columnwise):
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    package("transformer_engine.pytorch.quantized_tensor", Quantizer=Quantizer, QuantizedTensorStorage=object)
    package("transformer_engine.pytorch.tensor")
    package("transformer_engine.pytorch.tensor.utils", is_custom=None)
    import transformer_engine.pytorch.custom_recipes.gemm as gemm
    import transformer_engine.pytorch.custom_recipes.reference_nvfp4 as reference

    def quantizer(**options):
        return reference.NVFP4QuantizerRef(reference.reference_utils.Fp4Formats.E2M1, **options)

    cases = {"1d": {}, "2d": {"quant_tile_shape": (16, 16)}}
    for mode in ("mae", "mse"):
        for largest in (256, 448):
            cases[f"{mode}-{largest}"] = {
                "nvfp4_use_4over6": True, "nvfp4_e4m3_max": largest, "nvfp4_4over6_err_mode": mode
            }  # fmt: skip
    for name, options in cases.items():
        q = quantizer(**options).quantize(x)
        scales = q.scale.view(torch.uint8)
        out[f"te/{name}/codes"], out[f"te/{name}/scales"] = q.data.numpy(), scales.numpy()
    out["te/2d/scales"] = out["te/2d/scales"][::16]

    rows, tiles, wgrad = quantizer(), quantizer(quant_tile_shape=(16, 16)), quantizer(with_rht=True)
    qx, qw, qdy = rows.quantize(x), tiles.quantize(w.T.contiguous()), rows.quantize(dy)
    rx, rdy = wgrad.quantize(x), wgrad.quantize(dy)

    def product(a, b, a_data, a_scale, b_data, b_scale, kind):
        return rows.qgemm(a_data, b_data, None, torch.float32, a_scale, b_scale,
                          gemm_type=kind, qresult_x=a, qresult_w=b)  # fmt: skip

    kinds = gemm.GEMMType
    products = {
        "y": product(qx, qw, qx.data, qx.scale, qw.data, qw.scale, kinds.FPROP),
        "dx": product(qdy, qw, qdy.data, qdy.scale, qw.data_t, qw.scale_t, kinds.DGRAD),
        "dw": product(rx, rdy, rx.data_t, rx.scale_t, rdy.data_t, rdy.scale_t, kinds.WGRAD),
    }
    for name, t in products.items():
        out[f"te/{name}"] = t[:ROWS].numpy()
    out["te/signs"] = reference.get_wgrad_sign_vector().numpy()


def quartet(root, x, w, dy, out):
    source = pathlib.Path(root) / "src" / "models"
    package("models", source)
    package("models.quantization", source / "quantization")
    package("models.quantization.quantizers", source / "quantization" / "quantizers")
    package("models.quantization.schemes", source / "quantization" / "schemes")
    import models.quantization.quantizers.nvfp4_triton as nvfp4
    import models.quantization.schemes.quartet_2 as scheme

    def nearest(x, four_over_six):
        y = torch.empty_like(x)
        nvfp4.rtn_1x16s_fp4_kernel.fn[(x.numel() // 2048,)](
            x, x.abs().max(), y, x.numel(), 1.0, 16, four_over_six, BLOCK_SIZE=2048
        )
        return y

    def eden(x, matrix, amax, seed):
        x = x.contiguous()
        y = torch.empty_like(x)
        scheme.eden_1x16s_fp4_kernel.fn[(x.numel() // 2048,)](
            x, matrix.T.contiguous(), amax, y, torch.zeros(1), x.numel(), 128,
            scheme.Quartet_II_fn.backward_scale_override, 16, seed, BLOCK_SIZE=2048,
        )  # fmt: skip
        return y

    out["quartet/rtn"] = nearest(x, False)[:ROWS].numpy()
    out["quartet/four_over_six"] = nearest(x, True)[:ROWS].numpy()
    signs = torch.from_numpy(np.random.RandomState(1).choice([-1.0, 1.0], 128).astype(np.float32))
    # `rerotate_hadamard` is H @ diag(signs), and its wrapper transposes it for x @ H.T.
    matrix = scheme.get_hadamard_matrix(128, torch.float32, "cpu") * signs
    amax = (x @ matrix.T).abs().max()
    draws = np.stack([eden(x[:ROWS], matrix, amax, seed).numpy() for seed in range(DRAWS)])
    out["quartet/signs"] = signs.numpy()
    out["quartet/low"], out["quartet/high"] = draws.min(0), draws.max(0)
    out["quartet/mean"] = draws.mean(0, dtype=np.float64).astype(np.float32)

    # `Quartet_II_fn.forward` and `backward`, with their 4/6 and a maximum of the current tensor.
    seen_x, seen_w = nearest(x, True), nearest(w.T.contiguous(), True)
    out["quartet/y"] = (seen_x @ seen_w.T)[:ROWS].numpy()
    gradients = {"dx": [], "dw": []}
    rng = np.random.RandomState(2)
    for draw in range(LAYER_DRAWS):
        matrix = matrix * torch.from_numpy(rng.choice([-1.0, 1.0], 128).astype(np.float32))
        operands = []
        for i, t in enumerate((dy, seen_w.T, dy.T, seen_x.T)):
            operands.append(eden(t, matrix, (t.reshape(-1, 128) @ matrix.T).abs().max(), 4 * draw + i))
        gradients["dx"].append((operands[0] @ operands[1].T).numpy())
        gradients["dw"].append((operands[3] @ operands[2].T).numpy())
    for name, drawn in gradients.items():
        mean = np.mean(drawn, 0, dtype=np.float64)
        out[f"quartet/{name}"] = mean[:ROWS].astype(np.float32)
        out[f"quartet/{name}_noise"] = np.mean(np.sum((drawn - mean) ** 2, (1, 2))) / np.sum(mean**2)


def tetrajet(root, x, w, out):
    folder = pathlib.Path(root) / "kernels" / "baseline_fakequant"
    package("baseline_fakequant", folder)
    import baseline_fakequant.nvfp4_quant_fused as fused
    import baseline_fakequant.nvfp4_quant_fused_kernel as kernels

    # The interpreter has no CUDA library: the sign, and rounding to nearest even of magnitudes below 2**22.
    kernels.libdevice = types.SimpleNamespace(
        signbit=lambda t: tl.where(t < 0, 1, 0), rint=lambda t: (t + 1.5 * 2**23) - 1.5 * 2**23
    )
    quantize = fused.nvfp4_double_quantize_fused
    out["tetrajet/nearest"] = quantize(x[:ROWS]).numpy()
    out["tetrajet/y"] = (quantize(x[:ROWS]) @ quantize(w.T.contiguous()).T).numpy()
    torch.manual_seed(0)
    draws = np.stack([quantize(x[:ROWS], stochastic=True).numpy() for _ in range(DRAWS)])
    out["tetrajet/low"], out["tetrajet/high"] = draws.min(0), draws.max(0)
    out["tetrajet/mean"] = draws.mean(0, dtype=np.float64).astype(np.float32)


def on_the_cpu():
    """Makes CUDA tensors CPU tensors, and casts to float8e4nv as torch does."""
    make = torch.tensor
    torch.tensor = lambda *a, **k: make(*a, **{key: v for key, v in k.items() if key != "device"})
    interpreter = triton.runtime.interpreter
    convert = interpreter._convert_float

    def convert_float(x, source, target, rounding):
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(x, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(x).view(np.float32))
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert_float


def main(fouroversix_root, transformer_engine_root, quartet_root, tetrajet_root):
    on_the_cpu()
    out = {}
    x, w, dy = (torch.from_numpy(t) for t in inputs())
    fouroversix(fouroversix_root, x, w, dy, out)
    transformer_engine(transformer_engine_root, x, w, dy, out)
    quartet(quartet_root, x, w, dy, out)
    tetrajet(tetrajet_root, x, w, out)
    path = pathlib.Path(__file__).with_name("nvfp4.npz")
    np.savez_compressed(path, **out)
    print(path.name, len(out), "arrays", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
