"""The report's sections that other notebooks measured, made of results."""

from __future__ import annotations

from collections.abc import Sequence

from labhelpers import (
    cliffs,
    finder_narrative,
    ladder_views,
    oom_narrative,
    probe_narrative,
    remedy_narrative,
)
from labhelpers.distributed_narrative import effective_batch_table, narrations, run_to_show
from labhelpers.distributed_plots import scaling_figure
from labhelpers.distributed_tables import JOB_COST, JOB_SPEED, readable_scaling, scaling_of
from labhelpers.finder_plots import search_sheet
from labhelpers.finder_report import read_reports
from labhelpers.knee import knee_figure, knee_rates, knee_story
from labhelpers.ladder import ceilings_of, ladder_trials_of
from labhelpers.ladder_table import ladder_rows
from labhelpers.limit_views import limit_advice, limit_figure, limits_in
from labhelpers.oom_check import check_oom_message
from labhelpers.pieces import FigurePiece, Piece, TablePiece, device_of, origin, source_of
from labhelpers.probe import probe_trials_of, why_it_stopped
from labhelpers.probe_curves import ProbeCurve, article_probe, h200_probe, probe_of
from labhelpers.probe_plots import card_share, probe_sheet, speed
from labhelpers.references import is_committed
from labhelpers.remedies import measured_in
from labhelpers.store import RunDirectory


def the_plateau(run: RunDirectory, share: float) -> list[Piece]:
    """Tell what limits each batch size, how far a ladder of changes goes, how the knee moves."""
    verdicts = limits_in(run)
    title = f"Where the epoch goes: {device_of(run)}"
    pieces: list[Piece] = []
    if verdicts:
        alt = f"Shares of the epoch for each batch size on {device_of(run)}, stacked"
        pieces.append(FigurePiece(limit_figure(verdicts, title), alt))
    pieces.append(limit_advice(verdicts))
    source = source_of(run, "ladder")
    pieces.append(origin(run, source, "05_why_the_plateau"))
    if source is not None:
        rows = ladder_rows(ladder_trials_of(source), ceilings_of(source))
        figure = ladder_views.ladder_figure(rows, f"One change at a time: {device_of(source)}")
        pieces.append(FigurePiece(figure, "Images per second of each rung, by batch size, as bars"))
        pieces += [ladder_views.summit(rows), ladder_views.made_slower(rows)]
        pieces += _knee(source, share)
    return pieces


def _knee(source: RunDirectory, share: float) -> list[Piece]:
    """Tell how the sweet spot moves with the feed; nothing where one feed alone was measured."""
    rates = knee_rates(source)
    if len(rates) < 2:
        return []
    title = f"The same training, fed in different ways: {device_of(source)}"
    alt = f"Images per second against batch size for {', '.join(rates)}; stars mark sweet spots"
    return [FigurePiece(knee_figure(rates, share, title), alt), knee_story(rates, share)]


def past_the_card(run: RunDirectory) -> list[Piece]:
    """Tell the probe past the card: two recorded cliffs, one's own curve, and the verdict."""
    source = source_of(run, "probe")
    article, h200 = article_probe(), h200_probe()
    own = probe_of(source, reference=is_committed(source)) if source is not None else None
    # The same device recorded twice would only hide one curve behind the other.
    others = [each for each in (article, h200) if own is None or each.device != own.device]
    pieces: list[Piece] = [cliffs.two_cliffs(article, h200), _cliff_figure(own, others)]
    pieces.append(origin(run, source, "02_wsl2_oversubscription"))
    if own is not None and source is not None:
        stop = why_it_stopped(probe_trials_of(source))
        pieces += [cliffs.cliff(own), probe_narrative.stopped(stop, own)]
        pieces.append(probe_narrative.safe_batch(own))
    return pieces


def out_of_memory(run: RunDirectory) -> list[Piece]:
    """Tell the controlled error: what fitted, what failed, what the message said, recovery."""
    source = source_of(run, "cap")
    pieces: list[Piece] = [origin(run, source, "03_oom_recovery")]
    if source is None:
        table = oom_narrative.article_cap_table()
        return [*pieces, TablePiece(table, "Growing batches under a cap: RTX 5070 Ti (article)")]
    trials = source.trials("cap")
    caption = f"Growing batches under a cap: {device_of(source)}"
    pieces.append(TablePiece(oom_narrative.cap_table(trials), caption))
    pieces += [oom_narrative.cap_answer(trials), oom_narrative.recovery_answer(trials)]
    told = oom_narrative.message_of(trials)
    if told is not None:
        message, observed, platform = told
        disagreements = check_oom_message(message, observed)
        pieces.append(oom_narrative.message_answer(message, disagreements, platform))
    return pieces


def remedies_and_accumulation(run: RunDirectory) -> list[Piece]:
    """Tell what each remedy saves, costs and changes, accumulation among them."""
    source = source_of(run, "remedy")
    pieces: list[Piece] = [origin(run, source, "03_oom_recovery")]
    found = measured_in(source) if source is not None else None
    if found is not None:
        model = found.spec.workload.rpartition(":")[2]
        caption = f"Remedies for {model}, batch {found.spec.batch_size:,}, against plain FP32"
        pieces.append(TablePiece(remedy_narrative.remedy_table(found), caption))
        pieces += [remedy_narrative.remedy_answer(found), remedy_narrative.rounding_answer(found)]
    return [piece for piece in pieces if piece != ""]


def finding_the_size(run: RunDirectory) -> list[Piece]:
    """Tell what a search for the batch size that fits a model found."""
    source = source_of(run, "finder")
    pieces: list[Piece] = [origin(run, source, "04_find_batch_size")]
    reports = read_reports(source) if source is not None else []
    if reports:
        # The one with the most memory is about the machine, the others about smaller cards.
        report = max(reports, key=lambda each: each.terms.limit_bytes)
        said = (finder_narrative.answer, finder_narrative.speed, finder_narrative.how)
        pieces += [tell(report) for tell in said]
        figure = search_sheet(f"Where memory ends for {report.workload}", [report])
        alt = f"Peak memory of each size tried for {report.workload}, with the limit and the answer"
        pieces.append(FigurePiece(figure, alt))
        caption = f"Every size tried for {report.workload}"
        pieces.append(TablePiece(finder_narrative.probe_table(report), caption))
    return pieces


def several_gpus(run: RunDirectory) -> list[Piece]:
    """Tell how a job on several GPUs scales, where this run or a committed one holds one."""
    source = run_to_show(run)
    if source is None:
        return [
            "*Not run here, nor in a committed run. `torchrun --nproc-per-node=N -m -- labhelpers "
            "sweep` measures it.*"
        ]
    table = scaling_of(source)
    figure = scaling_figure(table, f"Several at once: {device_of(source)}")
    alt = "Global images per second, efficiency, the share of all-reduce, and peaks, by batch size"
    wanted = int(table["global_batch"].max())
    return [
        *narrations(source),
        FigurePiece(figure, alt),
        TablePiece(readable_scaling(table, JOB_SPEED), "Speed of all together, and efficiency"),
        TablePiece(readable_scaling(table, JOB_COST), "Memory at the peak, and what an epoch is"),
        TablePiece(effective_batch_table(table, wanted), f"Ways to {wanted:,} images per update"),
    ]


def _cliff_figure(own: ProbeCurve | None, recorded: Sequence[ProbeCurve]) -> FigurePiece:
    curves = [*([own] if own is not None else []), *recorded]
    names = ", ".join(curve.label for curve in curves)
    return FigurePiece(
        probe_sheet("Past the card", [speed, card_share], curves),
        f"Images per second and the share of the card reserved, against batch size: {names}",
    )
