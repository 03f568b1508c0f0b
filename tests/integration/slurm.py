"""A Slurm for tests, with its daemons but without root's directories.

It has one node, this machine, or those that tests/cluster/nodes.py makes.
"""

import contextlib
import ctypes
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

CPUS = 8
"""The number that Slurm is configured with, so that several jobs of two ranks run at once."""
START_S = 30
DAEMONS = ("munged", "slurmctld", "slurmd")
SBIN = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=pmix
MinJobAge=86400
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """Returns which part of Slurm is missing on this machine; None if none is."""
    for command in (*DAEMONS, "sbatch", "srun"):
        if shutil.which(command, path=SBIN) is None:
            return f"{command} is not installed"
    try:
        ctypes.CDLL("libpmix.so")  # which is how Slurm's plugin finds it
    except OSError:
        return "libpmix.so is not installed (Debian: libpmix-dev)"
    return None


class Slurm:
    """The daemons, on the nodes of a cluster or here."""

    def __init__(self, directory, nodes=()):
        self.directory, self._nodes = directory, nodes
        self.environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf")}
        self._daemons = []

    def start(self):
        """Starts the daemons; returns when the nodes accept jobs."""
        places = {node.name: node.address for node in self._nodes}
        places = places or {socket.gethostname().partition(".")[0]: "127.0.0.1"}
        for name in ("state", "pmix", *(f"spool-{host}" for host in places)):
            (self.directory / name).mkdir()
        self.directory.chmod(0o755)  # munged wants its socket where all users can reach it
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        controller_port, node_port = free_ports(2)
        settings = {"controller_port": controller_port, "node_port": node_port}
        settings["host"], settings["address"] = next(iter(places.items()))
        settings["nodes"] = "\n".join(
            f"NodeName={host} NodeAddr={address} CPUs={CPUS} State=UNKNOWN"
            for host, address in places.items()
        )
        configuration = CONFIGURATION.format(
            user=getpass.getuser(), directory=self.directory, **settings
        )
        (self.directory / "slurm.conf").write_text(configuration)
        # Two Slurms number their jobs alike, so they must not share the directories of PMIx.
        temporary = self._nodes[0].temporary if self._nodes else self.directory / "pmix"
        (self.directory / "mpi.conf").write_text(f"PMIxCliTmpDirBase={temporary}\n")
        files = {f"{kind}-file": f"munge.{kind}" for kind in ("key", "pid", "seed")}
        files |= {"log-file": "munged.log", "socket": "munge.socket"}
        options = [f"--{name}={self.directory}/{file}" for name, file in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        self._await(lambda: (self.directory / "munge.socket").exists(), "munged")
        self._start("slurmctld", "-D")
        for node in self._nodes:
            self._start("slurmd", "-D", "-N", node.name, node=node)
        if not self._nodes:
            self._start("slurmd", "-D")
        states = "sinfo", "--Node", "--noheader", "--format=%T"
        self._await(lambda: self.say(*states).split() == ["idle"] * len(places), "the nodes")

    def stop(self):
        self.say("scancel", f"--user={getpass.getuser()}")
        self._await(lambda: not self.say("squeue", "--noheader").strip(), "the end of jobs")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()

    def say(self, *command):
        done = subprocess.run(
            self.here(*command), check=False, capture_output=True, text=True, env=self.environment
        )
        return done.stdout + done.stderr

    def here(self, *command):
        return self._nodes[0].enter(*command) if self._nodes else command

    def state(self, job):
        """Returns the state of a job, such as RUNNING or COMPLETED, or an error."""
        return self.say("squeue", f"--jobs={job}", "--states=all", "--noheader", "--format=%T")

    def has_ended(self, job):
        """Whether a job has ended; not if Slurm has no time to answer, either."""
        state = self.state(job).strip()
        return state.isupper() and not state.startswith(("PENDING", "RUNNING", "COMPLETING"))

    def logs(self):
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-4000:]}" for path in self.directory.glob("*.log")
        )

    def _start(self, name, *options, node=None):
        command = [shutil.which(name, path=SBIN), *options]
        command = node.enter(*command) if node else self.here(*command)
        log = f"{name}-{node.name}" if node else name
        with (self.directory / f"{log}.out.log").open("w") as output:
            self._daemons.append(
                subprocess.Popen(command, stdout=output, stderr=output, env=self.environment)
            )

    def _await(self, condition, what):
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {START_S} s for {what}\n{self.logs()}")
            time.sleep(0.2)


@contextlib.contextmanager
def running(nodes=(), **variables):
    """Starts a Slurm with further variables of the environment; skips where Slurm is missing."""
    if reason := missing():
        pytest.skip(f"no Slurm: {reason}")
    directory = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # sockets need a short path
    slurm = Slurm(directory, nodes)
    slurm.environment |= variables
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(directory)


def free_ports(num):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
