"""The kernels of causal attention. Importing one without Triton says what to install, as `launch` does."""

from mxjax.kernels import launch as launch
