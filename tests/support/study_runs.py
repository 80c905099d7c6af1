"""Records of runs that nobody trained, for the tests of the study's tables."""

import dataclasses

from studies.ladder.cells import PROTOCOLS


def record(cell, policy, seed, loss, protocol="tuned-60m", curve=None, **changes):
    """Returns the record of a run of `60m`; changes are of the protocol's fields."""
    p = dataclasses.replace(PROTOCOLS[protocol], **changes)
    return {
        "cell": cell,
        "policy": policy,
        "rules": "",
        "model": "60m",
        "parameters": 1000,
        "seed": seed,
        "protocol": {"name": protocol, **dataclasses.asdict(p)},
        "final_loss": loss,
        "evaluations": curve or [[p.tokens, loss]],
    }


def power_law(tokens):
    """Returns a loss that falls with the tokens, or their multiples, as in scaling laws."""
    return 2.0 + 8.0 * tokens**-0.3
