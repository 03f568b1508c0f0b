"""The summary of Horovod's timeline, made in one pass over the file.

Horovod's ``ts`` are microseconds of the monotonic clock since rank 0's background thread started
within ``hvd.init``; the first event states the time of day at that moment. On Linux that clock and
``time.perf_counter`` differ only by an offset, which `instrument.phases.ClockAnchor`, read just
before ``hvd.init``, gives to within a few microseconds.

Fused tensors each log the same activity at nearly the same time, so a sum over tensors would count
it many times. The time that an activity took is the length of the union of its intervals.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.reports import timeline_events as events
from candle_p1.reports.timeline_events import NEGOTIATE, TRANSFER, US_PER_S, Activity

GRADIENT = r"(^|/)gradient\.\d+\."
"""How `candle_p1.distributed.optimizer` names gradients."""

MAX_UNFINISHED = 100
"""The number shown of the events that had not ended when the timeline did."""
MAX_DIMENSIONS = 16
DRAWN = frozenset(events.LIBRARY_OPERATIONS.values())
"""The operations that Horovod has; a file from elsewhere may name any number of others."""

NUM_PIECES = 1024
TIMES = ("begin_s", "end_s", "communication_s", "negotiate_s", "allreduce_s")
COUNTS = ("num_tensors", "num_messages", "bytes")


@dataclass(frozen=True)
class BroadcastOverhead:
    """The time that the broadcast of the initial weights took.

    The paper (section 4.2.1, figures 7, 12 and 19) reads the broadcast overhead off the timeline,
    whose first events are negotiate_broadcast, broadcast and mpi_broadcast: it is the time from the
    first negotiation, when the first rank submits a tensor, to the end of the last broadcast. It
    fell from 43.72 s to 4.65 s on 384 GPUs because ranks no longer waited for the slowest loader.

    Ranks of this package wait for each other before they broadcast. The waiting for a slow loader
    that the paper's figure contains is therefore in the phase broadcast/wait of the run's record;
    `after` adds it.

    Attributes:
        begin_s: When the first negotiation begins.
        end_s: When the last broadcast ends.
        overhead_s: The time between the two.
        waiting_s: The part of it without a broadcast in progress: late ranks, and negotiation.
        broadcast_s: The part of it with a broadcast in progress, after negotiation.
        transfer_s: The part of it in which a communication library broadcasts.
        num_tensors: The number of tensors that were broadcast.
        whole: Whether every broadcast that began has ended.
    """

    begin_s: float
    end_s: float
    overhead_s: float
    waiting_s: float
    broadcast_s: float
    transfer_s: float
    num_tensors: int
    whole: bool

    def after(self, wait_s: float) -> BroadcastOverhead:
        """Returns what the paper counts, for ranks of which the first had waited this long."""
        overhead_s, waiting_s = self.overhead_s + wait_s, self.waiting_s + wait_s
        return replace(self, overhead_s=overhead_s, waiting_s=waiting_s)


@dataclass(frozen=True)
class TimelineSummary:
    """The summary of a timeline. Times are in seconds on its own clock.

    Attributes:
        cut: Whether the array is not closed: the run was killed, or is still running.
        origin_epoch_us: The time of day at which the clock was 0; None where the file lacks it.
        kinds: By kind (`Activity.kind`): the length of the union of all intervals (`union_s`),
            their number, one for each tensor (`num`), `first_s` and `last_s`.
        activities: The same by the names in the file, with kind, operation and library.
        messages: By the activity of a library: number and bytes of its messages.
        tensors: In the order of appearance: totals over a tensor's operations. A tensor in a fused
            message counts the message's whole time, so these must not be added up over tensors.
        num_steps: Rounds of allreduces of the gradients, see `GradientStep`.
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
    walk, reader = _Walk(gradients), events.EventReader(path)
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
class RunningUnion:
    """The union of intervals whose starts and ends arrive in order of time, in microseconds.

    Its length, `total_us`, is that up to the last time at which no interval was open.
    """

    total_us: int = 0
    num_intervals: int = 0
    num_open: int = 0
    first_us: int = 0
    last_us: int = 0
    _begin_us: int = 0

    def begin(self, us: int) -> None:
        """Begins an interval."""
        if not self.num_intervals:
            self.first_us = us
        if not self.num_open:
            self._begin_us = us
        self.num_open += 1
        self.num_intervals += 1

    def end(self, us: int) -> None:
        """Ends one of the open intervals; does nothing where none is open."""
        if not self.num_open:
            return
        self.num_open -= 1
        self.last_us = us
        if not self.num_open:
            self.total_us += us - self._begin_us

    def end_all(self, us: int) -> None:
        """Ends all open intervals, for instance where the timeline stops."""
        while self.num_open:
            self.end(us)


@dataclass(slots=True)
class CoverageUnion(RunningUnion):
    """The union of intervals, and how much of every piece of time it covers.

    Time from 0 on is divided into NUM_PIECES pieces. Where an interval ends after the last of them,
    pairs of pieces become one, so a timeline of any length fits into the same memory.
    """

    piece_us: int = 1000
    covered_us: list[int] = field(default_factory=lambda: [0] * NUM_PIECES)

    def end(self, us: int) -> None:
        """Ends one of the open intervals; does nothing where none is open."""
        if self.num_open == 1:
            self._cover(max(self._begin_us, 0), max(us, 0))
        RunningUnion.end(self, us)

    def _cover(self, begin_us: int, end_us: int) -> None:
        while end_us > NUM_PIECES * self.piece_us:
            pairs = zip(self.covered_us[::2], self.covered_us[1::2], strict=True)
            self.covered_us = [a + b for a, b in pairs] + [0] * (NUM_PIECES // 2)
            self.piece_us *= 2
        first, last = begin_us // self.piece_us, end_us // self.piece_us
        for i in range(first, min(last + 1, NUM_PIECES)):
            start_us = i * self.piece_us
            covered_us = min(end_us, start_us + self.piece_us) - max(begin_us, start_us)
            self.covered_us[i] += covered_us

    @property
    def shares(self) -> NDArray[np.float64]:
        """The covered share of each piece, from 0 to 1, float64, shape (NUM_PIECES,)."""
        return np.array(self.covered_us, np.float64) / self.piece_us


@dataclass(slots=True, eq=False)
class GradientStep:
    """A training step in progress: one round of allreduces of the gradients.

    The file does not mark steps. A new one begins with the negotiation of a gradient that the
    current step already has: a rank submits a gradient again only after it has received those of
    the previous step, which all ranks have then negotiated. A broadcast also ends a step, so that
    the training of one model (the self-test at the start of a run) is not joined to that of
    another.

    Gradients are communicated from the first rank's submission until they are reduced; they are
    negotiated until all ranks have submitted them. The bytes are those whose size is logged.
    """

    index: int
    communication: RunningUnion = field(default_factory=RunningUnion)
    negotiate: RunningUnion = field(default_factory=RunningUnion)
    allreduce: RunningUnion = field(default_factory=RunningUnion)
    pids: set[int] = field(default_factory=set)
    num_messages: int = 0
    num_bytes: int = 0

    @property
    def row(self) -> tuple[int, ...]:
        """Its times, in us, and counts, at a time when none of its gradients is in progress."""
        parts = self.communication, self.negotiate, self.allreduce
        counts = len(self.pids), self.num_messages, self.num_bytes
        ends = parts[0].first_us, parts[0].last_us
        return (*ends, *(part.total_us for part in parts), *counts)


class _Broadcast:
    """Finds the broadcast of the weights.

    It is the one with the most tensors among all sequences of broadcasts without an allreduce
    between them. A sequence is its intervals by kind.
    """

    def __init__(self) -> None:
        self._largest: dict[str, RunningUnion] = defaultdict(RunningUnion)
        self._current: dict[str, RunningUnion] = defaultdict(RunningUnion)

    def begin(self, activity: Activity, us: int) -> None:
        if activity.operation == "broadcast":
            self._current[activity.kind].begin(us)
        elif activity.kind == NEGOTIATE and not any(u.num_open for u in self._current.values()):
            self._compare()

    def end(self, activity: Activity, us: int) -> None:
        if activity.operation == "broadcast":
            self._current[activity.kind].end(us)

    def _compare(self) -> None:
        both = self._largest, self._current
        self._largest = max(both, key=lambda unions: unions[NEGOTIATE].num_intervals)
        self._current = defaultdict(RunningUnion)

    def overhead(self, last_us: int) -> BroadcastOverhead | None:
        """Returns the time that it took until `last_us`, the timeline's end; None without one."""
        self._compare()
        unions = [self._largest[kind] for kind in (NEGOTIATE, "broadcast", TRANSFER)]
        negotiate, broadcast, transfer = unions
        if not negotiate.num_intervals:
            return None
        whole = not (negotiate.num_open or broadcast.num_open)
        for union in unions:
            union.end_all(last_us)
        end_us = max(negotiate.last_us, broadcast.last_us)
        overhead_us = end_us - negotiate.first_us
        return BroadcastOverhead(
            begin_s=negotiate.first_us / US_PER_S,
            end_s=end_us / US_PER_S,
            overhead_s=overhead_us / US_PER_S,
            waiting_s=(overhead_us - broadcast.total_us) / US_PER_S,
            broadcast_s=broadcast.total_us / US_PER_S,
            transfer_s=transfer.total_us / US_PER_S,
            num_tensors=negotiate.num_intervals,
            whole=whole,
        )


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
        self._step: GradientStep | None = None
        self._steps: list[tuple[int, ...]] = []  # their rows
        self._broadcast = _Broadcast()
        self._message: dict[str, _Message] = {}  # the latest of each activity
        self._messages: dict[str, _Messages] = defaultdict(_Messages)
        self._first_us: int | None = None
        self._us = 0
        self._origin_epoch_us: int | None = None

    def take(self, event: events.Event) -> None:
        phase = event["ph"]
        if phase == "M":
            if event["name"] == "process_name" and "name" in event.get("args", {}):
                self._names[event["pid"]] = event["args"]["name"]
            if self._origin_epoch_us is None:
                self._origin_epoch_us = events.origin_epoch_us(event)
            return
        if self._first_us is None:
            self._first_us = event["ts"]
        self._us = max(self._us, event["ts"])
        if phase == "E":
            self._end(event["pid"], event.get("args", {}))
        elif phase == "B":
            self._begin(event["pid"], events.classify(event["name"]))

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
            self._step = None
        self._broadcast.begin(activity, us)
        if activity.kind == NEGOTIATE:
            if tensor.is_gradient and activity.operation == "allreduce":
                tensor.step = self._step_of(pid)
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

    def _step_of(self, pid: int) -> GradientStep:
        """Returns the step of a gradient whose negotiation begins."""
        if self._step is None or pid in self._step.pids:
            self._step = GradientStep(len(self._steps))
            self._steps.append(self._step.row)
        self._step.pids.add(pid)
        return self._step

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
                self._steps[step.index] = step.row
            tensor.step = None

    def _unions_of(self, activity: Activity) -> list[RunningUnion]:
        if activity not in self._unions:
            values = {key: getattr(activity, key) for key in self._by}
            unions = [self._by[key][value] for key, value in values.items() if value]
            if activity.operation in DRAWN:
                unions.append(self._rows[activity._replace(name="")])
            self._unions[activity] = unions
        return self._unions[activity]

    def finish(self, reader: events.EventReader) -> TimelineSummary:
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
            self._steps[step.index] = step.row
        columns = np.array(self._steps, np.int64).reshape(-1, len(TIMES + COUNTS)).T
        steps = dict(zip(TIMES, (columns[: len(TIMES)] / US_PER_S).tolist(), strict=True))
        steps |= dict(zip(COUNTS, columns[len(TIMES) :].tolist(), strict=True))
        return TimelineSummary(
            path=str(reader.path),
            num_events=reader.num_events,
            cut=reader.cut,
            origin_epoch_us=self._origin_epoch_us,
            begin_s=(self._first_us or 0) / US_PER_S,
            end_s=self._us / US_PER_S,
            kinds=_union_rows(self._by["kind"]),
            activities={
                name: dict(zip(Activity._fields[1:], events.classify(name)[1:], strict=True)) | row
                for name, row in _union_rows(self._by["name"]).items()
            },
            messages={name: each.to_dict() for name, each in sorted(self._messages.items())},
            tensors=[
                {"name": tensor.name, "num": tensor.num, "bytes": tensor.num_bytes}
                | {f"{kind}_s": us / US_PER_S for kind, us in sorted(tensor.us.items())}
                for tensor in self._tensors.values()
            ],
            num_steps=len(self._steps),
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
