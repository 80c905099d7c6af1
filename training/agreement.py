"""The agreement of a run's processes: flags, data, versions and devices are the same in all of them.

Otherwise they train on a mixture. It is checked once, before the first step.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from models.configs import to_dict
from mxjax.implementations import choose_implementation
from training.config import by_flag
from training.environment import facts
from training.policy_record import to_record
from training.processes import gather
from training.setup import Run

_SHOWN = 5  # differences in an error message


def check_agreement(run: Run) -> None:
    """Compares the runs that all processes have set up; all of them must call it.

    Raises:
      ValueError: they differ; the message names the processes, what differs, and how.
    """
    check_same(gather(lambda: description(run)))


def description(run: Run) -> dict[str, Any]:
    """Returns everything that must be the same in all processes, by names for messages."""
    flags = {name: str(value) for name, value in by_flag(run.config).items()}
    flags |= {"out": str(run.folder.resolve())}
    devices = ", ".join(sorted({device.device_kind for device in jax.local_devices()}))
    return {
        **{f"--{name.replace('_', '-')}": value for name, value in flags.items()},
        "checksum of the model's shape": _checksum(to_dict(run.model)),
        "checksum of all layers' policies": _checksum(to_record(run.phases)),
        **{f"the data's {name}": value for name, value in run.corpus.facts.items()},
        **facts(),
        "device": devices,
        "implementation": choose_implementation(run.config.precision.implementation),
    }


def _checksum(value: object) -> str:
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def check_same(descriptions: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless all descriptions equal the first."""
    first = descriptions[0]
    different = [index for index, other in enumerate(descriptions) if other != first]
    if not different:
        return
    other = descriptions[different[0]]
    found = [f"{name} is {other[name]} and not {first[name]}" for name in first if other[name] != first[name]]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    who = f"process {different[0]} differs"
    if len(different) > 1:
        who = f"processes {', '.join(map(str, different))} differ"
    raise ValueError(
        f"--distributed: {who} from process 0: {', '.join(found[:_SHOWN])}{more}; "
        "start all processes with the same flags, data, versions and kind of device"
    )
