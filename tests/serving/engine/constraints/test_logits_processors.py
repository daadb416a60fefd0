"""Logits processors of a request: equal to transformers' own processors over the same logits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from engine_runs import TOKEN_BYTES, Outcome, run, sequence_of, take
from tiny_models import VOCAB, request_of

from mlflow_llm.serving.engine.constraints.logits_processors import ANY, LogitsProcessors
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.sampling.sampler import adjust, sample
from mlflow_llm.serving.engine.scheduling.sequence import NO_ALLOWED_TOKEN
from mlflow_llm.serving.engine.scheduling.speculation import DraftedPosition
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Sampling, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

FORBIDDEN = float("-inf")


def make_core(bundle: Bundle, **more: Any) -> EngineCore:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 22, **more}
    return EngineCore(bundle, EngineSettings(**settings))


def bias_of(values: Any) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def random_request(rng: random.Random, number: int, **more: Any) -> ValidRequest:
    """Return a request of few different tokens, so that words and n-grams occur."""
    tokens = [rng.randint(3, 9) for _ in range(rng.randint(8, 40))]
    words = [tuple(rng.randint(3, 9) for _ in range(rng.randint(1, 4))) for _ in range(rng.choice([0, 3, 12]))]
    bias = np.random.default_rng(number).normal(size=VOCAB).astype("<f4")
    size = rng.randint(1, len(tokens))
    parameters = {
        "max_tokens": 60,
        "bad_words": tuple(words),
        "no_repeat_ngram_size": rng.choice([0, 1, 2, 3, 4]),
        "embedding_bias": rng.choice([None, bias.tobytes()]),
        "repetition_penalty": rng.choice([1.0, 1.4]),
        "min_tokens": rng.choice([0, 50]),
        "stop_token_ids": (2, 5),
        **more,
    }
    return request_of(f"r{number}", tokens[:size], seed=number, resumed=tuple(tokens[size:]), **parameters)


def processors(sampling: Sampling, num_prompt: int) -> list[Any]:
    """Return transformers' processors in the order of ``generate``, in which biases come first."""
    found: list[Any] = []
    if sampling.embedding_bias is not None:
        values = np.frombuffer(sampling.embedding_bias, dtype="<f4").tolist()
        found.append(tf.SequenceBiasLogitsProcessor({(token,): value for token, value in enumerate(values)}))
    if sampling.repetition_penalty != 1.0:
        found.append(tf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.no_repeat_ngram_size:
        found.append(tf.NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.bad_words:
        found.append(tf.NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    if sampling.min_tokens:
        ends = torch.tensor(sampling.stop_token_ids)
        found.append(tf.MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_tokens, ends))
    return found


def test_logits_are_those_of_transformers() -> None:
    """Bad words, repeated n-grams, biases, the repetition penalty and min_tokens, in one batch of random requests."""
    rng = random.Random(3)
    sequences = [sequence_of(random_request(rng, number), number) for number in range(150)]
    logits = torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(2))
    found = logits.clone()
    adjust(found, sequences)
    for i, sequence in enumerate(sequences):
        ids = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
        expected = logits[i : i + 1].clone()
        for processor in processors(sequence.sampling, sequence.num_prompt):
            expected = processor(ids, expected)
        assert torch.equal(found[i], expected[0])


def test_long_ngrams_in_texts_that_repeat_themselves() -> None:
    """N-grams of any length equal transformers', also in a text of 100,000 equal tokens."""
    rng = random.Random(9)
    for number in range(60):
        words = [[rng.randint(3, 4) for _ in range(rng.randint(1, 90))] for _ in range(2)]
        tokens = [token for _ in range(4) for token in rng.choice(words)][:240] or [3]
        ngram = rng.choice([1, 2, 63, 64, 65, 66, 90, 120, len(tokens), len(tokens) + 1])
        found = torch.zeros(1, VOCAB)
        adjust(found, [sequence_of(request_of(f"r{number}", tokens, no_repeat_ngram_size=ngram))])
        expected = tf.NoRepeatNGramLogitsProcessor(ngram)(torch.tensor([tokens]), torch.zeros(1, VOCAB))
        assert torch.equal(found, expected)
    once = sequence_of(request_of("r", [5] * 100_000, no_repeat_ngram_size=50_000), max_model_len=100_100)
    found = torch.zeros(1, VOCAB)
    adjust(found, [once])
    assert found[0].nonzero().tolist() == [[5]]


def test_a_drafted_place_is_adjusted_as_if_its_drafts_had_been_drawn() -> None:
    """Words and n-grams count the drafts before the place."""
    rng = random.Random(4)
    for number in range(20):
        request = random_request(rng, number)
        whole = sequence_of(request)
        ahead = sequence_of(request)
        ahead.num_tokens -= min(2, ahead.num_generated)
        logits = torch.randn(1, VOCAB)
        rows = [logits.clone(), logits.clone()]
        adjust(rows[0], [whole])
        adjust(rows[1], [DraftedPosition(ahead, whole.num_tokens - ahead.num_tokens)])
        assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("of_prompt", [False, True])
def test_penalties_count_the_prompt_where_it_is_asked_for(of_prompt: bool) -> None:
    """Presence and frequency count the output, with penalize_prompt the prompt too: before the first token as well."""
    more = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "penalize_prompt": of_prompt}
    for output in ((), (7, 8)):
        found = torch.zeros(1, VOCAB)
        adjust(found, [sequence_of(request_of("r", (5, 5, 7), resumed=output, max_tokens=9, **more))])
        expected = torch.zeros(VOCAB)
        for token in ((5, 5, 7) if of_prompt else ()) + output:
            expected[token] -= 0.25 + 0.5 * (expected[token] == 0)
        assert torch.equal(found[0], expected)


def test_ids_after_the_vocabulary_are_not_counted() -> None:
    """Prompt ids that are rows of a prompt table are counted by no penalty."""
    prompt = (VOCAB + 3, 5, VOCAB, 5, VOCAB + 3)
    more: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "penalize_prompt": True}
    found = torch.ones(1, VOCAB)
    adjust(found, [sequence_of(request_of("r", prompt, no_repeat_ngram_size=1, **more))])
    assert found[0, 5] == FORBIDDEN
    assert (found[0] == 1.0).sum() == VOCAB - 1


def test_a_forbidden_token_is_never_drawn() -> None:
    """A forbidden token is never drawn at any temperature; rows beside it draw as they do alone."""
    words = tuple((token,) for token in range(3, 100))
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.7}, {"top_k": 5}, {"typical_p": 0.8}, {"min_p": 0.2}]
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(5))
    rows = []
    for i in range(40):
        more = kinds[i % 5] | ({"bad_words": words} if i % 2 else {})
        rows.append(sequence_of(request_of("r", (1, 2), seed=i, temperature=1.3, **more)))
    drawn = [one.token_id for one in sample(logits, rows)]
    assert all(not 3 <= token < 100 for token in drawn[1::2])
    assert drawn == [sample(logits[i : i + 1], [one])[0].token_id for i, one in enumerate(rows)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_forbidden_has_no_token(temperature: float) -> None:
    """A row whose tokens are all forbidden reports so; log probabilities of other rows are of the unchanged
    distribution."""
    everything = bias_of([FORBIDDEN] * VOCAB)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = [
        sequence_of(request_of("r", (1, 2), temperature=temperature, logprobs=1, embedding_bias=everything)),
        sequence_of(request_of("r", (1, 2), temperature=temperature, logprobs=1, bad_words=((4,),))),
    ]
    dead, alive = sample(logits, rows)
    assert dead.token_id == NO_ALLOWED_TOKEN
    assert dead.logprob is None
    assert alive.logprob is not None
    scores = torch.log_softmax(logits[1], -1)
    assert alive.logprob.logprob == pytest.approx(scores[alive.token_id].item(), abs=1e-6)


@torch.inference_mode()
def generated(model: Any, request: ValidRequest) -> list[int]:
    sampling, prompt = request.sampling, request.sequences[0].prompt_token_ids
    assert sampling is not None
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(sampling.stop_token_ids) or None,
        bad_words_ids=[list(word) for word in sampling.bad_words] or None,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        repetition_penalty=sampling.repetition_penalty,
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def test_texts_are_those_of_generate(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """Greedy texts of mixed requests, together and preempted, are those of generate()."""
    rng = random.Random(7)
    core = make_core(tiny_bundle, kv_cache_memory=160 * TOKEN_BYTES)
    requests = []
    for number in range(12):
        plain = [3, 4, 5, 6] * rng.randint(1, 4)
        first = generated(tiny_llama, request_of("x", plain, max_tokens=10))
        requests.append(
            request_of(
                f"r{number}",
                plain,
                max_tokens=30,
                min_tokens=rng.choice([0, 5]),
                stop_token_ids=rng.choice([(), (2, 9)]),
                bad_words=tuple(tuple(first[i : i + rng.randint(1, 3)]) for i in range(rng.choice([0, 2]))),
                no_repeat_ngram_size=rng.choice([0, 2, 3]),
                repetition_penalty=rng.choice([1.0, 1.2]),
            )
        )
    for part in (requests[:3], requests[3:]):
        outcomes = run(core, *part)
        for request in part:
            assert outcomes[request.request_id].tokens[0] == generated(tiny_llama, request)
    assert core.parts.scheduler.num_preemptions > 0
    core.close()


def test_a_resumed_text_goes_on_as_it_would_have(tiny_bundle: Bundle) -> None:
    """Words, n-grams and stop sequences count the tokens of an earlier attempt, wherever it was interrupted."""
    core = make_core(tiny_bundle)
    more: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 0.9,
        "no_repeat_ngram_size": 2,
        "bad_words": ((5,), (7, 8)),
    }
    free = run(core, request_of("free", (4, 5, 6), **more))["free"].tokens[0]
    more["stop_sequences"] = (tuple(free[10:13]), (200 % VOCAB, 3))
    whole = run(core, request_of("whole", (4, 5, 6), **more))["whole"]
    assert (whole.tokens[0], whole.finished[0].reason) == (free[:13], "stop")
    for at in (1, 11, 12, 13):
        outcome = run(core, request_of(f"at-{at}", (4, 5, 6), resumed=tuple(free[:at]), **more))[f"at-{at}"]
        assert (outcome.tokens[0], outcome.finished[0].reason) == (free[at:13], "stop")
    core.close()


def test_a_text_without_a_token_to_go_on_with_fails_alone(tiny_bundle: Bundle) -> None:
    """A text left without an allowed token fails alone, by the field's name, after the tokens already sent."""
    core = make_core(tiny_bundle, max_num_seqs=4)
    outcomes = {"a": Outcome(), "b": Outcome()}
    core.add(request_of("a", (4, 5), max_tokens=200, no_repeat_ngram_size=1, stream=True))
    core.add(request_of("b", (4, 5), max_tokens=200))
    take(core, outcomes)
    assert sorted([4, 5, *outcomes["a"].tokens[0]]) == list(range(VOCAB))
    failed = outcomes["a"].failed
    assert failed is not None
    assert (failed.kind, failed.param) == ("invalid_field", "no_repeat_ngram_size")
    assert len(outcomes["b"].tokens[0]) == 200
    core.close()


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"bad_words": ((5, VOCAB),)}, "bad_words"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"stop_sequences": ((5, -1),)}, "stop_sequences"),
        ({"embedding_bias": b"1234"}, "embedding_bias"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
    ],
)
def test_token_ids_that_do_not_fit_the_model_are_refused(tiny_bundle: Bundle, more: dict[str, Any], field: str) -> None:
    """The engine refuses token ids that do not fit the model."""
    core = make_core(tiny_bundle)
    failed = run(core, request_of("a", (4, 5), **more))["a"].failed
    assert failed is not None
    assert (failed.kind, failed.param) == ("invalid_field", field)
    core.close()


def test_stop_sequences_end_texts_in_the_engine(tiny_bundle: Bundle) -> None:
    """The first complete stop sequence ends each choice, from min_tokens on, also after preemption."""
    core = make_core(tiny_bundle)
    free = run(core, request_of("free", (4, 5, 6), n=2, max_tokens=20, temperature=1.0))["free"].tokens
    runs = tuple(tuple(free[i][4:7]) for i in range(2))
    found = run(core, request_of("a", (4, 5, 6), n=2, max_tokens=20, temperature=1.0, stop_sequences=runs))["a"]
    assert [found.tokens[i] for i in range(2)] == [free[i][:7] for i in range(2)]
    assert {one.reason for one in found.finished.values()} == {"stop"}
    late = run(core, request_of("b", (4, 5, 6), max_tokens=20, temperature=1.0, min_tokens=8, stop_sequences=runs))["b"]
    assert late.tokens[0] == free[0]
    core.close()


def test_pairs_are_what_is_forbidden_after_one_more_token() -> None:
    """``forbidden_pairs`` of a text give, for each token that may come next, what ``forbidden`` gives after it."""
    rng = random.Random(3)
    for turn in range(150):
        kinds = rng.choice([1, 2, 4])
        tokens = np.array([rng.randint(3, 2 + kinds) for _ in range(rng.randint(0, 160))], dtype=np.int32)
        words = tuple(tuple(rng.randint(3, 5) for _ in range(rng.randint(1, 4))) for _ in range(rng.choice([0, 6])))
        size = rng.choice([0, 1, 2, 3, 5, 63, 64, 65, 66, 90])
        processors = LogitsProcessors(Sampling(max_tokens=1, bad_words=words, no_repeat_ngram_size=size))
        previous, then = processors.forbidden_pairs(tokens)
        for token in (3, 4, 5, 9):
            found = then[(previous == token) | (previous == ANY)]
            wanted = processors.forbidden(np.append(tokens, np.int32(token)))
            assert set(np.where(found == ANY, token, found).tolist()) == set(wanted.tolist()), (turn, token)
