"""Checkpoints on disk: their format, writing them beside training, keeping and reading them.

::

    writer        CheckpointWriter: what training calls, on every rank
    planner       ShardPlanner: which ranks write which shards
    arrays        the rows of arrays that a shard holds, and its bytes
    shard_file    the copy of the state, and writing it so that it survives a power failure
    commit        CommitThread and PendingCheckpoint: what happens beside training
    manifest      what a checkpoint says about itself
    checkpoint    Checkpoint: reading and verifying one
    root          CheckpointRoot: those of a directory, and which of them to resume from
    lock          whether a process is alive, on any node
    stale_files   what writers that were killed have left behind
    policy, best  when an epoch is saved, which checkpoints are kept, which is the best
"""
