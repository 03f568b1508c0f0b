"""The summary of a timeline, made in one pass over the file."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from candle_p1.reports.timeline.activities import NEGOTIATE, TRANSFER, Activity, classify
from candle_p1.reports.timeline.broadcast import BroadcastOverhead, InitialBroadcast
from candle_p1.reports.timeline.clock import origin_epoch_us
from candle_p1.reports.timeline.events import US_PER_S, EventReader
from candle_p1.reports.timeline.intervals import RunningUnion
from candle_p1.reports.timeline.messages import Message, MessageStatistics, tensor_bytes
from candle_p1.reports.timeline.steps import GradientStep, Steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from candle_p1.reports.timeline.events import Event

GRADIENT = r"(^|/)gradient\.\d+\."
"""How `candle_p1.distributed.horovod` names gradients."""

DESCRIBED = ("kind", "operation", "library")
MAX_UNFINISHED = 100
"""The number shown of the events that had not ended when the timeline did."""


@dataclass(frozen=True)
class TimelineSummary:
    """The summary of a timeline. Times are in seconds on its own clock, see `clock`.

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
            long after the begin of the negotiation on average. Horovod logs this only where its
            response cache does not answer, that is, for the first operation on a tensor.
        unfinished: The first events that had not ended, with their tensors: what a run that hung
            was waiting for.
        num_unmatched: Ends without a begin.
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
    """Reads a timeline once and sums it up, in constant memory but for a row per tensor and step.

    Args:
        path: The file, plain or gzipped; it may be truncated.
        gradients: A regular expression found in the names of gradients and of nothing else.

    Raises:
        DataError: The file cannot be read or is not a timeline.
    """
    walk = _Walk(gradients)
    reader = EventReader(path)
    walk.follow(reader)
    return walk.finish(path, reader)


@dataclass
class _Tensor:
    name: str
    is_gradient: bool = False
    num: int = 0
    num_bytes: int | None = None
    us: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by kind
    open: list[tuple[Activity, int]] = field(default_factory=list)
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
        self._unions: dict[str, dict[str, RunningUnion]] = {"kind": {}, "library": {}, "name": {}}
        self._unions_of: dict[str, tuple[RunningUnion, ...]] = {}
        self._steps = Steps()
        self._broadcast = InitialBroadcast()
        self._message: dict[str, Message] = {}  # the latest of each activity
        self._messages: dict[str, MessageStatistics] = defaultdict(MessageStatistics)
        self._ranks: dict[int, _Rank] = defaultdict(_Rank)
        self._last_ready: dict[int, int] = {}
        self._first_us: int | None = None
        self._us = 0
        self._origin_epoch_us: int | None = None
        self._num_unmatched = 0

    def follow(self, events: Iterable[Event]) -> None:
        """Takes the events of a file in order."""
        for event in events:
            phase = event["ph"]
            if phase == "M":
                self._name(event)
                continue
            us: int = event["ts"]
            if self._first_us is None:
                self._first_us = self._us = us
            elif us > self._us:
                self._us = us
            if phase == "E":
                self._end(event["pid"], self._us, event.get("args"))
            elif phase == "B":
                self._begin(event["pid"], classify(event["name"]), self._us)
            elif phase == "X":
                self._ready(event["pid"], event["name"], self._us)

    def _name(self, event: Event) -> None:
        args = event.get("args", {})
        if event["name"] != "process_name":
            return
        if "name" in args:
            self._names[event["pid"]] = args["name"]
        if self._origin_epoch_us is None:
            self._origin_epoch_us = origin_epoch_us(event)

    def _tensor(self, pid: int) -> _Tensor:
        name = self._names.get(pid, f"tensor {pid}")
        tensor = self._tensors[pid] = _Tensor(name, is_gradient=bool(self._is_gradient(name)))
        return tensor

    def _begin(self, pid: int, activity: Activity, us: int) -> None:
        tensor = self._tensors.get(pid) or self._tensor(pid)
        tensor.open.append((activity, us))
        for union in self._unions_of.get(activity.name) or self._new_unions(activity):
            union.begin(us)
        kind = activity.kind
        if activity.operation == "broadcast":
            self._steps.interrupt()
        if kind == NEGOTIATE:
            if tensor.is_gradient and activity.operation == "allreduce":
                tensor.step = self._steps.place(pid)
                tensor.step.communication.begin(us)
                tensor.step.negotiate.begin(us)
        elif kind == TRANSFER:
            message = self._message.get(activity.name)
            if message is None or message.ending:
                message = self._message[activity.name] = Message(activity.name, us)
            message.add_tensor()
            tensor.messages.append(message)
        elif activity.is_operation and tensor.step:
            tensor.step.allreduce.begin(us)
        if kind == NEGOTIATE or activity.operation == "broadcast":
            self._broadcast.begin(activity, us)

    def _end(self, pid: int, us: int, args: Mapping[str, Any] | None) -> None:
        tensor = self._tensors.get(pid)
        if tensor is None or not tensor.open:
            self._num_unmatched += 1
            return
        activity, begin_us = tensor.open.pop()
        tensor.us[activity.kind] += us - begin_us
        for union in self._unions_of[activity.name]:
            union.end(us)
        if activity.kind == NEGOTIATE:
            if tensor.step:
                tensor.step.negotiate.end(us)
            if pid in self._last_ready:
                self._ranks[self._last_ready.pop(pid)].num_last += 1
        elif activity.kind == TRANSFER:
            if tensor.messages:
                tensor.messages[-1].end_tensor(us)
        elif activity.is_operation:
            self._end_operation(tensor, us, tensor_bytes(args))
        if activity.operation == "broadcast":
            self._broadcast.end(activity, us)

    def _end_operation(self, tensor: _Tensor, us: int, num_bytes: int | None) -> None:
        tensor.num += 1
        tensor.num_bytes = num_bytes
        step = tensor.step
        for message in tensor.messages:
            if message.add_size(num_bytes):
                self._messages[message.name].add(message)
                if step:
                    step.num_messages += 1
        tensor.messages.clear()
        if step:
            step.num_bytes += num_bytes or 0
            step.allreduce.end(us)
            step.communication.end(us)
            if not step.communication.num_open:
                self._steps.update(step)
            tensor.step = None

    def _ready(self, pid: int, rank: str, us: int) -> None:
        tensor = self._tensors.get(pid)
        if tensor is None or not tensor.open or not rank.isdecimal():
            return  # a track that was drawn beside the timeline
        ready = self._ranks[int(rank)]
        ready.num += 1
        ready.after_us += us - tensor.open[-1][1]
        self._last_ready[pid] = int(rank)

    def _new_unions(self, activity: Activity) -> tuple[RunningUnion, ...]:
        keys = {"kind": activity.kind, "library": activity.library, "name": activity.name}
        unions = tuple(
            self._unions[key].setdefault(value, RunningUnion())
            for key, value in keys.items()
            if value is not None
        )
        self._unions_of[activity.name] = unions
        return unions

    def finish(self, path: Path, reader: EventReader) -> TimelineSummary:
        """Ends everything that is open at the end of the timeline, and returns the summary."""
        unfinished: list[dict[str, Any]] = [
            {"tensor": tensor.name, "activity": activity.name, "begin_s": begin_us / US_PER_S}
            for tensor in self._tensors.values()
            for activity, begin_us in tensor.open
        ]
        for unions in self._unions.values():
            for union in unions.values():
                union.end_all(self._us)
        for tensor in self._tensors.values():
            if tensor.step:
                step = tensor.step
                for union in (step.communication, step.negotiate, step.allreduce):
                    union.end_all(self._us)
                self._steps.update(step)
        return TimelineSummary(
            path=str(path),
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


def _union_rows(unions: Mapping[str, RunningUnion]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "union_s": union.total_us / US_PER_S,
            "num": union.num_intervals,
            "first_s": (union.first_us or 0) / US_PER_S,
            "last_s": (union.last_us or 0) / US_PER_S,
        }
        for name, union in sorted(unions.items())
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
