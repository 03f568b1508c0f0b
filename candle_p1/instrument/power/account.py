"""Energies of a job: per phase and device, and totals in which no device counts twice."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from candle_p1.instrument.power.sampler import Sampler
from candle_p1.records import types as records
from candle_p1.records.power_trace import Channel, Energy, add
from candle_p1.records.rank_stats import Joules, Watts
from candle_p1.records.types import KINDS, worst

Interval = tuple[str, float, float]
"""The name of a phase, its begin and its end, in s by the sampler's clock."""


@dataclass(frozen=True, eq=False)
class DeviceEnergy:
    """The energies of one device of one node, of the run and of each phase.

    The node's number and `boot` are those of `NodeEnergy`.
    """

    channel: Channel
    total: Energy
    phases: dict[str, Energy]
    node: int
    boot: str


@dataclass(frozen=True)
class NodeEnergy:
    """What one node measured; small enough to be gathered from all nodes."""

    node: int
    host: str
    boot: str  # identifies the machine; that of containers on the same machine is the same
    devices: list[DeviceEnergy]
    power_hz: float
    absent: Mapping[str, str] = field(default_factory=dict)  # sources, and why
    trace: str | None = None  # the name of the file with the samples


def measure_node(
    sampler: Sampler,
    intervals: Sequence[Interval],
    *,
    node: int,
    absent: Mapping[str, str],
    trace: str,
) -> NodeEnergy:
    """Returns what a node measured in a run; its sampler is stopped.

    The intervals are the phases of the rank that samples; a phase entered twice appears twice. The
    total covers the time from the first begin to the last end, as far as it was sampled. The trace
    is the name of the file for the samples.
    """
    begin_s = max(min(begin for _, begin, _ in intervals), sampler.start_s)
    end_s = min(max(end for _, _, end in intervals), sampler.stop_s)
    boot, devices = boot_id(), []
    for each in sampler.traces():
        phases: dict[str, list[Energy]] = {}
        for name, begin, end in intervals:
            phases.setdefault(name, []).append(each.energy(begin, end))
        total = each.energy(begin_s, end_s)
        summed = {name: add(parts) for name, parts in phases.items()}
        devices.append(DeviceEnergy(each.channel, total, summed, node, boot))
    named = trace if any(device.total.num_samples for device in devices) else None
    return NodeEnergy(node, platform.node(), boot, devices, sampler.hz, absent, named)


def measure_so_far(sampler: Sampler, begin_s: float, node: int) -> NodeEnergy | None:
    """Returns the energy that a node has used until now; None if a sensor does not answer.

    The sampler goes on. By its clock, the run began at `begin_s`.
    """
    traces = sampler.traces_so_far()
    if traces is None:
        return None
    begin_s = max(begin_s, sampler.start_s)
    end_s = min((float(each.times_s[-1]) for each in traces if len(each.times_s)), default=begin_s)
    boot = boot_id()
    devices = [
        DeviceEnergy(each.channel, each.energy(begin_s, end_s), {}, node, boot) for each in traces
    ]
    return NodeEnergy(node, platform.node(), boot, devices, sampler.hz)


def boot_id() -> str:
    """Returns an identifier of this machine, valid since it was booted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def combine(nodes: Sequence[NodeEnergy]) -> records.JobEnergy:
    """Returns the section ``energy`` of a run's record.

    A total is the sum over the devices that are ``counted``. If the energy of one of them is
    absent, or if nodes measure different parts, the total is absent as well: a partial sum is never
    shown as a total. The nodes are in order of their numbers.
    """
    devices = [device for node in nodes for device in node.devices]
    counted = _counted(devices)
    lacking: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        for source_and_reason in node.absent.items():
            lacking.setdefault(source_and_reason, []).append(node.node)
    reason = _why_uneven(nodes, counted)
    if not counted:
        reason = "; ".join(map(": ".join, lacking)) or "no source was read"
    total = _total([(each, each.total) for each in counted], reason)
    if "energy_j" in total:
        total["total_j"] = total.pop("energy_j")
        total["total_s"] = max(each.total.duration_s for each in counted)
    phases: dict[str, list[tuple[DeviceEnergy, Energy]]] = {}
    for each in counted:
        for name, energy in each.phases.items():
            phases.setdefault(name, []).append((each, energy))
    return records.JobEnergy(
        **total,
        covers=sorted({each.channel.domain for each in counted}),
        phases={
            name: records.EnergyTotal(**_total(parts, reason)) for name, parts in phases.items()
        },
        devices=_groups(devices, set(counted)),
        absent=[
            records.AbsentSource(source=source, reason=why, nodes=numbers)
            for (source, why), numbers in lacking.items()
        ],
        power_hz=nodes[0].power_hz,
        traces=[node.trace for node in nodes if node.trace],
    )


def _counted(devices: Sequence[DeviceEnergy]) -> list[DeviceEnergy]:
    """Returns the devices included in the totals, so that every part of a machine counts once."""

    def preference(each: DeviceEnergy) -> tuple[int, bool]:  # the better kind, then a counter
        return KINDS.index(each.total.kind), each.channel.reading == "power"

    best: dict[tuple[str, str], DeviceEnergy] = {}
    for each in sorted(devices, key=preference):  # the sort keeps the order of nodes
        best.setdefault((each.boot, each.channel.device), each)
    once = [each for each in devices if best[each.boot, each.channel.device] is each]
    whole = {each.boot for each in once if each.channel.domain == "node"}
    modular = {each.boot for each in once if each.channel.domain == "module"}
    # A Cray's node controller also reads processors and GPUs that have their own sensors.
    others = {(e.boot, e.channel.domain) for e in once if e.channel.sensor != "cray"}

    def is_counted(boot: str, channel: Channel) -> bool:
        if boot in whole:
            return channel.domain == "node"
        if boot in modular and channel.domain != "module":
            return False
        return channel.sensor != "cray" or (boot, channel.domain) not in others

    return [each for each in once if is_counted(each.boot, each.channel)]


def _why_uneven(nodes: Sequence[NodeEnergy], counted: Sequence[DeviceEnergy]) -> str | None:
    """Returns why the machines cannot be summed; None if they all measure the same parts."""
    covers: dict[str, set[str]] = {node.boot: set() for node in nodes}
    for each in counted:
        covers[each.boot].add(each.channel.domain)
    most = max(covers.values(), key=len)
    for node in nodes:
        if covers[node.boot] != most:
            here = ", ".join(sorted(covers[node.boot])) or "nothing"
            others = ", ".join(sorted(most))
            return f"node {node.node} ({node.host}) measures {here}, another node {others}"
    return None


def _total(parts: Sequence[tuple[DeviceEnergy, Energy]], uneven: str | None) -> dict[str, Any]:
    energies, watts = [], []
    for each, energy in parts:
        if energy.energy_j is None or energy.mean_w is None:
            where = f"{each.channel.device} of node {each.node}"
            uneven = uneven or f"{where}: {energy.reason}"
        else:
            energies.append(energy.energy_j)
            watts.append(energy.mean_w)
    if uneven is not None:
        return {"kind": "absent", "reason": uneven}
    kind = worst(energy.kind for _, energy in parts)
    few = any(energy.few_samples for _, energy in parts)
    sums = {"kind": kind, "energy_j": sum(energies), "mean_w": sum(watts)}
    return sums | ({"few_samples": True} if few else {})


def _groups(
    devices: Sequence[DeviceEnergy], counted: set[DeviceEnergy]
) -> list[records.DeviceGroup]:
    """Returns the devices of all nodes, grouped by kind: a job may have thousands of GPUs."""
    names = ("label", "domain", "source", "reading", "resolution_s")
    alike: dict[tuple[Any, ...], list[DeviceEnergy]] = {}
    for each in devices:
        alike.setdefault((*attrgetter(*names)(each.channel), each in counted), []).append(each)
    return [
        records.DeviceGroup(
            **dict(zip((*names, "counted"), key, strict=True)),
            num_devices=len(group),
            nodes=(group[0].node, group[-1].node),
            phases={
                name: records.DeviceEnergies(**_energies([each.phases[name] for each in group]))
                for name in group[0].phases
                if all(name in each.phases for each in group)
            },
            **_energies([each.total for each in group]),
        )
        for key, group in alike.items()
    ]


def _energies(of_devices: Sequence[Energy]) -> dict[str, Any]:
    """Returns the fields of DeviceEnergies for the energies of some devices in one interval."""
    facts: dict[str, Any] = {
        "kind": worst(each.kind for each in of_devices),
        "num_samples": min(each.num_samples for each in of_devices),
    }
    reasons = dict.fromkeys(each.reason for each in of_devices if each.reason is not None)
    if reasons:
        facts["reasons"] = list(reasons)
    if any(each.few_samples for each in of_devices):
        facts["few_samples"] = True
    if any(each.energy_j is not None for each in of_devices):
        facts["energy"] = Joules.over([each.energy_j for each in of_devices])
        facts["power"] = Watts.over([each.mean_w for each in of_devices])
    return facts
