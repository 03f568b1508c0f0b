"""What the environment says about the watchdog. That of rank 0 decides for all ranks."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

from candle_p1.distributed.job_guard import STOPPED_S, STOPPED_VARIABLE, limit_from
from candle_p1.distributed.launch_environment import read_number
from candle_p1.errors import SetupError

OFF_VARIABLE = "CANDLE_P1_WATCHDOG"
"""If it is "off" or 0, nobody watches the run."""
INTERFACE_VARIABLE = "CANDLE_P1_WATCHDOG_INTERFACE"
PORT_VARIABLE = "CANDLE_P1_WATCHDOG_PORT"
GROUP_VARIABLE = "CANDLE_P1_WATCHDOG_GROUP"
GROUP = 512
"""How many ranks one process watches."""
SILENT_VARIABLE = "CANDLE_P1_SILENT_S"
SILENT_S = 20.0
"""How long a rank may be silent while others are not, and a node may not answer."""
HUNG_VARIABLE = "CANDLE_P1_HUNG_S"
HUNG_S = 300.0
"""How long the other ranks may wait for one in training."""
PATIENCE = 6
"""In other phases they may wait so many times as long: one rank may make the data, or have to load
its libraries from a slow file system."""
SAVE_VARIABLE = "CANDLE_P1_SAVE_S"
SAVE_S = 45.0
"""How long a run may take to save and end after SIGUSR1 or SIGUSR2."""


@dataclass(frozen=True)
class Limits:
    """Times in s; infinite where a variable is 0.

    Attributes:
        stopped_s: How long a process may be stopped (SIGSTOP) while others run.
        silent_s: See SILENT_S.
        hung_s: See HUNG_S.
        save_s: See SAVE_S.
    """

    stopped_s: float
    silent_s: float
    hung_s: float
    save_s: float

    @classmethod
    def from_environment(cls) -> Limits:
        """Returns those of this process's environment.

        Raises:
            SetupError: A variable is not a number of seconds.
        """
        return cls(
            limit_from(STOPPED_VARIABLE, STOPPED_S),
            limit_from(SILENT_VARIABLE, SILENT_S),
            limit_from(HUNG_VARIABLE, HUNG_S),
            limit_from(SAVE_VARIABLE, SAVE_S),
        )


def is_off() -> bool:
    """Whether nobody is to watch the run.

    Raises:
        SetupError: The variable says something else.
    """
    text = os.environ.get(OFF_VARIABLE, "on").lower()
    if text not in ("", "on", "1", "off", "0"):
        raise SetupError(f"{OFF_VARIABLE}={text!r}: give on or off")
    return text in ("off", "0")


def port() -> int:
    """Returns the port on which the server is to listen; 0: any that is free.

    Raises:
        SetupError: It is not a port.
    """
    return read_number(PORT_VARIABLE, 0, "a port, from 1 to 65535", most=65_535)


def group() -> int:
    """Returns how many ranks one process is to watch.

    Raises:
        SetupError: The variable is not a number.
    """
    return read_number(GROUP_VARIABLE, GROUP, "a number of ranks", most=1_000_000) or GROUP


def interface() -> str:
    """Returns the network interface on which nodes are to connect to each other; "": any."""
    return os.environ.get(INTERFACE_VARIABLE, "")


def addresses(chosen: str) -> list[str]:
    """Returns the addresses by which other nodes may reach this one: IPv4, and its name at the end.

    Args:
        chosen: The interface, by its name or address, to which they are restricted; "": none.

    Raises:
        SetupError: The interface that was chosen has no address here.
    """
    found = {
        name: [each.address for each in of_one if each.family == socket.AF_INET]
        for name, of_one in psutil.net_if_addrs().items()
    }
    if chosen:
        wanted = found.get(chosen) or [
            each for of_one in found.values() for each in of_one if each == chosen
        ]
        if not wanted:
            there = ", ".join(f"{name} ({', '.join(each)})" for name, each in found.items() if each)
            raise SetupError(
                f"{INTERFACE_VARIABLE}={chosen!r}: {socket.gethostname()} has no network interface"
                f" with this name or IPv4 address; there are {there or 'none'}"
            )
        return wanted
    every = [each for of_one in found.values() for each in of_one if not each.startswith("127.")]
    return [*every, socket.gethostname()]
