"""The study of the paper's ladder: which GEMM breaks FP4 training, and what mends it.

`cells` is the table of what is trained, `runner` trains it, `statistics` compares runs paired by seed, and
`report` writes tables from the runs' JSON files.
"""
