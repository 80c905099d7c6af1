"""Whether this machine has a GPU."""

import pathlib
import shutil

HAS_GPU = bool(shutil.which("nvidia-smi")) or pathlib.Path("/dev/kfd").exists()
