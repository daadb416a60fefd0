"""``mlflow-llm import vllm``: each flag is taken, needs nothing, or is named; what is printed and written is served."""

from __future__ import annotations

import shlex
from pathlib import Path

import mlflow
import pytest
from click.testing import CliRunner, Result
from flavor_models import TEMPLATE, add_lora, byte_tokenizer, tiny_llama
from stores import empty_store, own_stores

from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli import advice, cli
from mlflow_llm.serving.cli.convert import vllm_flags
from mlflow_llm.serving.cli.convert.vllm_command import read
from mlflow_llm.serving.cli.serve.command import serve
from mlflow_llm.serving.cli.serve.spec_files import read_serve_spec

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]

FLAGS = [  # of vLLM, and what is said of each
    ("--max-model-len 4096", "taken: --max-model-len 4096: -C max_model_len=4096"),
    ("--max_model_len=4k", "taken: --max-model-len 4k: -C max_model_len=4000"),
    ("--max-model-len 1.5K", "-C max_model_len=1536"),
    ("--max-model-len auto", "nothing to do: --max-model-len auto: the model's own length"),
    ("--max-model-len long", "not taken: --max-model-len long: expected a number"),
    ("--max-num-seqs 0", "not taken: --max-num-seqs 0: max_num_seqs: 0 is not allowed"),
    ("--dtype half", "taken: --dtype half: -C dtype=float16"),
    ("--dtype auto", "nothing to do: --dtype auto: the default"),
    ("--kv-cache-dtype fp8_e4m3", "-C kv_cache_dtype=int8"),
    ("-q awq", "nothing to do: --quantization awq: the checkpoint's own quantization"),
    ("--quantization fp8", "-C quantization=fp8"),
    ("--gpu-memory-utilization 0.9", "not taken: --gpu-memory-utilization 0.9: a share of the GPU"),
    ("-tp 2", "not taken: --tensor-parallel-size 2: an engine uses one device"),
    ("--trust-remote-code", "-C trust_remote_code=true"),
    ("--enforce-eager", "-C cuda_graphs=none"),
    ("--no-enable-prefix-caching", "-C prefix_caching=false"),
    ("--enable-prefix-caching", "nothing to do: --enable-prefix-caching: it is on"),
    ("--enable-lora", "nothing to do: --enable-lora: adapters are logged with the model"),
    ("--max-lora-rank 64", "nothing to do: --max-lora-rank 64: adapters of any rank"),
    ("--max-loras 4", "-C max_adapters=4"),
    ("--max-cpu-loras 4", "not taken: --max-cpu-loras 4: a number of adapters"),
    ("--mm-processor-cache-gb 0.5", "-C encoder_cache=536870912"),
    ("--seed 4", "taken: --seed 4: -D seed=4"),
    ("""--override-generation-config '{"temperature": 0.2, "num_beams": 2}'""", "-D temperature=0.2; without effect:"),
    ("--override-generation-config.max_new_tokens 8", "-D max_tokens=8"),
    ("--default-chat-template-kwargs.enable_thinking false", '-D chat_template_kwargs={"enable_thinking": false}'),
    ("--generation-config auto", "nothing to do: --generation-config auto: the default"),
    ("--generation-config folder", "not taken: --generation-config folder: log the model with"),
    ("""--speculative-config '{"model": "org/small", "num_speculative_tokens": 3}'""", "-C draft_model=org/small"),
    ("""--speculative-config '{"method": "ngram"}'""", "expected a draft model"),
    ("--host 0.0.0.0 --port 9000", "taken: --port 9000: --port 9000"),
    ("--port many", "not taken: --port many: "),
    ("--uds /tmp/x", "--socket /tmp/x"),
    ("--ssl-certfile a.pem --ssl-keyfile b.pem", "taken: --ssl-keyfile b.pem: --tls-key b.pem"),
    ("""--allowed-origins '["https://a.example"]'""", "--cors-origin https://a.example"),
    ("--allowed-media-domains a.example b.example", "--allowedMediaDomains a.example,b.example"),
    ("--uvicorn-log-level trace", "--log-level debug"),
    ("--api-server-count 2", "--workers 2"),
    ("--api-key secret", "not taken: --api-key …: --require-keys"),
    ("--tool-call-parser hermes --enable-auto-tool-choice", "--enable-auto-tool-choice: tools work without"),
    ("--reasoning-parser qwen3", "nothing to do: --reasoning-parser qwen3"),
    ("--otlp-traces-endpoint x", "not taken: --otlp-traces-endpoint x: --trace-sample"),
    ("--middleware a.b", "not taken: --middleware a.b: code of others"),
    ("--from-the-future 3", "not taken: --from-the-future 3: it is not known here"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "said"), FLAGS, ids=[flags for flags, _ in FLAGS])
def test_each_flag_is_named(flags: str, said: str) -> None:
    """A flag is taken with its value converted, needs nothing, or is named with the reason; what is taken is accepted
    by ``serve``."""
    found = read(shlex.split(f"vllm serve org/model {flags}"))
    assert any(said in str(line) for line in found.lines), "\n".join(map(str, found.lines))
    assert len(found.lines) == sum(word.startswith("-") for word in shlex.split(flags))
    serve.make_context("serve", found.serve(found.model))


@pytest.mark.parametrize("flag", sorted(vllm_flags.SWITCHED))
def test_each_switch_is_taken(flag: str) -> None:
    """A flag without a value that has a counterpart is taken, in words that ``serve`` accepts."""
    (line,) = read(["vllm", "serve", "org/model", flag]).lines
    assert str(line).startswith(f"taken: {flag}: {' '.join(vllm_flags.SWITCHED[flag])}")


def test_no_advised_flag_is_unknown() -> None:
    """Each flag for which ``serve`` has advice is known to the importer too, with or without a conversion."""
    settings = {f"--{name.replace('_', '-')}" for name in advice.CONFIG} - {"--speculative-model"}
    of_others = {"--ctx-size", "--context-length", "--keep-alive", "--keepalive", "--kv-cache-type", "--max-batch-size"}
    of_others |= {"--max-parallel", "--max-seq-len", "--num-ctx", "--num-parallel", "--num-thread", "--max-queue"}
    for flag in sorted({*advice.SERVE, *settings, *vllm_flags.SWITCHES} - of_others):
        value = "" if flag in vllm_flags.SWITCHES or flag.startswith("--no-") else "a=1"
        [line] = read(["vllm", "serve", "m", flag, *value.split()]).lines
        assert "not known here" not in line.note or flag in vllm_flags.SWITCHES, flag


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["import", "vllm", *words])


def test_the_command_is_printed() -> None:
    """The command stands alone on standard output, with clients' names of the model as aliases."""
    done = run("VLLM_API_KEY=secret vllm serve org/model \\\n--port 9000 --served-model-name org/chat gpt")
    assert done.stdout == (
        "mlflow-llm serve -m org/model=chat --model-alias org/chat=chat --model-alias gpt=chat --port 9000\n"
    )
    assert "not taken: VLLM_API_KEY: variables of vLLM are not read" in done.stderr
    assert "secret" not in done.output
    assert "vLLM listens on every address, this server on 127.0.0.1" in done.stderr
    words = run("--", "python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model", "--host", "::")
    assert words.stdout == "mlflow-llm serve -m org/model=model --model-alias org/model=model --host ::\n"
    assert "listens on every address" not in words.stderr


def test_what_is_logged_is_said() -> None:
    """Adapters, template and revision belong to a logged model: the call is printed, and the adapters' names stay."""
    done = run("""vllm serve org/model --lora-modules a=x '{"name": "b", "path": "y"}' --revision v2""")
    call, command = done.stdout.splitlines()
    assert call.startswith("# llm.log_model('org/model', name='model', adapters={'a': 'x', 'b': 'y'}, revision='v2', ")
    assert command == (
        "mlflow-llm serve -m models:/model/latest=model --model-alias org/model=model --model-alias a=model:a"
        " --model-alias b=model:b"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ollama serve", 'expected a command such as "vllm serve MODEL'),
        ("vllm serve", "the command names no model"),
        ("vllm serve a b", "the command names two models, a and b"),
        ("vllm serve a --lora-modules x", "--lora-modules x: expected NAME=PATH"),
        ("vllm serve 'a", "No closing quotation"),
    ],
)
def test_other_lines_are_refused(line: str, message: str) -> None:
    """A line that is no command of vLLM's is a usage error."""
    done = run(line)
    assert done.exit_code == 2
    assert message in done.output


def test_a_spec_is_written_and_read(tmp_path: Path) -> None:
    """With --register the model is logged with its adapters, and --spec writes a file that serve reads: endpoint,
    adapters, settings and defaults."""
    folder = tmp_path / "tiny"
    tiny_llama().save_pretrained(folder)
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained(folder)
    add_lora(tiny_llama()).save_pretrained(tmp_path / "formal")
    line = f"vllm serve {folder} --lora-modules formal={tmp_path}/formal --max-model-len 64 --seed 4 --port 9000"
    spec = tmp_path / "serve.json"
    refused = run(line, "--spec", str(spec))
    assert (refused.exit_code, spec.exists()) == (2, False)
    assert "the model is to be logged first: give --register NAME" in refused.output
    with own_stores(empty_store(tmp_path)):
        done = run(line, "--spec", str(spec), "--register", "chat")
        assert done.exit_code == 0, done.output
        assert "mlflow-llm serve -m models:/chat/1=tiny" in done.stdout
        assert llm.load_bundle("models:/chat/1").adapters.keys() == {"formal"}
        assert mlflow.MlflowClient().get_model_version("chat", "1").name == "chat"
    found = read_serve_spec(str(spec))
    [endpoint] = found.endpoints
    assert (endpoint.name, endpoint.engine.max_model_len, endpoint.defaults["seed"]) == ("tiny", 64, 4)
    assert found.settings.port == 9000
    assert found.settings.model_aliases[str(folder)] == "tiny"
    assert found.settings.model_aliases["formal"] == "tiny:formal"
    assert endpoint.bundle.adapters.keys() == {"formal"}
