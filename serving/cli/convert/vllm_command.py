"""``mlflow-llm import vllm``: the command, or the spec file, that serves what a ``vllm serve`` command line serves."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from ...interface.errors import InvalidField, PackagingError
from ..advice import SERVE
from .vllm_flags import CONVERSIONS, SHORT, SWITCHED, SWITCHES, Meant, Refused, reason_without

STARTS = (("vllm", "serve"), ("python", "-m", "vllm.entrypoints.openai.api_server"))
SEVERAL = ("--lora-modules", "--served-model-name", "--allowed-media-domains", "--api-key")
OF_LOG_MODEL = {"--revision": "revision", "--chat-template": "chat_template", "--tokenizer": "tokenizer"}
SECRETS = ("--api-key", "--hf-token", "--ssl-keyfile-password")  # whose values are not shown
TAKEN, NOTHING, LEFT = "taken", "nothing to do", "not taken"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A flag of the command line with its values, and what becomes of it."""

    flag: str
    values: tuple[str, ...]
    state: str
    note: str
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        values = " ".join("…" for _ in self.values) if self.flag in SECRETS else shlex.join(self.values)
        return f"{self.state}: {self.flag} {values}".rstrip() + f": {self.note}"


class Found(msgspec.Struct, kw_only=True):
    """The content of a command line: the model, its names, what is logged with it, and a line for each flag."""

    model: str
    names: tuple[str, ...]
    log: dict[str, Any]
    lines: list[Line]

    @property
    def endpoint(self) -> str:
        """The name of the endpoint: the first served name, or the last part of the model's."""
        return re.sub(r"[^\w.-]", "-", self.names[0].rstrip("/").rpartition("/")[2]) if self.names else "model"

    def serve(self, uri: str) -> list[str]:
        """Return the words after ``mlflow-llm serve`` for the model at ``uri``."""
        words = ["-m", f"{uri}={self.endpoint}"]
        aliases = {name: self.endpoint for name in self.names if name != self.endpoint}
        aliases |= {name: f"{self.endpoint}:{name}" for name in self.log.get("adapters", ())}
        for name, target in aliases.items():
            words += ["--model-alias", f"{name}={target}"]
        return words + [word for line in self.lines for word in line.words]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@click.option("--spec", "spec_file", type=click.Path(dir_okay=False), help="Write a file for serve --spec.")
@click.option("--register", metavar="NAME", help="Log the model with its adapters and template under this name.")
def vllm(line: tuple[str, ...], spec_file: str | None, register: str | None) -> None:
    """Print the command that serves what a `vllm serve` command serves.

    COMMAND is the command line in quotes, or its words after "--". Each of its flags is named on standard error:
    whether it was taken, needs nothing, or has no counterpart. With --register, a model that has adapters
    (--lora-modules), a template or a revision is logged with them; without it, the call that does so is printed. With
    --spec, the model is read and the settings are written to a file.
    """
    found = read(_words(line[0]) if len(line) == 1 else list(line))
    for one in found.lines:
        click.echo(str(one), err=True)
    if not any(one.flag in ("--host", "--uds") for one in found.lines):
        click.echo("vLLM listens on every address, this server on 127.0.0.1: --host 0.0.0.0 changes that", err=True)
    uri = found.model
    if found.log:
        uri = _registered(found, register) if register else f"models:/{found.endpoint}/latest"
        if not register:
            click.echo(f"# {_call(found)}")
    words = found.serve(uri)
    click.echo(shlex.join(["mlflow-llm", "serve", *words]))
    if spec_file is not None:
        if found.log and not register:
            raise click.UsageError("--spec: the model is to be logged first: give --register NAME")
        _write(words, Path(spec_file))


def _words(line: str) -> list[str]:
    """Return the words of a command line, also of several lines. Raises ``UsageError``."""
    try:
        return shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise click.UsageError(f"the command cannot be read: {error}") from None


def read(words: Sequence[str]) -> Found:
    """Return what the words of a command line say. Raises ``UsageError`` for one that is not vLLM's."""
    rest = list(words)
    lines: list[Line] = []
    while rest and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", rest[0]):
        name, _, _ = rest.pop(0).partition("=")  # its value may be a secret
        lines.append(Line(flag=name, values=(), state=LEFT, note="variables of vLLM are not read"))
    if rest and os.path.basename(rest[0]).startswith("python"):
        rest[0] = "python"
    start = next((one for one in STARTS if tuple(rest[: len(one)]) == one), None)
    if start is None:
        raise click.UsageError('expected a command such as "vllm serve MODEL --max-model-len 4096"')
    rest = rest[len(start) :]
    found = Found(model="", names=(), log={}, lines=lines)
    for flag, values in _flags(rest):
        _take(found, flag, values)
    if not found.model:
        raise click.UsageError("the command names no model")
    found.names = found.names or (found.model,)
    return found


def _flags(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield flags with their values; the model, which is no flag, as ``--model``. Parts of a JSON value, given as
    ``--flag.key value``, are put together."""
    parts: dict[str, dict[str, Any]] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("-"):
            yield "--model", (word,)
            continue
        name, equals, value = word.partition("=")
        flag = SHORT.get(name, name if name.startswith("---") else "--" + name.lstrip("-").replace("_", "-"))
        values = [value] if equals else []
        several = flag in SEVERAL
        while place < len(words) and not words[place].startswith("--") and (several or (not values and not equals)):
            if flag in SWITCHES or flag.startswith("--no-"):
                break
            values.append(words[place])
            place += 1
        base, dot, key = flag.partition(".")
        if dot:
            _put(parts.setdefault(base, {}), key.replace("-", "_").split("."), values[0] if values else "true")
            continue
        yield flag, tuple(values)
    for base, made in parts.items():
        yield base, (json.dumps(made),)


def _put(made: dict[str, Any], keys: list[str], value: str) -> None:
    for key in keys[:-1]:
        made = made.setdefault(key, {})
    try:
        made[keys[-1]] = json.loads(value)
    except ValueError:
        made[keys[-1]] = value


def _take(found: Found, flag: str, values: tuple[str, ...]) -> None:
    """Add what a flag says to ``found``."""
    if flag == "--model" and values:
        if found.model:
            raise click.UsageError(f"the command names two models, {found.model} and {values[0]}")
        found.model = values[0]
        return
    state, note = LEFT, "it is not known here"
    words: tuple[str, ...] = ()
    if flag == "--served-model-name" and values:
        found.names = values
        state, note = TAKEN, "the endpoint's name" + (", and further names for it" if len(values) > 1 else "")
    elif flag == "--lora-modules" and values:
        found.log["adapters"] = found.log.get("adapters", {}) | dict(map(_adapter, values))
        state, note = TAKEN, "logged with the model; a request names them as before"
    elif flag in OF_LOG_MODEL and values:
        found.log[OF_LOG_MODEL[flag]] = values[0]
        state, note = TAKEN, "logged with the model"
    elif flag == "--generation-config" and values == ("vllm",):
        found.log["generation_config"] = {}
        state, note = TAKEN, "logged with the model, without defaults of its own"
    elif flag in SWITCHED and not values:
        words = SWITCHED[flag]
        state, note = TAKEN, " ".join(words)
    elif flag in CONVERSIONS and values:
        state, note, words = _converted(flag, values)
    elif flag.startswith("--no-") and f"--{flag[5:]}" in SWITCHES and flag not in SERVE:
        state, note = NOTHING, "it is off, or a setting of vLLM's own"
    elif (reason := reason_without(flag)) is not None:
        state, note = (LEFT if reason[0] else NOTHING), reason[1]
    found.lines.append(Line(flag=flag, values=values, state=state, note=note, words=words))


def _converted(flag: str, values: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
    value = ",".join(values) if flag in SEVERAL else values[0]
    try:
        meant = CONVERSIONS[flag](value)
        _check(meant)
    except (Refused, InvalidField, PackagingError) as error:
        return LEFT, str(error), ()
    except click.ClickException as error:
        return LEFT, error.format_message(), ()
    return (TAKEN if meant.words else NOTHING), meant.note, meant.words


def _check(meant: Meant) -> None:
    """Raise an error for words that ``mlflow-llm serve`` would not take."""
    from ..model_options import engine_overrides, request_fields
    from ..serve.command import serve

    for kind, word in zip(meant.words[::2], meant.words[1::2], strict=True):
        if kind == "-C":
            engine_overrides((word,))
        elif kind == "-D":
            request_fields((word,))
        else:
            serve.make_context("serve", [kind, word, "model"])


def _adapter(value: str) -> tuple[str, str]:
    """Return name and place of ``NAME=PATH``, or of the JSON object that vLLM also takes. Raises ``UsageError``."""
    try:
        said = json.loads(value)
        return str(said["name"]), str(said["path"])
    except (ValueError, TypeError, LookupError):
        name, equals, path = value.partition("=")
    if not equals or not name or not path:
        raise click.UsageError(f"--lora-modules {value}: expected NAME=PATH")
    return name, path


def _call(found: Found) -> str:
    given = "".join(f", {name}={value!r}" for name, value in found.log.items())
    return (
        f"llm.log_model({found.model!r}, name={found.endpoint!r}{given}, registered_model_name={found.endpoint!r})"
        " in Python, or --register"
    )


def _registered(found: Found, name: str) -> str:
    """Log the model with what belongs to it, and return the URI of the version."""
    from mlflow.exceptions import MlflowException

    from mlflow_llm.flavors import llm

    try:
        info = llm.log_model(found.model, name=found.endpoint, registered_model_name=name, **found.log)
    except (MlflowException, ValueError) as error:
        raise click.ClickException(str(getattr(error, "message", error))) from None
    return f"models:/{name}/{info.registered_model_version}"


def _write(words: list[str], file: Path) -> None:
    """Write the spec that ``mlflow-llm serve`` makes of ``words``. Raises ``ClickException``."""
    from ...control.settings import ServerSettings
    from ..serve.command import serve, spec_of

    options = dict(serve.make_context("serve", list(words)).params)
    options.pop("spec_file")
    spec = spec_of(**options)
    made = msgspec.to_builtins(spec)
    plain = msgspec.to_builtins(ServerSettings())
    made["settings"] = {name: value for name, value in made["settings"].items() if value != plain[name]}
    made = {name: value for name, value in made.items() if value not in (None, {}, [])}
    file.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    click.echo(f"wrote {file}: mlflow-llm serve --spec {file}", err=True)
