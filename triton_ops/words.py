# SPDX-License-Identifier: Apache-2.0
"""A block's word in a table: its address, a multiple of 16, and four bits of what it is."""

from __future__ import annotations

COLD = 8
"""In host memory. The three bits below are for encodings."""
