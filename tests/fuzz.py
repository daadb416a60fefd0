"""Mutated requests to every inference route: none may be answered with an internal error, in another form than the
dialect's, or not at all.

CI sends some of each kind in process (``tests/serving/http/inference/test_fuzz.py``). By hand, against a running
server:

    python tests/fuzz.py --seconds 3600 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

from mlflow_llm.serving.dialects import DIALECTS, Dialect

MODEL = "assistant"
HI = [{"role": "system", "content": "Help."}, {"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SAMPLING = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["zz"], "stream": False}
RAW = "\0raw:"  # a marker for the value after it, which is written verbatim


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A route and a valid request to it. ``tail``: bytes after the JSON (KServe's binary tensors)."""

    dialect: Dialect
    path: str
    body: Mapping[str, Any]
    tail: bytes = b""


def targets() -> Iterator[Target]:
    """Return valid requests to each inference route of each dialect."""
    for dialect in DIALECTS.values():
        for route in dialect.routes:
            path = route.path.replace("<name>", MODEL).replace("<model_version>", "1")
            path = path.replace("<version>", "1")
            for body, tail in bodies(dialect.name, route.path, route.task):
                yield Target(dialect=dialect, path=path, body=body, tail=tail)


def bodies(dialect: str, path: str, task: str | None) -> Iterator[tuple[dict[str, Any], bytes]]:
    if dialect == "kserve":
        yield from tensors()
    elif dialect in ("generate", "triton_generate") or "/generate" in path:
        yield {"id": "a", "text_input": "hello", "parameters": {"details": True, "max_new_tokens": 3, "seed": 1}}, b""
        yield {"text_input": "hello", "max_tokens": 3, "stream": path.endswith("_stream")}, b""
    elif dialect == "anthropic":
        yield {"model": MODEL, "max_tokens": 3, "messages": HI[1:], "system": "Help.", "stream": False}, b""
    elif dialect == "responses":
        tool = {"type": "function", "name": "f", "strict": False, "parameters": {"type": "object"}}
        yield {"model": MODEL, "input": HI, "max_output_tokens": 3, "tools": [tool], "stream": True}, b""
    elif dialect == "rerank":
        yield {"model": MODEL, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}, b""
    else:
        if task in ("chat", None):
            yield {"model": MODEL, "messages": HI, "tools": [TOOL], "tool_choice": "auto", **SAMPLING}, b""
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
            yield {"model": MODEL, "messages": HI, "response_format": form, "max_tokens": 3, "stream": True}, b""
        if task in ("completions", None):
            yield {"model": MODEL, "prompt": ["a", "bc"], "logit_bias": {"5": 1.5}, **SAMPLING}, b""
            form = {"guided_regex": "[ab]{2}", "bad_words": ["x", [5]], "min_tokens": 1, "echo": False, "logprobs": 2}
            yield {"model": MODEL, "prompt": "a", "max_tokens": 3, **form}, b""
            width = {"best_of": 2, "length_penalty": 0.5, "early_stopping": True}
            if dialect != "openvino":
                width["use_beam_search"] = True
            yield {"model": MODEL, "prompt": [5, 6], "max_tokens": 3, "no_repeat_ngram_size": 2, **width}, b""
        if task in ("embeddings", None):
            yield {"model": MODEL, "input": ["a", "b"], "encoding_format": "base64"}, b""
        if task == "score":
            yield {"model": MODEL, "text_1": "a", "text_2": ["b", "c"]}, b""


def tensors() -> Iterator[tuple[dict[str, Any], bytes]]:
    """Return KServe's requests, in JSON and with trailing bytes."""
    ids = {"name": "input_ids", "datatype": "INT32", "shape": [1, 3]}
    length = {"name": "request_output_len", "datatype": "INT32", "shape": [1, 1], "data": [3]}
    words = {"name": "stop_words_list", "datatype": "INT32", "shape": [1, 2, 2], "data": [5, 6, 2, -1]}
    heat = {"name": "temperature", "datatype": "FP32", "shape": [1], "data": [0.5]}
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}
    wanted = [{"name": "output_ids", "parameters": {"binary_data": True}}]
    yield {"id": "a", "inputs": [{**ids, "data": [1, 2, 3]}, length, words, heat], "outputs": wanted}, b""
    yield {"inputs": [text, length], "parameters": {"binary_data_output": True}}, b""
    binary = {**ids, "parameters": {"binary_data_size": 12}}
    yield {"inputs": [binary, length, heat]}, bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
    spelled = {**text, "parameters": {"binary_data_size": 9}}
    del spelled["data"]
    yield {"inputs": [spelled, length]}, b"\x05\0\0\0hello"


# --- mutations of a valid request

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308, 1e-320,
    "", "a", "\0", "\ud800", "é\u2028\U0001f600", "x" * 3000, "{{ 7 * 7 }}", "</s>", [], {}, [[]], [None], [0], [-1],
    [""], {"": 0}, {"a": {"a": {}}}, list(range(300)), "NaN", "assistant", "stream", RAW + "NaN", RAW + "Infinity",
    RAW + "-Infinity", RAW + "1e999", RAW + "1" * 400, RAW + "[" * 300 + "]" * 300, RAW + "01", RAW + "'a'", RAW + "",
)  # fmt: skip
BYTES = (
    b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"{", b"}", b"[", b'"', b",", b":", b"\\", b"\\ud800", b"\xef\xbb\xbf",
)  # fmt: skip
NAMES = (
    "model", "stream", "n", "best_of", "messages", "prompt", "input", "logprobs", "echo", "tools", "stop", "seed",
    "data", "shape", "datatype", "parameters", "lora_task_id", "beam_width", "temperature", "priority", "__proto__", "",
)  # fmt: skip


class Mutator:
    """A source of nearly valid requests, drawn by a seed."""

    def __init__(self, seed: int | str) -> None:
        self.draw = random.Random(seed)

    def request(self, target: Target) -> tuple[bytes, dict[str, str]]:
        """Return a body and the headers that it needs."""
        value: Any = json.loads(json.dumps(target.body))
        for _ in range(self.draw.choice((1, 1, 1, 1, 2, 3))):
            value = self.changed(value)
        head = self._written(value)
        tail = target.tail
        if self.draw.random() < 0.1:
            head = self._torn(head)
        if tail and self.draw.random() < 0.4:
            tail = self._torn(tail)
        headers = {"Content-Type": "application/json"}
        if target.tail or (target.dialect.name == "kserve" and self.draw.random() < 0.1):
            headers["Content-Type"] = "application/octet-stream"
            lie = self.draw.choice((0, 0, 0, 0, 1, -1, 5, 10**6))
            headers["Inference-Header-Content-Length"] = str(len(head) + lie)
        if self.draw.random() < 0.02:
            headers["Content-Type"] = self.draw.choice(("text/plain", "application/json; charset=utf-16", "x"))
        return head + tail, headers

    def changed(self, value: Any) -> Any:
        """Return ``value`` with one change somewhere in it."""
        draw = self.draw
        if isinstance(value, dict) and value and draw.random() < 0.9:
            name = draw.choice(list(value))
            act = draw.random()
            if act < 0.12:
                return {one: kept for one, kept in value.items() if one != name}
            if act < 0.2:
                return {**value, draw.choice(NAMES): draw.choice(VALUES)}
            if act < 0.24:
                return {(draw.choice(NAMES) if one == name else one): kept for one, kept in value.items()}
            return {**value, name: self.changed(value[name])}
        if isinstance(value, list) and value and draw.random() < 0.85:
            place = draw.randrange(len(value))
            act = draw.random()
            if act < 0.15:
                return value[:place] + value[place + 1 :]
            if act < 0.3:
                return value[:place] + [value[place]] * draw.choice((2, 3, 200)) + value[place:]
            return [*value[:place], self.changed(value[place]), *value[place + 1 :]]
        return self._near(value) if draw.random() < 0.6 else draw.choice(VALUES)

    def _near(self, value: Any) -> Any:
        """Return a value of the same kind, which may well be valid."""
        draw = self.draw
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return draw.choice((0, 1, value + 1, value * 2, value * 10, -value))
        if isinstance(value, float):
            return draw.choice((0, 1, value / 2, value * 2, value + 0.1, 1e-6))
        if isinstance(value, str):
            return draw.choice((value * 2, value[:1], value + "é", value + " </s>", "{{ 7 * 7 }}", "x" * 200, "\n"))
        return draw.choice(VALUES)

    def _written(self, value: Any) -> bytes:
        text = json.dumps(value, ensure_ascii=self.draw.random() < 0.8)
        while (start := text.find('"\\u0000raw:')) >= 0:
            end = text.index('"', start + 1)
            text = text[:start] + text[start + len('"\\u0000raw:') : end] + text[end + 1 :]
        if self.draw.random() < 0.03 and text.startswith('{"'):
            text = text[:-1] + ", " + text[1:]  # duplicates every key
        return text.encode("utf-8", "surrogatepass")

    def _torn(self, data: bytes) -> bytes:
        draw = self.draw
        place = draw.randrange(len(data) + 1)
        act = draw.randrange(4)
        if act == 0:
            return data[:place]
        if act == 1:
            return data[:place] + draw.choice(BYTES) + data[place:]
        if act == 2:
            return data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
        return data[:place] + data[place : place + 40] * 2 + data[place:]


# --- checks of an answer


def fault(target: Target, status: int, headers: Mapping[str, str], data: bytes) -> str | None:
    """Return the error found in an answer, or None for a correct one."""
    if status >= 500:
        return f"a fault: {status} {data[:300]!r}"
    if status == 200:
        return "a stream that ends in a fault of ours" if b"internal error" in data[-600:] else None
    try:
        body = json.loads(data)
        jsonschema.validate(body, target.dialect.error_schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{status} in another form than {target.dialect.name}'s: {data[:300]!r} ({str(error)[:100]})"
    if b"Traceback" in data or b'File \\"' in data:
        return f"a stack trace: {data[:300]!r}"
    return None


# --- by hand, against a running server


def run(url: tuple[str, int], seconds: float, seed: int, at_once: int, limit: float) -> tuple[Counter[int], list[str]]:
    """Send requests for ``seconds``, each by a draw of its own; return the statuses, and what was wrong. A request
    without an answer for ``limit`` seconds hangs."""
    every = list(targets())
    until = time.monotonic() + seconds
    statuses: Counter[int] = Counter()
    wrong: list[str] = []

    def work(worker: int) -> None:
        place = 0
        while time.monotonic() < until and len(wrong) < 50:
            place += at_once
            number = place + worker
            target = every[number % len(every)]
            body, headers = Mutator(f"{seed}-{number}").request(target)
            try:
                status, found = send(url, target, body, headers, limit)
            except (OSError, http.client.HTTPException) as error:
                wrong.append(f"#{number} {target.path}: {error!r}\n  {headers} {body[:600]!r}")
                continue
            statuses[status] += 1
            if found:
                wrong.append(f"#{number} {target.path}: {found}\n  {headers} {body[:600]!r}")

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(work, worker) for worker in range(at_once)]:
            done.result()
    return statuses, wrong


def send(
    url: tuple[str, int], target: Target, body: bytes, headers: Mapping[str, str], limit: float
) -> tuple[int, str | None]:
    with contextlib.closing(http.client.HTTPConnection(*url, timeout=limit)) as connection:
        connection.request("POST", target.path, body, dict(headers))
        answer = connection.getresponse()
        data = answer.read()
    return answer.status, fault(target, answer.status, dict(answer.headers), data)


def tiny_bundle(root: Path) -> Any:
    """Save a random Llama with the byte tokenizer, for which the engine has all its features."""
    import tiny_models
    import transformers
    from instant_model import write_instant_model

    named = write_instant_model(root / "named")
    config = transformers.LlamaConfig(**tiny_models.COMMON | {"vocab_size": 259, "hidden_size": 64})
    tiny_models.make_model(config).save_pretrained(root / "weights")
    return msgspec.structs.replace(
        named, content_hash="fuzz", tasks=("chat", "completions"), model_dir=str(root / "weights"), adapters={}
    )


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent / "serving"))
    from instant_model import write_instant_model
    from serving_process import INSTANT_CORE, running

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=120)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--at-once", type=int, default=8)
    options.add_argument("--limit", type=float, default=60, help="seconds without an answer that are a hang")
    options.add_argument(
        "--engine", choices=("tiny", "instant"), default="tiny", help="ours with random weights, or none"
    )
    given = options.parse_args()
    started: Callable[..., Any] = running
    with tempfile.TemporaryDirectory() as root:
        is_tiny = given.engine == "tiny"
        bundle = tiny_bundle(Path(root)) if is_tiny else write_instant_model(Path(root), max_model_len=4096)
        with started(bundle, core=None if is_tiny else INSTANT_CORE, refusals_per_minute=0) as server:
            statuses, wrong = run(("127.0.0.1", server.port), given.seconds, given.seed, given.at_once, given.limit)
            log = server.log()
    print(dict(sorted(statuses.items())), f"{len(wrong)} wrong")
    print("\n".join(wrong[:50]))
    if "Traceback" in log:
        print("the log has a stack trace:", log[log.index("Traceback") :][:4000])
    return int(bool(wrong) or "Traceback" in log)


if __name__ == "__main__":
    sys.exit(main())
