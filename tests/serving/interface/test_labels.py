"""Labels of a request: what several fields say together."""

from __future__ import annotations

from typing import Any

import pytest

from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.labels import MAX_TAGS, Labels, take_labels


def taken(**given: Any) -> Labels | None:
    found = {f"labels.{name.replace('__', '.')}": value for name, value in given.items()} | {"model": "m"}
    take_labels(found)
    assert found.pop("model") == "m"
    labels: Labels | None = found.pop("labels", None)
    assert not found
    return labels


def test_fields_become_one_record() -> None:
    """The tags of all fields are one set; a request without labels has no record."""
    assert taken() is None
    found = taken(user="u", client_request_id="c", tags__metadata={"a": "1"}, tags__usage_context={"b": "2", "a": "1"})
    assert found == Labels(user="u", client_request_id="c", tags={"a": "1", "b": "2"})


def test_the_newer_name_of_a_user() -> None:
    """A safety identifier is the user; a second one beside another user is kept as a tag."""
    assert taken(safety_identifier="s") == taken(user="s", safety_identifier="s") == Labels(user="s")
    assert taken(user="u", safety_identifier="s") == Labels(user="u", tags={"safety_identifier": "s"})


def test_fields_that_disagree_are_refused() -> None:
    """A tag with two values is refused by the second field's path, and so are too many tags of all fields together."""
    with pytest.raises(InvalidField) as refused:
        taken(tags__metadata={"team": "a"}, tags__usage_context={"team": "b"})
    assert refused.value.param == "usage_context.team"
    one, other = ({f"{side}{i}": "" for i in range(MAX_TAGS)} for side in "ab")
    with pytest.raises(InvalidField, match="at most 16 labels in all fields together") as refused:
        taken(tags__metadata=one, tags__usage_context=other)
    assert refused.value.param == "usage_context"


def test_labels_over_defaults() -> None:
    """A request's own labels win, and defaults take only the room that it leaves."""
    defaults = Labels(user="service", tags={"team": "a", "stage": "prod"})
    assert Labels(tags={"team": "b"}).over(defaults) == Labels(user="service", tags={"team": "b", "stage": "prod"})
    full = Labels(user="u", tags={f"t{i}": "" for i in range(MAX_TAGS)})
    assert full.over(defaults) == full


def test_a_session_is_a_tag_with_a_usual_name() -> None:
    """MLflow's own name comes before the others; without one there is no session."""
    assert Labels(tags={"session_id": "s"}).session == Labels(tags={"conversation_id": "s"}).session == "s"
    assert Labels(tags={"session_id": "s", "mlflow.trace.session": "m"}).session == "m"
    assert Labels(tags={"team": "a"}).session == ""
