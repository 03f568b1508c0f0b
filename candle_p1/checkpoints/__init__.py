"""Checkpoints on disk: their format, writing them beside training, keeping and reading them.

::

    writer        CheckpointWriter: what training calls, on every rank
    source        where the values of an array come from
    layout        which rows of which array are in a part, and the part's bytes
    sharing       which ranks write the parts
    memory        the copy of the state from which a part is written
    job           a rank's thread: it writes a part
    part_file     writing a file so that it survives a power failure; hashing it
    completing    rank 0's thread: it waits for all parts
    publisher     completing a checkpoint, naming it, removing those that are not kept
    manifest      what a checkpoint says about itself
    statistics    what was saved, what it cost, what failed
    checkpoint    Checkpoint: reading and verifying one
    root          CheckpointRoot: those of a directory, and which of them to go on from
    leftovers     what writers that were killed have left behind
    policy, best  when an epoch is saved, which checkpoints are kept, which is the best
"""
