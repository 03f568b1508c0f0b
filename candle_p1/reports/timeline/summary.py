"""The summary of a timeline, made in one pass over the file."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from candle_p1.reports.timeline.activities import NEGOTIATE, TRANSFER, Activity, classify
from candle_p1.reports.timeline.broadcast import BroadcastOverhead, InitialBroadcast
from candle_p1.reports.timeline.events import US_PER_S, EventReader, origin_epoch_us
from candle_p1.reports.timeline.intervals import RunningUnion
from candle_p1.reports.timeline.messages import Message, MessageStatistics, tensor_bytes
from candle_p1.reports.timeline.steps import GradientStep, Steps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from candle_p1.reports.timeline.events import Event

GRADIENT = r"(^|/)gradient\.\d+\."
"""How `candle_p1.distributed.horovod` names gradients."""

RANK = re.compile(r"[0-9]{1,9}")
DESCRIBED = ("kind", "operation", "library")
MAX_UNFINISHED = 100
"""The number shown of the events that had not ended when the timeline did."""


@dataclass(frozen=True)
class TimelineSummary:
    """The summary of a timeline. Times are in seconds on its own clock.

    Attributes:
        path: The file.
        num_events: The number of events in it.
        cut: Whether the array is not closed: the run was killed, or is still running.
        origin_epoch_us: The time of day at which the clock was 0; None where the file lacks it.
        begin_s: When the first event is.
        end_s: When the last event is.
        kinds: By kind (`activities.Activity.kind`): the length of the union of all intervals
            (`union_s`), their number, one for each tensor (`num`), `first_s` and `last_s`.
        libraries: The same for the transfers of each communication library.
        activities: The same by the names in the file, with kind, operation and library.
        messages: By the activity of a library: `messages.MessageStatistics`.
        tensors: In the order of appearance: totals over a tensor's operations. A tensor in a fused
            message counts the message's whole time, so these must not be added up over tensors.
        num_steps: Rounds of allreduces of the gradients, see `steps`.
        steps: Columns with a value for each step.
        broadcast: The paper's broadcast overhead; None without a broadcast.
        ranks: By rank, how often it took part in a negotiation, how often as the last one, and how
            long after the start of the negotiation on average. Horovod logs this only where its
            response cache does not answer, that is, for the first operation on a tensor.
        unfinished: The first events that had not ended, with their tensors: what a run that hung
            was waiting for.
        num_unmatched: End events without a begin event.
    """

    path: str
    num_events: int
    cut: bool
    origin_epoch_us: int | None
    begin_s: float
    end_s: float
    kinds: dict[str, dict[str, Any]]
    libraries: dict[str, dict[str, Any]]
    activities: dict[str, dict[str, Any]]
    messages: dict[str, dict[str, Any]]
    tensors: list[dict[str, Any]]
    num_steps: int
    steps: dict[str, list[Any]]
    broadcast: BroadcastOverhead | None
    ranks: dict[int, dict[str, Any]]
    unfinished: list[dict[str, Any]]
    num_unmatched: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary as plain values for JSON."""
        return asdict(self)


def summarize(path: Path, *, gradients: str = GRADIENT) -> TimelineSummary:
    """Reads a timeline once; returns its summary. Only a row per tensor and step is kept in memory.

    Args:
        path: The file, plain or gzipped; it may be truncated.
        gradients: A regular expression found in the names of gradients and of nothing else.

    Raises:
        DataError: The file cannot be read or is not a timeline.
    """
    walk = _Walk(gradients)
    reader = EventReader(path)
    for event in reader:
        walk.take(event)
    return walk.finish(reader)


@dataclass
class _Tensor:
    name: str
    is_gradient: bool
    num: int = 0
    num_bytes: int | None = None
    us: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by kind
    open: list[tuple[Activity, int]] = field(default_factory=list)
    last_ready: int | None = None  # the rank
    messages: list[Message] = field(default_factory=list)
    step: GradientStep | None = None


@dataclass
class _Rank:
    num: int = 0
    num_last: int = 0
    after_us: int = 0


class _Walk:
    """The state between two events."""

    def __init__(self, gradients: str) -> None:
        self._is_gradient = re.compile(gradients).search
        self._names: dict[int, str] = {}
        self._tensors: dict[int, _Tensor] = {}
        self._unions: dict[str, dict[str | None, RunningUnion]] = {
            key: defaultdict(RunningUnion) for key in ("kind", "library", "name")
        }
        self._unions_by_name: dict[str, list[RunningUnion]] = {}
        self._steps = Steps()
        self._broadcast = InitialBroadcast()
        self._message: dict[str, Message] = {}  # the latest of each activity
        self._messages: dict[str, MessageStatistics] = defaultdict(MessageStatistics)
        self._ranks: dict[int, _Rank] = defaultdict(_Rank)
        self._first_us: int | None = None
        self._us = 0
        self._origin_epoch_us: int | None = None
        self._num_unmatched = 0

    def take(self, event: Event) -> None:
        """Takes the next event of the file."""
        phase = event["ph"]
        if phase == "M":
            self._take_name(event)
            return
        if self._first_us is None:
            self._first_us = event["ts"]
        self._us = max(self._us, event["ts"])
        if phase == "E":
            self._end(event["pid"], event.get("args", {}))
        elif phase == "B":
            self._begin(event["pid"], classify(event["name"]))
        elif phase == "X":
            self._take_ready(event["pid"], event["name"])

    def _take_name(self, event: Event) -> None:
        if event["name"] == "process_name" and "name" in event.get("args", {}):
            self._names[event["pid"]] = event["args"]["name"]
        if self._origin_epoch_us is None:
            self._origin_epoch_us = origin_epoch_us(event)

    def _take_ready(self, pid: int, rank: str) -> None:
        tensor = self._tensors.get(pid)
        if tensor is None or not tensor.open or not RANK.fullmatch(rank):
            return  # a track that was drawn beside the timeline
        tensor.last_ready = int(rank)
        ready = self._ranks[int(rank)]
        ready.num += 1
        ready.after_us += self._us - tensor.open[-1][1]

    def _begin(self, pid: int, activity: Activity) -> None:
        us = self._us
        if pid not in self._tensors:
            name = self._names.get(pid, f"tensor {pid}")
            self._tensors[pid] = _Tensor(name, is_gradient=bool(self._is_gradient(name)))
        tensor = self._tensors[pid]
        tensor.open.append((activity, us))
        for union in self._unions_of(activity):
            union.begin(us)
        if activity.operation == "broadcast":
            self._steps.interrupt()
        self._broadcast.begin(activity, us)
        if activity.kind == NEGOTIATE:
            if tensor.is_gradient and activity.operation == "allreduce":
                tensor.step = self._steps.place(pid)
                tensor.step.communication.begin(us)
                tensor.step.negotiate.begin(us)
        elif activity.kind == TRANSFER:
            message = self._message.get(activity.name)
            if message is None or message.end_us is not None:
                message = self._message[activity.name] = Message(activity.name, us)
            message.num_tensors += 1
            tensor.messages.append(message)
        elif activity.operation and tensor.step:
            tensor.step.allreduce.begin(us)

    def _end(self, pid: int, args: Mapping[str, Any]) -> None:
        us = self._us
        tensor = self._tensors.get(pid)
        if tensor is None or not tensor.open:
            self._num_unmatched += 1
            return
        activity, begin_us = tensor.open.pop()
        tensor.us[activity.kind] += us - begin_us
        for union in self._unions_of(activity):
            union.end(us)
        self._broadcast.end(activity, us)
        if activity.kind == NEGOTIATE:
            if tensor.step:
                tensor.step.negotiate.end(us)
            if tensor.last_ready is not None:
                self._ranks[tensor.last_ready].num_last += 1
                tensor.last_ready = None
        elif activity.kind == TRANSFER:
            if tensor.messages:
                tensor.messages[-1].end_us = us
        elif activity.operation:
            self._end_operation(tensor, tensor_bytes(args))

    def _end_operation(self, tensor: _Tensor, num_bytes: int | None) -> None:
        tensor.num += 1
        tensor.num_bytes = num_bytes
        step = tensor.step
        for message in tensor.messages:
            message.sizes.append(num_bytes)
            if len(message.sizes) == message.num_tensors:
                self._messages[message.name].add(message)
                if step:
                    step.num_messages += 1
        tensor.messages.clear()
        if step:
            step.num_bytes += num_bytes or 0
            step.allreduce.end(self._us)
            step.communication.end(self._us)
            if not step.communication.num_open:
                self._steps.update(step)
            tensor.step = None

    def _unions_of(self, activity: Activity) -> list[RunningUnion]:
        if activity.name not in self._unions_by_name:
            self._unions_by_name[activity.name] = [
                unions[getattr(activity, key)] for key, unions in self._unions.items()
            ]
        return self._unions_by_name[activity.name]

    def finish(self, reader: EventReader) -> TimelineSummary:
        """Ends everything that is open at the end of the timeline, and returns the summary."""
        unfinished: list[dict[str, Any]] = [
            {"tensor": tensor.name, "activity": activity.name, "begin_s": begin_us / US_PER_S}
            for tensor in self._tensors.values()
            for activity, begin_us in tensor.open
        ]
        for unions in self._unions.values():
            for union in unions.values():
                union.end_all(self._us)
        for step in [tensor.step for tensor in self._tensors.values() if tensor.step]:
            for union in (step.communication, step.negotiate, step.allreduce):
                union.end_all(self._us)
            self._steps.update(step)
        return TimelineSummary(
            path=str(reader.path),
            num_events=reader.num_events,
            cut=reader.cut,
            origin_epoch_us=self._origin_epoch_us,
            begin_s=(self._first_us or 0) / US_PER_S,
            end_s=self._us / US_PER_S,
            kinds=_union_rows(self._unions["kind"]),
            libraries=_union_rows(self._unions["library"]),
            activities={
                name: {key: getattr(classify(name), key) for key in DESCRIBED} | row
                for name, row in _union_rows(self._unions["name"]).items()
            },
            messages={name: each.to_dict() for name, each in sorted(self._messages.items())},
            tensors=[_tensor_row(tensor) for tensor in self._tensors.values()],
            num_steps=self._steps.num,
            steps=self._steps.to_dict(),
            broadcast=self._broadcast.overhead(self._us),
            ranks={rank: _rank_row(ready) for rank, ready in sorted(self._ranks.items())},
            unfinished=sorted(unfinished, key=lambda row: row["begin_s"])[:MAX_UNFINISHED],
            num_unmatched=self._num_unmatched,
        )


def _union_rows(unions: Mapping[str | None, RunningUnion]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "union_s": union.total_us / US_PER_S,
            "num": union.num_intervals,
            "first_s": union.first_us / US_PER_S,
            "last_s": union.last_us / US_PER_S,
        }
        for name, union in sorted((name, union) for name, union in unions.items() if name)
    }


def _tensor_row(tensor: _Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"name": tensor.name, "num": tensor.num, "bytes": tensor.num_bytes}
    return row | {f"{kind}_s": us / US_PER_S for kind, us in sorted(tensor.us.items())}


def _rank_row(ready: _Rank) -> dict[str, Any]:
    return {
        "num": ready.num,
        "num_last": ready.num_last,
        "mean_after_s": ready.after_us / ready.num / US_PER_S,
    }
