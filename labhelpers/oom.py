"""Tell out-of-memory errors from others, survive one, and report it.

An out-of-memory error is an outcome here, not an exception that travels: what is kept of it
is its class, its text and its numbers. A kept exception would keep its frames, and with them
the tensors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from labhelpers.freeing import Memory, Released, read_memory, release_memory
from labhelpers.oom_message import OomMessage, parse_oom_message

T = TypeVar("T")

LIBRARY_LIMIT = "library limit, not memory"
RESTART = (
    "The device's context is lost: restart the process (in a notebook, the kernel); nothing in "
    "it can be recovered from here."
)

_LOST = re.compile(
    r"(?:CUDA|HIP) (?:driver )?error: .{0,60}(?:device-side assert|illegal memory access|"
    r"misaligned address|illegal instruction|illegal address|unspecified launch failure|"
    r"hardware stack error|invalid program counter|launch timed out|uncorrectable ECC|"
    r"device is busy or unavailable|context is destroyed)"
)
_LIBRARY_LIMIT = re.compile(
    r"(?:cuDNN error: )?CUDNN_STATUS_NOT_SUPPORTED|"
    r"(?:GET|FIND) was unable to find an engine to execute this computation"
)
# oneDNN says no more when it gets no memory, nor when a shape is not supported.
_NO_PRIMITIVE = re.compile(r"could not (?:create|execute) a (?:primitive|memory)")


@dataclass(frozen=True)
class Failure:
    """What is kept of a caught out-of-memory error, with the memory at that moment."""

    error_class: str
    text: str
    message: OomMessage
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True)
class Attempt:
    """The outcome of a call: its value, or the out-of-memory error that ended it.

    `cleanup_error` is the text of a second error, met while cleaning up; it stands beside the
    first and never replaces it. `context_lost` says that the device answers no more; `advice`
    then says what to do.
    """

    value: Any = None
    failure: Failure | None = None
    released: Released | None = None
    cleanup_error: str | None = None
    context_lost: bool = False

    @property
    def ok(self) -> bool:
        """Whether the call returned."""
        return self.failure is None

    @property
    def outcome(self) -> str:
        """Name the outcome as trials do: ok or oom."""
        return "ok" if self.ok else "oom"

    @property
    def advice(self) -> str | None:
        """What must be done before anything else is tried; None where nothing must."""
        return RESTART if self.context_lost else None

    @property
    def error_class(self) -> str | None:
        """Class name of the out-of-memory error."""
        return None if self.failure is None else self.failure.error_class

    @property
    def text(self) -> str | None:
        """Text of the out-of-memory error, without NUL characters."""
        return None if self.failure is None else self.failure.text

    @property
    def message(self) -> OomMessage | None:
        """The parsed text."""
        return None if self.failure is None else self.failure.message


def is_oom(error: BaseException) -> bool:
    """Tell whether an error is out-of-memory, itself or anywhere in its chain or group.

    Yes: `torch.OutOfMemoryError`; RuntimeError and its kind with an allocator's text (CUDA,
    HIP, XPU, MPS, CPU) or a library's allocation failure; MemoryError; oneDNN's "could not
    create a primitive" in a process whose memory is limited. No: a size that Python
    could not compute, a user's text that quotes the words, an error of a lost context even
    where an out-of-memory error came before it or stands in the same group,
    KeyboardInterrupt.
    """
    return _find(error) is not None


def oom_kind(error: BaseException) -> str:
    """Return gpu, host or library for an out-of-memory error, none for any other."""
    found = _find(error)
    return "none" if found is None else found[1].kind


def suspected_limit(error: BaseException) -> str | None:
    """Name the limit behind an error that people take for out-of-memory; None for others.

    cuDNN's NOT_SUPPORTED is met at batch 1,025 with memory free, so it is only a suspicion and
    `is_oom` says no.
    """
    texts = (_text(link) for link in _chain(error) if isinstance(link, RuntimeError))
    return LIBRARY_LIMIT if any(_LIBRARY_LIMIT.match(text) for text in texts) else None


def is_context_lost(error: BaseException) -> bool:
    """Tell whether an error, or a member of its group, says that the context is beyond use."""
    return _is_lost(error)


def _is_lost(error: BaseException, handled: BaseException | None = None) -> bool:
    """Look at an error alone, but at a group with all that its members come from."""
    links = _chain(error, handled) if isinstance(error, BaseExceptionGroup) else (error,)
    return any(map(_says_lost, links))


def _says_lost(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _LOST.match(_text(error)) is not None


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Attempt:
    """Call a function and turn an out-of-memory error into an outcome, cleaned up.

    Cleaning up begins after the handler has been left, because until then the error's frames
    hold the tensors.

    Raises:
        Exception: whatever else the function raises, unchanged.
    """
    value, failure = _call(function, args, kwargs)
    del args, kwargs  # a batch made for this call alone must not outlive it
    if failure is None:
        return Attempt(value=value)
    return settle(failure, release_memory, probe_device)


def settle(failure: Failure, release: Callable[[], Released], probe: Callable[[], None]) -> Attempt:
    """Clean up after a failure and ask the device once whether it still answers."""
    released, trouble = _quietly(release)
    lost = trouble is not None and _LOST.search(trouble) is not None
    if not lost:
        _, silence = _quietly(probe)
        lost = silence is not None and parse_oom_message(silence) is None
        trouble = trouble or silence
    return Attempt(None, failure, released, trouble, lost)


def probe_device() -> None:
    """Wait for every CUDA device in use: a lost context raises here, and nothing is allocated."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    cuda = torch.cuda
    for index in range(cuda.device_count()):
        if index == cuda.current_device() or cuda.memory_reserved(index):
            cuda.synchronize(index)


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Failure | None]:
    # Called inside a handler, the error handled there is no part of this call's chain.
    handled = sys.exc_info()[1]
    try:
        return function(*args, **kwargs), None
    except Exception as error:
        found = _find(error, handled)
        if found is None:
            raise
        return None, _keep(*found)


def _keep(error: BaseException, message: OomMessage) -> Failure:
    memory, _ = _quietly(lambda: read_memory(message.device_index))
    return Failure(type(error).__name__, _text(error), message, memory or Memory())


def _quietly(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return a call's value, or the text of its error: it must not hide an earlier one."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 -- whatever it is, it must not hide the first
        return None, f"{type(error).__name__}: {_text(error)}"


def _find(
    error: BaseException, handled: BaseException | None = None
) -> tuple[BaseException, OomMessage] | None:
    """Return the first out-of-memory error of a chain, up to `handled`, and its message."""
    if not isinstance(error, Exception):
        return None
    for link in _chain(error, handled):
        if _is_lost(link, handled):
            return None
        message = _message(link)
        if message is not None:
            return link, message
    return None


def _chain(error: BaseException, end: BaseException | None = None) -> Iterator[BaseException]:
    """Walk an error, its group's members, its causes and its contexts, each once.

    `from None` hides none of them.
    """
    waiting, seen = [error], {id(end)}
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        waiting += [more for more in (link.__cause__, link.__context__) if more is not None]


def _message(error: BaseException) -> OomMessage | None:
    """Return the message of an error that is out-of-memory itself; None for any other."""
    torch = sys.modules.get("torch")
    own_class = getattr(torch, "OutOfMemoryError", None)
    if isinstance(error, MemoryError):
        parsed = parse_oom_message(_text(error))
        return parsed or OomMessage(kind="host", backend="cpu", causes=("host",))
    if not isinstance(error, RuntimeError):
        return None
    parsed = parse_oom_message(_text(error))
    if parsed is None and own_class is not None and isinstance(error, own_class):
        return OomMessage()
    if parsed is None and _NO_PRIMITIVE.match(_text(error)) and _is_limited():
        return OomMessage(kind="host", backend="cpu", causes=("host",))
    return parsed


def _is_limited() -> bool:
    """Tell whether this process may map only so much memory: then want of it is the reason."""
    if sys.platform == "win32":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _text(error: BaseException) -> str:
    """Return an error's text without NUL; an error that cannot be printed gives none."""
    try:
        return str(error).replace("\0", "")
    except Exception:  # noqa: BLE001 -- a broken __str__ must not hide the error
        return ""
