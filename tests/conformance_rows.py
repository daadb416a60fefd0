"""The rows of the conformance table: a request for each field of each document, and its expected effect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from conformance import WHOLE, Mode, Part, Row, Seen, events_of, is_stream
from conformance_tensors import PART as TENSORS

HI = [{"role": "user", "content": "Count: one, two, three,"}]
PROMPT = "One, two, three, four,"
LENGTH = 6
GREEDY = {"max_tokens": LENGTH, "temperature": 0, "seed": 5}
TOKEN = 28  # a comma, of SmolLM2
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
ROUND = [
    {"role": "user", "content": "Add."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# --- expected effects


def as_plain(seen: Seen, plain: Seen) -> bool:
    return seen.texts == plain.texts


def unlike_plain(seen: Seen, plain: Seen) -> bool:
    return seen.texts != plain.texts


def without_repeats(seen: Seen, plain: Seen) -> bool:
    words = re.findall(r" ?\S+", seen.text)  # the space before a word is a part of its token
    return seen.completion > LENGTH and len(set(words)) == len(words)


def matches(pattern: str) -> Callable[[Seen, Seen], bool]:
    return lambda seen, plain: re.fullmatch(pattern, seen.text, re.DOTALL) is not None


def tokens(count: int) -> Callable[[Seen, Seen], bool]:
    return lambda seen, plain: seen.completion == count


def choices(count: int) -> Callable[[Seen, Seen], bool]:
    return lambda seen, plain: len(seen.texts) == count


def has(name: str) -> Callable[[Seen, Seen], bool]:
    """Return whether an object of the answer has something under ``name``."""
    return lambda seen, plain: any(_find(event, name) for event in seen.events)


def _find(found: Any, name: str) -> bool:
    if isinstance(found, dict):
        return bool(found.get(name)) or any(_find(value, name) for value in found.values())
    return isinstance(found, list) and any(_find(entry, name) for entry in found)


# --- rows that parts share

BEAMS = {"use_beam_search": True, "best_of": 2}
SAMPLING: dict[str, Row] = {
    "model": Row(body={"model": "assistant"}, shows=lambda seen, plain: seen.first["model"] == "assistant"),
    "stream": Row(body={}),
    "stream_options": Row(body={}, modes=("stream",), shows=has("usage")),
    "max_tokens": Row(body={"max_tokens": 3}, shows=tokens(3)),
    "temperature": Row(body={"temperature": 2.0}, shows=unlike_plain),
    "top_p": Row(body={"temperature": 2.0, "top_p": 0.0001}, shows=as_plain),
    "top_k": Row(body={"temperature": 2.0, "top_k": 1}, shows=as_plain),
    "min_p": Row(body={"temperature": 2.0, "min_p": 1.0}, shows=as_plain),
    "typical_p": Row(body={"temperature": 2.0, "typical_p": 0.5}),
    "seed": Row(body={"temperature": 2.0, "seed": 11}, shows=unlike_plain),
    "n": Row(body={"n": 2}, shows=choices(2), endpoint="reserved", note="on provisioned endpoints"),
    "stop": Row(body={"stop": ["e"], "max_tokens": 12}, shows=lambda seen, plain: "e" not in seen.text),
    "presence_penalty": Row(body={"presence_penalty": 2.0}),
    "frequency_penalty": Row(body={"frequency_penalty": 2.0}),
    "repetition_penalty": Row(body={"repetition_penalty": 0.1}, shows=unlike_plain),  # the earlier text is repeated
    "logit_bias": Row(body={"logit_bias": {TOKEN: 100}}, shows=matches(",+")),
    "min_tokens": Row(body={"min_tokens": LENGTH}, shows=tokens(LENGTH)),
    "stop_token_ids": Row(
        body={"stop_token_ids": [TOKEN], "max_tokens": 12}, shows=lambda seen, plain: "," not in seen.text
    ),
    "bad_words": Row(body={"bad_words": [","]}, shows=lambda seen, plain: "," not in seen.text),
    "no_repeat_ngram_size": Row(body={"no_repeat_ngram_size": 1, "max_tokens": 24}, shows=without_repeats),
    "ignore_eos": Row(body={"ignore_eos": True, "max_tokens": 40}, shows=tokens(40)),
    "include_stop_str_in_output": Row(
        body={"stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 12}, shows=matches("[^e]*e")
    ),
    "skip_special_tokens": Row(
        body={"skip_special_tokens": False, "logit_bias": {0: 100}, "ignore_eos": True},
        shows=matches("(<.endoftext.>)+"),
    ),
    "timeout": Row(body={"timeout": 600}),
    "use_beam_search": Row(body=BEAMS),
    "best_of": Row(body=BEAMS),
    "length_penalty": Row(body={**BEAMS, "length_penalty": 0.5}),
    "early_stopping": Row(body={**BEAMS, "early_stopping": True}),
    "num_beam_groups": Row(body={**BEAMS, "num_beam_groups": 2}),
    "diversity_penalty": Row(body={**BEAMS, "num_beam_groups": 2, "diversity_penalty": 1.0}),
    "response_format": Row(
        body={
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "max_tokens": 30,
        },
        shows=lambda seen, plain: json.loads(seen.text) == {"a": 1},
    ),
    "structured_outputs": Row(body={"structured_outputs": {"choice": ["yes", "no"]}}, shows=matches("yes|no")),
    "guided_json": Row(
        body={"guided_json": SCHEMA, "max_tokens": 30}, shows=lambda seen, plain: json.loads(seen.text) == {"a": 1}
    ),
    "guided_regex": Row(body={"guided_regex": "[ab]{3}"}, shows=matches("[ab]{3}")),
    "guided_choice": Row(body={"guided_choice": ["yes", "no"]}, shows=matches("yes|no")),
    "guided_grammar": Row(body={"guided_grammar": 'start: "yes"'}, shows=matches("yes")),
    "guided_decoding_backend": Row(
        body={"guided_decoding_backend": "guidance", "guided_regex": "a"}, shows=matches("a")
    ),
    "user": Row(body={"user": "u"}, note="kept in log and ledger"),
    "cache_salt": Row(body={"cache_salt": "own"}, shows=as_plain),
    "metadata": Row(body={"metadata": {"a": "b"}}, shows=as_plain, note="labels, kept in log and ledger"),
    "store": Row(body={"store": True}, refused="completions are not stored", note="false is taken"),
    "service_tier": Row(body={"service_tier": "flex"}, refused="there is one tier", note="auto and default are taken"),
    "prompt_cache_key": Row(body={"prompt_cache_key": "k"}, shows=as_plain, note="the prefix cache needs no hint"),
    "prompt_cache_retention": Row(
        body={"prompt_cache_retention": "24h"}, shows=as_plain, note="prefixes stay while there is room"
    ),
    "safety_identifier": Row(body={"safety_identifier": "s"}, shows=as_plain, note="kept in log and ledger"),
    "modalities": Row(body={"modalities": ["audio"]}, refused="the model writes text", note='["text"] is taken'),
    "functions": Row(body={"functions": [{"name": "f"}]}, refused="the newer tools and tool_choice say the same"),
    "function_call": Row(body={"function_call": {"name": "f"}}, refused="the newer tools and tool_choice say the same"),
    "audio": Row(body={"audio": {"voice": "a"}}, refused="the model writes text only"),
    "verbosity": Row(body={"verbosity": "low"}, refused="the model has no such setting", note="medium is taken"),
    "web_search_options": Row(body={"web_search_options": {"a": 1}}, refused="web search is not supported"),
    "guided_whitespace_pattern": Row(
        body={"guided_whitespace_pattern": "x"}, refused="the white space of JSON is compact"
    ),
    "watermark": Row(body={"watermark": True}, refused="watermarks are not supported"),
}


def _media(name: str, data: str, note: str = "") -> Row:
    """Return a part that a text-only model refuses when it is well-formed."""
    content = [{"type": "text", "text": "What?"}, {"type": name, name: {"url": data}}]
    return Row(
        body={"messages": [{"role": "user", "content": content}]},
        refused="this model reads text only",
        named="messages[0].content[1].type",
        note=note,
    )


_IMAGE = _media("image_url", "data:image/png;base64,aGk=", "models that read images take it")
CHAT: dict[str, Row] = {
    "messages": Row(body={}, shows=lambda seen, plain: seen.text),
    "messages[].role": Row(body={"messages": [{"role": "system", "content": "Be short."}, *HI]}),
    "messages[].content": Row(body={"messages": [{"role": "user", "content": "Say yes."}]}, shows=unlike_plain),
    "messages[].content[].image_url": _IMAGE,
    "messages[].tool_calls": Row(body={"messages": ROUND, "tools": [TOOL]}),
    "messages[].tool_call_id": Row(body={"messages": ROUND, "tools": [TOOL]}),
    "max_completion_tokens": Row(body={"max_tokens": None, "max_completion_tokens": 3}, shows=tokens(3)),
    "logprobs": Row(body={"logprobs": True}, shows=has("logprobs")),
    "top_logprobs": Row(body={"logprobs": True, "top_logprobs": 2}, shows=has("top_logprobs")),
    "tools": Row(body={"tools": [TOOL]}),
    "tool_choice": Row(body={"tools": [TOOL], "tool_choice": "required", "max_tokens": 40}, shows=has("tool_calls")),
    "parallel_tool_calls": Row(body={"tools": [TOOL], "parallel_tool_calls": False}),
    "prediction": Row(
        body={"prediction": {"type": "content", "content": "x"}},
        shows=as_plain,
        note="what comes of it is computed several tokens at a time",
    ),
    "chat_template": Row(body={"chat_template": "default"}, shows=as_plain),
    "chat_template_kwargs": Row(
        body={"chat_template_kwargs": {"enable_thinking": False}},
        refused="variables that this template reads",
        note="those are taken; SmolLM2's reads none",
    ),
    "reasoning_effort": Row(
        body={"reasoning_effort": "high"},
        refused="this model's chat template does not read reasoning_effort",
        note="those that read it get it; none is taken, except by models that always reason",
    ),
    "add_generation_prompt": Row(body={"add_generation_prompt": False}, shows=unlike_plain),
    "continue_final_message": Row(
        body={
            "messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one, two,"}],
            "continue_final_message": True,
        },
        shows=lambda seen, plain: seen.text.startswith(" "),
    ),
}
TEXT: dict[str, Row] = {
    "prompt": Row(body={}, shows=lambda seen, plain: seen.text),
    "suffix": Row(body={"suffix": "!"}, shows=matches(".*!")),
    "echo": Row(body={"echo": True}, shows=lambda seen, plain: seen.text.startswith(PROMPT)),
    "logprobs": Row(body={"logprobs": 2}, shows=has("logprobs")),
    "parallel_tool_calls": Row(body={"parallel_tool_calls": False}, shows=as_plain, note="there are no tools"),
    "prediction": Row(
        body={"prediction": {"type": "content", "content": "x"}}, refused="replies are predicted in chats"
    ),
    "tools": Row(body={"tools": [TOOL]}, refused="tools are called in chats"),
    "reasoning_effort": Row(body={"reasoning_effort": "high"}, refused="a prompt has no such setting"),
}
VECTORS: dict[str, Row] = {
    "model": Row(body={"model": "embedder"}, shows=lambda seen, plain: seen.first["model"] == "embedder"),
    "input": Row(body={"input": ["a", "b"]}, shows=lambda seen, plain: len(seen.first["data"]) == 2),
    "user": Row(body={"user": "u"}, note="kept in log and ledger"),
    "cache_salt": Row(body={"cache_salt": "own"}, note="vectors share no prefixes"),
    "dimensions": Row(body={"dimensions": 8}, shows=lambda seen, plain: len(seen.first["data"][0]["embedding"]) == 8),
    "encoding_format": Row(
        body={"encoding_format": "base64"},
        shows=lambda seen, plain: isinstance(seen.first["data"][0]["embedding"], str),
    ),
}
SCORES: dict[str, Row] = {
    "model": VECTORS["model"],
    "query": Row(body={}, shows=has("results")),
    "documents": Row(body={"documents": ["a", "b", "c"]}, shows=lambda seen, plain: len(seen.first["results"]) == 3),
    "text_1": Row(body={"query": None, "documents": None, "text_1": "a", "text_2": "b"}, shows=has("data")),
    "text_2": Row(body={"query": None, "documents": None, "text_1": "a", "text_2": ["b"]}, shows=has("data")),
    "top_n": Row(body={"top_n": 1}, shows=lambda seen, plain: len(seen.first["results"]) == 1),
    "return_documents": Row(
        body={"return_documents": False}, shows=lambda seen, plain: not _find(seen.first["results"], "document")
    ),
    "truncate_prompt_tokens": Row(body={"truncate_prompt_tokens": 3}),
    "max_tokens_per_doc": Row(body={"max_tokens_per_doc": 3}),
    "use_activation": Row(
        body={"use_activation": False}, refused="this model's scores are cosines", note="cross-encoders take it"
    ),
    "timeout": Row(body={"timeout": 600}),
    "user": VECTORS["user"],
    "cache_salt": VECTORS["cache_salt"],
}
_LABELS = {
    "databricks_options": Row(body={"databricks_options": {"return_trace": True}}, shows=has("databricks_output")),
    "usage_context": Row(body={"usage_context": {"a": "b"}}, note="labels, kept in log and ledger"),
    "client_request_id": Row(body={"client_request_id": "c"}, note="kept in log and ledger"),
}
_ADAPTER = {"adapter": Row(body={"adapter": "pirate"}, shows=has("model"))}
_TRUNCATE = {
    "error_behavior": Row(
        body={"error_behavior": "truncate", "max_tokens": 100_000},
        shows=lambda seen, plain: seen.completion is not None,
        note="on pay-per-token endpoints",
    )
}
DATABRICKS_CHAT = {
    **SAMPLING,
    **CHAT,
    **_LABELS,
    **_ADAPTER,
    **_TRUNCATE,
    "tools[].type": Row(body={"tools": [{**TOOL, "type": "other"}]}, refused='expected "function"', named="tools[0]"),
    "tools[].function.name": Row(body={"tools": [TOOL]}),
    "tools[].function.description": Row(body={"tools": [TOOL]}),
    "tools[].function.parameters": Row(body={"tools": [TOOL]}),
    "tools[].function.strict": Row(
        body={
            "tools": [{"type": "function", "function": {**TOOL["function"], "strict": True, "parameters": SCHEMA}}],  # type: ignore[dict-item]
            "tool_choice": "required",
            "max_tokens": 40,
        },
        shows=has("tool_calls"),
    ),
}
DATABRICKS_TEXT = {
    **SAMPLING,
    **TEXT,
    **_LABELS,
    **_ADAPTER,
    **_TRUNCATE,
    "use_raw_prompt": Row(body={"use_raw_prompt": False}, shows=unlike_plain),
}
_NO_ADAPTER = {"adapter": Row(body={"adapter": "pirate"}, refused="no adapter")}
DATABRICKS_VECTORS = {
    **VECTORS,
    **_LABELS,
    **_NO_ADAPTER,
    "instruction": Row(body={"instruction": "Represent: "}, shows=lambda seen, plain: seen.prompt != plain.prompt),
    "error_behavior": Row(body={"error_behavior": "truncate", "input": "long " * 600}),
    "timeout": Row(body={"timeout": 600}),
}
DATABRICKS_SCORES = {**SCORES, **_LABELS, **_NO_ADAPTER}

OPENVINO_SAMPLING = {
    **SAMPLING,
    "top_p": Row(body={"temperature": 2.0, "top_p": 0.0001}, shows=as_plain),
    "ignore_eos": Row(body={"ignore_eos": True, "max_tokens": 40}, shows=tokens(40), note="at most 4000 tokens"),
    "n": Row(
        body={"n": 2, "best_of": 4},
        shows=choices(2),
        modes=WHOLE,
        endpoint="reserved",
        note="at most best_of",
    ),
    "best_of": Row(body={"best_of": 4}, modes=WHOLE, note="above 1: beam search"),
    "use_beam_search": Row(body={"best_of": 4, "use_beam_search": True}, modes=WHOLE, note="best_of says it already"),
    "length_penalty": Row(body={"best_of": 4, "length_penalty": 0.5}, modes=WHOLE),
    "early_stopping": Row(body={"best_of": 4, "early_stopping": True}, modes=WHOLE),
    "diversity_penalty": Row(
        body={"best_of": 4, "diversity_penalty": 2.0}, modes=WHOLE, note="with one group it changes nothing, as there"
    ),
    "num_beam_groups": Row(body={"best_of": 4, "num_beam_groups": 2}, modes=WHOLE),
    "prompt_logprobs": Row(
        body={"prompt_logprobs": 1}, refused="echo with logprobs at /v3/completions scores a prompt"
    ),
    "detokenize": Row(body={"detokenize": False}, refused="replies are texts", note="true is taken"),
    "spaces_between_special_tokens": Row(
        body={"spaces_between_special_tokens": False},
        refused="tokens are joined as the tokenizer joins them",
        note="true is taken",
    ),
    "logits_processors": Row(body={"logits_processors": ["x"]}, refused="code does not come with a request"),
    "truncate_prompt_tokens": Row(body={"truncate_prompt_tokens": 3}, refused="refused, not cut"),
}


MINDIE_CHAT = {
    **{
        name: SAMPLING[name]
        for name in words(
            """model stream max_tokens temperature top_p top_k min_p typical_p seed stop presence_penalty
            frequency_penalty repetition_penalty logit_bias min_tokens stop_token_ids ignore_eos
            include_stop_str_in_output skip_special_tokens timeout response_format structured_outputs guided_json
            guided_regex guided_choice guided_grammar user cache_salt bad_words no_repeat_ngram_size"""
        )
    },
    **{
        name: CHAT[name]
        for name in words(
            """messages messages[].role messages[].tool_calls messages[].tool_call_id tools tool_choice
            parallel_tool_calls chat_template chat_template_kwargs reasoning_effort add_generation_prompt
            continue_final_message"""
        )
    },
    "messages[].content": Row(
        body={"messages": [{"role": "user", "content": [{"type": "text", "text": "Say yes."}]}]}, shows=unlike_plain
    ),
    "messages[].content[].type": Row(
        body={"messages": [{"role": "user", "content": [{"type": "text", "text": "Say yes."}]}]}, shows=unlike_plain
    ),
    "messages[].content[].text": Row(
        body={"messages": [{"role": "user", "content": [{"type": "text", "text": "Say yes."}]}]}, shows=unlike_plain
    ),
    "messages[].content[].image_url": _IMAGE,
    "messages[].content[].video_url": _media("video_url", "data:video/mp4;base64,aGk="),
    "messages[].content[].audio_url": _media("audio_url", "data:audio/wav;base64,aGk="),
    "n": Row(body={"n": 2}, refused="an integer in [1, 1]"),
    "stream_options": Row(body={}, modes=("stream",), note="usage is in the last chunk, whatever this says"),
    "logprobs": Row(body={"logprobs": True}, refused="replies have no log probabilities"),
}
_DRAWN = {"do_sample": True, "temperature": 2.0, "seed": 5}
GENERATE_ROWS = {
    "id": Row(body={"id": "a123"}, shows=lambda seen, plain: seen.first["id"] == "a123"),
    "text_input": Row(body={"text_input": "Hello"}, shows=unlike_plain),
    "details": Row(body={"details": True}, shows=has("details")),
    "do_sample": Row(body=_DRAWN, shows=unlike_plain),
    "max_new_tokens": Row(body={"max_new_tokens": 3}, shows=tokens(3)),
    "repetition_penalty": Row(body={"repetition_penalty": 0.1}, shows=unlike_plain),
    "seed": Row(body={**_DRAWN, "seed": 11}, shows=unlike_plain),
    "temperature": Row(body=_DRAWN, shows=unlike_plain),
    "top_k": Row(body={**_DRAWN, "top_k": 1}, shows=as_plain),
    "top_p": Row(body={**_DRAWN, "top_p": 0.0001}, shows=as_plain),
    "typical_p": Row(body={**_DRAWN, "typical_p": 0.5}),
    "batch_size": Row(body={"batch_size": 4}, shows=as_plain, note="how many run together is the engine's affair"),
    "watermark": Row(body={"watermark": True}, refused="watermarks are not supported", note="false is taken"),
    "perf_stat": Row(body={"perf_stat": True}, shows=as_plain),
}

# --- how a part's requests are made and its answers read


def objects(path: str, **base: Any) -> Callable[[Row, Mode], tuple[str, dict[str, str], bytes]]:
    """Return JSON bodies with ``stream`` among their fields."""

    def request(row: Row, mode: Mode) -> tuple[str, dict[str, str], bytes]:
        own = {} if base["model"] == "embedder" else {"model": row.endpoint}
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if mode == "stream" else {}
        body = {**base, **own, **streamed, **row.body}
        return path, {}, json.dumps({k: v for k, v in body.items() if v is not None}).encode()

    return request


def read_objects(status: int, headers: Mapping[str, str], data: bytes) -> Seen:
    """Read OpenAI's objects."""
    if not is_stream(headers):
        events = [json.loads(data)]
    else:
        assert data.endswith(b"data: [DONE]\n\n"), data[-200:]
        events = events_of(data)
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            said = choice.get("message") or choice.get("delta") or choice
            index = choice["index"]
            texts[index] = texts.get(index, "") + (said.get("content") or said.get("text") or "")
            if choice.get("finish_reason"):
                finishes[index] = choice["finish_reason"]
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
    return Seen(
        status=status,
        events=events,
        texts=[texts[index] for index in sorted(texts)],
        finishes=[finishes[index] for index in sorted(finishes)],
        prompt=usage.get("prompt_tokens"),
        completion=usage.get("completion_tokens"),
    )


def generate(row: Row, mode: Mode) -> tuple[str, dict[str, str], bytes]:
    """Return a request with ``details`` by default, because they count the tokens."""
    top = {name: value for name, value in row.body.items() if name in ("id", "text_input")}
    parameters = {"details": True, "max_new_tokens": LENGTH}
    parameters |= {name: value for name, value in row.body.items() if name not in top}
    body = {"text_input": PROMPT, "parameters": parameters} | top
    verb = "generate" if mode == "whole" else "generate_stream"
    return f"/v2/models/assistant/{verb}", {}, json.dumps(body).encode()


def read_generate(status: int, headers: Mapping[str, str], data: bytes) -> Seen:
    """Read details, which cover all tokens so far."""
    events = events_of(data) if is_stream(headers) else [json.loads(data)]
    text = "".join(event["text_output"] for event in events)
    return Seen(status=status, events=events, texts=[text], completion=events[-1]["details"]["generated_tokens"])


# --- the documents

MINDIE = "MindIE Server's /v1/chat/completions"

DATABRICKS = "Databricks' Foundation Model API"
OPENVINO = "OpenVINO Model Server's chat/completions endpoint"
_OPENVINO_FIELDS = words(
    """model stream messages max_tokens ignore_eos n best_of diversity_penalty length_penalty temperature
top_p top_k repetition_penalty seed frequency_penalty logit_bias logprobs top_logprobs
presence_penalty response_format stop stream_options tools tool_choice user function_call functions
min_p use_beam_search early_stopping stop_token_ids include_stop_str_in_output min_tokens
prompt_logprobs detokenize skip_special_tokens spaces_between_special_tokens logits_processors
truncate_prompt_tokens"""
)
_CHATS_ALONE = ("messages", "top_logprobs", "tool_choice")

PARTS: tuple[Part, ...] = (
    Part(
        name="databricks_chat",
        title="Databricks: chats",
        document=DATABRICKS,
        dialect="databricks",
        task="chat",
        of_document=words(
            """messages max_tokens stream temperature top_p top_k stop n tool_choice tools response_format logprobs
top_logprobs messages[].role messages[].content messages[].tool_calls messages[].tool_call_id
tools[].type tools[].function.name tools[].function.description tools[].function.parameters
tools[].function.strict"""
        ),
        rows=DATABRICKS_CHAT,
        request=objects("/serving-endpoints/chat/completions", model="assistant", messages=HI, **GREEDY),
        read=read_objects,
    ),
    Part(
        name="databricks_completions",
        title="Databricks: completions",
        document=DATABRICKS,
        dialect="databricks",
        task="completions",
        of_document=words(
            "prompt max_tokens stream temperature top_p top_k error_behavior n stop suffix echo use_raw_prompt"
        ),
        rows=DATABRICKS_TEXT,
        request=objects(
            "/serving-endpoints/completions", model="assistant", prompt=PROMPT, use_raw_prompt=True, **GREEDY
        ),
        read=read_objects,
    ),
    Part(
        name="databricks_embeddings",
        title="Databricks: embeddings",
        document=DATABRICKS,
        dialect="databricks",
        task="embeddings",
        of_document=("input", "instruction"),
        rows=DATABRICKS_VECTORS,
        request=objects("/serving-endpoints/embeddings", model="embedder", input="a text"),
        read=read_objects,
        modes=WHOLE,
    ),
    Part(
        name="databricks_scores",
        title="Databricks: scores",
        document="none: ours, at the same routes",
        dialect="databricks",
        task="score",
        of_document=(),
        rows=DATABRICKS_SCORES,
        request=objects("/serving-endpoints/embedder/invocations", model="embedder", query="a", documents=["b", "c"]),
        read=read_objects,
        modes=WHOLE,
    ),
    Part(
        name="openvino_chat",
        title="OpenVINO Model Server: chats",
        document=OPENVINO,
        dialect="openvino",
        task="chat",
        of_document=_OPENVINO_FIELDS,
        rows={**OPENVINO_SAMPLING, **CHAT},
        request=objects("/v3/chat/completions", model="assistant", messages=HI, **GREEDY),
        read=read_objects,
    ),
    Part(
        name="openvino_completions",
        title="OpenVINO Model Server: completions",
        document=OPENVINO,
        dialect="openvino",
        task="completions",
        of_document=("prompt", *(name for name in _OPENVINO_FIELDS if name not in _CHATS_ALONE)),
        rows={**OPENVINO_SAMPLING, **TEXT},
        request=objects("/v3/completions", model="assistant", prompt=PROMPT, **GREEDY),
        read=read_objects,
    ),
    Part(
        name="openvino_embeddings",
        title="OpenVINO Model Server: embeddings",
        document=OPENVINO,
        dialect="openvino",
        task="embeddings",
        of_document=(),
        rows=VECTORS,
        request=objects("/v3/embeddings", model="embedder", input="a text"),
        read=read_objects,
        modes=WHOLE,
    ),
    Part(
        name="mindie_chat",
        title="MindIE: chats",
        document=MINDIE,
        dialect="mindie",
        task="chat",
        of_document=words(
            """model messages messages[].role messages[].content messages[].content[].type messages[].content[].text
            messages[].content[].image_url messages[].content[].video_url messages[].content[].audio_url
            messages[].tool_calls messages[].tool_call_id stream presence_penalty frequency_penalty repetition_penalty
            temperature top_p top_k seed stop stop_token_ids include_stop_str_in_output skip_special_tokens ignore_eos
            max_tokens tools tool_choice"""
        ),
        rows=MINDIE_CHAT,
        request=objects("/mindie/v1/chat/completions", model="assistant", messages=HI, **GREEDY),
        read=read_objects,
    ),
    Part(
        name="generate",
        title="Triton's generate, as MindIE has it",
        document="MindIE Server's /v2/models/{model}/generate_stream",
        dialect="generate",
        task="completions",
        of_document=words(
            """id text_input details do_sample max_new_tokens repetition_penalty seed temperature top_k top_p batch_size
            typical_p watermark perf_stat"""
        ),
        rows=GENERATE_ROWS,
        request=generate,
        read=read_generate,
    ),
    TENSORS,
)
