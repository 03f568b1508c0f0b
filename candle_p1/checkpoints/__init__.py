"""Checkpoints on disk: their format, writing them beside training, keeping and reading them.

::

    layout        which rank writes which rows of which array, and the bytes of a part
    manifest      what a checkpoint says about itself
    part_file     writing a file so that it survives a power failure; hashing it
    memory        the copy of the state from which it is written
    writer        CheckpointWriter: what training calls, on every rank
    job           what a rank does on its thread, and what rank 0 does to complete a checkpoint
    statistics    what was saved, what it cost, what failed
    checkpoint    Checkpoint: reading and verifying one
    root          CheckpointRoot: those of a directory, which is the latest, which are kept
    leftovers     what writers that were killed have left behind
"""
