"""Hugging Face checkpoints of small Llamas, and what the tests read of checkpoints and runs."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from models import decoder
from models.config_file import from_dict
from models.configs import DecoderConfig
from models.huggingface.architectures import views
from models.huggingface.config import write_config
from models.huggingface.files import Reader, Spec, Writer
from mxjax import get_policy
from training.huggingface.importing import import_checkpoint
from training.run.checkpoints import Checkpoints

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "huggingface"
NAMES = ("llama2", "llama3", "llama3.1", "llama3.2")
SMALL = DecoderConfig(300, 64, 2, 4, 2, 16, 96, rope_theta=10_000.0)


def layer_policies(config, default, rules=()):
    """Resolves names of policies, as the start of a run does."""

    def policy(name):
        return get_policy(name) if isinstance(name, str) else name

    return decoder.layer_policies(
        config, policy(default), [(pattern, policy(name)) for pattern, name in rules]
    )


def params_of(run):
    config = from_dict(json.loads((run / "config.json").read_text())["model"])
    with Checkpoints(run / "checkpoints") as checkpoints:
        return config, checkpoints.restore_params(decoder.abstract_params(config))


def logits_of(config, params, tokens):
    policies = layer_policies(config, "fp32", [("*", "fp32")])
    run = jax.jit(lambda p, t: decoder.apply(config, p, t, policies=policies, dtype=jnp.float32))
    return np.asarray(run(params, jnp.asarray(tokens)))


def tensors(folder):
    with Reader(folder) as reader:
        return {name: (spec, reader.read(name).tobytes()) for name, spec in reader.specs.items()}


def golden_raw(name="llama3.2"):
    return json.loads((GOLDEN / name / "config.json").read_text())


def rewrite(folder, change):
    """Replaces a one-file checkpoint's tensors by change(tensors); each is (Spec, array)."""
    with Reader(folder) as reader:
        values = change({name: (spec, reader.read(name)) for name, spec in reader.specs.items()})
    write(folder, values)


def write(folder, values):
    with Writer(folder, {name: spec for name, (spec, _) in values.items()}, 2**30) as writer:
        for name, (_, value) in values.items():
            writer.write(name, value)


def rewrite_params(folder, config, params):
    named = {n: v if v.ndim == 1 else v.reshape(-1, v.shape[-1]) for n, v in views(config, params).items()}
    write(folder, {n: (Spec("F32", v.shape), v) for n, v in named.items()})
    (folder / "config.json").write_text(json.dumps(write_config(config, 64)))


def imported(folder, config, params):
    """Returns the run of an imported checkpoint with these parameters, which lies beside it in `seed`."""
    (folder / "seed").mkdir()
    rewrite_params(folder / "seed", config, jax.tree.map(np.asarray, params))
    import_checkpoint(folder / "seed", folder / "run")
    return folder / "run"
