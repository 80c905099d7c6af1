"""The study of the paper's ladder: which GEMM breaks FP4 training, and what repairs it.

`cells` defines cells and protocols and `studies` lists them; `runner` trains them. `results` gathers the
runs, `tuning` chooses learning rates, `tokens` turns losses into tokens, and `report` writes
docs/results/study.md from `tables`, `token_tables` and `plots`.
"""
