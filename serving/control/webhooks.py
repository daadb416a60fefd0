"""The delivery of events to webhooks, by the leader of the gateways: signed, repeated until answered, for a day.

The headers and the signature are those of MLflow's own webhooks, so that one receiver verifies both.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from urllib.parse import urlsplit

from ..endpoints.gateways import Fence
from ..interface.errors import PackagingError
from ..metering.store.outbox import Delivery, EventOutbox
from ..transport.auth import read_key
from .settings import ServerSettings

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
SEND_SECONDS = 10.0  # for a webhook to answer
FIRST_PAUSE, MAX_PAUSE = 10.0, 3600.0  # seconds between attempts, each twice as long as the one before
GIVE_UP_SECONDS = 86_400.0
AT_ONCE = 16  # deliveries of a round


def read_secret(settings: ServerSettings) -> bytes | None:
    """Return the secret that signs events; None without webhooks. Raises ``PackagingError``."""
    if not settings.webhooks:
        return None
    try:
        return read_key(settings.webhook_secret_file)
    except PackagingError as error:
        raise PackagingError(str(error).replace("key_file", "webhook_secret_file", 1)) from None


def signed(delivery: Delivery, secret: bytes, now: float) -> dict[str, str]:
    """Return the headers of a delivery: HMAC-SHA256 over its id, the time in whole seconds, and its body."""
    timestamp = str(int(now))
    message = f"{delivery.id}.{timestamp}.{delivery.body}".encode()
    signature = base64.b64encode(hmac.digest(secret, message, hashlib.sha256)).decode()
    return {
        "Content-Type": "application/json",
        "X-MLflow-Delivery-Id": delivery.id,
        "X-MLflow-Timestamp": timestamp,
        "X-MLflow-Signature": f"v1,{signature}",
    }


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler to which a redirection is an error: an event goes nowhere but to the URL that an operator set."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def send(delivery: Delivery, headers: dict[str, str]) -> str:
    """Send a delivery, and return why it was not accepted; "" if it was, by a status of 200 to 299."""
    request = urllib.request.Request(delivery.url, delivery.body.encode(), headers, method="POST")
    try:
        with _opener.open(request, timeout=SEND_SECONDS) as answer:
            answer.read(1)
        return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"status {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


class WebhookSender:
    """The sender of what waits in ``outbox``, signed with ``secret``; ``clock`` returns Unix seconds."""

    def __init__(
        self,
        outbox: EventOutbox,
        secret: bytes,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        thread: Executor | None = None,
    ) -> None:
        self._outbox, self._secret = outbox, secret
        self._clock, self._monotonic = clock, monotonic
        self._thread = thread or ThreadPoolExecutor(AT_ONCE)
        self._work: list[tuple[Delivery, Future[str]]] = []
        self._looked_at = -float("inf")

    def close(self) -> None:
        """Begin nothing more. What is not delivered waits in the store."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def tick(self, fence: Fence | None) -> None:
        """Record what became of attempts, and begin those that are due, if this gateway leads.

        Raises ``ServingError`` if the store does not answer.
        """
        for one in [one for one in self._work if one[1].done()]:
            self._work.remove(one)
            self._record(one[0], one[1].result())
        if fence is None or self._work or self._monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = self._monotonic()
        for delivery in self._outbox.due(AT_ONCE):
            headers = signed(delivery, self._secret, self._clock())
            self._work.append((delivery, self._thread.submit(send, delivery, headers)))

    def _record(self, delivery: Delivery, error: str) -> None:
        if not error:
            self._outbox.remove(delivery)
            return
        host = urlsplit(delivery.url).hostname
        if self._clock() - delivery.at_ms / 1000 > GIVE_UP_SECONDS:
            logger.error("event %s (%s) is given up: webhook %s: %s", delivery.id, delivery.type, host, error)
            self._outbox.remove(delivery)
            return
        pause = min(FIRST_PAUSE * 2.0 ** min(delivery.attempts, 30), MAX_PAUSE)
        logger.warning("webhook %s: %s; event %s is sent again in %.0f s", host, error, delivery.id, pause)
        self._outbox.postpone(delivery, pause)
