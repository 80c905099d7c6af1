"""The library on JAX: devices, keys, primitives, meshes, remat. It imports nothing else of mxjax."""
