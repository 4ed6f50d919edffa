"""How an out-of-memory error is worded: from a text to its figures, over all known releases.

Openings were taken from PyTorch 1.0 to 2.14 (CUDA, cudaMallocAsync, HIP, XPU, MPS, CPU) and
from NumPy. A text counts only if it opens with one, or if one follows a class name at the
start of a line, as data loaders and TorchScript quote errors: words in the middle of a
sentence are a user's own text. What logs and terminals add (colours, the rank that speaks,
pytest's mark) is taken off first.

The time is linear in the text: nothing is matched without an upper bound on its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from labhelpers.formats import GIB, MIB

ABSURD_BYTES = 2**60
"""No machine holds so much, and PyTorch refuses such a request: a mark, not a measurement."""

# Bounds that no true text reaches; they keep a hostile one from costing time.
_LONGEST_MESSAGE = 8192
_MOST_SIZES = 128
_MOST_QUOTES = 100

_ALLOC_FAILED = (
    r"(?:[A-Za-z]{3,10} error: )?%s[A-Z]{0,8}_(?:[A-Z]{1,12}_){0,4}ALLOC(?:ATION)?_FAILED"
)

_OPENINGS: tuple[tuple[str, str, str], ...] = (
    ("gpu", "cuda", r"CUDA out of memory\."),
    ("gpu", "cuda", r"CUDA (?:driver )?error: out of memory"),
    ("gpu", "cuda", r"cuda runtime error \(2\) : out of memory"),
    ("gpu", "cuda", r"Triton Error \[CUDA\]: out of memory"),
    ("gpu", "cuda", r"Allocation on device \d{1,4} would exceed allowed memory\."),
    ("gpu", "hip", r"HIP out of memory\.|HIP error: out of memory"),
    (
        "gpu", "xpu",
        r"XPU out of memory\.|(?:level_zero backend|Native API) failed[^\n]{0,60}"
        r"\(UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\)",
    ),
    ("gpu", "mps", r"MPS backend out of memory"),
    (
        "host", "cpu",
        r"(?:\[enforce fail at [^\]\n]{1,200}\] [^\n]{0,80}?)?"
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
    ),
    ("host", "cpu", r"unable to mmap \d{1,20} bytes from file [^\n]{1,300}?: Cannot allocate"),
    ("host", "cpu", r"Unable to allocate \d[\d.]{0,20} (?:bytes|[KMGTPE]iB) for an array"),
    ("host", "cpu", r"std::bad_alloc"),
    ("library", "cuda", _ALLOC_FAILED % "CU"),
    ("library", "cuda", r"cuDNN SDPA [^\x00]{0,500}?CUDA ran out of memory outside PyTorch"),
    ("library", "hip", _ALLOC_FAILED % "(?:HIP|ROC|MIOPEN)"),
)  # fmt: skip
_OPENING_RULES = tuple((kind, name, re.compile(rule)) for kind, name, rule in _OPENINGS)
# Python draws a bar before each line of an error in a group.
_QUOTED = re.compile(r"^(?: {0,40}\| )?[\w.]{0,100}(?:Error|Exception): ", re.MULTILINE)

_COLOURS = re.compile(r"\x1b\[[0-?]{0,32}[ -/]{0,4}[@-~]")
# At the start of a line: a byte order mark; the rank, as torchrun ("[rank0]: ", "[default0]:")
# and Ray ("(Worker pid=7) ") write it; then pytest's mark of the line of the error.
_LINE_MARKS = re.compile(
    r"^\ufeff?(?:\[[a-z_]{1,20}\d{1,6}\]: ?|"
    r"\([\w.]{0,60} ?pid=\d{1,10}(?:, ip=[\d.]{1,45})?\) ){0,3}(?:E {3,40})?",
    re.MULTILINE,
)

# NumPy leaves a point without digits: "100. KiB".
_SIZE = re.compile(r"(?<![\d.,])(\d{1,20}(?:\.\d{0,6})?) (bytes|[KMGTPE]i?B)\b")
_DEVICE = re.compile(r"(?:GPU|on device) (\d{1,4})\b")
_PROCESS = re.compile(r"Process (\d{1,10}) has $")
_UNIT_BYTES = {"b": 1, "K": 1024, "M": MIB, "G": GIB, "T": 2**40, "P": 2**50, "E": 2**60}

# (field, words before the size, words after it); the first size that fits a field counts.
_PLACES: tuple[tuple[str, str, str], ...] = (
    ("requested", "ried to allocate ", ""),
    ("requested", "Requested : ", ""),
    ("requested", "Requested size: ", ""),
    ("requested", "Unable to allocate ", " for an array"),
    ("requested", "unable to mmap ", " from file"),
    ("total", "total capacity of ", ""),
    ("total", "total capacty of ", ""),
    ("total", "", " total capacity"),
    ("total", "Device limit : ", ""),
    ("free", "of which ", " is free"),
    ("free", "; ", " free"),
    ("free", "Free (according to CUDA): ", ""),
    ("allowed", "", " allowed;"),
    ("allowed", "max allowed: ", ""),
    ("allowed", "(set by user-supplied memory fraction) : ", ""),
    ("allocated", "Of the allocated memory ", " is allocated by PyTorch"),
    ("allocated", "", " already allocated"),
    ("allocated", "Currently allocated : ", ""),
    ("allocated", "MPS allocated: ", ""),
    ("other_allocations", "other allocations: ", ""),
    ("unallocated", "", " is reserved by PyTorch but unallocated"),
    ("unallocated", "; ", " cached"),
    ("reserved", "; ", " reserved in total by PyTorch"),
    ("private_pools", "with ", " allocated in private pools"),
    ("this_process", "this process has ", " memory in use"),
)
_LEFT_OUT_WORDS = {
    "requested": "requested", "total": "in total", "free": "free", "allowed": "allowed",
    "allocated": "allocated", "other_allocations": "in other allocations",
    "unallocated": "reserved but unallocated", "reserved": "reserved",
    "private_pools": "in private pools", "this_process": "in use",
}  # fmt: skip
_OLD_WORDINGS = (
    ("iB cached", "torch 1.0 to 1.3"),
    ("iB reserved in total by PyTorch", "torch 1.4 to 2.0"),
    ("total capacty of", "torch 2.1"),
)


@dataclass
class Figures:
    """What a text says, in bytes; sizes that are a mark for "not available" are left out."""

    kind: str
    backend: str
    text: str
    sizes: dict[str, int] = field(default_factory=dict)
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    device_index: int | None = None
    wording: str | None = None


def read_figures(text: str) -> Figures | None:
    """Read the figures of the first out-of-memory error that a text opens with or quotes.

    Returns:
        None for a text that is no out-of-memory error.
    """
    figures = _opening(_bare(text))
    if figures is None:
        return None
    for match in islice(_SIZE.finditer(figures.text), _MOST_SIZES):
        _place(figures, match)
    device = _DEVICE.search(figures.text)
    figures.device_index = int(device[1]) if device else None
    worded = (release for words, release in _OLD_WORDINGS if words in figures.text)
    figures.wording = next(worded, None)
    return figures


def _bare(text: str) -> str:
    """Take off what logs and terminals add to a text: NUL, colours, hard blanks, line marks."""
    text = _COLOURS.sub("", text.replace("\0", "")).replace("\xa0", " ")
    return _LINE_MARKS.sub("", text.lstrip("\ufeff\n\r\t "))


def print_size(value_bytes: float) -> str:
    """Write bytes as PyTorch's messages do, so that both sides compare digit for digit."""
    unit_bytes, unit = _printed_unit(value_bytes)
    return f"{value_bytes / unit_bytes:.2f} {unit}" if unit_bytes > 1 else f"{value_bytes} bytes"


def rounding_bytes(value_bytes: float) -> float:
    """Return how far a printed size may be from the true one: half of its last digit."""
    unit_bytes, _ = _printed_unit(value_bytes)
    return 0.005 * unit_bytes if unit_bytes > 1 else 0.0


def _printed_unit(value_bytes: float) -> tuple[int, str]:
    """Return PyTorch's unit for a size; each unit is kept up to and including 1024."""
    for largest, unit_bytes, unit in ((1024, 1, "bytes"), (MIB, 1024, "KiB"), (GIB, MIB, "MiB")):
        if value_bytes <= largest:
            return unit_bytes, unit
    return GIB, "GiB"


def _opening(text: str) -> Figures | None:
    """Find the first opening and cut the text down to that one message, in single spaces."""
    text = text.lstrip()
    for start in _starts(text):
        for kind, backend, rule in _OPENING_RULES:
            if rule.match(text, start):
                message = " ".join(text[start : start + _LONGEST_MESSAGE].split())
                return Figures(kind, backend, _first_message(message))
    return None


def _starts(text: str) -> Iterator[int]:
    yield 0
    for quoted in islice(_QUOTED.finditer(text), _MOST_QUOTES):
        yield quoted.end()


def _first_message(text: str) -> str:
    """Cut off a second message that the same text quotes: its figures are not the first's."""
    first = text.find("out of memory")
    second = text.find("out of memory", first + 1) if first >= 0 else -1
    return text if second < 0 else text[:second]


def _place(figures: Figures, match: re.Match[str]) -> None:
    """Give one size of the text to the field that the words around it name."""
    text, size_bytes = figures.text, _to_bytes(match[1], match[2])
    before, after = text[max(0, match.start() - 60) : match.start()], text[match.end() :][:50]
    process = _PROCESS.search(before) if after.startswith(" memory in use") else None
    if process:
        figures.processes.append((int(process[1]), _real(size_bytes)))
        if _real(size_bytes) is None:
            figures.left_out.append(f"{match[0]} in use by process {process[1]}")
        return
    for name, words_before, words_after in _PLACES:
        if not (before.endswith(words_before) and after.startswith(words_after)):
            continue
        if _real(size_bytes) is None:
            figures.left_out.append(f"{match[0]} {_LEFT_OUT_WORDS[name]}")
        else:
            figures.sizes.setdefault(name, size_bytes)
        return


def _real(size_bytes: int) -> int | None:
    return size_bytes if size_bytes < ABSURD_BYTES else None


def _to_bytes(figure: str, unit: str) -> int:
    """Convert a printed size; KB and KiB are both 1,024 bytes in every release."""
    unit_bytes = _UNIT_BYTES[unit[0]]
    return round(float(figure) * unit_bytes) if "." in figure else int(figure) * unit_bytes
