"""The kernels of matrix products. Importing one without Triton says what to install, as `launch` does."""

from mxjax.kernels import launch as launch
