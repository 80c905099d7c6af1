"""`eval.py report`: one HTML file that says what a run was, what it reached, and how to repeat it.

Every number comes from the files of the runs. The page loads nothing and runs no script.
"""
