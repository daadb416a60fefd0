"""Words of other programs that people type here, and what to write instead.

Flags of ``vllm serve`` and ``ollama run``/``serve``, commands of both, and settings under other names. A flag without a
counterpart is left out, so that an unknown word never gets advice that is wrong; for those of ``vllm serve`` that are
known, ``vllm_only.py`` has the reason.
"""

from __future__ import annotations

from typing import Any

import click

from .vllm_only import NO_COUNTERPART, NO_EFFECT

CONFIG = {  # engine settings by the names that other programs have for them
    "block_size": "kv_block_size",
    "context_length": "max_model_len",
    "ctx_size": "max_model_len",
    "gpu_memory_utilization": "kv_cache_memory",
    "keep_alive": "idle_timeout",
    "keepalive": "idle_timeout",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "kv_cache_type": "kv_cache_dtype",
    "max_batch_size": "max_num_seqs",
    "max_cpu_loras": "adapter_host_memory",
    "max_loras": "max_adapters",
    "max_parallel": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "mm_processor_cache_gb": "encoder_cache",
    "num_ctx": "max_model_len",
    "num_parallel": "max_num_seqs",
    "num_thread": "threads",
    "speculative_config": "draft_model",
    "speculative_model": "draft_model",
}
VALUES = {  # what of such a setting is not only its name
    "gpu_memory_utilization": "a number of bytes, such as 8GiB",
    "mm_processor_cache_gb": "a number of bytes, such as 4GiB",
    "keep_alive": "seconds",
    "keepalive": "seconds",
    "speculative_config": "the model's directory or URI",
}
SERVE = {  # flags of ``serve``, without the settings above
    "--allowed-local-media-path": "--allowedLocalMediaPath",
    "--allowed-media-domains": "--allowedMediaDomains",
    "--allowed-origins": "--cors-origin",
    "--api-key": "--require-keys, with keys made by `mlflow-llm keys create`",
    "--api-server-count": "--workers",
    "--chat-template": "llm.log_model(chat_template=…): the template is logged with the model",
    "--config": "--spec FILE, or -C KEY=VALUE for an engine setting",
    "--default-chat-template-kwargs": "-D chat_template_kwargs=…",
    "--disable-log-requests": "--log-level warning",
    "--disable-uvicorn-access-log": "--log-level warning",
    "--download-dir": "the variable MLFLOW_LLM_CACHE",
    "--enable-auto-tool-choice": "nothing: tools work without it",
    "--enable-lora": "nothing: adapters are logged with the model, and a request names one as NAME:ADAPTER",
    "--enable-prefix-caching": "nothing: it is on; -C prefix_caching=false turns it off",
    "--enable-sleep-mode": "--scale-to-zero-after",
    "--enforce-eager": "-C cuda_graphs=none",
    "--generation-config": "-D FIELD=VALUE for each default",
    "--lora-modules": "llm.log_model(adapters={…}), or --adapter-sources to load them over HTTP",
    "--max-queue": "--max-queued",
    "--no-enable-prefix-caching": "-C prefix_caching=false",
    "--otlp-traces-endpoint": "--trace-sample",
    "--override-generation-config": "-D FIELD=VALUE for each default",
    "--revision": "llm.log_model(model=…, revision=…), and serve that model",
    "--seed": "-D seed=…",
    "--served-model-name": "--name NAME, or MODEL=NAME",
    "--ssl-ca-certs": "--tls-client-ca",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--tool-call-parser": "nothing: the format of calls follows from the chat template",
    "--uds": "--socket",
    "--uvicorn-log-level": "--log-level",
}
CHAT = {"--format": "--schema", "--verbose": "--stats", "--api-key": "--key", "--base-url": "--url"}
COMMANDS = {
    "complete": "mlflow-llm chat MESSAGE",
    "create": "llm.log_model(model=…) in Python, or mlflow-llm serve MODEL, which logs it into the cache",
    "delete": "mlflow-llm rm NAME, or mlflow-llm endpoints delete NAME",
    "kill": "mlflow-llm stop NAME",
    "list": "mlflow-llm models",
    "ls": "mlflow-llm models",
    "prune": "mlflow-llm models prune",
    "remove": "mlflow-llm rm NAME",
    "run-batch": "mlflow-llm batch",
    "show": "mlflow-llm doctor -m MODEL",
    "start": "mlflow-llm serve MODEL",
    "status": "mlflow-llm ps",
}
LIMITS = {
    "concurrency": "in_flight",
    "concurrent": "in_flight",
    "max_budget": "budget",
    "max_parallel_requests": "in_flight",
    "rph": "qph",
    "rpm": "qpm",
    "tpm": "itpm for input tokens and otpm for output tokens",
}


def for_option(command: click.Command, flag: str) -> str | None:
    """Return what to write instead of an option that ``command`` does not have; None if nothing is known to fit."""
    options = {name for one in command.params for name in one.opts}
    name = flag.lstrip("-").replace("-", "_").lower()
    if "--config" in options and (setting := for_setting(name)):
        return setting
    instead = SERVE.get(flag) if "--tls-cert" in options else CHAT.get(flag) if "--temperature" in options else None
    first = instead.split()[0].rstrip(",") if instead else ""
    return instead if not first.startswith("--") or first in options else None


def why_absent(command: click.Command, flag: str) -> str | None:
    """Return why ``serve`` has no option for a flag of vLLM, or needs none; None for a flag that is not known."""
    if all("--tls-cert" not in one.opts for one in command.params):
        return None
    if flag in NO_EFFECT:
        return f"it is not needed: {NO_EFFECT[flag]}"
    return NO_COUNTERPART.get(flag)


def for_setting(name: str) -> str | None:
    """Return the ``-C`` for an engine setting by its own name or another program's; None if there is no such one."""
    from ..interface.settings import EngineSettings

    plain = name.replace("-", "_").lower()
    own = CONFIG.get(plain, plain)
    if own not in EngineSettings.__struct_fields__ or own == "in_process":
        return None
    meant = VALUES.get(plain)
    return f"-C {own}={'…' if meant is None else f'… ({meant})'}"


def for_limit(kind: str) -> str | None:
    """Return our kind of limit for another program's name of it."""
    return LIMITS.get(kind.lower())


class AdvisingGroup(click.Group):
    """A group that says what to write instead of options and commands that only other programs have."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            command = error.ctx.command if error.ctx is not None else self
            if (advice := for_option(command, error.option_name)) is not None:
                text = f"No such option: {error.option_name}; write {advice}"
                raise click.UsageError(text, error.ctx) from None
            if (reason := why_absent(command, error.option_name)) is not None:
                raise click.UsageError(f"No such option: {error.option_name}; {reason}", error.ctx) from None
            raise

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if args and args[0] in COMMANDS:
                raise click.UsageError(f"No such command {args[0]!r}; write {COMMANDS[args[0]]}", ctx) from None
            raise
