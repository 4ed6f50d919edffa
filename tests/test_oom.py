"""Telling out-of-memory errors apart, surviving them, and giving the memory back."""

import gc
import json
import subprocess
import sys
import traceback
import types
import weakref

import pytest
import torch

from labhelpers.caps import memory_cap
from labhelpers.formats import GIB, MIB
from labhelpers.freeing import Memory, Released
from labhelpers.inputs import InputError
from labhelpers.oom import (
    LIBRARY_LIMIT,
    RESTART,
    Failure,
    attempt,
    is_context_lost,
    is_oom,
    oom_kind,
    settle,
    suspected_limit,
)
from labhelpers.oom_message import OomMessage
from labhelpers.oom_report import oom_report

ENDLESS_BYTES = 2**50  # no machine maps a pebibyte: the allocator's own error, for real
CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."
ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)


def ask_too_much() -> None:
    torch.empty(ENDLESS_BYTES, dtype=torch.uint8)


def caught(call) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 -- the tests look at whatever came
        return error
    raise AssertionError("the call did not fail")


OOM_ERRORS = [
    (torch.OutOfMemoryError(CUDA_TEXT), "gpu"),
    (torch.OutOfMemoryError("a text of the future"), "gpu"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory."), "gpu"),
    (RuntimeError(CUDA_TEXT), "gpu"),
    (RuntimeError("CUDA error: out of memory"), "gpu"),
    (ACCELERATOR_ERROR("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), "gpu"),
    (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB."), "gpu"),
    (RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB."), "gpu"),
    (RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)."), "gpu"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
     "host"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "library"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "library"),
    (MemoryError(), "host"),
]  # fmt: skip
OTHER_ERRORS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    ACCELERATOR_ERROR("CUDA error: an illegal memory access was encountered"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (64x1568 and 1024x64)"),
    RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"),
    OverflowError("cannot fit 'int' into an index-sized integer"),
    ValueError("could not read caption: 'the shop was out of memory cards'"),
    ValueError(CUDA_TEXT),
    RuntimeError(f"the log of yesterday says: {CUDA_TEXT}"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    KeyboardInterrupt(CUDA_TEXT),
]


@pytest.mark.parametrize(("error", "kind"), OOM_ERRORS, ids=lambda value: str(value)[:30])
def test_what_counts_as_out_of_memory(error, kind):
    assert is_oom(error)
    assert oom_kind(error) == kind


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=lambda value: str(value)[:30])
def test_what_does_not_count(error):
    assert not is_oom(error)
    assert oom_kind(error) == "none"


def test_the_allocators_own_errors_count():
    assert oom_kind(caught(ask_too_much)) == "host"
    assert not is_oom(caught(lambda: torch.empty(2**62)))  # overflows before it is asked for
    assert not is_oom(caught(lambda: torch.ones(2, 3) @ torch.ones(2, 3)))


def wrap(how: str) -> BaseException:
    def run() -> None:
        try:
            ask_too_much()
        except RuntimeError as error:
            if how == "cause":
                raise ValueError("no result") from error
            if how == "from none":
                raise ValueError("no result") from None
            raise ValueError("no result")  # noqa: B904 -- the context is the point

    return caught(run)


@pytest.mark.parametrize("how", ["cause", "context", "from none"])
def test_an_oom_inside_another_error_is_found(how):
    error = wrap(how)
    assert type(error) is ValueError
    assert is_oom(error)


def test_a_loop_of_errors_ends():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    first.__context__ = first
    assert not is_oom(first)
    second.__cause__ = RuntimeError(CUDA_TEXT)
    assert is_oom(first)


def test_a_lost_context_or_an_interrupt_above_an_oom_is_no_oom():
    lost = RuntimeError("CUDA error: device-side assert triggered")
    lost.__context__ = RuntimeError(CUDA_TEXT)
    assert is_context_lost(lost)
    assert not is_oom(lost)
    interrupt = KeyboardInterrupt()
    interrupt.__context__ = RuntimeError(CUDA_TEXT)
    assert not is_oom(interrupt)


LOST = RuntimeError("CUDA error: device-side assert triggered")


def groups(*members: Exception) -> list[ExceptionGroup]:
    flat = ExceptionGroup("several", [ValueError("other"), *members])
    return [flat, ExceptionGroup("outer", [KeyError("x"), ExceptionGroup("inner", [flat])])]


@pytest.mark.parametrize("group", groups(RuntimeError(CUDA_TEXT)))
def test_an_oom_in_a_group_of_any_depth_is_found(group):
    assert oom_kind(group) == "gpu"

    def fail() -> None:
        raise group

    done = attempt(fail)
    assert (done.outcome, done.error_class, done.text) == ("oom", "RuntimeError", CUDA_TEXT)
    outside = ValueError("no result")
    outside.__cause__ = group
    assert is_oom(outside)


@pytest.mark.parametrize("order", [1, -1])
def test_a_lost_context_anywhere_in_a_group_is_no_oom(order):
    caused = ValueError("no result")
    caused.__cause__ = LOST
    for lost in (LOST, caused):
        for group in groups(*[RuntimeError(CUDA_TEXT), lost][::order]):
            assert is_context_lost(group)
            assert not is_oom(group)


def test_a_group_of_other_errors_or_with_an_interrupt_is_no_oom():
    for group in groups(ValueError(CUDA_TEXT)):
        assert not is_oom(group)
        assert not is_context_lost(group)
    interrupt = BaseExceptionGroup("stopped", [KeyboardInterrupt(), RuntimeError(CUDA_TEXT)])
    assert not is_oom(interrupt)


def test_not_supported_is_only_a_suspicion():
    assert suspected_limit(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")) == (
        LIBRARY_LIMIT
    )
    assert suspected_limit(RuntimeError(CUDA_TEXT)) is None
    assert suspected_limit(ValueError("CUDNN_STATUS_NOT_SUPPORTED")) is None


def test_torch_is_not_imported_to_tell():
    code = (
        "import sys; from labhelpers.oom import is_oom, attempt, release_memory\n"
        f"assert is_oom(RuntimeError({CUDA_TEXT!r})) and not is_oom(ValueError('x'))\n"
        "assert attempt(bytearray, 2**62).outcome == 'oom'\n"
        "assert release_memory().after.resident_bytes > 0\n"
        "assert 'torch' not in sys.modules and 'IPython' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- attempt ------------------------------------------------------------------------------------


def test_a_good_call_gives_its_value():
    done = attempt(divmod, 17, 5)
    assert (done.ok, done.outcome, done.value, done.text) == (True, "ok", (3, 2), None)
    assert attempt(int, "11", base=2).value == 3


def test_an_oom_becomes_text_class_and_numbers():
    done = attempt(ask_too_much)
    assert (done.outcome, done.value, done.error_class) == ("oom", None, "RuntimeError")
    assert "DefaultCPUAllocator" in (done.text or "")
    assert done.message is not None
    assert done.message.requested_bytes == ENDLESS_BYTES
    assert done.message.causes == ("host",)
    assert done.failure is not None
    assert done.failure.memory.resident_bytes is not None
    assert done.failure.memory.allocated_bytes is None  # the CPU's allocator counts nothing
    assert done.cleanup_error is None
    assert done.advice is None


def test_no_exception_traceback_or_frame_can_be_reached_from_an_attempt():
    done = attempt(ask_too_much)
    waiting, seen = [done], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(item))
        assert not isinstance(item, (BaseException, types.TracebackType, types.FrameType))
        waiting += gc.get_referents(item)
    assert len(seen) > 10


def test_other_errors_come_out_unchanged():
    planted = ValueError("wrong shape")

    def fail() -> None:
        raise planted

    error = caught(lambda: attempt(fail))
    assert error is planted
    assert (error.__cause__, error.__context__) == (None, None)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)][-1] == "fail"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_even_during_an_oom(stop):
    def interrupted() -> None:
        try:
            ask_too_much()
        except RuntimeError:
            raise stop from None

    with pytest.raises(stop):
        attempt(interrupted)


def test_an_oom_that_is_handled_around_the_call_is_not_the_calls_own():
    def fail() -> None:
        raise ValueError("wrong shape")

    try:
        ask_too_much()
    except RuntimeError:
        error = caught(lambda: attempt(fail))
    assert type(error) is ValueError


def test_nul_is_not_kept():
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU \0")

    done = attempt(fail)
    assert done.text == "CUDA out of memory. Tried to allocate 20.00 MiB. GPU "


def test_an_error_that_cannot_be_printed_is_still_an_oom():
    class Silent(torch.OutOfMemoryError):
        def __str__(self) -> str:
            raise ValueError("no text")

    def fail() -> None:
        raise Silent

    done = attempt(fail)
    assert (done.outcome, done.text, done.error_class) == ("oom", "", "Silent")


def test_a_batch_made_for_the_call_does_not_outlive_it():
    batch = torch.ones(8)
    held = weakref.ref(batch)
    alive_at_release = []

    def note(phase: str, _info: dict) -> None:
        alive_at_release.append(held() is not None)

    def use(_batch: torch.Tensor) -> None:
        ask_too_much()

    gc.callbacks.append(note)
    try:
        waiting = [batch]
        del batch
        done = attempt(use, waiting.pop())
    finally:
        gc.callbacks.remove(note)
    assert done.outcome == "oom"
    assert held() is None
    assert alive_at_release[-1] is False


FAILURE = Failure("OutOfMemoryError", CUDA_TEXT, OomMessage(backend="cuda"))
NOTHING = Released(Memory(), Memory())


def raising(error: BaseException, calls: list[str], name: str):
    def call():
        calls.append(name)
        raise error

    return call


def test_a_second_error_in_cleaning_up_never_hides_the_first():
    calls: list[str] = []
    release = raising(AttributeError("the shell is gone"), calls, "release")
    done = settle(FAILURE, release, lambda: calls.append("probe"))
    assert calls == ["release", "probe"]
    assert done.text == CUDA_TEXT
    assert done.cleanup_error == "AttributeError: the shell is gone"
    assert not done.context_lost


def test_a_lost_context_is_recognised_after_one_failed_probe():
    calls: list[str] = []
    probe = raising(RuntimeError("CUDA error: unknown error"), calls, "probe")
    done = settle(FAILURE, lambda: NOTHING, probe)
    assert calls == ["probe"]
    assert (done.context_lost, done.advice) == (True, RESTART)
    assert done.text == CUDA_TEXT
    assert done.released == NOTHING


def test_a_context_lost_in_the_release_is_not_probed_again():
    calls: list[str] = []
    lost = ACCELERATOR_ERROR("CUDA error: an illegal memory access was encountered")
    done = settle(FAILURE, raising(lost, calls, "release"), raising(lost, calls, "probe"))
    assert calls == ["release"]
    assert done.context_lost
    assert "illegal memory access" in (done.cleanup_error or "")


def test_a_probe_that_finds_no_memory_either_has_not_lost_the_context():
    probe = raising(RuntimeError("CUDA error: out of memory"), [], "probe")
    done = settle(FAILURE, lambda: NOTHING, probe)
    assert not done.context_lost
    assert done.cleanup_error == "RuntimeError: CUDA error: out of memory"


# --- memory, for real ---------------------------------------------------------------------------


def test_inside_except_the_frames_still_hold_the_tensors():
    held = []

    def fail() -> None:
        big = torch.ones(MIB)
        held.append(weakref.ref(big))
        ask_too_much()

    try:
        fail()
    except RuntimeError as error:
        kept = error
        gc.collect()
        assert held[0]() is not None
    gc.collect()
    assert held[0]() is not None  # a kept exception keeps the memory after the block too
    del kept
    gc.collect()
    assert held[0]() is None


class TooMuchInBackward(torch.autograd.Function):
    """Pass the input on; ask for more memory than there is when the gradient comes back."""

    @staticmethod
    def forward(_ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(_ctx, gradient):
        torch.empty(GIB, dtype=torch.uint8)
        return gradient


def live_tensors() -> tuple[int, int]:
    found = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    return len(found), sum(item.untyped_storage().nbytes() for item in found)


def test_a_capped_process_runs_out_and_lives_on_with_nothing_left_behind():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))

    def forward_only(batch: int) -> float:
        return float(model(torch.ones(batch, 64)).sum().detach())

    def backward_too(batch: int) -> None:
        hidden = TooMuchInBackward.apply(model[1](model[0](torch.ones(batch, 64))))
        try:
            model[2](hidden).sum().backward()
        finally:
            model.zero_grad(set_to_none=True)

    with memory_cap(budget_bytes=200 * MIB):
        small = attempt(forward_only, 1_000)
        assert small.ok
        gc.collect()
        baseline = live_tensors()  # later ones come without a collection: attempt() has made it
        for function, batch in [(forward_only, 10_000_000)] * 2 + [(backward_too, 50_000)] * 10:
            done = attempt(function, batch)
            assert done.outcome == "oom"
            assert done.message is not None
            assert done.message.backend == "cpu"
            assert live_tensors() == baseline
        assert attempt(forward_only, 1_000).value == small.value
    assert attempt(torch.empty, GIB // 4).ok


def test_half_a_step_leaves_parameters_and_optimizer_as_they_were():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())

    def step(last) -> None:
        optimizer.zero_grad(set_to_none=True)
        try:
            last(model[1](model[0](torch.ones(4, 8)))).sum().backward()
            optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)

    assert attempt(step, torch.nn.Identity()).ok
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    state = json.dumps(optimizer.state_dict(), default=torch.Tensor.tolist)
    with memory_cap(budget_bytes=200 * MIB):
        assert attempt(step, TooMuchInBackward.apply).outcome == "oom"
    assert all(map(torch.equal, parameters, model.parameters()))
    assert json.dumps(optimizer.state_dict(), default=torch.Tensor.tolist) == state
    assert all(parameter.grad is None for parameter in model.parameters())


# --- the report ---------------------------------------------------------------------------------


def test_a_report_holds_what_the_article_saved():
    def fail() -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 588.00 MiB. GPU 0 has a total capacity of 15.92 "
            "GiB of which 11.00 GiB is free. Including non-PyTorch memory, this process has "
            "17179869184.00 GiB memory in use. 3.98 GiB allowed; Of the allocated memory 3.15 GiB "
            "is allocated by PyTorch, and 444.00 MiB is reserved by PyTorch but unallocated."
        )

    observed = {"fraction": 0.25, "total_bytes": 17_094_475_776, "batch_size": 24_576,
                "free_bytes": 11 * GIB, "peak_allocated_bytes": 3_400_000_000,
                "peak_reserved_bytes": 3_900_000_000, "driver": "581.29"}  # fmt: skip
    report = json.loads(json.dumps(oom_report(attempt(fail), observed)))
    assert report["disagreements"] == [
        "says 17179869184.00 GiB in use: the driver's mark for 'not available', left out"
    ]
    assert report["parsed"]["causes"] == ["cap"]
    assert report["parsed"]["this_process_bytes"] is None
    assert report["requested_bytes_per_image"] == 25_088
    assert {name: report[name] for name in observed} == observed
    assert report["torch"] == torch.__version__
    assert report["error_class"] == "OutOfMemoryError"
    assert "The cap is the limit" in report["advice"][0]


def test_a_report_needs_an_oom():
    with pytest.raises(InputError, match="ended well"):
        oom_report(attempt(int))
