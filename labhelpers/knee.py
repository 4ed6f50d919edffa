"""How the knee moves: the same sweep under one feed after another, in one run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from labhelpers.environment import usable_cpus
from labhelpers.formats import show_rate, show_share, show_times
from labhelpers.ladder import default_workers
from labhelpers.plots import batch_axis, new_figure
from labhelpers.records import FASHION, LadderSpec, SweepSpec, Trial, ask
from labhelpers.store import RunDirectory
from labhelpers.sweep import Progress, run_sweep, trials_of
from labhelpers.tables import median_rates
from labhelpers.verdicts import SweetSpot, sweet_spot
from labhelpers.worker import Worker, worker_at_hand

FEEDS = ("article", "workers", "host", "resident")
_COLOURS = {"article": "#c2541b", "workers": "#8a6d00", "host": "#3a7d44", "resident": "#0b5cad"}
WORTH_SAYING = 1.1
"""From this ratio of best speeds on, a faster feed changes the story."""
DOUBLED = 2.0
Rates = Mapping[str, Mapping[int, float]]


def run_knee(
    spec: LadderSpec, run: RunDirectory, *, workers: int | None = None,
    worker: Worker | None = None, on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> dict[str, list[Trial]]:  # fmt: skip
    """Sweep the batch sizes under every feed that exists here, once each, and return the trials.

    Sizes and images are those of the run's own sweep if it has one, and its trials are that
    feed's; `workers` is the number of loader workers (None: half of the CPUs).

    Raises:
        InputError, Stopped: as `run_sweep` does.
    """
    found: dict[str, list[Trial]] = {}
    with worker_at_hand(worker) as hired:
        for feed in FEEDS:
            if feed == "resident" and any(t.device == "cpu" for t in found["article"]):
                continue  # the host is the device
            found[feed] = _swept(spec, run, feed, workers, hired, on_progress, stop)
    return found


def knee_rates(run: RunDirectory) -> dict[str, dict[int, float]]:
    """Return the median images/s of each feed that a run was swept under, by batch size."""
    found = {}
    for feed in FEEDS:
        name = _name(run, feed)
        rates = median_rates(trials_of(run, name=name)) if name in run.info.specs else {}
        if rates:
            found[feed] = rates
    return found


def knee_spots(rates: Rates, share: float) -> dict[str, SweetSpot]:
    """Return the sweet spot under each feed."""
    return {feed: sweet_spot(of_feed, share) for feed, of_feed in rates.items()}


def knee_table(rates: Rates, share: float) -> pd.DataFrame:
    """Return one row per feed: its sweet spot, its speed there, and the best it reaches."""
    rows = [
        {
            "feed": feed, "sweet spot": f"{spot.batch_size:,}",
            "images/s there": f"{spot.images_per_s:,.0f}",
            "of best": show_share(spot.share_of_best),
            "best batch": f"{spot.best_batch_size:,}",
            "best images/s": f"{spot.best_images_per_s:,.0f}",
        }
        for feed, spot in knee_spots(rates, share).items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def knee_figure(rates: Rates, share: float, title: str) -> Figure:
    """Draw speed, and the share of each feed's own best, against batch size; stars are spots."""
    figure = new_figure((10.4, 4.4), title)
    speed, relative = figure.subplots(1, 2)
    for feed, spot in knee_spots(rates, share).items():
        sizes, values = list(rates[feed]), list(rates[feed].values())
        of_best = [value / spot.best_images_per_s for value in values]
        at = sizes.index(spot.batch_size)
        for axes, heights in ((speed, values), (relative, of_best)):
            axes.plot(sizes, heights, marker="o", markersize=3.5, color=_COLOURS[feed], label=feed)
            axes.plot(sizes[at], heights[at], marker="*", markersize=15, color=_COLOURS[feed])
    speed.set_yscale("log", base=10)
    speed.set_ylabel("images/s (median)")
    plain = FuncFormatter(lambda value, _: f"{value:,.0f}")
    speed.yaxis.set_major_formatter(plain)
    speed.yaxis.set_minor_formatter(plain if _narrow(rates) else NullFormatter())
    relative.axhline(share, color="#6b7280", linewidth=1, linestyle=":")
    relative.set_ylim(0, 1.08)
    relative.set_ylabel("share of the feed's own best")
    relative.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (speed, relative):
        batch_axis(axes, sorted({size for of_feed in rates.values() for size in of_feed}))
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _narrow(rates: Rates) -> bool:
    """Tell whether all speeds lie within a decade, so that an axis needs more numbers."""
    values = [rate for of_feed in rates.values() for rate in of_feed.values()]
    return max(values) < 10 * min(values)


def knee_story(rates: Rates, share: float) -> str:
    """Say how the sweet spot moves with the feed, and what that means for the article's."""
    spots = knee_spots(rates, share)
    if "article" not in spots or len(spots) < 2:
        return "Only one feed was swept, so nothing can be said about how the knee moves."
    article = spots["article"]
    fastest = max(spots, key=lambda feed: spots[feed].best_images_per_s)
    best = spots[fastest]
    lines = ", ".join(f"{spot.batch_size:,} (`{feed}`)" for feed, spot in spots.items())
    text = f"The sweet spot at {show_share(share, 0)} of the best is {lines}."
    gain = best.best_images_per_s / article.best_images_per_s
    if gain < WORTH_SAYING:
        return f"{text} No other feed is much faster than the article's: it is not the limit here."
    moved = best.batch_size / article.batch_size
    where = "stays where it is" if moved == 1 else f"moves to {show_times(moved, 2)} the batch"
    whose = "is" if gain >= DOUBLED else "is in part"
    return (
        f"{text} With `{fastest}` the same model reaches {show_rate(best.best_images_per_s)}, "
        f"{show_times(gain)} the article's best, and the knee {where}: the plateau of the "
        f"article's curve {whose} its loader's, not the device's."
    )


def _swept(
    spec: LadderSpec, run: RunDirectory, feed: str, workers: int | None, worker: Worker,
    on_progress: Callable[[Progress], None] | None, stop: threading.Event | None,
) -> list[Trial]:  # fmt: skip
    """Sweep one feed, unless the run's own sweep is that feed's and holds every size."""
    name = _name(run, feed)
    own = run.info.specs.get(name)
    known = trials_of(run, name=name) if own else []
    if own and {trial.batch_size for trial in known} >= set(own["batch_sizes"] or ()):
        return known
    number = workers or max(default_workers(usable_cpus()))
    asked = _like_own_sweep(run, spec) | {
        "feed": feed, "repeats": 1, "limits": False, "workers": number if feed == "workers" else 0,
    }  # fmt: skip
    return run_sweep(
        ask(SweepSpec, own or asked), run, worker=worker, on_progress=on_progress, stop=stop,
        name=name,
    )  # fmt: skip


def _like_own_sweep(run: RunDirectory, spec: LadderSpec) -> dict[str, Any]:
    """Return the fields of the spec, with the sizes and images of the run's own sweep."""
    same = (
        "device", "seed", "learning_rate", "data_dir", "synthetic", "require_gpu", "share",
        "quick", "trial_timeout_s",
    )  # fmt: skip
    asked = {name: getattr(spec, name) for name in same}
    own = run.info.specs.get("sweep")
    if own and SweepSpec(**own).workload == FASHION and run.trials("sweep"):
        asked |= {name: own[name] for name in ("batch_sizes", "images", "seed", "learning_rate")}
    return asked


def _name(run: RunDirectory, feed: str) -> str:
    """Return the name of a feed's request: the run's own sweep, if it is plainly that feed's."""
    own = run.info.specs.get("sweep")
    if own is None:
        return "sweep" if feed == "article" else f"sweep:{feed}"
    asked = SweepSpec(**own)
    same = (asked.workload, asked.feed, asked.precision) == (FASHION, feed, "fp32")
    return "sweep" if same else f"sweep:{feed}"
