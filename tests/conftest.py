# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: workers, threads, fixed examples, no options from the environment."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch._dynamo.guards

# Before anything imports triton: without a GPU its kernels run under the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Options of the person who runs the tests must not change what they test; the place of downloaded
# checkpoints stays as set.
for _name in [name for name in os.environ if name.startswith("KVPASS_")]:
    if _name not in ("KVPASS_CACHE", "KVPASS_SMOLLM2_WHEEL"):
        del os.environ[_name]

# A second OpenMP team on the same cores makes small products several times slower.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

# Compiling makes millions of objects that die by reference count. Searching for cycles among them
# costs a sixth of the time; the end of a module does it once.
gc.set_threshold(200_000, 100, 1000)

# Dynamo times its guards after flushing the processor's caches; nobody reads that here.
if hasattr(torch._dynamo.guards, "profile_guard_manager"):
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# No deadline: the first example may compile. Derandomized: a failure repeats on every machine.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci")


def pytest_xdist_auto_num_workers() -> int:
    """A worker for each core, as long as each may have 3 GiB; six fit a GPU too."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (3 << 30), 6))


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    """Graphs of a finished module are dropped, and what stays is not searched for garbage again.

    A worker's heap grows to millions of objects; a full collection of it takes seconds.
    """
    yield
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded under the name ``summary``; a worker's own prints are lost."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(text)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start slow tests first; skip tests marked gpu where torch sees no CUDA device."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
