"""The study of the paper's ladder: which GEMM breaks FP4 training, and what repairs it.

`cells` lists the runs, `runner` trains them, `statistics` compares runs paired by seed, and `report` makes
tables from the runs' JSON files.
"""
