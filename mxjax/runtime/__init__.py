"""How JAX runs the library: devices, keys, primitives, meshes, remat. It imports nothing else of mxjax."""
