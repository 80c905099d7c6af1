"""Trains the paper's ladder: every policy and seed in turn, on the same batches, and tabulates the losses.

    python -m benchmarks.ladder --out runs/ladder --policies bf16 wgrad -- --model 60m --steps 1500

What follows `--` goes to train.py. Runs that are complete in OUT are not repeated. Prints a table (final
validation loss, and its distance to fp8 at the same seed) and JSON last.
"""

import argparse
import json
import pathlib
import statistics
from typing import Any

from train import train
from training.command_line import parse
from training.nonfinite import NonFiniteError

LADDER = (
    "bf16",
    "fp8",
    "fprop",
    "fprop_dgrad",
    "wgrad",
    "wgrad_sr",
    "wgrad_rht",
    "wgrad_hadamard",
    "full_sr",
    "full_rht",
    "full_hadamard",
)


def run(folder: pathlib.Path, policy: str, seed: int, flags: list[str]) -> dict[str, Any]:
    """Returns the outcome of one run: its evaluations by step, speed, and whether it stayed finite."""
    if not (folder / "done").exists():
        try:
            resume = ["--resume"] if (folder / "config.json").exists() else []
            run_flags = ["--policy", policy, "--seed", str(seed), "--out", str(folder), *resume]
            train(parse([*flags, *run_flags]))
        except NonFiniteError as error:
            print(error)
        (folder / "done").touch()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    speeds = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    description = json.loads((folder / "config.json").read_text())
    return {
        "policy": policy,
        "seed": seed,
        "steps": lines[-1]["step"],
        "final": evaluations[max(evaluations)] if evaluations else None,
        "evaluations": evaluations,
        "tokens_per_s": statistics.median(speeds),
        "environment": description["environment"],
        "data": description["data"],
        "config": description["config"],
    }


def table(results: list[dict[str, Any]]) -> str:
    """Returns the final losses as a Markdown table."""
    seeds = sorted({r["seed"] for r in results})
    found = {(r["policy"], r["seed"]): r for r in results}
    lines = [
        "| policy | " + " | ".join(f"seed {s}" for s in seeds) + " | mean - fp8 | tokens/s |",
        "| --- " * (len(seeds) + 3) + "|",
    ]
    for policy in dict.fromkeys(r["policy"] for r in results):
        mine = [found.get((policy, s)) for s in seeds]
        cells = [f"{r['final']:.4f}" if r and r["final"] else "-" for r in mine]
        base = [found.get(("fp8", s)) for s in seeds]
        pairs = [(r, b) for r, b in zip(mine, base, strict=True) if r and b and r["final"] and b["final"]]
        apart = f"{statistics.mean(r['final'] - b['final'] for r, b in pairs):+.4f}" if pairs else "-"
        speed = max(r["tokens_per_s"] for r in mine if r)
        lines.append(f"| {policy} | {' | '.join(cells)} | {apart} | {speed:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Runs, tabulates, prints."""
    parser = argparse.ArgumentParser(description="Train the paper's ladder of policies.")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--policies", nargs="+", default=LADDER)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("flags", nargs="*", help="for train.py, after --")
    arguments = parser.parse_args()
    results = [
        run(arguments.out / f"{policy}-{seed}", policy, seed, arguments.flags)
        for seed in arguments.seeds
        for policy in arguments.policies
    ]
    print(table(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
