# SPDX-License-Identifier: Apache-2.0
"""Masks of every shape through the kernels: what the CPU path computes, the GPU computes."""

from __future__ import annotations

import pytest
import torch

from tests.test_effects import inputs, run_both, shaped_masks, stack

pytestmark = pytest.mark.gpu


# SDPA itself refuses a mask of one column on CUDA ("last dimension must be contiguous").
NAMES = [name for name in shaped_masks() if name != "queries only"]


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_every_shape(name):
    torch._dynamo.reset()
    calls = [x.cuda() for x in inputs(280, 1, 3, 1)]
    layer = stack(count=1)[0].cuda()
    attention = shaped_masks()[name]

    def step(x, cache):
        return layer(x, cache, attention)

    expected, got, _ = run_both(step, calls, "eager")
    for a, b in zip(expected, got, strict=True):
        assert (a - b).abs().max() < 1e-4
