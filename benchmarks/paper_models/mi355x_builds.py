"""The gfx950 builds that the roofline for MI355X needs, and the numbers that it takes from their code."""

import json
import pathlib
import re
import tempfile
from typing import Any

import mxjax
from benchmarks.paper_models.mi355x_rates import ISSUE_CYCLES, LDS_BYTES, MATRIX_FLOPS, SIMDS, UNITS, WAVE
from benchmarks.paper_models.roofline import OPERAND_BYTES
from mxjax.kernels import shapes
from mxjax.policy import Rotation


def sides(tensor: shapes.TensorShape, policy: str) -> tuple[int, int]:
    """Returns the rotation sizes along the rows and the columns of a tensor; 1 is no rotation."""
    p = mxjax.get_policy(policy)
    rows, columns = {
        "activation": (p.fprop, p.wgrad),
        "gradient": (p.dgrad, p.wgrad),
        "weight": (p.dgrad, p.fprop),
    }[tensor.name.split(".")[-1]]
    return _size(rows.rotation), _size(columns.rotation)


def _size(rotation: Rotation | None) -> int:
    return rotation.size if rotation else 1


def find_quantizer(builds: list[dict], tensor: shapes.TensorShape, policy: str) -> dict:
    """Returns a build that quantizes a tensor along both axes, the one for its shape if there is one."""
    rows, columns = sides(tensor, policy)
    dtype = "float32" if tensor.name.endswith("weight") else "bfloat16"
    wanted = {"ROW_FORM": "packed", "COLUMN_FORM": "packed", "ROW_ROTATION": rows, "COLUMN_ROTATION": columns}
    usual = {"SIGNS": False, "STOCHASTIC": False, "SQUARE": False, "PRESCALE": 1}
    wanted |= {f"{side}_{name}": value for side in ("ROW", "COLUMN") for name, value in usual.items()}
    found = [b for b in builds if b["dtype"] == dtype and wanted.items() <= b["constants"].items()]
    if not found:
        raise LookupError(f"no gfx950 build quantizes {dtype} with rotations {rows} and {columns}")
    same = (tensor.rows, tensor.columns)
    return max(found, key=lambda b: ((b["constants"]["R"], b["constants"]["C"]) == same, b["constants"]["R"]))


def find_gemm(builds: list[dict], shape: shapes.GemmShape) -> dict:
    """Returns the build of a GEMM's shape."""
    wanted = {"M": shape.m, "N": shape.n, "K": shape.k}
    for build in builds:
        if wanted.items() <= build["constants"].items():
            return build
    raise LookupError(f"no gfx950 build multiplies {shape.m} x {shape.n} x {shape.k}")


def vector_per_element(build: dict) -> float:
    """Returns the vector instructions of a lane for each element of a quantizer's tile."""
    count = sum(build["kernel"].get(name, 0) for name in ("vector", "convert", "accumulator_move"))
    return count * build["warps"] * WAVE / (build["constants"]["BLOCK_R"] * build["constants"]["BLOCK_C"])


def rounds(build: dict) -> tuple[int, float]:
    """Returns the rounds in which each compute unit runs one program, and the fraction of busy units."""
    c = build["constants"]
    programs = -(-c["M"] // c["BLOCK_M"]) * -(-c["N"] // c["BLOCK_N"])
    return -(-programs // UNITS), programs / (-(-programs // UNITS) * UNITS)


def loop_cycles(build: dict) -> dict[str, float]:
    """Returns the cycles of each resource in one pass of a GEMM's main loop, and the bytes loaded."""
    c, waves, loop = build["constants"], build["warps"], build["main_loop"]
    return {
        "matrix": 2 * c["BLOCK_M"] * c["BLOCK_N"] * c["BLOCK_K"] / MATRIX_FLOPS["mxfp4"],
        "LDS": build["lds_bytes"] * WAVE * waves / LDS_BYTES,
        "vector": loop["vector"] * ISSUE_CYCLES * waves / SIMDS,
        "instructions": sum(loop.values()) * waves / SIMDS,
        "bytes loaded": (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * OPERAND_BYTES["mxfp4"],
    }


def needed(builds: list[dict]) -> list[dict]:
    """Returns the builds that the model needs, each once."""
    found = [find_gemm(builds, s) for tokens in shapes.TOKENS for s in shapes.gemms(tokens)]
    for policy in ("wgrad_hadamard", "full_hadamard"):
        found += [find_quantizer(builds, t, policy) for n in shapes.TOKENS for t in shapes.tensors(n)]
    return list({build["name"]: build for build in found}.values())


def summarize(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers that the model takes from a record of `mxjax.kernels.aot`."""
    opcodes = record["main_loop"]["opcodes"]
    widths = [(re.match(r"ds_read(2\w*)?_[bui](\d+)", name), count) for name, count in opcodes.items()]
    return {
        "name": record["name"],
        "dtype": next(a["dtype"] for a in record["arguments"] if a["name"] in ("x", "out")),
        "constants": record["constants"],
        "warps": record["warps"],
        "shared_bytes": record["shared_bytes"],
        "resources": record["resources"],
        "main_loop": record["main_loop"]["classes"],
        "kernel": record["whole_kernel"]["classes"],
        "lds_bytes": sum((2 if m[1] else 1) * int(m[2]) // 8 * count for m, count in widths if m),
    }


def read_builds(folder: pathlib.Path) -> list[dict]:
    """Reads the needed builds from a folder that `mxjax.kernels.aot` wrote."""
    paths = [p for kind in ("gemm", "quantize") for p in sorted((folder / "gfx950").glob(f"{kind}_*.json"))]
    return needed([summarize(json.loads(path.read_text())) for path in paths])


def compile_builds() -> list[dict]:
    """Compiles the needed builds in a temporary folder."""
    from mxjax.kernels.aot import compile as aot

    modules, candidates = {}, []
    for module in ("gemm_builds", "quantize_builds"):
        for b in aot.list_builds(module, "gfx950"):
            modules[b.name] = module
            dtype = (b.signature.get("x") or b.signature["out"]).dtype
            candidates.append({"name": b.name, "dtype": dtype, "constants": b.constants})
    jobs = [(modules[b["name"]], "gfx950", b["name"]) for b in needed(candidates)]
    with tempfile.TemporaryDirectory() as folder:
        done, failed = aot.build_all(jobs, pathlib.Path(folder), jobs=2)
    if failed:
        raise RuntimeError(f"not compiled: {failed}")
    return needed([summarize(d) for d in done])
