"""`eval.py compare`: runs beside each other, in groups that differ in the seed alone.

`runs` reads and groups them, `losses` measures their differences to a baseline, paired by seed,
`plot` draws the curves, `compare` prints it all.
"""
