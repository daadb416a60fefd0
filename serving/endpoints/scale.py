"""How many engine hosts a served entity has, and who starts them: the ``scale`` of an entity."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ..interface.errors import InvalidField
from ..interface.validated_struct import Checked

Runtime: TypeAlias = Literal["ray"]
MAX_HOSTS = 64
MAX_AMOUNT = 2**50  # bytes of memory are the largest
RESOURCE = re.compile(r"[A-Za-z][A-Za-z0-9_.:/-]{0,127}")
WHOLE = ("GPU",)  # resources of which a host gets a share of one, or several whole ones
NOT_OURS = ("object_store_memory",)  # of Ray's own objects, of which an engine host has none
Hosts = Annotated[int, Meta(ge=1, le=MAX_HOSTS)]
Resources = Annotated[
    dict[str, float], Meta(max_length=16, description='at most 16 names of resources with amounts, such as {"GPU": 1}')
]


class Scale(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hosts that a runtime starts for the engines of an entity. Each runs one replica.

    Attributes:
        runtime: the cluster that starts the hosts, ends them and replaces them when their nodes die.
        min: the fewest hosts.
        max: the most hosts; between the two, their number follows the load. None is as many as ``min``.
        resources: what each host takes of a node of the cluster, by the cluster's names; ``memory`` is in bytes.
    """

    runtime: Runtime = "ray"
    min: Hosts = 1
    max: Hosts | None = None
    resources: Resources = msgspec.field(default_factory=lambda: {"CPU": 1.0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max is not None and self.max < self.min:
            raise InvalidField("max", self.max, f"at least min, which is {self.min}")
        for name, amount in self.resources.items():
            field = f"resources.{name}"
            if not RESOURCE.fullmatch(name) or name in NOT_OURS:
                raise InvalidField("resources", name, "names of resources of the cluster's nodes, such as GPU")
            if not 0 < amount <= MAX_AMOUNT:
                raise InvalidField(field, amount, f"a number above 0 and up to {MAX_AMOUNT}")
            if name in WHOLE and amount > 1 and amount != int(amount):
                raise InvalidField(field, amount, "a share up to 1, or a whole number")

    @property
    def most(self) -> int:
        """The most hosts."""
        return self.min if self.max is None else self.max
