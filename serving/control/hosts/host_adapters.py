"""A joined host's part of adapters: it fetches the contents that its engines ask for from the database."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ...endpoints.adapter_contents import AdapterContents
from ...interface.errors import PackagingError, ServingError
from ...model_files import adapter_contents, downloads
from ...transport.adapter_places import ContentRequests

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class HostAdapters:
    """The contents that the engines of a host ask for in ``directory``. One thread calls ``tick``; others fetch."""

    def __init__(
        self, contents: AdapterContents, directory: str | Path, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._contents, self._monotonic = contents, monotonic
        self._requests = ContentRequests(directory)
        self._work: dict[str, Future[str]] = {}
        self._failed_at: dict[str, float] = {}
        self._fetchers = ThreadPoolExecutor(2, thread_name_prefix="adapters")

    @property
    def directory(self) -> str:
        """The directory in which engines ask."""
        return str(self._requests.directory)

    def tick(self) -> bool:
        """Fetch what is asked for; return whether anything still is."""
        for one in [one for one, work in self._work.items() if work.done()]:
            self._look(one, self._work.pop(one))
        asked = self._requests.open()
        self._failed_at = {one: at for one, at in self._failed_at.items() if one in asked}
        for one in asked:
            if one not in self._work and self._monotonic() - self._failed_at.get(one, -RETRY_SECONDS) >= RETRY_SECONDS:
                read = functools.partial(self._contents.part, one)
                self._work[one] = self._fetchers.submit(adapter_contents.fetch, one, read, "an adapter")
        return bool(asked)

    def _look(self, one: str, work: Future[str]) -> None:
        try:
            path = work.result()
            self._requests.done(one)
            downloads.release_paths([path])  # the engine holds it from its next question on
        except (ServingError, PackagingError, OSError) as error:
            logger.warning("adapter content %s: %s", one[:12], error)
            self._failed_at[one] = self._monotonic()
            self._requests.failed(one, str(error))

    def close(self) -> None:
        """Fetch nothing more."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
