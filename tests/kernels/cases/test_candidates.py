"""The tiles and blocks for gfx950 that only benchmarks run, in the emulator of tests/kernels/gfx950."""

import fnmatch

import pytest
from support.code_objects import records
from support.programs import run_compiled
from test_gfx950 import LATE, assert_writes_what_is_expected, reads_outstanding_at_barriers

from mxjax.kernels.cases import attention as attention_builds
from mxjax.kernels.cases import check
from mxjax.kernels.cases import matmul as gemm_builds
from mxjax.runtime.devices import Target

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("candidates")
    options = ("--target=gfx950", "--candidates", "--only=candidate_*", "--jobs=2", f"--out={out}")
    run_compiled("mxjax.kernels.cases", *options)
    return out


@pytest.mark.parametrize("kind", ["gemm", "attention_forward", "attention_key", "attention_query"])
def test_candidates_are_right_and_spill_nothing(folder, kind):
    """Each runs with transfers as late as it waits for them, and with late reads of LDS alone."""
    modules = (gemm_builds, attention_builds)
    built = {b.name for module in modules for b in module.candidate_builds(Target("hip", "gfx950"))}
    found = {name: record for (_, name), record in records(folder).items()}
    assert found.keys() == built
    for name in fnmatch.filter(found, f"candidate_{kind}*"):
        record = found[name]
        resources = record["resources"]
        assert resources["vgpr_spills"] == resources["sgpr_spills"] == resources["scratch_bytes"] == 0, name
        text = (folder / "gfx950" / f"{name}.amdgcn").read_text()
        assert set(reads_outstanding_at_barriers(text)) <= {0}, name
        inputs = check.make_inputs(record)
        wanted = check.expected_outputs(record, inputs)
        for late, preloaded in ((LATE, True), (("lgkmcnt",), False)):
            options = {"late": late, "preloaded": preloaded, "seed": 0}
            assert_writes_what_is_expected(record, text, inputs, wanted, **options)
