"""Hashes of what was asked and answered, kept with the rows of the ledger."""

from __future__ import annotations

import msgspec
import pytest
import sqlalchemy as sa

from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.errors import Conflict, NotFound
from mlflow_llm.serving.interface.reply import CallDelta, Delta
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.metering.proof.answers import (
    MAX_CHOICES,
    MAX_SETTINGS,
    OutputHashes,
    asked_of,
    body_digest,
    prompt_digest,
)
from mlflow_llm.serving.metering.proof.chain_check import check
from mlflow_llm.serving.metering.proof.recorded import recorded
from mlflow_llm.serving.metering.store.tables import ledger as ledger_table

BODY = b'{"prompt": "Hi"}'
PLAIN = Sampling(max_tokens=4, temperature=0.5)


def request(sampling: Sampling | None, **changes: object) -> ValidRequest:
    fields = {"request_id": "r1", "task": "chat", "model": "m", "sampling": sampling} | changes
    return ValidRequest(sequences=(Sequence(prompt_token_ids=(5, 6), seed=2**64 - 1),), **fields)


def asked(sampling: Sampling | None = PLAIN, **changes: object):
    computed = {"kernels": "native", "threads": "2"}
    return asked_of(request(sampling, **changes), route="/v1/completions", body=body_digest(BODY), computed=computed)


@pytest.fixture
def answered(ledger, reserve_of):
    """Settle two requests with the same prompt and the same answer."""
    for name in ("r1", "r2"):
        lease = ledger.reserve(reserve_of(name, asked=asked()))
        output = OutputHashes(lease.proof_key)
        for part in ("Grü", "ß Gott"):
            output.add(Delta(index=0, text=part))
        lease.settle(completion=3, finish_reason="stop", said=output.said())
    return ledger


def test_a_row_recognises_its_prompt_and_its_text(store, answered):
    """The row of a request knows its body, its token ids and its text, and no others."""
    past = recorded(store, "cmpl-r1")
    assert (past.proof.seed, past.proof.settings["temperature"]) == (2**64 - 1, 0.5)
    assert (past.has_body(BODY), past.has_body(BODY + b" ")) == (True, False)
    assert (past.has_prompts([[5, 6]]), past.has_prompts([[5], [6]]), past.has_prompts([[5, 7]])) == (
        True,
        False,
        False,
    )
    assert (past.choices_with("Grüß Gott"), past.choices_with("Grüß Got")) == ([0], [])
    assert past.says([{"text": "Grüß Gott", "reasoning": "", "calls": ""}])
    assert not past.says([{"text": "Grüß Gott", "reasoning": "", "calls": "\0f\0{}"}])


def test_equal_prompts_and_answers_have_different_hashes(store, answered):
    """Hashes are keyed by store and request: rows do not show which requests were the same, nor what a guess hashes
    to."""
    rows = store.read(lambda c: c.execute(sa.select(ledger_table.c.proof, ledger_table.c.output)).all())
    (one, said), (other, other_said) = rows
    assert one["prompt"] != other["prompt"]
    assert one["body"] != other["body"]
    assert said != other_said
    for digest in (prompt_digest([[5, 6]]), body_digest(BODY)):
        assert digest.hex() not in (one["prompt"], one["body"])


def test_an_altered_hash_breaks_the_chain(store, answered):
    """The hashes of an answer are in the hash of its row."""
    answered.maintain()
    assert check(store).num_problems == 0
    row = sa.update(ledger_table).where(ledger_table.c.request_id == "r1")
    store.write(lambda connection: connection.execute(row.values(output="[]")))
    assert [one.request_id for one in check(store).problems] == ["r1"]


def test_rows_without_a_whole_answer_are_told(store, ledger, reserve_of):
    """A request that is unknown, of an earlier release, of embeddings or cut short is refused with the reason."""
    ledger.reserve(reserve_of("old")).settle()
    ledger.reserve(reserve_of("vector", task="embeddings", asked=asked(None))).settle()
    ledger.reserve(reserve_of("cut", asked=asked())).settle(status="aborted", finish_reason="abort")
    for name, kind, told in (
        ("none", NotFound, "never admitted"),
        ("old", Conflict, "an earlier release"),
        ("vector", Conflict, "it generated no text"),
        ("cut", Conflict, "its status is aborted"),
    ):
        with pytest.raises(kind, match=told):
            recorded(store, name)


@pytest.mark.parametrize("given", ["req-0a1b2c", "mine-1"])
def test_an_unknown_id_is_told_which_id_is_meant(store, answered, given):
    """An X-Request-Id finds no row; the error names the id to give, and where it and the given one are found."""
    with pytest.raises(NotFound, match=f"request {given} is not in the ledger") as error:
        recorded(store, given)
    for part in ("`id` of the reply", "`reply_id`", "X-Request-Id", "`request_id` of the access log"):
        assert part in str(error.value)


def test_pieces_may_be_divided_in_any_way():
    """The same choices have the same hashes, however their texts, reasoning and calls arrive."""
    whole, parts = OutputHashes(b"k"), OutputHashes(b"k")
    whole.add(Delta(index=0, text="ab", reasoning=""))
    whole.add(Delta(index=1, text="", calls=(CallDelta(index=0, id="c", name="f", arguments='{"a": 1}'),)))
    whole.add_text(2, "")
    parts.add_text(2, "")
    parts.add(Delta(index=1, text="", calls=(CallDelta(index=0, id="d", name="f"),)))
    for arguments in ('{"a"', ": 1}"):
        parts.add(Delta(index=1, text="", calls=(CallDelta(index=0, arguments=arguments),)))
    parts.add_text(0, "a")
    parts.add(Delta(index=0, text="b"))
    assert whole.said() == parts.said()
    assert len(whole.said()) == 3
    many = OutputHashes(b"k")
    for index in range(MAX_CHOICES + 1):
        many.add_text(index, "x")
    assert many.said() is None


@pytest.mark.parametrize(
    ("sampling", "changes"),
    [
        ({"grammar": Grammar(source="root ::= 'a'", field="grammar")}, {}),
        ({"logit_bias": ((1, 2.0),)}, {}),
        ({"logprobs": 2}, {}),
        ({}, {"stop": ("x" * MAX_SETTINGS,)}),
    ],
)
def test_settings_that_are_not_plain_need_the_body(sampling, changes):
    """Settings are kept where they repeat an answer by themselves and are small; else only the body repeats it."""
    found = asked(Sampling(max_tokens=4, **sampling), **changes)
    assert found.settings is None
    plain = asked(Sampling(max_tokens=4, top_k=3), stop=("a", "b"))
    assert (plain.settings["top_k"], plain.settings["stop"]) == (3, ["a", "b"])
    assert len(msgspec.json.encode(plain.settings)) < MAX_SETTINGS


def test_what_changes_bits_is_named(store, answered):
    """Another model, adapter or computation is named; threads only where they can change a result."""
    past = recorded(store, "r1")
    proof = msgspec.structs.replace(past.proof, computed={"kernels": "native", "threads": "8"})
    assert past.changes(msgspec.structs.replace(past, proof=proof)) == []
    proof = msgspec.structs.replace(past.proof, computed={"kernels": "torch", "threads": "8"})
    later = msgspec.structs.replace(past, proof=proof, content_hash="f00", model_version="m/2", adapter="pirate")
    assert past.changes(later) == [
        "model (no hash) then, m/2 (f00) now",
        "adapter None then, pirate now",
        "kernels native then, torch now",
        "threads 2 then, 8 now",
    ]
