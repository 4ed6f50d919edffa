"""Does our peak of allocated memory agree with the article's? Side by side, from a run.

    python benchmarks/memory_against_article.py [results/reference/h200]

Every size must be within 2 MiB or 2 %, but 512, where another convolution workspace is chosen.
"""

from __future__ import annotations

import sys

from labhelpers.references import article_curve, curve_of
from labhelpers.store import open_run

ALLOWED_MIB = 2.0
ALLOWED_SHARE = 0.02
ANOTHER_WORKSPACE = 512


def main() -> int:
    """Print one line a batch size; return 1 if one is outside what is allowed."""
    path = sys.argv[1] if len(sys.argv) > 1 else "results/reference/h200"
    curve = curve_of(open_run(path))
    if curve is None:
        print(f"{path} holds no measured sweep")
        return 1
    ours = curve.table.set_index("batch_size")["allocated_mib"]
    outside = 0
    for size, published in article_curve().table.set_index("batch_size")["allocated_mib"].items():
        difference = ours[size] - published
        within = abs(difference) <= max(ALLOWED_MIB, ALLOWED_SHARE * published)
        note = "within" if within else "OUTSIDE"
        if size == ANOTHER_WORKSPACE:
            note += " (not held to it: another workspace)"
        outside += not within and size != ANOTHER_WORKSPACE
        print(
            f"batch {size:>5,}: article {published:>8,.1f} MiB, here {ours[size]:>8,.1f} MiB, "
            f"{difference:+.1f} MiB ({difference / published:+.1%}) {note}"
        )
    return int(outside > 0)


if __name__ == "__main__":
    sys.exit(main())
