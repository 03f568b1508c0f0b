"""Nodes are apart from each other and from this machine, and leave nothing on it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.cluster.nodes import Cluster
from tests.conftest import ROOT, wait_until

pytestmark = pytest.mark.cluster

PORT = "20600"
LISTEN = f"""
import socket
with socket.create_server(("", {PORT})) as server:
    print("ready", flush=True)
    while True:
        server.accept()[0].close()
"""
CONNECT = f"""
import socket
try:
    socket.create_connection(("node1", {PORT}), timeout=1).close()
except OSError as error:
    print(type(error).__name__)
else:
    print("connected")
"""
KILLED = """
import os, subprocess, sys
from tests.cluster.nodes import Cluster
with Cluster(2, sys.argv[1]) as cluster:
    command = cluster.nodes[1].enter("setsid", "sh", "-c", "echo entered; exec sleep 1000")
    sleeping = subprocess.Popen(command, stdout=subprocess.PIPE)
    sleeping.stdout.readline()
    print(sleeping.pid, *(node.pid for node in cluster.nodes), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_nodes_have_only_their_network_in_common(cluster, start, tmp_path):
    nodes = cluster(2)
    other_directory = tmp_path / "other"
    other_directory.mkdir()
    with Cluster(2, other_directory) as others:  # another one, at the same time
        for each in (*nodes.nodes, *others.nodes):
            each.run("sh", "-c", f"> /dev/shm/{each.name}; > {each.temporary}/{each.name}")
        for each in (*nodes.nodes, *others.nodes):
            assert each.run("cat", "/proc/sys/kernel/hostname").strip() == each.name
            assert each.shared_memory() == [each.name]
            assert each.run("ls", each.temporary).split() == [each.name]
        assert list((tmp_path / "cluster/temporary").iterdir()) == []
        one, two = nodes.nodes
        server = start(one.enter(sys.executable, "-c", LISTEN))
        assert server.stdout.readline() == "ready\n"

        def connect(node):
            return node.run(sys.executable, "-c", CONNECT).strip()

        assert connect(two) == "connected"
        assert connect(others.nodes[1]) == "ConnectionRefusedError"
        assert [each.pid for each in one.processes()] == [server.pid]
        assert f"pid={server.pid}" in nodes.await_silence(0)
        one.reject("--dport", PORT)
        assert connect(two) == "ConnectionRefusedError"
        one.run("iptables", "-F")
        assert connect(two) == "connected"
        nodes.cut(one)
        assert connect(two) == "TimeoutError"


def test_nodes_vanish_with_the_process_that_made_them(missing, tmp_path):
    if missing:
        pytest.skip(missing)
    maker = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    pids = [int(word) for word in maker.stdout.split()]
    assert len(pids) == 3
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 20)
