"""Check limits before a request is read, so that no body of megabytes is received and tokenised in vain.

The check reserves nothing; the admission decides (``admission``).
"""

from __future__ import annotations

from functools import partial

import sqlalchemy as sa

from ..accounts import windows
from ..accounts.limits import Limit, Subject, admit, user_subject
from ..accounts.money import currency_of
from ..accounts.monotonic_clock import MonotonicClock
from ..accounts.windows import Amounts, WindowState
from ..store.tables import limits
from ..store.tables import windows as window_table
from . import admission


def check(
    connection: sa.Connection, *, key_id: str, tenant: str, endpoint: str | None, least: Amounts, clock: MonotonicClock
) -> None:
    """Raise ``LimitExceeded`` or ``PermissionDenied`` if a request of the ``least`` amounts would be refused.

    ``endpoint`` is None if it is not known yet; its limits are then not checked.
    """
    of_limits: dict[str, Subject] = {"key": ("key", key_id), "tenant": ("tenant", tenant)}
    if endpoint is not None:
        of_limits |= {"endpoint": ("endpoint", endpoint), "user": ("user", user_subject(endpoint, key_id))}
    named = {scope: (endpoint or "") if scope == "user" else subject[1] for scope, subject in of_limits.items()}
    found = connection.execute(sa.select(limits).where(_any(limits, named)))
    set_limits = [Limit(scope=scope, subject=subject, kind=kind, value=value) for scope, subject, kind, value in found]
    if not set_limits:
        return
    rows = connection.execute(sa.select(window_table).where(_any(window_table, dict(of_limits.values()))))
    states = {(scope, subject): windows.decode(state) for scope, subject, state in rows}
    for state in states.values():
        clock.move_up_to(state.latest)
    paired = [(limit, states.get(of_limits[limit.scope], WindowState())) for limit in set_limits]
    shared = admission.is_shared(key_id)
    admit(paired, int(clock.now()), least, partial(currency_of, connection), is_shared=shared)


def _any(table: sa.Table, subjects: dict[str, str]) -> sa.ColumnElement[bool]:
    return sa.or_(*(sa.and_(table.c.scope == scope, table.c.subject == name) for scope, name in subjects.items()))
