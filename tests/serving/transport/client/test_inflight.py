"""The client's record of an in-flight request, and its continuation after the engine has died."""

from __future__ import annotations

import msgspec
import pytest
from transport_place import completion

from mlflow_llm.serving.interface.events import (
    DraftCounts,
    Embedded,
    Event,
    Finished,
    PromptScored,
    StepTiming,
    Timed,
    TokenLogprob,
    Tokens,
)
from mlflow_llm.serving.interface.request import Beams, ValidRequest
from mlflow_llm.serving.transport.client.inflight import MOVES, InflightRequest

MAX_TOKENS = 1000


class Sink(list[Event]):
    """A reader that keeps up."""

    paused, is_full, is_drained = False, False, False
    put = list.append


def running(request: ValidRequest, *events: Event) -> tuple[InflightRequest, Sink]:
    """Return ``request`` after its engine gave ``events``, and its reader's sink."""
    sink = Sink()
    inflight = InflightRequest(request, 1, sink)
    for event in events:
        inflight.deliver(event)
    return inflight, sink


def test_a_step_may_give_a_sequence_any_number_of_tokens() -> None:
    """A step may give a sequence none, one or several tokens, and the next attempt goes on after the last."""
    events = [Tokens(0, (5,)), Tokens(0, ()), Tokens(0, (6, 7, 8)), Tokens(1, (9, 10))]
    inflight, sink = running(completion(n=3), *events)
    assert sink == events
    again = inflight.continuation(MAX_TOKENS)
    assert again is not None
    assert [sequence.resumed_token_ids for sequence in again.sequences] == [(5, 6, 7, 8), (9, 10), ()]
    assert again.n == 3


def test_plain_tokens_need_no_further_processing() -> None:
    """Only plain tokens that their reader takes at once, and that end or pause nothing, need no further processing."""
    inflight, sink = running(completion(max_tokens=9))
    sink.put = lambda event: True  # type: ignore[assignment]
    assert not inflight.deliver(Tokens(0, (5,), num_cached_tokens=1))
    assert inflight.deliver(Tokens(0, (6, 7)))
    inflight.move("pausing")
    assert not inflight.deliver(Tokens(0, (8,)))
    inflight.move("paused")
    inflight.move("running")
    sink.put = lambda event: None  # type: ignore[assignment]
    assert not inflight.deliver(Tokens(0, (9,)))
    assert not inflight.deliver(Finished(0, "stop"))
    assert inflight.delivered == [[5, 6, 7, 8, 9]]
    assert inflight.done
    assert not inflight.deliver(Tokens(0, (10,)))
    assert inflight.delivered == [[5, 6, 7, 8, 9]]


@pytest.mark.parametrize(("last", "reason"), [((6, 7, 0), "stop"), ((6, 7, 8), "length")])
def test_a_sequence_whose_last_step_ended_it_is_not_run_again(last: tuple[int, ...], reason: str) -> None:
    """A sequence that lost only its ``Finished``, at a stop token or its full length, is not run again."""
    inflight, sink = running(completion(max_tokens=4), Tokens(0, (5,), num_cached_tokens=2), Tokens(0, last))
    assert inflight.continuation(MAX_TOKENS) is None
    assert inflight.done
    assert sink[-1] == Finished(0, reason, num_cached_tokens=2, num_generated_tokens=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("run", "over"), [((5, 6, 7), True), ((6, 7, 8), False), ((4, 5, 6, 7), False)])
def test_a_sequence_whose_last_tokens_ended_it_is_not_run_again(run: tuple[int, ...], over: bool) -> None:
    """A sequence whose last tokens were a stop sequence is not run again, whichever steps they came in."""
    request = completion(max_tokens=9)
    assert request.sampling is not None
    sampling = msgspec.structs.replace(request.sampling, stop_sequences=(run,))
    request = msgspec.structs.replace(request, sampling=sampling)
    inflight, sink = running(request, Tokens(0, (5,)), Tokens(0, (6, 7)))
    assert (inflight.continuation(MAX_TOKENS) is None) == over
    assert (sink[-1] == Finished(0, "stop", num_cached_tokens=0, num_generated_tokens=3)) == over


def test_a_scored_prompt_is_not_scored_again() -> None:
    """A scored prompt that lost only ``Finished`` is finished; an unscored one is run again and scored once."""
    request = completion(n=2, max_tokens=0)
    scored = PromptScored(0, (TokenLogprob(5, -1.0),))
    inflight, sink = running(request, scored)
    again = inflight.continuation(MAX_TOKENS)
    assert again is not None
    assert [sequence.seed for sequence in again.sequences] == [8]
    assert sink == [scored, Finished(0, "length", num_cached_tokens=0, num_generated_tokens=0)]
    for _ in range(2):
        inflight.deliver(PromptScored(0, ()))
    assert sink[2:] == [PromptScored(1, ())]


def test_pairs_that_are_run_again_keep_their_token_types() -> None:
    """The boundary between the texts of a pair is kept in a continuation, whichever pairs were answered."""
    request = msgspec.structs.replace(completion(n=3), task="score", n=1, sampling=None, second_from=(1, 2, 3))
    inflight, _ = running(request, Embedded(1, b"\0\0\0\0"))
    again = inflight.continuation(MAX_TOKENS)
    assert again is not None
    assert [sequence.seed for sequence in again.sequences] == [7, 9]
    assert again.second_from == (1, 3)


def test_the_second_attempt_numbers_only_what_is_left() -> None:
    """Events of the attempt arrive under the request's own numbers; a sequence that has ended gets no more."""
    inflight, sink = running(completion(n=3), Finished(1, "stop"), Tokens(2, (4, 5)))
    again = inflight.continuation(MAX_TOKENS)
    assert again is not None
    assert [sequence.seed for sequence in again.sequences] == [7, 9]
    assert again.n == 1
    inflight.deliver(Tokens(1, (6, 6)))
    assert sink[-1] == Tokens(2, (6, 6))
    assert inflight.delivered == [[], [], [4, 5, 6, 6]]


def test_an_illegal_move_raises() -> None:
    """A request pauses only while it runs, and runs again only once it is paused."""
    assert all(target in MOVES for targets in MOVES.values() for target in targets)
    inflight, _ = running(completion())
    with pytest.raises(AssertionError, match="running → running"):
        inflight.move("running")
    inflight.move("pausing")
    with pytest.raises(AssertionError, match="pausing → running"):
        inflight.move("running")


def test_tokens_of_an_earlier_attempt_count_towards_the_length() -> None:
    """The length of a request resumed by its caller counts the tokens it brought and those delivered."""
    request = completion(max_tokens=5)
    (sequence,) = request.sequences
    brought = msgspec.structs.replace(sequence, resumed_token_ids=(8, 9))
    inflight, sink = running(msgspec.structs.replace(request, sequences=(brought,)), Tokens(0, (5, 6, 7)))
    assert inflight.continuation(MAX_TOKENS) is None
    assert sink[-1] == Finished(0, "length", num_generated_tokens=5)


def test_a_beam_search_is_run_again_as_a_whole() -> None:
    """A beam search with an open text is run again whole, and its caller gets nothing twice."""
    request = completion(n=2, max_tokens=2)
    sampling = msgspec.structs.replace(request.sampling, beams=Beams(width=3))
    request = msgspec.structs.replace(request, sampling=sampling, sequences=request.sequences * 2)
    done = [Tokens(0, (5, 6)), Finished(0, "length"), Tokens(1, (5, 7)), Finished(1, "length"), Tokens(2, (5, 6))]
    inflight, sink = running(request, *done)
    again = inflight.continuation(MAX_TOKENS)
    assert again is not None
    assert (again.n, again.sequences) == (2, request.sequences[2:])
    inflight.deliver(Tokens(0, (5, 6)))
    inflight.deliver(Finished(0, "length"))
    inflight.deliver(Tokens(1, (5, 7)))
    inflight.deliver(Finished(1, "length"))
    said = [(event.index, type(event)) for event in sink]
    assert said == [(0, Tokens), (0, Finished), (1, Tokens), (1, Finished), (2, Tokens), (2, Finished), (3, Tokens),
                    (3, Finished)]  # fmt: skip
    assert inflight.done


def test_measured_steps_end_nothing() -> None:
    """Measured steps are passed on under the request's own numbering, before and after its engine was replaced."""
    step = (StepTiming(0.1, 0.2, 3),)
    inflight, sink = running(completion(n=2), Timed(0, step), Tokens(0, (5,)), Finished(0, "stop"), Timed(1, step))
    again = inflight.continuation(MAX_TOKENS)
    assert again is not None
    assert len(again.sequences) == 1
    inflight.deliver(Timed(0, step))
    assert [event for event in sink if isinstance(event, Timed)] == [Timed(0, step), Timed(1, step), Timed(1, step)]
    assert not inflight.done


def test_drafts_of_a_paused_attempt_are_counted_with_the_next() -> None:
    """The drafts of a paused attempt are included in the count at the end."""
    inflight, sink = running(completion(max_tokens=9), Tokens(0, (5, 6)))
    inflight.move("pausing")
    inflight.deliver(Finished(0, "abort", drafts=DraftCounts(4, 2, 1, 1)))
    assert inflight.phase == "paused"
    assert inflight.continuation(MAX_TOKENS) is not None
    inflight.move("running")
    inflight.deliver(Finished(0, "length", drafts=DraftCounts(3, 3)))
    last = sink[-1]
    assert isinstance(last, Finished)
    assert last.drafts == DraftCounts(7, 5, 1, 1)


def test_drafts_of_a_killed_engine_are_counted_with_the_next() -> None:
    """The drafts that a killed engine reported with its tokens are counted once, whichever sequence ends first."""
    before = (Tokens(0, (5,), drafts=DraftCounts(2, 0)), Tokens(1, (6, 7), drafts=DraftCounts(1, 1)))
    events = (*before, Tokens(0, (8, 9), drafts=DraftCounts(4, 1)), Finished(1, "stop", drafts=DraftCounts(1, 1)))
    inflight, sink = running(completion(n=2, max_tokens=9), *events)
    assert inflight.continuation(MAX_TOKENS) is not None  # sequence 0 alone
    inflight.deliver(Tokens(0, (3,), drafts=DraftCounts(5, 2, 5, 2)))
    inflight.deliver(Finished(0, "length", drafts=DraftCounts(6, 3, 6, 3)))
    assert {one.index: one.drafts for one in sink if isinstance(one, Finished)} == {
        0: DraftCounts(10, 4, 6, 3),
        1: DraftCounts(1, 1),
    }


def test_drafts_are_counted_if_finished_was_lost() -> None:
    """A text whose last token had come ends with its draft counts if the engine is killed."""
    inflight, sink = running(completion(max_tokens=2), Tokens(0, (5, 6), drafts=DraftCounts(3, 1)))
    assert inflight.continuation(MAX_TOKENS) is None
    last = sink[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.drafts) == ("length", DraftCounts(3, 1))
