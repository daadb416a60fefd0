"""Events of an engine while it runs a ``ValidRequest``.

For each sequence: any number of ``Tokens``, each with one or more tokens, then one ``Finished``; where they were asked
for, ``Logits`` before the tokens that were chosen from them; for each input of an embeddings request one ``Embedded``.
A request that cannot go on gets one ``Failed``, after which nothing follows. A stream therefore ends with the last
sequence's ``Finished``/``Embedded`` or with ``Failed``: exactly one terminal event a request.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from .request import LogitsOf

FinishReason: TypeAlias = Literal["stop", "length", "abort", "deadline"]


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural log probability of ``token_id`` and of the best alternatives, most probable first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class DraftCounts(Struct, frozen=True, array_like=True):
    """Drafts of a sequence: tokens ``proposed``, and ``accepted`` because they were drawn; of both those that are from
    what the caller expects (``Sampling.draft``)."""

    proposed: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.proposed + other.proposed,
            self.accepted + other.accepted,
            self.predicted + other.predicted,
            self.predicted_accepted + other.predicted_accepted,
        )


class Tokens(Struct, frozen=True, tag="t", array_like=True):
    """One or more tokens of sequence ``index``, in order, its stop token included; ``logprobs`` is () or one a token.

    They follow the tokens of the events before, and those that the request resumed. How many come together (of one
    step, or of several for a reply that is not streamed) has no meaning. ``num_cached_tokens`` comes with the first,
    and ``drafts``, of all the sequence's tokens so far, wherever there were any: what ``Finished`` is to say, should
    the engine not live so long.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int | None = None
    drafts: DraftCounts | None = None


class StepTiming(Struct, frozen=True, array_like=True):
    """One step that gave a sequence tokens, in seconds since its step before (for the first since its submission to
    this engine): ``waited`` until the step began, for the first the prompt's first step; ``elapsed`` until the tokens
    were there. ``batch_size``: sequences that ran in the step."""

    waited: float
    elapsed: float
    batch_size: int


class Timed(Struct, frozen=True, tag="s", array_like=True):
    """The steps that gave the tokens of the next ``Tokens`` of sequence ``index``, for a request with ``timings``."""

    index: int
    steps: tuple[StepTiming, ...]


class PromptScored(Struct, frozen=True, tag="p", array_like=True):
    """Log probabilities of the prompt's tokens 1.. of sequence ``index`` (the first has none)."""

    index: int
    logprobs: tuple[TokenLogprob, ...]


class Logits(Struct, frozen=True, tag="l", array_like=True):
    """Rows ``[start, start + num_rows)`` of the logits of sequence ``index``: float32, little-endian, [num_rows, V].

    They are the model's own, before penalties, biases, masks and temperature. Row i of the "context" is what follows
    token i of the prompt; row i of the "generation" is what generated token i was chosen from, resumed ones counted.
    Rows come in order; how many come together has no meaning. Those of the context are of a prompt's first sequence.
    """

    index: int
    of: LogitsOf
    start: int
    num_rows: int
    data: bytes


class Finished(Struct, frozen=True, tag="f", array_like=True):
    """Sequence ``index`` has ended.

    ``num_cached_tokens`` prompt tokens were taken from the prefix cache; ``num_generated_tokens`` counts every
    token sampled, delivered or not; ``queue_time`` is seconds from submission to the first step. ``drafts`` is None
    where nothing was drafted.
    """

    index: int
    reason: FinishReason
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    queue_time: float = 0.0
    drafts: DraftCounts | None = None


class Embedded(Struct, frozen=True, tag="e", array_like=True):
    """The vector of input ``index``: little-endian float32 bytes, already pooled and normalised."""

    index: int
    vector: bytes


class Failed(Struct, frozen=True, tag="x", array_like=True):
    """The request failed; ``kind`` names a class of ``errors``. ``retry_after`` in seconds."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float | None = None


Event: TypeAlias = Tokens | Timed | PromptScored | Logits | Finished | Embedded | Failed


def is_terminal(event: Event) -> bool:
    """Whether ``event`` ends a sequence (``Failed`` ends the whole request)."""
    return isinstance(event, Finished | Embedded | Failed)
