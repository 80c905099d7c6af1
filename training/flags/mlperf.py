"""MLPerf Training's llama31_8b benchmark as data: its rules, and published runs.

Sources: mlcommons/logging 4.1.68, compliance_checker/training_6.1.0/closed_llama31_8b.yaml (rules) and
rcp_checker/training_6.1.0/rcps_llama31_8b.json (runs that submissions are checked against);
mlcommons/training, small_llm_pretraining/nemo (evaluation, schedule).
"""

import dataclasses
import statistics
import types
from collections.abc import Mapping

BENCHMARK = "llama31_8b"
VOCAB_SIZE = 128_256  # rows of the embedding; the tokenizer uses 128,000 of them and 256 special tokens
SEQ_LEN = 8192
MAX_STEPS = 1_200_000  # length of the schedule at every batch size
EVAL_EVERY = 12_288  # sequences trained on between evaluations
EVAL_SEQUENCES = 1024  # the first ones of the validation data, not shuffled
TARGET_LOSS = 3.3  # nats a token, averaged over all tokens


@dataclasses.dataclass(frozen=True)
class PublishedRuns:
    """Published runs of the reference implementation in bfloat16 at one batch size.

    Attributes:
      batch_size: sequences a step.
      lr: peak learning rate.
      warmup_sequences: length of the warm-up.
      sequences: sequences trained on until an evaluation reached the target, one a run, sorted.
    """

    batch_size: int
    lr: float
    warmup_sequences: int
    sequences: tuple[int, ...]

    @property
    def mean_sequences(self) -> float:
        """The mean of `sequences`."""
        return statistics.fmean(self.sequences)


def _runs(batch_size: int, lr: float, warmup_sequences: int, runs: Mapping[int, int]) -> PublishedRuns:
    sequences = (count for count, n in sorted(runs.items()) for _ in range(n))
    return PublishedRuns(batch_size, lr, warmup_sequences, tuple(sequences))


_PUBLISHED = (
    _runs(16, 4e-4, 256, {159_744: 17, 172_032: 3}),
    _runs(32, 8e-4, 4096, {172_032: 9, 184_320: 10, 196_608: 1}),
    _runs(64, 8e-4, 6144, {208_896: 4, 221_184: 4, 233_472: 11, 245_760: 1}),
    # 16,348 warm-up sequences, as published, are 170.3 steps.
    _runs(96, 1e-3, 16_348, {260_064: 2, 272_448: 10, 284_832: 4, 297_216: 4}),
    _runs(
        128,
        2e-3,
        32_768,
        {307_200: 2, 319_488: 2, 331_776: 4, 344_064: 4, 356_352: 3, 368_640: 3, 380_928: 1, 405_504: 1},
    ),
)
PUBLISHED_RUNS: Mapping[int, PublishedRuns] = types.MappingProxyType({r.batch_size: r for r in _PUBLISHED})
"""The runs on DGX-B200 that submissions are checked against, by batch size."""


def _curve(*losses: float) -> Mapping[int, float]:
    """Returns losses by sequences, of evaluations every EVAL_EVERY sequences."""
    return types.MappingProxyType({EVAL_EVERY * i: loss for i, loss in enumerate(losses, 1)})


PUBLISHED_CURVES: Mapping[str, Mapping[int, float]] = types.MappingProxyType(
    {
        # Means over runs of the bfloat16 reference.
        "reference bf16": types.MappingProxyType(
            {12_288: 5.631, 24_576: 4.474, 49_152: 3.887, 98_304: 3.517, 147_456: 3.361, 172_032: 3.312}
        ),
        # mlcommons/training_results_v5.1, AMD/results/MI355X_EPYC_9575F_pytorch/llama31_8b/result_0.txt
        "AMD fp8": _curve(
            *(5.5950, 4.4731, 4.0500, 3.8535, 3.7231, 3.6275, 3.5559),
            *(3.5011, 3.4505, 3.4064, 3.3749, 3.3414, 3.3184, 3.2907),
        ),
        # mlcommons/training_results_v6.0, AMD/results/MI355X_EPYC_9575F_primus/llama31_8b/result_0.txt, with
        # warm-up over 2,048 sequences
        "AMD mxfp4": _curve(
            *(5.7999, 4.5237, 4.0737, 3.8707, 3.7367, 3.6440, 3.5743, 3.5142),
            *(3.4667, 3.4283, 3.3953, 3.3563, 3.3321, 3.3153, 3.2908),
        ),
    }
)
"""Validation losses by sequences trained on, at batch size 32; AMD's are of one run each."""
