"""Constrained beam searches: transformers' texts, none of which contains anything forbidden."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from beam_runs import EARLY, texts
from beam_runs import make_core as tiny_core
from engine_runs import TOKEN_BYTES, Outcome, run
from grammar_runs import PADDING, Texts, bundle_of, regex, schema
from llguidance import LLMatcher
from tiny_models import FAMILIES, VOCAB, make_model, prompt_of, request_of, save_bundle
from transformers import AutoConfig, AutoModelForCausalLM

from mlflow_llm.serving.engine.constraints import grammar_tokenizer
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Beams, ToolUse, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

END = 2


class _Ends(tf.StoppingCriteria):  # type: ignore[misc]
    """The stop sequences that count from min_tokens on."""

    def __init__(self, request: ValidRequest) -> None:
        assert request.sampling is not None
        self._runs, self._minimum = request.sampling.stop_sequences, request.sampling.min_tokens
        self._prompt = len(request.sequences[0].prompt_token_ids)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        rows = input_ids[:, self._prompt :].tolist()
        found = [
            len(row) >= self._minimum and any(tuple(row[-len(run) :]) == run for run in self._runs) for row in rows
        ]
        return torch.tensor(found)


@torch.inference_mode()
def expected(model: Any, request: ValidRequest, criteria: Any = None, **more: Any) -> list[list[int]]:
    """Return the texts of ``generate(num_beams=…)``."""
    sampling, prompt = request.sampling, request.sequences[0].prompt_token_ids
    assert sampling is not None
    assert sampling.beams is not None
    bias = None
    if sampling.embedding_bias is not None:
        values = np.frombuffer(sampling.embedding_bias, dtype="<f4").tolist()
        bias = {(token,): value for token, value in enumerate(values)}
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=sampling.beams.width,
        num_return_sequences=request.n,
        length_penalty=sampling.beams.length_penalty,
        early_stopping=EARLY[sampling.beams.early_stopping],
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=0,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        repetition_penalty=sampling.repetition_penalty,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        bad_words_ids=[list(word) for word in sampling.bad_words] or None,
        sequence_bias=bias,
        stopping_criteria=[criteria or _Ends(request)],
        do_sample=False,
        **more,
    )
    found: list[list[int]] = out[:, len(prompt) :].tolist()
    return found


def check(outcome: Outcome, wanted: list[list[int]], request: ValidRequest) -> None:
    """Compare with transformers, which fills texts with the first end token or its padding."""
    assert request.sampling is not None
    ends = request.sampling.stop_token_ids
    found = texts(outcome)
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == theirs[: len(mine)]
        assert set(theirs[len(mine) :]) <= {0, -1, *ends[:1]}


def random_search(rng: random.Random, number: int) -> ValidRequest:
    width = rng.randint(2, 5)
    few = [rng.randint(3, VOCAB - 1) for _ in range(30)]
    words = tuple(tuple(rng.sample(few, rng.randint(1, 2))) for _ in range(rng.choice([0, 20])))
    bias = np.random.default_rng(number).normal(size=VOCAB).astype("<f4")
    runs = tuple(tuple(rng.choices(range(3, VOCAB), k=2)) for _ in range(1200)) if rng.random() < 0.5 else ()
    return request_of(
        f"beams-{number}",
        prompt_of(rng.randint(4, 20), number),
        n=rng.randint(1, width),
        max_tokens=rng.randint(2, 12),
        min_tokens=rng.choice([0, 0, 2]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        no_repeat_ngram_size=rng.choice([0, 1, 2]),
        bad_words=words,
        embedding_bias=rng.choice([None, bias.tobytes()]),
        stop_sequences=runs,
        stop_token_ids=tuple(rng.sample(few, rng.choice([0, 4]))),
        beams=Beams(
            width=width,
            length_penalty=rng.choice([-1.0, 0.0, 1.0]),
            early_stopping=rng.choice(["heuristic", "first", "never"]),
        ),
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_searches_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Bad words, n-grams, biases, penalties, min_tokens and stop sequences, in searches at once and preempted."""
    model = make_model(FAMILIES[family]())
    token_bytes = (2 if family == "gpt2" else 1) * TOKEN_BYTES
    core = tiny_core(save_bundle(model, tmp_path), kv_cache_memory=170 * token_bytes)
    rng = random.Random(12)
    searches = [random_search(rng, number) for number in range(16)]
    outcomes = run(core, *searches)
    ended = 0
    for request in searches:
        check(outcomes[request.request_id], expected(model, request), request)
        ends = outcomes[request.request_id].finished.values()
        ended += any(one.reason == "stop" for one in ends) and not request.sampling.stop_token_ids  # type: ignore[union-attr]
    assert ended
    assert core.parts.scheduler.num_preemptions > 0
    core.close()


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def spoken(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Any, Texts]:
    """Provide a model that writes texts, the same for transformers, and its tokenizer."""
    bundle = bundle_of(request.param, tmp_path_factory.mktemp(request.param))
    model = AutoModelForCausalLM.from_pretrained(bundle.model_dir, attn_implementation="eager")
    return bundle, model, Texts(bundle)


def make_core(bundle: Bundle, **more: Any) -> EngineCore:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "kv_cache_memory": 1 << 22, **more}
    return EngineCore(bundle, EngineSettings(**settings))


def test_stop_strings_end_beams(spoken: tuple[Bundle, Any, Texts]) -> None:
    """The stop strings end beams as in transformers: with the token that completes one, also across tokens."""
    bundle, model, words = spoken
    core = make_core(bundle)
    rng = random.Random(2)
    stopped = 0
    for number in range(12):
        prompt = words.ids("the quick brown fox")
        free = request_of("free", prompt, max_tokens=10, beams=Beams(width=3, length_penalty=0.0))
        written = words.of(texts(run(core, free)["free"])[0])
        places = [at for at in range(len(written)) if written[at : at + 2].isascii()]
        at = rng.choice(places)
        stops = tuple(sorted({written[at : at + rng.randint(1, 2)], "zzzz", rng.choice(["e", "qu", "ö"])}))
        request = request_of(
            f"r{number}",
            prompt,
            n=2,
            max_tokens=10,
            stop=stops,
            stop_token_ids=(END,),
            beams=Beams(width=3, length_penalty=rng.choice([0.0, 1.0]), early_stopping=rng.choice(["first", "never"])),
        )
        outcome = run(core, request)[request.request_id]
        check(outcome, expected(model, request, criteria=_Strings(words, len(prompt), stops)), request)
        for index, ids in outcome.tokens.items():
            has_stop = any(stop in words.of(ids) for stop in stops)
            assert (outcome.finished[index].reason == "stop") == (has_stop or ids[-1] == END)
            stopped += has_stop
    assert stopped > 3
    core.close()


class _Strings(tf.StoppingCriteria):  # type: ignore[misc]
    """The stop strings in the generated text alone: transformers' own criteria look into the prompt too."""

    def __init__(self, words: Texts, prompt: int, stops: tuple[str, ...]) -> None:
        self._words, self._prompt, self._stops = words, prompt, stops

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        rows = [self._words.of(row) for row in input_ids[:, self._prompt :].tolist()]
        return torch.tensor([any(stop in row for stop in self._stops) for row in rows])


@pytest.mark.parametrize("prompt", [("fox",), (), None])
def test_the_space_before_the_first_word(tmp_path: Path, prompt: tuple[str, ...] | None) -> None:
    """A stop string may begin with it where the text continues its prompt, and where there is nothing before it not."""
    bundle = bundle_of("byte_fallback", tmp_path)
    core, words = make_core(bundle), Texts(bundle)
    (word,) = (i for i in words.ids("the") if words.tokenizer.convert_ids_to_tokens(i) == "\u2581the")
    ids = (1,) if prompt == () else (1, *words.ids("fox"))
    more: dict[str, Any] = {"max_tokens": 4, "logit_bias": ((word, 100.0),), "stop": (" the",), "beams": Beams(width=2)}
    found = run(core, request_of("r", ids, continues_prompt=prompt is not None, **more))["r"]
    assert len(found.tokens[0]) == (1 if prompt else 2)
    core.close()


def test_stop_strings_count_from_min_tokens_on(spoken: tuple[Bundle, Any, Texts]) -> None:
    """A stop string that began before min_tokens does not end a beam."""
    bundle, _, words = spoken
    core = make_core(bundle)
    more: dict[str, Any] = {"max_tokens": 20, "grammar": regex("(ab){10}"), "beams": Beams(width=2), "stop": ("bab",)}
    for minimum in range(6):
        outcome = run(core, request_of(f"r{minimum}", words.ids("fox"), min_tokens=minimum, **more))[f"r{minimum}"]
        assert outcome.failed is None
        ids = outcome.tokens[0]
        starts = [len(words.of(ids[:count])) for count in range(len(ids) + 1)]
        place = starts[max(0, minimum - 1)]  # of the first token that counts
        end = words.of(ids).find("bab", place) + 3
        assert starts[-2] < end <= starts[-1] or len(words.of(ids)) == 20
        assert outcome.finished[0].reason == "stop"
    core.close()


def test_stop_strings_need_a_readable_tokenizer(tmp_path: Path) -> None:
    """A search with stop strings is refused if the tokenizer cannot be read for grammars."""
    core = make_core(bundle_of("word_piece", tmp_path))
    core.grammars.compiler.load_tokenizer = unreadable
    found = run(core, request_of("a", (4, 5), stop=("x",), beams=Beams(width=2)), request_of("b", (4, 5)))
    failed = found["a"].failed
    assert failed is not None
    assert (failed.kind, failed.param) == ("invalid_field", "stop")
    assert "with beam search" in failed.message
    assert found["b"].finished
    core.close()


def unreadable() -> Any:
    raise ValueError("its decoder makes a text of tokens that depends on more than each of them")


def test_stop_strings_need_a_tokenizer(tiny_bundle: Bundle) -> None:
    """A model without a tokenizer refuses searches with stop strings and accepts stop sequences."""
    core = tiny_core(tiny_bundle)
    failed = run(core, request_of("a", (4, 5), stop=("x",), beams=Beams(width=2)))["a"].failed
    assert failed is not None
    assert (failed.kind, failed.param) == ("invalid_field", "stop")
    core.close()


class _Held:
    """The tokens that a grammar matcher allows after the whole text, for ``prefix_allowed_tokens_fn``."""

    def __init__(self, bundle: Bundle, request: ValidRequest) -> None:
        assert request.sampling is not None
        assert request.sampling.grammar is not None
        self._prompt = len(request.sequences[0].prompt_token_ids)
        self._size = AutoConfig.from_pretrained(bundle.model_dir).vocab_size
        tokenizer = grammar_tokenizer.load(bundle, self._size, trust_remote_code=False)
        self._matcher = LLMatcher(tokenizer.matched, request.sampling.grammar.source)

    def __call__(self, batch: int, input_ids: Any) -> list[int]:
        ids = input_ids[self._prompt :].tolist()
        matcher = self._matcher.deep_copy()
        if END in ids or not matcher.consume_tokens(ids):
            return [0]
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        return [END if token == self._size else int(token) for token in np.flatnonzero(allowed)]


def test_beams_within_a_grammar(spoken: tuple[Bundle, Any, Texts]) -> None:
    """Each beam follows the grammar by itself: the texts equal transformers' with the same allowed tokens, with scores
    of the model's own distribution."""
    bundle, model, words = spoken
    core = make_core(bundle)
    whole = ["the fox", "the dog", "the dogs", "a lazy dog", "yes", "no", "note"]
    prompt = words.ids("the quick brown")
    for penalty in (0.0, 1.0):
        for width in (2, 3, 5):
            request = request_of(
                f"w{width}-{penalty}",
                prompt,
                n=2,
                max_tokens=14,
                stop_token_ids=(END,),
                grammar=regex("|".join(whole)),
                beams=Beams(width=width, length_penalty=penalty, early_stopping="never"),
            )
            found = run(core, request)[request.request_id]
            held = _Held(bundle, request)
            check(found, expected(model, request, prefix_allowed_tokens_fn=held), request)
            assert {one.reason for one in found.finished.values()} == {"stop"}
            assert set(words.texts(found).values()) <= set(whole)
    core.close()


@pytest.mark.parametrize("groups", [1, 2])
def test_json_searches_write_whole_documents(spoken: tuple[Bundle, Any, Texts], groups: int) -> None:
    """Searches for JSON write whole documents, with little memory, beside sampled texts and in beam groups; a text cut
    by its length says so."""
    bundle, _, words = spoken
    core = make_core(bundle, kv_cache_memory=320 * TOKEN_BYTES)
    properties = {"a": {"enum": ["x", "the"]}, "b": {"type": "boolean"}, "c": {"type": "array", "items": {"enum": [1]}}}
    form = schema({"type": "object", "properties": properties, "additionalProperties": False, "required": ["b"]})
    beams = Beams(width=4, num_groups=groups, diversity_penalty=2.0 if groups > 1 else 0.0)
    requests = [
        request_of(
            f"r{i}",
            words.ids("quick brown fox"[i:]),
            n=3,
            max_tokens=60,
            stop_token_ids=(END,) if i % 2 else (),
            grammar=form,
            beams=beams if i < 4 else None,
        )
        for i in range(6)
    ]
    outcomes = run(core, *requests)
    whole = 0
    for request in requests:
        outcome = outcomes[request.request_id]
        assert outcome.failed is None, outcome.failed
        for index, text in words.texts(outcome).items():
            if outcome.finished[index].reason == "stop":
                assert json.loads(text).keys() <= {"a", "b", "c"}
                whole += 1
            else:
                assert len(outcome.tokens[index]) == 60
    assert whole > 6
    core.close()


def test_searches_within_grammars_give_way_and_come_back(spoken: tuple[Bundle, Any, Texts]) -> None:
    """Preempted searches within grammars continue where they were and give the texts of each search alone."""
    bundle, _, words = spoken
    beams = Beams(width=4, early_stopping="never")
    more: dict[str, Any] = {"n": 2, "max_tokens": 50, "grammar": regex("([ab] ?){90}"), "beams": beams}
    prompts, stops = [words.ids(text) for text in ("fox", "brown", "the dog")], [(), ("b b a",), (" a b", "bbb")]
    requests = [request_of(f"r{i}", prompts[i], stop=stops[i], **more) for i in range(3)]
    wide, tight = make_core(bundle), make_core(bundle, kv_cache_memory=300 * TOKEN_BYTES)
    outcomes = run(tight, *requests)
    assert tight.parts.scheduler.num_preemptions > 0
    for request in requests:
        found, alone = outcomes[request.request_id], run(wide, request)[request.request_id]
        assert found.failed is None, found.failed
        assert texts(found) == texts(alone)
        assert found.finished.keys() == alone.finished.keys()
        assert [one.reason for one in found.finished.values()] == [one.reason for one in alone.finished.values()]
    wide.close(), tight.close()


def test_keys_come_once(spoken: tuple[Bundle, Any, Texts]) -> None:
    """Each beam tracks the keys of its own text, so open objects have no duplicate keys."""
    bundle, _, words = spoken
    core = make_core(bundle)
    keys = {"type": "object", "patternProperties": {"^[abc]$": {"enum": [1]}}, "additionalProperties": False}
    request = request_of(
        "r",
        words.ids("fox"),
        n=5,
        max_tokens=50,
        grammar=schema(keys | {"minProperties": 3}, distinct_keys=True),
        beams=Beams(width=5),
    )
    outcome = run(core, request)["r"]
    assert outcome.failed is None, outcome.failed
    found = [words.of(tokens) for tokens in outcome.tokens.values()]
    assert found
    for text in found:
        pairs: list[Any] = json.loads(text, object_pairs_hook=list)
        assert sorted(key for key, _ in pairs) == ["a", "b", "c"]
    core.close()


def test_fewer_texts_than_were_asked_for(spoken: tuple[Bundle, Any, Texts]) -> None:
    """A grammar with only two texts gives these two, however they are tokenised; other choices are empty and
    complete."""
    bundle, _, words = spoken
    core = make_core(bundle)
    for ends in ((END,), ()):
        request = request_of(
            f"r{len(ends)}",
            words.ids("fox"),
            n=4,
            max_tokens=9,
            stop_token_ids=ends,
            grammar=regex("yes|no"),
            beams=Beams(width=4),
        )
        outcome = run(core, request)[request.request_id]
        assert outcome.failed is None
        found = [words.of(outcome.tokens[index]) for index in range(4)]
        assert {"yes", "no", ""} >= set(found) >= {"yes", "no"}
        assert {one.reason for one in outcome.finished.values()} == {"stop"}
    core.close()


def test_a_text_that_is_cut_says_so(spoken: tuple[Bundle, Any, Texts]) -> None:
    """A text cut at max_tokens within its grammar ends with "length"; one complete at its last token ends with
    "stop"."""
    bundle, _, words = spoken
    core = make_core(bundle)
    for maximum, reason in ((2, "length"), (40, "stop")):
        more: dict[str, Any] = {"max_tokens": maximum, "grammar": regex("(ab ){6}"), "beams": Beams(width=2)}
        outcome = run(core, request_of(f"r{maximum}", words.ids("fox"), **more))[f"r{maximum}"]
        assert outcome.finished[0].reason == reason
        assert re.fullmatch("(ab ){6}", words.of(outcome.tokens[0])) or reason == "length"
    core.close()


@pytest.mark.parametrize("searches", [True, False])
def test_bad_words_that_leave_a_beam_no_token(spoken: tuple[Bundle, Any, Texts], searches: bool) -> None:
    """A beam left without a token by bad words dies while others continue; if none can, the request fails by the
    field."""
    bundle, _, words = spoken
    core = make_core(bundle)
    vocabulary = range(words.tokenizer.backend_tokenizer.get_vocab_size() + PADDING)
    starts = {text: tuple(i for i in vocabulary if i > END and words.of([i]).startswith(text)) for text in ("y", "n")}
    more: dict[str, Any] = {"max_tokens": 9, "stop_token_ids": (END,), "grammar": regex("yes|no")}
    more["beams"] = Beams(width=2) if searches else None
    one = run(core, request_of("one", words.ids("fox"), bad_words=tuple((i,) for i in starts["y"]), **more))["one"]
    assert words.texts(one)[0] == "no"
    both = tuple((i,) for part in starts.values() for i in part)
    failed = run(core, request_of("both", words.ids("fox"), bad_words=both, **more))["both"].failed
    assert failed is not None
    assert (failed.kind, failed.param) == ("invalid_field", "bad_words")
    assert not core.has_work()
    core.close()


def test_searches_for_calls(spoken: tuple[Bundle, Any, Texts]) -> None:
    """A text that may call tools begins as the caller sees it, where decoders take a space away: stop strings too."""
    bundle, _, words = spoken
    core = make_core(bundle)
    more: dict[str, Any] = {"max_tokens": 8, "grammar": regex(" ?yes yes yes"), "beams": Beams(width=2)}
    request = request_of("r", words.ids("fox"), stop=(" yes",), tools=ToolUse(names=("f",)), **more)
    outcome = run(core, request)["r"]
    assert outcome.failed is None
    text = words.of(outcome.tokens[0])
    seen = text if bundle.content_hash == "byte_level" else text.removeprefix(" ")
    assert seen.endswith(" yes")
    assert seen.count(" yes") == 1
    core.close()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_grammar_of_the_empty_text_alone(spoken: tuple[Bundle, Any, Texts], groups: int) -> None:
    """If the grammar has only the empty text and no token ends it, all choices are empty and complete."""
    core = make_core(spoken[0])
    beams = Beams(width=4, num_groups=groups, diversity_penalty=0.5 * (groups - 1))
    found = run(core, request_of("a", prompt_of(5, 1), n=2, grammar=regex(""), beams=beams))["a"]
    assert found.failed is None
    assert [(one.reason, one.num_generated_tokens) for one in found.finished.values()] == [("stop", 0)] * 2
    core.close()
