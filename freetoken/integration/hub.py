"""A local folder for what the user named: a path as it is, a hub id through huggingface_hub and its cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from freetoken.errors import CheckpointError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def local_folder(
    path_or_id: str | os.PathLike[str],
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> Path:
    """The folder itself, or the downloaded snapshot of a hub id (HF_HUB_OFFLINE is respected).

    Raises `CheckpointError` in one line for a path that is not there and for whatever the hub answers.
    """
    text = str(path_or_id)
    try:
        path = Path(path_or_id).expanduser()
        if text and path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, not to be searched, of no user
        raise CheckpointError(f"{text[:200]!r} cannot be looked at: {error}", file=text) from error
    if not _HUB_ID.fullmatch(text) or text.startswith(".") or text.endswith(".gguf"):
        raise CheckpointError(f"{text or repr(text)} does not exist, and it is not a hub id like owner/name", file=text)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    patterns = [*_FILES, "*.py"] if trust_remote_code else _FILES
    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        return Path(
            snapshot_download(text, revision=revision, token=token, allow_patterns=patterns, ignore_patterns=["*/*"])
        )
    except Exception as error:  # huggingface_hub and its transport raise many unrelated classes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{text} is neither a local folder nor available from the hub: {reason}", file=text
        ) from error
    finally:
        if quiet:
            enable_progress_bars()
