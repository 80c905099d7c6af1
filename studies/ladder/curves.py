"""What policies cost and remedies take off along a run, and which losses of fp8 they miss, as Markdown."""

from analysis.statistics import Estimate, differences, loss_at, t_interval, tokens_to_reach
from mxjax.runtime.tables import table
from studies.ladder.cells import BASELINE
from studies.ladder.results import CellResult
from studies.ladder.studies import LADDER
from studies.ladder.tables import GROUPS, Cells, with_interval

CHANGES = {
    "none minus fp8": ("wgrad.floor", "fp8.own"),
    "H16 minus none": ("wgrad_hadamard.floor", "wgrad.floor"),
    "redrawn signs minus none": ("wgrad_rht.floor", "wgrad.floor"),
    "stochastic rounding minus none": ("wgrad_sr.floor", "wgrad.floor"),
}
SHARES = (0.8, 0.9, 0.95)
"""Shares of fp8's run whose loss the others may miss; the first is the paper's."""
_PARTS = 4


def along(cells: Cells) -> str:
    """Returns the differences of CHANGES after each quarter of a run."""
    rows = []
    for group, name in GROUPS.items():
        found = {text: change_along(cells, group, text) for text in CHANGES}
        steps = list(found["none minus fp8"])
        ends = {len(steps) * part // _PARTS for part in range(1, _PARTS + 1)} - {0}
        for tokens in [steps[end - 1] for end in sorted(ends)]:
            shown = [of.get(tokens) for of in found.values()]
            texts = ("" if e is None else with_interval(e, "+.4f") for e in shown)
            rows.append([name, f"{tokens / 1e6:.1f}", *texts, shown[0].n if shown[0] else 0])
    if not rows:
        return "Not run yet: `ladder-60m-tuned`."
    return table(f"model | million tokens | {' | '.join(CHANGES)} | seeds", rows)


def change_along(cells: Cells, group: tuple[str, str], text: str) -> dict[int, Estimate]:
    """Returns one of CHANGES by the tokens of an evaluation, paired by seed."""
    ours, base = (_losses_along(cells.get(f"{name}.{'.'.join(group)}")) for name in CHANGES[text])
    found = {n: t_interval(differences(ours[n], base[n])) for n in sorted(ours.keys() & base.keys())}
    return {n: estimate for n, estimate in found.items() if estimate.n}


def _losses_along(cell: CellResult | None) -> dict[int, dict[int, float]]:
    """Returns a cell's losses by tokens, then by seed, without runs that diverged."""
    found: dict[int, dict[int, float]] = {}
    for seed in cell.losses if cell else ():
        for tokens, loss in cell.runs[seed]["evaluations"] if cell else ():
            found.setdefault(int(tokens), {})[seed] = loss
    return found


def missed(cells: Cells) -> str:
    """Returns how many runs of each policy never reach the loss that fp8 has after each of SHARES."""
    parts = []
    for group, name in GROUPS.items():
        rows = []
        for policy in LADDER:
            for rule in ("floor", "even"):
                if (found := missed_by(cells, group, policy, rule)) is not None:
                    rows.append([f"{policy} {rule}", *(f"{n} of {of}" for n, of in found)])
        if rows:
            header = "policy, rules | " + " | ".join(f"at {share:.0%}".replace("%", " %") for share in SHARES)
            parts.append(f"{name}:\n\n{table(header, rows)}")
    return "\n\n".join(parts) or "Not run yet: `ladder-60m-tuned`."


def missed_by(cells: Cells, group: tuple[str, str], policy: str, rule: str) -> list[tuple[int, int]] | None:
    """Returns for each of SHARES the runs that miss fp8's loss and all runs; None if either has not run."""
    where = ".".join(group)
    cell, base = cells.get(f"{policy}.{rule}.{where}"), cells.get(f"{BASELINE}.own.{where}")
    if cell is None or base is None:
        return None
    seeds = sorted(cell.runs.keys() & base.losses.keys())
    found = []
    for share in SHARES:
        n = 0
        for seed in seeds:
            curve = base.runs[seed]["evaluations"]
            loss = loss_at(curve, share * curve[-1][0])
            n += seed not in cell.losses or tokens_to_reach(cell.runs[seed]["evaluations"], loss) is None
        found.append((n, len(seeds)))
    return found
