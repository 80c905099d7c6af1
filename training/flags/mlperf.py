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


@dataclasses.dataclass(frozen=True)
class PublishedCurve:
    """Validation losses by sequences trained on.

    Attributes:
      name: label in tables and plots.
      source: origin of the numbers.
      losses: nats a token, by sequences.
    """

    name: str
    source: str
    losses: Mapping[int, float]


PUBLISHED_CURVES = (
    PublishedCurve(
        "reference bf16",
        "means over runs of the bfloat16 reference at batch size 32",
        types.MappingProxyType(
            {12_288: 5.631, 24_576: 4.474, 49_152: 3.887, 98_304: 3.517, 147_456: 3.361, 172_032: 3.312}
        ),
    ),
    PublishedCurve(
        "AMD fp8",
        "mlcommons/training_results_v5.1, AMD/results/MI355X_EPYC_9575F_pytorch/llama31_8b/result_0.txt: "
        "one run at batch size 32",
        types.MappingProxyType(
            {
                12_288: 5.5950,
                24_576: 4.4731,
                36_864: 4.0500,
                49_152: 3.8535,
                61_440: 3.7231,
                73_728: 3.6275,
                86_016: 3.5559,
                98_304: 3.5011,
                110_592: 3.4505,
                122_880: 3.4064,
                135_168: 3.3749,
                147_456: 3.3414,
                159_744: 3.3184,
                172_032: 3.2907,
            }
        ),
    ),
    PublishedCurve(
        "AMD mxfp4",
        "mlcommons/training_results_v6.0, AMD/results/MI355X_EPYC_9575F_primus/llama31_8b/result_0.txt: one "
        "run at batch size 32, with warm-up over 2,048 sequences",
        types.MappingProxyType(
            {
                12_288: 5.7999,
                24_576: 4.5237,
                36_864: 4.0737,
                49_152: 3.8707,
                61_440: 3.7367,
                73_728: 3.6440,
                86_016: 3.5743,
                98_304: 3.5142,
                110_592: 3.4667,
                122_880: 3.4283,
                135_168: 3.3953,
                147_456: 3.3563,
                159_744: 3.3321,
                172_032: 3.3153,
                184_320: 3.2908,
            }
        ),
    ),
)
"""Loss curves at batch size 32, for comparison with a run."""
