"""Print what `import labhelpers` takes beyond a bare start of Python; the aim is below 0.15 s."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 15
AIM_S = 0.15


def start_s(code: str) -> float:
    """Return the seconds that one Python process takes to run a line of code."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def main() -> None:
    """Alternate bare starts and imports, so that a busy machine slows both."""
    pairs = [(start_s("pass"), start_s("import labhelpers")) for _ in range(RUNS)]
    bare_s, import_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    more_s = statistics.median(imported - bare for bare, imported in pairs)
    print(f"bare start {bare_s:.3f} s, import labhelpers {import_s:.3f} s (medians of {RUNS})")
    print(f"import labhelpers takes {more_s:.3f} s more; the aim is below {AIM_S} s")


if __name__ == "__main__":
    main()
