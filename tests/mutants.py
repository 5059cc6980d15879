"""Mutation testing of the core: change one expression, run the room's tests, record every test that fails.

    python -m tests.mutants --number 20 --seed 0 --to runs/mutants.jsonl

A mutant swaps a comparison, an arithmetic or a boolean operator, negates a condition, changes a number, or drops a statement. Each
runs in a fork of one process that has imported the libraries, on a copy of the tree, until eight tests have failed. Mutants that
stand in ``--to`` are not run again.
"""

import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import tqdm
import tyro

ROOT = Path(__file__).parents[1]
ROOMS = {
    "mi_route2/adapters": ("linear", "tape", "gradients"),
    "mi_route2/routing": ("mask", "routes", "directions", "canary"),
    "mi_route2/patching": ("sweep", "grid"),
    "mi_route2/steering": ("state",),
    "mi_route2/engine": ("cache",),
    "studies/training": ("grpo",),
}
TESTS = {"studies/training": ("studies/route2/test_grpo_loss.py",)}
"""Folder of modules -> its tests, where they are not in the folder of the same name."""
MARKS = "not (matrix or hosts or machine or process or study or docs or real or gpu)"
SKIPPED = {".git", ".venv", "runs", "site"}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.MatMult: ast.Add, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def mutate(tree: ast.Module, at: int = -1) -> tuple[int, str, int]:
    """Apply the mutation number ``at`` to ``tree`` in place; return how many there are, its description and its line."""
    count, what, line = 0, "", 0

    def due(node: ast.AST, text: str) -> bool:
        nonlocal count, what, line
        count += 1
        if count - 1 == at:
            what, line = text, getattr(node, "lineno", 0)
        return count - 1 == at

    skipped: set[int] = set()
    for node in ast.walk(tree):  # annotations, refusals and docstrings are not computation
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)] if not isinstance(node, ast.Raise) else [node]
        parts += [*node.decorator_list] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        skipped.update(id(inner) for part in parts if part is not None for inner in ast.walk(part))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare) and due(node, f"{type(node.ops[0]).__name__} swapped"):
            node.ops[0] = SWAPS[type(node.ops[0])]()
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS and due(node, f"{type(node.op).__name__} swapped"):
            node.op = SWAPS[type(node.op)]()
        elif isinstance(node, ast.If | ast.IfExp) and due(node, "condition negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool) and due(node, f"{node.value} changed"):
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.With | ast.While):
                for place, inner in enumerate(body):
                    call = isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call)
                    if (call or isinstance(inner, ast.AugAssign)) and due(inner, "statement dropped"):
                        body[place] = ast.copy_location(ast.Pass(), inner)
    return count, what, line


class Killers:
    """Plugin of pytest that collects the names of failed tests."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def run_tests(copy: Path, tests: tuple[str, ...], answer: Path) -> None:
    """Run a room's tests on the copy (in a fork) and write the names of those that fail."""
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests/support")]
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  the process ends with it
    os.dup2(sys.stdout.fileno(), 1), os.dup2(sys.stdout.fileno(), 2)
    killers = Killers()
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=--import-mode=importlib", "-m", MARKS]
    pytest.main([*options, "--timeout", "60", "--maxfail", "8", *tests], plugins=[killers])
    answer.write_text(json.dumps(killers.failed))
    os._exit(0)


def run(copy: Path, tests: tuple[str, ...], limit: float) -> list[str]:
    answer = copy / "killers.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        run_tests(copy, tests, answer)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return json.loads(answer.read_text()) if answer.exists() else ["(crash)"]
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ["(timeout)"]


def main(number: int = 20, seed: int = 0, to: Path = Path("runs/mutants.jsonl"), tree: Path = ROOT) -> None:
    """Run ``number`` mutants, drawn evenly over the modules by ``seed``, and print the share that some test kills."""
    torch.set_num_threads(1)
    import hypothesis  # noqa: F401  imported once for all forks

    draw, chosen = random.Random(seed), []
    modules = [f"{folder}/{name}.py" for folder, names in ROOMS.items() for name in names]
    for place, module in enumerate(modules):
        total = mutate(ast.parse((tree / module).read_text()))[0]
        share = number // len(modules) + (place < number % len(modules))
        chosen += [(module, at) for at in sorted(draw.sample(range(total), min(share, total)))]
    draw.shuffle(chosen)
    to.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in to.read_text().splitlines()] if to.exists() else []
    done = {(row["module"], row["at"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder, to.open("a") as out:
        copy = Path(folder) / "tree"
        shutil.copytree(tree, copy, ignore=lambda folder, names: SKIPPED & {*names} if Path(folder) == tree else (), symlinks=True)
        limits: dict[str, float] = {}
        flaky: dict[str, set[str]] = {}  # tests that fail here without a mutant, as those that need a terminal
        for module, at in tqdm.tqdm([pair for pair in chosen if pair not in done], unit="mutant"):
            room = str(Path(module).parent)
            tests = tuple(f"tests/{path}" for path in TESTS.get(room, (room,)))
            if room not in limits:
                start = time.monotonic()
                broken = run(copy, tests, 900)
                limits[room] = 3 * (time.monotonic() - start) + 30
                flaky[room] = set(broken)
                print(room, round(time.monotonic() - start, 1), "s", broken, flush=True)
            source = (tree / module).read_text()
            syntax = ast.parse(source)
            _, what, line = mutate(syntax, at)
            (copy / module).write_text(ast.unparse(syntax))
            killers = [test for test in run(copy, tests, limits[room]) if test not in flaky[room]]
            (copy / module).write_text(source)
            code = source.splitlines()[line - 1].strip()
            row = {"module": module, "at": at, "line": line, "what": what, "code": code, "killers": killers}
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
    killed, all_ = Counter(r["module"] for r in rows if r["killers"]), Counter(r["module"] for r in rows)
    for module in modules:
        print(f"{module:40} {killed[module]:4} of {all_[module]}")
    print(f"{'all':40} {killed.total():4} of {all_.total()}")


if __name__ == "__main__":
    tyro.cli(main)
