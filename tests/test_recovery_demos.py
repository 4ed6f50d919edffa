"""The demonstrations show what they say: real memory, held or free after each step."""

import json
import subprocess
import sys

import pytest

from labhelpers.formats import MIB
from labhelpers.recovery_demos import (
    demonstrate_all,
    demonstrate_attempt,
    demonstrate_displayed,
    demonstrate_empty_cache,
    demonstrate_handler,
    demonstrate_kept_error,
)

BLOCK_BYTES = 96 * MIB
NOISE_BYTES = 16 * MIB


@pytest.mark.parametrize(
    ("demonstrate", "holds"),
    [
        (demonstrate_empty_cache, (True, True, False, False)),
        (demonstrate_handler, (True, True, False)),
        (demonstrate_kept_error, (True, True, False)),
        (demonstrate_attempt, (True, False)),
    ],
)
def test_memory_is_held_until_the_last_reference_goes(demonstrate, holds):
    found = demonstrate("cpu", BLOCK_BYTES)
    assert found.holds == holds
    for moment, held in zip(found.moments, holds, strict=True):
        expected = BLOCK_BYTES if held else 0
        assert abs(moment.held_bytes - expected) < NOISE_BYTES, moment
        assert moment.cached_bytes is None  # the C library does not tell


def test_outside_of_ipython_nothing_is_displayed():
    assert demonstrate_displayed("cpu", BLOCK_BYTES) is None
    assert len(demonstrate_all("cpu", BLOCK_BYTES)) == 4


SHELL = """
import json
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("1 + 1", store_history=True)
from labhelpers.recovery_demos import demonstrate_displayed
found = demonstrate_displayed("cpu", 96 * 2**20)
shell.run_cell("after = _", store_history=True)
print(json.dumps([found.holds, "after" in shell.user_ns]))
"""


def test_a_displayed_tensor_outlives_its_name_until_memory_is_released():
    done = subprocess.run(
        [sys.executable, "-c", SHELL], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[True, True, True, False], True]
