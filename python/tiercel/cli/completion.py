# SPDX-License-Identifier: Apache-2.0
"""``tiercel completion``: what the shell completes, from the commands' own arguments."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HELP = "Prints the shell's completions: source <(tiercel completion bash)."
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "For every session, put it where the shell looks: bash in "
        "~/.local/share/bash-completion/completions/tiercel, zsh as _tiercel in a folder of fpath, "
        "fish in ~/.config/fish/completions/tiercel.fish."
    )
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    from tiercel.cli import completion_scripts, parser

    print(getattr(completion_scripts, args.shell)(list(commands(parser()))), end="")
    return 0


@dataclass
class Option:
    """An option of a command; `values` is None where it takes none, empty where anything goes."""

    names: tuple[str, ...]
    help: str
    values: "tuple[str, ...] | None" = None
    files: bool = False


@dataclass
class Command:
    """A command by its words, ``tiercel bench report``."""

    path: str
    words: "dict[str, str]" = field(default_factory=dict)  # what may follow, with its help
    options: "list[Option]" = field(default_factory=list)
    files: bool = False


def commands(parser: argparse.ArgumentParser, path: str = "tiercel") -> Iterator[Command]:
    """The command of a parser, then those below it."""
    found = Command(path)
    below = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                found.words[name] = helps.get(name, "")
                below.append((sub, f"{path} {name}"))
        elif not action.option_strings:
            found.words |= dict.fromkeys(_values(action), "")
            found.files |= action.type is Path
        elif action.help != argparse.SUPPRESS:
            values = None if action.nargs == 0 else _values(action)
            files = action.type is Path or action.metavar in ("FILE", "FOLDER", "PATH")
            names = tuple(action.option_strings)
            found.options.append(Option(names, action.help or "", values, files))
    yield found
    for sub, name in below:
        yield from commands(sub, name)


def _values(action: argparse.Action) -> "tuple[str, ...]":
    named = getattr(action, "completes", None) or action.choices
    if named is None and action.dest == "op":
        from tiercel.plugins.contracts import CONTRACTS

        return tuple(CONTRACTS)
    return () if named is None else tuple(map(str, named))
