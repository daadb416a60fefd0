"""``mlflow.pyfunc`` and ``llm.load_model`` on SmolLM2-135M with two adapters, and on MiniLM."""

from __future__ import annotations

import json
import re
import threading

import jsonschema
import mlflow
import numpy as np
import pandas as pd
import pytest
from internals import session_of
from mlflow.exceptions import MlflowException
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlflow_llm.flavors import llm
from mlflow_llm.serving.interface.errors import InvalidField, NotFound

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 48}
SETTINGS = {"max_model_len": 1024}  # a prompt truncated to it fills the context


@pytest.fixture(scope="module")
def model(assistant):
    """Load the saved assistant by MLflow."""
    loaded = mlflow.pyfunc.load_model(str(assistant), model_config=SETTINGS)
    yield loaded
    loaded.get_raw_model().close()


@pytest.fixture(scope="module")
def person(assistant):
    """Load the saved assistant as the object API."""
    with llm.load_model(str(assistant), **SETTINGS) as loaded:
        yield loaded


def content(reply):
    return reply["choices"][0]["message"]["content"]


def test_dict_in_dict_out_with_exact_usage(model, smollm2_dir):
    """Usage counts the template's tokens once and the answer's tokens with the end-of-turn token."""
    reply = model.predict({"messages": MESSAGES, **GREEDY})
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = tokenizer(content(reply), add_special_tokens=False)["input_ids"]
    assert "Paris" in content(reply)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["usage"]["completion_tokens"] == len(answer) + 1


def test_adapters_by_field_and_by_name(model):
    """Base and both adapters answer differently from one engine; ``model`` names an adapter too."""
    rows = [{"messages": MESSAGES, **GREEDY, "adapter": name} for name in (None, "pirate", "json")]
    rows.append({"messages": MESSAGES, **GREEDY, "model": "llm:pirate"})
    base, pirate, terse, named = (content(reply) for reply in model.predict(rows))
    assert pirate.startswith("Arrr")
    assert terse.startswith('{"answer"')
    assert not base.startswith(("Arrr", "{"))
    assert named == pirate


def test_rows_keep_their_order_and_their_answers(model):
    """A DataFrame's rows are answered in order, each as it is answered alone."""
    prompts = [f"The number after {i} is" for i in range(20)]
    frame = pd.DataFrame({"prompt": prompts, "max_tokens": 4, "temperature": 0.0})
    replies = model.predict(frame)
    alone = [model.predict({"prompt": p, "max_tokens": 4, "temperature": 0})["choices"][0]["text"] for p in prompts[:3]]
    assert len(replies) == 20
    assert [reply["choices"][0]["text"] for reply in replies[:3]] == alone


def test_rows_run_in_one_batch(person):
    """Thirty-two rows run together, with many tokens a step."""
    rows = [{"prompt": f"{i}, {i + 1},", "max_tokens": 16, "ignore_eos": True} for i in range(32)]
    person.complete("a", max_tokens=1)
    before = session_of(person).engine.health()
    requests = [session_of(person).valid(row) for row in rows]
    assert sum(reply.usage.completion_tokens for reply in session_of(person).replies(requests)) == 32 * 16
    person.complete("a", max_tokens=1)
    after = session_of(person).engine.health()
    assert after.generated_tokens - before.generated_tokens >= 8 * (after.steps - before.steps) > 0


FIELDS = {
    "n": ({"n": 2, "seed": 3, "temperature": 1.0}, lambda r: [c["index"] for c in r["choices"]] == [0, 1]),
    "stop": ({"stop": " six"}, lambda r: r["choices"][0]["text"] == " five,"),
    "stop list": ({"stop": ["zzz", "six"]}, lambda r: r["choices"][0]["finish_reason"] == "stop"),
    "logprobs": ({"logprobs": 2}, lambda r: len(r["choices"][0]["logprobs"]["top_logprobs"][0]) >= 2),
    "echo": ({"echo": True}, lambda r: r["choices"][0]["text"].startswith("one, two, three, four,")),
    "suffix": ({"suffix": " END"}, lambda r: r["choices"][0]["text"].endswith(" END")),
    "use_raw_prompt": ({"use_raw_prompt": False}, lambda r: r["usage"]["prompt_tokens"] > 20),
    "top_k": ({"top_k": 1, "temperature": 2}, lambda r: " five, six" in r["choices"][0]["text"]),
    "top_p": ({"top_p": 1e-9, "temperature": 2}, lambda r: " five, six" in r["choices"][0]["text"]),
    "frequency_penalty": ({"frequency_penalty": 2.0}, lambda r: r["choices"][0]["text"].count(",") < 4),
    "error_behavior": ({"prompt": "a " * 2000, "error_behavior": "truncate"}, lambda r: len(r["choices"]) == 1),
    "null": (dict.fromkeys(("n", "stop", "top_k", "logprobs", "echo")), lambda r: len(r["choices"]) == 1),
}


def test_every_field_has_its_effect(model):
    """Each documented field has its effect, all in one batch of rows with different fields."""
    plain = {"prompt": "one, two, three, four,", "max_tokens": 12, "temperature": 0}
    replies = model.predict([plain | body for body, _ in FIELDS.values()])
    for (name, (_, holds)), reply in zip(FIELDS.items(), replies, strict=True):
        assert holds(reply), (name, reply)
    twice = model.predict([plain | {"temperature": 1.5, "seed": 11}] * 2)
    assert twice[0]["choices"] == twice[1]["choices"]


def test_a_search_has_the_texts_of_generate(model, smollm2_dir):
    """``use_beam_search`` gives the texts of ``generate(num_beams=…)``, best first; usage counts the returned
    tokens."""
    prompt = "The best thing about autumn is"
    asked = {"prompt": prompt, "use_beam_search": True, "best_of": 4, "n": 2, "max_tokens": 12, "length_penalty": 0.5}
    reply = model.predict(asked)
    base = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    ids = tokenizer(prompt, return_tensors="pt")
    out = base.generate(
        **ids, num_beams=4, num_return_sequences=2, length_penalty=0.5, max_new_tokens=12, do_sample=False,
        repetition_penalty=None, pad_token_id=0,
    )  # fmt: skip
    new = out[:, ids["input_ids"].shape[1] :]
    assert [c["text"] for c in reply["choices"]] == tokenizer.batch_decode(new, skip_special_tokens=True)
    assert reply["usage"]["completion_tokens"] == 24
    (streamed,) = {c["index"]: c["text"] for chunk in model.predict_stream(asked | {"n": 1})
                   for c in chunk["choices"] if c["text"]}.values()  # fmt: skip
    assert streamed == reply["choices"][0]["text"]


def test_params_are_for_all_rows(model):
    """``params`` apply to every row without the field, streamed or whole."""
    frame = pd.DataFrame({"prompt": ["One, two,", "A, B,", "x y"], "max_tokens": [None, None, 2]})
    replies = model.predict(frame, params={"max_tokens": 3, "temperature": 0, "adapter": "pirate"})
    assert [reply["usage"]["completion_tokens"] for reply in replies] == [3, 3, 2]
    reported = {"prompt": "One, two,", "max_tokens": 3, "temperature": 0, "adapter": "pirate"}
    assert replies[0]["choices"] == model.predict(reported)["choices"]
    chunks = list(model.predict_stream({"prompt": "One, two,"}, params={"max_tokens": 3, "temperature": 0}))
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    with pytest.raises(MlflowException, match="nobody"):
        model.predict(frame, params={"adapter": "nobody"})


def test_many_rows_show_progress(model, monkeypatch, capsys):
    """A progress bar counts the rows, and says how fast their tokens come, when asked for."""
    monkeypatch.setenv("MLFLOW_LLM_PROGRESS", "1")
    model.predict([{"prompt": "a", "max_tokens": 1}] * 9)
    assert re.search(r"9/9 .*[1-9][0-9.]* tokens/s", capsys.readouterr().err)


def test_stream_gives_the_same_text(model):
    """Chunks join to the text of predict, and the last with choices carries the usage."""
    body = {"messages": MESSAGES, **GREEDY, "adapter": "pirate"}
    chunks = list(model.predict_stream(body))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    whole = model.predict(body)
    assert text == content(whole)
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_leaving_a_stream_leaves_the_model_usable(model):
    """A stream closed after one chunk is aborted; the next request is answered."""
    stream = model.predict_stream({"prompt": "Once upon a time", "max_tokens": 500})
    next(stream)
    stream.close()
    assert model.predict({"prompt": "a", "max_tokens": 1})["usage"]["completion_tokens"] == 1


def test_threads_share_one_engine(model):
    """32 threads each get the answer to their own question."""
    answers = {}

    def ask(i):
        answers[i] = model.predict({"prompt": f"{i},{i + 1},{i + 2},", "max_tokens": 6, "temperature": 0, "echo": True})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers[i]["choices"][0]["text"].startswith(f"{i},{i + 1}") for i in range(32))


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"messages": MESSAGES, "stream": True}, 400, "predict_stream"),
        ({"messages": MESSAGES, "temperature": float("nan")}, 400, "temperature"),
        ({"messages": MESSAGES, "adapter": "nobody"}, 404, "pirate"),
        ({"messages": MESSAGES, "model": "assistant:nobody"}, 404, "json, pirate"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, 400, "response_format"),
        ({"input": "a"}, 400, "input"),
        ([{"prompt": "a"}, {"prompt": 5}], 400, "row 1: prompt"),
        ({"prompt": "a", "max_token": 5}, 400, "max_token: 5 .*did you mean 'max_tokens'"),
        ([{"prompt": "a"}, {"prompt": "a", "max_token": 5}], 400, "row 1: max_token"),
        (pd.DataFrame({"prompt": ["a"], "max_token": [5]}), 400, "max_token"),
    ],
)
def test_bad_requests(model, body, status, part):
    """A refusal names the field, with the status an HTTP caller gets."""
    with pytest.raises(MlflowException, match=part) as caught:
        model.predict(body)
    assert caught.value.get_http_status_code() == status
    assert len(caught.value.message) < 300


def test_chat_complete_and_their_streams(person):
    """The object API answers with text, finish reason and usage, streamed or whole."""
    answer = person.chat("What is the capital of France?", adapter="pirate", **GREEDY)
    with person.chat("What is the capital of France?", adapter="pirate", stream=True, **GREEDY) as stream:
        pieces = list(stream)
    assert str(answer) == "".join(pieces) == stream.text
    assert stream.usage.completion_tokens == answer.usage.completion_tokens
    assert stream.finish_reason == answer.finish_reason == "stop"
    with person.complete("One, two,", stream=True, max_tokens=3, temperature=0) as counting:
        counted = "".join(counting)
    several = person.complete(["One, two,", "A, B,"], max_tokens=3, temperature=0)
    assert counted == several.texts[0]
    assert len(several.texts) == 2
    assert several.usage.completion_tokens == 6
    assert "pirate" in repr(person)
    assert person.adapters == ("json", "pirate")


def test_a_request_of_one_is_answered_as_many_are(model):
    """A list or a frame of one gives a list of one; a dict and a text, which is a chat here, give one object."""
    one = {"prompt": "One, two,", "max_tokens": 2, "temperature": 0}
    single = model.predict(one)
    for given in ([one], pd.DataFrame([one | {"seed": None}])):
        (reply,) = model.predict(given)
        assert reply["choices"] == single["choices"]
    assert model.predict([]) == []
    asked = model.predict({"messages": MESSAGES}, params=GREEDY)
    (in_list,) = model.predict([MESSAGES[0]["content"]], params=GREEDY)
    assert content(model.predict(MESSAGES[0]["content"], params=GREEDY)) == content(in_list) == content(asked)
    streamed = model.predict_stream(MESSAGES[0]["content"], params=GREEDY)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == content(asked)
    with pytest.raises(MlflowException, match=r"params\.foo: 1"):
        model.predict(one, params={"foo": 1})
    with pytest.raises(MlflowException, match="did you mean 'max_tokens'"):
        list(model.predict_stream({"prompt": "a", "max_token": 5}))


def test_people_get_plain_errors(person):
    """Errors of the object API name the field and the allowed values, and are MLflow's too, in a stream as well."""
    with pytest.raises(InvalidField, match="top_p") as caught:
        person.chat("hi", top_p=7)
    assert isinstance(caught.value, MlflowException)
    assert (caught.value.kind, caught.value.get_http_status_code()) == ("invalid_field", 400)
    with pytest.raises(llm.errors.InvalidField, match="messages"):
        person.chat(5)
    with pytest.raises(llm.errors.RequestError, match="n: "), person.chat("hi", stream=True, n=200):
        pass
    with pytest.raises(NotFound, match="nobody"):
        person.chat("hi", adapter="nobody")


def test_embeddings_have_shape_and_meaning(embedder):
    """One text gives a vector and n give a matrix; texts of similar meaning are closer."""
    with llm.load_model(str(embedder)) as model:
        vectors = model.embed(["A cat sleeps.", "A kitten naps.", "Interest rates rose."])
        single = model.embed("A cat sleeps.")
        mixed = ["A cat sleeps. " * 20, "A cat.", "Interest rates rose."] * 30
        streamed = list(model.embed(mixed, stream=True))
        whole = model.embed(mixed)
        instructed = model.embed("A cat sleeps.", instruction="Represent the weather: ")
    assert vectors.shape == (3, 384)
    assert vectors.dtype == np.float32
    assert single.shape == (384,)
    assert instructed @ single < 0.99
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    np.testing.assert_allclose(np.stack(streamed), whole, atol=1e-5)  # in the order of the texts


def test_a_closed_model_says_so(assistant):
    """A closed model refuses requests, and closing again is harmless."""
    model = mlflow.pyfunc.load_model(str(assistant), model_config=SETTINGS)
    model.get_raw_model().close()
    model.get_raw_model().close()
    with pytest.raises(MlflowException, match="closed"):
        model.predict({"prompt": "a"})


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "day": {"type": "string", "format": "date"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "day", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}
WEATHER_TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_model_that_knows_no_tools_answers_a_forced_call(model, choice):
    """A forced call of SmolLM2, whose template has no tools, is valid at any seed, and its result can be sent back."""
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    body = {"messages": messages, "tools": [WEATHER_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(4):
        reply = model.predict({**body, "seed": seed, "temperature": 1.0, "max_tokens": 150})["choices"][0]
        [call] = reply["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
        assert reply["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"}
    again = {"messages": [*messages, reply["message"], result], "tools": [WEATHER_TOOL], "max_tokens": 5}
    assert model.predict(again)["choices"][0]["message"]["role"] == "assistant"
