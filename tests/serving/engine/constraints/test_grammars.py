"""Generation within grammars by models with every kind of tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from engine_runs import Outcome, run
from grammar_runs import Texts, bundle_of, lark, regex, schema
from tiny_models import request_of
from tokenizer_kinds import KINDS

from mlflow_llm.serving.engine.constraints.grammar_state import unpacked
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.sampling import device_sampler
from mlflow_llm.serving.engine.sampling.sampler import unpacked_by_torch
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

SETTINGS = EngineSettings(kv_cache_memory=1 << 24, max_num_seqs=40)
PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
END = 2
CAN_WRITE_JSON = [kind for kind in KINDS if kind != "word_piece"]  # which has a space before every brace


@pytest.fixture(scope="module", params=CAN_WRITE_JSON)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def bytes_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of("byte_level", tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def core(bundle: Bundle) -> Iterator[EngineCore]:
    core = EngineCore(bundle, SETTINGS)
    yield core
    core.close()


@pytest.fixture(scope="module")
def bytes_core(bytes_bundle: Bundle) -> Iterator[EngineCore]:
    core = EngineCore(bytes_bundle, SETTINGS)
    yield core
    core.close()


def within(request_id: str, prompt: tuple[int, ...], grammar: Any, **more: Any) -> ValidRequest:
    defaults = {"temperature": 1.0, "max_tokens": 120, "stop_token_ids": (END,)}
    return request_of(request_id, prompt, grammar=grammar, **defaults | more)


def reasons(outcome: Outcome) -> list[str]:
    return [outcome.finished[index].reason for index in sorted(outcome.finished)]


def test_texts_follow_their_schema(core: EngineCore, bundle: Bundle) -> None:
    """Texts of a random model at temperature 1 are complete instances of the schema and nothing else, for each of n
    choices."""
    texts = Texts(bundle)
    prompt = texts.ids("the quick brown fox")
    found = run(core, *(within(f"s{seed}", prompt, schema(PERSON), seed=10 * seed, n=3) for seed in range(6)))
    said = set()
    for outcome in found.values():
        assert reasons(outcome) == ["stop"] * 3
        for text in texts.texts(outcome).values():
            jsonschema.validate(json.loads(text), PERSON)
            said.add(text)
    assert len(said) > 9


@pytest.mark.parametrize("kind", KINDS)
def test_expressions_and_grammars(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Regular expressions and Lark grammars hold with every kind of tokenizer."""
    bundle = bundle_of(kind, tmp_path_factory.mktemp("kinds"))
    core, texts = EngineCore(bundle, SETTINGS), Texts(bundle)
    prompt = texts.ids("the quick brown")
    asked = {
        "choice": regex("(yes|no)( no)?"),
        "lark": lark('start: "yes" | "no" start'),
        "letters": regex("[abc]{3,9}"),
    }
    wanted = {"choice": "(yes|no)( no)?", "lark": "(no)*yes", "letters": "[abc]{3,9}"}
    found = run(core, *(within(name, prompt, grammar) for name, grammar in asked.items()))
    for name, outcome in found.items():
        if reasons(outcome) == ["stop"]:
            assert re.fullmatch(wanted[name], texts.of(outcome.tokens[0])), (kind, name)
        else:
            assert name == "lark"  # no end of text may ever be likely
    core.close()


MIXED: dict[str, dict[str, Any]] = {
    "schema": {"grammar": schema(PERSON)},
    "greedy": {"grammar": schema(PERSON), "temperature": 0.0},
    "one by one": {"grammar": schema(PERSON, fast_forward=False)},
    "expression": {"grammar": regex("[a-e]{2,40}"), "top_p": 0.9},
    "lark": {"grammar": lark('start: ("the " | "fox ")+'), "top_k": 20, "max_tokens": 30},
    "typical": {"grammar": regex("[a-z ]{5,30}"), "typical_p": 0.9, "repetition_penalty": 1.2},
    "plain": {"grammar": None, "max_tokens": 40},
    "scored": {"grammar": schema(PERSON), "logprobs": 2},
}


def mixed(texts: Texts) -> list[ValidRequest]:
    """Return 32 requests of all kinds."""
    prompts = [texts.ids(text) for text in ("the quick brown fox", "yes, the dog", "a, b. c", '{"name": ')]
    return [
        within(f"{kind} {i}", prompts[i], parameters.get("grammar"), seed=17 * i, **_without_grammar(parameters))
        for i in range(4)
        for kind, parameters in MIXED.items()
    ]


def _without_grammar(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != "grammar"}


def test_alone_is_as_in_a_batch(core: EngineCore, bundle: Bundle) -> None:
    """32 sequences, with and without grammars, have the same tokens together as each alone."""
    requests = mixed(Texts(bundle))
    together = run(core, *requests)
    for request in requests:
        alone = run(core, request)[request.request_id]
        found = together[request.request_id]
        assert alone.tokens == found.tokens
        assert reasons(alone) == reasons(found)


def test_resumed_at_every_token(core: EngineCore, bundle: Bundle) -> None:
    """A request resumed after any of its tokens continues and ends with the same text."""
    for request in mixed(Texts(bundle))[:8]:
        whole = run(core, request)[request.request_id]
        tokens = whole.tokens[0]
        resumed = [resumed_at(cut, request, tokens) for cut in range(len(tokens) + 1)]
        for cut, found in enumerate(run(core, *resumed).values()):
            assert found.failed is None
            assert [*tokens[:cut], *found.tokens[0]] == tokens, (request.request_id, cut)
            assert reasons(found) == reasons(whole)
            assert found.finished[0].num_generated_tokens == len(tokens)


def resumed_at(cut: int, request: ValidRequest, tokens: list[int]) -> ValidRequest:
    source = msgspec.structs.replace(request.sequences[0], resumed_token_ids=tuple(tokens[:cut]))
    return msgspec.structs.replace(request, request_id=f"{request.request_id}-{cut}", sequences=(source,))


def test_resumed_outside_of_its_grammar(bytes_core: EngineCore, bytes_bundle: Bundle) -> None:
    """Resumed tokens that the grammar does not allow end their own request and no other."""
    texts = Texts(bytes_bundle)
    prompt = texts.ids("the quick brown")
    bad = within("bad", prompt, regex("[abc]+"), resumed=texts.ids("abx"))
    found = run(bytes_core, bad, within("good", prompt, regex("[abc]{3}")), request_of("plain", prompt))
    assert found["bad"].failed is not None
    assert found["bad"].failed.kind == "internal"
    assert "grammar" in found["bad"].failed.message
    assert reasons(found["good"]) == ["stop"]
    assert reasons(found["plain"]) == ["length"]


def test_preempted_sequences_go_on_in_their_grammars(bytes_bundle: Bundle, bytes_core: EngineCore) -> None:
    """Sequences whose memory is taken for others, in the middle of their texts, end with the same texts."""
    texts = Texts(bytes_bundle)
    turns = regex("([abc]{4} the quick brown fox ){4}")
    requests = [within(f"r{i}", texts.ids("the dog"), turns, seed=i) for i in range(6)]
    expected = {request.request_id: run(bytes_core, request)[request.request_id].tokens for request in requests}
    layers, width, heads, floats, tokens = 2, 8, 2, 4, 130
    small = EngineSettings(kv_cache_memory=tokens * layers * width * heads * 2 * floats, max_model_len=128)
    core = EngineCore(bytes_bundle, small)
    found = run(core, *requests)
    assert core.parts.scheduler.num_preemptions > 0
    assert {request_id: outcome.tokens for request_id, outcome in found.items()} == expected
    core.close()


def test_ends_of_a_text(bytes_core: EngineCore, bytes_bundle: Bundle) -> None:
    """A text that its grammar lets end may end only by the request's own ends; one that can only end does so by itself,
    whatever ignore_eos and min_tokens say; one that is cut says so."""
    texts = Texts(bytes_bundle)
    prompt = texts.ids("the quick brown")
    always, never = ((END, 100.0),), ((END, -100.0),)

    def asked(name: str, expression: str, **more: Any) -> ValidRequest:
        return within(name, prompt, regex(expression), **more)

    found = run(
        bytes_core,
        asked("liked", "[ab]{2,50}", logit_bias=always),
        asked("disliked", "[ab]{2,50}", logit_bias=never),
        asked("ignored", "[ab]{2,50}", logit_bias=always, stop_token_ids=()),
        asked("ignored, cut", "[ab]+", logit_bias=always, stop_token_ids=(), max_tokens=30),
        asked("only end", "ab", stop_token_ids=(), min_tokens=50),
        asked("not yet", "[ab]{1,40}", logit_bias=always, min_tokens=20),
        asked("exactly", "x{10}", max_tokens=10),
        asked("short", "x{10}", max_tokens=9),
        asked("own stop", "[ab]+c+", stop_token_ids=(END, *texts.ids("c")), logit_bias=((texts.ids("c")[0], 50.0),)),
        asked("own stop, not yet", "c+", stop_token_ids=texts.ids("c"), min_tokens=4),
    )
    said = {name: texts.of(outcome.tokens[0]) for name, outcome in found.items()}
    ended = {name: reasons(outcome)[0] for name, outcome in found.items()}
    assert len(said["liked"]) == 2
    assert found["liked"].tokens[0][-1] == END
    assert len(said["disliked"]) == len(said["ignored"]) == 50
    assert END not in found["ignored"].tokens[0]
    assert ended["ignored, cut"] == "length"
    assert said["only end"] == "ab"
    assert len(found["not yet"].tokens[0]) == 21
    assert (said["exactly"], said["short"]) == ("x" * 10, "x" * 9)
    assert (said["own stop"][-1], said["own stop, not yet"]) == ("c", "ccccc")
    stopped = {name for name, reason in ended.items() if reason == "stop"}
    assert stopped == set(ended) - {"ignored, cut", "short"}


def test_tokens_that_are_not_allowed_never_win(bytes_core: EngineCore, bytes_bundle: Bundle) -> None:
    """Tokens that the grammar does not allow have no probability, however large a bias is."""
    texts = Texts(bytes_bundle)
    liked = tuple((token_id, 100.0) for token_id in texts.ids("xyz"))
    disliked = tuple((token_id, -100.0) for token_id in texts.ids("abc"))
    bias = {"logit_bias": (*liked, *disliked)}
    more = [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.1}, {"typical_p": 0.5}, {"min_p": 0.9}]
    found = run(
        bytes_core,
        *(within(f"r{i}", texts.ids("the dog"), regex("[abc]{30}"), **bias, **one) for i, one in enumerate(more)),
    )
    for outcome in found.values():
        assert re.fullmatch("[abc]{30}", texts.of(outcome.tokens[0]))


def test_a_device_samples_within_grammars_too(
    bytes_core: EngineCore, bytes_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler of devices, which waits once a step, gives the texts and log probabilities of the host's, within
    grammars and beside them, with whatever else changes logits."""
    texts = Texts(bytes_bundle)
    changes = {"bad_words": ((texts.ids("a")[0],),), "no_repeat_ngram_size": 3, "frequency_penalty": 0.5}
    requests = [
        *mixed(texts),
        within("min", texts.ids("the dog"), regex("[a-e]{0,40}"), min_tokens=12, seed=3),
        within("changed", texts.ids("the dog"), regex("[a-z ]{0,60}"), seed=4, logprobs=1, **changes),
        within("changed plain", texts.ids("the dog"), None, seed=4, max_tokens=30, **changes),
        within("choices", texts.ids("the dog"), regex("[a-z]{5,20}"), n=2, repetition_penalty=1.5),
    ]
    plain = run(bytes_core, *requests)
    steps = []

    def noted(logits: Any) -> bool:
        steps.append(len(logits))
        return True

    monkeypatch.setattr(device_sampler, "is_remote", noted)
    found = run(bytes_core, *requests)
    assert len(steps) > 30
    for name, outcome in plain.items():
        assert found[name].tokens == outcome.tokens, name
        assert reasons(found[name]) == reasons(outcome)
        own, other = found[name].logprobs[0], outcome.logprobs[0]
        assert [one.token_id for one in own] == [one.token_id for one in other]
        # the prompt's last bits depend on how much of it was found again
        assert [one.logprob for one in own] == pytest.approx([one.logprob for one in other], abs=1e-3)


def test_masks_are_unpacked_on_a_device() -> None:
    """Bits that are unpacked by torch are those that numpy unpacks, the highest of a word too."""
    masks = np.random.default_rng(0).integers(0, 1 << 32, (3, 5), dtype=np.uint32)
    wanted = unpacked(masks, 140)
    assert np.array_equal(unpacked_by_torch(torch.from_numpy(masks.view(np.int32)), 140).numpy(), wanted)


def test_log_probabilities_are_of_the_whole_distribution(bytes_core: EngineCore, bytes_bundle: Bundle) -> None:
    """Log probabilities are of the model's unconstrained distribution, one for every token, including those that the
    grammar forces."""
    texts = Texts(bytes_bundle)
    request = within("r", texts.ids("the dog"), schema({"const": {"name": "Bob"}}), logprobs=3, temperature=0.0)
    found = run(bytes_core, request)["r"]
    assert texts.of(found.tokens[0]) == '{"name":"Bob"}'
    assert [one.token_id for one in found.logprobs[0]] == found.tokens[0]
    steps = run(bytes_core, request_of("p", texts.ids("the dog"), max_tokens=1, logprobs=3))["p"]
    assert found.logprobs[0][0].top == steps.logprobs[0][0].top


def test_fast_forward_saves_steps(bytes_core: EngineCore, bytes_bundle: Bundle) -> None:
    """Fast-forward of forced tokens takes fewer steps and gives the same text and token count."""
    texts = Texts(bytes_bundle)
    value = {"name": "the quick brown fox", "tags": ["red", "green"]}
    steps, said, counted = {}, {}, {}
    for on in (False, True):
        request = within(f"{on}", texts.ids("the dog"), schema({"const": value}, fast_forward=on))
        before, generated = bytes_core.health().steps, bytes_core.health().generated_tokens
        found = run(bytes_core, request)[request.request_id]
        steps[on] = bytes_core.health().steps - before
        said[on] = texts.of(found.tokens[0])
        counted[on] = bytes_core.health().generated_tokens - generated
        assert found.finished[0].num_generated_tokens == len(found.tokens[0]) == counted[on]
    assert said[True] == said[False] == json.dumps(value, separators=(",", ":"))
    assert steps[False] == counted[False]
    assert steps[True] == 0  # the grammar has decided all of it


def test_forced_tokens_are_bounded_by_max_tokens(bytes_core: EngineCore, bytes_bundle: Bundle) -> None:
    """A text that the grammar decides is cut where any other is."""
    texts = Texts(bytes_bundle)
    found = run(bytes_core, within("r", texts.ids("the dog"), regex("x{100}"), max_tokens=7))["r"]
    assert len(found.tokens[0]) == 7
    assert reasons(found) == ["length"]
