"""NT3's script, in which SLOW_RANKS sleep for SLOW_S seconds before they communicate."""

import os
import sys
import time

sys.path.insert(0, os.environ["NT3_FOLDER"])

from candle_p1 import train
from candle_p1.distributed.comm import connect
from candle_p1.distributed.reducers.reducer import GraphReducer
from nt3 import BENCHMARK, Nt3

is_slow = str(connect().rank) in os.environ["SLOW_RANKS"].split(",")
delay_s = float(os.environ["SLOW_S"]) if is_slow else 0.0
broadcast = GraphReducer.broadcast


def broadcast_slowly(*arguments):
    time.sleep(10 * delay_s)
    broadcast(*arguments)


def slow_callbacks(self, params):
    import keras

    # Longer at the begin of an epoch, since validation also takes the ranks different times.
    return [
        keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: time.sleep(10 * delay_s),
            on_train_batch_begin=lambda batch, logs: time.sleep(delay_s),
        )
    ]


GraphReducer.broadcast = broadcast_slowly
Nt3.callbacks = slow_callbacks
train.main(BENCHMARK)
