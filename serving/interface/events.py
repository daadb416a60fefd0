"""The events that an engine sends while it runs a ``ValidRequest``.

Each sequence has any number of ``Tokens`` events, each with one or more tokens, then one ``Finished``. If logits were
asked for, ``Logits`` come before the tokens chosen from them. Each input of an embeddings request has one ``Embedded``.
A request that cannot go on gets one ``Failed``, and nothing follows it. A stream therefore ends with the ``Finished``
or ``Embedded`` of its last sequence, or with ``Failed``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from .request import LogitsOf

FinishReason: TypeAlias = Literal["stop", "length", "abort", "deadline"]


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The natural log probability of ``token_id``, and those of the best alternatives, most probable first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class DraftCounts(Struct, frozen=True, array_like=True):
    """Draft tokens of a sequence: how many were ``proposed``, how many ``accepted`` because they were then drawn, and
    how many of each came from the caller's predicted text (``Sampling.draft``)."""

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
    """One or more tokens of sequence ``index``, in order, including its stop token.

    ``logprobs`` is () or has one entry per token. The tokens follow those of earlier events and those that the request
    resumed. How many come together (from one step, or from several for a reply that is not streamed) has no meaning.
    ``num_cached_tokens`` comes with the first tokens; ``drafts`` counts all of the sequence's drafts so far, if any.
    Both anticipate ``Finished``, in case the engine does not live long enough to send it.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int | None = None
    drafts: DraftCounts | None = None


class StepTiming(Struct, frozen=True, array_like=True):
    """The timing of one step that produced tokens of a sequence.

    Times are in seconds since the sequence's previous step, or, for its first step, since its submission to this
    engine: ``waited`` until the step began (at first, the prompt's first step), ``elapsed`` until the tokens were
    available. ``batch_size`` is the number of sequences that ran in the step.
    """

    waited: float
    elapsed: float
    batch_size: int


class Timed(Struct, frozen=True, tag="s", array_like=True):
    """The steps behind the tokens in the next ``Tokens`` of sequence ``index``, for a request with ``timings``."""

    index: int
    steps: tuple[StepTiming, ...]


class PromptScored(Struct, frozen=True, tag="p", array_like=True):
    """The log probabilities of the prompt tokens of sequence ``index`` from token 1 on (token 0 has none)."""

    index: int
    logprobs: tuple[TokenLogprob, ...]


class Logits(Struct, frozen=True, tag="l", array_like=True):
    """Rows ``[start, start + num_rows)`` of the logits of sequence ``index``: float32, little-endian, [num_rows, V].

    They are the model's own, before penalties, biases, masks and temperature. Row i of the "context" predicts the token
    after token i of the prompt; row i of the "generation" is the one that generated token i (counting resumed tokens)
    was chosen from. Rows come in order; how many come together has no meaning. Only the first sequence of a prompt has
    context rows.
    """

    index: int
    of: LogitsOf
    start: int
    num_rows: int
    data: bytes


class Finished(Struct, frozen=True, tag="f", array_like=True):
    """Sequence ``index`` has ended.

    ``num_cached_tokens`` prompt tokens came from the prefix cache. ``num_generated_tokens`` counts every sampled token,
    delivered or not. ``queue_time`` is the seconds from submission to the first step. ``drafts`` is None if nothing was
    drafted.
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
    """The request failed; ``kind`` names a class of ``errors``. ``retry_after`` is in seconds."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float | None = None


Event: TypeAlias = Tokens | Timed | PromptScored | Logits | Finished | Embedded | Failed


def is_terminal(event: Event) -> bool:
    """Return whether ``event`` ends a sequence (``Failed`` ends the whole request)."""
    return isinstance(event, Finished | Embedded | Failed)
