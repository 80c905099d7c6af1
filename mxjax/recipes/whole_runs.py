"""Recipes of whole runs: policies by layer and step, and changes of weights, as flags of train.py.

Their names are no policies: `train.py --policy NAME` takes one alone.
"""

import shlex
import types
from collections.abc import Mapping
from typing import NamedTuple


class RunRecipe(NamedTuple):
    """The flags that the name of a recipe stands for.

    Attributes:
      policy: `--policy`: a policy, or a schedule.
      layers: exceptions by layer; those on the command line come after them.
      deoscillate: `--deoscillate`, unless it is given.
      source: where it was published.
      steps: steps of the published run that the start of `deoscillate` is of.
    """

    policy: str
    layers: tuple[str, ...] = ()
    deoscillate: str | None = None
    source: str = ""
    steps: int | None = None

    @property
    def flags(self) -> str:
        """The flags as they are written on a command line."""
        words = ["--policy", self.policy]
        words += ["--layers", *self.layers] if self.layers else []
        words += ["--deoscillate", self.deoscillate] if self.deoscillate else []
        return shlex.join(words)


RECIPES: Mapping[str, RunRecipe] = types.MappingProxyType(
    {
        # The last part in higher precision heals; the paper switches after 8.2 of 10 trillion tokens.
        "heal": RunRecipe("full_hadamard; fp8 from 0.82", source="arXiv 2509.25149"),
        # examples/mlperf/gpt_oss_20b/configs/MI355/gpt_oss_20B-MXFP4-deosc-mlperf-pretrain.yaml at fd1eeab:
        # two layers in BF16 at each end, weight_deosc_ratio 3, weight_deosc_period 200, from step 1500.
        "primus_deosc": RunRecipe(
            "primus_turbo",
            ("blocks[:2].*=bf16", "blocks[-2:].*=bf16"),
            deoscillate="3:200:1500",
            source="AMD-AGI/Primus at fd1eeab",
        ),
        # The same file after pull request 1070 of September 2026, at 08e8166: attention's projections in BF16
        # (gpt_oss_20B-MXFP4-qkvo-bf16.yaml), one layer at the start and two at the end, SR of the gradient,
        # which makes primus_turbo `lumen`, and snapshots in BF16; weight_deosc_period 100, from step 1000.
        "primus_deosc_qkvo": RunRecipe(
            "lumen",
            ("blocks[0].*=bf16", "blocks[-2:].*=bf16", "*.attention.qkv=bf16", "*.attention.out=bf16"),
            deoscillate="3:100:1000:bf16",
            source="AMD-AGI/Primus at 08e8166",
        ),
        # thu-ml/TetraJet-v2-NVFP4Training at ca5953f,
        # olmo2-training/configs/150m_100bt/TJv2-mix_fp8-osci_reset.yaml: perturb_start_iter 15000,
        # counted from 0; perturb_period 200, detect_DistRatio_iters 50, detect_DistRatio_thrd 8, without
        # its outlier_conf. 100e9 tokens are 23842 steps of 1024 x 4096.
        "tetrajet_v2_reset": RunRecipe(
            "tetrajet_v2", deoscillate="8:200:15001:50", source="arXiv 2510.27527, TetraJet-v2", steps=23842
        ),
    }
)
"""Recipes by name."""
