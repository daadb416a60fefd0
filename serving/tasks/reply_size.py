"""Bounds what a request multiplies, before it runs: a small body must not cause an unbounded reply or unbounded work.

A reply contains more than the generated tokens: ``suffix`` and an echoed prompt are in every choice, each token may
have 20 alternatives, each input of an embeddings request has a vector. Their sizes are estimated here, in bytes of
JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..interface.errors import InvalidField
from ..interface.request import RawCompletion, RawRequest, ValidRequest

if TYPE_CHECKING:  # the server's settings import this module; commands and the arbiter must not load tokenizers
    from .prompt.endpoint import Profile

MAX_REPLY_BYTES = 32 * 2**20  # the default of a server's settings
LOGPROB_BYTES = 96  # bytes: token, number and bytes of one alternative
SCORE_BYTES = 64  # bytes of one score in its object
NUMBER = {"float": 20, "base64": 6}  # bytes of one value of a vector


def check_size(request: ValidRequest, raw: RawRequest, profile: Profile, dimensions: int) -> None:
    """Raise ``InvalidField`` if a reply or the work would be too large; the error names the field that multiplies.

    ``dimensions`` is the size of the model's embeddings.
    """
    _check_copies(request, profile.max_copied_tokens)
    if (maximum := profile.max_reply_bytes) is None:
        return
    _check_repeats(request, maximum)
    _check_logprobs(request, maximum, "logprobs" if isinstance(raw, RawCompletion) else "top_logprobs")
    if request.task == "embeddings" and fixed_size(request, dimensions) > maximum:
        size = fixed_size(request, dimensions) // len(request.sequences)
        allowed = f"at most {maximum // size} in one request, of {size} bytes a vector"
        raise InvalidField("input", f"{len(request.sequences)} inputs", allowed)


def _check_repeats(request: ValidRequest, maximum: int) -> None:
    if _repeated(request) <= maximum:
        return
    suffix, echo, count = len(request.suffix.encode()), _bytes(request.echo), len(request.sequences)
    allowed = f"at most {maximum} bytes in a reply, all repeats together"
    if suffix * count > echo * request.n:
        raise InvalidField("suffix", f"{suffix} bytes in {count} choices", allowed)
    raise InvalidField("echo", f"{echo} bytes in {request.n} choices", allowed)


def _check_logprobs(request: ValidRequest, maximum: int, field: str) -> None:
    sampling = request.sampling
    if sampling is None or sampling.logprobs is None:
        return
    tokens = sampling.max_tokens * len(request.sequences)
    if sampling.prompt_logprobs is not None:
        tokens += sum(len(sequence.prompt_token_ids) for sequence in request.sequences)
    if tokens * (sampling.logprobs + 1) * LOGPROB_BYTES > maximum:
        asked = f"{sampling.logprobs} with {tokens} tokens"
        allowed = f"at most {maximum // LOGPROB_BYTES} tokens and alternatives over max_tokens of all choices"
        raise InvalidField(field, asked, allowed)


def fixed_size(request: ValidRequest, dimensions: int) -> int:
    """Return the bytes of a reply that do not depend on generated text: repeated request texts, vectors and scores."""
    if request.task == "embeddings":
        return len(request.sequences) * NUMBER[request.encoding_format] * (request.dimensions or dimensions)
    if request.scoring is not None:
        return len(request.sequences) * SCORE_BYTES + _bytes(request.scoring.documents or ())
    return _repeated(request)


def _repeated(request: ValidRequest) -> int:
    return len(request.suffix.encode()) * len(request.sequences) + _bytes(request.echo) * request.n


def _bytes(texts: tuple[str, ...]) -> int:
    return sum(len(text.encode()) for text in texts)


def _check_copies(request: ValidRequest, maximum: int) -> None:
    """Bound the prompt tokens over all choices, because the engine holds the prompt's tokens for each choice."""
    tokens = request.num_prompt_tokens
    if request.n > 1 and tokens * request.n > maximum:
        allowed = (
            f"an integer in [1, {max(1, maximum // tokens)}]: prompts have at most {maximum} tokens over all choices"
        )
        raise InvalidField("n", request.n, allowed)
