"""The mask of documents of an evaluation."""

import json

import jax
import numpy as np
from support.llamas import SMALL, rewrite_params

import eval as evaluation_program
from analysis.evaluate import EvalConfig
from models import decoder
from training.huggingface.importing import import_checkpoint


def test_an_imported_checkpoint_is_evaluated_with_the_mask_of_a_run_if_asked(tmp_path):
    """A run has the mask that its config.json names; an imported checkpoint has none."""
    params = jax.tree.map(np.asarray, decoder.init(SMALL, jax.random.key(0)))
    out = params["blocks"]["attention"]["out"]
    params["blocks"]["attention"]["out"] = 50 * out  # attention matters
    (tmp_path / "seed").mkdir()
    rewrite_params(tmp_path / "seed", SMALL, params)
    import_checkpoint(tmp_path / "seed", tmp_path / "run")
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"line {i}: the square is {i * i}\n")

    def loss(mask):
        given = {"data": str(tmp_path / "text"), "batches": 1, "batch_size": 2, "json": True}
        found = evaluation_program.evaluate(EvalConfig(tmp_path / "run", document_mask=mask, **given))
        assert found.get("document_mask") == mask
        return found["eval_loss"]

    without, off, on = loss(None), loss("off"), loss("on")
    path = tmp_path / "run" / "config.json"
    documents = {"end": 256, "restart_positions": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"documents": documents}))
    assert (loss(None), loss("off")) == (on, off)
    assert without == off
    assert abs(on - off) > 1e-3
