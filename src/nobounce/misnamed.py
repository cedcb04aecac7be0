"""What a path that leads nowhere was probably meant to be, and what to write instead."""

from __future__ import annotations

import os
import re

_URL = r"([A-Za-z][A-Za-z0-9+.-]*):/{1,2}\S*"
_HUB = r"(?:hf://(?:models/)?|https?://huggingface\.co/)([\w.-]+/[\w.-]+)\S*"
_HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


def cure(path: str, target: str | None = None) -> str:
    """What to do about a path that does not exist, or "". `target` is what it links
    to, where it is a link."""
    if target is not None:
        return (
            f"it is a link to {target}, which is not there: an unfinished download or a cleaned cache; "
            "download it again"
        )
    if hub := re.fullmatch(_HUB, path):
        return (
            f"nobounce reads files, not URLs: `hf download {hub[1]}` fetches the model and prints its folder"
        )
    if re.fullmatch(_URL, path):
        return "nobounce reads files, not URLs: download it and name the file"
    if path.startswith("~"):
        return f"only a shell expands ~, and only outside quotes: write {os.path.expanduser(path)}"
    if re.fullmatch(_HUB_ID, path) and not os.path.isdir(path.partition("/")[0]):
        return (
            f"if it is a model on the Hugging Face Hub, `hf download {path}` fetches it and prints its folder"
        )
    return ""


def link_target(path: str) -> str | None:
    """What a symbolic link names, or None where the path is no link."""
    try:
        return os.readlink(path)
    except (OSError, ValueError):
        return None
