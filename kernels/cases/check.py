"""Checks what a compiled kernel wrote, from its record: inputs, argument segment, expected outputs.

    record = json.loads(pathlib.Path("DIR/gfx950/NAME.json").read_text())
    inputs = check.make_inputs(record)
    segment = check.argument_segment(record, addresses)
    expected = check.expected_outputs(record, inputs)
    check.output_agrees(record, "out", memory, expected["out"])

Needs neither Triton nor a GPU. `mxjax.kernels.cases.record` says how to launch the kernel in between.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from mxjax.kernels.cases import expected, expected_block16, expected_operands
from mxjax.kernels.cases.expected import Arrays


def make_inputs(record: Mapping[str, Any]) -> Arrays:
    """Draws an example of the arrays that a record's kernel reads, by their names."""
    drawn = _function(record, "inputs")(**record["expected"]["arguments"])
    inputs = (a for a in record["arguments"] if a["role"] == "input")
    return {a["name"]: drawn[a["same_as"] or a["name"]] for a in inputs}


def expected_outputs(record: Mapping[str, Any], inputs: Arrays) -> Arrays:
    """Computes what a record's kernel must write for these inputs, by name."""
    return _function(record, "outputs")(inputs, **record["expected"]["arguments"])


def _function(record: Mapping[str, Any], part: str) -> Any:
    name = f"{record['expected']['kind']}_{part}"
    [module] = [m for m in (expected, expected_operands, expected_block16) if hasattr(m, name)]
    return getattr(module, name)


def argument_segment(record: Mapping[str, Any], addresses: Mapping[str, int]) -> bytes:
    """Returns the bytes of the kernel arguments for arrays at these addresses."""
    segment = bytearray(record["kernarg_bytes"])
    pointers = [argument | {"value": addresses[argument["name"]]} for argument in record["arguments"]]
    for a in pointers + record["more_arguments"]:
        segment[a["offset"] : a["offset"] + a["size"]] = a["value"].to_bytes(a["size"], "little")
    return bytes(segment)


def output_agrees(record: Mapping[str, Any], name: str, memory: bytes, wanted: np.ndarray) -> bool:
    """Whether an output's bytes are the expected ones; any NaN agrees with any other.

    If the record has a tolerance, finite values may differ by as much.
    """
    [view] = [a["view"] for a in record["arguments"] if a["name"] == name]
    got = np.frombuffer(memory, np.dtype(view["dtype"])).reshape(view["shape"])
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return False
    if tolerance := record["expected"].get("tolerance", 0):
        relative = tolerance * float(ml_dtypes.finfo(wanted.dtype).eps)
        return _is_close(got.astype(np.float64), wanted.astype(np.float64), relative)
    bits = f"u{wanted.dtype.itemsize}"
    both_nan = np.isnan(got.astype(np.float64)) & np.isnan(wanted.astype(np.float64))
    return bool(np.all((got.view(bits) == np.ascontiguousarray(wanted).view(bits)) | both_nan))


def _is_close(got: np.ndarray, wanted: np.ndarray, relative: float) -> bool:
    largest = relative * (np.abs(wanted) + np.sqrt(np.mean(wanted**2)))
    return bool(np.all(np.abs(got - wanted) <= largest))
