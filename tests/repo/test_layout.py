"""The house rules that a machine can check: import directions, safety, lazy start, file sizes."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"pw": ROOT, "pw_kernels": ROOT / "kernels", "pw_pipelines": ROOT / "pipelines"}

# A module may import from its own unit and from units on lower floors, never sideways or up.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("pw_kernels",),
    ("pw",),  # the shared nouns: pw.blocks, pw.errors, pw.config
    ("pw.store",),
    ("pw.models", "pw.planning"),
    ("pw.memory", "pw_pipelines"),
    ("pw.engine",),
    ("pw.serving", "pw.evaluation"),
    ("pw.cli", "pw.__main__"),
)
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}
LAZY_IMPORTS_ONLY = {"pw.cli"}  # may import heavy stages inside functions only
RUNTIME_FORBIDDEN = "pw_pipelines"  # offline code: only the command line starts it
STDLIB_ONLY = {"pw"}

MAX_LINES = 400
LONG_FILES: dict[str, str] = {}  # path -> why it is one room and not two


def sources() -> list[Path]:
    return [
        path
        for package, parent in PACKAGES.items()
        for path in sorted((parent / package).rglob("*.py"))
    ]


def module_name(path: Path) -> str:
    parent = next(p for n, p in PACKAGES.items() if path.is_relative_to(p / n))
    parts = path.relative_to(parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The unit that holds a module: `pw.store.planes` -> `pw.store`, `pw.blocks` -> `pw`."""
    parts = module.split(".")
    two = ".".join(parts[:2])
    return two if two in FLOOR_OF else parts[0]


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Name of the module that a (possibly relative) `from` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, imported module, at module level) of each import, nested ones included.

    `from pw import config` counts as `pw.config`, `from pw.blocks import X` as `pw.blocks.X`:
    a longer name than the module's still falls into the right unit.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in ast.iter_child_nodes(tree)}
    module = module_name(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, path.name == "__init__.py")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", id(node) in top


def arrows_up(path: Path) -> list[str]:
    unit = unit_of(module_name(path))
    wrong = []
    for line, name, _ in imports(path):
        if name.split(".")[0] not in PACKAGES:
            continue
        target = unit_of(name)
        sideways_or_up = FLOOR_OF[target] >= FLOOR_OF[unit] and target != unit
        entry = unit == "pw.__main__" and target == "pw.cli"
        offline = target == RUNTIME_FORBIDDEN and unit not in (RUNTIME_FORBIDDEN, "pw.cli")
        if (sideways_or_up and not entry) or offline:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {unit} must not import {name}")
    return wrong


def test_imports_go_down_only() -> None:
    wrong = [arrow for path in sources() for arrow in arrows_up(path)]
    assert not wrong, "\n".join(wrong)


Plant = Callable[[str, str], Path]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Writes one source file into an empty tree that the rules then take for ours."""
    here = sys.modules[__name__]
    parents = {name: tmp_path / parent.relative_to(ROOT) for name, parent in PACKAGES.items()}
    monkeypatch.setattr(here, "ROOT", tmp_path)
    monkeypatch.setattr(here, "PACKAGES", parents)

    def write(file: str, text: str) -> Path:
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("file", "text", "count"),
    [
        ("pw/planning/x.py", "from pw.engine import request", 1),
        ("pw/planning/x.py", "import pw.memory.pool", 1),
        ("pw/planning/x.py", "from pw import cli", 1),
        ("pw/planning/x.py", "def f():\n    from ..engine import request", 1),
        ("pw/planning/x.py", "from pw.store.planes import a\nfrom . import planner", 0),
        ("pw/planning/__init__.py", "from .planner import plan\nfrom .. import errors", 0),
        ("pw/blocks.py", "from pw.store import planes", 1),
        ("pw/engine/x.py", "import pw_pipelines.quantize", 1),
        ("pw/evaluation/x.py", "import pw_pipelines.quantize", 1),
        ("pw/cli/x.py", "import pw_pipelines.quantize", 0),
        ("kernels/pw_kernels/x.py", "from pw.errors import PwError", 1),
    ],
)
def test_the_import_rule_finds_what_it_should(
    file: str, text: str, count: int, plant: Plant
) -> None:
    assert len(arrows_up(plant(file, text))) == count


def test_shared_nouns_need_the_standard_library_only() -> None:
    for path in sources():
        if unit_of(module_name(path)) in STDLIB_ONLY:
            for line, name, _ in imports(path):
                first = name.split(".")[0]
                assert first in sys.stdlib_module_names or first == "pw", f"{path}:{line}: {name}"


def test_kernels_import_tensor_libraries_only() -> None:
    known = {"torch", "triton", "numba", "llvmlite", "numpy", "cuda", "pw_kernels"}
    for path in sources():
        if unit_of(module_name(path)) == "pw_kernels":
            for line, name, _ in imports(path):
                first = name.split(".")[0]
                assert first in sys.stdlib_module_names or first in known, f"{path}:{line}: {name}"


def test_the_command_line_imports_its_stages_inside_the_commands() -> None:
    light = {"typer", "rich", "pw.blocks", "pw.errors", "pw.config", "pw.logs", "pw.cli"}
    for path in sources():
        if unit_of(module_name(path)) not in LAZY_IMPORTS_ONLY:
            continue
        for line, name, at_top in imports(path):
            parts = name.split(".")
            ok = (
                parts[0] in sys.stdlib_module_names
                or parts[0] in light
                or ".".join(parts[:2]) in light
                or name in ("pw.__version__", "pw.FORMAT_VERSION")
            )
            assert ok or not at_top, f"{path}:{line}: import {name} inside the command"


def test_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from pw.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'zarr', 'triton', 'numba', 'fastapi'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    path = os.pathsep.join(str(parent) for parent in PACKAGES.values())
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calibrate" in done.stdout


def test_folders_that_must_not_be_packages() -> None:
    # transformers probes find_spec("kernels"): a package of that name breaks every model import
    for folder in ("kernels", "pipelines", "pw/assets"):
        assert not (ROOT / folder / "__init__.py").exists(), folder


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted(n for n in set(names) if names.count(n) > 1)


UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "yaml.load", "numpy.load", "np.load", "eval", "exec", "os.system"}


def unsafe(path: Path) -> Iterator[str]:
    for line, name, _ in imports(path):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"{path}:{line}: import {name}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                yield f"{path}:{node.lineno}: {ast.unparse(node.func)}"
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield f"{path}:{node.lineno}: {keyword.arg}"


def test_nothing_from_outside_is_unpickled_or_executed() -> None:
    found = [hit for path in sources() for hit in unsafe(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import pickle", 1),
        ("torch.load(p)", 1),
        ("yaml.load(p)", 1),
        ("run(x, shell=True)", 1),
        ("f(trust_remote_code=flag)", 1),
        ("eval(s)", 1),
        ("model.eval()\nf(trust_remote_code=False)\nyaml.safe_load(p)", 0),
    ],
)
def test_the_safety_rule_finds_what_it_should(text: str, count: int, plant: Plant) -> None:
    assert len(list(unsafe(plant("pw/store/x.py", text)))) == count


def test_long_files_are_listed_with_a_reason() -> None:
    files = [*sources(), *(ROOT / "tests").rglob("*.py")]
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files}
    too_long = {path: n for path, n in lines.items() if n > MAX_LINES}
    unlisted = sorted(set(too_long) - set(LONG_FILES))
    stale = sorted(set(LONG_FILES) - set(too_long))
    assert not unlisted, {path: too_long[path] for path in unlisted}
    assert not stale, f"no longer too long: {stale}"
