"""Energies of a job: per phase and device, and totals in which no device counts twice."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.records import types as records
from candle_p1.records.power_trace import KINDS, Energy, add, worst
from candle_p1.records.spread import Joules, Watts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.instrument.power.sampler import Sampler
    from candle_p1.records.power_trace import Channel, Domain

Interval = tuple[str, float, float]
"""The name of a phase, its begin and its end, in s by the sampler's clock."""


@dataclass(frozen=True)
class DeviceEnergy:
    """The energies of one device of one node.

    Attributes:
        channel: The sensor that read it.
        total: The energy of the run.
        phases: The energy of each phase.
    """

    channel: Channel
    total: Energy
    phases: dict[str, Energy]


@dataclass(frozen=True)
class NodeEnergy:
    """What one node measured; small enough to be gathered from all nodes.

    Attributes:
        node: The node's number.
        host: The node's name.
        boot: Identifies the machine; containers on the same machine have the same value.
        devices: The energies of the node's devices.
        power_hz: Samples per second.
        overhead: The share of a core that sampling used.
        absent: Sources that are not available, and why.
        notes: What to know when reading the energies.
        trace: The name of the file with the samples.
    """

    node: int
    host: str
    boot: str
    devices: list[DeviceEnergy]
    power_hz: float
    overhead: float | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    trace: str | None = None


def measure_node(
    sampler: Sampler,
    intervals: Sequence[Interval],
    *,
    node: int,
    absent: Mapping[str, str],
    trace: str | None = None,
) -> NodeEnergy:
    """Returns what a node measured in a run.

    Args:
        sampler: The node's sampler, stopped.
        intervals: The phases of the rank that samples; a phase entered twice appears twice. The
            total covers the time from the first begin to the last end, as far as it was sampled.
        node: The node's number.
        absent: Sources that are not available, and why.
        trace: The name of the file for the samples.
    """
    begin_s = max(min(begin for _, begin, _ in intervals), sampler.start_s)
    end_s = min(max(end for _, _, end in intervals), sampler.stop_s)
    devices = []
    for each in sampler.traces():
        phases: dict[str, list[Energy]] = {}
        for name, begin, end in intervals:
            phases.setdefault(name, []).append(each.energy(begin, end))
        total = each.energy(begin_s, end_s)
        summed = {name: add(parts) for name, parts in phases.items()}
        devices.append(DeviceEnergy(each.channel, total, summed))
    return NodeEnergy(
        node=node,
        host=platform.node(),
        boot=boot_id(),
        devices=devices,
        power_hz=sampler.hz,
        overhead=sampler.overhead,
        absent=absent,
        notes=sampler.notes,
        trace=trace if any(device.total.num_samples for device in devices) else None,
    )


def measure_so_far(sampler: Sampler, begin_s: float, node: int) -> NodeEnergy | None:
    """Returns the energy that a node has used until now; None if a sensor does not answer.

    Args:
        sampler: The node's sampler, which goes on.
        begin_s: When the run began, by the sampler's clock.
        node: The node's number.
    """
    traces = sampler.traces_so_far()
    if traces is None:
        return None
    begin_s = max(begin_s, sampler.start_s)
    end_s = min((float(each.times_s[-1]) for each in traces if len(each.times_s)), default=begin_s)
    devices = [DeviceEnergy(each.channel, each.energy(begin_s, end_s), {}) for each in traces]
    return NodeEnergy(node, platform.node(), boot_id(), devices, sampler.hz)


def boot_id() -> str:
    """Returns an identifier of this machine, valid since it was booted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def combine(nodes: Sequence[NodeEnergy]) -> records.EnergyFacts:
    """Returns the section ``energy`` of a run's record.

    A total is the sum over the devices that are ``counted``. If the energy of one of them is
    absent, or if nodes measure different parts, the total is absent as well: a partial sum is never
    shown as a total.

    Args:
        nodes: What each node measured, in order of their numbers.
    """
    devices = [_Device(node, device) for node in nodes for device in node.devices]
    counted, absent = _counted(devices), _absent_sources(nodes)
    reason = _why_uneven(nodes, counted)
    if not counted:
        reasons = [f"{each.source}: {each.reason}" for each in absent]
        reason = "; ".join(reasons) or "no source was read"
    total = _total([(each, each.device.total) for each in counted], reason)
    if "energy_j" in total:
        total["total_j"] = total.pop("energy_j")
        total["total_s"] = max(each.device.total.duration_s for each in counted)
    names = dict.fromkeys(name for each in counted for name in each.device.phases)
    phases = {
        name: [(each, each.device.phases[name]) for each in counted if name in each.device.phases]
        for name in names
    }
    overheads = [node.overhead for node in nodes if node.overhead is not None]
    return records.EnergyFacts(
        **total,
        covers=sorted({each.domain for each in counted}),
        phases={
            name: records.EnergyTotal(**_total(parts, reason)) for name, parts in phases.items()
        },
        devices=_groups(devices, set(counted)),
        absent=absent,
        power_hz=nodes[0].power_hz,
        sampler_overhead=max(overheads, default=None),
        notes=[f"node {node.node}: {note}" for node in nodes for note in node.notes],
        traces=[node.trace for node in nodes if node.trace],
    )


@dataclass(frozen=True, eq=False)
class _Device:
    """A device and the node that measured it."""

    node: NodeEnergy
    device: DeviceEnergy

    @property
    def host(self) -> str:
        return self.node.boot

    @property
    def domain(self) -> Domain:
        return self.device.channel.domain


def _counted(devices: Sequence[_Device]) -> list[_Device]:
    """Returns the devices included in the totals, so that every part of a machine counts once."""
    best: dict[tuple[str, str], _Device] = {}
    for each in sorted(devices, key=_preference):  # the sort keeps the order of nodes
        best.setdefault((each.host, each.device.channel.device), each)
    once = [each for each in devices if best[each.host, each.device.channel.device] is each]
    whole = {each.host for each in once if each.domain == "node"}
    modular = {each.host for each in once if each.domain == "module"}
    by_sensors = {(each.host, each.domain) for each in once if each.device.channel.sensor != "cray"}
    return [
        each
        for each in once
        if each.domain == "node"
        or (
            each.host not in whole
            and (each.domain == "module" or each.host not in modular)
            # A Cray's node controller also reads processors and GPUs that have their own sensors.
            and (each.device.channel.sensor != "cray" or (each.host, each.domain) not in by_sensors)
        )
    ]


def _preference(each: _Device) -> tuple[int, bool]:
    """Sort key for readings of one device: the better kind first, then an energy counter."""
    return KINDS.index(each.device.total.kind), each.device.channel.reading == "power"


def _why_uneven(nodes: Sequence[NodeEnergy], counted: Sequence[_Device]) -> str | None:
    """Returns why the machines cannot be summed; None if they all measure the same parts."""
    covers: dict[str, set[str]] = {node.boot: set() for node in nodes}
    for each in counted:
        covers[each.host].add(each.domain)
    most = max(covers.values(), key=len)
    for node in nodes:
        if covers[node.boot] != most:
            here = ", ".join(sorted(covers[node.boot])) or "nothing"
            others = ", ".join(sorted(most))
            return f"node {node.node} ({node.host}) measures {here}, another node {others}"
    return None


def _total(parts: Sequence[tuple[_Device, Energy]], uneven: str | None) -> dict[str, Any]:
    """Returns the sum over devices, in the form the record has."""
    energies, watts = [], []
    for each, energy in parts:
        if energy.energy_j is None or energy.mean_w is None:
            where = f"{each.device.channel.device} of node {each.node.node}"
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


def _absent_sources(nodes: Sequence[NodeEnergy]) -> list[records.AbsentSource]:
    """Returns each missing source and reason once, with the nodes where it is missing."""
    found: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        for source, reason in node.absent.items():
            found.setdefault((source, reason), []).append(node.node)
    return [
        records.AbsentSource(source=source, reason=reason, nodes=numbers)
        for (source, reason), numbers in found.items()
    ]


def _groups(devices: Sequence[_Device], counted: set[_Device]) -> list[records.DeviceGroup]:
    """Returns the devices of all nodes, grouped by kind: a job may have thousands of GPUs."""
    alike: dict[tuple[Any, ...], list[_Device]] = {}
    for each in devices:
        channel = each.device.channel
        key = (channel.label, channel.domain, channel.source, channel.reading, channel.resolution_s)
        alike.setdefault((*key, each in counted), []).append(each)
    return [
        records.DeviceGroup(
            label=label,
            domain=domain,
            source=source,
            reading=reading,
            resolution_s=resolution_s,
            counted=is_counted,
            num_devices=len(group),
            nodes=(group[0].node.node, group[-1].node.node),
            phases={
                name: records.DeviceEnergies(
                    **_energies([each.device.phases[name] for each in group])
                )
                for name in group[0].device.phases
                if all(name in each.device.phases for each in group)
            },
            **_energies([each.device.total for each in group]),
        )
        for (label, domain, source, reading, resolution_s, is_counted), group in alike.items()
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
