"""Runs work-groups of a gfx950 code object, instruction by instruction, on memory whose bounds are checked.

Every wave runs to its next barrier in turn. Wait states do nothing, as each instruction that computes is done
before the next begins. An instruction that none of this project's kernels has is not known and stops the run,
and so does a race in LDS.

Sources: AMD Instinct CDNA4 Instruction Set Architecture; LLVM's User Guide for the AMDGPU Backend.
"""

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from gfx950 import assembly, scalar, transfers, vector
from gfx950.assembly import VCC, Instruction
from gfx950.memory import Memory
from gfx950.races import Accesses
from gfx950.wave import LANES, Wave


def steps(w: Wave, program: list[Instruction], labels: dict[str, int]) -> Iterator[None]:
    """Runs a wave, pausing at barriers."""
    while True:
        i = program[w.place]
        w.place += 1
        if i.opcode == "s_endpgm":
            w.wait("vmcnt", 0)
            return
        if i.opcode == "s_barrier":
            w.interval += 1
            yield
        elif i.target:
            taken = {
                "s_branch": lambda: True,
                "s_cbranch_scc0": lambda: not w.scc,
                "s_cbranch_scc1": lambda: w.scc,
                "s_cbranch_vccz": lambda: w.s[VCC] | w.s[VCC + 1] == 0,
                "s_cbranch_vccnz": lambda: w.s[VCC] | w.s[VCC + 1] != 0,
                "s_cbranch_execz": lambda: not w.lanes.any(),
            }[i.opcode]()
            w.place = labels[i.target] if taken else w.place
        elif i.opcode.startswith("s_"):
            if i.opcode != "s_nop":
                scalar.run(w, i)
        elif i.opcode.startswith("v_"):
            vector.run(w, i)
        else:
            transfers.run(w, i)


def begin(w: Wave, descriptor: dict, group, kernarg: int, preloaded: bool) -> None:
    """Fills the initial scalar registers of a wave, in LLVM's order."""
    place = 0
    for name in ("dispatch_ptr", "queue_ptr", "kernarg_segment_ptr", "dispatch_id"):
        if descriptor[f"user_sgpr_{name}"]:
            if name == "kernarg_segment_ptr":
                w.write_scalar(place, kernarg, 2)
            place += 2
    assert not descriptor["user_sgpr_private_segment_size"]
    count = descriptor["user_sgpr_kernarg_preload_length"]
    assert place + count == descriptor["user_sgpr_count"]
    if preloaded:
        data = w.memory.at(kernarg, 4 * count).tobytes()
        w.write_scalar(place, int.from_bytes(data, "little"), count)
    place += count
    for axis, index in zip("xyz", group, strict=True):
        if descriptor[f"system_sgpr_workgroup_id_{axis}"]:
            w.s[place] = index
            place += 1


def shuffled(waves: list, order: np.random.Generator | None) -> list:
    return waves if order is None else [waves[i] for i in order.permutation(len(waves))]


def run(
    record: dict,
    text: str,
    memory: Memory,
    kernarg: int,
    preloaded: bool = False,
    late: Collection[str] = (),
    seed: int | None = None,
    groups: Iterable[tuple[int, int, int]] | None = None,
) -> None:
    """Runs work-groups of a record of `mxjax.kernels.cases`.

    Args:
        record: The JSON beside the code object.
        text: Its assembly.
        memory: Where the arrays and the segment of arguments are.
        kernarg: The segment's address.
        preloaded: Whether waves begin with arguments in registers, or with the code that loads them.
        late: The counters, "vmcnt" and "lgkmcnt", whose transfers are done when they are waited for; the
            others are done at once.
        seed: Draws the order in which waves run from one barrier to the next; None is the waves' own order.
        groups: Which work-groups, as z, y, x; all of the grid if None.
    """
    program, labels = assembly.read(text)
    waves = int(np.prod(record["block"])) // LANES
    with np.errstate(all="ignore"):
        for group in np.ndindex(*record["grid"][::-1]) if groups is None else groups:
            lds = Memory(0, record["shared_bytes"], allocated=True)
            accesses = Accesses(waves, record["shared_bytes"])
            states = [Wave(number, memory, lds, accesses, late) for number in range(waves)]
            for number, w in enumerate(states):
                w.v[0] = number * LANES + vector.LANE
                begin(w, record["descriptor"], group[::-1], kernarg, preloaded)
                w.place = labels[".LBB0_0"] if preloaded else 0
            together = [steps(w, program, labels) for w in states]
            order = None if seed is None else np.random.default_rng(seed)
            while together:
                paused = [next(wave, "ended") for wave in shuffled(together, order)]
                assert len(set(paused)) == 1, "some waves end where others wait at a barrier"
                together = [] if paused[0] == "ended" else together
