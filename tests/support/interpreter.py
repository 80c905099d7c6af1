"""Triton's interpreter without what it does over and over, and with exact conversions from FP8.

It takes NaN in E4M3 for 480, and subnormals of E5M2 for other values in float16. At each call from one kernel
function to another, a hundred times a program, it replaces the functions of `triton.language` by its own.
They are replaced already: a launch begins so, and ends by restoring them. It reduces by a function of a
kernel's own element by element, hundreds of thousands of calls, where a slice at a time has the same values.
It adds and multiplies integers again in 64 bits, for an assertion that it then leaves out. For each tensor it
makes the tuples of its shape and the text of its type anew, which takes a third of the time.
"""

import dataclasses
import functools
import inspect
import math

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Replaces these parts of the interpreter, once."""
    if hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = _by_slices(interpreter.ReduceOps.generic_reduce)
    interpreter._convert_float = _by_ml_dtypes(interpreter._convert_float)
    interpreter._patch_attr = _patch_attr
    tl.block_type.__init__, tl.block_type.with_element_ty = _init_block_type, _with_element_ty
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.tensor.__init__ = _init_tensor
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)


def _init_block_type(self, element_ty, shape):
    """Replaces `block_type.__init__`: types of one shape share its tuple, and names are made when read."""
    assert isinstance(shape, (list, tl.tuple))
    self.element_ty = element_ty
    self.shape, self.numel = _block_shape(*map(tl.core._unwrap_if_constexpr, shape))


def _with_element_ty(self, scalar_ty):
    """Replaces `block_type.with_element_ty`."""
    other = object.__new__(tl.block_type)
    other.element_ty, other.shape, other.numel = scalar_ty, self.shape, self.numel
    return other


def _init_tensor(self, handle, type):
    """Replaces `tensor.__init__`: tensors of one shape share its tuple, which nothing changes."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor_shape(*type.shape) if type.is_block() else _tensor_shape()


@functools.lru_cache(None, typed=True)  # an integer of numpy's is refused
def _block_shape(*lengths):
    """Returns the shape of a type, and its number of elements."""
    if not lengths:
        raise TypeError("0d block_type is forbidden")
    return tl.tuple(lengths), tl.core.validate_block_shape(lengths)


@functools.cache
def _tensor_shape(*lengths):
    """Returns the shape of a tensor, and its number of elements."""
    return tl.tuple([tl.constexpr(n) for n in lengths]), tl.constexpr(math.prod(lengths))


def _unless_alike(broadcast):
    """Returns `broadcast_impl_value` that leaves two tensors of one shape at once."""

    @functools.wraps(broadcast)
    def alike(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return alike


def _patch_attr(obj, name, member, builder, scope):
    """Replaces `_patch_attr`, whose functions copy their arguments by name to leave one out."""

    def interpreted(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, interpreted)


def _by_scalar(get_np_dtype):
    """Returns `_get_np_dtype` that asks once for each type of elements that are no pointers."""
    known = functools.cache(get_np_dtype)

    @functools.wraps(get_np_dtype)
    def get(dtype):
        return get_np_dtype(dtype) if dtype.scalar.is_ptr() else known(dtype.scalar)

    return get


def _by_slices(generic_reduce):
    """Returns `generic_reduce` that calls the function once for each place on the axis, in the same order."""

    @functools.wraps(generic_reduce)
    def reduce(self, inputs):
        if self.axis is None:
            return generic_reduce(self, inputs)

        def tensors(arrays):
            return [self.to_tensor(a, x.dtype) for a, x in zip(arrays, inputs, strict=True)]

        whole = [x.handle.data for x in inputs]
        first, *others = zip(*(np.moveaxis(a, self.axis, 0) for a in whole), strict=True)
        for slices in others:
            found = self.combine_fn.fn(*tensors(first), *tensors(slices))
            found = found if isinstance(found, tuple) else (found,)
            first = [
                y.handle.data.reshape(a.shape).astype(a.dtype) for y, a in zip(found, first, strict=True)
            ]
        return tensors([np.expand_dims(a, self.axis) for a in first] if self.keep_dims else first)

    return reduce


def _by_ml_dtypes(convert):
    """Returns `_convert_float` with ml_dtypes' conversions from FP8 to wider floats, and to bfloat16."""
    fp8 = {tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}
    wider = {tl.float16: np.float16, tl.bfloat16: ml_dtypes.bfloat16, tl.float32: np.float32}

    @functools.wraps(convert)
    def exact(values, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):  # Triton's truncates
            return values.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        if input_dtype not in fp8 or output_dtype not in wider:
            return convert(values, input_dtype, output_dtype, rounding_mode)
        bits = f"uint{output_dtype.primitive_bitwidth}"
        return values.view(fp8[input_dtype]).astype(wider[output_dtype]).view(bits)

    return exact


def _once_a_launch(patch_lang):
    """Returns `_patch_lang` for launches one after the other, as those of `mxjax.kernels.launch` are."""
    seen: dict[int, set[int]] = {}  # the modules of Triton's that a function's module sees
    replaced: set[int] = set()
    launch = None

    @functools.wraps(patch_lang)
    def patch(function):
        nonlocal launch
        key = id(function.__globals__)
        if key not in seen:
            modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            seen[key] = {id(module) for module in modules if module in (tl, tl.core)}
        if launch is not None and seen[key] <= replaced:
            return None
        scope = patch_lang(function)
        replaced.update(seen[key])
        if launch is None:
            launch, restore = scope, scope.restore

            def end():
                nonlocal launch
                launch = None
                replaced.clear()
                restore()

            scope.restore = end
        else:
            launch._changes += scope._changes
        return scope

    return patch
