"""The bandwidth that is fitted between nodes is the one that they have."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.cluster

LIMIT_S = 300
# A token bucket: some kernels lack netem.
RATE_BYTES_PER_S, LINK = 25e6, ["tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms"]
OF_LINK, OF_MEASURED = 0.15, 0.10
"""How far the fitted bandwidth may be from that of the link, and of large messages."""
NUM_TRIES = 3
"""Other programs on this machine disturb messages."""
COMM = ["-m", "candle_p1.cli", "bench", "comm", "--transport", "mpi", "--no_overlap"]


@pytest.fixture
def measure(cluster, execute, tmp_path):
    """Measures between two nodes whose link is limited, with the command; returns its report."""

    def measure(num_ranks_of_nodes, operations, *flags):
        nodes = cluster(2)
        for node in nodes.nodes:
            if not node.shape(*LINK):
                pytest.skip(f"this kernel has no {LINK[0]} (tc)")
        argv = [*COMM, "--operations", operations, *flags, "--json", "comm.json"]

        def run():
            code, output = execute(nodes.mpirun(num_ranks_of_nodes, *argv), LIMIT_S)
            print(output)
            assert code == 0, output
            assert f"communication of {sum(num_ranks_of_nodes)} ranks on 2 nodes" in output
            return json.loads((tmp_path / "comm.json").read_text())

        return run

    return measure


def test_the_fitted_bandwidth_is_that_of_the_link(measure):
    """Of messages one way at a time: TCP shares a queue badly with its own answers.

    In an allreduce of two ranks, each sends the whole array once, so the bus bandwidth is that of
    the link, too.
    """
    flags = ["--min_bytes", "4096", "--max_bytes", str(1 << 22), "--seconds", "1"]
    run = measure([1, 1], "point_to_point,allreduce", *flags)
    for _ in range(NUM_TRIES):
        fits = {fit["operation"]: fit for fit in run()["fits"]}
        rate = fits["point_to_point"]["bandwidth_bytes_per_s"]
        measured = fits["point_to_point"]["measured_bytes_per_s"]
        if rate == pytest.approx(RATE_BYTES_PER_S, rel=OF_LINK) and (
            rate == pytest.approx(measured, rel=OF_MEASURED)
        ):
            break
    else:
        pytest.fail(f"fitted: {rate / 1e6:.1f} MB/s, measured: {measured / 1e6:.1f} MB/s")
    reduced = fits["allreduce"]["bandwidth_bytes_per_s"]
    assert 0.3 * RATE_BYTES_PER_S < reduced < 1.15 * RATE_BYTES_PER_S


def test_messages_within_a_node_are_told_from_those_between_nodes(measure):
    operations = "point_to_point,point_to_point_on_node"
    report = measure([1, 2], operations, "--max_bytes", str(1 << 22))()
    rates = {fit["operation"]: fit["measured_bytes_per_s"] for fit in report["fits"]}
    assert rates["point_to_point_on_node"] > 2 * rates["point_to_point"]
