# SPDX-License-Identifier: Apache-2.0
"""The source op of tiered caches must exist before a graph with it can be traced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvpass.ops  # noqa: F401


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
