"""`samestep completion`: a shell script that completes samestep's commands and their options."""

import io
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress

from samestep.errors import Error

SCRIPT = """\
# For bash: eval "$(samestep completion bash)". Keep the output in a file and source that for a faster shell start.
_samestep() {{
  local words current="${{COMP_WORDS[COMP_CWORD]}}"
  case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
    1:*) words="{commands}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _samestep samestep
"""
# zsh runs the script for bash. An interactive shell without a configuration has not loaded its completion system yet.
ZSH = """\
(( $+functions[compdef] )) || { autoload -U +X compinit && compinit -i; }
autoload -U +X bashcompinit && bashcompinit
"""


def build_completion(commands: Mapping[str, Callable[[list[str]], int]], shell: str) -> str:
    """Build the script for "bash" or "zsh" from each command's --help. Raises Error for another shell."""
    if shell not in ("bash", "zsh"):
        raise Error(f"samestep completion takes bash or zsh, not {shell!r}")
    cases = []
    for name, run in commands.items():
        said = io.StringIO()
        with redirect_stdout(said), suppress(SystemExit):
            run(["--help"])
        options = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", said.getvalue())))
        cases.append(f'    *:{name}) [[ $current == -* ]] && words="{" ".join(options)}" ;;')
    script = SCRIPT.format(commands=" ".join(commands), cases="\n".join(cases))
    return script if shell == "bash" else ZSH + script
