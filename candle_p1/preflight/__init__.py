"""What a job needs, looked at on all its nodes before it starts: ``python -m candle_p1.preflight``.

Every rank says what it finds (facts); rank 0 judges (checks), and shows one table, or one error
that names the nodes (examination).
"""
