"""Check, before a model is saved, that the draft model which its settings name exists."""

from __future__ import annotations

from ....serving.interface.bundle import draft_of
from ....serving.interface.errors import ModelNotFound, PackagingError
from ....serving.interface.settings import EngineSettings
from ..model.bundle_reader import read_bundle
from ..model.fetch import local_root
from ..model.unlogged_source import source_of


def check_draft(settings: EngineSettings) -> None:
    """Raise ``PackagingError`` or ``ModelNotFound`` if ``settings.draft_model`` names no model that generates text.

    Of a model that is not logged yet, nothing but the source is checked; a hub id is looked up when the model is
    loaded.
    """
    uri = settings.draft_model
    if uri is None or source_of(uri) is not None:
        return
    try:
        found = read_bundle(local_root(uri, weights=False), weights=False)
    except ModelNotFound as error:
        raise ModelNotFound(f"draft_model: {error}") from None
    except PackagingError as error:
        raise PackagingError(f"draft_model: {error}") from None
    draft_of(uri, found)
