"""Validation of requests against the loaded model, before the engine stores anything of them."""

from __future__ import annotations

import msgspec

from ...interface.constraint import GIVEN
from ...interface.engine import EngineInfo
from ...interface.errors import ContextTooLong, InvalidField
from ...interface.logits_size import check_logits
from ...interface.request import POOLED, DraftTokens, Sampling, ValidRequest
from ...model_files.image_layout import is_too_thin

NO_GRAMMARS = "nothing: this engine has no structured output"


def check_request(request: ValidRequest, info: EngineInfo) -> None:
    """Check a request. Raises ``InvalidField`` or ``ContextTooLong`` for what the model of ``info`` cannot run."""
    embeds = request.task in POOLED
    generates = not POOLED.issuperset(info.tasks)
    if request.task not in info.tasks and (embeds or not generates):
        raise InvalidField("task", request.task, " or ".join(info.tasks))
    if not request.sequences:
        raise InvalidField("sequences", (), "at least one prompt")
    if len(request.second_from) not in (0, len(request.sequences)):
        raise InvalidField("second_from", f"{len(request.second_from)} numbers", "one for each sequence, or none")
    if not embeds and request.sampling is None:
        raise InvalidField("sampling", None, "sampling parameters")
    for token_id, _ in request.sampling.logit_bias if request.sampling is not None else ():
        if not 0 <= token_id < info.vocab_size:
            raise InvalidField("logit_bias", token_id, f"token ids from 0 to {info.vocab_size - 1}")
    if request.sampling is not None:
        _check_lists(request.sampling, info.vocab_size)
    draft = request.sampling.draft if request.sampling is not None else None
    if draft is not None:
        _check_draft(draft, info.vocab_size)
    grammar = request.sampling.grammar if request.sampling is not None else None
    if grammar is not None and not info.capabilities.structured_output:
        raise InvalidField(grammar.field, GIVEN, NO_GRAMMARS)
    check_logits(request, info.vocab_size, info.max_logits_bytes)
    if request.lora_task is not None and not info.capabilities.lora_tasks:
        raise InvalidField(
            "lora_task_id", request.lora_task.task_id, "null: this engine takes no adapters with requests"
        )
    if request.prompt_table is not None and not info.capabilities.prompt_tables:
        raise InvalidField("prompt_embedding_table", "a table", "null: this engine takes no prompt tables")
    _check_images(request, info)
    max_total = info.max_model_len if embeds else info.max_kv_tokens
    max_prompt = max_total - (request.sampling is not None and request.sampling.max_tokens > 0)
    virtual = (
        sum(one.num_tokens for one in request.images)
        if request.prompt_table is None
        else request.prompt_table.num_tokens
    )
    if virtual and request.sampling is not None and request.sampling.prompt_logprobs is not None:
        named = "messages" if request.images else "prompt_embedding_table"
        raise InvalidField(named, "tokens that are no words", "none where the prompt is scored")
    for sequence in request.sequences:
        _check_tokens(
            sequence.prompt_token_ids, sequence.resumed_token_ids, info.vocab_size, virtual, max_total, max_prompt
        )


def _check_images(request: ValidRequest, info: EngineInfo) -> None:
    if not request.images:
        return
    if not info.capabilities.images or request.prompt_table is not None:
        raise InvalidField("messages", "an image", "text: this engine reads no images in such a request")
    for image in request.images:
        if is_too_thin((image.width, image.height)):
            raise InvalidField("messages", f"{image.width} x {image.height} pixels", "an image less thin")
        if len(image.data) != 3 * image.width * image.height or image.num_tokens < 1:
            size = f"{image.width} x {image.height} pixels of 3 bytes"
            raise InvalidField("messages", f"an image of {len(image.data)} bytes", size)


def _check_lists(sampling: Sampling, vocab_size: int) -> None:
    """Check that the lists made by ``tasks.token_lists`` fit this model."""
    for field in ("bad_words", "stop_sequences"):
        for run in getattr(sampling, field):
            if not run or min(run) < 0 or max(run) >= vocab_size:
                raise InvalidField(field, run, f"at least one token id, from 0 to {vocab_size - 1}")
    bias = sampling.embedding_bias
    if bias is not None and len(bias) != 4 * vocab_size:
        raise InvalidField("embedding_bias", f"{len(bias)} bytes", f"{vocab_size} numbers of four bytes")
    if sampling.no_repeat_ngram_size < 0:
        raise InvalidField("no_repeat_ngram_size", sampling.no_repeat_ngram_size, "an integer from 0 on")


def _check_draft(draft: DraftTokens, vocab_size: int) -> None:
    for token_id in draft.token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidField("draft_input_ids", token_id, f"token ids from 0 to {vocab_size - 1}")
    if draft.logits is not None and len(draft.logits) != 4 * len(draft.token_ids) * vocab_size:
        allowed = f"float32 of the shape [{len(draft.token_ids)}, {vocab_size}]"
        raise InvalidField("draft_logits", f"{len(draft.logits)} bytes", allowed)


def with_learned_prompt(request: ValidRequest, num_learned: int, info: EngineInfo) -> ValidRequest:
    """Return ``request`` with the virtual tokens of its adapter before each prompt. Raises ``InvalidField`` and
    ``ContextTooLong``."""
    assert request.sampling is not None
    allowed = f"null with adapter {request.adapter!r}, which has learned a prompt of its own"
    if request.prompt_table is not None:
        raise InvalidField("prompt_embedding_table", "a table", allowed)
    if request.images:
        raise InvalidField("messages", "an image", f"none with adapter {request.adapter!r}, which has learned a prompt")
    if request.sampling.prompt_logprobs is not None:
        raise InvalidField(
            "echo", True, f"false with logprobs and adapter {request.adapter!r}, whose prompt has no words"
        )
    if request.sampling.context_logits:
        raise InvalidField("return_context_logits", True, allowed.replace("null", "false"))
    learned = tuple(range(info.vocab_size, info.vocab_size + num_learned))
    max_prompt = info.max_kv_tokens - (request.sampling.max_tokens > 0)
    sequences = []
    for sequence in request.sequences:
        ids = learned + sequence.prompt_token_ids
        if len(ids) > max_prompt or len(ids) + len(sequence.resumed_token_ids) > info.max_kv_tokens:
            message = (
                f"the prompt has {len(ids)} tokens, {num_learned} of them its adapter's; this model takes {max_prompt}"
            )
            raise ContextTooLong(message, param="prompt")
        sequences.append(msgspec.structs.replace(sequence, prompt_token_ids=ids))
    return msgspec.structs.replace(request, sequences=tuple(sequences))


def check_beams(request: ValidRequest, info: EngineInfo, num_kv_tokens: int, block_size: int = 1) -> None:
    """Check a beam search. Raises ``InvalidField`` if this engine could never run it: all of its beams run at once,
    within ``num_kv_tokens``, each in whole blocks of ``block_size``."""
    assert request.sampling is not None
    beams = request.sampling.beams
    assert beams is not None
    if request.stop and not info.capabilities.structured_output:
        allowed = "null with beam search: this model has no tokenizer to look for texts with"
        raise InvalidField("stop", list(request.stop), allowed)
    if not request.n <= beams.width <= min(info.max_num_seqs, info.vocab_size):
        limit = min(info.max_num_seqs, info.vocab_size)
        raise InvalidField(beams.field, beams.width, f"an integer in [n ({request.n}), {limit}]")
    if beams.num_groups < 1 or beams.width % beams.num_groups:
        raise InvalidField("num_beam_groups", beams.num_groups, f"a divisor of the beam width, {beams.width}")
    for sequence in request.sequences:
        length = min(len(sequence.prompt_token_ids) + request.sampling.max_tokens, info.max_kv_tokens)
        taken = -(-length // block_size) * block_size
        if taken * beams.width > num_kv_tokens:
            limit = num_kv_tokens // taken
            raise InvalidField(beams.field, beams.width, f"at most {limit}: so many texts of {length} tokens fit")


def _check_tokens(
    prompt: tuple[int, ...], resumed: tuple[int, ...], vocab_size: int, virtual: int, max_total: int, max_prompt: int
) -> None:
    """Check the tokens of a sequence. ``virtual``: the number of its prompt's ids after the vocabulary. ``max_prompt``
    limits the prompt, ``max_total`` prompt and resumed tokens together."""
    if not prompt:
        raise InvalidField("prompt", "", "at least one token")
    ids = prompt + resumed
    if max(ids) >= vocab_size + virtual or min(ids) < 0 or max(resumed, default=0) >= vocab_size:
        raise InvalidField("prompt", max(ids), f"token ids from 0 to {vocab_size + virtual - 1}")
    if len(prompt) > max_prompt or len(ids) > max_total:
        message = f"the prompt has {len(ids)} tokens; this model takes at most {max_total} in all"
        raise ContextTooLong(message, param="prompt")
