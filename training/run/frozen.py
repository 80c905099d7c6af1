"""The weights that a run with --lora freezes: RUN/frozen, a checkpoint of parameters that is written once."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from models import lora
from models.configs import DecoderConfig
from models.decoder import Params, abstract_params
from models.gemms import linear_weights
from models.huggingface.files import new_folder
from training.config import Config
from training.run.checkpoints import Checkpoints, Weights, save_params
from training.run.checksums import saved_steps, saved_tree
from training.run.resume import branch_point

FROZEN = "frozen"


def check_lora(config: Config, devices: int) -> None:
    """Raises ValueError if --init names a run with adapters, or --lora cannot do what is asked."""
    if config.init is not None and (config.init / FROZEN).exists():
        raise ValueError(
            f"--init {config.init} has adapters of --lora: merge them with python -m training.huggingface "
            "export, and import that"
        )
    if config.lora is None:
        return
    given = f"--lora {config.lora}"
    if config.init is None and config.branch is None:
        raise ValueError(f"{given} trains adapters of weights that exist: add --init RUN")
    if devices > 1:
        raise ValueError(f"{given} runs on one device and there are {devices}; set CUDA_VISIBLE_DEVICES=0")
    optimizer = config.optimizer
    unable = {
        "--optimizer muon": optimizer.optimizer == "muon",
        "--no-decay": bool(optimizer.no_decay),
        "--deoscillate": config.precision.deoscillate is not None,
    }
    if flag := next((flag for flag, holds in unable.items() if holds), None):
        raise ValueError(f"{given} trains adapters alone, and {flag} is for whole weights; leave it out")


def read_frozen(config: Config, model: DecoderConfig, folder: pathlib.Path) -> Params:
    """Returns the frozen weights of the run in `folder`, where a copy is kept for good.

    Raises:
      ValueError: they cannot be read, or belong to another model.
    """
    own = folder / FROZEN
    if saved_steps(own):
        return _read(own, model)
    found = _read(_origin(config), model)
    with new_folder(own) as partial:
        save_params(partial, found)
    return found


def frozen_shapes(config: Config) -> Any:
    """Returns the shapes of the frozen weights of a configuration; None without --lora."""
    if config.lora is None:
        return None
    own = None if config.out is None else config.out / FROZEN
    place = own if own is not None and saved_steps(own) else _origin(config)
    saved = saved_tree(place / str(max(saved_steps(place))) / "params")

    def shape(x) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, jnp.uint8 if x.dtype == jnp.uint8 else jnp.float32)

    return jax.tree.map(shape, saved)


def restore_weights(
    folder: pathlib.Path,
    config: Config,
    model: DecoderConfig,
    checkpoints: Checkpoints,
    step: int | None,
    weights: Weights | None,
) -> Params:
    """Returns the parameters of the run in `folder`; with --lora its adapters attached to what they adapt.

    Raises:
      ValueError: as `Checkpoints.restore_params`.
    """
    params = abstract_params(model)
    if config.lora is None:
        return checkpoints.restore_params(params, step, weights)
    rank, key = config.lora, jax.random.key(0)
    like = jax.eval_shape(lambda: lora.adapters(linear_weights(params["blocks"]), rank, key))
    return lora.attach(checkpoints.restore_params(like, step, weights), _read(folder / FROZEN, model))


def _origin(config: Config) -> pathlib.Path:
    if config.branch is not None:
        return branch_point(config.branch).folder / FROZEN
    assert config.init is not None
    return config.init / "checkpoints"


def _read(place: pathlib.Path, model: DecoderConfig) -> Params:
    with Checkpoints(place) as checkpoints:
        return checkpoints.restore_params(abstract_params(model), packed=True)
