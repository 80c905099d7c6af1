"""Cases of each kernel, with expected results; `python -m mxjax.kernels.cases` compiles without a GPU."""
