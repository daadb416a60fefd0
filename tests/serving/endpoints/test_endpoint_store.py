"""Endpoints in their store: created, updated, described and deleted, as the management API asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic import command
from alembic.config import Config
from databricks.sdk.service.serving import (
    EndpointStateConfigUpdate,
    EndpointStateReady,
    EndpointTags,
    PutResponse,
    ServingEndpoint,
    ServingEndpointDetailed,
)

from mlflow_llm.serving.endpoints import store as store_module
from mlflow_llm.serving.endpoints.config import EndpointConfig, EntityConfig, ModelSource, Route
from mlflow_llm.serving.endpoints.config_body import config_body
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.interface.bundle import Bundle, DraftBundle
from mlflow_llm.serving.interface.errors import AlreadyExists, Conflict, InvalidField, LimitExceeded, NotFound
from mlflow_llm.serving.metering import Actor, Ledger, Limits, Reservation, Store, migrations
from mlflow_llm.serving.metering.accounts.limits import Bound

TASKS = {"assistant": ("chat", "completions"), "poet": ("completions", "chat"), "minilm": ("embeddings",)}


@pytest.fixture
def store(store_url):
    opened = Store(store_url)
    yield opened
    opened.close()


@pytest.fixture
def endpoints(store):
    return EndpointStore(
        store,
        locate=lambda entities: tuple(map(source_of, entities)),
        clock=lambda: 1_800_000_000.0,
    )


def source_of(entity):
    if entity.entity_name not in TASKS:
        raise NotFound(f"there is no model {entity.entity_name!r}")
    bundle = Bundle(content_hash=entity.uri, tasks=TASKS[entity.entity_name], model_dir="/m", tokenizer_dir="/t")
    return ModelSource(uri=entity.uri, bundle=bundle)


def entity(name="assistant", version="1", **more):
    return {"entity_name": name, "entity_version": version, **more}


def body(*entities, routes=None, **more):
    config = {"served_entities": list(entities or (entity(),))}
    if routes is not None:
        config["traffic_config"] = {
            "routes": [{"served_model_name": name, "traffic_percentage": share} for name, share in routes.items()]
        }
    return {"name": "chat", "config": config, **more}


def state_of(view):
    parsed = ServingEndpointDetailed.from_dict(view)
    return parsed.state.ready, parsed.state.config_update


def active(endpoints):
    """Return the configuration that the only endpoint serves."""
    (endpoint,) = endpoints.states()
    return endpoints.config(endpoint.name, endpoint.active_version)


READY, NOT_READY = EndpointStateReady.READY, EndpointStateReady.NOT_READY
IDLE, BUSY = EndpointStateConfigUpdate.NOT_UPDATING, EndpointStateConfigUpdate.IN_PROGRESS
FAILED = EndpointStateConfigUpdate.UPDATE_FAILED


def test_an_endpoint_is_created_and_becomes_ready(endpoints):
    """A new endpoint is in progress, then ready, and the SDK's types read every answer."""
    assert state_of(
        endpoints.create(body(tags=[{"key": "team", "value": "a"}]), by=Actor(name="ann", via="python"))
    ) == (NOT_READY, BUSY)
    (row,) = endpoints.states()
    assert (row.name, row.active_version, row.pending_version, row.ready) == ("chat", None, 1, False)
    (served,) = endpoints.config("chat", 1).served_entities
    assert (served.name, served.source.uri) == ("assistant-1", "models:/assistant/1")
    assert endpoints.mark_ready("chat", 1)
    view = ServingEndpointDetailed.from_dict(endpoints.get("chat"))
    assert state_of(endpoints.get("chat")) == (READY, IDLE)
    assert view.config.served_entities[0].entity_name == "assistant"
    assert view.config.traffic_config.routes[0].traffic_percentage == 100
    assert (view.task, view.creator, view.pending_config) == ("llm/v1/chat", "ann", None)
    (listed,) = endpoints.list()["endpoints"]
    assert ServingEndpoint.from_dict(listed).tags[0].key == "team"
    assert "source" not in listed["config"]["served_entities"][0]
    (row,) = endpoints.states()
    assert (row.active_version, row.pending_version, row.ready) == (1, None, True)
    with pytest.raises(AlreadyExists):
        endpoints.create(body())


def test_an_update_runs_alone_and_falls_back_when_it_fails(endpoints):
    """A concurrent update is a conflict, a failed one keeps the old config, and a stale report changes nothing."""
    endpoints.create(body())
    with pytest.raises(Conflict):
        endpoints.update_config("chat", body(entity(version="2"))["config"])
    endpoints.mark_ready("chat", 1)
    assert state_of(endpoints.update_config("chat", body(entity(version="2"))["config"])) == (READY, BUSY)
    assert endpoints.get("chat")["pending_config"]["served_entities"][0]["entity_version"] == "2"
    assert not endpoints.mark_ready("chat", 1)
    assert endpoints.states()[0].active_version == 1
    assert endpoints.mark_failed("chat", 2, "out of memory")
    assert not endpoints.mark_ready("chat", 2)
    view = endpoints.get("chat")
    assert state_of(view) == (READY, FAILED)
    assert view["state"]["message"] == "out of memory"
    assert active(endpoints).served_entities[0].entity_version == "1"
    endpoints.update_config("chat", body(entity(version="@champion"))["config"])
    assert endpoints.mark_ready("chat", 3)
    assert state_of(endpoints.get("chat")) == (READY, IDLE)
    assert active(endpoints).served_entities[0].name == "assistant-champion"


def test_a_dead_engine_makes_an_endpoint_not_ready(endpoints):
    """A dead engine makes its endpoint not ready and a live one ready again, once there is an active config."""
    endpoints.create(body())
    with pytest.raises(Conflict):
        endpoints.set_ready("chat", True)
    endpoints.mark_ready("chat", 1)
    endpoints.set_ready("chat", False)
    assert state_of(endpoints.get("chat")) == (NOT_READY, IDLE)
    assert not endpoints.states()[0].ready


def test_entities_of_one_endpoint_have_the_same_tasks(endpoints):
    """The entities of an endpoint must have the same tasks, in any order, at creation and at update."""
    endpoints.create(body(entity(), entity("poet"), routes={"assistant-1": 50, "poet-1": 50}))
    endpoints.mark_ready("chat", 1)
    mixed = body(entity(), entity("minilm"), routes={"assistant-1": 50, "minilm-1": 50})["config"]
    with pytest.raises(InvalidField, match=r"same tasks as 'assistant-1'"):
        endpoints.update_config("chat", mixed)
    with pytest.raises(NotFound, match="nothing"):
        endpoints.update_config("chat", body(entity("nothing"))["config"])
    assert state_of(endpoints.get("chat")) == (READY, IDLE)


def test_what_the_server_was_started_with_is_declared(endpoints):
    """Declaring an endpoint at the start creates it, leaves an equal one, and gives a different one a new version even
    during an update.
    """

    def config(version, **more):
        served = config_body(body(entity(version=version))["config"], "").served_entities[0]
        served = msgspec.structs.replace(served, source=source_of(served))
        return EndpointConfig(
            served_entities=(served,), routes=(Route(served_model_name=served.name, traffic_percentage=100),), **more
        )

    assert endpoints.declare("chat", config("1")) == 1
    assert endpoints.declare("chat", config("1")) == 1
    endpoints.mark_ready("chat", 1)
    assert endpoints.declare("chat", config("1")) == 1
    assert endpoints.declare("chat", config("2")) == 2
    assert endpoints.declare("chat", config("2", sticky=True)) == 3
    assert not endpoints.mark_ready("chat", 2)
    assert endpoints.mark_ready("chat", 3)
    assert endpoints.get("chat")["config"]["traffic_config"]["sticky"] is True


def declared(version: str) -> EndpointConfig:
    """Return the config that a command line declares, of version ``version`` of a model."""
    served = config_body(body(entity(version=version))["config"], "").served_entities[0]
    served = msgspec.structs.replace(served, source=source_of(served))
    route = Route(served_model_name=served.name, traffic_percentage=100)
    return EndpointConfig(served_entities=(served,), routes=(route,))


def split_of(view):
    """Return the version of each served entity of the config that an endpoint has or is getting, and its origin."""
    shown = "pending_config" if "pending_config" in view else "config"
    return [one["entity_version"] for one in view[shown]["served_entities"]], view[f"{shown}_origin"]


def test_what_an_operator_has_set_stays_until_it_is_given_back(endpoints):
    """A command line replaces no config that was set over the API, also after a change of its own; given back, the
    endpoint gets the config that was declared last, and command lines change it again.
    """
    by = Actor(name="key_1", via="http")
    endpoints.mark_ready("chat", endpoints.declare("chat", declared("1")))
    assert split_of(endpoints.get("chat")) == (["1"], "command_line")
    split = body(entity(), entity(version="2"), routes={"assistant-1": 50, "assistant-2": 50})["config"]
    endpoints.update_config("chat", split, by=by)
    assert endpoints.declare("chat", declared("1")) == 2  # while the update runs, too
    endpoints.mark_ready("chat", 2)
    for version in ("1", "3"):
        assert endpoints.declare("chat", declared(version)) == 2
        assert endpoints.keeps_operators("chat", declared(version))
    assert split_of(endpoints.get("chat")) == (["1", "2"], "api")
    assert split_of(endpoints.give_back("chat", by=by)) == (["3"], "command_line")
    with pytest.raises(Conflict, match="in progress"):
        endpoints.give_back("chat")
    endpoints.mark_ready("chat", 3)
    assert endpoints.declare("chat", declared("4")) == 4
    assert not endpoints.keeps_operators("chat", declared("4"))


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_gateways_that_start_at_once_declare_one_endpoint(endpoints, monkeypatch):
    """Two gateways that start on a new database with the same command line declare one config, and neither fails."""
    real, others = store_module.insert_endpoint, []

    def insert(*given, **named):
        if not others:  # the other gateway commits between this one's look and its own insert
            others.append("comes first")
            others.append(endpoints.declare("chat", declared("1")))
        return real(*given, **named)

    monkeypatch.setattr(store_module, "insert_endpoint", insert)
    assert endpoints.declare("chat", declared("1")) == 1
    assert others == ["comes first", 1]
    assert [state.pending_version for state in endpoints.states()] == [1]


def test_an_operators_update_that_failed_holds_nothing(endpoints):
    """The config from before the failed update is the command line's, which changes it."""
    endpoints.mark_ready("chat", endpoints.declare("chat", declared("1")))
    endpoints.update_config("chat", body(entity(version="2"))["config"])
    endpoints.mark_failed("chat", 2, "no memory")
    assert endpoints.declare("chat", declared("3")) == 3


def test_giving_back_what_no_command_line_declares_is_a_conflict(endpoints):
    """An endpoint that exists through the API alone has nothing to go back to."""
    endpoints.create(body())
    endpoints.mark_ready("chat", 1)
    with pytest.raises(Conflict, match="no command line has declared it"):
        endpoints.give_back("chat")


def test_a_config_given_back_that_equals_the_declared_one_is_no_update(endpoints):
    """An operator's config that says what the command line says is given back without a new version."""
    endpoints.create(body())
    endpoints.mark_ready("chat", 1)
    assert endpoints.declare("chat", declared("1")) == 1
    assert state_of(endpoints.give_back("chat")) == (READY, IDLE)
    assert endpoints.declare("chat", declared("2")) == 2


def test_configs_of_earlier_versions_belong_to_who_set_them_last(store, store_url, endpoints):
    """After the upgrade of a database, the audit log's newest change says whether a config is an operator's."""
    for name, by in (("chat", Actor(name="key_1", via="http")), ("poet", Actor(name="command line", via="command"))):
        endpoints.declare(name, declared("1"), by=Actor(name="command line", via="command"))
        endpoints.mark_ready(name, 1)
        endpoints.update_config(name, body(entity(version="2"))["config"], by=by)
        endpoints.mark_ready(name, 2)
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))

    def to_the_release_before(connection):
        config.attributes["connection"] = connection
        command.downgrade(config, "0010")

    store.write(to_the_release_before)
    Store(store_url).close()
    assert endpoints.declare("chat", declared("3")) == 2
    assert endpoints.declare("poet", declared("3")) == 3


@pytest.mark.parametrize(
    ("given", "uri", "name"),
    [
        (entity(version="@champion"), "models:/assistant@champion", "assistant-champion"),
        (entity(version="champion"), "models:/assistant@champion", "assistant-champion"),
        (entity(version=3), "models:/assistant/3", "assistant-3"),
        ({"entity_name": "/srv/models/chat"}, "/srv/models/chat", "srv-models-chat"),
        ({"entity_name": "runs:/abc/model", "name": "mine"}, "runs:/abc/model", "mine"),
    ],
)
def test_a_model_is_named_by_version_alias_or_uri(given, uri, name):
    """A version, an alias or a URI gives the model URI that MLflow fetches and a name for routing."""
    (served,) = config_body(body(given)["config"], "").served_entities
    assert (served.uri, served.name) == (uri, name)


BAD_CONFIGS = [
    (None, "config"),
    ({"served_entities": []}, "served_entities"),
    ({"served_entities": "x"}, "served_entities"),
    ({"served_entities": [entity()], "colour": 1}, "colour"),
    ({"served_entities": [entity(size=3)]}, "size"),
    ({"served_entities": [entity(), entity()]}, "name"),
    ({"served_entities": [entity(version=True)]}, "entity_version"),
    ({"served_entities": [entity(name="../x")]}, "entity_name"),
    ({"served_entities": [{"entity_name": "/srv/x", "entity_version": "1"}]}, "entity_version"),
    (
        {"served_entities": [entity(engine_settings={"dtype": "float99"})]},
        "engine_settings.dtype: 'float99' is not allowed; expected one of 'auto', 'bfloat16'",
    ),
    ({"served_entities": [entity(engine_settings={"max_num_seqs": 0})]}, "engine_settings.max_num_seqs: 0 is not"),
    ({"served_entities": [entity(engine_settings={"in_process": True})]}, "engine_settings.in_process: True is not"),
    ({"served_entities": [entity(engine_settings={"trust_remote_code": True})]}, "trust_remote_code"),
    ({"served_entities": [entity()], "traffic_config": {"sticky": 1}}, "sticky"),
    ({"served_entities": [entity(workload_type="GPU_SMALL")]}, "workload_type"),
    ({"served_entities": [entity(max_provisioned_throughput=0)]}, "max_provisioned_throughput"),
    ({"served_entities": [entity(min_provisioned_throughput=9, max_provisioned_throughput=5)]}, "max_provisioned"),
    ({"served_entities": [entity(min_provisioned_throughput=1.5)]}, "min_provisioned_throughput"),
    ({"served_entities": [entity(), entity(version="2")]}, "routes"),
    (body(routes={"assistant-1": 99})["config"], "routes"),
    (body(routes={"assistant-1": 99.5})["config"], "traffic_percentage"),
    (body(routes={"assistant-1": True})["config"], "traffic_percentage"),
    (body(routes={"other": 100})["config"], "served_model_name"),
]


@pytest.mark.parametrize(("config", "field"), BAD_CONFIGS)
def test_a_bad_config_is_refused_by_field(endpoints, config, field):
    """A bad config is refused with its field, and nothing is created."""
    with pytest.raises(InvalidField, match=field):
        endpoints.create({"name": "chat", "config": config})
    assert endpoints.list() == {"endpoints": []}


MODEL = {"model_name": "assistant", "model_version": "1"}
WRITTEN = [
    ({"served_entities": [entity(min_provisioned_throughput=0)]}, "served_entities[0].min_provisioned_throughput"),
    ({"served_entities": [entity(max_provisioned_throughput=0)]}, "served_entities[0].max_provisioned_throughput"),
    ({"served_entities": [entity(size=3)]}, "served_entities[0].size"),
    ({"served_entities": [entity(), entity("minilm")]}, "traffic_config.routes"),
    ({"served_models": [{"model_name": "../x"}]}, "served_models[0].model_name"),
    ({"served_models": [MODEL | {"model_version": True}]}, "served_models[0].model_version"),
    ({"served_models": {}}, "served_models"),
    ({}, "served_entities"),
    ({"colour": 1}, "colour"),
    (
        {
            "served_models": [MODEL | {"name": "a"}, {"model_name": "minilm", "model_version": "1", "name": "b"}],
            "traffic_config": body(routes={"a": 50, "b": 50})["config"]["traffic_config"],
        },
        "served_models[1]",
    ),
    (
        {
            "served_entities": [entity()],
            "traffic_config": {"routes": [{"served_entity_name": "x", "traffic_percentage": 100}]},
        },
        "traffic_config.routes[0].served_entity_name",
    ),
]


@pytest.mark.parametrize(("config", "field"), WRITTEN)
def test_a_field_is_named_as_the_caller_wrote_it(endpoints, config, field):
    """An error names the field by its path in the body that was sent, in the caller's spelling."""
    with pytest.raises(InvalidField) as created:
        endpoints.create({"name": "chat", "config": config})
    endpoints.create(body())
    endpoints.mark_ready("chat", 1)
    with pytest.raises(InvalidField) as updated:
        endpoints.update_config("chat", config)
    assert (created.value.param, updated.value.param) == (f"config.{field}", field)
    assert str(created.value).startswith(f"config.{field}: ")
    assert str(updated.value).startswith(f"{field}: ")


def test_unknown_fields_of_limits_and_tags_are_refused(endpoints):
    """An unknown field in limits or tags is refused, since a misspelt list of limits would remove all limits."""
    endpoints.create(body())
    for change, wrong in ((endpoints.put_rate_limits, "rate_limit"), (endpoints.patch_tags, "tags")):
        with pytest.raises(InvalidField, match=f"^{wrong}: .*no such field"):
            change("chat", {wrong: []})


def test_bad_names_and_unknown_endpoints_are_refused(endpoints):
    """Bad endpoint names are refused, and every call on an unknown endpoint is a 404."""
    for name in ("", "a b", "x" * 64, None, 5):
        with pytest.raises(InvalidField, match="name"):
            endpoints.create({**body(), "name": name})
    for call in (
        lambda: endpoints.get("none"),
        lambda: endpoints.delete("none"),
        lambda: endpoints.config("none", 1),
        lambda: endpoints.patch_tags("none", {}),
        lambda: endpoints.put_rate_limits("none", {}),
        lambda: endpoints.update_config("none", body()["config"]),
    ):
        with pytest.raises(NotFound):
            call()


def test_tags_are_added_replaced_and_deleted(endpoints):
    """A change of tags returns all tags after it, ordered by key."""
    endpoints.create(body(tags=[{"key": "a", "value": "1"}, {"key": "b"}]))
    added = [{"key": "c", "value": "3"}, {"key": "a", "value": "2"}]
    answer = endpoints.patch_tags("chat", {"add_tags": added, "delete_tags": ["b", "zz"]})
    assert [(tag.key, tag.value) for tag in EndpointTags.from_dict(answer).tags] == [("a", "2"), ("c", "3")]
    nul = ({"add_tags": [{"key": "a\0"}]}, {"add_tags": [{"key": "a", "value": "\0"}]}, {"delete_tags": ["\0"]})
    for bad in ({"delete_tags": "b"}, {"add_tags": [{"key": ""}]}, {"add_tags": {"a": 1}}, *nul):
        with pytest.raises(InvalidField):
            endpoints.patch_tags("chat", bad)


def test_rate_limits_are_the_ledgers_limits(endpoints, store, tmp_path):
    """Rate limits, per minute for the endpoint or each user, are replaced as a whole and enforced by the ledger."""
    endpoints.create(body())
    rates = [{"calls": 2, "renewal_period": "minute"}, {"calls": 1, "key": "user", "renewal_period": "minute"}]
    answer = PutResponse.from_dict(endpoints.put_rate_limits("chat", {"rate_limits": rates}))
    assert [(rate.key.value, rate.calls) for rate in answer.rate_limits] == [("endpoint", 2), ("user", 1)]
    ledger = Ledger(store, state_dir=tmp_path / "state", clock=lambda: 1_800_000_000.0, monotonic=lambda: 0.0)

    def call(request_id, key_id):
        fields = {"tenant": "t", "endpoint": "chat", "entity": "e", "mode": "m", "task": "chat"}
        reservation = Reservation(request_id=request_id, key_id=key_id, input_tokens=1, max_output_tokens=1, **fields)
        ledger.reserve(reservation).settle()

    call("1", "a")
    with pytest.raises(LimitExceeded):
        call("2", "a")
    call("3", "b")
    with pytest.raises(LimitExceeded):
        call("4", "c")
    endpoints.put_rate_limits("chat", {"rate_limits": []})
    call("5", "a")
    endpoints.put_rate_limits("chat", {"rate_limits": [{"calls": 3, "renewal_period": "minute"}]})
    with pytest.raises(LimitExceeded):
        call("6", "d")
    endpoints.delete("chat")
    assert Limits(store).list() == ()
    ledger.close()
    assert endpoints.list() == {"endpoints": []}


def test_rate_limits_and_soft_limits(endpoints: EndpointStore, store: Store) -> None:
    """Rate limits show no soft limit and leave it as it is, unless a limit of its scope takes its place."""
    endpoints.create(body())
    calls = {"calls": 5, "renewal_period": "minute"}
    for scope in ("endpoint", "user"):
        Limits(store).set(scope, "chat", "qpm", Bound(value=3, soft=True, alert_at=(0.5,)))
    assert "rate_limits" not in endpoints.get("chat")
    assert endpoints.put_rate_limits("chat", {"rate_limits": []}) == {"rate_limits": []}
    answer = endpoints.put_rate_limits("chat", {"rate_limits": [calls]})
    assert answer == {"rate_limits": [calls | {"key": "endpoint"}]}
    found = [(one.scope, one.value, one.soft, one.alert_at) for one in Limits(store).list()]
    assert found == [("endpoint", 5, False, None), ("user", 3, True, (0.5,))]


@pytest.mark.parametrize(
    ("limit", "field", "why"),
    [
        ({"calls": 5, "soft": True}, "soft", "--soft"),
        ({"calls": 5, "tokens": 100}, "tokens", "itpm, otpm"),
        ({"tokens": 100}, "calls", "limits on tokens"),
        ({"calls": 5, "principal": "ada"}, "principal", "scope key or tenant"),
        ({"calls": 5, "key": "user_group"}, "key", "endpoint"),
        ({"calls": 5, "renewal_period": "hour"}, "renewal_period", "minute"),
    ],
)
def test_limits_of_the_ai_gateway_are_refused_by_name(
    endpoints: EndpointStore, limit: dict[str, Any], field: str, why: str
) -> None:
    """Limits of Databricks' AI Gateway other than calls a minute, and ``ai_gateway``, are refused with what to use."""
    rates = [{"renewal_period": "minute"} | limit]
    with pytest.raises(InvalidField, match=rf"^rate_limits\[0\].{field}: .*{why}"):
        endpoints.create(body() | {"rate_limits": rates})
    with pytest.raises(InvalidField, match=r"^ai_gateway: .*guardrails and payload_log are fields of config"):
        endpoints.create(body() | {"ai_gateway": {"rate_limits": rates}})
    assert endpoints.list() == {"endpoints": []}


def test_a_declared_model_in_another_directory_is_the_same(endpoints: EndpointStore) -> None:
    """A restart that finds the model's files elsewhere is no new configuration; another content hash or URI is one."""

    def at(place: str, **changed: str) -> EndpointConfig:
        bundle = Bundle(
            content_hash=changed.get("content_hash", "a"),
            tasks=("chat",),
            model_dir=f"{place}/model",
            tokenizer_dir=f"{place}/tokenizer",
            adapters={changed.get("adapter", "one"): f"{place}/adapters/one"},
            chat_templates={"default": f"{place}/chat_template.jinja"},
            draft=DraftBundle(uri="d", content_hash="d", model_dir=f"{place}/d", tokenizer_dir=f"{place}/d"),
        )
        source = ModelSource(uri=changed.get("uri", "models:/m/1"), bundle=bundle)
        entity = EntityConfig(name="m", entity_name="m", entity_version="1", source=source)
        return EndpointConfig(served_entities=(entity,), routes=())

    assert endpoints.declare("chat", at("/tmp/one")) == 1
    assert endpoints.declare("chat", at("/tmp/two")) == 1
    assert endpoints.declare("chat", at("/tmp/two", content_hash="b")) == 2
    assert endpoints.declare("chat", at("/tmp/two", content_hash="b", uri="models:/m/2")) == 3
    assert endpoints.declare("chat", at("/tmp/two", content_hash="b", uri="models:/m/2", adapter="two")) == 4
