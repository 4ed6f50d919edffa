"""The processes that torchrun started: who this one is, where it computes, how all agree."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from labhelpers.distributed_watch import RollCall
from labhelpers.environment import describe, resolve_device
from labhelpers.inputs import InputError
from labhelpers.oom import attempt, is_context_lost
from labhelpers.spawning import prepare_child
from labhelpers.worker import Answer

T = TypeVar("T")

MEETING_TIMEOUT_S = 300.0
SPARE_S = 60.0
"""So much later than the deadlines, which name the culprit, torch's own time limits strike."""
_SETTINGS = (
    "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_ALGO",
    "NCCL_PROTO",
)  # fmt: skip
"""Variables that change how gradients travel, and that name no host."""
_PEER_FAILED = re.compile(r"gloo|nccl|closed by peer|barrier|connection (reset|refused)", re.I)


@dataclass(frozen=True)
class Team:
    """All ranks of a job, seen from one of them.

    `group` is what gradients travel through (None: nobody to send any to); everything else is
    said through gloo, so that a rank that waits does not occupy its GPU.
    """

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    group: Any = None
    roll: RollCall | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the rank that plans, writes and speaks."""
        return self.rank == 0

    def alone(self) -> Team:
        """Return a team of this process only, which talks to nobody."""
        return Team(device=self.device)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_lead(self, value: T | None) -> T:
        """Return rank 0's value on every rank."""
        if self.group is not None:
            values = [value]
            dist.broadcast_object_list(values, src=0)
            value = values[0]
        return value  # type: ignore[return-value]  # rank 0 gives one

    def wait(self) -> None:
        """Wait until all ranks are here; RuntimeError names those that do not come."""
        if self.group is not None:
            dist.monitored_barrier(wait_all_ranks=True)

    def together(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function on every rank; if one refuses its input, all do.

        Raises:
            InputError: what the first rank that refused said; no rank is left waiting.
        """
        value, said = None, None
        try:
            value = function(*arguments)
        except (InputError, OSError) as error:
            said = str(error)
        texts = self.gather(said)
        refused = [rank for rank, text in enumerate(texts) if text is not None]
        if refused:
            whose = "" if len(refused) == self.world_size else f"rank {refused[0]}: "
            raise InputError(f"{whose}{texts[refused[0]]}")
        return value  # type: ignore[return-value]  # nobody refused

    def settle(self, function: Callable[..., Any], *arguments: Any) -> Answer:
        """Run a function on every rank, and agree on how it ended: ok only if it was for all.

        The function must not talk to other ranks: one of them may have left it by an error.

        Raises:
            InputError: as `together` does.
        """
        own = self.together(_tried, function, arguments)
        ends = self.gather((own.outcome, own.error_class, own.error_text))
        failed = [rank for rank, (outcome, _, _) in enumerate(ends) if outcome != "ok"]
        if not failed:
            return own
        outcome, name, text = ends[failed[0]]
        whose = f"rank {failed[0]}: " if self.world_size > 1 else ""
        return Answer(outcome, None, name, f"{whose}{text}")


def _tried(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Answer:
    """Call a function and keep of an error its text, cleaned up after."""
    try:
        done = attempt(function, *arguments)
    except InputError:
        raise
    except Exception as error:
        if is_context_lost(error):
            raise
        return Answer("error", None, type(error).__name__, str(error))
    if done.ok:
        return Answer("ok", done.value)
    return Answer("oom", None, done.error_class, done.text)


@dataclass(frozen=True)
class Meeting:
    """A job whose ranks have found each other, and can already read what rank 0 says."""

    store: Any
    rank: int
    world_size: int

    def from_lead(self, make: Callable[[], str]) -> str:
        """Make a text on rank 0 and return it on every rank.

        Raises:
            InputError: what `make` raised on rank 0, on every rank.
        """
        if self.rank == 0:
            try:
                self.store.set("labhelpers/request", f"+{make()}")
            except (InputError, OSError) as error:
                self.store.set("labhelpers/request", f"-{error}")
        text: str = self.store.get("labhelpers/request").decode()
        if text.startswith("-"):
            raise InputError(text[1:])
        return text[1:]


def meet() -> Meeting:
    """Find the other ranks of the job that the environment describes (torchrun's variables).

    From here on this process ends with its launcher, and at once at SIGTERM and Ctrl-C: inside
    a collective a handler of Python's would wait. Nothing is lost by that: what was measured
    is on disk, and a run's lock goes with the process.
    """
    prepare_child(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    limit = timedelta(seconds=MEETING_TIMEOUT_S)
    store, rank, world_size = next(rendezvous("env://", timeout=limit))
    return Meeting(store, rank, world_size)


@contextmanager
def team_of(
    meeting: Meeting, device: str, *, require_gpu: bool = False, timeout_s: float = 600.0
) -> Iterator[Team]:
    """Make a team of the ranks: each with its device, all with a group for gradients.

    Args:
        device: auto, cpu or cuda; each rank takes the GPU of its number on its host.
        timeout_s: the longest that one rank may have to wait for another.

    Raises:
        InputError: on every rank, for a device that one of them does not have.
    """
    store, rank, world_size = meeting.store, meeting.rank, meeting.world_size
    limit = timedelta(seconds=timeout_s + SPARE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    own_keys = dist.PrefixStore("labhelpers", store)  # type: ignore[attr-defined]
    roll = RollCall(own_keys, rank, world_size)
    team = Team(rank, world_size, "cpu", dist.group.WORLD, roll)
    own = team.together(_own_device, device, require_gpu)
    if len({name.split(":")[0] for name in team.gather(own)}) > 1:
        raise InputError("device: some ranks have a GPU and some do not; give --device cpu")
    yield replace(team, device=own, group=_gradient_group(own, limit))
    # Not after an error: a rank that is stuck or gone would keep this one here.
    dist.destroy_process_group()


def _own_device(name: str, require_gpu: bool) -> str:
    if name.startswith("cuda:"):
        raise InputError(f"device: got {name!r}; under torchrun each rank takes its own: give cuda")
    if resolve_device(name, require_gpu=require_gpu) == "cpu":
        return "cpu"
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise InputError(
            f"torchrun started more processes here than there are GPUs ({count}); give "
            f"--nproc-per-node={count}, or measure with --device cpu"
        )
    torch.cuda.set_device(index)
    torch.zeros(1, device=f"cuda:{index}")
    return f"cuda:{index}"


def _gradient_group(device: str, limit: timedelta) -> Any:
    """Return the group that gradients travel through: NCCL between GPUs, else gloo."""
    if device == "cpu":
        return dist.group.WORLD
    group: Any = dist.new_group(backend="nccl", timeout=limit)
    # NCCL takes its memory and its connections at the first call: before anything is measured.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.cuda.synchronize(device)
    return group


def describe_job(team: Team) -> dict[str, Any]:
    """Return the facts of this rank's environment, and those of the job as a whole."""
    facts = describe(team.device)
    names = team.gather(facts["device_name"])
    hosts = -(-team.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", team.world_size)))
    nccl = team.device != "cpu"
    facts["job"] = {
        "world_size": team.world_size,
        "hosts": hosts,
        "backend": dist.get_backend(team.group),
        "device_names": names,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "nccl_settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }
    return facts


def leave(code: int) -> NoReturn:
    """End this process at once, with all output written.

    Python's own end is left out: it would wait for ranks that are stuck, and now and then a
    thread of the backend that is still there aborts a process that had done everything.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_peer_failure(error: BaseException) -> bool:
    """Tell whether an error says that another rank is gone, rather than that this one failed."""
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    if isinstance(error, kinds):
        return True
    return isinstance(error, RuntimeError) and _PEER_FAILED.search(str(error)) is not None
