"""One direction of imports: harness -> policies -> calibration -> relayout -> leaf modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Rooms from the lowest up; a room may import itself, lower rooms and the leaf modules.
ROOMS = ("relayout", "calibration", "policies", "harness")
LEAVES = ("errors", "records", "units")
#: Modules that plan, price and decide: they must work where torch is not wanted or not there.
PURE = (
    *(f"relayout/{name}" for name in ("geometry", "hubs", "layout", "placements", "planner", "routes", "schedule")),
    *(f"relayout/{name}" for name in ("segments", "topology", "traffic", "batching", "timeline", "bounds", "own")),
    *(f"relayout/{name}" for name in ("affine", "affine_maps", "classplan", "combine", "cuts", "holders", "meshes")),
    *(f"relayout/{name}" for name in ("round_loads", "partitions", "pieces", "plan_check", "plan_json", "transfers")),
    *(f"relayout/route_{name}" for name in ("chain", "direct", "relay", "spread")),
    *(
        f"policies/{name}"
        for name in ("price", "choose", "thresholds", "fixed", "policy", "policy_file", "replicas", "scaling")
    ),
    *(f"policies/{name}" for name in ("path_costs", "path_scaling", "policy_python", "reach", "regret")),
    "calibration/profiles",
    *(f"calibration/{name}" for name in ("check", "devices", "fingerprint", "hashes", "hints", "sanity")),
    *(f"calibration/{name}" for name in ("labels", "soak_plan", "wrong_bytes")),
    *(
        f"harness/{name}"
        for name in ("cli", "config", "scenario", "emit", "plots", "verdict", "models", "moe", "soak_rows")
    ),
    "harness/simulated",
    *(f"harness/simulated_{name}" for name in ("config", "flows", "moves", "paths", "profile", "run")),
    *(f"harness/validate_{name}" for name in ("bars", "candidates", "figures", "plots", "report")),
    *(f"harness/validate_{name}" for name in ("agenda", "batches", "cases", "flows", "measure", "mixes", "moves")),
    *(f"harness/validate_{name}" for name in ("routes", "rows", "run")),
    *(f"harness/{name}" for name in ("commands_report", "compare_prices", "emit_paths")),
    *(f"harness/report_{name}" for name in ("compare", "document", "figures", "files", "frame", "markdown", "missing")),
    *(f"harness/report_{name}" for name in ("moves", "plots", "sources", "states", "tables")),
    *(f"harness/{name}" for name in ("commands_track", "commands_track_check", "options_track")),
    *(f"harness/{name}" for name in ("commands_doctor", "options_doctor")),
    *(f"harness/inputs/{path.stem}" for path in sorted((ROOT / "harness/inputs").glob("*.py"))),
    *(f"harness/doctor/{path.stem}" for path in sorted((ROOT / "harness/doctor").glob("*.py"))),
    *(
        f"harness/track/{path.stem}"
        for path in sorted((ROOT / "harness/track").glob("*.py"))
        if path.stem != "rank_job"
    ),
)
HEAVY = ("torch", "deepspeed", "transformers")


def _files() -> Iterator[Path]:
    yield from (ROOT / "src" / "relaymeter").glob("*.py")
    for room in ROOMS:
        yield from (ROOT / room).rglob("*.py")


@cache
def _imports(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """Every imported module: dotted name, line, and whether it is imported when the file is (not inside a function)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            inside = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                inside = False
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                name = "." * child.level + (child.module or "")
                yield from ((f"{name}.{alias.name}", child.lineno, at_import) for alias in child.names)
            yield from walk(child, inside)

    return tuple(walk(tree, True))


def _room(path: Path) -> str | None:
    top = path.relative_to(ROOT).parts[0]
    return top if top in ROOMS else None


@pytest.mark.parametrize("path", sorted(_files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards_and_use_the_package_name(path: Path) -> None:
    room = _room(path)
    wrong = []
    for name, line, _ in _imports(path):
        parts = name.split(".")
        if parts[0] in ("", *ROOMS, "src", "results", "tests"):
            wrong.append(f"line {line}: {name} is not imported as relaymeter.<room>.<module>")
        if parts[0] != "relaymeter" or len(parts) < 2:
            continue
        target = parts[1]
        if target in ROOMS and room is not None and ROOMS.index(target) > ROOMS.index(room):
            wrong.append(f"line {line}: {room} imports {name}, which is above it")
        if target in ROOMS and room is None and path.stem not in ("__init__", "__main__"):
            wrong.append(f"line {line}: the leaf module {path.stem} imports {name}")
    assert not wrong, "\n".join(wrong)


def _closure(start: Path) -> dict[Path, str]:
    """Files that importing ``start`` imports, each with the chain that leads there."""
    found: dict[Path, str] = {start: start.stem}
    todo = [start]
    while todo:
        path = todo.pop()
        for name, _, at_import in _imports(path):
            parts = name.split(".")
            if not at_import or parts[0] != "relaymeter":
                continue
            for depth in (2, 3, 4):
                base = ROOT / "src" / Path(*parts[:depth])
                target = base.with_suffix(".py")
                if target.is_file() and target.resolve() not in found:
                    found[target.resolve()] = f"{found[path]} -> {'.'.join(parts[1:depth])}"
                    todo.append(target.resolve())
    return found


@pytest.mark.parametrize("name", PURE)
def test_planning_pricing_and_the_command_line_import_no_torch(name: str) -> None:
    for path, chain in _closure(ROOT / f"{name}.py").items():
        heavy = [module for module, _, at_import in _imports(path) if at_import and module.split(".")[0] in HEAVY]
        assert not heavy, f"{chain} imports {heavy[0]}"


@pytest.mark.parametrize("path", sorted(_files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_has_a_docstring_and_says_what_is_public(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no module docstring"
    if path.stem not in ("__init__", "__main__"):
        names = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                 if isinstance(target, ast.Name)}  # fmt: skip
        assert "__all__" in names, "no __all__"


@pytest.mark.parametrize("path", sorted(_files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_assert_outside_tests(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert not lines, f"assert at lines {lines}: gone under -O; raise a typed error"
