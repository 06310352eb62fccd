"""What the documentation names exists: files, sections, commands and their options."""

import argparse
import re
from pathlib import Path

import pytest

import infer.cli
import streamd.cli

PROJECT_DIR = Path(__file__).resolve().parents[2]
PAGES = [PROJECT_DIR / "README.md", *sorted((PROJECT_DIR / "docs").glob("*.md"))]
# Options of the programs, and where they are described.
COMMAND = re.compile(r"\b(streamd|infer) ([a-z][a-z-]+)?((?: [^`|;&#()\n]*)?)")
CODE = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)")


def options_of(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Command -> its options."""
    (tree,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {
        name: {text for action in command._actions for text in action.option_strings}
        for name, command in tree.choices.items()
    }


PROGRAMS = {"streamd": options_of(streamd.cli._parser()), "infer": options_of(infer.cli._parser())}


def used_options(page: Path) -> list[tuple[str, str, str]]:
    """(program, command, option) of each command line in the page's code; "" for no option."""
    found = []
    for code in CODE.finditer(page.read_text()):
        for line in (code[1] or code[2]).splitlines():
            for use in COMMAND.finditer(line.split("  #")[0]):
                program, rest = use[1], use[3] or ""
                # `streamd --model x` is `streamd serve --model x`.
                command = use[2] or ("serve" if program == "streamd" else "chat")
                options = re.findall(r"(?<=\s)--[a-z][a-z-]*", rest)
                found += [(program, command, option) for option in options or [""]]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page):
    for program, command, option in used_options(page):
        assert command in PROGRAMS[program], f"{program} has no {command}"
        known = PROGRAMS[program][command]
        assert not option or option in known, f"{program} {command} has no {option}"


def test_the_pages_name_commands_at_all():
    named = {(program, command) for page in PAGES for program, command, _ in used_options(page)}
    for program, commands in PROGRAMS.items():
        described = {command for command in commands if (program, command) in named}
        assert len(described) > len(commands) / 2, f"{program}: only {described}"


def anchors(page: Path) -> set[str]:
    """Of each heading, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
