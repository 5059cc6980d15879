"""Imports run one way, modules say what they are, nothing is pickled, the wheel holds what is scripted."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache, partial
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

ROOT = Path(__file__).parents[1]
PACKAGES = ("mi_route2", "probes", "studies")
HOSTS = ("transformer_lens", "nnsight")
MAY_HOST = ("mi_route2.hosts", "studies.lanes", "studies.benchmarks")
BROUGHT_BY = {
    "filelock": "torch", "sklearn": "scikit_learn", "tokenizers": "transformers", "numpy": "scipy", "PIL": "matplotlib",
    "pydantic_core": "pydantic",
}  # fmt: skip
"""Import name -> the declared requirement that always brings it."""
UNPICKLERS = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")

LIBRARY = ("adapters", "hosts", "rollouts", "routing", "runs", "steering", "patching", "engine", "vllm")
"""Rooms of the library. Each may import those before it, as far as ``FORBIDDEN`` says nothing else."""
STUDIES = ("route2", "tracing", "steering", "lanes", "benchmarks")
"""A study imports rooms (`common`, `environments`, `sandbox`, `training`) and no other study."""

FORBIDDEN = {
    "mi_route2": ("probes", "studies", "tests"),
    **{f"mi_route2.{room}": ("mi_route2.probes",) for room in ("adapters", "rollouts", "runs", "sites")},
    "studies": ("tests",),
    "mi_route2.architectures": ("mi_route2",),
    "mi_route2.files": ("mi_route2",),
    "mi_route2.specs": tuple(f"mi_route2.{room}" for room in ("sites", *LIBRARY)),
    "mi_route2.plots": ("mi_route2.sites", "mi_route2.architectures", *(f"mi_route2.{room}" for room in LIBRARY)),
    "mi_route2.sites": tuple(f"mi_route2.{room}" for room in LIBRARY),
    "mi_route2.adapters": tuple(f"mi_route2.{room}" for room in LIBRARY),
    "mi_route2.hosts": ("mi_route2.routing", "mi_route2.runs", "mi_route2.steering", "mi_route2.patching", "mi_route2.engine"),
    "mi_route2.routing": ("mi_route2.hosts", "mi_route2.runs", "mi_route2.steering", "mi_route2.patching", "mi_route2.engine"),
    "mi_route2.runs": ("mi_route2.routing", "mi_route2.steering", "mi_route2.patching", "mi_route2.engine"),
    "mi_route2.steering": ("mi_route2.routing", "mi_route2.runs", "mi_route2.patching", "mi_route2.engine"),
    "mi_route2.patching": ("mi_route2.routing", "mi_route2.engine"),
    "mi_route2.engine": ("mi_route2.routing", "mi_route2.vllm"),
    "mi_route2.vllm": ("mi_route2.routing",),
    "studies.common": ("studies",),
    "studies.sandbox": ("mi_route2", "studies"),
    "studies.environments": ("studies.training", *(f"studies.{study}" for study in STUDIES)),
    "studies.training": tuple(f"studies.{study}" for study in STUDIES),
    **{f"studies.{study}": tuple(f"studies.{other}" for other in STUDIES if other != study) for study in STUDIES[:-1]},
    # Nothing imports a benchmark.
    "studies.benchmarks": ("studies.training", "studies.route2", "studies.tracing", "studies.steering", "studies.lanes"),
    "studies.environments.micro.grader": ("studies.environments.micro.oracle", "studies.environments.micro.world"),
    "studies.environments.micro.oracle": ("studies.environments.micro.grader", "studies.environments.micro.world"),
    **{
        f"studies.environments.leetcode.{room}": tuple(f"studies.environments.leetcode.{other}" for other in others.split())
        for room, others in {
            "grader": "oracle problem",
            "oracle": "grader problem",
            "programs": "grader oracle modes problems expressions",
            "pairs": "oracle",
        }.items()
    },
}
"""Package or module -> what nothing in it may import, directly or through another module of the house."""


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("mi_route2", *parts) if parts[0] == "probes" else parts  # mi_route2/probes is a link
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def trees() -> Mapping[str, ast.Module]:
    """Return the syntax tree of every module."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in SOURCES.items()}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imported(name: str, tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports anywhere in its text; ``from a import b`` gives a.b where that is a module, else a."""
    own = name if SOURCES.get(name, ROOT).name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, own)
            yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in SOURCES else base for alias in node.names)


@cache
def direct() -> Mapping[str, set[str]]:
    """Return what each module imports by itself."""
    return {name: set(imported(name, tree)) for name, tree in trees().items()}


@cache
def reached(name: str) -> Mapping[str, str]:
    """Every name that a module imports, through other modules of the house too -> the module that names it."""
    seen: dict[str, str] = {}
    todo = [name]
    while todo:
        module = todo.pop()
        for target in direct().get(module, ()):
            if target not in seen:
                seen[target] = module
                todo.append(target)
    return seen


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package: str) -> None:
    for name in SOURCES:
        if within(name, package):
            for target, by in reached(name).items():
                allowed = not within(target, *FORBIDDEN[package]) or within(target, package)
                assert allowed, f"{name} must not reach {target}, which {by} imports"


def test_only_hosts_import_the_libraries_that_they_adapt() -> None:
    for name, targets in direct().items():
        if not within(name, *MAY_HOST):
            assert not [target for target in targets if within(target, *HOSTS)], name


def test_only_integrations_import_training_libraries_and_only_users_import_integrations() -> None:
    """So that nothing of the toolkit needs TRL, or waits for its import."""
    for name in SOURCES:
        if not within(name, "mi_route2.integrations"):
            told = [target for target in reached(name) if within(target, "trl", "accelerate", "datasets", "mi_route2.integrations")]
            assert not told, f"{name} reaches {told[0]}"


def test_no_modules_import_each_other() -> None:
    """Imports inside of functions count too; a package's face, which hands names on, does not."""
    faces = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    order = TopologicalSorter({name: targets & SOURCES.keys() - faces for name, targets in direct().items() if name not in faces})
    order.prepare()  # CycleError names the cycle


def test_the_import_reader_sees_every_form() -> None:
    text = "import a.b\nfrom mi_route2 import sites\nfrom mi_route2.sites import select\ndef f():\n    from . import oracle\n"
    assert set(imported("studies.environments.micro.grader", ast.parse(text))) == {
        "a.b",
        "mi_route2.sites",
        "studies.environments.micro.oracle",
    }
    assert "mi_route2.routing" in reached("studies.training.grpo")
    assert reached("studies.training.job")["studies.environments.micro.oracle"]


def test_few_modules_stand_behind_the_main_loop() -> None:
    """A package's face hands names on and does not count."""
    behind = [name for name in reached("studies.training.grpo") if name in SOURCES and SOURCES[name].name != "__init__.py"]
    assert len(behind) <= 20, sorted(behind)


def test_modules_say_what_they_are() -> None:
    for name, path in SOURCES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not lines or ast.get_docstring(trees()[name]), f"{name} does not say what it is"


def test_a_class_that_a_room_of_the_library_offers_has_its_name_alone() -> None:
    """Users import what is in ``__all__`` of a face, and would take a class of the same name for it."""
    faces = [name for name in SOURCES if within(name, "mi_route2") and SOURCES[name].name == "__init__.py"]
    offered = {text for name in faces for text in names_offered(trees()[name])}
    places: dict[str, list[str]] = {}
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in offered:
                places.setdefault(node.name, []).append(name)
    assert len(places) > 50
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize("word", ["Run", "Job", "Gate", "Comparison"])
def test_a_word_that_many_rooms_need_is_one_class(word: str) -> None:
    """The commands of a command line are named after what one types, and so each has its ``Run``."""
    rooms = [name for name in trees() if SOURCES[name].name not in ("cli.py", "__main__.py") and not within(name, "tests")]
    places = [name for name in rooms for node in trees()[name].body if isinstance(node, ast.ClassDef) and node.name == word]
    assert len(places) == (word != "Run")


def names_offered(tree: ast.Module) -> list[str]:
    """Return ``__all__`` of a module."""
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return [name for value in values for name in ast.literal_eval(value)]


def test_no_docstring_is_torn() -> None:
    """A word or two alone on a line, between a full line and the rest of the sentence: somebody broke a line that was too long."""
    for name, tree in trees().items():
        lines = SOURCES[name].read_text(encoding="utf-8").splitlines()
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
        for text in (text for text in texts if isinstance(text.value, str)):
            for i in range(text.lineno, (text.end_lineno or 0) - 1):
                before, short, after = lines[i - 1], lines[i].strip(), lines[i + 1].strip()
                alone = 0 < len(short) < 20 and len(short.split()) <= 2 and not short.endswith((".", ":", ",", '"""'))
                torn = alone and len(before) > 100 and not before.endswith((".", ":")) and re.match(r"[a-z`(]", after)
                assert not torn, f"{name}, line {i + 1}: {short!r}"


def test_annotations_are_evaluated() -> None:
    """With postponed annotations the shapes in the signatures are text that nothing checks."""
    for name, tree in trees().items():
        futures = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        assert not [alias for node in futures for alias in node.names if alias.name == "annotations"], name


def test_nothing_is_pickled() -> None:
    words = (*UNPICKLERS, *(calls := ("torch.load", "torch.save", "pd.read_pickle")), "allow_pickle")
    for path in (*SOURCES.values(), *sorted((ROOT / "tests").rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in words):  # walking through every tree takes ten seconds
            continue
        tree = ast.parse(text)
        assert not [target for target in imported(name_of(path), tree) if within(target, *UNPICKLERS)], path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                call = f"{node.func.value.id}.{node.func.attr}"
                assert call not in calls, f"{path}, line {node.lineno}: {call}"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), f"{path}: allow_pickle"
                assert node.value.value is False, f"{path}: allow_pickle"


def test_every_file_compiles() -> None:
    files = [*SOURCES.values(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.py"))]
    assert len(files) > 50
    for path in files:
        compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)


def test_the_wheel_holds_every_module_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return setuptools's own list of a wheel's files: modules, the server's page, markers of typed packages."""
    monkeypatch.chdir(ROOT)
    build = apply_configuration(Distribution({"script_name": "setup.py"}), ROOT / "pyproject.toml").get_command_obj("build_py")
    build.ensure_finalized()
    packed = {Path(path).resolve() for _, _, path in build.find_all_modules()}
    assert packed == {path for name, path in SOURCES.items() if within(name, "mi_route2")}
    for name, path in SOURCES.items():
        assert path.parent == ROOT or (path.parent / "__init__.py").exists(), f"{name} lies in a folder that is no package"
    data = {Path(folder).resolve() / name for _, folder, _, names in build.get_data_files_without_manifest() for name in names}
    assert data == {*(ROOT / "mi_route2" / "serve" / "page").iterdir(), ROOT / "mi_route2/py.typed", ROOT / "probes/py.typed"}


@pytest.mark.process
def test_a_wheel_is_one_package_beside_a_users_own_probes(tmp_path: Path) -> None:
    """Installed in a fresh environment, with the libraries of this one behind it."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    for name in ("mi_route2", "probes", "studies"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([*pip, str(clone)], check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist() if ".dist-info" not in name}
    assert tops == {"mi_route2"}
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    site = next(environment.glob("lib/python*/site-packages"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--ignore-installed",
            "--prefix",
            str(environment),
            str(wheel),
        ],
        check=True,
    )
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zz.pth").write_text("\n".join(libraries) + "\n")
    own = tmp_path / "user" / "probes"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("MINE = True\n")
    lines = "import mi_route2.probes.lda as ours, probes; assert probes.MINE; print(ours.__file__)"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, cwd=own.parent, env=clean, capture_output=True, text=True, check=True, timeout=200)
    assert str(site) in run([environment / "bin/python", "-c", lines]).stdout
    assert "sweep" in run([environment / "bin/python", environment / "bin/mi-route2", "--help"]).stdout


def test_what_is_imported_is_declared() -> None:
    """A fresh install can import all of the wheel but the benchmarks and what has extras (lanes, server, TRL, Slurm)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared, lanes, serve, trl = (
        {re.split(r"[<>=~! \[]", text)[0].replace("-", "_") for text in texts}
        for texts in (
            project["dependencies"],
            extras["lanes"],
            [*extras["serve"], "starlette"],
            [*extras["trl"], "accelerate", "datasets"],
        )
    )  # fastapi is made of starlette, and TRL of accelerate and datasets
    assert set(BROUGHT_BY.values()) <= declared
    known = {*sys.stdlib_module_names, *PACKAGES, *declared, *BROUGHT_BY}
    for name, targets in direct().items():
        if not within(name, "studies.benchmarks"):
            known_here = known | lanes if within(name, "studies.lanes") else known
            known_here = known_here | serve if within(name, "mi_route2.serve") else known_here
            known_here = known_here | {"plotly"} if name == "mi_route2.patching.grid" else known_here  # its error names the extra
            known_here = known_here | trl if within(name, "mi_route2.integrations") else known_here
            known_here = known_here | {"submitit"} if name == "studies.common.workers" else known_here  # so does its
            known_here = known_here | {"pyarrow"} if name == "studies.common.tables" else known_here  # and its
            known_here = known_here | {"inspect_ai"} if name == "studies.environments.inspect_task" else known_here
            known_here = known_here | {"verifiers", "openai"} if within(name, "studies.environments.taskset") else known_here
            foreign = {target.split(".")[0] for target in targets} - known_here
            assert not foreign, f"{name} imports {', '.join(foreign)}, which pyproject.toml does not require"
