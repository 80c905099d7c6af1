"""Measured tiles: the library takes them where they are, and refuses a table that it cannot use."""

import json

import numpy as np
import pytest
from test_fp4_gemm import operands, product

from mxjax.kernels.matmul import tiles as tile_table
from mxjax.kernels.matmul.fp4_gemm import matmul
from mxjax.kernels.matmul.tiles import ALONE, OPTIONS, TILES, candidates, choose_tiles, options_of
from mxjax.runtime.devices import Target

GFX950 = Target("hip", "gfx950")
SHAPE = (8192, 4096, 14336, 1)


@pytest.fixture(autouse=True)
def read_anew():
    tile_table.current_table.cache_clear()
    yield
    tile_table.current_table.cache_clear()


def write(path, entries, arch="gfx950"):
    gemms = [{"gemm": list(gemm), "tile": list(tile)} for gemm, tile in entries]
    tile_table.write_table(path, arch, {"device": "a test"}, gemms)


def test_a_table_can_name_every_candidate():
    tiles = candidates(GFX950)
    assert len({t.name for t in tiles}) == len(tiles)
    wide = [t for t in tiles if t.alone]
    assert [t.name for t in wide] == [(256, 256, 256, 4, 2)]
    assert options_of(wide[0], GFX950) == OPTIONS["gfx950"] | ALONE
    assert all(options_of(t, GFX950) == OPTIONS["gfx950"] for t in tiles if t not in wide)


def test_tiles_are_the_measured_ones_else_the_estimated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    estimated = choose_tiles(*SHAPE, GFX950)
    slow = candidates(GFX950)[-1]
    assert slow not in TILES["gfx950"]
    write(tile_table.default_path("gfx950"), [(SHAPE, slow.name)])
    tile_table.current_table.cache_clear()
    assert choose_tiles(*SHAPE, GFX950) == slow != estimated
    assert choose_tiles(16384, 4096, 14336, 1, GFX950) == estimated
    assert choose_tiles(*SHAPE, Target("cuda", "sm_100")) in TILES["sm_100"]
    tile_table.current_table.cache_clear()
    monkeypatch.setenv("MXJAX_TILES", "")
    assert choose_tiles(*SHAPE, GFX950) == estimated


def test_products_run_with_the_measured_tiles(tmp_path, monkeypatch, request):
    from mxjax.runtime.devices import current_target

    if current_target().backend != "interpreter":
        pytest.skip("names the interpreter's tiles")
    path = tmp_path / "tiles.json"
    write(path, [((70, 33, 288, 1), (64, 64, 256, 4, 1))], arch="software")
    monkeypatch.setenv("MXJAX_TILES", str(path))
    assert choose_tiles(70, 33, 288, 1, current_target()).m == 64
    arrays = operands(0, (), 70, 33, 288)
    out = matmul(*arrays, dtype=np.float32)
    np.testing.assert_array_equal(out, product(*arrays).astype(np.float32))


BAD = {
    "empty": ("", "is damaged"),
    "no table": ("[1, 2]", "is damaged"),
    "no gemms": ('{"format": 1, "arch": "gfx950"}', "is damaged .*'gemms'"),
    "texts": (
        '{"format": 1, "arch": "gfx950", "gemms": [{"gemm": "8192", "tile": [1, 2, 3, 4, 5]}]}',
        "4 integers are needed, got '8192'",
    ),
    "later format": ('{"format": 2, "arch": "gfx950", "gemms": []}', "has format 2, not 1"),
    "foreign": ('{"format": 1, "arch": "gfx942", "gemms": []}', "is for 'gfx942', not gfx950"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_table_that_cannot_be_used_is_refused_in_one_line(text, message, tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    path.write_text(text)
    monkeypatch.setenv("MXJAX_TILES", str(path))
    with pytest.raises(ValueError, match=message) as error:
        choose_tiles(*SHAPE, GFX950)
    assert str(path) in str(error.value)
    assert "tune_gemm" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tile", [(512, 512, 256, 8, 2), (256, 256, 256, 8, 2)])
def test_a_tile_that_is_no_candidate_or_does_not_fit_is_refused(tile, tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    write(path, [((100, 100, 256, 1), tile)])
    monkeypatch.setenv("MXJAX_TILES", str(path))
    with pytest.raises(ValueError, match=r"names tile .*, which is no candidate"):
        choose_tiles(100, 100, 256, 1, GFX950)


def test_a_table_that_was_asked_for_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("MXJAX_TILES", str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError):
        choose_tiles(*SHAPE, GFX950)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "folder" / "tiles.json"
    write(path, [(SHAPE, (256, 256, 256, 8, 2))])
    assert tile_table.read_table(path, "gfx950") == {SHAPE: (256, 256, 256, 8, 2)}
    assert json.loads(path.read_text())["about"] == {"device": "a test"}
    assert list(path.parent.iterdir()) == [path]
