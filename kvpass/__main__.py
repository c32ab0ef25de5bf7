# SPDX-License-Identifier: Apache-2.0
"""``python -m kvpass`` is the command ``kvpass``."""

from __future__ import annotations

from kvpass.cli import main

if __name__ == "__main__":
    main()
