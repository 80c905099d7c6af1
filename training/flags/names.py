"""Flags of other programs, and misspelled ones, with the flags of ours that do the same.

The names are those of Megatron-LM, torchtitan, MaxText, transformers' Trainer and nanoGPT. A name matches
with dashes or underscores, and torchtitan's also without its section: --optimizer.lr is --lr.
"""

import difflib
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping

_NEAREST, _NEARER = 0.65, 0.85  # the similarity of a misspelled flag of ours, of another program's

_SYNONYMS = {
    "--optimizer": "optim opt-type",
    "--schedule": "lr-scheduler lr-scheduler-type lr-decay-style",
    "--decay": "lr-decay-steps lr-wsd-decay-iters cooldown-steps",
    "--document-mask": "reset-attention-mask packing",
    "--lr": "learning-rate max-lr peak-lr",
    "--min-lr-ratio": "min-lr learning-rate-final-fraction",
    "--warmup-steps": "lr-warmup-iters lr-warmup-fraction warmup-iters warmup-ratio warmup-steps-fraction",
    "--weight-decay": "adam-weight-decay",
    "--b1": "adam-beta1 adam-b1 beta1",
    "--b2": "adam-beta2 adam-b2 beta2",
    "--eps": "adam-eps adam-epsilon",
    "--clip": "clip-grad grad-clip max-grad-norm max-norm gradient-clip-val gradient-clipping-threshold",
    "--steps": "train-iters max-iters max-steps train-steps lr-decay-iters train-samples epochs num-epochs "
    "num-train-epochs",
    "--batch-size": "batch global-batch-size micro-batch-size local-batch-size per-device-batch-size "
    "per-device-train-batch-size",
    "--accumulate": "gradient-accumulation gradient-accumulation-steps grad-accum grad-accum-steps",
    "--seq-len": "seq seq-length sequence-length max-seq-len max-length max-target-length block-size "
    "context-length",
    "--policy bf16": "bf16 bfloat16",
    "--policy fp8": "fp8 fp8-format fp8-recipe",
    "--policy wgrad_hadamard": "fp4 mxfp4 fp4-format fp4-recipe",
    "--policy": "precision quantization dtype recipe",
    "--data": "data-path train-data-path dataset dataset-path dataset-name train-file train-data",
    "--input": "data data-path dataset dataset-path dataset-name",
    "--eval-data": "valid-data-path val-data validation-data validation-file eval-file eval-dataset",
    "--field": "json-key json-keys text-column text-key",
    "--tokenizer": "tokenizer-model tokenizer-path tokenizer-file tokenizer-name-or-path vocab-file",
    "--append-eod": "append-eos add-eos",
    "--workers": "num-workers num-proc preprocessing-num-workers",
    "--quantize mxfp4": "format export-format outtype quantization",
    "--model": "model-name flavor",
    "--model-config": "config-name num-layers n-layer n-layers hidden-size n-embd d-model "
    "num-attention-heads n-head n-heads ffn-hidden-size",
    "--init": "model-name-or-path load-parameters-path finetune pretrained-checkpoint",
    "--out": "output output-dir base-output-directory dump-folder save save-dir run-name run-dir log-dir",
    "--output": "out output-prefix",
    "--resume --out RUN": "load resume-from resume-from-checkpoint init-from",
    "--checkpoint-every": "save-interval save-steps save-every checkpoint-period checkpoint-interval "
    "checkpoint.interval",
    "--keep-checkpoints": "save-total-limit keep-latest-k",
    "--eval-every": "eval-interval eval-steps eval-freq validation.freq",
    "--eval-batches": "eval-iters validation.steps",
    "--log-every": "log-interval logging-steps log-freq log-period",
    "--mesh fsdp=N": "fsdp fsdp-size data-parallel-shard-degree ici-fsdp-parallelism",
    "--mesh data=N": "data-parallel-size data-parallel-replicate-degree ici-data-parallelism",
    "--mesh context=N": "cp context-parallel context-parallel-size context-parallel-degree "
    "ici-context-parallelism",
    "--mesh expert=N": "ep expert-parallel-size expert-model-parallel-size expert-parallel-degree "
    "ici-expert-parallelism",
    "--mesh tensor=N": "tp tensor-parallel-size tensor-model-parallel-size tensor-parallel-degree "
    "ici-tensor-parallelism",
    "--remat full": "gradient-checkpointing recompute-activations activation-checkpointing",
    "--remat": "remat-policy recompute-granularity activation-checkpoint activation-checkpoint.mode",
    "--tensorboard": "tensorboard-dir enable-tensorboard",
    "--wandb": "wandb-project report-to enable-wandb",
    "--profile FIRST:LAST": "profile-step-start profiling enable-profiling",
}


def _by_name() -> Mapping[str, tuple[str, ...]]:
    """Returns our flags for each name of another program's flag, in the order of `_SYNONYMS`."""
    found: dict[str, tuple[str, ...]] = {}
    for ours, names in _SYNONYMS.items():
        for name in names.split():
            found[name] = (*found.get(name, ()), ours)
    return types.MappingProxyType(found)


SYNONYMS = _by_name()


def suggestion(words: Iterable[str], refused: Collection[str], flags: Collection[str]) -> str:
    """Returns the flags that the words of a command line may mean, as "; did you mean --lr?", or nothing.

    Args:
      refused: words that the program named as wrong; a value such as steps=10 counts as a flag only here.
    """
    meant = dict[str, str]()
    for name in _unknown(words, refused, flags):
        if (ours := _meant(name.lstrip("-").replace("_", "-").lower(), flags)) is not None:
            meant[name] = ours
    if len(meant) == 1:
        return f"; did you mean {next(iter(meant.values()))}?"
    pairs = ", ".join(f"{ours} for {name}" for name, ours in meant.items())
    return f"; did you mean {pairs}?" if pairs else ""


def _unknown(words: Iterable[str], refused: Collection[str], flags: Collection[str]) -> Iterator[str]:
    """Yields the names of the flags that the program does not have, or does not take in this way."""
    for word in words:
        name, equals, _ = word.partition("=")
        is_flag = re.fullmatch(r"--?[A-Za-z][\w.-]*", name) is not None
        if (is_flag and name.replace("_", "-") not in flags) or (word in refused and (is_flag or equals)):
            yield name


def _meant(name: str, flags: Collection[str]) -> str | None:
    """Returns the flag of ours that a name means, with its value if that is known; None if there is none."""
    last = name.rpartition(".")[2]
    for ours in (f"--{last}", *SYNONYMS.get(name, ()), *SYNONYMS.get(last, ())):
        if ours.partition(" ")[0] in flags:
            return ours
    near = difflib.get_close_matches(last, [flag.lstrip("-") for flag in flags], n=1, cutoff=_NEAREST)
    if near:
        return f"--{near[0]}"
    long = [name for name in SYNONYMS if len(name) > 4]
    theirs = difflib.get_close_matches(last, long, n=1, cutoff=_NEARER)
    fitting = (ours for name in theirs for ours in SYNONYMS[name] if ours.partition(" ")[0] in flags)
    return next(fitting, None)
