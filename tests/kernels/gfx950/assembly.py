"""Reads the assembly of a code object: instructions, their operands and modifiers, and labels."""

import dataclasses
import re
import struct

VCC, M0, EXEC = 106, 124, 126
ACCUMULATION = 256  # where the accumulation registers begin among the vector registers here
SPECIAL = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1), "exec": (EXEC, 2)}
"""The first register of each, and their number."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """Vector or scalar registers from `index` on, or a constant.

    Attributes:
        kind: "v", "s" or "constant".
        index: The first register.
        words: The number of registers.
        value: The constant's bits, as 64 of them.
        negative, absolute: What is done to it as a float.
    """

    kind: str
    index: int = 0
    words: int = 1
    value: int = 0
    negative: bool = False
    absolute: bool = False


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line; a modifier is a list of integers, a text, or True if it has only a name."""

    text: str
    opcode: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, list[int] | str | bool]
    target: str = ""

    def integer(self, name: str, default: int = 0) -> int:
        return int(str(self.modifiers.get(name, default)), 0)

    def bits(self, name: str, default: int, count: int) -> list[int]:
        found = self.modifiers.get(name, [default] * count)
        assert isinstance(found, list)
        return found + [default] * (count - len(found))


def operand(text: str) -> Operand:
    negative = bool(re.match(r"-[v|s]", text))
    text = text.removeprefix("-") if negative else text
    absolute = text.startswith("|")
    text = text.strip("|")
    float_like = {"negative": negative, "absolute": absolute}
    if text in SPECIAL:
        return Operand("s", *SPECIAL[text], **float_like)
    if register := re.fullmatch(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])", text):
        kind, one, first, last = register.groups()
        index, words = (int(one), 1) if one else (int(first), int(last) - int(first) + 1)
        base = ACCUMULATION if kind == "a" else 0
        return Operand("s" if kind == "s" else "v", base + index, words, **float_like)
    if text == "off":
        return Operand("constant", words=0)
    if re.fullmatch(r"-?\d+\.\d+", text):
        return Operand("constant", value=struct.unpack("<I", struct.pack("<f", float(text)))[0])
    return Operand("constant", value=int(text, 0) % 2**64)


def modifier(text: str) -> tuple[str, list[int] | str | bool]:
    name, _, value = text.partition(":")
    if value.startswith("["):
        return name, [int(part) for part in value[1:-1].split(",")]
    return name, value or True


def instruction(line: str) -> Instruction:
    opcode, _, rest = line.partition(" ")
    if opcode in ("s_nop", "s_endpgm", "s_barrier"):
        return Instruction(line, opcode, (), {})
    if opcode == "s_waitcnt":
        return Instruction(line, opcode, (), dict(re.findall(r"(\w+)\((\d+)\)", rest)))
    if opcode.startswith(("s_branch", "s_cbranch")):
        return Instruction(line, opcode, (), {}, target=rest.strip())
    parts = [part.strip() for part in re.split(r",\s*(?![^\[]*\])", rest)]
    last, *modifiers = parts[-1].split()
    operands = tuple(operand(part) for part in [*parts[:-1], last])
    return Instruction(line, opcode, operands, dict(map(modifier, modifiers)))


def read(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Returns the first function's instructions, and the index of the instruction after each label."""
    program, labels = [], {}
    for line in text.splitlines():
        line = re.split(r";|//", line)[0].strip()
        if line.startswith(".Lfunc_end"):
            break
        if line.endswith(":"):
            labels[line[:-1]] = len(program)
        elif line and not line.startswith("."):
            program.append(instruction(line))
    return program, labels
