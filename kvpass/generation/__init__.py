# SPDX-License-Identifier: Apache-2.0
"""Generation in which the device does not wait for the host."""

from kvpass.generation.loop import Generation, generate

__all__ = ["Generation", "generate"]
