"""A build's record against the compiled code: arguments as a loader sees them, results as the kernel's."""

import fnmatch
import importlib
import inspect
import json
import re
import subprocess

import numpy as np
import pytest
from support.code_objects import INTERPRETED, MORE_INTERPRETED
from support.marks import parametrize
from support.rocm_on_cpu import kernel_metadata
from triton import knobs

from mxjax.kernels.cases import check, expected
from mxjax.kernels.cases import compile as aot
from mxjax.kernels.cases import record as aot_record
from mxjax.kernels.matmul.fp4_gemm import shuffle_scales
from mxjax.kernels.selftest.kernels import run_build
from mxjax.runtime.devices import Target


def records(folder, target, pattern="*"):
    """Returns the path of each JSON and what is in it."""
    found = [
        (path, json.loads(path.read_text())) for path in sorted((folder / target).glob(f"{pattern}.json"))
    ]
    assert found
    return found


def addresses_of(record):
    """Returns an address for each array, one after another."""
    addresses, end = {}, 0x7F00_0000_0000
    for a in record["arguments"]:
        addresses[a["name"]] = end
        end += -(-a["bytes"] // a["alignment"]) * a["alignment"]
    return addresses


HIDDEN = {  # of a launch of 6 x 5 programs of 512 threads with 1000 bytes of LDS
    "hidden_block_count_x": 6,
    "hidden_block_count_y": 5,
    "hidden_block_count_z": 1,
    "hidden_group_size_x": 512,
    "hidden_group_size_y": 1,
    "hidden_group_size_z": 1,
    "hidden_remainder_x": 0,
    "hidden_global_offset_z": 0,
    "hidden_dynamic_lds_size": 1000,
    "hidden_queue_ptr": 0,
}


def test_values_of_hidden_arguments():
    assert HIDDEN.items() <= aot_record.launch_values((6, 5, 1), (512, 1, 1), 1000).items()


@pytest.mark.slow
def test_the_docstring_names_every_field(builds):
    described = set(re.findall(r"`(\w+)`", str(aot_record.__doc__).split("Launching on gfx950")[0]))
    for target in aot.TARGETS:
        for _, record in records(builds, target):
            assert set(record) <= described
            assert set(record["arguments"][0]) <= described


@pytest.mark.slow
def test_arguments_are_those_of_the_gfx950_code_objects(builds):
    """Offset, size, kind and address space of each, and the bytes that make them up."""
    kinds = set()
    for path, record in records(builds, "gfx950"):
        kernel = kernel_metadata(path.with_suffix(".hsaco").read_bytes())
        listed = record["arguments"] + record["more_arguments"]
        assert [(a["offset"], a["size"], a["kind"], a["address_space"]) for a in listed] == [
            (a[".offset"], a[".size"], a[".value_kind"], a.get(".address_space")) for a in kernel[".args"]
        ]
        found = (record["kernel"], record["kernarg_bytes"])
        assert found == (kernel[".name"], kernel[".kernarg_segment_size"])
        assert record["descriptor_symbol"] == kernel[".symbol"]
        assert record["threads_per_warp"] == kernel[".wavefront_size"]
        assert record["block"] == [kernel[".max_flat_workgroup_size"], 1, 1]
        addresses = addresses_of(record)
        data = check.argument_segment(record, addresses)
        assert len(data) == kernel[".kernarg_segment_size"]
        pointers = list(addresses.values())
        names = list(addresses)
        for i, a in enumerate(kernel[".args"]):
            value = int.from_bytes(data[a[".offset"] : a[".offset"] + a[".size"]], "little")
            if i < len(names):
                assert (value, value % 16) == (pointers[i], 0), names[i]
            elif a[".value_kind"] == "hidden_group_size_x":
                assert value == 64 * record["warps"]
            elif a[".value_kind"].startswith("hidden_block_count_"):
                assert value == record["grid"]["xyz".index(a[".value_kind"][-1])]
            kinds.add(a[".value_kind"])
    assert {"global_buffer", "hidden_block_count_x"} <= kinds


@pytest.mark.slow
def test_gfx950_code_reads_no_hidden_argument(builds):
    """Scalar loads, by which a kernel reads its arguments, end before them."""
    hiding = [
        (path, record)
        for path, record in records(builds, "gfx950")
        if record["more_arguments"][-1]["name"].startswith("hidden_")
    ]
    assert hiding
    for path, record in hiding:
        text = path.with_suffix(".amdgcn").read_text()
        loads = re.findall(r"^\s+s_load_dword(?:x(\d+))? \S+, \S+, (\w+)", text, re.M)
        ends = [int(offset, 0) + 4 * int(words or 1) for words, offset in loads]
        first = next(a["offset"] for a in record["more_arguments"] if a["name"].startswith("hidden_"))
        assert len(ends) == len(re.findall(r"^\s+s_(?:buffer_)?load", text, re.M)) > 0
        assert max(ends) <= first


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_arguments_are_those_of_the_cubins(builds, target):
    for path, record in records(builds, target):
        command = [knobs.nvidia.cuobjdump.path, "-elf", str(path.with_suffix(".cubin"))]
        elf = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"Ordinal : 0x(\w+)\s+Offset\s+: 0x(\w+)\s+Size\s+: 0x(\w+)", elf)
        compiled = sorted(tuple(int(x, 16) for x in argument) for argument in found)
        listed = record["arguments"] + record["more_arguments"]
        assert [(i, a["offset"], a["size"]) for i, a in enumerate(listed)] == compiled
        assert record["kernarg_bytes"] == int(
            re.search(r"CBANK_PARAM_SIZE.*\n.*\n\s+Value:\s+(\w+)", elf)[1], 16
        )
        *sizes, first, second = record["more_arguments"]
        parameters = inspect.signature(find_kernel(record).fn).parameters.values()
        assert [first["name"], second["name"]] == ["global_scratch", "profile_scratch"]
        assert [(a["name"], a["kind"], a["size"]) for a in sizes] == [
            (p.name, "by_value", 4)
            for p in list(parameters)[len(record["arguments"]) :]
            if p.annotation is p.empty  # not constexpr
        ]
        assert all(a["value"] == record["constants"][a["name"]] for a in sizes)
        threads = re.search(r"\.reqntid (\d+)", path.with_suffix(".ptx").read_text())
        assert record["block"] == [int(threads[1]), 1, 1]


def test_refuses_another_order_or_type():
    [build] = [b for b in aot.list_builds("matmul", "gfx950") if b.name == "gemm_1x1x1x32_float32"]
    types = dict.fromkeys(build.signature, "i8") | {"out": "f32"}

    def check(types):
        parameters = ", ".join(f"%{n}: !tt.ptr<{t}> {{tt.divisibility = 16 : i32}}" for n, t in types.items())
        aot_record.check_order(build, f"tt.func public @gemm_kernel({parameters}) attributes {{")

    check(types)
    for wrong in (dict(reversed(types.items())), types | {"out": "bf16"}):
        with pytest.raises(RuntimeError, match="but the compiled kernel"):
            check(wrong)


def find_kernel(record):
    module, name = record["source"].split(":")
    return getattr(importlib.import_module(module), name)


@parametrize("pattern", slow=INTERPRETED, exhaustive=MORE_INTERPRETED)
def test_sm_90_kernels_compute_what_is_expected(on_hopper, pattern):
    listed = [build for module in aot.MODULES for build in aot.list_builds(module, "sm_90")]
    builds = [build for build in listed if fnmatch.fnmatch(build.name, pattern)]
    assert builds
    for build in builds:
        run_build(build)


def test_shuffled_scales_are_those_of_the_kernel():
    scales = np.random.default_rng(0).integers(0, 255, (2, 300, 20), np.uint8)
    shuffled = expected.shuffle(scales)
    np.testing.assert_array_equal(shuffled, shuffle_scales(scales, Target("hip", "gfx950")))
    np.testing.assert_array_equal(expected.unshuffle(shuffled, 300, 20), scales)
