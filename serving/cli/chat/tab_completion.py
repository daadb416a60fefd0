"""Completion by TAB: commands, fields of ``/set``, models, adapters, files."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable

import click

from .conversation import Card, Conversation
from .set_field import NAMES
from .slash_commands import ALIASES, COMMANDS

FILES = ("/save", "/load", "/attach")


def candidates(talk: Conversation, line: str) -> list[str]:
    """Return the words that the last word of ``line`` may become, sorted."""
    if not line.startswith("/") or line.startswith("//"):
        return []
    words = line.split(" ")
    if len(words) == 1:
        return _beginning([*COMMANDS, *ALIASES], line)
    command, word = ALIASES.get(words[0], words[0]), words[-1]
    if command in FILES:
        return _files(line.partition(" ")[2])
    if command == "/set" and words[1:-1] == ["model"]:
        return _beginning((card.name for card in _cards(talk)), word)
    if len(words) > 2:
        return []
    if command == "/set":
        return _beginning(NAMES, word)
    if command == "/model":
        return _beginning((card.name for card in _cards(talk)), word)
    if command == "/adapter":
        base = talk.model.partition(":")[0]
        return _beginning((card.adapter for card in _cards(talk) if card.base == base and card.adapter), word)
    return []


def _beginning(names: Iterable[str], word: str) -> list[str]:
    return sorted(name for name in names if name.startswith(word))


def _cards(talk: Conversation) -> Iterable[Card]:
    try:
        return talk.read_cards().values()
    except click.ClickException:  # of a server that is away: the next message says so
        return talk.cards.values()


def _files(beginning: str) -> list[str]:
    """Return paths that begin so, directories with a slash behind them."""
    home = os.path.expanduser("~")
    found = glob.glob(glob.escape(os.path.expanduser(beginning)) + "*")
    shown = (f"~{path.removeprefix(home)}" if beginning.startswith("~") else path for path in found)
    return sorted(name + "/" * os.path.isdir(path) for name, path in zip(shown, found, strict=True))
