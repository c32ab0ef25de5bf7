# SPDX-License-Identifier: Apache-2.0
"""The snapshots of all managers of a process as one JSON document, written and read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter, ValidationError

from kvpass._version import __version__
from kvpass.errors import MetricsError
from kvpass.runtime import roster
from kvpass.runtime.metrics import Snapshot


@dataclass(frozen=True)
class Page:
    """What a process says at one moment.

    Attributes:
        version: of kvpass there.
        process: its process id.
        host_memory: bytes of its anonymous memory in RAM; 0 where that is not known.
        managers: snapshots of its live managers, oldest first.
    """

    version: str
    process: int
    host_memory: int
    managers: list[Snapshot] = field(default_factory=list)


_ADAPTER = TypeAdapter(Page)


def anonymous_memory() -> int:
    """Bytes of anonymous memory of this process that are in RAM (0 where it is not known)."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def page() -> Page:
    """The page of this process, now."""
    snapshots = [manager.snapshot() for manager in roster.managers()]
    return Page(__version__, os.getpid(), anonymous_memory(), snapshots)


def write_page(content: Page) -> str:
    """The page as JSON."""
    return json.dumps(asdict(content), allow_nan=False)


def read_page(text: str | bytes) -> Page:
    """The page that a JSON text holds; keys that this version does not know are ignored.

    Raises:
        MetricsError: it is not such a page.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "the document"
        raise MetricsError(
            f"not a page of snapshots ({where}: {fault['msg']}): is it another program's port, or "
            "another version of kvpass?"
        ) from None
