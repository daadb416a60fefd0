"""The token sequences of a request that compares texts: one for each text for an encoder, one for each pair for a
cross-encoder.

A text that is longer than the model accepts is refused unless the request says where to cut it. In a ranking, an
encoder gets queries and documents after the prompts that its model has for them; otherwise, after its default prompt.
"""

from __future__ import annotations

from typing import NamedTuple

from ...interface.errors import ContextTooLong, InvalidField
from ...interface.request import RawEmbedding, RawScore
from .endpoint import EndpointView
from .prompts import embedded_texts, embedding_limit

DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # names in sentence-transformers' configurations


class Texts(NamedTuple):
    """The sequences of a request. ``second_from`` is as in ``Pair``, for each of them; () if each is a single text."""

    sequences: list[tuple[int, ...]]
    second_from: tuple[int, ...] = ()


def encoder_texts(raw: RawScore, endpoint: EndpointView) -> Texts:
    """Return the queries, then the documents. Raises ``InvalidField`` and ``ContextTooLong``, which name a text."""
    maximum = _maximum(raw, endpoint, minimum=3)
    of_documents = min(maximum, raw.truncate_documents or maximum)
    queries = _encoded(raw, 0, maximum, endpoint)
    return Texts([*queries, *_encoded(raw, 1, of_documents, endpoint)])


def pairs(raw: RawScore, endpoint: EndpointView) -> Texts:
    """Return each query joined with its document, or the only query joined with each document.

    Raises ``InvalidField`` and ``ContextTooLong``.
    """
    template = endpoint.text.pairs
    maximum = _maximum(raw, endpoint, minimum=template.num_special + 2)
    queries = endpoint.text.encode_plain(raw.queries, maximum)
    documents = endpoint.text.encode_plain(raw.documents, maximum)
    if raw.truncate_documents is not None:
        documents = [ids[: raw.truncate_documents] for ids in documents]
    if len(queries) == 1:
        queries *= len(documents)
    _check_work(raw, queries, documents, template.num_special, maximum, endpoint)
    joined = [template.join(first, second, maximum) for first, second in zip(queries, documents, strict=True)]
    for i, pair in enumerate(joined):
        if pair.cut and raw.truncate is None:
            raise _too_long(_path(raw, 1, i), "with its query, more than", maximum)
    return Texts([pair.token_ids for pair in joined], tuple(pair.second_from for pair in joined))


def pair_limit(endpoint: EndpointView) -> int:
    """Return the maximum number of tokens of a pair."""
    spec = endpoint.text.cross_encoder
    return min(endpoint.info.max_model_len, (spec.max_length if spec is not None else None) or 2**31)


def _maximum(raw: RawScore, endpoint: EndpointView, *, minimum: int) -> int:
    limit = pair_limit(endpoint) if "score" in endpoint.info.tasks else embedding_limit(endpoint)
    if raw.truncate is None or raw.truncate == -1:
        return limit
    if not minimum <= raw.truncate <= limit:
        raise InvalidField("truncate_prompt_tokens", raw.truncate, f"an integer in [{minimum}, {limit}], or -1")
    return raw.truncate


def _encoded(raw: RawScore, side: int, maximum: int, endpoint: EndpointView) -> list[tuple[int, ...]]:
    texts = raw.documents if side else raw.queries
    alone = RawEmbedding(inputs=texts, instruction=_instruction(raw, side, endpoint))
    limit, text = embedding_limit(endpoint), endpoint.text
    cuts = raw.truncate is not None or (side == 1 and raw.truncate_documents is not None)
    found = []
    for i, (ids, cut) in enumerate(embedded_texts(alone, endpoint)):
        if cut and not cuts:
            raise _too_long(_path(raw, side, i), "more than", limit)
        if not ids:
            raise InvalidField(_path(raw, side, i), texts[i], "a text of at least one token")
        found.append(text.shortened(ids, maximum) if len(ids) > maximum else ids)
    return found


def _instruction(raw: RawScore, side: int, endpoint: EndpointView) -> str | None:
    spec = endpoint.text.embedding
    if not raw.ranked or spec is None:
        return None
    names = DOCUMENT_PROMPTS if side else ("query",)
    return next((name for name in names if name in spec.prompts), None)


def _check_work(
    raw: RawScore,
    queries: list[tuple[int, ...]],
    documents: list[tuple[int, ...]],
    special: int,
    maximum: int,
    endpoint: EndpointView,
) -> None:
    """Bound the tokens of all pairs together: a long query repeats in each pair, so a small body could cause unbounded
    work."""
    bound = endpoint.profile.max_copied_tokens
    total = sum(min(maximum, len(a) + len(b) + special) for a, b in zip(queries, documents, strict=True))
    if total > bound:
        allowed = f"fewer, or shorter ones: all pairs together may have {bound} tokens, and these have {total}"
        raise InvalidField(raw.names[1], f"{len(documents)} texts", allowed)


def _path(raw: RawScore, side: int, index: int) -> str:
    return f"{raw.names[side]}[{index}]" if len(raw.documents if side else raw.queries) > 1 else raw.names[side]


def _too_long(path: str, words: str, maximum: int) -> ContextTooLong:
    text = (
        f"{path}: {words} {maximum} tokens, which is the longest this model takes; truncate_prompt_tokens: -1 cuts it"
    )
    return ContextTooLong(text, param=path)
