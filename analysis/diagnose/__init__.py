"""`eval.py diagnose`: the errors of every GEMM of a trained model, on real batches, and what repeats in them.

`capture` takes tensors out of a forward and backward pass, `measures` measures them, `wgrad` and `split`
separate the error that repeats from batch to batch from the error that averages out, `diagnose` gathers it
all as numbers, `tables` and `plots` show them.
"""
