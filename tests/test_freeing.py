"""Giving memory back, also what a real IPython shell keeps of cells that are over."""

import json
import subprocess
import sys
import textwrap

import torch

from labhelpers.formats import MIB
from labhelpers.freeing import read_memory, release_memory


def test_release_says_what_it_gave_back():
    blocks = [torch.ones(2_000) for _ in range(8_000)]  # small enough to stay on the heap
    assert read_memory().allocated_bytes is None
    del blocks
    released = release_memory()
    assert released.after.reserved_bytes is None
    assert released.before.resident_bytes is not None
    assert released.after.resident_bytes is not None
    assert released.freed_bytes == (released.before.resident_bytes - released.after.resident_bytes)
    assert released.freed_bytes > 32 * MIB


# --- a real IPython shell -----------------------------------------------------------------------

SHELL = """
import contextlib, gc, io, json, sys, weakref
import torch
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
held = shell.user_ns["held"] = []

def cell(code):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return shell.run_cell(code, store_history=True)

def alive():
    gc.collect()
    return any(ref() is not None for ref in held)

seen = {}
shell.user_ns.update(alive=alive, seen=seen)
cell('''
import torch, weakref
from labhelpers.oom import attempt
from labhelpers.freeing import release_memory

def fail():
    big = torch.ones(1 << 20)
    held.append(weakref.ref(big))
    torch.empty(1 << 50, dtype=torch.uint8)
''')
"""


def in_shell(body: str) -> dict:
    """Run cells in a fresh IPython shell and return what they noted in `seen`."""
    code = SHELL + textwrap.dedent(body) + "\nprint(json.dumps(seen))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_shell_recovery_works_after_the_handler_not_inside_it():
    seen = in_shell(
        """
        cell('''
        try:
            fail()
        except RuntimeError:
            release_memory()
            seen["inside"] = alive()
        seen["after"] = alive()
        ''')
        cell("done = attempt(fail); seen['attempt'] = alive(); seen['outcome'] = done.outcome")
        """
    )
    assert seen == {"inside": True, "after": False, "attempt": False, "outcome": "oom"}


def test_shell_keeps_a_red_cells_tensors_in_several_places_and_all_are_cleared():
    seen = in_shell(
        """
        red = cell("fail()")
        seen["red"] = type(red.error_in_exec).__name__
        del red
        cell("1 + 1")
        seen["after a good cell"] = alive()
        kept = [name for name in ("last_traceback", "last_value", "last_exc") if hasattr(sys, name)]
        for name in [*kept, "last_type"]:
            delattr(sys, name)
        seen["without sys.last_*"] = alive()
        cell("released = release_memory()")
        seen["released"] = alive()
        cell("fail()")
        cell("release_memory(); seen['in the next cell'] = alive()")
        seen["left"] = [name for name in kept if hasattr(sys, name)]
        seen["places"] = len(kept)
        """
    )
    assert seen.pop("places") >= 2
    assert seen == {
        "red": "RuntimeError", "after a good cell": True, "without sys.last_*": True,
        "released": False, "in the next cell": False, "left": [],
    }  # fmt: skip


def test_shell_keeps_a_displayed_tensor_and_lets_go_of_it_on_release():
    seen = in_shell(
        """
        cell("40 + 2")
        cell("x = torch.ones(1 << 20); held.append(weakref.ref(x))")
        cell("x")
        cell("del x")
        seen["del"] = alive()
        cell("Out.clear()")
        seen["Out.clear"] = alive()
        cell("%reset -f out")
        seen["%reset"] = alive()
        cell("released = release_memory()")
        seen["released"] = alive()
        """
    )
    assert seen == {"del": True, "Out.clear": True, "%reset": True, "released": False}


def test_shell_loses_tensors_only_and_goes_on_counting_outputs():
    seen = in_shell(
        """
        cell("40 + 2")
        cell("mine = torch.ones(3); held.append(weakref.ref(mine))")
        cell("[{'nested': mine}]")
        cell("model = torch.nn.Linear(2, 2); held.append(weakref.ref(model)); model")
        cell("released = release_memory()")
        seen["own name"] = alive()
        cell("del mine, model")
        seen["without it"] = alive()
        seen["Out"] = {str(key): value for key, value in shell.user_ns["Out"].items()}
        cell("6 * 7 + 1")
        seen["_"] = shell.user_ns["_"]
        """
    )
    assert seen == {"own name": True, "without it": False, "Out": {"2": 42}, "_": 43}
