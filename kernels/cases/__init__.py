"""What is asked of each kernel, and the answer; `python -m mxjax.kernels.cases` compiles without a GPU."""
