"""Examines all nodes of a job before it starts, to see whether they have what the job needs.

Started as ``python -m candle_p1.cluster.preflight``. Every rank collects facts about its node; rank
0 checks them, and shows one table, or one error that names the nodes (examination).
"""
