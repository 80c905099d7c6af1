"""Run TetraJet-v2's layer with outlier channels on a CPU, and store which it chooses and what it computes.

Run with Python 3.11, torch 2.13.0+cpu, numpy, on a checkout of
github.com/thu-ml/TetraJet-v2-NVFP4Training at ca5953f643d85c793fb3a210bf21f17fc88ce83e:

    python tests/golden/make_outlier_channels.py TETRAJET

The layer of linear_mix.py and the schedule of calibrate.py are theirs, with stand-ins for their CUDA kernels.
Those for FP8 compute what quant_fp8.cu does. Those for FP4 have E2M1 in 32s with powers of two as scales, in
place of two levels of scales: values that have been quantized once have many ties, which then every
implementation breaks alike. Nothing is rotated or rounded stochastically. Products are bfloat16, as theirs.
Writes outlier_channels.npz:

    start, steps                           the schedule, in our flag's count
    recorded [4]                           steps, from 1, at which norms were added up
    outliers [128], ordinary [256]         the channels in its order
    y [16, 128], dx [16, 384], dw [128, 16]   of the last batch; first 16 rows, of dw columns, d_out x d_in

Batches, w and dy, which is rounded to bfloat16, are those of `inputs` below.
"""

import importlib
import pathlib
import sys
import types

import numpy as np
import torch

TOKENS, D_IN, D_OUT, BATCHES, ROWS = 128, 384, 128, 8, 16
START, STEPS = 2, 4  # X_chan_record_start_iter counts from 0


def inputs():
    """Returns batches, w and dy; channels differ in size, and so do neighbours."""
    rng = np.random.RandomState(0)
    draw = lambda *shape: rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) / 2)
    x = draw(BATCHES, TOKENS, D_IN) * np.exp(rng.standard_normal(D_IN))
    return [t.astype(np.float32) for t in (x, draw(D_OUT, D_IN), draw(TOKENS, D_OUT))]


def in_blocks(quantize, largest: float):
    """Returns a function that quantizes 32s along the last axis, with scale amax / largest rounded up to 2**n."""

    def quantized(x: torch.Tensor) -> torch.Tensor:
        blocks = x.reshape(*x.shape[:-1], -1, 32)
        mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / largest)
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
        return (quantize(blocks / scale) * scale).reshape(x.shape)

    return quantized


def e2m1(x: torch.Tensor) -> torch.Tensor:
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return torch.round(x / step) * step


fp4 = in_blocks(e2m1, 6.0)
fp8 = in_blocks(lambda x: x.to(torch.float8_e4m3fn).float(), 448.0)


def package(name, folder=None, **attributes):
    """Makes a package with these attributes; its submodules come from the folder, without its __init__."""
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [str(folder)] if folder else []
    vars(module).update(attributes)


def kernels():
    """Returns stand-ins for the package of CUDA kernels, whose quantized tensors are their values."""
    none = None, None

    def both(x, seed):
        q = fp4(x)
        return q, *none, fp4(q.T.contiguous()), *none

    def weight(w):
        q = fp4(w)
        return q, *none, q.T.contiguous()

    def gradient(dy, seed_dx, seed_dw):
        columns = dy.T.contiguous()
        return fp4(dy), *none, fp4(columns), *none, fp8(columns), None

    def both_fp8(x):
        q = fp8(x)
        return q, None, fp8(q.T.contiguous()), None

    return types.SimpleNamespace(
        quant_fp4_dequant_trans_rh_requant_fused=both,
        quant_fp4_dequant_trans_fused=weight,
        rh_quant_fp4_trans_rh_requant_fp4_fp8_fused=gradient,
        rh_quant_fp4_stochastic_fused=lambda w, seed: (fp4(w), *none),
        quant_fp8_dequant_trans_requant_fused=both_fp8,
        quant_fp8=lambda x: (fp8(x), None),
        dequant_fp8=lambda q, scale: q,
        fp4_gemm=lambda a, b, *scales: (a @ b.T).bfloat16(),
        fp8_gemm=lambda a, b, *scales: (a @ b.T).bfloat16(),
        fp8_gemm_accum=lambda a, b, sa, sb, y: (y + a @ b.T).bfloat16(),
    )


def load(root: pathlib.Path):
    """Imports linear_mix and calibrate, with stand-ins for the kernels and for what trains around them."""
    sys.modules["tetrajetv2"] = kernels()
    package("olmo")
    names = ("NVFP4_QuantizerConfig", "NVFP4_Outlier_Selection_Config", "OscillationPerturb_Config")
    package("olmo.config", **dict.fromkeys(names, types.SimpleNamespace))
    real = "olmo.quantization_real"
    package(real, root / "olmo2-training" / "olmo" / "quantization_real")
    plain = types.SimpleNamespace(apply=torch.nn.functional.linear)
    package(f"{real}.linear", NVFP4_TetraJetv2_MatMulFunc_BwdAllRHT16SQ_Padding128=plain)
    for name in ("oscillation_reset", "oscillation_reset_memeff"):
        package(f"{real}.{name}")
    mix = importlib.import_module(f"{real}.linear_mix")
    layer = mix.NVFP4_mix_MXFP8_Linear_RealQuant_WeightQuantOnline
    package(f"{real}.utils_type", check_quant_mix_linear=lambda module: isinstance(module, layer))
    return layer, importlib.import_module(f"{real}.calibrate").linear_mixprec_record


def config():
    """Returns the parts of their configuration that the layer and its schedule read."""
    outliers = types.SimpleNamespace(
        X_chan_select=True,
        X_chan_select_bwd=True,
        outlier_fp8_matmul=True,
        X_top_channels_ratio=0.1,
        X_chan_select_mode="norm2_record",
        X_chan_record_start_iter=START - 1,
        X_chan_record_iters=STEPS,
    )
    return types.SimpleNamespace(
        enable_nvfp4_training=True,
        inner_blocksize=16,
        outer_blocksize=128,
        enable_qweight_buffer_when_real_quantize=False,
        enabled_quantizers=[1, 2, 3, 4, 5, 6],
        backward_double_quant=True,
        backward_stochastic=True,
        hadamard_bwd=True,
        hadamard_for_dX_if_bwd=True,
        hadamard_for_dW_if_bwd=True,
        outlier_conf=outliers,
    )


def main(root: pathlib.Path) -> None:
    make_layer, record = load(root)
    batches, w, dy = (torch.from_numpy(t) for t in inputs())
    layer = make_layer(D_IN, D_OUT, bias=False, q_cfg=config())
    layer.weight.data = w.clone()
    model, recorded = torch.nn.Sequential(layer), []
    for step, x in enumerate(batches):
        x = x.requires_grad_()
        if layer.accumulating_x_norm:
            recorded.append(step + 1)
        y = model(x)
        record(layer.q_cfg, step, model)  # after the step, as train.py does
    assert layer.mix_channel_done and recorded[-1] < BATCHES
    dx, dw = torch.autograd.grad(y, (x, layer.weight), dy.to(y.dtype))
    out = {
        "start": START,
        "steps": STEPS,
        "recorded": recorded,
        "outliers": layer.fp8_channel_idx.numpy(),
        "ordinary": layer.fp4_channel_idx.numpy(),
        "y": y[:ROWS].detach().float().numpy(),
        "dx": dx[:ROWS].numpy(),
        "dw": dw[:, :ROWS].float().numpy(),
    }
    path = pathlib.Path(__file__).with_name("outlier_channels.npz")
    np.savez_compressed(path, **out)
    print(path.name, {name: np.shape(value) for name, value in out.items()}, path.stat().st_size, recorded)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
