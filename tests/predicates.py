"""Predicates and short cuts that the tests of the search share."""

from collections.abc import Callable

from labhelpers.search import ProbeResult, SearchError, SearchResult

MIB = 2**20
GIB = 2**30

Peak = Callable[[int], float]
Probe = Callable[[int], ProbeResult]


def fits_up_to(
    largest: int, peak: Peak | None = None, live: Peak | None = None, failure: str = "oom"
) -> Probe:
    """A predicate that runs every size up to `largest`, with peaks in bytes."""

    def probe(size: int) -> ProbeResult:
        if size > largest:
            return ProbeResult(size, failure)
        peaks = [None if give is None else int(give(size)) for give in (peak, live)]
        return ProbeResult(size, "ok", *peaks)

    return probe


def never(size: int) -> ProbeResult:
    """A predicate that runs nothing."""
    return ProbeResult(size, "oom")


def line(fixed_mib: float, slope_mib: float) -> Peak:
    """Peaks in bytes on a line given in MiB."""
    return lambda size: (fixed_mib + slope_mib * size) * MIB


def tried(result: SearchResult | SearchError) -> list[int]:
    """The sizes tried, in order."""
    return [probe.batch_size for probe in result.probes]
