"""What the text of the study says is in the tables that it stands beside or links to."""

import pytest

from benchmarks.study import report
from tests.support.study_prose import wrong_numbers

LAW, RATES = "the-cost-and-the-size-of-the-error", "learning-rate-and-number-of-seeds"
GIVEN = [  # definitions, others' reports, and at the end statistics that no table has
    "Llama 3.1 8B",
    "C4 loss of 3.3",
    "a loss of 3.3, after",
    "MLPerf Training 6.0",
    "3.9 epochs",
    "ends 0.5 nats above its lowest",
    "multiples of 0.5 up to 3.5",
    "0.65 to 1.5 times the tokens",
    "at 1.5 nearly half",
    "locks past 1.5",
    "are past 1.5",
    "beyond 1.5 times its power of two",
    "differ by less than 0.015",
    "Differences of 0.02 need",
    "and 0.01 up to 126",
    "p would be 0.07 under `floor` and 0.02 under `even`",  # by Holm's correction over two families
    "1.5 times the repeating part",
]
DIFFERENCES = {
    "0.6 nats above twice the rate": ("all-final-losses", ("3.2984", "2.6877")),
    "0.002 to 0.004 above redrawn signs'": (LAW, ("0.2939", "0.2916"), ("0.3101", "0.3063")),
    "goes from -0.005 to 0.012": (LAW, ("0.2780", "0.2826"), ("0.2853", "0.2733")),
    "of `fp8` above it is 0.015": ("what-explains-it", ("0.3063", "0.2911")),
    "0.013 to 0.024 above the FP8 run": ("outside-points", ("3.514", "3.501"), ("3.315", "3.291")),
    "falls by 0.06 at 1e-3 and by 0.11 at 2e-3": (RATES, ("2.9015", "2.8405"), ("2.7059", "2.5971")),
    "4e-3 is lower by 0.006": (RATES, ("2.5611", "2.5555")),
    "6e-3 is higher by 0.12": (RATES, ("2.6807", "2.5611")),
    "3e-3 is higher by 0.019, and 1e-3 by 0.092": (RATES, ("2.6141", "2.5947"), ("2.6864", "2.5947")),
    "2e-3 is higher by 0.039 and 4e-3 by 0.079": (RATES, ("2.5629", "2.5236"), ("2.6026", "2.5236")),
    "1e-3 is higher by 0.138 and 3e-3 by 0.118": (RATES, ("2.6748", "2.5368"), ("2.6552", "2.5368")),
}


def test_decimal_numbers_in_the_text_are_entries_of_the_tables_that_it_cites():
    assert wrong_numbers(report.PAGE.read_text(), GIVEN, DIFFERENCES) == []


PAGE = """# Title

It costs 0.061 in [one](#one-part).

## One part

{text}

<!-- one -->
| claim | nats | 95 % | p (Holm) | mean |
| --- | ---: | ---: | ---: | ---: |
| costs | +0.0614 | +0.0256 to +0.0972 | 0.12 | -0.031 ± 0.020 |
| takes off | -0.0284 | -0.0366 to -0.0203 | 0.00097 | +0.044 (-0.010 to +0.098) |
<!-- end one -->

### Two: a part

<!-- two -->
| cell | loss |
| --- | ---: |
| fp8 | 2.5163 |
| wgrad | 2.5418 |
<!-- end two -->
"""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("It costs 0.061 (0.026 to 0.097, p = 0.12).", []),
        ("It takes off 0.028 (0.020 to 0.037), as 0.031 (0.011 to 0.051); 0.028 (p = 0.001).", []),
        ("Not told (0.044, -0.010 to 0.098), nor -0.028 (-0.037 to -0.020); `0.7`, 1.2e-2.", []),
        (
            "It costs 0.061 and 0.031, takes off at most 0.037, and ends at [2.54](#two-a-part) (p = 0.12).",
            [],
        ),
        ("It costs 0.026.", ["0.026"]),
        ("It costs 0.062.", ["0.062"]),
        ("It ends at 2.542.", ["2.542"]),
        ("It costs +0.028.", ["+0.028"]),
        ("It costs 0.061 and 0.031; 0.061 and 0.044.", ["0.061 and 0.044"]),
        ("It takes off at most 0.038 (also p = 0.061).", ["p = 0.061", "at most 0.038"]),
        ("It costs 0.028 (p = 0.12).", ["0.028 (p = 0.12)"]),
        ("It costs 0.028 (0.020 to 0.036).", ["0.028 (0.020 to 0.036)"]),
        ("It costs what it does (0.026 to 0.097).", ["None (0.026 to 0.097)"]),
        ("It costs 0.028 (0.026 to 0.097).", ["0.028 (0.026 to 0.097)"]),
        ("It costs 0.028 (-0.037 to -0.020).", ["0.028 (-0.037 to -0.020)"]),
        ("It costs +0.028 (0.020 to 0.037).", ["+0.028 (0.020 to 0.037)", "+0.028"]),
        ("It costs 0.061 (0.026 to 0.097, p = 0.001).", ["0.061 (0.026 to 0.097, p = 0.001)"]),
    ],
)
def test_a_wrong_number_interval_or_sign_is_found(text, wrong):
    assert wrong_numbers(PAGE.format(text=text)) == [f"one-part: {number}" for number in wrong]


def test_phrases_with_differences_or_other_numbers_are_checked():
    page = PAGE.format(text="Version 6.0 ends 0.026 higher.")
    assert wrong_numbers(page) == ["one-part: 6.0", "one-part: 0.026"]
    assert wrong_numbers(page, ["Version 6.0"], {"0.026 higher": ("two-a-part", ("2.5418", "2.5163"))}) == []
    assert (
        "0.026 is not"
        in wrong_numbers(page, ["Version 6.0"], {"0.026 higher": ("one-part", ("0.12", "0.044"))})[0]
    )
    assert wrong_numbers(page, ["Version 6.0", "0.026", "Version 7"]) == ["no text has 'Version 7'"]
