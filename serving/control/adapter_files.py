"""The files of adapters that were loaded at run time, on this host: fetched from the store by their hashes."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from ..endpoints.adapter_contents import AdapterContents
from ..interface.errors import PackagingError, ServingError
from ..model_files import adapter_contents, downloads

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0


class AdapterFiles:
    """The contents of adapters in the cache of this host. One thread uses it; others fetch.

    ``fetch(content_hash)`` returns the directory of a content, and raises ``ServingError``, ``PackagingError`` and
    ``OSError`` if it cannot be had for the moment.
    """

    @classmethod
    def of(cls, contents: AdapterContents) -> AdapterFiles:
        """Return the files of the contents of a store."""
        return cls(lambda one: adapter_contents.fetch(one, functools.partial(contents.part, one), "an adapter"))

    def __init__(
        self,
        fetch: Callable[[str], str],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        fetchers: Executor | None = None,
    ) -> None:
        self._fetch, self._monotonic = fetch, monotonic
        self._paths: dict[str, str] = {}  # by content hash
        self._work: dict[str, Future[str]] = {}
        self._failed: dict[str, tuple[str, float]] = {}
        self._fetchers = fetchers or ThreadPoolExecutor(2, thread_name_prefix="adapters")

    def want(self, hashes: Iterable[str], also: Container[str] = ()) -> None:
        """Fetch what is missing of these contents, and hold them in the cache, but no longer any others.

        Those in the directories ``also``, which engines may still read, are held if they are here.
        """
        wanted = set(hashes)
        over = [one for one in self._paths if one not in wanted and self._paths[one] not in also]
        gone = [self._paths.pop(one) for one in over]
        downloads.release_paths(gone)
        self._failed = {one: failed for one, failed in self._failed.items() if one in wanted}
        for one in [one for one, work in self._work.items() if work.done()]:
            self._look(one, self._work.pop(one), wanted)
        for one in wanted - self._paths.keys() - self._work.keys():
            if self._monotonic() - self._failed.get(one, ("", -RETRY_SECONDS))[1] >= RETRY_SECONDS:
                self._begin(one)

    def _begin(self, one: str) -> None:
        if path := adapter_contents.local_path(one):
            self._paths[one] = path
            return
        self._work[one] = self._fetchers.submit(self._fetch, one)

    def _look(self, one: str, work: Future[str], wanted: set[str]) -> None:
        try:
            path = work.result()
        except (ServingError, PackagingError, OSError) as error:
            logger.warning("adapter content %s: %s", one[:12], error)
            self._failed[one] = (str(error), self._monotonic())
            return
        self._failed.pop(one, None)
        if one not in wanted:
            downloads.release_paths([path])
        elif downloads.hold_paths([path]):
            self._paths[one] = path

    def path(self, content_hash: str) -> str:
        """Return the directory of a content that is here; "" if it is not."""
        return self._paths.get(content_hash, "")

    def paths(self) -> list[str]:
        """Return the directories of all contents that are here."""
        return list(self._paths.values())

    def problem(self, content_hash: str) -> str:
        """Return why the last attempt to fetch a content failed; "" if none has."""
        return self._failed.get(content_hash, ("", 0.0))[0]

    def close(self) -> None:
        """Fetch nothing more."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
