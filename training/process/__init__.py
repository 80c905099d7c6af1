"""The program around a run: start, environment, other processes, failures and signals."""
