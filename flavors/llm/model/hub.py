"""Models and tokenizers on the Hugging Face hub: the form of a repository's id, and fetching a snapshot."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from ....serving.interface.errors import PackagingError, reason

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
NO_PICKLES = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx*", "*.ot", "*.gguf", "onnx/*", "openvino/*"]


def fetch_snapshot(repo_id: str, revision: str | None) -> Path:
    """Fetch a hub repository into the local cache and return its snapshot.

    Pickled weights are fetched only if there are no safetensors. ``revision`` is a branch, tag or commit; None is the
    default branch. Raises ``PackagingError`` if the repository cannot be fetched.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # by itself it asks the hub for the files of a commit even offline
    get = functools.partial(
        huggingface_hub.snapshot_download, repo_id, revision=revision, local_files_only=constants.HF_HUB_OFFLINE
    )
    try:
        snapshot = Path(get(ignore_patterns=NO_PICKLES))
        if not any(snapshot.rglob("*.safetensors")):
            snapshot = Path(get())
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise PackagingError(
            f"model: {repo_id!r} is not a local path and could not be fetched from the hub: {reason(error)}"
        ) from None
    return snapshot
