# SPDX-License-Identifier: Apache-2.0
"""A process that ends while blocks are copied ends well, and soon."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import time
import weakref

from kvpass.runtime import exits
from tests.runtime.harness import BLOCK, Driver


def test_a_process_ends_while_copies_wait():
    code = """
        import time
        from kvpass.runtime import migrate
        from tests.runtime.harness import Driver

        copy = migrate.copy_on_host
        def slowly(piece):
            time.sleep(0.2)
            copy(piece)
        migrate.copy_on_host = slowly
        migrate.PIECE_BYTES = 1
        driver = Driver(hot="8MiB")
        driver.append(150 * 32)
        assert driver.manager.mover.copier.depth() > 50
        print("end", flush=True)
    """
    begin = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr
    assert "Exception" not in result.stderr
    # Three hundred copies of 0.2 s take a minute; the imports take a few seconds.
    assert time.monotonic() - begin < 38


def test_threads_that_ended_are_not_kept():
    driver = Driver()
    driver.append(2 * BLOCK)
    driver.manager.settle()
    thread = driver.manager.mover.copier._thread
    assert thread in exits._running
    driver.manager.mover.copier.close()
    gone = weakref.ref(thread)
    del driver, thread
    gc.collect()
    assert gone() is None
