"""What the documentation contains: pages, links, code and commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

import click

from candle_p1 import cli
from tests.conftest import ROOT

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "jobs/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)

_BLOCK = re.compile(
    r"^(?:`(?P<file>[\w./-]+)`:\n\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]*)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code; `file` is the name under which the page tells the reader to save it."""

    file: str | None
    language: str
    text: str

    @property
    def is_shell(self):
        return not self.language and not self.file


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page):
    """Returns the blocks of code of a page."""
    return [Block(*found.groups()) for found in _BLOCK.finditer(text_of(page))]


def prose(page):
    """Returns the text of a page without blocks of code."""
    return _BLOCK.sub("", text_of(page))


def links(page):
    """Returns the links of a page that are not addresses on other hosts."""
    return [link for link in _LINK.findall(prose(page)) if "://" not in link]


def anchors(page):
    """Returns the anchors of a page's headings, as both MkDocs and code hosts form them."""
    headings = _HEADING.findall(_BLOCK.sub("", text_of(page)))
    return {re.sub(r"[^\w -]", "", each).strip().lower().replace(" ", "-") for each in headings}


def commands(page):
    """Returns the commands of a page, and other code: (words, whether it is a line of a block)."""
    lines = [
        (line, True)
        for block in blocks(page)
        if block.is_shell
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    lines += [(" ".join(each.split()), False) for each in _INLINE.findall(prose(page))]
    found = []
    for line, in_block in lines:
        try:
            found.append((shlex.split(line, comments=True), in_block))
        except ValueError:  # an apostrophe: not a command
            continue
    return [each for each in found if each[0]]


def commands_of(group, path=()):
    """Yields the commands of a group and of the groups in it, by their names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands_of(command, (*path, name))


ALL = dict(commands_of(cli.cli))
LEAVES = {path: each for path, each in ALL.items() if not isinstance(each, click.Group)}
"""Commands that are not groups of commands."""
