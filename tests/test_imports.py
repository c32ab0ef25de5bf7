# SPDX-License-Identifier: Apache-2.0
"""What one import promises is there, without another import having come first."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["kvpass.cache", "kvpass.backends", "kvpass.explanation"])
def test_the_ops_are_defined_by_every_module_that_traces_to_them(module):
    code = f"import torch, {module}; torch.ops.kvpass.cache_update, torch.ops.kvpass.append"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names():
    code = (
        "import kvpass, types; assert isinstance(kvpass.backend, types.FunctionType); "
        "kvpass.TieredCache, kvpass.Config, kvpass.explain; "
        "import kvpass.backends; assert isinstance(kvpass.backend, types.FunctionType)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
