"""The studies, each a list of cells.

The learning rates of the sizes are in `studies.ladder.cells.RATES`.
"""

import fnmatch
import types
from collections.abc import Iterable, Mapping, Sequence

from mxjax.recipes import policies
from mxjax.recipes.ladder import ladder
from mxjax.recipes.whole_runs import RECIPES
from studies.ladder.cells import FRESH, LENGTHS, MULTIPLES, MUON_RATES, UNIFORM, WGRAD_ONLY, Cell
from studies.ladder.kinds import ARRANGED, BESIDE, LOCAL, WGRAD_KINDS

LADDER = (
    "fp8",
    "wgrad",
    "wgrad_hadamard",
    "wgrad_sr",
    "wgrad_rht",
    "fprop_dgrad",
    "fprop",
    "full_hadamard",
    "full_sr",
    "full_rht",
    "wgrad_hadamard32",
    "full_hadamard32",
    "amazon",
    "bf16",
)
"""The policies, the most informative first."""
RULES = ("floor", "even", "uos", "rceil", "ceil")
TELLING = (
    ("fp8", ""),
    ("wgrad", "floor"),
    ("wgrad_hadamard", "floor"),
    ("wgrad", "even"),
    ("wgrad_hadamard", "even"),
    ("wgrad_sr", "floor"),
    ("wgrad_rht", "floor"),
    ("fprop_dgrad", "floor"),
    ("full_hadamard", "floor"),
    ("full_sr", "floor"),
)
"""Policies and rules that are repeated at other sizes and lengths."""
CONSTANT = "constant-60m"
"""The study with an all but constant rate, for P1, and its protocol."""
REMEDIES = ("wgrad_hadamard", "wgrad_sr", "wgrad_rht")
HARD = ("lr2x", "lr3x", "lr4x", "batch16", "seq2048", "outliers")
"""The hard regimes, by the ends of their protocols' names."""
HARD_EVEN = ("lr2x", "lr3x", "outliers")
"""Those that also run under `even`."""
_WITHOUT_MXFP4 = ("fp8", "bf16")
_OF_EXPERTS = ("bf16", "fp8", "wgrad", "wgrad_hadamard", "full_hadamard", "nvfp4")
"""The policies of the study of experts: recipes that split operands or read tensors do not run on them."""
_NOT_TINY = ("primus_deosc",)
"""Recipes for larger models: all four blocks of `tiny` are among those in BF16."""


def _ladder(model: str, protocol: str, policies: tuple[str, ...], rules: tuple[str, ...], seeds: int):
    return [
        Cell(policy, rule, model, protocol, seeds)
        for policy in policies
        for rule in (("",) if policy in _WITHOUT_MXFP4 else rules)
    ]


def _telling(model: str, protocol: str, seeds: int) -> tuple[Cell, ...]:
    return tuple(Cell(policy, rules, model, protocol, seeds) for policy, rules in TELLING)


def _wgrad_rules() -> list[Cell]:
    """Returns cells that vary Wgrad's rule, with Fprop and Dgrad fixed in MXFP4, and in FP8."""
    cells = []
    for rule in RULES:
        rules = rule if rule == "even" else f"even-even-{rule}"  # `even` is a cell of the ladder
        for kind in WGRAD_KINDS:
            cells.append(Cell(kind, rules, "60m", "tuned-60m", 8))
            cells.append(Cell(WGRAD_ONLY + kind, rule, "60m", "tuned-60m", 8))
    return cells


def _hard_regimes() -> list[Cell]:
    policies = ("fp8", "fprop_dgrad", "wgrad", *REMEDIES)
    cells = []
    for regime in HARD:
        cells += _ladder("60m", f"tuned-60m-{regime}", policies, ("floor",), 3)
    for regime in HARD_EVEN:
        cells += _ladder("60m", f"tuned-60m-{regime}", policies[1:], ("even",), 3)
    return cells


def _grids() -> list[Cell]:
    """Returns cells of a uniform grid beside E2M1; arXiv 2606.20381 predicts that rotation helps it more."""
    rotations = ("wgrad", "full_hadamard", "full_rht")
    policies = ("fp8", *(grid + name for name in rotations for grid in ("", UNIFORM)))
    return _ladder("60m", "tuned-60m", policies, ("floor", "rceil"), 8)


FIRST, SEEDS = 16, 8
"""The seeds of the study's second part, which no claim of the first has seen."""


def _fresh(policies: Iterable[str], rule: str = "floor", suffix: str = "", seeds: int = SEEDS) -> list[Cell]:
    return [
        Cell(policy, "" if policy in _WITHOUT_MXFP4 else rule, "60m", FRESH + suffix, seeds, FIRST)
        for policy in policies
    ]


def _mechanism() -> tuple[str, ...]:
    """Returns the kinds of Wgrad by arrangement of the tokens, those of the primary test first."""
    primary = ("wgrad_hadamard", "wgrad_rht")
    names = [name + arrangement for arrangement in ("", "+anew") for name in primary]
    names += ["wgrad", "wgrad+anew"]
    names += [name + "+once" for name in (*primary, "wgrad")]
    names += ["wgrad_fixed" + arrangement for arrangement in ("", "+anew", "+once")]
    return (*names, *(name + "+means32" for name in ARRANGED))


def _generators() -> list[Cell]:
    """Returns stochastic rounding with defective generators, other eps, and gradients in bfloat16."""
    cells = _fresh(["wgrad_sr"])
    for bits in ("-frozen", "-third"):
        cells += _fresh(["wgrad_sr"], suffix=bits)
    for suffix in ("-eps2e-4", "-bf16", "-eps1e-8"):
        cells += _fresh(["wgrad", "wgrad_sr", "wgrad_hadamard"], suffix=suffix)
    return cells


def _lengths() -> list[Cell]:
    """Returns policies at each length, the telling ones first; see plans/length.md."""
    return [
        Cell(policy, "" if policy in _WITHOUT_MXFP4 else "floor", "60m", protocol, 6, FIRST + SEEDS)
        for policies in (("fp8", "wgrad", "wgrad_hadamard"), ("fprop_dgrad", "wgrad_rht", "wgrad_sr"))
        for protocol in reversed([*LENGTHS])
        for policy in policies
    ]


def _states() -> list[Cell]:
    """Returns cells whose moments, and then also parameters, are kept in bfloat16 beside float32."""
    policies = ("bf16", "wgrad_hadamard")
    return [cell for suffix in ("", "-moments", "-states") for cell in _fresh(policies, suffix=suffix)]


MUON = ("fp8", "wgrad", "wgrad_hadamard", "wgrad_rht", "wgrad_sr", "fprop_dgrad")
"""The policies under Muon."""


def _muon() -> list[Cell]:
    """Returns the policies under Muon at each of its rates; of these only the tuned one need run."""
    return [cell for rate in MUON_RATES for cell in _fresh(MUON, suffix=f"-muon-lr{rate}", seeds=4)]


def _recipes(model: str, protocol: str, seeds: int) -> tuple[Cell, ...]:
    rungs = ladder()
    published = (name for name in policies() if name not in rungs)
    names = ("fp8", "bf16", "wgrad", "wgrad_hadamard", *published, *RECIPES)
    return tuple(Cell(name, "", model, protocol, seeds) for name in names)


def _tuning(
    model: str,
    protocol: str,
    rates: tuple[str, ...],
    seeds: int,
    policies: tuple[tuple[str, str], ...] = (("fp8", ""),),
) -> tuple[Cell, ...]:
    """Returns cells of policies, each with its rules, at several learning rates."""
    return tuple(Cell(*policy, model, f"{protocol}-lr{lr}", seeds) for lr in rates for policy in policies)


_RATES = ("1e-3", "2e-3", "3e-3", "4e-3", "6e-3")

STUDIES: Mapping[str, tuple[Cell, ...]] = types.MappingProxyType(
    {
        # Learning rates. `tune-60m` is history: it showed that its warm-up is too short.
        "tune-60m": _tuning("60m", "decay", ("1e-3", "1.5e-3", "2e-3", "5e-4", "4e-3"), 3),
        "tune-60m-warmup": _tuning("60m", "decay-w150", _RATES, 3),
        "tune-60m-wgrad": _tuning(
            "60m",
            "decay-w150",
            ("4e-3", "2e-3", "3e-3", "6e-3"),
            3,
            tuple((name, "floor") for name in ("wgrad", "wgrad_hadamard", "wgrad_sr")),
        ),
        "tune-60m-constant": _tuning("60m", "constant-w150", _RATES[:4], 3),
        "tune-125m": _tuning("125m", "decay-w150", _RATES[:4], 3),
        "tune-350m": _tuning("350m", "decay-w150", ("5e-4", "1e-3", "2e-3", "3e-3"), 3),
        # A. The ladder, and fp8 at other lengths for P2. `ladder-60m` has the first tuning's rate.
        "ladder-60m": tuple(_ladder("60m", "decay", LADDER, ("floor", "even"), 8)),
        "ladder-60m-tuned": (
            *_ladder("60m", "tuned-60m", LADDER, ("floor", "even"), 8),
            *(Cell("fp8", "", "60m", f"tuned-60m-x{m:g}", 8) for m in MULTIPLES),
        ),
        # B. The rule and the remedy of Wgrad.
        "rules-60m": tuple(_wgrad_rules()),
        # C. Other sizes, more epochs, and P1.
        "scale-125m": _telling("125m", "tuned-125m", 4),
        "scale-350m": _telling("350m", "tuned-350m", 2),
        "epochs-60m": _telling("60m", "tuned-60m-4epochs", 3),
        CONSTANT: tuple(
            _ladder(
                "60m", CONSTANT, ("fp8", "bf16", "fprop", "fprop_dgrad", "wgrad", *REMEDIES), ("floor",), 4
            )
        ),
        # D. Regimes in which Wgrad may hurt or diverge.
        "hard-60m": tuple(_hard_regimes()),
        # E. A uniform grid beside E2M1, without and with rotation of all three GEMMs.
        "grid-60m": tuple(_grids()),
        # The second part, on new seeds; see plans/mechanism.md. Cells are in the order of training.
        "mechanism": tuple(_fresh([*_mechanism()[:6], "fp8", *_mechanism()[6:]])),
        "mechanism-even": tuple(_fresh(_mechanism(), "even")),
        "mechanism-others": tuple(_fresh(BESIDE)),
        "length-60m": tuple(_lengths()),
        "local-60m": tuple(_fresh(LOCAL)),
        "generators-60m": tuple(_generators()),
        "rates-60m": tuple(
            cell
            for rate in ("-lr2e-3", "-lr4e-3")
            for cell in _fresh(["wgrad", "wgrad_hadamard", "wgrad_sr"], suffix=rate, seeds=5)
        ),
        # Optimizer states in bfloat16. Muon: --cells 'fp8*' --seeds 2 tunes, then --cells '*-lr3e-3'.
        "states-60m": tuple(_states()),
        "muon-60m": tuple(_muon()),
        # Every published recipe, for docs/recipes.md; a mixture of experts; the program on a CPU.
        "recipes": _recipes("60m", "tuned-60m", 4),
        "recipes-experts": tuple(Cell(name, "", "moe-100m", "moe-100m", 4) for name in _OF_EXPERTS),
        "recipes-tiny": tuple(c for c in _recipes("tiny", "tiny", 2) if c.policy not in _NOT_TINY),
    }
)
"""The studies and their cells, in the order of training."""


def matching(cells: Sequence[Cell], pattern: str) -> list[Cell]:
    """Returns the cells whose name matches a pattern such as "wgrad.floor.*".

    Raises:
      ValueError: none does.
    """
    found = [cell for cell in cells if fnmatch.fnmatchcase(cell.name, pattern)]
    if not found:
        names = ", ".join(cell.name for cell in cells)
        raise ValueError(f"no cell is called {pattern!r}; the cells are {names}")
    return found
