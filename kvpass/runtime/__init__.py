# SPDX-License-Identifier: Apache-2.0
"""The runtime half: tiers, block tables, migration, and the manager that owns them."""
