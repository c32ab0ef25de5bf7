# SPDX-License-Identifier: Apache-2.0
"""One call of a rewritten graph: from its inputs to blocks, and from blocks to its outputs."""

from kvpass.step.buffers import with_memory
from kvpass.step.graph import RewrittenGraph

__all__ = ["RewrittenGraph", "with_memory"]
