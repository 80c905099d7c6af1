"""The commands of eval.py: finished runs are restored, sampled, compared and diagnosed."""
