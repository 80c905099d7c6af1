"""The study of the paper's ladder: which GEMM breaks FP4 training, and what repairs it.

`cells` defines cells and protocols and `studies` lists them; `train` trains them. `results` gathers the runs,
and `report` writes docs/study.md and the CSV files from `tables`, `claims`, `token_tables` and `plots`.
"""
