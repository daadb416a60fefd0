"""Images of requests: read one piece a step, kept for later requests, and made the virtual tokens of their prompts.

A step reads one image at most (one tile, where an image is cut into tiles), so that other requests' tokens do not
wait for all images of a request. Images of provisioned requests come first, and those of others take at most a
``1 / (1 + BEST_EFFORT_BACKOFF)`` of the time beside provisioned requests that run; then tenants take turns
(``tenants``), image by image. The features are kept, within a budget: a conversation sends its images with every turn.
As with prefixes, only requests with the same ``cache_salt`` use each other's.

In a request, the tokens of its images are counted from the vocabulary's size on. In the engine, each image has ids
of its own, the same in every request with its salt. So prompts begin alike, for the prefix cache, as long as they have
the same words and images.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ...interface.request import RequestImage, ValidRequest
from ..adapters.virtual_tokens import Table
from ..models.image_encoder import ImageEncoder, Piece, Vectors
from ..scheduling.tenants import Tenant, Tenants

logger = logging.getLogger(__name__)
Key = tuple[str, str]  # of whom the features are (a salt), and of what
PRIVATE_SALT_PREFIX = "alone-"  # the salt of a request without one begins so, as no other does: those are hashes
# For how long no best-effort image is read beside provisioned requests, as a multiple of the time of the last piece.
BEST_EFFORT_BACKOFF = 16
MAX_IDS = 2**30  # the engine's ids are int32
MAX_IMAGES = 2**16  # whose ids are known; others get new ones, and share no prefix


@dataclass(slots=True)
class Reading:
    """A request whose images are not all read. ``missing`` are those, with their rows in ``table``. ``rank`` is its
    class and priority. ``tenant`` is charged a piece over ``weight``."""

    rank: tuple[int, int]
    number: int
    tenant: Tenant
    weight: int
    table: Table
    missing: list[tuple[Key, RequestImage, slice]]


@dataclass(slots=True)
class _Part:
    """An image that is being read: the pieces to come, and the features of those before. ``reading`` is charged."""

    key: Key
    reading: Reading
    pieces: list[Piece]
    vectors: list[Vectors] = field(default_factory=list)


class ImageFeatureCache:
    """The features of requests' images, if there is a ``reader``. ``budget`` is how many bytes of features are
    kept."""

    def __init__(self, reader: ImageEncoder | None, *, budget: int, width: int, first_id: int) -> None:
        self.reader, self._budget, self._width, self._first_id = reader, budget, width, first_id
        self.kept: OrderedDict[Key, Vectors] = OrderedDict()
        self.num_bytes = 0
        self._readings: dict[str, Reading] = {}
        self._parts: dict[int, _Part] = {}  # by class of requests
        self._tenants = Tenants()
        self._rests_until = 0.0
        self._asked = 0
        self._ids: OrderedDict[Key, int] = OrderedDict()
        self._next_id, self.epoch = first_id, 0

    def __bool__(self) -> bool:
        return bool(self._readings)

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request waits for some of its images."""
        return request_id in self._readings

    def ask(self, request: ValidRequest) -> tuple[ValidRequest, Table]:
        """Return the request with the engine's ids and without pixels, and the table of these ids.

        The table's vectors are there when the request is no longer in here."""
        self._asked += 1
        salt = f"{PRIVATE_SALT_PREFIX}{self._asked}" if request.cache_salt is None else request.cache_salt
        counts = [image.num_tokens for image in request.images]
        vectors = np.zeros((sum(counts), self._width), dtype=np.float32)
        if self._next_id + len(vectors) > MAX_IDS:
            self.epoch, self._next_id = self.epoch + 1, self._first_id
            self._ids.clear()
        missing, firsts, end = [], dict[int, int](), 0
        ids = np.empty(len(vectors), dtype=np.int64)
        for image in request.images:
            key = (salt, _digest(image))
            rows = slice(end, end := end + image.num_tokens)
            first = self._first_id_of(key, image.num_tokens)
            ids[rows] = np.arange(first, first + image.num_tokens)
            firsts.setdefault(first, rows.start)
            kept = self.kept.get(key)
            if kept is None:
                missing.append((key, image, rows))
            else:
                self.kept.move_to_end(key)
                vectors[rows] = kept
        digest = f"images {self.epoch}" if self.epoch else ""
        order = np.array(sorted(firsts.items()), dtype=np.int64)
        table = Table(vectors, self._first_id, digest, order[:, 0], order[:, 1])
        if missing:
            rank = (request.service_class, request.priority)
            tenant = self._enter(request)
            self._readings[request.request_id] = Reading(rank, self._asked, tenant, request.weight, table, missing)
        return _with_ids(request, ids, self._first_id), table

    def _first_id_of(self, key: Key, count: int) -> int:
        found = self._ids.pop(key, None)
        if found is None:
            found, self._next_id = self._next_id, self._next_id + count
        self._ids[key] = found  # again as the latest
        if len(self._ids) > MAX_IMAGES:
            self._ids.popitem(last=False)
        return found

    def _enter(self, request: ValidRequest) -> Tenant:
        tenant = self._tenants.of(request.tenant, request.service_class)
        if not tenant.num_waiting:
            waiting = [one.tenant for one in self._readings.values() if one.rank[0] == request.service_class]
            self._tenants.lift(tenant, min(waiting, key=lambda one: one.used, default=None))
        tenant.num_waiting += 1
        tenant.num_unfinished += 1
        return tenant

    def _leave(self, request_id: str) -> None:
        tenant = self._readings.pop(request_id).tenant
        tenant.num_waiting -= 1
        tenant.num_unfinished -= 1
        if not tenant.num_waiting:
            self._tenants.left(tenant)

    def forget(self, request_id: str) -> None:
        """Read no more images for a request that has ended."""
        if request_id in self._readings:
            self._leave(request_id)
            self._parts = {kind: part for kind, part in self._parts.items() if self._is_wanted(part.key)}

    def may_read(self, *, beside: int) -> bool:
        """Return whether the next piece may be read in this step, ``beside`` sequences of that class or lower ones that
        run or wait to."""
        return self._first().rank[0] <= beside or time.monotonic() >= self._rests_until

    def read(self) -> list[tuple[str, Exception | None]]:
        """Read one piece of an image. Return the requests that have all of theirs now, or cannot have them."""
        assert self.reader is not None, "without one, nothing was asked"
        began, first = time.monotonic(), self._first()
        kind = first.rank[0]
        part = self._parts.pop(kind, None)
        if part is not None and not self._is_wanted(part.key):
            part = None
        try:
            if part is None:
                key, image, _ = first.missing[0]
                part = _Part(key, first, [])
                part.pieces = self.reader.pieces(image)
            part.vectors.append(self.reader.read(part.pieces.pop(0)))
            if part.pieces:
                self._parts[kind] = part
                done = []
            else:
                done = self._deliver(part.key, np.concatenate(part.vectors))
        except Exception as error:
            logger.exception("an image cannot be read")
            failed = first.missing[0][0] if part is None else part.key
            done = [(name, error) for name in self._take(failed)]
        charged = first if part is None else part.reading
        charged.tenant.used += 1 / charged.weight
        if kind:
            now = time.monotonic()
            self._rests_until = now + BEST_EFFORT_BACKOFF * (now - began)
        return done

    def _first(self) -> Reading:
        return min(self._readings.values(), key=lambda one: (*one.rank, one.tenant.used, one.number))

    def _is_wanted(self, key: Key) -> bool:
        return any(key == missing for reading in self._readings.values() for missing, _, _ in reading.missing)

    def _take(self, key: Key) -> list[str]:
        """Remove the readings that lack ``key``, and return their requests."""
        found = [
            name for name, reading in self._readings.items() if any(key == missing for missing, _, _ in reading.missing)
        ]
        for name in found:
            self._leave(name)
        return found

    def _deliver(self, key: Key, vectors: Vectors) -> list[tuple[str, Exception | None]]:
        done: list[tuple[str, Exception | None]] = []
        for name, reading in list(self._readings.items()):
            for missing, _, rows in reading.missing:
                if missing == key:
                    reading.table.vectors[rows] = vectors
            reading.missing = [entry for entry in reading.missing if entry[0] != key]
            if not reading.missing:
                self._leave(name)
                done.append((name, None))
        self._keep(key, vectors)
        return done

    def _keep(self, key: Key, vectors: Vectors) -> None:
        if key[0].startswith(PRIVATE_SALT_PREFIX) or vectors.nbytes > self._budget:
            return
        self.kept[key] = vectors
        self.num_bytes += vectors.nbytes
        while self.num_bytes > self._budget:
            self.num_bytes -= self.kept.popitem(last=False)[1].nbytes


def _with_ids(request: ValidRequest, ids: Any, first_id: int) -> ValidRequest:
    """Return ``request`` with ``ids`` in place of those from ``first_id`` on, and without the pixels."""
    changed: dict[tuple[int, ...], tuple[int, ...]] = {}
    sequences = []
    for sequence in request.sequences:
        prompt = sequence.prompt_token_ids
        if prompt not in changed:
            row = np.array(prompt, dtype=np.int64)
            virtual = row >= first_id
            row[virtual] = ids[row[virtual] - first_id]
            changed[prompt] = tuple(row.tolist())
        sequences.append(msgspec.structs.replace(sequence, prompt_token_ids=changed[prompt]))
    bare = tuple(msgspec.structs.replace(image, data=b"") for image in request.images)
    return msgspec.structs.replace(request, sequences=tuple(sequences), images=bare)


def _digest(image: RequestImage) -> str:
    size = f"{image.width} {image.height} {image.num_tokens} ".encode()
    return hashlib.blake2b(size + image.data, digest_size=16).hexdigest()
