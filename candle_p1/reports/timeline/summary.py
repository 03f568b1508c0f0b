"""What a timeline says, found in one pass over the file."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from candle_p1.reports.timeline.activities import NEGOTIATE, TRANSFER, Activity, classify
from candle_p1.reports.timeline.broadcast import BroadcastOverhead, InitialBroadcast
from candle_p1.reports.timeline.clock import origin_epoch_us
from candle_p1.reports.timeline.events import EventReader
from candle_p1.reports.timeline.intervals import Overlap, RunningUnion
from candle_p1.reports.timeline.messages import (
    US_PER_S,
    Message,
    MessageStatistics,
    tensor_bytes,
)
from candle_p1.reports.timeline.steps import GradientStep, Steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from candle_p1.reports.timeline.events import Event
    from candle_p1.reports.timeline.intervals import Interval

GRADIENT = r"(^|/)gradient\.\d+\."
"""How `candle_p1.distributed.horovod` names gradients."""

MAX_UNFINISHED = 100
"""Shown of those that had not ended when the timeline did."""


@dataclass(frozen=True)
class TimelineSummary:
    """What a timeline says. Times are in seconds on its own clock, see `clock`.

    Attributes:
        path: The file.
        num_events: In it.
        cut: The file ends before the end of its array: the run was killed, or it still runs.
        origin_epoch_us: The time of day at which the clock was 0; None where the file lacks it.
        begin_s: The first event.
        end_s: The last.
        kinds: By kind (`activities.Activity.kind`): the length of the union of all intervals
            (`union_s`), how many there are, one for each tensor (`num`), `first_s` and `last_s`.
        libraries: The same of the transfers of each communication library.
        activities: The same by the names in the file, with kind, operation and library.
        messages: By the activity of a library: `messages.MessageStatistics`.
        tensors: In the order of appearance; sums over a tensor's operations. A tensor in a fused
            message counts the message's whole time, so these do not add up over tensors.
        num_steps: Rounds of allreduces of the gradients, see `steps`.
        steps: Columns, a value for each step.
        broadcast: The paper's broadcast overhead; None without a broadcast.
        ranks: By rank, how often it was ready for a negotiation, how often as the last one, and how
            long after the negotiation's begin on average. Horovod logs this only where its cache
            of responses does not answer, i.e. for a tensor's first operation.
        hidden: The share of the gradients' communication, from agreement to end, that lies within
            the intervals given as computing; None if none were given.
        unfinished: The first events that were begun and had not ended, with their tensors: what a
            run that hung was waiting for.
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
    hidden: dict[str, float | None] | None
    unfinished: list[dict[str, Any]]
    num_unmatched: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary as JSON holds it."""
        return asdict(self)


def summarize(
    path: Path,
    *,
    gradients: str = GRADIENT,
    steps_us: Iterable[Interval] | None = None,
    computing_us: Iterable[Interval] | None = None,
) -> TimelineSummary:
    """Reads a timeline once and sums it up, in constant memory but for a row per tensor and step.

    Args:
        path: The file, plain or gzipped; unclosed or cut is fine.
        gradients: A regular expression found in the names of gradients and of nothing else.
        steps_us: The intervals of the steps on the timeline's clock; by default they are found, see
            `steps`. Communication outside of them does not count as to be hidden.
        computing_us: When the rank that wrote the timeline computes, on the same clock. Where it is
            known when communication is exposed: ``intervals.subtract(steps_us, exposed_us)``.

    Raises:
        DataError: The file cannot be read or is not a timeline.
    """
    given = None if steps_us is None else list(steps_us)
    walk = _Walk(gradients, given, computing_us)
    reader = EventReader(path)
    walk.follow(reader)
    return walk.finish(path, reader)


@dataclass
class _Tensor:
    """What is known of a tensor, and what of it is open.

    Attributes:
        us: The time spent, by kind.
    """

    name: str
    is_gradient: bool = False
    num: int = 0
    num_bytes: int | None = None
    us: dict[str, int] = field(default_factory=lambda: defaultdict(int))
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

    def __init__(
        self,
        gradients: str,
        steps_us: list[Interval] | None,
        computing_us: Iterable[Interval] | None,
    ) -> None:
        self._is_gradient = re.compile(gradients).search
        self._names: dict[int, str] = {}
        self._tensors: dict[int, _Tensor] = {}
        self._unions: dict[str, dict[str, RunningUnion]] = {"kind": {}, "library": {}, "name": {}}
        self._unions_of: dict[str, tuple[RunningUnion, ...]] = {}
        self._steps = Steps(steps_us)
        self._broadcast = InitialBroadcast()
        self._message: dict[str, Message] = {}  # the latest of each activity
        self._messages: dict[str, MessageStatistics] = defaultdict(MessageStatistics)
        self._ranks: dict[int, _Rank] = defaultdict(_Rank)
        self._last_ready: dict[int, int] = {}
        self._communication = RunningUnion(self._add_communication)
        self._computing = None if computing_us is None else Overlap(computing_us)
        self._within = None if steps_us is None else Overlap(steps_us)
        self._first_us: int | None = None
        self._us = 0
        self._origin_epoch_us: int | None = None
        self._num_unmatched = 0

    def follow(self, events: Iterable[Event]) -> None:
        """Takes the events of a file in their order."""
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
                tensor.step = self._steps.place(pid, us)
                if tensor.step:
                    tensor.step.communication.begin(us)
                    tensor.step.negotiate.begin(us)
        elif kind == TRANSFER:
            message = self._message.get(activity.name)
            if message is None or message.ending:
                message = self._message[activity.name] = Message(activity.name, us)
            message.add_tensor()
            tensor.messages.append(message)
        elif activity.is_operation:
            if tensor.is_gradient:
                self._communication.begin(us)
            if tensor.step:
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
        if tensor.is_gradient:
            self._communication.end(us)
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

    def _add_communication(self, begin_us: int, end_us: int) -> None:
        for overlap in (self._computing, self._within):
            if overlap:
                overlap.add(begin_us, end_us)

    def finish(self, path: Path, reader: EventReader) -> TimelineSummary:
        """Ends what is open where the timeline ends, and returns the summary."""
        unfinished: list[dict[str, Any]] = [
            {"tensor": tensor.name, "activity": activity.name, "begin_s": begin_us / US_PER_S}
            for tensor in self._tensors.values()
            for activity, begin_us in tensor.open
        ]
        for unions in self._unions.values():
            for union in unions.values():
                union.end_all(self._us)
        self._communication.end_all(self._us)
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
                name: _described(classify(name)) | row
                for name, row in _union_rows(self._unions["name"]).items()
            },
            messages={name: each.to_dict() for name, each in sorted(self._messages.items())},
            tensors=[_tensor_row(tensor) for tensor in self._tensors.values()],
            num_steps=self._steps.num,
            steps=self._steps.to_dict(),
            broadcast=self._broadcast.overhead(self._us),
            ranks={rank: _rank_row(ready) for rank, ready in sorted(self._ranks.items())},
            hidden=self._hidden(),
            unfinished=sorted(unfinished, key=lambda row: row["begin_s"])[:MAX_UNFINISHED],
            num_unmatched=self._num_unmatched,
        )

    def _hidden(self) -> dict[str, float | None] | None:
        if self._computing is None:
            return None
        total_us = self._within.total_us if self._within else self._communication.total_us
        hidden_us = self._computing.total_us
        return {
            "communication_s": total_us / US_PER_S,
            "hidden_s": hidden_us / US_PER_S,
            "hidden_share": hidden_us / total_us if total_us else None,
        }


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


def _described(activity: Activity) -> dict[str, Any]:
    return {
        "kind": activity.kind,
        "operation": activity.operation,
        "library": activity.library,
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
