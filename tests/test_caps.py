"""Caps: checked before torch is touched, real on the CPU, always restored."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labhelpers import caps
from labhelpers.caps import exact_fraction, memory_cap
from labhelpers.formats import GIB, MIB
from labhelpers.inputs import InputError
from labhelpers.oom import is_oom
from labhelpers.oom_wordings import print_size

resource = pytest.importorskip("resource", reason="the CPU's cap needs the resource module")

ARTICLE_TOTAL_BYTES = 8_589_410_304


def address_limit() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_AS)


def test_bad_values_are_refused_before_torch_is_touched():
    code = """
import sys
from labhelpers.caps import memory_cap
bad = [{}, {"fraction": 0.5, "budget_bytes": 8}, {"fraction": 0.5, "device": "cpu"},
       {"budget_bytes": 8, "device": "cuda:0"}]
bad += [{"fraction": f} for f in (0, -0.1, 1.5, float("nan"), float("inf"), True, "0.5")]
bad += [{"budget_bytes": b} for b in (0, -1, 1.5, True, "8")]
for given in bad:
    try:
        memory_cap(**given)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1, error
    else:
        raise SystemExit(f"accepted {given}")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_fraction_without_a_gpu_says_what_to_do():
    with pytest.raises(InputError, match="give budget_bytes"), memory_cap(fraction=0.5):
        pass


def test_the_articles_example_of_allowed_bytes():
    allowed_bytes = int(0.06 * ARTICLE_TOTAL_BYTES)
    assert allowed_bytes == 515_364_618
    assert print_size(allowed_bytes) == "491.49 MiB"


@given(st.integers(1, 2**42), st.floats(0.0001, 1, exclude_max=True))
def test_a_restored_cap_loses_no_byte(total_bytes, fraction):
    allowed_bytes = int(fraction * total_bytes)
    assert int(exact_fraction(allowed_bytes, total_bytes) * total_bytes) == allowed_bytes


# --- the CPU's cap, for real --------------------------------------------------------------------


def test_the_cpus_cap_is_a_real_limit_and_is_lifted_again():
    before = address_limit()
    with memory_cap(budget_bytes=256 * MIB) as cap:
        assert (cap.device, cap.fraction, cap.budget_bytes) == ("cpu", None, 256 * MIB)
        assert address_limit() == (cap.allowed_bytes, before[1])
        assert torch.ones(16 * MIB).sum() == 16 * MIB  # 64 MiB
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
            torch.ones(128 * MIB)
        assert is_oom(caught.value)
        assert torch.ones(16 * MIB).sum() == 16 * MIB
    assert address_limit() == before
    assert torch.empty(GIB, dtype=torch.uint8).numel() == GIB


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_cpus_cap_is_lifted_after_an_exception(error):
    before = address_limit()

    def fail_under_a_cap() -> None:
        with memory_cap(budget_bytes=GIB, device="cpu"):
            assert address_limit() != before
            raise error

    with pytest.raises(error):
        fail_under_a_cap()
    assert address_limit() == before


def test_nested_caps_on_the_cpu_are_undone_in_turn():
    before = address_limit()
    with memory_cap(budget_bytes=GIB):
        outer = address_limit()
        with memory_cap(budget_bytes=2 * GIB) as inner:
            assert address_limit()[0] == inner.allowed_bytes > outer[0]
        assert address_limit() == outer
    assert address_limit() == before


def test_the_cpus_cap_stays_below_a_hard_limit():
    code = """
import resource
from labhelpers.caps import memory_cap
resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))
with memory_cap(budget_bytes=2**45) as cap:
    assert cap.allowed_bytes == 2**40
assert resource.getrlimit(resource.RLIMIT_AS) == (2**40, 2**40)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the GPU's cap, on an allocator's arithmetic (the real one: tests/gpu) ----------------------


class PretendCuda:
    """Two devices whose caps follow the CUDA allocator: bytes are kept, a fraction is read back.

    From some release on, 1.0 clears the cap instead of setting it.
    """

    def __init__(self, clears_at_one: bool) -> None:
        self.clears_at_one = clears_at_one
        self.allowed: dict[int, int | None] = {0: None, 1: None}

    def set(self, fraction: float, index: int) -> None:
        assert isinstance(fraction, float)
        assert 0 <= fraction <= 1
        cleared = self.clears_at_one and fraction >= 1
        self.allowed[index] = None if cleared else int(fraction * ARTICLE_TOTAL_BYTES)

    def get(self, index: int) -> float:
        allowed = self.allowed[index]
        return 1.0 if allowed is None else allowed / ARTICLE_TOTAL_BYTES


@pytest.fixture(params=[True, False], ids=["clears at 1.0", "sets at 1.0"])
def cuda(request, monkeypatch):
    pretended = PretendCuda(request.param)
    properties = type("Properties", (), {"total_memory": ARTICLE_TOTAL_BYTES})
    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "get_device_properties": lambda _index: properties,
        "set_per_process_memory_fraction": pretended.set,
        "get_per_process_memory_fraction": pretended.get,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return pretended


def test_a_nested_cap_comes_back_to_the_byte(cuda):
    with memory_cap(fraction=0.3):
        outer = dict(cuda.allowed)
        for fraction in (0.5, 0.06, 0.999):
            with memory_cap(fraction=fraction) as inner:
                assert cuda.allowed[0] == inner.allowed_bytes == int(fraction * ARTICLE_TOTAL_BYTES)
            assert cuda.allowed == outer
    assert cuda.get(0) == 1.0


def test_a_cap_is_restored_after_an_exception(cuda):
    with pytest.raises(KeyError), memory_cap(fraction=0.3):
        raise KeyError
    assert cuda.get(0) == 1.0


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_cap_is_set_on_the_device_asked_for(cuda, device):
    with memory_cap(fraction=0.5, device=device) as cap:
        assert cap.device == "cuda:1"
        assert (cuda.get(0), cuda.get(1)) == (1.0, 0.5)
    assert (cuda.get(0), cuda.get(1)) == (1.0, 1.0)


def test_a_whole_card_is_still_a_cap(cuda):
    with memory_cap(fraction=1) as cap:
        assert isinstance(cap.fraction, float)
        assert cap.fraction < 1
        assert cuda.allowed[0] is not None
        assert ARTICLE_TOTAL_BYTES - cuda.allowed[0] <= 1


@pytest.mark.parametrize("device", [2, -1, "xpu:0", "mps", "gpu0", 0.5])
def test_a_device_that_cannot_be_capped_is_refused(cuda, device):
    with pytest.raises(InputError, match="device: got"), memory_cap(fraction=0.5, device=device):
        pass


def test_a_cap_that_does_not_read_back_is_an_error(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: None)
    with pytest.raises(RuntimeError, match="read back"), memory_cap(fraction=0.5):
        pass


def test_the_blocks_error_comes_before_one_of_the_restore(cuda, monkeypatch):
    def lose_device(*_given) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def fail_on_a_lost_device() -> None:
        with memory_cap(fraction=0.5):
            monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lose_device)
            raise KeyError

    with pytest.raises(KeyError):
        fail_on_a_lost_device()


def test_just_below_one_is_the_nearest_number():
    assert caps._checked_fraction(1) == math.nextafter(1.0, 0.0)
    assert caps._checked_fraction(0.25) == 0.25


def test_onednn_without_a_primitive_is_out_of_memory_under_a_cap_alone():
    errors = [RuntimeError(f"could not {what}") for what in (
        "create a primitive", "execute a primitive", "create a memory object", "find a primitive",
    )]  # fmt: skip
    assert [is_oom(error) for error in errors] == [False] * 4
    with memory_cap(budget_bytes=GIB):
        assert [is_oom(error) for error in errors] == [True, True, True, False]
