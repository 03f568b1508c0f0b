"""What a job needs, examined on all of its nodes before it starts.

Started as ``python -m candle_p1.cluster.preflight``. Every rank says what it finds (facts); rank 0
judges (checks), and shows one table, or one error that names the nodes (examination).
"""
