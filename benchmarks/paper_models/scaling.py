"""Time, memory and the best mesh for training Llama 3.1 on 8 to 8,192 MI355X, on paper.

    python -m benchmarks.paper_models.scaling [--machine mi355x] [--write docs/scaling.md] [--out FILE]
    python -m benchmarks.paper_models.scaling --check RESULTS.json [RESULTS.json …]

The first searches the meshes for each model, number of devices and policy (scaling_model.py) and prints all
tables; `--write` puts those of `DOCUMENTED` into docs/scaling.md. The second compares the same model, at an
H200's rates, with what `benchmarks.train_speed --out` measured: give it the runs on one device and on
several. JSON comes last.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.markdown import insert
from benchmarks.paper_models.scaling_machines import MACHINES, Machine
from benchmarks.paper_models.scaling_model import Plan, best_plan, describe
from models.configs import get_config
from mxjax.tables import table

MODELS = ("llama3.1-8b", "llama3.1-70b", "llama3.1-405b")
DEVICES = (8, 32, 128, 512, 2048, 8192)
POLICIES = ("bf16", "fp8", "full_hadamard")
SEQUENCES = 2048
"""Sequences of 8,192 tokens in a step: 16.8 M tokens, as at the end of Llama 3 405B (arXiv 2407.21783)."""

DOCUMENTED = ("summary",)
"""The tables that docs/scaling.md holds; the others are printed only."""


def survey(machine: Machine) -> list[dict[str, Any]]:
    """Returns the best plan of every model, number of devices and policy; "plan" is None where none fits.

    If there are more devices than sequences in a step, a second line has one sequence a device.
    """
    found = []
    for model in MODELS:
        for count in DEVICES:
            for sequences in sorted({SEQUENCES, max(SEQUENCES, count)}):
                for policy in POLICIES:
                    plan = best_plan(get_config(model), policy, machine, count, sequences)
                    line = {"model": model, "devices": count, "sequences": sequences, "policy": policy}
                    told = describe(get_config(model), policy, machine, plan) if plan else {"plan": None}
                    found.append(line | told)
    return found


def best_table(found: Iterable[dict[str, Any]]) -> str:
    """Returns a line for each plan: mesh, memory, time, and its gain over fp8 on as many devices."""
    found = list(found)
    fp8 = {_key(f): f["step_seconds"] for f in found if f["policy"] == "fp8" and f["plan"]}
    rows = []
    for f in found:
        if f["plan"] is None:
            rows.append([f["policy"], f["devices"], f["sequences"], "does not fit", *[""] * 8])
            continue
        plan = f["plan"]
        row = [f["policy"], f["devices"], f["sequences"], _mesh(plan), plan["micro"]]
        row += ["yes" if plan["remat"] else "no", f"{sum(f['memory_bytes'].values()) / 1e9:.0f}"]
        row += [f"{f['step_seconds']:.3g}", f"{f['step_seconds_no_overlap']:.3g}"]
        row += [f"{f['tokens_per_s_per_device']:,.0f}", f"{f['mfu']:.0%}"]
        gain = fp8[_key(f)] / f["step_seconds"] - 1 if _key(f) in fp8 else None
        rows.append([*row, "-" if gain is None else f"{gain:+.0%}"])
    names = "policy | GPUs | sequences | data x fsdp x tensor | at once | remat | GB"
    return table(f"{names} | step, s | without overlap | tokens/s a GPU | MFU | over fp8", rows)


def summary_table(found: Iterable[dict[str, Any]]) -> str:
    """Returns full_hadamard's plans and their gain over fp8, a line for each model and number of devices."""
    pairs: dict[tuple, dict[str, dict[str, Any]]] = {}
    for f in found:
        pairs.setdefault(_key(f), {})[f["policy"]] = f
    rows = []
    for (model, devices, sequences), plans in pairs.items():
        fp8, mxfp4 = plans["fp8"], plans["full_hadamard"]
        if sequences != SEQUENCES or devices == 32:  # 32 GPUs show nothing that 8 and 128 do not
            continue
        if fp8["plan"] is None or mxfp4["plan"] is None:
            rows.append([model, devices, "does not fit", *[""] * 4])
            continue
        row = [model, devices, _mesh(mxfp4["plan"]), f"{sum(mxfp4['memory_bytes'].values()) / 1e9:.0f}"]
        row += [f"{mxfp4['step_seconds']:.3g}", f"{mxfp4['tokens_per_s_per_device']:,.0f}"]
        rows.append([*row, f"{fp8['step_seconds'] / mxfp4['step_seconds'] - 1:+.0%}"])
    return table("model | GPUs | mesh | GB | step, s | tokens/s a GPU | over fp8", rows)


def parts_table(found: Iterable[dict[str, Any]]) -> str:
    """Returns the parts of the plans' steps in percent; overlapping parts add up to more than 100."""
    rows = []
    for f in found:
        if f["plan"]:
            shares = [f"{100 * time / f['step_seconds']:.0f}" for time in f["parts"].values()]
            rows.append([f["model"], f["policy"], f["devices"], _mesh(f["plan"]), *shares])
    names = "GEMMs | quantization | attention | head | elementwise | optimizer | fsdp | data | tensor"
    return table(f"model | policy | GPUs | mesh | {names}", rows)


def machines_table() -> str:
    """Returns the rates of the machines."""
    rows = []
    for machine in MACHINES.values():
        rates = [f"{machine.gemm[kind] / 1e12:,.0f}" for kind in ("bf16", "fp8", "mxfp4")]
        rates += [f"{machine.attention / 1e12:,.0f}", f"{machine.memory / 1e12:.1f}"]
        rates += [f"{machine.capacity / 1e9:.0f}", f"{machine.fast / 1e9:.0f}", f"{machine.slow / 1e9:.0f}"]
        rows.append([machine.name, *rates])
    gemms = "BF16 GEMM, TFLOP/s | FP8 | MXFP4 | attention"
    return table(f"GPU | {gemms} | memory, TB/s | GB | in a node, GB/s | between nodes, GB/s", rows)


def tables(found: list[dict[str, Any]]) -> dict[str, str]:
    """Returns all tables by name, which is also that of their markers in the document."""
    named = {"machines": machines_table(), "summary": summary_table(found)}
    for model in MODELS:
        named[model] = best_table(f for f in found if f["model"] == model)
    shown = [f for f in found if f["devices"] in (8, 512, 2048) and f["policy"] != "bf16"]
    return named | {"parts": parts_table(shown)}


def _key(f: dict[str, Any]) -> tuple:
    return f["model"], f["devices"], f["sequences"]


def _mesh(plan: dict[str, Any]) -> str:
    return f"{plan['data']} x {plan['fsdp']} x {plan['tensor']}"


def plan_of(job: dict[str, Any]) -> Plan:
    """Returns the plan of a measured job; without a mesh, fsdp over all its devices.

    Only `--remat full` counts as recomputing: the model has no other recomputation.
    """
    sizes = {"data": 1, "fsdp": 1, "tensor": 1}
    for part in (job["mesh"] or f"fsdp={job['devices']}").split(","):
        name, size = part.split("=")
        sizes[name.strip()] = int(size)
    micro = job["batch"] // (sizes["data"] * sizes["fsdp"])
    return Plan(**sizes, sequences=job["batch"], micro=micro, seq=job["seq"], remat=job["remat"] == "full")


def compare(results: Iterable[dict[str, Any]], machine: Machine) -> list[dict[str, Any]]:
    """Returns measured and computed step times of each of our measured policies.

    "scaling" is tokens/s a device relative to the same policy on the fewest devices.
    """
    times: dict[str, list[float]] = {}
    jobs: dict[str, dict[str, Any]] = {}
    for run in (run for result in results for run in result["runs"]):
        if "times" in run and "absent" not in run and run["job"]["program"] == "benchmarks.train_ours":
            key = json.dumps(run["job"] | {"trace": None}, sort_keys=True)
            times.setdefault(key, []).extend(run["times"])
            jobs[key] = run["job"]
    found = []
    for key, job in jobs.items():
        told = describe(get_config(job["model"]), job["subject"], machine, plan_of(job))
        names = ("model", "devices", "mesh", "batch", "seq", "remat")
        measured = statistics.median(times[key])
        found.append(
            {
                "policy": job["subject"],
                **{name: job[name] for name in names},
                "measured": measured,
                "computed": told["step_seconds"],
                "no_overlap": told["step_seconds_no_overlap"],
                "measured_over_computed": measured / told["step_seconds"],
            }
        )
    for f in found:
        alike = [g for g in found if (g["policy"], g["model"]) == (f["policy"], f["model"])]
        first = min(alike, key=lambda g: g["devices"])
        for name in ("measured", "computed"):
            f[f"scaling_{name}"] = _rate(f, name) / _rate(first, name)
    return found


def _rate(f: dict[str, Any], name: str) -> float:
    return f["batch"] * f["seq"] / f[name] / f["devices"]


def compare_table(found: Iterable[dict[str, Any]]) -> str:
    """Returns the comparison as a table."""
    rows = []
    for f in found:
        row = [f["policy"], f["model"], f["devices"], f["mesh"] or "-", f["batch"], f["remat"]]
        row += [f"{f[name] * 1e3:,.0f}" for name in ("measured", "computed", "no_overlap")]
        row += [f"{f['measured_over_computed']:.2f}"]
        rows.append([*row, f"{f['scaling_measured']:.2f}", f"{f['scaling_computed']:.2f}"])
    names = "policy | model | GPUs | mesh | batch | remat | measured, ms | computed | without overlap"
    return table(f"{names} | measured / computed | scaling, measured | computed", rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the survey or the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper_models.scaling", description=__doc__)
    parser.add_argument("--machine", choices=sorted(MACHINES), help="default: mi355x; to check: h200")
    parser.add_argument("--write", type=pathlib.Path, help="document to put the tables into")
    parser.add_argument("--check", type=pathlib.Path, nargs="+", help="results of train_speed")
    parser.add_argument("--out", type=pathlib.Path, help="file for the numbers as JSON")
    options = parser.parse_args(arguments)
    if options.check:
        results = [json.loads(path.read_text()) for path in options.check]
        numbers = compare(results, MACHINES[options.machine or "h200"])
        if not numbers:
            parser.error(f"{', '.join(map(str, options.check))}: no run of ours with times in there")
        print(compare_table(numbers))
    else:
        numbers = survey(MACHINES[options.machine or "mi355x"])
        named = tables(numbers)
        if options.write:
            shown = {name: named[name] for name in DOCUMENTED}
            options.write.write_text(insert(options.write.read_text(), shown))
        for name, content in named.items():
            print(f"{name}\n\n{content}\n")
    if options.out:
        options.out.write_text(json.dumps(numbers, indent=1) + "\n")
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
