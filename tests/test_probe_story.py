"""Curves, sentences and figures of probes: from recorded rows, and from runs made up to be read."""

import pytest

from labhelpers import cliffs, probe_narrative
from labhelpers.formats import GIB, MIB
from labhelpers.plots import png_bytes
from labhelpers.probe_curves import article_probe, h200_probe, probe_of, reference_probes
from labhelpers.probe_plan import Stop
from labhelpers.probe_plots import (
    card_share,
    memory_per_image,
    own_memory,
    probe_sheet,
    residency_figure,
    speed,
    speed_share,
)
from labhelpers.records import Clocks, DriverMemory, Trial
from labhelpers.residency import ResidencyMap
from labhelpers.store import RunDirectory

CARD = 16 * GIB
BLOCK_S = 256 * MIB / 1e12
CPU_FACTS = {"system": "Linux", "kernel": "6.6", "device_name": "A CPU", "gpu": None,
             "memory_total_bytes": 8 * GIB}  # fmt: skip
GPU_FACTS = {**CPU_FACTS, "device_name": "A GPU", "gpu": {"total_bytes": CARD}}
WSL2_FACTS = {**GPU_FACTS, "kernel": "6.6-microsoft-standard-WSL2"}


def trial(size, rate, *, kib=380, position=0, device="cuda:0", **facts):
    """One size at a speed (images/s), with its memory per image in KiB."""
    reserved = None if device == "cpu" else kib * 1024 * size
    seen = {
        "images": 5 * size, "steps": 5, "epoch_s": 5 * size / rate,
        "peak_allocated_bytes": int(0.87 * kib * 1024 * size), "peak_reserved_bytes": reserved,
        "memory_before": DriverMemory(free_bytes=CARD, total_bytes=CARD),
    }  # fmt: skip
    return Trial(
        kind="probe", batch_size=size, position=position, device=device, environment_id="here",
        **{**seen, **facts},
    )  # fmt: skip


def own(tmp_path, facts, trials):
    """Write a run as a probe leaves it, and read its curve back."""
    run = RunDirectory.create(tmp_path / "run")
    with run.writing():
        run.note_environment("here", facts)
        for seen in trials:
            run.append(seen)
    return probe_of(run)


@pytest.fixture
def past(tmp_path):
    rows = [
        trial(16_384, 190_000),
        trial(32_768, 200_000, position=1),
        trial(49_152, 50_000, position=2),
        trial(16_384, 189_000, position=3, repeat=1),
    ]
    return own(tmp_path, WSL2_FACTS, rows)


@pytest.fixture
def changed(tmp_path):
    def kernels(name, position):
        details = {"kernels": [name, "gemm"], "longest_kernels_s": {name: 3.0, "gemm": 1.0}}
        return {"details": details, "position": position}

    rows = [
        trial(16_384, 190_000, **kernels("winograd", 0)),
        trial(32_768, 90_000, kib=190, **kernels("implicit", 1)),
        trial(16_384, 150_000, repeat=1, **kernels("winograd", 2)),
    ]
    return own(tmp_path, GPU_FACTS, rows)


@pytest.fixture
def on_cpu(tmp_path):
    rows = [trial(64, 5000, device="cpu"), trial(128, 2000, device="cpu", position=1),
            trial(64, 5100, device="cpu", position=2, repeat=1)]  # fmt: skip
    return own(tmp_path, CPU_FACTS, rows)


def map_of(seconds, device="cuda:0", bus=25e9, **facts):
    times = (tuple(seconds),) * 2
    return ResidencyMap(
        device=device, block_bytes=256 * MIB, asked_blocks=len(seconds), fill_s=times,
        read_s=times, card_fill=1e12, card_read=1e12, card_copy=1e12, bus_to_device=bus,
        bus_from_device=bus, **{"ended": None, **facts},
    )  # fmt: skip


def test_the_articles_rows_are_judged_as_it_found_them():
    verdicts = {j.batch_size: j.verdict for j in article_probe().judgements}
    assert verdicts == {32_768: "no", 49_152: "certain", 98_304: "certain", 131_072: "certain"}


def test_the_h200_never_ran_past_its_card_and_its_fall_is_a_kernel_change():
    curve = h200_probe()
    assert {j.verdict for j in curve.judgements} == {"no"}
    first = next(j for j in curve.judgements if j.causes)
    assert (first.batch_size, first.causes) == (65_536, ("kernel_change",))
    assert curve.table["outcome"].iloc[-1] == "oom"


def test_the_two_recorded_cliffs_are_told_apart_in_words():
    past_words, kernel_words = (cliffs.cliff(c) for c in (article_probe(), h200_probe()))
    assert "from batch 32,768 to 49,152" in past_words
    assert "3.51×" in past_words
    assert "111.9 % of the card" in past_words
    assert "past the card" in past_words
    assert "from batch 49,152 to 65,536" in kernel_words
    assert "0.50×" in kernel_words
    assert "kernel change" in kernel_words
    both = cliffs.two_cliffs(article_probe(), h200_probe())
    for figure in ("49,152", "65,536", "112 %", "1.00×", "10 %", "0.50×"):
        assert figure in both


def test_a_run_past_the_card_is_told_as_the_articles(past):
    words = cliffs.own_beside(past, article_probe(), h200_probe())
    assert "RTX 5070 Ti" in words
    assert "past the card" in words
    assert "**The fastest safe batch is 32,768**: 200,000 images/s" in probe_narrative.safe_batch(
        past
    )
    assert "no drift" in probe_narrative.drift(past)
    table = probe_narrative.verdict_table(past)
    assert list(table["batch"]) == ["16,384", "32,768", "49,152", "16,384"]
    assert list(table["past the card"]) == ["no", "no", "certain", "no"]
    assert "flags" not in table, "nothing disturbed this run"


def test_other_kernels_are_told_as_the_h200s_and_named(changed):
    assert "H200" in cliffs.own_beside(changed, article_probe(), h200_probe())
    names = cliffs.kernels_changed(changed)
    assert "at batch 16,384 `winograd` takes 75 %" in names
    assert "at batch 32,768 `implicit` takes 75 %" in names
    assert "Other kernels ran than at the reference: implicit" in probe_narrative.evidence(changed)
    assert "slowed by 1.27×" in probe_narrative.drift(changed)


def test_the_cpu_never_poses_as_a_card(on_cpu):
    assert on_cpu.label == "A CPU (this machine), CPU"
    assert set(probe_narrative.verdict_table(on_cpu)["past the card"]) == {"no card"}
    assert {j.causes for j in on_cpu.judgements} == {(), ("undecided",)}
    told = " ".join([
        cliffs.cliff(on_cpu), probe_narrative.evidence(on_cpu), probe_narrative.safe_batch(on_cpu),
        cliffs.own_beside(on_cpu, article_probe(), h200_probe()), cliffs.kernels_changed(on_cpu),
    ])  # fmt: skip
    assert "of the card" not in told
    assert "inside the card" not in told
    assert "CPU" in probe_narrative.safe_batch(on_cpu)


def test_a_curve_that_never_fell_says_so(tmp_path):
    curve = own(tmp_path, GPU_FACTS, [trial(1024, 1000), trial(2048, 1100, position=1)])
    assert "no size was slower" in cliffs.cliff(curve)
    assert "neither of the two cliffs" in cliffs.own_beside(curve, article_probe(), h200_probe())
    assert "nothing to explain" in probe_narrative.evidence(curve)
    assert "not run again" in probe_narrative.drift(curve)
    assert "No size fell" in cliffs.kernels_changed(curve)


def test_failures_and_disturbances_stand_in_the_table(tmp_path):
    hot = Clocks(sm_mhz=900, throttle_reasons=("sw_power_cap",))
    oom = Trial(kind="probe", batch_size=4096, position=2, device="cuda:0", outcome="oom")
    curve = own(
        tmp_path,
        GPU_FACTS,
        [trial(1024, 1000), trial(2048, 1100, position=1, clocks_after=hot), oom],
    )
    table = probe_narrative.verdict_table(curve)
    assert list(table["images/s"]) == ["1,000", "1,100", "oom"]
    assert table["allocated MiB"].iloc[-1] == "n/a"
    assert "throttled" in table["flags"].iloc[1]
    assert "out-of-memory error" in probe_narrative.evidence(curve)


def test_equal_verdicts_are_explained_once(past):
    told = probe_narrative.evidence(h200_probe())
    assert told.count("- Batch") == 2
    assert "The same holds for 98,304, 131,072, 524,288." in told


def test_why_it_stopped_is_said(past):
    stop = Stop("memory_budget", "batch 65,536 is predicted to take too much", 65_536)
    words = probe_narrative.stopped(stop, past)
    assert "**49,152**" in words
    assert words.endswith("batch 65,536 is predicted to take too much.")
    assert "interrupted" in probe_narrative.stopped(None, past)


def test_the_policies_name_this_machine_once():
    words = probe_narrative.policies("wsl2")
    assert words.count("(this machine)") == 1
    assert "**WSL2** (this machine)" in words
    assert "(this machine)" not in probe_narrative.policies(None)


def test_a_map_of_resident_blocks_is_said_to_be_so():
    words = probe_narrative.residency(map_of([BLOCK_S] * 4), "linux")
    assert "**All 4 blocks are resident**" in words
    assert "never moves a block" in words
    assert "never run this map on WSL2" in words


def test_a_map_with_blocks_outside_names_them():
    slow = 40 * BLOCK_S
    found = map_of([BLOCK_S, slow, BLOCK_S, slow], ended="block 5 was refused")
    words = probe_narrative.residency(found, "wsl2")
    assert "**2 of 4 blocks are not, or not wholly, in video memory**: 1, 3." in words
    assert "smaller than asked: block 5 was refused" in words
    assert "native Linux" not in words


def test_a_map_that_cannot_tell_says_undecided_or_that_it_needs_a_gpu():
    assert "Undecided" in probe_narrative.residency(map_of([BLOCK_S] * 2, bus=9e11), "linux")
    assert "needs a GPU" in probe_narrative.residency(map_of([BLOCK_S] * 2, "cpu", None), "linux")
    assert "could not be measured" in probe_narrative.residency(None, "linux")


def test_reference_curves_are_the_two_recorded_ones_at_least():
    curves = reference_probes()
    assert [curve.label for curve in curves][:2] == [
        "RTX 5070 Ti, WSL2 (article)", "H200, native Linux (bare loop)",
    ]  # fmt: skip
    assert all(curve.reference for curve in curves)


def test_a_run_without_a_probe_has_no_curve(tmp_path):
    assert probe_of(RunDirectory.create(tmp_path / "run")) is None


def test_the_figures_carry_units_references_dashed_and_the_card(past):
    figure = probe_sheet("A probe", [speed, own_memory], [past, *reference_probes()])
    speeds, memory = figure.axes
    assert speeds.get_ylabel() == "images/s"
    assert speeds.get_xscale() == memory.get_xscale() == "log"
    styles = {line.get_label(): line.get_linestyle() for line in speeds.get_lines()}
    assert styles[past.label] == "-"
    assert {styles[curve.label] for curve in reference_probes()} == {"--"}
    assert memory.get_ylabel() == "peak memory (MiB)"
    drawn = {line.get_label() for line in memory.get_lines()}
    assert drawn == {"reserved", "allocated", "the card: 16,384 MiB"}
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_the_recorded_sheet_shows_all_of_both_curves():
    curves = [article_probe(), h200_probe()]
    figure = probe_sheet("Two", [speed, speed_share, card_share, memory_per_image], curves)
    for axes in figure.axes:
        low, high = axes.get_ylim()
        for line in axes.get_lines():
            assert max(line.get_ydata()) <= high
            assert min(line.get_ydata()) >= low
    assert len(figure.axes) == 4
    assert figure.axes[2].get_ylabel() == "peak reserved, share of the card"


def test_without_a_card_no_card_is_drawn(on_cpu):
    figure = probe_sheet("CPU", [speed, own_memory], [on_cpu])
    assert [line.get_label() for line in figure.axes[1].get_lines()] == ["allocated"]


def test_the_residency_figure_has_a_bar_per_block_and_its_lines():
    figure = residency_figure(map_of([BLOCK_S, 40 * BLOCK_S, BLOCK_S]), "Map")
    (axes,) = figure.axes
    assert [round(bar.get_height()) for bar in axes.patches] == [1000, 25, 1000]
    labels = [line.get_label() for line in axes.get_lines()]
    assert "the card: fill of a fresh block, 1,000 GB/s" in labels
    assert "the bus: pinned copy to the device, 25.0 GB/s" in labels
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "fill: in system memory" in legend
    assert "256 MiB each" in axes.get_xlabel()
