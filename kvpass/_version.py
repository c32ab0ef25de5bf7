# SPDX-License-Identifier: Apache-2.0
"""The version, kept apart so that packaging can read it without importing torch."""

from __future__ import annotations

__version__ = "0.1.0"
