"""Shape and dtype annotations are checked in every test; hypothesis draws the same examples every time."""

import hypothesis
from jaxtyping import install_import_hook

hypothesis.settings.register_profile("mxjax", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("mxjax")

with install_import_hook(("mxjax", "models"), "beartype.beartype"):
    import mxjax  # noqa: F401
