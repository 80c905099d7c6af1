"""Expansion of the recipes of whole runs, whose names stand for flags."""

import dataclasses

from mxjax.recipes.whole_runs import RECIPES
from training.config import Config


def expand(config: Config) -> Config:
    """Returns the configuration with the flags of a recipe in place of its name."""
    precision = config.precision
    recipe = RECIPES.get(precision.policy.strip()) if isinstance(precision.policy, str) else None
    if recipe is None:
        return config
    begun = precision.layers[: len(recipe.layers)] == recipe.layers  # of a run to resume
    changed = dataclasses.replace(
        precision,
        policy=recipe.policy,
        layers=precision.layers if begun else (*recipe.layers, *precision.layers),
        deoscillate=precision.deoscillate or recipe.deoscillate,
    )
    return dataclasses.replace(config, precision=changed)
