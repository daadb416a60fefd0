"""Settings that are not allowed: one line with the field, its value and what is allowed, wherever they come from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from mlflow_llm.flavors.llm.model import model_config
from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.cli.model_options import endpoint_specs
from mlflow_llm.serving.control import mlflow_resolver
from mlflow_llm.serving.control.mlflow_resolver import ResolvedModel
from mlflow_llm.serving.control.model_sources import locate
from mlflow_llm.serving.control.settings import ServerSettings, default_state_dir, ledger_dir
from mlflow_llm.serving.control.spec import EndpointSpec
from mlflow_llm.serving.endpoints.config import EntityConfig
from mlflow_llm.serving.engine.models.resolved_settings import resolve_device
from mlflow_llm.serving.interface.errors import InvalidField, PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

ENGINE = [
    ("max_num_seqs", 0, "an integer from 1 to 2147483647"),
    ("max_num_seqs", "abc", "an integer from 1 to 2147483647"),
    ("max_num_seqs", True, "an integer from 1 to 2147483647"),
    ("max_num_batched_tokens", 0, "an integer from 1 to 2147483647, or null"),
    ("max_model_len", -3, "an integer from 1 to 2147483647, or null"),
    ("max_queued_requests", -1, "an integer from 0 to 2147483647"),
    ("max_adapters", -1, "an integer from 0 to 2147483647"),
    ("threads", 0, "an integer from 1 to 1024, or null"),
    ("threads", 10**30, "an integer from 1 to 1024, or null"),
    ("kv_cache_memory", "4 lots", "a number of bytes, 1 or more, such as 1073741824 or 1GiB, or null"),
    ("encoder_cache", -1, "a number of bytes, such as 1073741824 or 1GiB; 0 for none"),
    ("dtype", "foo", "one of 'auto', 'bfloat16', 'float16', 'float32'"),
    ("quantization", "int2", "one of 'fp8', 'int4', 'int8', 'none'"),
    ("device", "tpu", "'auto', 'cpu', 'cuda' or 'cuda:N'"),
    ("idle_timeout", -5, "a number from 0 to 31536000"),
    ("stall_timeout", -1, "a number above 0 to 31536000"),
    ("stall_timeout", 0, "a number above 0 to 31536000"),
    ("start_timeout", float("nan"), "a number above 0 to 31536000"),
]
SERVER = [
    ("workers", 0, "an integer from 1 to 64"),
    ("port", 70000, "an integer from 0 to 65535"),
    ("timeout", -1, "a number above 0 to 31536000"),
    ("timeout", float("inf"), "a number above 0 to 31536000"),
    ("drain_timeout", -1, "a number from 0 to 31536000"),
    ("max_queued", -1, "an integer from 0 to 2147483647"),
    ("default_max_tokens", 0, "an integer from 1 to 2147483647, or null"),
    ("trace_sample", 1.5, "a number from 0 to 1"),
    ("log_level", "loud", "one of 'debug', 'error', 'info', 'warning'"),
    ("host", 7, "a text"),
]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def error_of(done: Result) -> str:
    """Return the error that the console script prints for a refused command."""
    return done.output if isinstance(done.exception, SystemExit) else f"Error: {done.exception}\n"


def line(field: str, value: object, allowed: str) -> str:
    return f"{field}: {value!r} is not allowed; expected {allowed}"


@pytest.mark.parametrize(("field", "value", "allowed"), ENGINE)
def test_bad_engine_settings_are_refused_by_field(field: str, value: object, allowed: str) -> None:
    """A bad engine setting gives the same error line from the constructor, plain values, a model's config and its
    overrides.
    """
    for make in (
        lambda: EngineSettings(**{field: value}),
        lambda: EngineSettings.read({field: value}),
        lambda: msgspec.structs.replace(EngineSettings(), **{field: value}),
    ):
        with pytest.raises(InvalidField) as caught:
            make()
        assert str(caught.value) == line(field, value, allowed)
        assert caught.value.param == field
    with pytest.raises(PackagingError) as refused:
        model_config.parse({"dtype": "float32"}, {field: value})
    assert str(refused.value) == line(field, value, allowed)


@pytest.mark.parametrize(("field", "value", "allowed"), SERVER)
def test_bad_server_settings_are_refused_by_field(field: str, value: object, allowed: str) -> None:
    """A bad server setting gives the same error from the constructor and from plain values."""
    for make in (lambda: ServerSettings(**{field: value}), lambda: ServerSettings.read({field: value})):
        with pytest.raises(InvalidField) as caught:
            make()
        assert str(caught.value) == line(field, value, allowed)


def test_defaults_and_bounds_of_settings_are_allowed() -> None:
    """The defaults, the bounds, and whole numbers for float settings are accepted."""
    for settings in (EngineSettings, ServerSettings):
        assert settings.read(msgspec.to_builtins(settings())) == settings()
    read = EngineSettings.read({"idle_timeout": 0, "max_adapters": 0, "threads": None, "device": "cuda:1"})
    assert (read.idle_timeout, read.max_adapters, read.threads, read.device) == (0.0, 0, None, "cuda:1")
    assert ServerSettings(port=0, drain_timeout=0, max_queued=0, timeout=1).timeout == 1


def test_bad_saved_settings_of_a_served_model_are_refused(instant_bundle) -> None:
    """A bad setting saved with a model is refused with its field; a saved ``in_process`` is ignored by the server."""
    with pytest.raises(PackagingError, match="engine settings: threads: 0 is not allowed"):
        ResolvedModel(bundle=instant_bundle, config={"threads": 0}).settings({})
    assert not ResolvedModel(bundle=instant_bundle, config={"in_process": True}).settings({}).in_process


def test_a_servers_settings_of_generation_are_for_its_decoders(instant_bundle, monkeypatch, capsys) -> None:
    """Generation settings on a server's command line apply to its decoders: encoders run without them, which is logged,
    and a server of encoders alone refuses them.
    """
    encoder = msgspec.structs.replace(instant_bundle, tasks=("embeddings",))
    found = {"d": ResolvedModel(bundle=instant_bundle, uri="d"), "e": ResolvedModel(bundle=encoder, uri="e")}
    monkeypatch.setattr(mlflow_resolver, "resolve", lambda uris, texts=(): tuple(found[u] for u in (*uris, *texts)))
    given = {"kv_cache_dtype": "int8", "draft_model": None, "threads": 1}
    specs = endpoint_specs({"d": "d", "e": "e"}, given)
    assert [(one.engine.kv_cache_dtype, one.engine.threads) for one in specs] == [("int8", 1), ("auto", 1)]
    assert capsys.readouterr().err == "e runs without the server's kv_cache_dtype=int8: it generates no text\n"
    with pytest.raises(click.UsageError, match=r"^-C kv_cache_dtype=int8: none of the models generates text"):
        endpoint_specs({"e": "e"}, given)
    assert found["e"].settings(given, {"kv_cache_dtype": "bfloat16"}).kv_cache_dtype == "bfloat16"
    entities = tuple(EntityConfig(name=uri, entity_name=uri, entity_version="") for uri in found)
    sources = locate(entities, given, find=lambda uris: tuple(found[uri] for uri in uris))
    assert [one.engine.kv_cache_dtype for one in sources] == ["int8", "auto"]


@pytest.mark.parametrize("command", [("serve", "--port", "0", "-m", "x"), ("engine", "-m", "x", "--key-file")])
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("max_num_seqs=abc", line("max_num_seqs", "abc", "an integer from 1 to 2147483647")),
        ("stall_timeout=NaN", line("stall_timeout", float("nan"), "a number above 0 to 31536000")),
        ("in_process=true", line("in_process", True, "false: it is for notebooks; a server's engines have their own")),
    ],
)
def test_bad_settings_on_the_command_line_are_refused(
    tmp_path: Path, command: tuple[str, ...], setting: str, expected: str
) -> None:
    """A bad ``-C`` setting of serve or engine is refused before anything is read."""
    if command[0] == "engine":
        key = str(tmp_path / "key")
        assert invoke("engine-key", key).exit_code == 0
        command = (*command, key)
    shown = error_of(invoke(*command, "-C", setting))
    assert shown.startswith(f"Error: {expected}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--timeout", "-1"), ("--timeout", "0"), ("--drain-timeout", "-1")])
def test_bad_seconds_of_serve_are_refused(arguments: tuple[str, ...]) -> None:
    """An invalid number of seconds is refused with its option."""
    done = invoke("serve", "--port", "0", "-m", "x", *arguments)
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in done.output


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("-m", "models:/assistant/1=we ird"), "we ird"),
        (("-m", "models:/assistant/1", "--name", "we ird"), "we ird"),
        (("-m", "models:/assistant/1", "--name", "a/b"), "a/b"),
        (("-m", "models:/my model/1"), "my model"),
    ],
)
def test_bad_names_of_endpoints_are_refused(arguments: tuple[str, ...], name: str) -> None:
    """An endpoint name that the management API would refuse is refused on the command line."""
    shown = error_of(invoke("serve", "--port", "0", *arguments))
    allowed = "1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first"
    assert shown.startswith("Error: " + line("name", name, allowed))
    assert shown.count("\n") == 1
    assert ("write -m URI=name" in shown) == (name == "my model")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"settings": {"workers": 0}}, line("settings.workers", 0, "an integer from 1 to 64")),
        (
            {"settings": {"worker": 2}},
            "settings.worker: 2 is not allowed: no such setting; expected one of host",
        ),
        ({"engine": {"threads": 0}}, line("engine.threads", 0, "an integer from 1 to 1024, or null")),
        ({"endpoints": [{"engine": {"dtype": "foo"}}]}, "endpoints[0].engine.dtype: 'foo' is not allowed"),
        ({"endpoints": [{"name": "a", "engine": {"in_process": True}}]}, "endpoints[0].engine.in_process: True is not"),
        ({"endpoints": 3}, "Expected `array`, got `int` - at `$.endpoints`"),
        ([], "Expected `object`, got `array`"),
        ("{", "Input data was truncated"),
        ("nonsense", "JSON is malformed"),
    ],
)
def test_a_bad_spec_of_serve_is_refused_by_place(tmp_path: Path, spec: object, reason: str) -> None:
    """A bad setting in a spec file is refused with its path."""
    path = tmp_path / "spec.json"
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    shown = error_of(invoke("serve", "--spec", str(path)))
    assert shown.startswith(f"Error: --spec {path}: ")
    assert reason in shown
    assert shown.count("\n") == 1


def test_a_bad_name_in_a_spec_is_refused(instant_bundle) -> None:
    """A bad endpoint name in a spec file is refused."""
    with pytest.raises(InvalidField, match="name: 'we ird' is not allowed"):
        EndpointSpec(name="we ird", entity="x", bundle=instant_bundle)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"bundle": ', "Input data was truncated"),
        ("nonsense", "JSON is malformed"),
        ('{"settings": {"max_num_seqs": 0}}', "settings.max_num_seqs: 0 is not allowed; expected an integer from 1"),
    ],
)
def test_a_bad_spec_of_engine_is_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    """Malformed JSON or a wrong setting is one line, as with serve."""
    key, path = str(tmp_path / "key"), tmp_path / "bad.json"
    assert invoke("engine-key", key).exit_code == 0
    path.write_text(text)
    done = invoke("engine", "--key-file", key, "--spec", str(path))
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: --spec {path}: ")
    assert reason in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("count", [0, 1])
def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A missing device is refused with the field before the weights are read; the CPU is always available."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert resolve_device(EngineSettings(device="cpu")).type == "cpu"
    device = f"cuda:{count}" if count else "cuda"
    with pytest.raises(PackagingError, match=f"device: {device!r} is not allowed; expected an available device"):
        resolve_device(EngineSettings(device=device))


def test_the_state_directory_is_the_settings_the_variables_or_xdgs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The state directory is ``state_dir``, MLFLOW_LLM_STATE, XDG's state directory or the user's, in that order."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MLFLOW_LLM_STATE", raising=False)
    assert ledger_dir(ServerSettings()) == tmp_path / "xdg/mlflow-llm/ledger"
    monkeypatch.setenv("MLFLOW_LLM_STATE", str(tmp_path / "own"))
    assert default_state_dir() == tmp_path / "own"
    assert ledger_dir(ServerSettings()) == tmp_path / "own/ledger"
    assert ledger_dir(ServerSettings(state_dir=str(tmp_path / "its"))) == tmp_path / "its/ledger"
    assert os.listdir(tmp_path / "own/ledger") == []


def test_a_user_without_a_home_has_no_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a home directory the error names MLFLOW_LLM_STATE, and nothing is created in the working directory."""
    for name in ("HOME", "XDG_STATE_HOME", "MLFLOW_LLM_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PackagingError, match="no home directory; MLFLOW_LLM_STATE names a state directory"):
        ledger_dir(ServerSettings())
    assert os.listdir(tmp_path) == []
    assert ledger_dir(ServerSettings(state_dir=str(tmp_path / "its"))) == tmp_path / "its/ledger"


def test_a_state_directory_that_cannot_be_written_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server with a ledger says so in one line before it reads a model."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("MLFLOW_LLM_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    done = invoke("serve", "--port", "0", "-m", "x", "--database", f"sqlite:///{tmp_path / 'serving.db'}")
    assert isinstance(done.exception, PackagingError)
    assert "reading the models" not in done.output
    expected = f"the state directory {tmp_path}/file/mlflow-llm/ledger cannot be written (Not a directory)"
    assert str(done.exception).startswith(expected)


def test_requiring_keys_without_a_database_is_refused(tmp_path: Path) -> None:
    """Requiring keys without a database is refused on the command line and in a spec."""
    reason = "require_keys: True is not allowed; expected false without --database"
    with pytest.raises(InvalidField, match=reason):
        ServerSettings(require_keys=True)
    assert reason in error_of(invoke("serve", "-m", "models:/x/1", "--require-keys"))
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"endpoints": [], "settings": {"require_keys": True}}))
    assert reason in error_of(invoke("serve", "--spec", str(spec)))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"setings": {"require_keys": True}}, "unknown field `setings`"),
        ({"endpoints": [{"name": "a", "scale_to_zero": True}]}, r"unknown field `scale_to_zero` - at `$.endpoints[0]`"),
    ],
)
def test_unknown_fields_of_a_spec_are_refused(tmp_path: Path, spec: dict[str, Any], said: str) -> None:
    """An unknown field of a spec is refused, so that a misspelling cannot leave a server open."""
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    assert said in error_of(invoke("serve", "--spec", str(file)))


def test_a_model_is_named_after_its_uri() -> None:
    """A model given as URI=name instead of name=URI is refused with the right order."""
    done = invoke("serve", "-m", "chat=models:/assistant/1")
    assert done.exit_code == 2
    assert "-m chat=models:/assistant/1: the URI comes first, models:/assistant/1=chat" in done.output


def test_options_beside_a_spec_are_refused(tmp_path: Path) -> None:
    """Options beside a spec are refused, since they would have no effect."""
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"endpoints": []}))
    done = invoke("serve", "--spec", str(spec), "--require-keys", "--port", "28999")
    assert done.exit_code == 2
    assert "--port, --require-keys: not allowed with --spec" in done.output


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("127.0.0.1", False), ("127.8.8.8", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)],
)
def test_a_keyless_server_beyond_loopback_is_open_to_others(host: str, is_open: bool) -> None:
    """A server counts as open to others if it listens beyond loopback and does not require keys."""
    assert ServerSettings(host=host).is_open_to_others == is_open
    assert not ServerSettings(host=host, database="sqlite:///x.db", require_keys=True).is_open_to_others
