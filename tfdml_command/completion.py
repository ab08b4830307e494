"""`tfdml completion`: scripts that complete subcommands, flags and flag files in bash and zsh."""

import importlib

from tfdml_command import OTHERS, STAGES
from tfdml_command.configs import rows

_BASH = """_tfdml() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} flag= flags=
  # Readline takes the equals sign for a word.
  if [[ $word == = ]]; then flag=$before word=; elif [[ $before == = ]]; then flag=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  if [[ $COMP_CWORD == 1 ]]; then COMPREPLY=($(compgen -W "{commands}" -- "$word")); return; fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if [[ $flag == --flagfile ]]; then COMPREPLY=($(compgen -f -W "{files}" -- "$word"))
  elif [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word")); [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
  else COMPREPLY=($(compgen -f -- "$word")); compopt -o filenames; fi 2>/dev/null
}}
complete -F _tfdml tfdml"""
_ZSH = """#compdef tfdml
_tfdml() {{
  local -a flags
  if (( CURRENT == 2 )); then compadd -- {commands}; return; fi
  case $words[2] in
{cases}
  esac
  if compset -P '--flagfile='; then compadd -- {files}; _files
  elif compset -P '*='; then _files
  else compadd -S '' -- ${{=flags}}; fi
}}
if [[ $funcstack[1] == _tfdml ]]; then _tfdml "$@"; else compdef _tfdml tfdml; fi"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH}
USAGE = """Print a script that completes subcommands, flags and flag files of tfdml.

  tfdml completion bash > ~/.local/share/bash-completion/completions/tfdml
  tfdml completion zsh > ~/.zfunc/_tfdml          a folder in $fpath

Print it again after an upgrade."""


def script(shell: str) -> str:
    """Return the completion script of a shell, `bash` or `zsh`.

    Example:
        >>> script("bash").splitlines()[-1]
        'complete -F _tfdml tfdml'
    """
    cases = []
    for name in STAGES:
        known = importlib.import_module(f"tfdml.cli.{name}").COMMAND.flags
        flags = [f"--{flag}" + ("" if known[flag].boolean else "=") for flag in known]
        cases.append(f'    {name}) flags="{" ".join(["--flagfile=", "--help", *flags])}" ;;')
    files = " ".join(row["flag file"] for row in rows())
    return _SCRIPTS[shell].format(commands=" ".join([*STAGES, *OTHERS]), cases="\n".join(cases), files=files)


def main(words: list[str]) -> int:
    """Print the script of the shell that the command line names; the exit status."""
    if len(words) == 1 and words[0] in _SCRIPTS:
        print(script(words[0]))
    else:
        print(USAGE)
    return 0 if words and words[0] in (*_SCRIPTS, "--help", "-h") else 2
