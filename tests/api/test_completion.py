# SPDX-License-Identifier: Apache-2.0
"""``tiercel completion``: each shell completes what the parser takes, by asking the shell."""

import argparse
import shlex
import shutil
import subprocess

import pytest

from tiercel.cli import completion, main, parser
from tiercel.plugins.contracts import CONTRACTS

BASH = """
{script}
COMP_WORDS=({words}) COMP_CWORD={last}
_tiercel
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ :; }}
compadd() {{ shift; print -l -- "$@"; }}
_files() {{ print FILES; }}
{script}
words=({words}) CURRENT={last}
_tiercel
"""
FISH = """
{script}
complete -C {line}
"""


@pytest.fixture(params=completion.SHELLS)
def complete(request, capsys):
    """(line) -> what the shell offers for its last word."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out

    def ask(line):
        words = line.split(" ")
        if shell == "fish":
            program = FISH.format(script=script, line=shlex.quote(line))
        else:
            last = len(words) - 1 if shell == "bash" else len(words)
            quoted = " ".join(shlex.quote(word) for word in words)
            program = (BASH if shell == "bash" else ZSH).format(
                script=script, words=quoted, last=last
            )
        done = subprocess.run([shell, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.stderr == "", done.stderr
        found = {word.split("\t")[0] for word in done.stdout.splitlines()} - {""}
        # zsh itself leaves out what does not begin as the last word.
        return {word for word in found if word.startswith(words[-1])} if shell != "zsh" else found

    ask.shell = shell
    return ask


def test_commands(complete):
    names = {"bench", "cache", "completion", "demo", "deploy", "doctor", "kernels", "new-kernel",
             "profile", "smoke", "tune"}  # fmt: skip
    assert names <= complete("tiercel ")
    assert {"doctor", "demo", "deploy"} <= complete("tiercel d")
    assert complete.shell == "zsh" or "bench" not in complete("tiercel d")


def test_options_and_what_comes_below(complete):
    assert {"--check", "--log", "--json", "--shell"} <= complete("tiercel doctor --")
    assert {"info", "clear", "prune"} <= complete("tiercel cache ")
    assert {"--days", "--size"} <= complete("tiercel cache prune --")
    assert "--days" not in complete("tiercel cache info --")
    assert "--root" in complete("tiercel bench report --")
    assert {"linear", "moe", "nvfp4-linear", "apply"} <= complete("tiercel tune ")
    assert {"ncu", "nsys", "sanitizer", "extract"} <= complete("tiercel profile ")


def test_values(complete):
    assert {"cuda", "cpu"} <= complete("tiercel smoke --device ")
    assert {"torch", "triton", "cuda", "cute"} <= complete("tiercel new-kernel x --language ")
    assert set(CONTRACTS) <= complete("tiercel smoke --op ")
    assert {"bash", "zsh", "fish"} <= complete("tiercel completion ")
    assert "--device" not in complete("tiercel smoke --device ")


def test_what_is_hidden_is_not_offered(complete):
    assert not {"--bench"} & complete("tiercel tune linear --b")


def test_every_command_and_option_is_there():
    """Of the parser's own tree, and nothing that it does not take."""
    found = {command.path: command for command in completion.commands(parser())}
    assert {"tiercel tune apply", "tiercel bench report", "tiercel cache prune"} <= set(found)
    for command in found.values():
        for option in command.options:
            assert all(name.startswith("-") for name in option.names)
    assert [o.names for o in found["tiercel demo"].options if o.values == ("cuda", "cpu")]


def test_a_help_text_does_not_end_a_quotation(capsys, monkeypatch):
    def add_arguments(sub):
        sub.add_argument("--its", help="it's \\ $(touch x) `y`\n; 'z'")

    monkeypatch.setattr("tiercel.cli.demo.add_arguments", add_arguments)
    for shell in completion.SHELLS:
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        if shell == "fish":
            (line,) = [line for line in script.splitlines() if "touch x" in line]
            assert line.count("'") == 4
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])


def test_other_kinds_of_arguments():
    made = argparse.ArgumentParser()
    made.add_argument("--flag", action="store_true")
    made.add_argument("place", choices=("here", "there"))
    (command,) = completion.commands(made)
    assert command.words == {"here": "", "there": ""}
    assert {o.names: o.values for o in command.options}[("--flag",)] is None
