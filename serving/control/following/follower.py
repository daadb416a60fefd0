"""The follower rolls endpoints to the versions that their aliases mean, by way of canaries, and rolls them back.

The leader of the gateways alone does so. Whatever asks the registry or fetches a model runs on a thread; ``tick``,
which the reconciler's thread calls, starts that and records its outcome. What has to outlive this process is in the
store: a new leader goes on with a canary where the last one was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import msgspec
from msgspec import Struct

from ...endpoints.config import EndpointConfig, EntityConfig, ModelSource, Route, without_canary
from ...endpoints.following import Ended, Step
from ...endpoints.gateways import Fence, NotLeader
from ...endpoints.rows import tasks_of
from ...endpoints.store import EndpointState, EndpointStore
from ...interface.canary import Canary, EntityCounts, canary_name
from ...interface.errors import NotFound, PackagingError, ServingError
from ...model_files.model_uri import parse
from ...system.backoff import Backoff
from ..known_configs import KnownConfigs
from .alias_process import Target, ask
from .judge import judge, refused

logger = logging.getLogger(__name__)

JUDGE_SECONDS = 1.0  # gateways report what their canaries have answered as often
RETRY_SECONDS = 3600.0  # the longest pause before a version that could not be found is looked for again
Locate = Callable[[tuple[EntityConfig, ...]], tuple[ModelSource, ...]]


class Followed(Struct, frozen=True, kw_only=True):
    """An entity that follows an alias, in the active config ``version`` of an endpoint; ``seen`` is what was acted
    upon."""

    endpoint: EndpointState
    version: int
    config: EndpointConfig
    entity: EntityConfig
    seen: str | None

    @property
    def canary(self) -> EntityConfig | None:
        """The canary of this entity."""
        found = self.config.canary
        return found if found is not None and found.canary_of == self.entity.name else None

    @property
    def waits(self) -> bool:
        """Whether the canary of another entity has to end first."""
        return self.config.canary is not None and self.canary is None

    @property
    def key(self) -> tuple[str, str]:
        return self.endpoint.id, self.entity.name


class Found(Struct, frozen=True, kw_only=True):
    """A look at the registry for one entity: its alias's target and, if it has moved, the model there."""

    followed: Followed
    target: Target
    source: ModelSource | None = None
    error: str = ""


class AliasFollower:
    """The follower of all aliases of ``endpoints``, looking at the registry every ``poll`` seconds.

    ``locate`` finds models and raises ``ServingError`` or ``PackagingError``; ``lookup`` asks the registry.
    """

    def __init__(
        self,
        endpoints: EndpointStore,
        *,
        locate: Locate,
        poll: float,
        lookup: Callable[[Mapping[str, Iterable[str]]], dict[str, Target]] = ask,
        monotonic: Callable[[], float] = time.monotonic,
        thread: Executor | None = None,
    ) -> None:
        self._endpoints, self._locate, self._lookup = endpoints, locate, lookup
        self._poll, self._monotonic = poll, monotonic
        self._thread = thread or ThreadPoolExecutor(1)
        self._work: Future[list[Found]] | None = None
        self._configs = KnownConfigs(endpoints)
        self._metrics: dict[tuple[str, str], Target] = {}  # the newest look at each entity's alias
        self._failed: dict[tuple[tuple[str, str], str], tuple[Backoff, float]] = {}  # when to try a version again
        self._said: dict[tuple[str, str], str] = {}
        self._polled_at = self._judged_at = -float("inf")

    def close(self) -> None:
        """Begin nothing more; a lookup that is under way ends with the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def tick(self, states: Iterable[EndpointState], fence: Fence | None) -> None:
        """Go as far as is possible now. ``fence`` is the leader's; None if another gateway leads.

        Raises ``ServingError`` if the store does not answer.
        """
        if fence is None:
            self._work = None  # what it finds is another gateway's business by then
            return
        followed = list(self._followed(states))
        try:
            if self._work is not None and self._work.done():
                done, self._work = self._work, None
                self._record(done, fence)
            elif followed and self._work is None and self._monotonic() - self._polled_at >= self._poll:
                self._polled_at = self._monotonic()
                self._work = self._thread.submit(self._look, followed, dict(self._failed))
            if any(one.canary is not None for one in followed) and self._is_due():
                self._judge(followed, fence)
        except NotLeader:
            logger.warning("another gateway leads now; no alias was followed")

    def _followed(self, states: Iterable[EndpointState]) -> Iterator[Followed]:
        """Yield the entities that follow an alias, of endpoints that are not being updated."""
        self._configs.begin()
        seen: dict[tuple[str, str], str] | None = None
        for state in states:
            if (version := state.active_version) is None or state.pending_version is not None:
                continue
            config = self._configs.of(state, version)
            if config is None:
                continue
            for entity in config.served_entities:
                if entity.follow_alias:
                    seen = self._endpoints.following.seen() if seen is None else seen
                    # an earlier release remembered it by what the command line asked for
                    last = seen.get((state.name, entity.name)) or seen.get((state.name, entity.asked))
                    yield Followed(endpoint=state, version=version, config=config, entity=entity, seen=last)

    # on the thread: what the registry says

    def _look(
        self, followed: list[Followed], failed: Mapping[tuple[tuple[str, str], str], tuple[Backoff, float]]
    ) -> list[Found]:
        questions: dict[str, set[str]] = {}
        for one in followed:
            names = () if one.entity.canary is None else one.entity.canary.min_scores
            questions.setdefault(one.entity.uri, set()).update(names)
        targets = self._lookup(questions)
        found = []
        for one in followed:
            target = targets.get(one.entity.uri, Target(error="the registry said nothing about it"))
            again = failed.get((one.key, target.uri))
            late = again is not None and self._monotonic() < again[1]
            known = target.uri in (one.seen, _served(one).uri, one.entity.model.uri)
            if target.error or known or one.waits or late:
                found.append(Found(followed=one, target=target))
            else:
                found.append(self._locate_one(one, target))
        return found

    def _locate_one(self, one: Followed, target: Target) -> Found:
        named = parse(target.uri)
        assert named is not None, "aliases are of registered models"
        asked = msgspec.structs.replace(one.entity, entity_name=named.name, entity_version=str(named.version))
        try:
            (source,) = self._locate((asked,))
        except (ServingError, PackagingError, OSError) as error:
            return Found(followed=one, target=target, error=str(error))
        moved = msgspec.structs.replace(one.entity, source=source)
        if (tasks := tasks_of(moved)) != tasks_of(one.entity):
            serves = f"its tasks are {', '.join(tasks)}, and not {', '.join(tasks_of(one.entity))}"
            return Found(followed=one, target=target, error=serves)
        return Found(followed=one, target=target, source=msgspec.structs.replace(source, core=one.entity.model.core))

    # on the reconciler's thread: what follows from it

    def _record(self, done: Future[list[Found]], fence: Fence) -> None:
        try:
            found = done.result()
        except (ServingError, PackagingError, OSError) as error:
            self._say(("", ""), f"the aliases could not be looked up: {error}")
            return
        self._say(("", ""), "")
        for one in found:
            followed, target = one.followed, one.target
            self._say(followed.key, target.error and f"{followed.entity.uri} could not be looked up: {target.error}")
            if target.error:
                continue
            self._metrics[followed.key] = target
            try:
                if one.error:
                    self._fail(followed, target, one.error, fence)
                elif (step := _step(one)) is not None and self._endpoints.following.take(step, fence=fence):
                    self._failed.pop((followed.key, target.uri), None)
                    if step.message:
                        logger.warning("endpoint %s: %s", step.endpoint, step.message)
            except NotFound:  # the endpoint has just been deleted
                continue

    def _fail(self, followed: Followed, target: Target, error: str, fence: Fence) -> None:
        backoff, _ = self._failed.get((followed.key, target.uri)) or (Backoff(self._poll, RETRY_SECONDS), 0.0)
        self._failed[followed.key, target.uri] = (backoff, self._monotonic() + backoff.failed())
        message = f"{followed.entity.uri} means {_label(target.uri)} now, which cannot be served: {error}"
        logger.warning("endpoint %s: %s", followed.endpoint.name, message)
        self._endpoints.following.fail(followed.endpoint.name, followed.version, message, fence=fence)

    def _say(self, key: tuple[str, str], text: str) -> None:
        """Log ``text`` if it was not the last one about ``key``."""
        if text and self._said.get(key) != text:
            logger.warning("%s", text)
        self._said[key] = text

    # canaries

    def _is_due(self) -> bool:
        if self._monotonic() - self._judged_at < JUDGE_SECONDS:
            return False
        self._judged_at = self._monotonic()
        return True

    def _judge(self, followed: list[Followed], fence: Fence) -> None:
        gateways = self._endpoints.gateways.all()
        for one in followed:
            if (canary := one.canary) is None:
                continue
            reports = (gateway.reports.get(one.endpoint.id) for gateway in gateways)
            counts = EntityCounts(entity=canary.name)
            for report in reports:
                if report is not None and report.canary is not None and report.canary.entity == canary.name:
                    counts = counts.plus(report.canary)
            target = self._metrics.get(one.key)
            known = target.metrics if target is not None and target.uri == canary.model.uri else None
            seconds = self._endpoints.following.served_seconds(one.endpoint.name, one.version)
            found = judge(one.entity.canary or Canary(), counts, known, seconds)
            if found is None:
                continue
            step = _promotion(one, found.reason) if found.ended == "promoted" else _rollback(one, found.reason)
            try:
                if self._endpoints.following.take(step, fence=fence):
                    logger.warning("endpoint %s: %s", step.endpoint, step.message)
            except NotFound:  # the endpoint has just been deleted
                continue


def _served(one: Followed) -> ModelSource:
    """Return the version that the alias has been followed to so far: the canary's, if there is one."""
    return (one.canary or one.entity).model


def _label(uri: str) -> str:
    """Return ``assistant/7`` for ``models:/assistant/7``."""
    return uri.removeprefix("models:/")


def _step(found: Found) -> Step | None:
    """Return what follows from a look at the registry; None if nothing does."""
    one, target = found.followed, found.target
    if target.uri == one.seen:
        return None
    step = Step(endpoint=one.endpoint.name, version=one.version, entity=one.entity.name, seen=target.uri)
    if target.uri == _served(one).uri:
        return step  # seen from now on
    if one.canary is not None and target.uri == one.entity.model.uri:
        return _rollback(one, f"{one.entity.uri} means {_label(target.uri)} again", seen=target.uri)
    if found.source is None:
        return None
    moved = f"{one.entity.uri} moved from {_label(_served(one).uri)} to {_label(target.uri)}"
    if one.canary is not None:
        step = msgspec.structs.replace(step, ended="stopped", reason=moved)
    base = without_canary(one.config)
    settings, share = one.entity.canary, base.share(one.entity.name)
    if settings is None or not share:
        return msgspec.structs.replace(step, config=_moved(base, one.entity, found.source), message=moved)
    name = canary_name(one.entity.name, one.endpoint.last_version + 1, one.endpoint.id)
    canary = _with_canary(base, one.entity, found.source, settings, name)
    if low := refused(settings, target.metrics):
        if one.canary is None:
            return msgspec.structs.replace(step, config=canary, message=f"{moved}: {low}", refused=True)
        return _rollback(one, f"{moved}: {low}", seen=target.uri)
    begins = f"{moved}: a canary with {settings.traffic_percentage} % of the traffic for {settings.duration_s:g} s"
    return msgspec.structs.replace(step, config=canary, message=begins)


def _moved(base: EndpointConfig, entity: EntityConfig, source: ModelSource) -> EndpointConfig:
    """Return ``base`` with another version of ``entity``."""
    moved = tuple(
        msgspec.structs.replace(one, source=source) if one.name == entity.name else one for one in base.served_entities
    )
    return msgspec.structs.replace(base, served_entities=moved)


def _with_canary(
    base: EndpointConfig, entity: EntityConfig, source: ModelSource, settings: Canary, name: str
) -> EndpointConfig:
    """Return ``base`` with a canary of ``entity`` behind it, with its share of the traffic of ``entity``."""
    named = parse(source.uri)
    assert named is not None, "aliases are of registered models"
    canary = msgspec.structs.replace(
        entity,
        name=name,
        entity_name=named.name,
        entity_version=str(named.version),
        follow_alias=False,
        canary=None,
        canary_of=entity.name,
        source=source,
    )
    entities: list[EntityConfig] = []
    for one in base.served_entities:
        entities += [one, canary] if one.name == entity.name else [one]
    share = base.share(entity.name)
    given = max(1, round(share * settings.traffic_percentage / 100))
    routes: list[Route] = []
    for route in base.routes:
        if route.served_model_name != entity.name:
            routes.append(route)
            continue
        routes.append(Route(served_model_name=entity.name, traffic_percentage=share - given))
        routes.append(Route(served_model_name=canary.name, traffic_percentage=given))
    return msgspec.structs.replace(base, served_entities=tuple(entities), routes=tuple(routes))


def _promotion(one: Followed, reason: str) -> Step:
    assert one.canary is not None
    return _ending(one, "promoted", _moved(without_canary(one.config), one.entity, one.canary.model), reason)


def _rollback(one: Followed, reason: str, *, seen: str = "") -> Step:
    return _ending(one, "rolled_back", without_canary(one.config), reason, seen=seen)


def _ending(one: Followed, ended: Ended, config: EndpointConfig, reason: str, *, seen: str = "") -> Step:
    """Return the step to ``config``, with which the canary has ``ended``."""
    assert one.canary is not None
    source = one.canary.model
    return Step(
        endpoint=one.endpoint.name,
        version=one.version,
        entity=one.entity.name,
        seen=seen or one.seen or source.uri,
        config=config,
        message=f"the canary {_label(source.uri)} was {ended.replace('_', ' ')}: {reason}",
        ended=ended,
        reason=reason,
    )
