# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: two threads, fixed examples, no options from the environment."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

# Before anything imports triton: without a GPU its kernels run under the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Options of the person who runs the tests must not change what they test; the place of downloaded
# checkpoints stays as set.
for _name in [name for name in os.environ if name.startswith("KVPASS_")]:
    if _name not in ("KVPASS_CACHE", "KVPASS_SMOLLM2_WHEEL"):
        del os.environ[_name]

torch.set_num_threads(2)

# No deadline: the first example may compile. Derandomized: a failure repeats on every machine.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
