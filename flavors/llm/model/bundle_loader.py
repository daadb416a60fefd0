"""``load_bundle``: find the parts of a saved model, wherever MLflow keeps it."""

from __future__ import annotations

import os

from ....serving.interface.bundle import Bundle
from ....serving.model_files import downloads
from ..errors import raises_mlflow
from .bundle_reader import read_bundle
from .fetch import local_root
from .manifest import Verify


@raises_mlflow
def load_bundle(model_uri: str | os.PathLike[str], verify: Verify | None = None) -> Bundle:
    """Return the parts of a saved model as absolute paths, checked against its manifest.

    Files of a remote store are in the user's cache, and stay there as long as this process lives.

    Args:
        model_uri: a local directory, or any URI that MLflow can download.
        verify: "size" (the default) compares the list of files and their sizes; "full" hashes every byte.
            None reads the environment variable MLFLOW_LLM_VERIFY.

    Raises:
        MlflowException: ``errors.ModelNotFound`` if there is no such model; ``errors.PackagingError`` if it is damaged,
            was changed or is of a later format, or if its base cannot be fetched.
    """
    bundle = read_bundle(local_root(model_uri), verify=verify)
    downloads.keep(bundle)
    return bundle
