# SPDX-License-Identifier: Apache-2.0
"""A record of the files in a folder, by which damage is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

MANIFEST = "manifest.json"
_VERSION = 1


def write(folder: Path, files: Sequence[str], source: str) -> None:
    """Record size, modification time and sha256 of `files`, and where they came from."""
    entries = {}
    for name in files:
        stat = (folder / name).stat()
        entries[name] = {
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": _sha256(folder / name),
        }
    content = {"version": _VERSION, "source": source, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def is_intact(folder: Path, files: Sequence[str]) -> bool:
    """Whether `folder` holds all of `files` as they were recorded.

    A file is hashed only when its modification time is another than recorded, so that large
    weights cost one `stat` a load.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["version"] != _VERSION or set(content["files"]) != set(files):
            return False
        for name, entry in content["files"].items():
            stat = (folder / name).stat()
            if stat.st_size != entry["size"]:
                return False
            if stat.st_mtime_ns != entry["mtime_ns"] and _sha256(folder / name) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
