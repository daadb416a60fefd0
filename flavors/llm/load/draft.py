"""Add the draft model that a setting names to a bundle."""

from __future__ import annotations

import msgspec

from ....serving.interface.bundle import Bundle, draft_of
from ....serving.interface.settings import EngineSettings
from ..model.bundle_reader import read_bundle


def with_draft(bundle: Bundle, settings: EngineSettings) -> Bundle:
    """Return ``bundle`` with the draft model that ``settings.draft_model`` names.

    That is a directory, or any URI that MLflow can download. A model that is not logged yet is logged into the user's
    cache. Raises ``PackagingError``, ``ModelNotFound``.
    """
    if settings.draft_model is None:
        return bundle
    from .model_cache import logged_root

    found = read_bundle(logged_root(settings.draft_model))
    return msgspec.structs.replace(bundle, draft=draft_of(settings.draft_model, found))
