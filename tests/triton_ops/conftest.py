# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter here: the variable must be set before Triton loads."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
