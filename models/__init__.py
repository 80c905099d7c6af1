"""Models whose linear layers run through `mxjax.dot`."""
