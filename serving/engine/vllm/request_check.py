"""The fields of requests that vLLM, driven by this package, cannot apply: each is refused by name."""

from __future__ import annotations

from ...interface.engine import EngineInfo
from ...interface.errors import ContextTooLong, InvalidField
from ...interface.request import POOLED, Sampling, ValidRequest
from ..requests.request_check import check_request
from .options import VllmSettings

ENGINE = "with engine vllm"
RACE_ONLY = f"{ENGINE} and backend.vllm.sampling vllm"


def check(request: ValidRequest, info: EngineInfo, own: VllmSettings) -> None:
    """Check a request. Raises ``InvalidField`` or ``ContextTooLong`` for what this engine cannot run."""
    check_request(request, info)
    if request.task in POOLED:
        return
    sampling = request.sampling
    assert sampling is not None, "check_request refuses it"
    if sampling.beams is not None:
        raise InvalidField(sampling.beams.field, sampling.beams.width, f"null {ENGINE}, which has no beam search")
    if sampling.draft is not None:
        raise InvalidField("draft_input_ids", "a predicted text", f"null {ENGINE}, which takes no drafts with requests")
    if own.sampling == "vllm":
        _check_vllm(sampling)
    longest = max(len(one.prompt_token_ids) + len(one.resumed_token_ids) for one in request.sequences)
    if longest >= info.max_model_len and sampling.max_tokens == 0:  # vLLM samples a token after every prompt
        message = f"the prompt has {longest} tokens; {ENGINE} a prompt to score has at most {info.max_model_len - 1}"
        raise ContextTooLong(message, param="prompt")


def _check_vllm(sampling: Sampling) -> None:
    """Refuse what only our own sampler does."""
    unused = {
        "typical_p": 1.0,
        "bad_words": (),
        "no_repeat_ngram_size": 0,
        "embedding_bias": None,
        "penalize_prompt": False,
    }
    for name, value in unused.items():
        given = getattr(sampling, name)
        if given != value:
            raise InvalidField(name, given if name != "embedding_bias" else "a bias", f"{value!r} {RACE_ONLY}")
