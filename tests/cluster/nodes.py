"""Several nodes on one Linux machine, for tests.

A node is a process with namespaces of its own: a network with an interface ``eth0`` at a switch
that all nodes share, a host name, and mounts, with an empty ``/dev/shm``, a directory for temporary
files and an ``/etc/hosts`` that has all nodes. Process ids and the other directories are those of
the machine, as on a cluster with a shared file system. Open MPI starts its daemons through a script
that takes the place of ssh.

Everything is within the namespaces, so nothing is named on the machine, and it vanishes with the
processes. These end with the one that made them, however that ends.
"""

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
KINDS = ("--net", "--uts", "--mount", "--ipc")
"""The namespaces of a node, as options of unshare."""
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
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$3"
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


def what_is_missing():
    """Returns why this machine cannot have nodes; None if it can."""
    if not sys.platform.startswith("linux"):
        return "nodes are made from Linux's namespaces"
    if os.geteuid() != 0:
        return "only root can make nodes"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    script = f"set -e; mount -t tmpfs tmpfs /dev/shm; ip link add {SWITCH} type bridge; iptables -S"
    tried = subprocess.run(["unshare", *KINDS, "sh", "-c", script], capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def in_container(command, *, private_tmpdir=False, shm="50%"):
    """Returns the command that runs another one with a ``/dev/shm`` of its own."""
    script = CONTAINER.format(shm=shm) + PRIVATE_TMPDIR * private_tmpdir + 'exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *command]


class Namespaces:
    """A process that keeps namespaces alive, in which it first runs a script with its arguments."""

    def __init__(self, kinds, script="", *arguments):
        self._kinds = kinds
        command = ["unshare", *kinds, "bash", "-c", script + HOLD, "bash", *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._holder = subprocess.Popen(command, **pipes, start_new_session=True)
        self.pid = self._holder.pid
        if self._holder.stdout.readline() != "ready\n":
            self.close()
            raise OSError(f"a node could not be made: {script} {arguments}")

    def close(self):
        """Kills all processes in the namespaces, with which these vanish."""
        self._holder.stdin.close()
        self._holder.wait(END_S)
        self._holder.stdout.close()

    def enter(self, *command):
        """Returns the command line that runs a command in the namespaces."""
        return ["nsenter", "--target", str(self.pid), *self._kinds, *map(str, command)]

    def run(self, *command):
        """Runs a command in the namespaces."""
        options = {"capture_output": True, "text": True, "timeout": END_S}
        done = subprocess.run(self.enter(*command), **options)
        assert done.returncode == 0, f"{shlex.join(map(str, command))}: {done.stderr}"


class Node(Namespaces):
    """A node: its host name, its IPv4 address, and the directory that it has for itself."""

    def __init__(self, name, address, hosts, temporary):
        self.name, self.address, self.temporary = name, address, temporary
        super().__init__(KINDS, NODE, name, hosts, temporary)

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

    def shape(self, *discipline):
        """Delays or limits what the node sends, by the words of a queueing discipline of tc.

        Returns whether this kernel has the discipline.
        """
        tc = ["tc", "qdisc", "add", "dev", INTERFACE, "root", *discipline]
        done = subprocess.run(self.enter(*tc), capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "kind is unknown" in done.stderr, done.stderr
        return done.returncode == 0


class Cluster:
    """Nodes named node1, node2 and so on, at one switch, for jobs that run in a directory."""

    def __init__(self, num_nodes, directory):
        self._work = Path(directory)
        self._directory = self._work / "cluster"
        self._temporary = self._directory / "temporary"
        self._stack = ExitStack()
        self._names = [f"node{i + 1}" for i in range(num_nodes)]
        self.nodes = []

    def __enter__(self):
        with self._stack:
            self._make()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def _make(self):
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

        Nodes without a number of ranks have none. Ranks run what `wrap` returns for their command.
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
