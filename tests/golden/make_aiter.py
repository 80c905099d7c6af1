"""Run AITER's reference of its MXFP4 quantizer on the inputs of torchao_mx.npz and store what it gives.

Run with Python 3.11, torch 2.13.0+cpu, numpy, on a checkout of github.com/ROCm/aiter
at commit e4048607a535ace3a2b51ded31b1c8c2d45c0879:

    python tests/golden/make_aiter.py CHECKOUT

The functions are those with which op_tests/test_quant_mxfp4.py compares the kernel, byte for byte on gfx950;
the rest of that file needs a GPU. Writes aiter_mx.npz next to this file, for float32 inputs and each of the four rules:

    RULE/codes [rows, 32]   uint8, two elements a byte, the first in the low nibble; sections one after the other
    RULE/scale [rows, 2]    uint8, E8M0
    sections                names of the inputs
    versions                [n] versions this file was made with
"""

import ast
import pathlib
import sys

import numpy as np
import torch

SECTIONS = ("gauss", "range", "threshold", "ties")
MODES = {"floor": 0, "rceil": 1, "even": 2, "ceil": 3}


def reference(checkout: pathlib.Path):
    """Returns `ref_quant_mxfp4`, without the imports of its file."""
    tree = ast.parse((checkout / "op_tests" / "test_quant_mxfp4.py").read_text())
    kept = [
        node for node in tree.body
        if isinstance(node, ast.Assign) or (isinstance(node, ast.FunctionDef) and not node.decorator_list)
    ]  # fmt: skip
    names = {"torch": torch}
    exec(compile(ast.Module(kept, []), "test_quant_mxfp4.py", "exec"), names)
    return names["ref_quant_mxfp4"]


def main(checkout: pathlib.Path) -> None:
    here = pathlib.Path(__file__).parent
    with np.load(here / "torchao_mx.npz") as golden:
        x = np.concatenate([golden[f"input/f32/{section}"] for section in SECTIONS]).view(np.float32)
    quantize = reference(checkout)
    arrays = {"sections": np.array(SECTIONS), "versions": np.array([f"torch {torch.__version__}", "aiter e4048607"])}
    for rule, mode in MODES.items():
        codes, scale = quantize(torch.from_numpy(x), round_mode=mode)
        arrays |= {f"{rule}/codes": codes.numpy(), f"{rule}/scale": scale.numpy()}
    path = here / "aiter_mx.npz"
    np.savez_compressed(path, **arrays)
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
