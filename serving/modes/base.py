"""A mode decides how a request is admitted and what it costs. Nothing below the mode lookup branches on a mode.

A new mode is a class that implements ``Mode`` and is exported by ``modes/__init__.py``, like the existing modes.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from msgspec import Struct

from ..interface.labels import NONE, Labels
from ..interface.request import ValidRequest
from ..metering.accounts.keys import Caller
from ..metering.ledger.lease import Bucket, Lease, Reservation
from ..metering.proof.answers import Asked
from ..model_files.model_version import UNKNOWN, ModelVersion

BATCH = "batch"
"""The mode of requests of batches in the ledger, whatever the mode of their endpoint is."""


class ModeProfile(Struct, frozen=True, kw_only=True):
    """The request fields a mode accepts, as in the Databricks API (``tasks.prepare`` refuses the others), and whether
    it reserves capacity."""

    name: str
    accepts_n: bool
    accepts_error_behavior: bool
    reserves: bool = False


class Target(Struct, frozen=True, kw_only=True):
    """The target of a request: the endpoint, the served entity that the traffic split chose, its model, and the hash of
    its adapter's content (``Reservation``)."""

    endpoint: str
    entity: str
    model: ModelVersion = UNKNOWN
    adapter_hash: str = ""


class Mode(Protocol):
    """The way in which requests of a served entity are admitted and paid for."""

    @property
    def profile(self) -> ModeProfile: ...

    def admit(
        self,
        valid: ValidRequest,
        caller: Caller,
        target: Target,
        labels: Labels = NONE,
        asked: Asked | None = None,
    ) -> Admission:
        """Reserve the tokens that ``valid`` may use; ``labels`` are recorded, and ``asked``. Raises ``LimitExceeded``,
        ``Unavailable``."""
        ...


class Admission:
    """The context manager around a request's run: ``with mode.admit(…) as admitted: engine.submit(admitted.request)``.

    ``request`` is the ``ValidRequest`` for the engine, marked ``provisioned`` if the mode decides so. Its tokens are
    counted and settled on the ``lease``; leaving the context settles it in any case (see ``Lease``).
    """

    def __init__(self, lease: Lease, request: ValidRequest) -> None:
        self.lease = lease
        self.request = request

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.lease.__exit__(kind, error, traceback)


def reservation_of(
    valid: ValidRequest,
    caller: Caller,
    target: Target,
    mode: str,
    labels: Labels,
    bucket: Bucket | None = None,
    asked: Asked | None = None,
) -> Reservation:
    """Return a reservation of the most that ``valid`` may use: each prompt once, and ``max_tokens`` per sequence.

    With a ``bucket`` (reserved throughput), the tokens are not paid for, since the reserve is paid by time. A request
    of a batch takes nothing from the reserve, and is paid for only where all others are.
    """
    return Reservation(
        request_id=valid.request_id,
        key_id=caller.key_id,
        tenant=caller.tenant,
        endpoint=target.endpoint,
        entity=target.entity,
        adapter=valid.adapter,
        adapter_hash=target.adapter_hash,
        mode=BATCH if valid.background else mode,
        task=valid.task,
        input_tokens=valid.num_prompt_tokens,
        max_output_tokens=valid.sampling.max_tokens * len(valid.sequences) if valid.sampling else 0,
        bucket=None if valid.background else bucket,
        background=valid.background,
        model=target.model,
        labels=labels,
        limited_user=labels.user if caller.names_end_users else "",
        asked=asked,
        pays_tokens=bucket is None,
    )
