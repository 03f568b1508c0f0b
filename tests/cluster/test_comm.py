"""The bandwidth that is fitted between nodes is the one that they have."""

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
COMM += ["--operations", "point_to_point,point_to_point_on_node", "--seconds", "1"]
COMM += ["--min_bytes", "4096", "--max_bytes", str(1 << 22)]


def test_the_fitted_bandwidth_is_that_of_the_link(cluster, execute, tmp_path):
    """Of messages one way at a time: TCP shares a queue badly with its own answers."""
    nodes = cluster(2)
    for node in nodes.nodes:
        if not node.shape(*LINK):
            pytest.skip(f"this kernel has no {LINK[0]} (tc)")
    command = nodes.mpirun([1, 2], *COMM, "--json", "comm.json")
    for _ in range(NUM_TRIES):
        code, output = execute(command, LIMIT_S)
        print(output)
        assert code == 0, output
        assert "communication of 3 ranks on 2 nodes" in output
        report = json.loads((tmp_path / "comm.json").read_text())
        fits = {fit["operation"]: fit for fit in report["fits"]}
        rate = fits["point_to_point"]["bandwidth_bytes_per_s"]
        measured = fits["point_to_point"]["measured_bytes_per_s"]
        if rate == pytest.approx(RATE_BYTES_PER_S, rel=OF_LINK) and (
            rate == pytest.approx(measured, rel=OF_MEASURED)
        ):
            break
    else:
        pytest.fail(f"fitted: {rate / 1e6:.1f} MB/s, measured: {measured / 1e6:.1f} MB/s")
    assert fits["point_to_point_on_node"]["measured_bytes_per_s"] > 2 * measured
