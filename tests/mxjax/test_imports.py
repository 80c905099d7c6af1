"""Imports, read from the syntax trees, lazy ones included: they go one way and without circles."""

import ast
import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = {
    name: name for name in ("mxjax", "models", "training", "analysis", "studies", "benchmarks", "examples")
} | {"kernels": "mxjax.kernels"}
LIBRARY_ROOMS = (
    *("mxjax.runtime", "mxjax.numerics", "mxjax.policy", "mxjax.recipes", "mxjax.operands", "mxjax.kernels"),
    *("mxjax.products", "mxjax.stats", "mxjax.transform", "mxjax", "mxjax.integrations"),
)
FLOORS = (
    *LIBRARY_ROOMS,
    *("mxjax.kernels.cases", "mxjax.kernels.selftest"),  # programs, which call products
    *("models", "training", "analysis", "train", "eval", "studies", "benchmarks", "examples"),
)
"""The rooms from the ground up; a module imports its own room and those before it."""
LIBRARY = {"jax", "numpy", "jaxtyping"}
INTEGRATIONS = {"mxjax.integrations.qwix": {"qwix"}, "mxjax.integrations.haliax": {"haliax", "equinox"}}


def sources() -> dict[str, pathlib.Path]:
    """Returns every module by its name."""
    found = {name: ROOT / f"{name}.py" for name in ("train", "eval")}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder == "mxjax" and path.is_relative_to(ROOT / "mxjax" / "kernels"):  # the link
                continue
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


@functools.cache
def imported(path: pathlib.Path, *, lazy: bool = True) -> set[str]:
    """Returns the names that a file imports: modules, and `module.name` of what it takes from one."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def module_of(name: str) -> str | None:
    """Returns the module of ours that an imported name is, or is in."""
    while name and name not in SOURCES:
        name = name.rpartition(".")[0]
    return name or None


@functools.cache
def graph() -> dict[str, set[str]]:
    """Returns the modules that each module imports; not while tests are collected, which takes a second."""
    return {
        module: {m for name in imported(path) if (m := module_of(name)) is not None and m != module}
        for module, path in SOURCES.items()
    }


def test_modules_are_found():
    assert {"mxjax.products.dot", "mxjax.kernels.quantize.kernel", "models.decoder", "train"} <= set(SOURCES)
    assert "mxjax.kernels.quantize.quantizer" in graph()["mxjax.products.prepare"]  # lazily
    assert "mxjax.products.multiply" in graph()["mxjax.products.linear"]


def test_no_circles():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(graph()[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in SOURCES:
        visit(module, ())


def room_of(module: str) -> str:
    """Returns the innermost room that a module is in."""
    return max((room for room in FLOORS if f"{module}.".startswith(f"{room}.")), key=len)


def test_rooms_import_those_below():
    for module, others in graph().items():
        floor = FLOORS.index(room_of(module))
        for other in others:
            above = FLOORS.index(room_of(other)) > floor
            assert not above, f"{module} imports {other}, which is in a room above it"


def test_the_library_needs_jax_numpy_and_jaxtyping_alone():
    allowed = LIBRARY | set(sys.stdlib_module_names) | {"mxjax"}
    for module, path in SOURCES.items():
        if module.partition(".")[0] == "mxjax" and not module.startswith("mxjax.kernels"):
            found = {name.partition(".")[0] for name in imported(path)}
            assert found <= allowed | INTEGRATIONS.get(module, set()), module


def test_examples_alone_import_an_integration():
    found = {module for module, others in graph().items() if others & set(INTEGRATIONS)}
    assert {room_of(module) for module in found} == {"examples"}


def test_the_kernels_import_triton_and_nothing_else_at_their_top():
    allowed = LIBRARY | set(sys.stdlib_module_names) | {"mxjax", "triton"}
    for module, path in SOURCES.items():
        if module.startswith("mxjax.kernels.") and module.split(".")[2] != "cases":
            assert {name.partition(".")[0] for name in imported(path, lazy=False)} <= allowed, module


def test_the_log_of_a_run_is_given_values():
    for module, others in graph().items():
        if module.startswith("training.log"):
            assert not {other for other in others if other.startswith("training.run")}, module
