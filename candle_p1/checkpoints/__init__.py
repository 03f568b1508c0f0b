"""Checkpoints on disk: their format, writing them beside training, keeping and reading them.

::

    writer        CheckpointWriter: what training calls, on every rank
    shards        which ranks write which rows of arrays, and writing that survives a power failure
    commit        CommitThread and PendingCheckpoint: what happens beside training
    manifest      what a checkpoint says about itself
    checkpoint    Checkpoint, to read one; CheckpointRoot: which of a directory to resume from
    lock          whether a process is alive, on any node; what killed writers have left behind
    policy        when an epoch is saved, which checkpoints are kept, which is the best
"""
