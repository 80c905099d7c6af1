"""jaxlib's ROCm extension on a machine without ROCm, beside a library in place of HIP that takes notes.

The extension needs libamdhip64.so.7 to be loaded. The library here exports the symbols that the extension
imports, with their version tags. Each returns success. Those that load and launch a kernel write down their
arguments.
"""

import collections
import ctypes
import importlib.metadata
import re
import shutil
import subprocess
import sys

import pytest

WHEEL = "jax-rocm7-plugin"
LIBRARY = "libamdhip64.so.7"

SOURCE = r"""
#include <stdio.h>
typedef void *pointer;
typedef unsigned number;
int arguments, lds;
const void *image;
char notes[1 << 16];
static int end;
void clear(void) { notes[end = 0] = 0; }
int hipModuleLoadData(pointer *module, const void *data) {
  *module = (pointer)1, image = data;
  end += sprintf(notes + end, "load\n");
  return 0;
}
int hipModuleGetFunction(pointer *function, pointer module, const char *name) {
  *function = (pointer)2;
  end += sprintf(notes + end, "function %s\n", name);
  return 0;
}
int hipDeviceGetAttribute(int *value, int attribute, int device) {
  *value = lds;
  end += sprintf(notes + end, "attribute %d\n", attribute);
  return 0;
}
int hipModuleLaunchKernel(pointer function, number x, number y, number z, number threads, number ty,
                          number tz, number shared, pointer stream, pointer *values, pointer *extra) {
  end += sprintf(notes + end, "launch %u %u %u %u %u %u %u", x, y, z, threads, ty, tz, shared);
  for (int i = 0; i < arguments; i++) end += sprintf(notes + end, " %zu", *(size_t *)values[i]);
  end += sprintf(notes + end, "\n");
  return 0;
}
"""


def install_extension(folder):
    """Installs the wheel that fits jaxlib under `folder` and a stand-in for HIP, or skips the test."""
    version = importlib.metadata.version("jaxlib")
    tool, compiler = shutil.which("uv"), shutil.which("cc")
    if not (tool and compiler and shutil.which("nm")):
        pytest.skip("jaxlib's ROCm extension is installed by uv, and linked by cc and nm")
    command = [tool, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    done = subprocess.run(
        [*command, "--target", folder, f"{WHEEL}=={version}"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{WHEEL}=={version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    extension = folder / "jax_rocm7_plugin" / "_triton.so"
    _build_library(extension, folder / LIBRARY, compiler)
    return extension


def _build_library(extension, library, compiler):
    listed = subprocess.run(["nm", "-D", "--undefined-only", extension], capture_output=True, text=True)
    tagged = collections.defaultdict(list)
    for name, tag in re.findall(r"\b(hip\w+)@([\w.]+)", listed.stdout):
        tagged[tag].append(name)
    names = [name for group in tagged.values() for name in group]
    stubs = [f"int {name}() {{ return 0; }}" for name in names if f" {name}(" not in SOURCE]
    source = library.with_name("hip.c")
    source.write_text("\n".join([SOURCE, *stubs]))
    versions = library.with_name("hip.versions")
    versions.write_text(
        "".join(f"{tag} {{ {'; '.join(group)}; }};\n" for tag, group in sorted(tagged.items()))
    )
    flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name},--version-script,{versions}"]
    subprocess.run([compiler, *flags, "-o", library, source], check=True)


class Runtime:
    """jaxlib's ROCm extension, with the library beside it in place of HIP."""

    def __init__(self, extension):
        self.hip = ctypes.CDLL(str(extension.parent.parent / LIBRARY), ctypes.RTLD_GLOBAL)
        sys.path.insert(0, str(extension.parent.parent))
        from jax_rocm7_plugin import _triton  # pyright: ignore

        self.module = _triton
        signature = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
        )
        self._call = signature(pointer_of(_triton.get_custom_call()))

    def launch(self, opaque, pointers, image_bytes, lds=160 * 1024, sizes=0):
        """Returns what HIP is told when jaxlib runs the call on arrays at `pointers`: notes and the image."""
        ctypes.c_int.in_dll(self.hip, "arguments").value = len(pointers) + sizes + 2
        ctypes.c_int.in_dll(self.hip, "lds").value = lds
        self.hip.clear()
        status = (
            ctypes.c_size_t * 16
        )()  # an optional string: pointer, length, two words, whether it is there
        self._call(None, (ctypes.c_size_t * len(pointers))(*pointers), opaque, len(opaque), status)
        if status[4] & 0xFF:
            raise RuntimeError(ctypes.string_at(status[0], status[1]).decode())
        image = ctypes.c_void_p.in_dll(self.hip, "image").value
        notes = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(self.hip, "notes"))).decode()
        return notes.splitlines(), ctypes.string_at(image, image_bytes) if image else b""


def pointer_of(capsule):
    """Returns the address in a Python capsule."""
    get_name, get_pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get_pointer(capsule, get_name(capsule))
