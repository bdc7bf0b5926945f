# SPDX-License-Identifier: Apache-2.0
"""The commands' words and options as functions of bash, zsh and fish."""

from collections.abc import Iterable, Sequence

from tiercel.cli.completion import Command

_BASH = """\
# source <(tiercel completion bash)
_tiercel() {{
  local path=tiercel word current=${{COMP_WORDS[COMP_CWORD]}}
  local previous=${{COMP_WORDS[COMP_CWORD-1]}}
  if [[ $current == = ]]; then current=
  elif [[ $previous == = ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$path $word" in
      {paths}) path="$path $word" ;;
    esac
  done
  COMPREPLY=()
  case "$path $previous" in
{values}
  esac
  case "$path" in
{words}
  esac
}}
complete -o default -F _tiercel tiercel
"""

_ZSH = """\
#compdef tiercel
# source <(tiercel completion zsh)
_tiercel() {{
  local route=tiercel word
  for word in ${{words[2,CURRENT-1]}}; do
    case "$route $word" in
      ({paths}) route="$route $word" ;;
    esac
  done
  case "$route ${{words[CURRENT-1]}}" in
{values}
  esac
  case "$route" in
{words}
  esac
}}
if [[ ${{funcstack[1]}} == _tiercel ]]; then
  _tiercel "$@"
else
  compdef _tiercel tiercel
fi
"""

_FISH = """\
# tiercel completion fish | source
function __tiercel_is
    set -l route tiercel
    set -l words (commandline -opc)
    set -e words[1]
    for word in $words
        switch "$route $word"
            case {paths}
                set route "$route $word"
        end
    end
    test "$route" = "$argv"
end
complete -c tiercel -f
{lines}
"""


def bash(commands: Sequence[Command]) -> str:
    values = [
        f"    {_any(command, names)}) {_reply(listed)}return ;;"
        for command, names, listed in _values(commands)
    ]
    words = [f'    "{command.path}") {_reply(_words(command))};;' for command in commands]
    paths = "|".join(f'"{command.path}"' for command in commands[1:])
    return _BASH.format(paths=paths, values="\n".join(values), words="\n".join(words))


def zsh(commands: Sequence[Command]) -> str:
    values = [
        f"    ({_any(command, names)}) {_compadd(listed)}; return ;;"
        for command, names, listed in _values(commands)
    ]
    words = []
    for command in commands:
        files = "; _files" if command.files else ""
        words.append(f'    ("{command.path}") {_compadd(_words(command))}{files} ;;')
    paths = "|".join(f'"{command.path}"' for command in commands[1:])
    return _ZSH.format(paths=paths, values="\n".join(values), words="\n".join(words))


def fish(commands: Sequence[Command]) -> str:
    lines = []
    for command in commands:
        begin = f"complete -c tiercel -n {_quoted(f'__tiercel_is {command.path}')}"
        if command.files:
            lines.append(f"{begin} -F")
        for word, text in command.words.items():
            lines.append(f"{begin} -a {word}" + (f" -d {_quoted(text)}" if text else ""))
        for option in command.options:
            line = begin
            for name in option.names:
                line += f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}"
            if option.values:
                line += f" -x -a {_quoted(' '.join(option.values))}"
            elif option.values is not None:
                line += " -r -F" if option.files else " -x"
            lines.append(f"{line} -d {_quoted(option.help)}")
    paths = " ".join(_quoted(command.path) for command in commands[1:])
    return _FISH.format(paths=paths, lines="\n".join(lines))


def _values(commands: Iterable[Command]) -> "list[tuple[Command, tuple[str, ...], list[str]]]":
    """Each option that takes a value, and the values that are known; none for a file."""
    found = []
    for command in commands:
        for option in command.options:
            if option.values is not None:
                found.append((command, option.names, list(option.values)))
    return found


def _words(command: Command) -> "list[str]":
    return [*command.words, *(name for option in command.options for name in option.names)]


def _any(command: Command, names: Iterable[str]) -> str:
    return "|".join(f'"{command.path} {name}"' for name in names)


def _reply(words: Iterable[str]) -> str:
    """Nothing for no words: then bash completes files."""
    text = " ".join(words)
    return f'COMPREPLY=($(compgen -W {_quoted(text)} -- "$current")); ' if text else ""


def _compadd(words: Iterable[str]) -> str:
    text = " ".join(map(_quoted, words))
    return f"compadd -- {text}" if text else "_files"


def _quoted(text: str) -> str:
    """For all three shells: no quote and no backslash of a help text gets through."""
    return "'" + text.replace("\\", "/").replace("'", "\u2019").replace("\n", " ") + "'"
