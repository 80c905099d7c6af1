"""The process that runs the cases of one group, and may crash or hang: it tells its parent before each case.

    python -m mxjax.kernels.selftest.worker DESCRIPTOR < REQUEST

It reads a request as JSON, and writes one JSON message a line to the file descriptor: {"cases": [names]},
then for each {"start": name} and a result, last {"end": true}. `python -m mxjax.kernels.selftest` starts it.
"""

import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Send = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Answers the request on standard input."""
    faulthandler.enable()
    descriptor, request = int(sys.argv[1]), json.load(sys.stdin)

    def send(message: Mapping[str, Any]) -> None:
        line = (json.dumps(message) + "\n").encode()
        while line:
            line = line[os.write(descriptor, line) :]

    if request["group"] == "device":
        from mxjax.kernels.selftest.device import describe

        send({"cases": ["device"]})
        send({"start": "device"})
        send({"case": "device", **outcome_of(describe)})
    else:
        run_group(request, send)
    send({"end": True})


def run_group(request: Mapping[str, Any], send: Send) -> None:
    """Runs the request's cases, or lowers those of its share, "share" [i, n]."""
    from mxjax.kernels.selftest.cases import GROUPS, Settings, cases_of
    from mxjax.runtime.devices import INTERPRETER, Target, use_target

    target = Target(*request["target"])
    settings = Settings(target, request["quick"], request["tokens"])
    groups = GROUPS if request["group"] == "compile" else (request["group"],)
    # Twenty steps in the interpreter would take an hour: on a CPU the definitions train.
    defined = target == INTERPRETER and request["group"] == "training"
    with contextlib.nullcontext() if defined else use_target(target):
        named = [(f"{g}: {c.name}", c) for g in groups for c in cases_of(g, settings)]
        lowers = request["group"] == "compile"
        if lowers:
            index, shares = request["share"]
            named = named[index::shares]
        else:
            named = [(c.name, c) for _, c in named if c.name not in request["skip"]]
        send({"cases": [name for name, _ in named]})
        for name, case in named:
            send({"start": name})
            send({"case": name, **outcome_of(case.lower if lowers else case.run)})


def outcome_of(run: Callable[[], Any]) -> dict[str, Any]:
    """Returns how a check ended: "passed" with what it reports, or "failed" with the error."""
    start = time.perf_counter()
    try:
        reported = run() or {}
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        # Errors of the interpreter arrive as tracebacks, which say what it is at their end.
        said = lines[-1] if "Traceback" in lines[0] else lines[0]
        text = f"{type(error).__name__}: {said[:300]}"
        return {"outcome": "failed", "error": text, "details": "\n".join(lines)[:4000]}
    return {"outcome": "passed", "seconds": round(time.perf_counter() - start, 2), **reported}


if __name__ == "__main__":
    main()
