"""Which rungs exist on a device, over which base, and why others do not."""

import pytest

from labhelpers import ladder_plan
from labhelpers.inputs import InputError
from labhelpers.ladder import check_request, default_workers, plan, resolved
from labhelpers.ladder_plan import NAMES, RUNGS, Setup, ladder_for, rung_of
from labhelpers.records import LadderSpec, ask

CPU = {"gpu": None}
H200 = {"gpu": {"capability": "9.0"}}


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(ladder_plan, "_missing_compiler", lambda: None)


def spec_of(device: str = "cpu", **given: object) -> LadderSpec:
    return resolved(ask(LadderSpec, {"device": device} | given), device)


def test_a_gpu_has_every_rung_each_one_change_over_its_base():
    ladder = ladder_for(spec_of("cuda:0", workers=[2, 4]), H200)
    assert ladder.missing == {}
    names = [name for name in NAMES if name != "workers"]
    assert set(ladder.setups) == {*names, "workers-2", "workers-4"}
    for name, base in ladder.bases.items():
        if base is None:
            assert name == "article"
            continue
        mine, below = ladder.setups[name].to_dict(), ladder.setups[base].to_dict()
        changed = {key for key in mine if mine[key] != below[key]}
        assert changed == ({"feed", "workers"} if name.startswith("workers") else changed)
        assert len(changed - {"workers"}) == 1, (name, changed)


def test_the_top_of_a_gpus_ladder():
    setups = ladder_for(spec_of("cuda:0"), H200).setups
    assert setups["compile_graph"] == Setup(
        feed="resident", fused_adam=True, precision="tf32", graph=True, compiled=True
    )
    assert setups["autotuned"].compiled
    assert setups["bf16"].precision == "bf16"
    assert setups["bf16"].graph
    assert not setups["bf16"].compiled
    assert not setups["cuda_graph"].compiled
    assert not setups["compile"].graph


def test_a_cpu_has_fewer_rungs_and_says_why():
    ladder = ladder_for(spec_of(), CPU)
    assert list(ladder.setups) == [
        "article", *(f"workers-{n}" for n in spec_of().workers), "host", "synthetic",
        "fused_adam", "bf16", "channels_last",
    ]  # fmt: skip
    assert ladder.missing["cuda_graph"] == "needs an NVIDIA GPU"
    assert "the same as host" in ladder.missing["resident"]
    assert "ask for it with rungs=compile" in ladder.missing["compile"]
    assert ladder.bases["fused_adam"] == ladder.bases["synthetic"] == "host"
    assert ladder.bases["bf16"] == "fused_adam"
    assert set(ladder.missing) | {name.partition("-")[0] for name in ladder.setups} == set(NAMES)


def test_compile_exists_on_a_cpu_when_asked_for(monkeypatch):
    asked = spec_of(rungs="compile")
    assert list(ladder_for(asked, CPU).setups) == ["article", "host", "fused_adam", "compile"]
    monkeypatch.setattr(ladder_plan, "_missing_compiler", lambda: "no compiler")
    with pytest.raises(InputError, match="none of those asked for exists here"):
        ladder_for(asked, CPU)


def test_an_old_gpu_lacks_the_precisions_it_cannot_do():
    ladder = ladder_for(spec_of("cuda:0"), {"gpu": {"capability": "7.5"}})
    assert set(ladder.missing) == {"tf32", "bf16"}
    assert ladder.bases["cuda_graph"] == "fused_adam"
    assert ladder.setups["compile_graph"].precision == "fp32"


def test_bases_come_along_with_the_rungs_asked_for():
    ladder = ladder_for(spec_of("cuda:0", rungs="bf16"), H200)
    assert list(ladder.setups) == [
        "article", "host", "resident", "fused_adam", "tf32", "cuda_graph", "bf16",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rungs": "hots"}, "rungs: got 'hots'; must be among article, workers, host"),
        ({"workload": "m.py:w"}, "workload: got 'm.py:w'; the ladder changes how FashionMNIST"),
        ({"precision": "bf16"}, "precision: got 'bf16'; each rung has its own"),
        ({"images": 60_001}, "images: got 60,001; FashionMNIST has 60,000"),
        ({"device": "tpu"}, "device: got 'tpu'"),
    ],
)
def test_bad_requests_are_one_line(given, said):
    with pytest.raises(InputError) as caught:
        check_request(ask(LadderSpec, given))
    assert str(caught.value).startswith(said)


def test_what_is_left_open_suits_the_device():
    gpu, cpu = spec_of("cuda:0"), spec_of()
    assert (gpu.batch_sizes, gpu.images, gpu.max_steps) == ((32, 256, 2048, 8192), 60_000, 500)
    assert (cpu.batch_sizes, cpu.images, cpu.repeats) == ((32, 256), 2000, 2)
    assert spec_of(quick=True).repeats == 1
    assert spec_of("cuda:0", quick=True).batch_sizes == (32, 8192)
    assert default_workers(16) == {4, 8}
    assert default_workers(2) == {1}
    assert default_workers(1) == {1}


def test_the_plan_is_size_by_size_and_repeats_follow_one_another():
    spec = spec_of(batch_sizes="64,32", rungs="host", repeats=2)
    found = plan(spec, ladder_for(spec, CPU))
    assert [(p.batch_size, p.variant, p.repeat) for p in found] == [
        (32, "article", 0), (32, "article", 1), (32, "host", 0), (32, "host", 1),
        (64, "article", 0), (64, "article", 1), (64, "host", 0), (64, "host", 1),
    ]  # fmt: skip
    assert len({p.position for p in found}) == len(found)


def test_every_rung_says_what_it_changes_and_what_to_think_if_it_is_slower():
    assert all(rung.what for rung in RUNGS)
    assert all(rung.slower for rung in RUNGS if rung.bases)
    assert rung_of("workers-16").name == "workers"
