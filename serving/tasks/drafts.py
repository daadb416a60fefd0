"""Checks a draft, the text that a caller expects to be generated, and turns it into tokens."""

from __future__ import annotations

import numpy as np

from ..interface.errors import InvalidField
from ..interface.request import Draft, DraftTokens, RawSampling
from .prompt.endpoint import EndpointView
from .prompt.text import CHARACTERS_PER_TOKEN

LOGITS = "draft_logits"


def draft_tokens(asked: RawSampling, endpoint: EndpointView) -> DraftTokens | None:
    """Return the draft's tokens; None if the request has no draft.

    Raises ``InvalidField`` for tokens that the model does not have, for more tokens than a text can have, and for
    logits that do not belong to the tokens.
    """
    draft = asked.draft
    if draft is None:
        return None
    if asked.beams is not None:
        raise InvalidField(draft.field, "a draft", "null with beam search, which does not sample")
    if draft.text is not None:
        if draft.logits is not None:
            raise InvalidField(LOGITS, "logits", "null unless the draft is given as token ids")
        beginning = draft.text[: CHARACTERS_PER_TOKEN * endpoint.context]
        return DraftTokens(token_ids=endpoint.text.encode_plain([beginning], endpoint.context)[0][: endpoint.context])
    vocab_size = endpoint.info.vocab_size
    if len(draft.token_ids) > endpoint.context:
        raise InvalidField(draft.field, f"{len(draft.token_ids)} tokens", f"at most {endpoint.context} tokens")
    for i, token_id in enumerate(draft.token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidField(f"{draft.field}[{i}]", token_id, f"a token id from 0 to {vocab_size - 1}")
    if draft.logits is not None:
        _check_logits(draft, draft.logits, vocab_size)
    return DraftTokens(token_ids=draft.token_ids, logits=draft.logits)


def _check_logits(draft: Draft, logits: bytes, vocab_size: int) -> None:
    """Check the draft's logits: one row for each token, no NaN and no +inf, and a finite logit for the token itself."""
    count = len(draft.token_ids)
    if len(logits) != 4 * count * vocab_size:
        allowed = f"float32 of the shape [{count}, {vocab_size}]: a row for each of {draft.field}"
        raise InvalidField(LOGITS, f"{len(logits)} bytes", allowed)
    rows = np.frombuffer(logits, dtype="<f4").reshape(count, vocab_size)
    own = rows[np.arange(count), list(draft.token_ids)]
    if np.isnan(rows).any() or np.isposinf(rows).any():
        raise InvalidField(LOGITS, "NaN or infinity", "numbers, or minus infinity for tokens that are never sampled")
    if not np.isfinite(own).all():
        place = int(np.flatnonzero(~np.isfinite(own))[0])
        allowed = f"finite where {draft.field} has its token, which was drawn from them"
        raise InvalidField(f"{LOGITS}[{place}]", float(own[place]), allowed)
