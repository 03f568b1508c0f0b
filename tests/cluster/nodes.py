"""Several nodes on one Linux machine, for tests.

A node is a process with namespaces of its own: a network with an interface ``eth0`` at a switch
that all nodes share, a host name, and mounts, with an empty ``/dev/shm``, a directory for temporary
files and an ``/etc/hosts`` that has all nodes. Process ids and the other directories are those of
the machine, as on a cluster with a shared file system. Open MPI starts its daemons through a script
that takes the place of ssh.

Everything is within the namespaces, so nothing is named on the machine, and it vanishes with the
processes. These end with the one that made them, however that ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from candle_p1.cluster import launchers

PROGRAMS = ("ip", "iptables", "mount", "nsenter", "unshare")
INTERFACE = "eth0"
SWITCH = "switch"
SESSIONS = ("ompi.", "prted.")
END_S = 20
"""How long the processes of a node may take to end once they have been killed."""

# Ends when the input is closed, which happens also if the process that made the node is killed.
HOLD = """
echo ready
read -r _ || true
left=yes
while [ -n "$left" ]; do  # until none has been started meanwhile
  left=
  for each in /proc/[0-9]*; do
    if [ "$each" != "/proc/$$" ] && [ "$each/ns/net" -ef "/proc/$$/ns/net" ]; then
      kill -KILL "${each#/proc/}" && left=yes
    fi
  done
done
"""
NODE = """
set -e
name=$1 address=$2 hosts=$3 temporary=$4
echo "$name" > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$temporary"
mount --bind "$hosts" /etc/hosts
ip link set lo up
"""
AGENT = """#!/bin/sh
# Runs a command on a node, as ssh does.
node=$1
shift
target=$(cat {directory}/"$node".pid) || exit 255
exec nsenter --target "$target" --net --uts --mount --ipc sh -c "$*"
"""
CONTAINER = """
mount -t tmpfs -o size={shm} tmpfs /dev/shm || exit
"""
PRIVATE_TMPDIR = """
mkdir -p "$TMPDIR/own" && export TMPDIR="$TMPDIR/own" && mount -t tmpfs tmpfs "$TMPDIR" || exit
"""


def what_is_missing() -> str | None:
    """Returns why this machine cannot have nodes; None if it can."""
    if not sys.platform.startswith("linux"):
        return "nodes are made from Linux's namespaces"
    if os.geteuid() != 0:
        return "only root can make nodes"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    script = f"set -e; mount -t tmpfs tmpfs /dev/shm; ip link add {SWITCH} type bridge; iptables -S"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--ipc", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def in_container(command, *, private_tmpdir=False, shm="50%"):
    """Returns the command that runs another one with a ``/dev/shm`` of its own."""
    script = CONTAINER.format(shm=shm) + PRIVATE_TMPDIR * private_tmpdir + 'exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *command]


class Namespaces:
    """A process that keeps namespaces alive, and what is done in them.

    Args:
        kinds: The namespaces, as options of unshare.
        script: What is done first in them, with its arguments.
    """

    def __init__(self, kinds, script="", *arguments) -> None:
        self._kinds = kinds
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "bash", "-c", script + HOLD, "bash", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._holder.pid
        if self._holder.stdout.readline() != "ready\n":
            self.close()
            raise OSError(f"a node could not be made: {script} {arguments}")

    def close(self) -> None:
        """Kills all processes in the namespaces, with which these vanish."""
        self._holder.stdin.close()
        self._holder.wait(END_S)
        self._holder.stdout.close()

    def enter(self, *command):
        """Returns the command line that runs a command in the namespaces."""
        return ["nsenter", "--target", str(self.pid), *self._kinds, *map(str, command)]

    def run(self, *command):
        """Runs a command in the namespaces; returns what it prints."""
        done = subprocess.run(
            self.enter(*command), capture_output=True, text=True, check=False, timeout=END_S
        )
        assert done.returncode == 0, f"{shlex.join(map(str, command))}: {done.stderr}"
        return done.stdout


class Node(Namespaces):
    """A node.

    Attributes:
        name: Its host name.
        address: Its IPv4 address.
        temporary: The directory that it has for itself.
    """

    def __init__(self, name, address, hosts, temporary) -> None:
        self.name, self.address, self.temporary = name, address, temporary
        kinds = ("--net", "--uts", "--mount", "--ipc")
        super().__init__(kinds, NODE, name, address, hosts, temporary)

    def processes(self):
        """Returns the processes that run on the node."""
        network, found = Path(f"/proc/{self.pid}/ns/net"), []
        for pid in psutil.pids():
            with suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                same = Path(f"/proc/{pid}/ns/net").samefile(network)
                if same and pid != self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def shared_memory(self):
        """Returns the names of the files in the node's ``/dev/shm``."""
        return sorted(each.name for each in Path(f"/proc/{self.pid}/root/dev/shm").iterdir())

    def sessions(self):
        """Returns the names of the directories that Open MPI's launcher and daemons have made."""
        temporary = Path(f"/proc/{self.pid}/root{self.temporary}")
        return sorted(each.name for each in temporary.iterdir() if each.name.startswith(SESSIONS))

    def reject(self, *match, silently=False):
        """Lets no packets of a kind in: answers with a reset of the connection, or not at all."""
        target = ["DROP"] if silently else ["REJECT", "--reject-with", "tcp-reset"]
        self.run("iptables", "-A", "INPUT", "-p", "tcp", *match, "-j", *target)

    def drop_all(self):
        """Lets no packet of the network in or out, as behind a switch that has lost its power."""
        self.run("iptables", "-A", "INPUT", "-i", INTERFACE, "-j", "DROP")
        self.run("iptables", "-A", "OUTPUT", "-o", INTERFACE, "-j", "DROP")

    def shape(self, *discipline):
        """Delays or limits what the node sends, by the words of a queueing discipline of tc.

        Returns whether this kernel has the discipline.
        """
        tc = ["tc", "qdisc", "add", "dev", INTERFACE, "root", *discipline]
        done = subprocess.run(self.enter(*tc), capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "kind is unknown" in done.stderr, done.stderr
        return done.returncode == 0


class Cluster:
    """Nodes named node1, node2 and so on, at one switch; a context manager.

    Args:
        num_nodes: How many nodes.
        directory: Where jobs run; the files of the cluster are in a directory in it.
    """

    def __init__(self, num_nodes, directory) -> None:
        self._work = Path(directory)
        self._directory = self._work / "cluster"
        self._temporary = self._directory / "temporary"
        self._stack = ExitStack()
        self._names = [f"node{i + 1}" for i in range(num_nodes)]
        self.nodes: list[Node] = []

    def __enter__(self):
        with self._stack:
            self._make()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def _make(self) -> None:
        self._temporary.mkdir(parents=True)
        addresses = {name: f"10.0.0.{i + 1}" for i, name in enumerate(self._names)}
        hosts = self._directory / "hosts"
        lines = [f"{address} {name}" for name, address in addresses.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._agent = self._directory / "agent"
        self._agent.write_text(AGENT.format(directory=shlex.quote(str(self._directory))))
        self._agent.chmod(0o755)
        self._switch = self._keep(Namespaces(("--net",)))
        self._switch.run("ip", "link", "add", SWITCH, "up", "type", "bridge")
        for name, address in addresses.items():
            node = self._keep(Node(name, address, hosts, self._temporary))
            (self._directory / f"{name}.pid").write_text(str(node.pid))
            ends = [INTERFACE, "netns", str(node.pid), "type", "veth", "peer", "name", name]
            subprocess.run(["ip", "link", "add", *ends, "netns", str(self._switch.pid)], check=True)
            self._switch.run("ip", "link", "set", name, "up", "master", SWITCH)
            node.run("ip", "address", "add", f"{address}/24", "dev", INTERFACE)
            node.run("ip", "link", "set", INTERFACE, "up")
            self.nodes.append(node)

    def _keep(self, namespaces):
        self._stack.callback(namespaces.close)
        return namespaces

    def mpirun(self, num_ranks_of_nodes, *argv, wrap=list):
        """Returns the command line that starts ranks of a Python script from the first node.

        Args:
            num_ranks_of_nodes: The number of ranks on each node; nodes that are missing have none.
            argv: The script and its arguments.
            wrap: Returns what a rank runs in place of a command, such as `in_container`.
        """
        command = wrap([sys.executable, *map(str, argv)])
        program, *rest = launchers.mpirun(sum(num_ranks_of_nodes), command).command
        here = rest.index("--host")
        del rest[here : here + 2]
        used = zip(self._names, num_ranks_of_nodes, strict=False)
        settings = {"plm_ssh_agent": str(self._agent), "prte_if_include": INTERFACE}
        options = [word for name, value in settings.items() for word in ("--prtemca", name, value)]
        options += ["--host", ",".join(f"{name}:{num}" for name, num in used)]
        return self.on_first_node([program, *options, *rest])

    def on_first_node(self, command):
        """Returns the command line that runs a command on node 1, in the directory of jobs."""
        variables = {"TMPDIR": self._temporary, "PRTE_MCA_prte_tmpdir_base": self._temporary}
        words = [f"{name}={value}" for name, value in variables.items()]
        within = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", self._work]
        return self.nodes[0].enter("env", *words, *within, *command)

    def cut(self, node):
        """Pulls the cable of a node out of the switch."""
        self._switch.run("ip", "link", "set", node.name, "down")

    def lose_packets(self, node, *, is_losing):
        """Loses what a node sends and is sent, in the switch; or not any more."""
        state = "0" if is_losing else "3"  # disabled, forwarding
        self._switch.run("bridge", "link", "set", "dev", node.name, "state", state)

    def await_silence(self, limit_s):
        """Waits until nothing runs on any node; returns what is left at the limit, as text."""
        deadline = time.monotonic() + limit_s
        while left := [each for node in self.nodes for each in node.processes()]:
            if time.monotonic() > deadline:
                return "; ".join(map(str, left))
            time.sleep(0.1)
        return ""
