"""The summary of a timeline, made in one pass over the file."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from candle_p1.reports.timeline.events import (
    LIBRARY_OPERATIONS,
    NEGOTIATE,
    TRANSFER,
    US_PER_S,
    Activity,
    Event,
    EventReader,
    classify,
    origin_epoch_us,
)
from candle_p1.reports.timeline.steps import (
    BroadcastOverhead,
    CoverageUnion,
    GradientStep,
    InitialBroadcast,
    RunningUnion,
    Steps,
)

GRADIENT = r"(^|/)gradient\.\d+\."
"""How `candle_p1.distributed.optimizer` names gradients."""

MAX_UNFINISHED = 100
"""The number shown of the events that had not ended when the timeline did."""
MAX_DIMENSIONS = 16
DRAWN = frozenset(LIBRARY_OPERATIONS.values())
"""The operations that Horovod has; a file from elsewhere may name any number of others."""


@dataclass(frozen=True)
class TimelineSummary:
    """The summary of a timeline. Times are in seconds on its own clock.

    Attributes:
        cut: Whether the array is not closed: the run was killed, or is still running.
        origin_epoch_us: The time of day at which the clock was 0; None where the file lacks it.
        kinds: By kind (`events.Activity.kind`): the length of the union of all intervals
            (`union_s`), their number, one for each tensor (`num`), `first_s` and `last_s`.
        activities: The same by the names in the file, with kind, operation and library.
        messages: By the activity of a library: number and bytes of its messages.
        tensors: In the order of appearance: totals over a tensor's operations. A tensor in a fused
            message counts the message's whole time, so these must not be added up over tensors.
        num_steps: Rounds of allreduces of the gradients, see `steps.Steps`.
        steps: Columns with a value for each step.
        broadcast: The paper's broadcast overhead; None without a broadcast.
        unfinished: The first events that had not ended, with their tensors: what a run that hung
            was waiting for.
        rows: When the activities that a figure shows take place, by `Activity` without a name.
    """

    path: str
    num_events: int
    cut: bool
    origin_epoch_us: int | None
    begin_s: float
    end_s: float
    kinds: dict[str, dict[str, Any]]
    activities: dict[str, dict[str, Any]]
    messages: dict[str, dict[str, Any]]
    tensors: list[dict[str, Any]]
    num_steps: int
    steps: dict[str, list[Any]]
    broadcast: BroadcastOverhead | None
    unfinished: list[dict[str, Any]]
    rows: dict[Activity, CoverageUnion] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary as plain values for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "rows"}


def summarize(path: Path, *, gradients: str = GRADIENT) -> TimelineSummary:
    """Reads a timeline once; returns its summary. Only a row per tensor and step is kept in memory.

    `gradients` is a regular expression found in the names of gradients and of nothing else.

    Raises:
        DataError: The file cannot be read or is not a timeline.
    """
    walk = _Walk(gradients)
    reader = EventReader(path)
    for event in reader:
        walk.take(event)
    return walk.finish(reader)


@lru_cache(maxsize=4096)
def tensor_bytes(dtype: str, shape: str) -> int:
    """Returns the size of a tensor, for example of "float32" and "[20, 1, 128]"."""
    bits = re.search(r"\d{1,3}$", dtype)  # float16, bfloat16, int8, ...; "bool" has none
    lengths = map(int, re.findall(r"\d{1,12}", shape)[:MAX_DIMENSIONS])
    return (int(bits[0]) // 8 if bits else 1) * math.prod(lengths)


@dataclass(slots=True)
class _Message:
    """The tensors, fused by Horovod, that a communication library receives in one call.

    They log the library's activity one after the other: first all begin events, then all end
    events. A begin that follows an end therefore belongs to another message. A tensor's type and
    shape are logged when its operation ends, but not for broadcasts.
    """

    name: str
    begin_us: int
    end_us: int | None = None  # of the latest tensor
    num_tensors: int = 0
    sizes: list[int | None] = field(default_factory=list)  # of tensors whose operation has ended


class _Messages:
    """Those of one activity of a library; where two overlap, their time is counted once."""

    def __init__(self) -> None:
        self._total = Counter(num=0, num_tensors=0, bytes=0, num_unsized=0)
        self._us = self._end_us = 0

    def add(self, message: _Message) -> None:
        end_us = message.end_us or message.begin_us
        self._us += max(end_us - max(message.begin_us, self._end_us), 0)
        self._end_us = max(self._end_us, end_us)
        known = [size for size in message.sizes if size is not None]
        is_sized = len(known) == message.num_tensors
        size = {"bytes": sum(known)} if is_sized else {"num_unsized": 1}
        self._total.update({"num": 1, "num_tensors": message.num_tensors} | size)

    def to_dict(self) -> dict[str, Any]:
        return {**self._total, "duration_s": self._us / US_PER_S}


@dataclass
class _Tensor:
    name: str
    is_gradient: bool
    num: int = 0
    num_bytes: int | None = None
    us: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by kind
    open: list[tuple[Activity, int]] = field(default_factory=list)
    messages: list[_Message] = field(default_factory=list)
    step: GradientStep | None = None


class _Walk:
    def __init__(self, gradients: str) -> None:
        self._is_gradient = re.compile(gradients).search
        self._names: dict[int, str] = {}
        self._tensors: dict[int, _Tensor] = {}
        self._unions: dict[Activity, list[RunningUnion]] = {}
        self._by: dict[str, dict[str, RunningUnion]] = {
            key: defaultdict(RunningUnion) for key in ("kind", "name")
        }
        self._rows: dict[Activity, CoverageUnion] = defaultdict(CoverageUnion)
        self._steps, self._broadcast = Steps(), InitialBroadcast()
        self._message: dict[str, _Message] = {}  # the latest of each activity
        self._messages: dict[str, _Messages] = defaultdict(_Messages)
        self._first_us: int | None = None
        self._us = 0
        self._origin_epoch_us: int | None = None

    def take(self, event: Event) -> None:
        phase = event["ph"]
        if phase == "M":
            if event["name"] == "process_name" and "name" in event.get("args", {}):
                self._names[event["pid"]] = event["args"]["name"]
            if self._origin_epoch_us is None:
                self._origin_epoch_us = origin_epoch_us(event)
            return
        if self._first_us is None:
            self._first_us = event["ts"]
        self._us = max(self._us, event["ts"])
        if phase == "E":
            self._end(event["pid"], event.get("args", {}))
        elif phase == "B":
            self._begin(event["pid"], classify(event["name"]))

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
                message = self._message[activity.name] = _Message(activity.name, us)
            message.num_tensors += 1
            tensor.messages.append(message)
        elif activity.operation and tensor.step:
            tensor.step.allreduce.begin(us)

    def _end(self, pid: int, args: Mapping[str, Any]) -> None:
        us = self._us
        tensor = self._tensors.get(pid)
        if tensor is None or not tensor.open:
            return
        activity, begin_us = tensor.open.pop()
        tensor.us[activity.kind] += us - begin_us
        for union in self._unions_of(activity):
            union.end(us)
        self._broadcast.end(activity, us)
        if activity.kind == NEGOTIATE:
            if tensor.step:
                tensor.step.negotiate.end(us)
        elif activity.kind == TRANSFER:
            if tensor.messages:
                tensor.messages[-1].end_us = us
        elif activity.operation:
            stated = "dtype" in args and "shape" in args
            size = tensor_bytes(str(args["dtype"]), str(args["shape"])) if stated else None
            self._end_operation(tensor, size)

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
        if activity not in self._unions:
            values = {key: getattr(activity, key) for key in self._by}
            unions = [self._by[key][value] for key, value in values.items() if value]
            if activity.operation in DRAWN:
                unions.append(self._rows[activity._replace(name="")])
            self._unions[activity] = unions
        return self._unions[activity]

    def finish(self, reader: EventReader) -> TimelineSummary:
        unfinished: list[dict[str, Any]] = [
            {"tensor": tensor.name, "activity": activity.name, "begin_s": begin_us / US_PER_S}
            for tensor in self._tensors.values()
            for activity, begin_us in tensor.open
        ]
        for unions in self._unions.values():
            for union in unions:
                union.end_all(self._us)
        for step in [tensor.step for tensor in self._tensors.values() if tensor.step]:
            for union in (step.communication, step.negotiate, step.allreduce):
                union.end_all(self._us)
            self._steps.update(step)
        steps = self._steps.to_dict()
        return TimelineSummary(
            path=str(reader.path),
            num_events=reader.num_events,
            cut=reader.cut,
            origin_epoch_us=self._origin_epoch_us,
            begin_s=(self._first_us or 0) / US_PER_S,
            end_s=self._us / US_PER_S,
            kinds=_union_rows(self._by["kind"]),
            activities={
                name: dict(zip(Activity._fields[1:], classify(name)[1:], strict=True)) | row
                for name, row in _union_rows(self._by["name"]).items()
            },
            messages={name: each.to_dict() for name, each in sorted(self._messages.items())},
            tensors=[
                {"name": tensor.name, "num": tensor.num, "bytes": tensor.num_bytes}
                | {f"{kind}_s": us / US_PER_S for kind, us in sorted(tensor.us.items())}
                for tensor in self._tensors.values()
            ],
            num_steps=len(steps["begin_s"]),
            steps=steps,
            broadcast=self._broadcast.overhead(self._us),
            unfinished=sorted(unfinished, key=lambda row: row["begin_s"])[:MAX_UNFINISHED],
            rows=dict(self._rows),
        )


def _union_rows(unions: Mapping[str, RunningUnion]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "union_s": union.total_us / US_PER_S,
            "num": union.num_intervals,
            "first_s": union.first_us / US_PER_S,
            "last_s": union.last_us / US_PER_S,
        }
        for name, union in sorted(unions.items())
    }
