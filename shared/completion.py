"""What a shell completes after `streamd` and `infer`, generated from their argparse trees.

Options and choices come from the parser; where a value is a file's name the shell completes files.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Word:
    """An option, or a choice where an argument is expected."""

    text: str
    help_text: str
    choices: tuple[str, ...] = ()
    takes_file: bool = False
    takes_value: bool = False


@dataclass(frozen=True)
class Command:
    """One subcommand: its options, and the choices of its arguments without a name."""

    name: str
    help_text: str
    options: tuple[Word, ...]
    choices: tuple[str, ...]


def completion_script(parser: argparse.ArgumentParser, shell: str, default: str = "") -> str:
    """A script for bash, zsh or fish; `parser.prog` is the program's name.

    default: the command that is meant where the first word is an option.
    """
    commands = tuple(_commands(parser))
    render = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    return render(parser.prog, commands, default)


def _commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    (tree,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    help_texts = {action.dest: action.help or "" for action in tree._choices_actions}
    for name, command in tree.choices.items():
        shown = [a for a in command._actions if a.help != argparse.SUPPRESS]
        options = tuple(word for action in shown for word in _options(action))
        choices = [str(c) for a in shown if not a.option_strings for c in a.choices or ()]
        yield Command(name, help_texts.get(name, ""), options, tuple(choices))


def _options(action: argparse.Action) -> Iterator[Word]:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    for text in action.option_strings:
        if text.startswith("--"):
            yield Word(
                text,
                action.help or "",
                tuple(str(choice) for choice in action.choices or ()),
                takes_file="FILE" in metavar or text == "--model",
                takes_value=action.nargs not in (0, "?"),
            )


def _bash(program: str, commands: tuple[Command, ...], default: str) -> str:
    cases = []
    for command in commands:
        words = " ".join([*(option.text for option in command.options), *command.choices])
        pattern = f"{command.name}|-*" if command.name == default else command.name
        cases.append(f'        {pattern}) words="{words}" ;;')
    files = "|".join(sorted({o.text for c in commands for o in c.options if o.takes_file}))
    names = " ".join(command.name for command in commands)
    lines = [
        f"_{program}() {{",
        '    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=""',
        "    COMPREPLY=()",
        *([f"    case $before in {files}) return ;; esac"] if files else []),
        f'    if [ "$COMP_CWORD" -eq 1 ]; then words="{names}"; fi',
        '    case "${COMP_WORDS[1]}" in',
        *cases,
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        # Where nothing matches, a file's name does: -o default.
        f"complete -o default -F _{program} {program}",
    ]
    return "\n".join(lines)


def _zsh(program: str, commands: tuple[Command, ...], default: str) -> str:
    lines = [f"#compdef {program}", f"_{program}() {{", "    local -a commands=("]
    lines += [f"        {_quoted(f'{c.name}:{c.help_text}')}" for c in commands]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then",
        "        _describe command commands; return",
        "    fi",
        "    case $words[2] in",
    ]
    for command in commands:
        specs = [_zsh_option(option) for option in command.options]
        specs += [_quoted(f"1:choice:({' '.join(command.choices)})")] if command.choices else []
        specs += [_quoted("*:file:_files")]
        arguments = "_arguments " + " ".join(specs) + " ;;"
        lines += [
            f"        {command.name}) shift words; (( CURRENT-- ))",
            f"            {arguments}",
        ]
        lines += [f"        -*) {arguments}"] if command.name == default else []
    return "\n".join([*lines, "    esac", "}", f"compdef _{program} {program}"])


def _zsh_option(option: Word) -> str:
    text = option.help_text.replace("[", "(").replace("]", ")").replace(":", " ")
    spec = f"{option.text}[{text}]"
    if option.takes_file:
        spec += ":file:_files"
    elif option.choices:
        spec += f":value:({' '.join(option.choices)})"
    elif option.takes_value:
        spec += ":value: "
    return _quoted(spec)


def _fish(program: str, commands: tuple[Command, ...], default: str) -> str:
    lines = [f"complete -c {program} -f"]
    for command in commands:
        about = _quoted(command.help_text)
        lines.append(f"complete -c {program} -n __fish_use_subcommand -a {command.name} -d {about}")
        seen = f"'__fish_seen_subcommand_from {command.name}'"
        if command.name == default:
            others = " ".join(c.name for c in commands if c.name != default)
            seen = f"'not __fish_seen_subcommand_from {others}'"
        for option in command.options:
            value = " -r -F" if option.takes_file else " -r" if option.takes_value else ""
            if option.choices:
                value = f" -x -a {_quoted(' '.join(option.choices))}"
            about = _quoted(option.help_text)
            lines.append(
                f"complete -c {program} -n {seen} -l {option.text.removeprefix('--')}{value}"
                f" -d {about}"
            )
        if command.choices:
            lines.append(f"complete -c {program} -n {seen} -a {_quoted(' '.join(command.choices))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
