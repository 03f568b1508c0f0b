"""What a record says of its ranks, the same whichever launcher started them."""

import socket


def assert_ranks(record, launcher, places, *, threads=1):
    """Asserts that ranks are where they were asked for, on this machine's CPUs.

    Args:
        record: Of the run.
        launcher: What started it.
        places: (node, local rank) of each rank.
        threads: Of each.
    """
    assert record["launcher"] == launcher
    assert record["num_ranks"] == len(places)
    assert record["num_nodes"] == len({node for node, _ in places})
    found = [
        (rank["rank"], rank["node"], rank["local_rank"], rank["host"]) for rank in record["ranks"]
    ]
    assert found == [(i, *place, socket.gethostname()) for i, place in enumerate(places)]
    assert {(rank["device"], rank["threads"]) for rank in record["ranks"]} == {("cpu", threads)}
