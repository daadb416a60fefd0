"""``mlflow-llm serve --help``: its options in groups, each engine setting with its meaning, and examples at the end."""

from __future__ import annotations

import json
import re
import textwrap

import click

from ...interface.dialect_settings import NAMES
from ...interface.settings import EngineSettings

GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (
        "models", "name", "spec_file", "profile", "config", "defaults", "engines", "engine_key_file", "placement",
        "runtime", "ray_address",
    ),
    "Listen": (
        "host", "port", "socket", "socket_mode", "probe_port", "probe_host", "grpc_port", "allowed_hosts",
        "cors_origins", "workers", "page", "model_aliases", "default_endpoint",
    ),
    "Keys and TLS": (
        "database", "require_keys", "tls_cert", "tls_key", "tls_client_ca", "probe_tls_client_ca", "jwt_jwks",
        "jwt_issuer", "jwt_audience", "jwt_algorithms", "jwt_leeway", "jwt_subject_claim", "jwt_tenant_claim",
        "jwt_scope_claim", "jwt_endpoints_claim", "jwt_weight_claim", "end_user_header", "guardrail_scorers",
    ),
    "Limits": (
        "max_connections", "max_connections_per_address", "max_queued", "default_max_tokens", "timeout",
        "stream_start_after", "stream_keep_alive", "drain_timeout", "max_resolvers", "resolve_timeout",
        "max_clock_skew", "alias_poll",
    ),
    "Engine": (
        "engine_memory_budget", "scale_to_zero_after", "engine_timeout", "prefix_sharing", "adapter_sources",
    ),
    "Logs and traces": ("log_level", "log_file", "trace_sample", "trace_content", "trace_experiment", "webhook_urls",
        "webhook_secret_file", "budget_alert_at"),
    "MindIE and images": NAMES,
}  # fmt: skip
OTHERS = "Other options"
EXAMPLES = """\
Examples:
  mlflow-llm serve assistant                        the latest version of a registered model
  mlflow-llm serve models:/assistant@champion -C dtype=bfloat16 -C max_num_seqs=32
  mlflow-llm serve ./smollm2=chat ./minilm=embedder --port 9000 --workers 4
  mlflow-llm serve assistant --database sqlite:///serving.db --require-keys
  mlflow-llm serve assistant --host 0.0.0.0 --tls-cert server.pem
  mlflow-llm serve --spec serve.json                `mlflow-llm spec schema` describes the file"""
WIDTH, INDENT = 78, " " * 6


class GroupedCommand(click.Command):
    """A command whose ``--help`` shows its options under the headings of ``GROUPS``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {one.name: one for one in self.get_params(ctx)}
        for heading, names in GROUPS.items():
            records = [left.pop(name).get_help_record(ctx) for name in names if name in left]
            _write(formatter, heading, records)
        _write(formatter, OTHERS, [one.get_help_record(ctx) for one in left.values() if isinstance(one, click.Option)])


def _write(formatter: click.HelpFormatter, heading: str, records: list[tuple[str, str] | None]) -> None:
    if rows := [record for record in records if record is not None]:
        with formatter.section(heading):
            formatter.write_dl(rows)


def settings_help() -> str:
    """Return the engine settings as ``--help`` shows them: default, what is allowed, and the meaning."""
    meanings = EngineSettings.meanings()
    lines = ["\b", "Engine settings (-C KEY=VALUE), with their defaults:"]
    for name, default, allowed in EngineSettings.described():
        if name == "in_process":
            continue
        lines.append(f"  {name} = {json.dumps(default)}: {allowed}")
        lines += textwrap.wrap(first_sentence(meanings[name]), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines)


def serve_epilog() -> str:
    """Return what ``serve --help`` shows after the options."""
    return f"{settings_help()}\n\n\b\n{EXAMPLES}"


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop, and as a sentence."""
    found = re.split(r"(?<=[.;:])\s", text, maxsplit=1)[0] if text else ""
    found = found.rstrip(".;:")
    return f"{found[:1].upper()}{found[1:]}." if found else ""
