# SPDX-License-Identifier: Apache-2.0
"""Which blocks live in the hot tier: pure functions over arrays of block metadata.

No device work is done here, so that a simulator can drive the same functions with recorded traces.
"""

from kvpass.runtime.policy.arrays import NEVER, BlockArrays, K
from kvpass.runtime.policy.choose import HYSTERESIS, admit, place, promotions, victims
from kvpass.runtime.policy.heat import (
    MAX_HEAT,
    fold,
    next_ages,
    next_heat,
    next_rate,
    next_window,
    pays,
    price,
    worth,
)
from kvpass.runtime.policy.order import coldest, coldest_first
from kvpass.runtime.policy.retention import resident_blocks, resident_cap, residents
from kvpass.runtime.policy.shares import demand, fair_shares, over_share
from kvpass.runtime.policy.thrash import Threshold
from kvpass.runtime.policy.window import Plan, plan
from kvpass.runtime.policy.zones import next_protected

__all__ = [
    "HYSTERESIS",
    "MAX_HEAT",
    "NEVER",
    "BlockArrays",
    "K",
    "Plan",
    "Threshold",
    "admit",
    "coldest",
    "coldest_first",
    "demand",
    "fair_shares",
    "fold",
    "next_ages",
    "next_heat",
    "next_protected",
    "next_rate",
    "next_window",
    "over_share",
    "pays",
    "place",
    "plan",
    "price",
    "promotions",
    "resident_blocks",
    "resident_cap",
    "residents",
    "victims",
    "worth",
]
