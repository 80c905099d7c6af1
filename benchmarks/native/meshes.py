"""Checks of training on meshes of two devices against one."""

import json

from benchmarks.native.program import CheckFailed
from benchmarks.native.runs import difference, final, peak_gib, series, step_ms
from benchmarks.native.work import Found, Work
from training.files import write_atomically

FIRST, LATER = 1e-3, 2e-2
"""Relative bounds on the first loss and on everything later, as in `tests/training/test_mesh.py` for runs in
bfloat16: programs round at other places, and MXFP4 enlarges what differs."""


def mesh_one(work: Work) -> Found:
    """The run on one device that those on meshes are compared with."""
    _train(work, "one")
    losses = series(work.folder / "one", "loss")
    first, last = losses[1], losses[max(losses)]
    figures = {"first_loss": first, "last_loss": last, "eval_loss": final(work.folder / "one", "eval_loss")}
    return Found(figures | _costs(work, "one"), {"last_loss": (0.0, first)})


def mesh_tensor(work: Work) -> Found:
    """The same with each matrix shared by two devices."""
    return _on_mesh(work, "tensor=2")


def mesh_fsdp(work: Work) -> Found:
    """The same with parameters and batches shared by two devices."""
    return _on_mesh(work, "fsdp=2")


def mesh_data(work: Work) -> Found:
    """The same with batches shared by two devices."""
    return _on_mesh(work, "data=2")


def _on_mesh(work: Work, mesh: str) -> Found:
    name = mesh.replace("=", "")
    lines = _train(work, name, "--mesh", mesh)
    if not any(f"2 x ({mesh})" in line for line in lines):
        raise CheckFailed("the run was not on two devices")
    run, one = work.folder / name, work.folder / "one"
    later = range(2, 1 + int(max(series(one, "loss"))))
    figures = {
        "first_loss_error": difference(run, one, "loss", {1}),
        "first_norm_error": difference(run, one, "grad_norm", {1}),
        "later_loss_error": difference(run, one, "loss", later),
        "later_norm_error": difference(run, one, "grad_norm", later),
        "eval_loss_error": difference(run, one, "eval_loss"),
    }
    bounds = {name: (0.0, LATER) for name in ("first_norm_error", "later_loss_error", "eval_loss_error")}
    return Found(figures | _costs(work, name), bounds | {"first_loss_error": (0.0, FIRST)})


def _train(work: Work, run: str, *flags: str) -> list[str]:
    model = work.folder / f"{run}-model.json"
    write_atomically(model, json.dumps(work.sizes.model))
    program = work.train(run, "--model-config", model, *work.sizes.mesh.split(), *work.data, *flags)
    return program.lines


def _costs(work: Work, run: str) -> dict[str, float | None]:
    return {"step_ms": step_ms(work.folder / run), "peak_gib": peak_gib(work.folder / run)}
