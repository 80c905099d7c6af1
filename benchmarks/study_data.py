"""From a folder in C4's layout to a training run: trains a tokenizer, packs both splits, trains a model.

    python -m benchmarks.study_data CORPUS --out data/study -- --model 20m --steps 2000
    python -m benchmarks.study_data CORPUS --out data/study --vocab-size 16384 --no-train

CORPUS holds `c4-train.*.json.gz` and `c4-validation.*.json.gz`. Flags after `--` go to train.py. Another call
continues: OUT/train and OUT/validation are made once, and with the same flags the run resumes. The second
command makes the data of `benchmarks.study` and trains nothing.
"""

import argparse
import json
import pathlib
import sys

from train import train
from training.command_line import parse
from training.process.environment import input_errors
from training.tokenize.plan import TokenizeConfig
from training.tokenize.tokenize import advice, summary, tokenize


def pack(corpus: pathlib.Path, out: pathlib.Path, vocab_size: int) -> list[str]:
    """Tokenizes both splits unless they exist; returns train.py's flags for them."""
    train_prefix, validation_prefix = str(out / "train"), str(out / "validation")
    tokenizer = pathlib.Path(train_prefix + ".tokenizer.json")
    texts, held_out = ((str(corpus / f"c4-{split}.*.json.gz"),) for split in ("train", "validation"))
    for config in (
        TokenizeConfig(texts, train_prefix, append_eod=True, train_tokenizer=True, vocab_size=vocab_size),
        TokenizeConfig(held_out, validation_prefix, append_eod=True, tokenizer=tokenizer),
    ):
        print(summary(config.output, tokenize(config)))
    return ["--data", train_prefix, "--eval-data", validation_prefix]


def main(argv: list[str] | None = None) -> dict[str, float] | None:
    """Tokenizes, trains, and returns the last evaluation, which it also prints as JSON.

    Returns None with --no-train.
    """
    parser = argparse.ArgumentParser(
        description="From a corpus in C4's layout to a training run.",
        epilog="Flags after -- go to train.py.",
    )
    parser.add_argument("corpus", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("data/study"))
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--no-train", action="store_true", help="only tokenize")
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    flags = argv[cut + 1 :]
    arguments = parser.parse_args(argv[:cut])
    with input_errors():
        flags = [*pack(arguments.corpus, arguments.out, arguments.vocab_size), *flags]
    if arguments.no_train:
        print(advice(flags[1], flags[3]))
        return None
    run = arguments.out / "run"
    if "--out" not in flags:
        flags += ["--out", str(run), *(["--resume"] if (run / "config.json").exists() else [])]
    evaluation = train(parse(flags))
    print(json.dumps(evaluation))
    return evaluation


if __name__ == "__main__":
    main()
