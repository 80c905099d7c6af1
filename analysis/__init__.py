"""What eval.py does with finished runs: restores, samples, compares and diagnoses them."""
