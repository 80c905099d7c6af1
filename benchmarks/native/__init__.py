"""Checks of training on real devices: meshes, interruptions, memory and the flags of `train.py`.

Each check starts `train.py` and `eval.py` as a user does and compares what they leave. `plan` lists the
checks, `lanes` runs them, and `table` writes the Markdown table. The checks are in `resuming`, `meshes`,
`memory`, `features` and `sharded`. `work` is what a check works with, `sizes` what its runs are like,
`program` a program that runs. `runs` and `states` compare what runs left. `products` multiplies on devices.
"""
