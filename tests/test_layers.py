"""The floors of the package: a module imports from lower floors only, and heavy libraries stay where they belong."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ropesearch"
FLOORS = [
    {"errors"},
    {"files", "seeding", "settings", "stopping", "strict_json"},
    {"rope", "run_folder"},
    {"model", "data"},
    {"score", "artifact"},
    {"search", "train", "evaluate", "track", "launch"},
    {"config", "report", "scoring", "tracking", "finetune_folder", "finetune_tracking"},
    {"pipeline", "export", "finetuning", "status", "demo"},
    {"cli"},
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
HOMES = {  # library: the parts that may import it
    "optuna": {"search"},
    "hydra": {"config", "cli"},
    "omegaconf": {"config", "cli"},
    "wandb": {"track"},
    "matplotlib": {"track"},
    "rich": {"track"},
    "datasets": {"data"},
    "submitit": {"launch"},
    "peft": {"train"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_come_from_lower_floors(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    for module in imported_modules(path):
        words = module.split(".")
        if words[0] in HOMES:
            assert part in HOMES[words[0]], f"{path.name} imports {words[0]}, which belongs to {HOMES[words[0]]}"
        if words[0] == "ropesearch" and words[1] in FLOOR_OF and words[1] != part:
            assert FLOOR_OF[words[1]] < FLOOR_OF[part], f"{path.name} ({part}) imports {module}"
            assert words[1] != "demo", f"{path.name} imports the demo"


@pytest.mark.parametrize(
    "module",
    [
        "ropesearch",
        "ropesearch.cli",
        "ropesearch.config",
        "ropesearch.rope.methods",
        "ropesearch.rope.regime",
        "ropesearch.artifact.schema",
        "ropesearch.demo.__main__",
    ],
)
def test_light_modules_do_not_import_heavy_libraries(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "datasets", "optuna"} & set(loaded)
