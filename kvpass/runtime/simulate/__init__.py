# SPDX-License-Identifier: Apache-2.0
"""Replays recorded traces against replacement policies: trace-driven simulation of the hot tier.

A request is a block that attention accessed in a step; it hits if the block is hot. What a miss
costs is the same for all: one read in place, over the link. What follows differs. The classic
policies (LRU, LFU, ARC, LRU-K) promote on every miss, so each of their misses is a move as well,
and they learn of each request at once. kvpass's own policy is the runtime's: a miss promotes
nothing; it decides at the ends of windows, by the counts of the window, and each promotion is a
move. Belady's optimum knows the future, and need not promote on a miss.
"""

from kvpass.runtime.simulate.compare import Comparison, Row, compare, hot_slots

__all__ = ["Comparison", "Row", "compare", "hot_slots"]
