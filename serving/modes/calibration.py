"""Measure an engine's throughput with a short run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from msgspec import Struct

from ..interface.engine import Engine
from ..interface.errors import from_kind
from ..interface.events import Embedded, Failed, Finished, Tokens
from ..interface.request import POOLED, Sampling, Sequence, ValidRequest

CALIBRATION_SECONDS = 5.0  # roughly how long a calibration may take
DEADLINE_SECONDS = 120.0  # the most seconds that one of its requests may take


class Capacity(Struct, frozen=True, kw_only=True):
    """Tokens/s of one replica with a full batch, for decode and for prefill.

    An embedding engine does not decode; for it, both are the speed of its prefill.
    """

    decode_tokens_per_second: int
    prefill_tokens_per_second: int

    @property
    def prompt_weight_milli(self) -> int:
        """The cost of one prompt token for the engine, in thousandths of a generated token; 1 to 1000."""
        ratio = self.decode_tokens_per_second * 1000 // max(1, self.prefill_tokens_per_second)
        return max(1, min(1000, ratio))


def calibrate(
    engine: Engine,
    *,
    callers: int = 16,
    prompt_tokens: int = 64,
    new_tokens: int = 32,
    clock: Callable[[], float] = time.perf_counter,
) -> Capacity:
    """Run ``callers`` requests at once, after two to warm up, and measure. Blocks for the time of the run.

    On a machine where that would take much longer than ``CALIBRATION_SECONDS``, the requests are shorter.

    Raises the ``ServingError`` that the engine answers with. Requests that others run at the same time are best effort
    and disturb little; there should be no other provisioned requests.
    """
    info = engine.info
    callers = max(1, min(callers, info.max_num_seqs))
    prompt_tokens = max(1, min(prompt_tokens, info.max_model_len // 2))
    new_tokens = max(1, min(new_tokens, info.max_model_len - prompt_tokens))
    if POOLED.issuperset(info.tasks):
        return _calibrate_prefill(engine, callers, prompt_tokens, clock)
    _together(engine, 1, prompt_tokens, 1)
    began = clock()
    _together(engine, 1, prompt_tokens, min(4, new_tokens))
    part = min(1.0, CALIBRATION_SECONDS / 8 / max(clock() - began, 1e-6))
    prompt_tokens = max(min(8, prompt_tokens), int(prompt_tokens * part))
    new_tokens = max(min(8, new_tokens), int(new_tokens * part))
    began = clock()
    _together(engine, callers, prompt_tokens, 1)
    prefill = clock() - began
    began = clock()
    generated = _together(engine, callers, prompt_tokens, new_tokens)
    # The second run has a prefill too, so only the extra time is decode. Count at least half of the run, so that a
    # first run that was delayed does not make the engine look faster than it is.
    whole = clock() - began
    decode = max(whole - prefill, whole / 2, 1e-6)
    return Capacity(
        decode_tokens_per_second=max(1, int((generated - callers) / decode)),
        prefill_tokens_per_second=max(1, int(callers * prompt_tokens / max(prefill, 1e-6))),
    )


def _calibrate_prefill(engine: Engine, callers: int, prompt_tokens: int, clock: Callable[[], float]) -> Capacity:
    _together(engine, 1, prompt_tokens, 0)
    began = clock()
    _together(engine, callers, prompt_tokens, 0)
    speed = max(1, int(callers * prompt_tokens / max(clock() - began, 1e-6)))
    return Capacity(decode_tokens_per_second=speed, prefill_tokens_per_second=speed)


def _together(engine: Engine, callers: int, prompt_tokens: int, new_tokens: int) -> int:
    """Run ``callers`` requests at once and return how many tokens they generated.

    Each has its own prompt, so that nothing comes from the prefix cache.
    """
    counts: list[int] = []
    errors: list[Exception] = []

    def run(caller: int) -> None:
        try:
            counts.append(_run(engine, _request(engine, caller, prompt_tokens, new_tokens)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(caller,)) for caller in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts)


def _run(engine: Engine, request: ValidRequest) -> int:
    generated = 0
    for event in engine.submit(request):
        if isinstance(event, Tokens):
            generated += len(event.token_ids)
        elif isinstance(event, Failed):
            raise from_kind(event.kind, event.message, param=event.param)
        elif isinstance(event, Finished | Embedded):
            break
    return generated


def _request(engine: Engine, caller: int, prompt_tokens: int, new_tokens: int) -> ValidRequest:
    vocabulary, stamp = engine.info.vocab_size, time.monotonic_ns()
    # a walk over the vocabulary with a fixed step: any ids will do, but no two prompts may share a prefix
    start = (stamp + caller * 7_919) % vocabulary
    prompt = tuple((start + position * 104_729) % vocabulary for position in range(prompt_tokens))
    return ValidRequest(
        request_id=f"calibration-{stamp}-{caller}",
        task="completions" if new_tokens else engine.info.tasks[0],
        model="calibration",
        sequences=(Sequence(prompt_token_ids=prompt),),
        provisioned=True,
        deadline=time.monotonic() + DEADLINE_SECONDS,
        sampling=Sampling(max_tokens=new_tokens, min_tokens=new_tokens, temperature=0.0) if new_tokens else None,
    )
