"""Machine code for gfx950: what it contains, and what it computes in the emulator of tests/kernels/gfx950."""

import fnmatch
import json
import math
import re

import ml_dtypes
import numpy as np
import pytest
from gfx950 import assembly, machine
from gfx950.memory import BASE, Memory
from gfx950.races import Accesses
from support import code_objects
from support.code_objects import LLAMA, STEP, build, elements_of, records, starting
from support.programs import run_compiled

from mxjax.kernels.cases import check, expected
from mxjax.kernels.matmul.tiles import TILES

pytestmark = pytest.mark.slow

LATE = ("vmcnt", "lgkmcnt")
GEMM_KERNELS = {"gemm_kernel", "grouped_rows_kernel", "grouped_sums_kernel"}
ATTENTION_KERNELS = {"forward_kernel", "key_gradients_kernel", "query_gradients_kernel"}


@pytest.fixture(scope="module")
def gfx950(builds):
    return {name: record for (target, name), record in records(builds).items() if target == "gfx950"}


@pytest.fixture(scope="module", params=["chosen", pytest.param("every", marks=pytest.mark.exhaustive)])
def folder(request, builds, tmp_path_factory):
    """Returns the folder of the builds that tests take, or of all that there are."""
    if request.param == "chosen":
        return builds
    out = tmp_path_factory.mktemp("every")
    build(out, {"gfx950": ["*"]})
    return out


@pytest.fixture(scope="module")
def found(folder):
    return [record for (target, _), record in records(folder).items() if target == "gfx950"]


@pytest.fixture(scope="module")
def gemms(found):
    gemms = [record for record in found if record["kernel"] in GEMM_KERNELS]
    assert {record["kernel"] for record in gemms} == GEMM_KERNELS
    return gemms


@pytest.fixture(scope="module")
def quantizers(found):
    return [record for record in found if record["kernel"] == "quantize_kernel"]


def test_spills_nothing(found):
    for d in found:
        name, resources = d["name"], d["resources"]
        assert resources["vgpr_spills"] == resources["scratch_bytes"] == 0, name
        # A scalar register spills to a lane of a vector register.
        is_masked = name.startswith("attention_key_gradients_") and name.endswith("_masked")
        assert resources["sgpr_spills"] <= (16 if is_masked else 0), name
        assert d["shared_bytes"] <= 160 * 1024
        assert resources["waves_per_simd"] >= 1
        assert "scratch" not in d["whole_kernel"]["classes"]


def tile_of(d):
    """Returns m, n and k of a GEMM's tile."""
    return tuple(d["constants"][f"BLOCK_{axis}"] for axis in "MNK")


def matrix_instructions(d):
    """Returns the matrix instructions of a wave for one step along k."""
    return math.prod(tile_of(d)) // (16 * 16 * 128) // d["warps"]


def steps_of_a_pass(d):
    """Returns the steps along k in one pass of the main loop, more than one where LLVM unrolls it."""
    steps, rest = divmod(d["main_loop"]["classes"]["matrix"], matrix_instructions(d))
    assert not rest, d["name"]
    return steps


def test_small_builds_of_tiles_pass_the_loop_four_times(gfx950):
    """So that each LDS buffer is filled again while other waves may still read it."""
    names = fnmatch.filter(gfx950, "gemm_2x*_tile*")
    assert len(names) == len(TILES["gfx950"])
    for d in map(gfx950.get, names):
        assert d["main_loop"]["is_loop"], d["name"]
        steps = -(-d["constants"]["K"] // tile_of(d)[2])
        outside = d["whole_kernel"]["classes"]["matrix"] - d["main_loop"]["classes"]["matrix"]
        passes = (steps - outside // matrix_instructions(d)) / steps_of_a_pass(d)
        assert passes >= 4, d["name"]


def test_multiplies_in_fp4(gemms):
    for d in gemms:
        matrix = starting(d["whole_kernel"]["opcodes"], "v_mfma", "v_smfmac", "v_dot")
        assert list(matrix) == ["v_mfma_scale_f32_16x16x128_f8f6f4"], d["name"]


def test_gemms_load_words(gemms):
    """GEMMs load elements by 16 bytes and scales by 4, each once, from memory; both by 4 or 16 from LDS.

    This holds in the main loop and around it: nothing else loads a byte of a tile.
    """
    for d in gemms:
        c, threads = d["constants"], d["block"][0]
        tile = (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"]  # elements
        unrolled = steps_of_a_pass(d)
        elements, scales = tile // 2 // (16 * threads), tile // 32 // (4 * threads)
        loops = [d["main_loop"]["opcodes"]] if d["main_loop"]["is_loop"] else []
        for opcodes in [d["whole_kernel"]["opcodes"], *loops]:
            loads = starting(opcodes, "global_load", "buffer_load", "flat_load")
            wide = sum(n for x, n in loads.items() if re.search(r"dwordx4\b", x))
            narrow = sum(n for x, n in loads.items() if re.search(r"dword\b", x))
            assert wide + narrow == sum(loads.values()), (d["name"], loads)
            passes = wide // elements
            assert (wide, narrow) == (passes * elements, passes * scales), (d["name"], loads)
            assert passes == unrolled or opcodes not in loops
            reads = starting(opcodes, "ds_read", "ds_load")
            assert set(reads) <= {"ds_read_b128", "ds_read_b32", "ds_read2st64_b32", "ds_read2_b32"}, d[
                "name"
            ]


def test_scales_are_few_words_of_lds(gemms):
    """A word has the scales of 32 rows and both halves of k; a wave reads each of its words once."""
    for d in (d for d in gemms if d["main_loop"]["is_loop"]):
        rows, columns = d["constants"]["BLOCK_M"] // 32, d["constants"]["BLOCK_N"] // 32
        splits = [(i, d["warps"] // i) for i in (1, 2, 4, 8) if i <= d["warps"]]
        opcodes = d["main_loop"]["opcodes"]
        words = opcodes.get("ds_read_b32", 0) + 2 * opcodes.get("ds_read2st64_b32", 0)
        assert words == steps_of_a_pass(d) * min(rows // i + columns // j for i, j in splits), d["name"]


def test_main_loop(gemms):
    """Operands go straight into LDS, and no register is written there."""
    loops = [d for d in gemms if d["main_loop"]["is_loop"]]
    assert {d["name"] for d in loops} >= {*LLAMA, *code_objects.EXPERTS}
    for d in loops:
        loop = d["main_loop"]
        assert steps_of_a_pass(d) == (1 if min(tile_of(d)) >= 128 else 2), d["name"]
        assert set(starting(loop["opcodes"], "buffer_load", "global_load")) <= {
            "buffer_load_dword lds",
            "buffer_load_dwordx4 lds",
            "global_load_lds_dword",
            "global_load_lds_dwordx4",
        }
        assert not {"global_load", "lds_write", "lds_permute", "scratch"} & set(loop["classes"])


def sides_of(d):
    """Returns the form of each side that a quantizer writes, and whether it rounds stochastically."""
    c = d["constants"]
    sides = [(c[f"{side}_FORM"], c[f"{side}_STOCHASTIC"]) for side in ("ROW", "COLUMN")]
    return [side for side in sides if side[0]]


def row_bytes(d):
    return d["constants"]["C"] * (4 if d["arguments"][0]["dtype"] == "float32" else 2)


def test_quantizers_convert_by_the_hardware(quantizers):
    """One instruction converts each pair rounded to nearest; other sides use no FP4 conversion."""
    for d in quantizers:
        pairs = elements_of(d) // 2
        found = starting(d["whole_kernel"]["opcodes"], "v_cvt_scalef32")
        wanted = pairs * sum(side == ("packed", False) for side in sides_of(d))
        assert found == ({"v_cvt_scalef32_pk_fp4_f32": wanted} if wanted else {}), d["name"]


def test_quantizers_load_16_bytes(quantizers):
    """Tensors whose rows are aligned to 16 bytes are loaded by 16 bytes; signs and keys by words or more."""
    aligned = [d for d in quantizers if row_bytes(d) % 16 == 0]
    assert {d["name"] for d in aligned} >= set(STEP)
    for d in aligned:
        c, loads = d["constants"], starting(d["whole_kernel"]["opcodes"], "global_load", "buffer_load")
        assert not starting(d["whole_kernel"]["opcodes"], "flat_load")
        wide = sum(loads.pop(f"{space}_load_dwordx4", 0) for space in ("global", "buffer"))
        wanted = elements_of(d) * row_bytes(d) // c["C"] // 16
        if c["ROW_SIGNS"] or c["COLUMN_SIGNS"] or c["ROW_STOCHASTIC"] or c["COLUMN_STOCHASTIC"]:
            assert wide >= wanted, d["name"]
            assert set(loads) <= {"buffer_load_dword", "global_load_dwordx2"}, (d["name"], loads)
        else:
            assert (wide, loads) == (wanted, {}), d["name"]


def test_quantizers_store_16_bytes(quantizers):
    """Elements are stored by 16 bytes, because their rows are padded; scales by bytes."""
    for d in quantizers:
        stores = starting(d["whole_kernel"]["opcodes"], "global_store", "buffer_store", "flat_store")
        bits = sum({"packed": 4, "bf16": 16}[form] for form, _ in sides_of(d))
        assert stores.pop("buffer_store_dwordx4") == elements_of(d) * bits // 128, d["name"]
        assert set(stores) <= {"buffer_store_short", "buffer_store_byte"}
        assert sum(stores.values()) <= 2 * len(sides_of(d)), d["name"]


def test_attention_multiplies_in_bfloat16(found):
    """Keys and values go straight into LDS in the forward kernel, and are transposed as they are read."""
    attention = [d for d in found if d["kernel"] in ATTENTION_KERNELS]
    assert {d["kernel"] for d in attention} == ATTENTION_KERNELS
    for d in attention:
        opcodes = d["whole_kernel"]["opcodes"]
        assert list(starting(opcodes, "v_mfma", "v_smfmac", "v_dot")) == ["v_mfma_f32_32x32x16_bf16"], d[
            "name"
        ]
        assert "ds_read_b64_tr_b16" in d["main_loop"]["opcodes"], d["name"]
        if d["kernel"] == "forward_kernel":
            assert d["main_loop"]["classes"].keys() & {"global_load", "global_to_lds"} == {"global_to_lds"}


LIMITS = [(5, 18), (4, 22), (5, 13), (4, 24)]  # of STEP: waves a SIMD, instructions an element


@pytest.mark.parametrize(
    ("name", "waves", "limit"), [(name, *limits) for name, limits in zip(STEP, LIMITS, strict=True)]
)
def test_quantizer_is_short(gfx950, name, waves, limit):
    d = gfx950[name]
    assert d["resources"]["waves_per_simd"] >= waves
    assert sum(d["whole_kernel"]["opcodes"].values()) <= limit * elements_of(d)
    found = starting(d["whole_kernel"]["opcodes"], "buffer_store_short", "buffer_store_byte")
    assert found == {"buffer_store_short": 2}


def place(record, inputs):
    """Returns memory with a record's inputs, the addresses of its arrays and that of its arguments."""
    arrays = [a for a in record["arguments"] if a["role"] != "unused"]
    memory = Memory(BASE, sum(a["bytes"] + 8192 for a in arrays) + 16384)
    # Address of the unused outputs, which nothing may read or write.
    addresses = {a["name"]: 2**44 for a in record["arguments"]}
    for a in arrays:
        addresses[a["name"]] = memory.allocate(a["bytes"], a["alignment"])
        if a["role"] == "input":
            data = np.ascontiguousarray(inputs[a["name"]]).view(np.uint8).reshape(-1)
            memory.at(addresses[a["name"]], a["bytes"])[:] = data
    segment = check.argument_segment(record, addresses)
    kernarg = memory.allocate(len(segment), 16)
    memory.at(kernarg, len(segment))[:] = np.frombuffer(segment, np.uint8)
    return memory, addresses, kernarg


def assert_writes_what_is_expected(record, text, inputs, wanted, **options):
    memory, addresses, kernarg = place(record, inputs)
    machine.run(record, text, memory, kernarg, **options)
    for a in record["arguments"]:
        if a["role"] == "output":
            name = a["name"]
            written = memory.at(addresses[name], a["bytes"]).tobytes()
            assert check.output_agrees(record, name, written, wanted[name]), name
            other = bytes(255 - x for x in written)
            assert not check.output_agrees(record, name, other, wanted[name]), name


def assert_all_write_what_is_expected(records, folder, late=LATE):
    """Runs each code object with these transfers as late as it waits for them, and waves in any order."""
    assert records
    for i, record in enumerate(records):
        text = (folder / "gfx950" / f"{record['name']}.amdgcn").read_text()
        inputs = check.make_inputs(record)
        wanted, preloaded = check.expected_outputs(record, inputs), (i % 2 == 0) == (late is LATE)
        assert_writes_what_is_expected(record, text, inputs, wanted, seed=i, late=late, preloaded=preloaded)


@pytest.mark.parametrize("pattern", code_objects.EMULATED)
def test_code_objects_write_what_is_expected(gfx950, builds, pattern):
    assert_all_write_what_is_expected([gfx950[name] for name in fnmatch.filter(gfx950, pattern)], builds)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("patterns", "lates"),
    [
        # A race is found whenever a transfer is done; early loads and late reads are the other time of all.
        ([*code_objects.EMULATED_GEMMS, *code_objects.MORE_GEMMS], [LATE, ("lgkmcnt",)]),
        (code_objects.MORE_QUANTIZERS, [LATE]),
        (code_objects.MORE_ATTENTION, [LATE]),
    ],
    ids=["gemms", "quantizers", "attention"],
)
def test_more_code_objects_write_what_is_expected(tmp_path, patterns, lates):
    build(tmp_path, {"gfx950": patterns})
    for late in lates:
        assert_all_write_what_is_expected(list(records(tmp_path).values()), tmp_path, late=late)


def reads_outstanding_at_barriers(text):
    """Returns how many LDS instructions a wave may not have waited for at each barrier, along any path."""
    program, labels = assembly.read(text)
    begin = dict.fromkeys(range(len(program) + 1), 0)
    changed = True
    while changed:
        changed, barriers = False, []
        for at, i in enumerate(program):
            count = begin[at] + i.opcode.startswith("ds_")
            if i.opcode == "s_waitcnt":
                count = min(count, i.integer("lgkmcnt", count))
            if i.opcode == "s_barrier":
                barriers.append(count)
            for to in {at + 1, labels.get(i.target, at + 1)}:
                more = min(count, 15)  # where the counter saturates
                changed, begin[to] = changed or more > begin[to], max(more, begin[to])
    return barriers


def test_no_barrier_leaves_a_read_of_lds_outstanding(gemms, folder):
    """Loads into LDS follow barriers, so none can overwrite what a wave still reads."""
    for d in gemms:
        text = (folder / "gfx950" / f"{d['name']}.amdgcn").read_text()
        assert set(reads_outstanding_at_barriers(text)) <= {0}, d["name"]


PINGPONG = """
import pathlib, sys
from mxjax.kernels.cases.compile import build_one
from mxjax.kernels.lowering import SETTINGS
SETTINGS["hip"]["use_block_pingpong"] = True
build_one("matmul", "gfx950", sys.argv[1], pathlib.Path(sys.argv[2]))
"""


def test_the_ping_pong_schedule_would_race(gfx950, tmp_path, monkeypatch):
    """Waves pass a barrier with a read outstanding, and others load over what it reads: results are wrong."""
    [name] = fnmatch.filter(gfx950, "gemm_2x256x256x*_tile256x256")
    assert gfx950[name]["settings"] == {"use_block_pingpong": False}
    run_compiled(PINGPONG, name, str(tmp_path))
    record = json.loads((tmp_path / "gfx950" / f"{name}.json").read_text())
    text = (tmp_path / "gfx950" / f"{name}.amdgcn").read_text()
    assert set(reads_outstanding_at_barriers(text)) == {0, 1}
    options = {"late": ("lgkmcnt",), "groups": [(0, 0, 0)]}
    inputs = check.make_inputs(record)
    memory, _, kernarg = place(record, inputs)
    with pytest.raises(AssertionError, match=r"race in LDS: .* lds' while a read of the same bytes"):
        machine.run(record, text, memory, kernarg, **options)

    monkeypatch.setattr(Accesses, "begin", lambda *_: None)
    memory, addresses, kernarg = place(record, inputs)
    machine.run(record, text, memory, kernarg, **options)
    [out] = [a for a in record["arguments"] if a["role"] == "output"]
    found = memory.at(addresses["out"], out["bytes"]).view(ml_dtypes.bfloat16).reshape(out["shape"])
    wrong = found != check.expected_outputs(record, inputs)["out"]
    assert 0 < wrong[0].sum() < wrong[0].size // 10


def test_a_work_group_of_a_llama_gemm(gfx950, builds):
    """Sixteen passes through the main loop write one tile, the right one, and nothing else."""
    record = gfx950[LLAMA[0]]
    inputs = check.make_inputs(record)
    memory, addresses, kernarg = place(record, inputs)
    before = memory.bytes.copy()
    text = (builds / "gfx950" / f"{LLAMA[0]}.amdgcn").read_text()
    machine.run(record, text, memory, kernarg, late=LATE, groups=[(0, 0, record["grid"][0] // 2 + 1)])

    [out] = [a for a in record["arguments"] if a["role"] == "output"]
    first, shape = addresses["out"] - BASE, out["shape"][1:]
    changed = memory.bytes != before
    written = changed[first : first + out["bytes"]].reshape(*shape, 2).any(axis=-1)
    assert written.sum() == changed.reshape(-1, 2).any(axis=-1).sum()
    rows, columns = (slice(found.min(), found.max() + 1) for found in np.nonzero(written))
    tile = memory.at(addresses["out"], out["bytes"]).view(ml_dtypes.bfloat16).reshape(shape)[rows, columns]
    assert tile.shape == (record["constants"]["BLOCK_M"], record["constants"]["BLOCK_N"])
    sizes, parts = record["expected"]["arguments"], {}
    for name, length, part in (("lhs", sizes["m"], rows), ("rhs", sizes["n"], columns)):
        scales = expected.unshuffle(inputs[f"{name}_scales"], length, sizes["k"] // 32)
        parts |= {name: inputs[name][:, part], f"{name}_scales": scales[:, part]}
    sizes = sizes | {"m": tile.shape[0], "n": tile.shape[1], "shuffled": False}
    np.testing.assert_array_equal(tile, expected.gemm_outputs(parts, **sizes)["out"][0])
