"""Images with SmolLM2 as the decoder: a notebook and every API give the text of the whole model's ``generate``."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import mlflow
import numpy as np
import openai
import pytest
import tiny_vision
import torch
from llm_server import WARNINGS_OF_CLIENTS, served
from PIL import Image

from mlflow_llm.flavors import llm

pytestmark = WARNINGS_OF_CLIENTS
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}
SIZES = ((70, 50), (24, 120))
MAX_TOKENS = 16
ASKED = ("What do you see here?", "And here?")


class Reader:
    """A saved model around SmolLM2, and its expected answers."""

    def __init__(self, smollm2_dir: Path, root: Path) -> None:
        self.model = tiny_vision.save_around(smollm2_dir, root / "hf", vision=VISION, tile=64, longest=128)
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(root / "hf", backend="pil")
        llm.save_model(root / "reader", model=root / "hf", link_files=True)
        self.path, self.media = root / "reader", root / "media"
        draw = np.random.default_rng(0)
        self.images = [Image.fromarray(draw.integers(0, 256, (high, wide, 3), dtype=np.uint8)) for wide, high in SIZES]

    def data(self, image: Any, kind: str = "PNG") -> str:
        file = io.BytesIO()
        image.save(file, kind)
        return base64.b64encode(file.getvalue()).decode()

    def url(self, image: Any) -> str:
        return f"data:image/png;base64,{self.data(image)}"

    def messages(self) -> list[dict[str, Any]]:
        """Return a user's message of two texts and two images."""
        parts: list[dict[str, Any]] = []
        for text, image in zip(ASKED, self.images, strict=True):
            parts += [{"type": "image_url", "image_url": {"url": self.url(image)}}, {"type": "text", "text": text}]
        return [{"role": "user", "content": parts}]

    @torch.inference_mode()
    def expected(self) -> tuple[str, int]:
        """Return the expected text and the prompt's number of tokens."""
        content: list[dict[str, str]] = []
        for text in ASKED:
            content += [{"type": "image"}, {"type": "text", "text": text}]
        chat = [{"role": "user", "content": content}]
        text = self.processor.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        given = self.processor(text=[text], images=self.images, return_tensors="pt", add_special_tokens=False)
        found = self.model.generate(**given, max_new_tokens=MAX_TOKENS, do_sample=False)
        size = given["input_ids"].shape[1]
        return self.processor.tokenizer.decode(found[0, size:], skip_special_tokens=True), size


@pytest.fixture(scope="module")
def reader(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(smollm2_dir, tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def server(reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("server")
    reader.media.mkdir()
    reader.images[0].save(reader.media / "one.png")
    with served(root, "-m", str(reader.path), "--name", "reader", "--allowedLocalMediaPath", str(reader.media)) as url:
        yield url


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=240) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_a_notebook(reader: Reader) -> None:
    """``predict``, its stream and the object answer as ``generate`` does, and count the processor's tokens."""
    text, size = reader.expected()
    body = {"messages": reader.messages(), "max_tokens": MAX_TOKENS, "temperature": 0}
    model = mlflow.pyfunc.load_model(str(reader.path))
    whole = model.predict(body)
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"]["prompt_tokens"] == size
    chunks = list(model.predict_stream(body))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == text
    with llm.load_model(str(reader.path)) as assistant:
        reply = assistant.chat(reader.messages(), max_tokens=MAX_TOKENS, temperature=0)
        assert str(reply) == text
        assert reply.usage.prompt_tokens == size
        assert reply.usage.cached_tokens == size - 1  # the same engine has read these images


def test_openai(reader: Reader, server: str) -> None:
    """OpenAI's client gets the expected text and usage, whole and streamed, and a continued conversation reuses its
    prefix."""
    text, size = reader.expected()
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    given: Any = {"model": "reader", "messages": reader.messages(), "max_tokens": MAX_TOKENS, "temperature": 0}
    whole = client.chat.completions.create(**given)
    assert whole.choices[0].message.content == text
    assert whole.usage.prompt_tokens == size
    stream = client.chat.completions.create(**given, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text
    # the conversation continues with another image: the KV of its beginning is reused
    turns = [*given["messages"], {"role": "assistant", "content": text}, *reader.messages()]
    further = client.chat.completions.create(**given | {"messages": turns})
    assert further.usage.prompt_tokens_details.cached_tokens >= size
    alone = client.chat.completions.create(**given | {"messages": [{"role": "user", "content": "Hello!"}]})
    assert alone.usage.prompt_tokens < 40


def test_the_other_apis(reader: Reader, server: str) -> None:
    """The other APIs give the same text and number of prompt tokens."""
    text, size = reader.expected()
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    parts: list[Any] = []
    for asked, image in zip(ASKED, reader.images, strict=True):
        parts += [{"type": "input_image", "image_url": reader.url(image)}, {"type": "input_text", "text": asked}]
    answer = client.responses.create(
        model="reader", input=[{"role": "user", "content": parts}], max_output_tokens=MAX_TOKENS, temperature=0
    )
    assert (answer.output_text, answer.usage.input_tokens) == (text, size)
    blocks: list[Any] = []
    for asked, image in zip(ASKED, reader.images, strict=True):
        source = {"type": "base64", "media_type": "image/png", "data": reader.data(image)}
        blocks += [{"type": "image", "source": source}, {"type": "text", "text": asked}]
    messages: Any = [{"role": "user", "content": blocks}]
    asked = anthropic.Anthropic(base_url=server, api_key="none")
    said = asked.messages.create(
        model="reader", messages=messages, max_tokens=MAX_TOKENS, extra_body={"temperature": 0}
    )
    assert said.content[0].text == text
    assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == size
    assert asked.messages.count_tokens(model="reader", messages=messages).input_tokens == size
    body = {"model": "reader", "messages": reader.messages(), "max_tokens": MAX_TOKENS, "temperature": 0}
    for path in ("/mindie/v1/chat/completions", "/v3/chat/completions", "/serving-endpoints/reader/invocations"):
        found = post(f"{server}{path}", {k: v for k, v in body.items() if k != "model" or "endpoints" not in path})
        assert found["choices"][0]["message"]["content"] == text
        assert found["usage"]["prompt_tokens"] == size
    counted = post(f"{server}/tokenize", {"model": "reader", "messages": reader.messages()})
    assert counted["count"] == size
    assert max(counted["tokens"]) < reader.model.config.text_config.vocab_size


def test_only_allowed_files_are_read(reader: Reader, server: str) -> None:
    """A file below the allowed directory is read; anything else is a 400 that names the part."""

    def ask(url: str) -> tuple[int, dict[str, Any]]:
        part = {"type": "image_url", "image_url": {"url": url}}
        try:
            return 200, post(
                f"{server}/v1/chat/completions",
                {"model": "reader", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1},
            )
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    status, read = ask(f"file://{reader.media}/one.png")
    assert status == 200
    again = ask(reader.url(reader.images[0]))[1]
    assert again["usage"]["prompt_tokens"] == read["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    for url in ("file:///etc/passwd", "http://127.0.0.1:1/cat.png", "data:image/png;base64,aGVsbG8="):
        status, said = ask(url)
        assert status == 400, said
        assert said["error"]["param"].startswith("messages[0].content[0].image_url")
