"""The command lines of programs, and of train.py: flags replace the defaults, a preset, or a resumed run's.

Flags are tyro's, and so is `--help`; its errors of many lines become one.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import math
import re
import shlex
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import tyro

from mxjax.policy import Policy
from training.config import Config, DataConfig, MLPerfConfig, OptimizerConfig, by_flag
from training.files import absolute_path
from training.flags import mlperf
from training.flags.names import suggestion
from training.flags.ranges import COUNT
from training.process.start import output_errors, program_name

_BORDER = re.compile(r"^[ │] ?| *│?$")
_INDENT = "    "
_CHANGE = re.compile(r"[\w*]+\.[\w.*]+=")  # of a field of a policy
_ONCE = {"data", "eval_data", "calibrate", "mesh"}  # texts that a user may take for lists
_UNKNOWN = "Unrecognized options: "
_STRAY = re.compile(f"{_UNKNOWN}([^-\\s]\\S*)")
_SUGGESTION = "; did you mean "
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class FlagError(SystemExit):
    """Wrong flags: ends the program with status 2. The message has been printed; `message` repeats it."""

    def __init__(self, message: str):
        super().__init__(2)
        self.message = message


def flags_of[T](
    config: type[T], argv: Sequence[str] | None = None, program: str | None = None, **options: Any
) -> T:
    """Parses the flags that a dataclass's fields are; see `flags`.

    Args:
      options: further arguments of `tyro.cli`.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    check_lists(config, words, program)
    if not {"-h", "--help"}.isdisjoint(words):
        _join_help(config)
    return flags(lambda words: tyro.cli(config, args=words, **options), words, program)


def flags[T](
    parse: Callable[[list[str]], T], argv: Sequence[str] | None = None, program: str | None = None
) -> T:
    """Parses flags by tyro, and ends the program with one line if they are wrong.

    Args:
      parse: calls tyro with these arguments; its result is returned.
      argv: the arguments. Default: the running program's.
      program: the command that takes `--help`. Default: the running program.
    Raises:
      FlagError: tyro refuses the command line; one line on standard error says why.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    errors = io.StringIO()
    try:
        with output_errors(), contextlib.redirect_stderr(errors):
            return parse(words)
    except SystemExit as error:
        if error.code != 2:
            raise
    except ValueError as error:  # of a dataclass in another; tyro takes those of the outermost one alone
        raise refusal(str(error), program or program_name()) from None
    message = in_one_line(errors.getvalue())
    if message.startswith((_UNKNOWN, "Missing from")):
        message = message.partition(_SUGGESTION)[0]  # tyro compares values too, as of --polcy=bf16
        refused = message.removeprefix(_UNKNOWN).split(", ")
        message += suggestion(words, refused, _all_flags(parse, words))
    if found := _STRAY.fullmatch(message):
        message += _without_value(words, found[1])
    raise refusal(message, program or program_name())


def command_and_flags[T](
    commands: Mapping[str, Callable[..., T]], program: str, description: str | None
) -> Callable[[], T]:
    """Parses the name of a command and its flags, which are the arguments of a function; see `flags`.

    Returns:
      A call of the named function with these flags.
    """
    if (command := commands.get("".join(sys.argv[1:2]))) is not None:
        check_lists(command, sys.argv, program)
    later = {name: _later(command) for name, command in commands.items()}
    parse = tyro.extras.subcommand_cli_from_dict
    return flags(
        lambda words: parse(later, args=words, prog=program, description=description), program=program
    )


def _later[**P, T](command: Callable[P, T]) -> Callable[P, Callable[[], T]]:
    """Returns a function with the command's signature that returns a call of it."""

    @functools.wraps(command)
    def bind(*args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
        return functools.partial(command, *args, **kwargs)

    return bind


def _join_help(config: type[Any]) -> None:
    """Joins the lines of the text below each field of a dataclass, and of dataclasses in it, for `--help`.

    tyro breaks lines where the source does, unless the text is in the field's metadata.
    """
    for cls in config.__mro__[-2::-1]:
        for name, text in _texts(cls).items():
            field = cls.__dict__["__dataclass_fields__"][name]
            field.metadata = types.MappingProxyType({**field.metadata, "help": text})
    for field in dataclasses.fields(config):
        nested = getattr(field.type, "__origin__", field.type)  # of Annotated
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            _join_help(nested)


def _texts(cls: type[Any]) -> dict[str, str]:
    """Returns the text below each field of a class, in one line."""
    module = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    found: dict[str, str] = {}
    for field, below in itertools.pairwise(cast(ast.ClassDef, module.body[0]).body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _all_flags(parse: Callable[[list[str]], object], words: list[str]) -> set[str]:
    """Returns the flags in the help of the command that the words before the first flag name."""
    command = itertools.takewhile(lambda word: not word.startswith("-"), words)
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        parse([*command, "--help"])
    lines = (_BORDER.sub("", line).strip() for line in _COLOR.sub("", text.getvalue()).splitlines())
    return {
        flag for line in lines if line.startswith("-") for flag in re.findall(r"(?:^|, )(--[\w-]+)", line)
    }


def _without_value(words: Sequence[str], stray: str) -> str:
    """Returns that a flag takes no value if the stray word was given to it, as in --tensorboard=true."""
    for word, following in itertools.pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and (value if equals else following) == stray:
            others = ": --resume --out RUN continues a run, --branch RUN --out NEW one in a new folder"
            return f"; {flag} takes no value{others if flag == '--resume' else ''}"
    return ""


def check_lists(config: Callable[..., Any], argv: Sequence[str], program: str | None = None) -> None:
    """Refuses lists and names of data that are given twice, of which tyro takes the last.

    And --set with two changes, of which it takes the second for an argument of its own.

    Args:
      config: the dataclass whose fields the flags are, or the function whose arguments they are.
      argv, program: see `flags`.
    """
    flags = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    for flag, is_list in _given_once(config):
        if (times := flags.count(flag)) > 1:
            advice = f"write all its values after one {flag}" if is_list else "it takes one value"
            raise refusal(f"{flag} is given {times} times; {advice}", program)
    for before, _, word in zip(argv, argv[1:], argv[2:], strict=False):
        if before == "--set" and _CHANGE.match(word):  # eval.py's RUN may be called lr=3e-4
            raise refusal(f"--set takes one change; write --set before {word!r} too", program)


def _given_once(config: Callable[..., Any]) -> Iterator[tuple[str, bool]]:
    """Yields the flags that are given once, also of dataclasses in `config`, and whether each is a list."""
    for name, hint in typing.get_type_hints(config, include_extras=True).items():
        if name == "return":
            continue
        extras = getattr(hint, "__metadata__", ())
        plain: Any = hint.__origin__ if extras else hint
        is_list = typing.get_origin(plain) is tuple
        if dataclasses.is_dataclass(plain):
            yield from _given_once(cast(type[Any], plain))
        elif (is_list and tyro.conf.UseAppendAction not in extras) or name in _ONCE:
            yield f"--{name.replace('_', '-')}", is_list


def refusal(message: str, program: str | None = None) -> FlagError:
    """Prints one line that says what is wrong with the flags; returns the error to raise."""
    message = f"{message}; see {program or program_name()} --help"
    print(f"{program_name()}: error: {message}", file=sys.stderr)
    return FlagError(message)


def in_one_line(box: str) -> str:
    """Returns the message of an error that tyro drew, and the flags or commands that it suggests.

    The first line of a box is its title; lines of dashes separate its parts. Names of flags are indented, and
    their help twice.
    """
    lines = [_BORDER.sub("", line) for line in _COLOR.sub("", box).strip().splitlines()[1:]]
    parts = itertools.groupby(lines, lambda line: bool(line.strip(" ─-╰╯")))
    first, *others = (list(part) for has_text, part in parts if has_text)
    said = " ".join(line.strip() for line in first if not line.startswith(2 * _INDENT))
    message = re.sub("^Error parsing [A-Z]\\w*: ", "", said).rstrip(".")  # a class
    similar = [
        flag
        for title, *rest in others
        for line in rest
        for flag in re.findall(r"--[\w-]+", line)
        if title.startswith(("Perhaps you meant", "Arguments similar")) and line.startswith(f"{_INDENT}--")
    ]
    if similar:
        message += f"{_SUGGESTION}{' or '.join(dict.fromkeys(similar))}?"
    commands = [" ".join(part).strip() for part in others if part[0].startswith("Available subcommands")]
    return "; ".join([message, *commands])


def mlperf_llama31_8b(batch_size: int = 32) -> Config:
    """Returns MLPerf Training's llama31_8b at a batch size; only --data is missing.

    Learning rate and warm-up come from the published runs at that batch size, or else at 32. A run ends at
    the target, long before the last step of its schedule.
    """
    published = mlperf.PUBLISHED_RUNS.get(batch_size, mlperf.PUBLISHED_RUNS[32])
    eval_every = math.ceil(mlperf.EVAL_EVERY / batch_size)
    return Config(
        preset="mlperf-llama3.1-8b",
        model="llama3.1-8b",
        data=DataConfig(
            vocab_size=mlperf.VOCAB_SIZE,
            batch_size=batch_size,
            seq_len=mlperf.SEQ_LEN,
            document_mask="off",  # as the reference's reset_attention_mask
        ),
        optimizer=OptimizerConfig(
            lr=published.lr, warmup_steps=round(published.warmup_sequences / batch_size)
        ),
        mlperf=MLPerfConfig(mllog=True),
        remat="full",
        steps=mlperf.MAX_STEPS,
        checkpoint_every=eval_every,
        eval_every=eval_every,
        eval_sequences=mlperf.EVAL_SEQUENCES,
        target_loss=mlperf.TARGET_LOSS,
    )


PRESETS: Mapping[str, Callable[[int], Config]] = types.MappingProxyType(
    {"mlperf-llama3.1-8b": mlperf_llama31_8b}
)
"""Presets by name, as functions of the batch size."""


def parse(argv: list[str] | None = None) -> Config:
    """Returns the configuration on the command line; exits with help or an error, as tyro does.

    A preset is built for the batch size first, or the run to resume or to branch is read. Every other flag
    then replaces one of its values.
    """
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--preset")
    first.add_argument("--batch-size", "--batch_size", type=int, default=32)
    first.add_argument("--resume", action="store_true")
    first.add_argument("--out", type=absolute_path)
    first.add_argument("--branch", type=absolute_path)
    first.add_argument("--decay", type=int)
    first.add_argument("--steps", type=int)
    default = Config()
    with contextlib.suppress(argparse.ArgumentError):  # tyro reports errors better
        known, _ = first.parse_known_args(argv)
        steps, decay = (n if n and COUNT.contains(n) else None for n in (known.steps, known.decay))
        if known.preset in PRESETS and known.batch_size > 0:
            default = PRESETS[known.preset](known.batch_size)
        if known.resume and known.out:
            from training.run.resume import extension_defaults  # here, because it imports much

            default = extension_defaults(known.out, steps) or default
        elif known.branch and not known.resume:
            from training.run.resume import branch_defaults

            default = branch_defaults(known.branch, decay, steps)
    if any(word.partition("=")[0] == "--set" for word in argv):  # or tyro appends to the run's
        default = dataclasses.replace(default, precision=dataclasses.replace(default.precision, set=()))
    return flags_of(Config, argv, default=default, description="Train a language model in MXFP4.")


def check_flags() -> None:
    """Ends the program if its flags are wrong, unless they replace those of a run to resume or to branch.

    With --distributed the other processes must be told, which takes the modules that are not imported yet.
    """
    if not {"--resume", "--distributed", "--branch"} & {word.partition("=")[0] for word in sys.argv}:
        parse()


_ALWAYS = {"policy", "steps", "seed"}  # said even where they are defaults
_OF_AN_INVOCATION = {"out", "resume", "stop_after", "preset"}


def command_of(config: Config, out: str) -> str:
    """Returns the command line that begins a run anew in `out`, with every flag that is no default.

    A policy that a program gave, which has no name, becomes POLICY.json; its fields are in config.json.
    """
    preset = config.preset
    default = Config() if preset is None else PRESETS[preset](config.data.batch_size)
    words = [] if preset is None else ["--preset", preset]
    if preset is not None and config.data.batch_size != PRESETS[preset](32).data.batch_size:
        words += ["--batch-size", str(config.data.batch_size)]
    ours, theirs = by_flag(config), by_flag(default)
    for name, value in ours.items():
        chosen = name in _ALWAYS or value != theirs[name] or (name == "lr" and config.init is not None)
        if name not in _OF_AN_INVOCATION and chosen:  # imported weights need a rate that was chosen
            words += _words(name, value)
    return shlex.join(["python", "train.py", *words, "--out", out])


def _words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, Policy):
        return [flag, "POLICY.json"]
    if isinstance(value, tuple):
        if name == "set":  # given once for each value
            return [word for part in value for word in (flag, part)]
        return [flag, *map(str, value)]
    return [flag, "None" if value is None else str(value)]


def settings_of(config: Config) -> dict[str, str]:
    """Returns the flags of a run as texts, but those that say where it is."""
    flags = {name: value for name, value in by_flag(config).items() if name not in _OF_AN_INVOCATION}
    return {name: " ".join(map(str, v)) if isinstance(v, tuple) else str(v) for name, v in flags.items()}
