"""Adapters that are left out: sets of tensors against the library's contexts, shares against sums by hand, a chat run traced."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from families import make_policy, make_tokens
from matplotlib.figure import Figure
from parity import Parity

from mi_route2.tensor_files import read_tensors, write_tensors
from mi_route2.validation import write_json
from studies.common.tables import number
from studies.environments.chat import make_tiny_model
from studies.environments.protocol import Verdict, write_pairs
from studies.tracing import blocks
from studies.tracing.blocks import EVERYWHERE, _figure, _pairs, _table, only, places, share
from studies.training.arms import ARMS
from studies.training.job import FULL, Job
from studies.training.manifest import MANIFEST
from studies.training.run import run_job
from studies.training.settings import CHAT, ChatModel
from studies.training.worlds import open_world, weights_hash

SAID = {"into": "put into the base", "out": "left out of the whole"}


@pytest.mark.parametrize("spec", ["lora", "svd-low"])
def test_sets_of_adapters_are_the_contexts_of_the_library_and_nothing_stays(spec: str) -> None:
    policy, (tokens, _) = make_policy("Qwen3", spec)[1], make_tokens(2)
    adapters = policy.adapters
    kept, quarantine = (places(adapters, adapter, 2)[EVERYWHERE] for adapter in ("kept", "quarantine"))
    assert kept | quarantine == adapters.tensors().keys()
    before = policy.model(tokens).logits
    for on, context in ((set(), adapters.reference), (kept, adapters.deployed), (kept | quarantine, adapters.full)):
        with context():
            expected = policy.model(tokens).logits
        with only(adapters, on):
            torch.testing.assert_close(policy.model(tokens).logits, expected, rtol=0, atol=1e-12)
    assert torch.equal(policy.model(tokens).logits, before)


def test_groups_of_blocks_are_whole_and_without_overlap() -> None:
    adapters = make_policy("Qwen3", "lora")[1].adapters
    found = places(adapters, "kept", 6)
    groups = {where: names for where, names in found.items() if where != EVERYWHERE}
    assert list(groups) == ["0-0", "1-1"]
    assert sorted(name for names in groups.values() for name in names) == sorted(found[EVERYWHERE])
    assert all(".blocks.1." in name for name in groups["1-1"])


def test_shares_are_ratios_of_means_in_the_table_and_in_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    none, whole, into, out = draw.normal(size=(4, 40)) + np.array([[0.0], [4.0], [1.0], [2.0]])
    nats = {"none": none.tolist(), "all": whole.tolist()}
    for where in ("0-4", "all"):
        nats |= {f"into kept {where}": into.tolist(), f"out kept {where}": out.tolist()}
    gap = sum(whole) - sum(none)
    parts = {"into": sum(into) - sum(none), "out": sum(whole) - sum(out)}
    for way, part in parts.items():
        value, low, high = share(nats, way, "kept", "all", np.random.default_rng(1)) or (0.0, None, None)
        assert low is not None
        assert high is not None
        assert value == pytest.approx(part / gap)
        assert low < value < high
        assert high - low < 1
    drawn: list[Figure] = []
    monkeypatch.setattr("studies.tracing.blocks.save_figure", lambda figure, path: (drawn.append(figure), path)[1])
    _figure({("vanilla", 0): nats}, "functions", tmp_path / "blocks.png")
    assert drawn[0].axes[0].get_title() == "functions: vanilla"
    header, _, row = (line.split("|") for line in _table({("vanilla", 0): nats}, tmp_path / "blocks.md").read_text().splitlines())
    for place, axes, (way, said) in zip((-3, -2), drawn[0].axes, SAID.items(), strict=True):
        assert header[place].strip() == said
        assert axes.get_ylabel() == f"share, {said}"
        assert row[place].split()[0] == number(parts[way] / gap)
        (line,) = (line for line in axes.lines if line.get_label() == "kept")
        assert np.asarray(line.get_ydata()).tolist() == pytest.approx([parts[way] / gap])
    assert row[4].strip() == f"{gap / 40:+.1f}"


def test_a_pair_is_a_hack_of_the_arm_and_an_honest_answer_of_the_base_model_if_possible_a_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {  # of the arm and of the base model: H is a hack, W a wrong and R a right answer
        "both": ("RH", "HR"),
        "right before wrong": ("HH", "WR"),
        "no hack of the arm": ("WR", "HR"),
        "no honest one of the base": ("HR", "HH"),
        "wrong if none is right": ("HW", "HW"),
    }
    state = ["none"]

    @contextmanager
    def switched(name: str) -> Iterator[None]:
        state[0] = name
        yield

    adapters = SimpleNamespace(reference=lambda: switched("base"), full=lambda: switched("arm"))

    def sample(policy: object, asking: list[SimpleNamespace], generator: torch.Generator) -> SimpleNamespace:
        kinds = [answers[one.text][state[0] == "base"][i % 2] for i, one in enumerate(asking)]
        return SimpleNamespace(completions=[f"{state[0]} {kind}" for kind in kinds])

    world = SimpleNamespace(
        tasks=lambda split: list(answers), modes=SimpleNamespace(loopholes=("m",)),
        prompt=lambda task, mode: SimpleNamespace(text=task, mode=mode), sample=sample,
    )  # fmt: skip
    judge = lambda samples: [Verdict(text[-1] == "R", "H" in text, "H" in text, {}) for text in samples.completions]  # noqa: E731
    monkeypatch.setattr("studies.tracing.blocks._run", lambda job: {})
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # what is given has the attributes that are read, and no type
    found: Any = _pairs
    witness, policy = SimpleNamespace(judge=judge), SimpleNamespace(adapters=adapters)
    pairs = found(tmp_path / "pairs.json", world, witness, policy, SimpleNamespace(seed=0), 9, 2)
    assert pairs == [
        ("m", "both", "arm H", "base R"),
        ("m", "right before wrong", "arm H", "base R"),
        ("m", "wrong if none is right", "arm H", "base W"),
    ]


@pytest.mark.study
def test_a_run_of_a_chat_model_is_traced_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    make_tiny_model(Parity(), folder, steps=60, width=32, layers=2, batch=16, max_new=16, progress=False)
    chat = ChatModel(str(folder), weights_hash(folder), max_new=10, token_budget=1 << 20, device="cpu")
    settings = replace(
        CHAT, world="parity:Parity", chat=chat, steps=2, prompts=3, group=4, kept_rank=2, kept_lr=3e-3, quarantine_rank=2,
        quarantine_lr=1e-3, evaluation_prompts=4,
    )  # fmt: skip
    root, out = tmp_path / "run", tmp_path / "traced"
    with open_world(settings) as (world, _):
        write_pairs(world.make_pairs(0, 4, "hack"), mine := tmp_path / "mine.toml")
    for arm in ("vanilla", "absorb"):
        run_job(Job(root, tmp_path / "cache", settings, 0, ARMS[arm], mine))
    write_json(root / "settings.json", settings.as_dict())
    trace = partial(blocks.trace, pairs_file=mine)
    with pytest.raises(ValueError, match=r"with other persona pairs: give the --pairs that it was made with"):
        trace(root, ["vanilla"], [0], out, prompts=6, answers=6, groups=2, pairs_file=None)
    paths = trace(root, ["vanilla", "absorb"], [0], out, prompts=6, answers=6, groups=2)
    assert [path.name for path in paths] == ["blocks.md", "blocks.png"]
    nats = json.loads((out / "absorb-0.json").read_text())["nats"]
    cells = itertools.product(("into", "out"), ("kept", "quarantine"), ("0-0", "1-1", "all"))
    assert sorted(nats) == sorted(["none", "all", *map(" ".join, cells)])
    assert nats["into kept all"] == pytest.approx(nats["out quarantine all"], abs=1e-6)
    vanilla = json.loads((out / "vanilla-0.json").read_text())["nats"]
    assert vanilla["all"] == vanilla["into kept all"]
    for found in (vanilla, nats):  # each arm has come to prefer its own hacks
        assert sum(found["all"]) > sum(found["none"])
    table, pairs = (out / "blocks.md").read_text(), out / "pairs-vanilla-0.json"
    kept = json.loads(pairs.read_text())
    assert kept["question"]["identity"] == json.loads((out / "vanilla-0.json").read_text())["question"]["identity"]
    pairs.write_text(json.dumps(kept | {"question": kept["question"] | {"identity": "of another training"}, "pairs": []}))
    monkeypatch.setattr("studies.tracing.blocks._measure", None)
    trace(root, ["vanilla", "absorb"], [0], out, prompts=6, answers=6, groups=2)
    assert (out / "blocks.md").read_text() == table
    assert json.loads(pairs.read_text()) == kept  # and not those of another run
    _train_anew(root / "seed-0" / "vanilla")
    pairs.write_text("{}")  # a file of something else is no reason to end
    traced: list[str] = []
    monkeypatch.setattr("studies.tracing.blocks._measure", lambda job, *rest: (traced.append(job.name), vanilla)[1])
    for _ in range(2):
        trace(root, ["vanilla", "absorb"], [0], out, prompts=6, answers=6, groups=2)
    assert traced == ["vanilla"]
    assert json.loads(pairs.read_text())["question"] != kept["question"]


def _train_anew(run: Path) -> None:
    """Give a finished run other weights, as other code does under the same settings."""
    tensors, header = read_tensors(run / FULL)
    write_tensors(run / FULL, {name: 1.5 * values for name, values in tensors.items()}, header)
    manifest = json.loads((run / MANIFEST).read_text())
    manifest["checksums"][FULL] = hashlib.sha256((run / FULL).read_bytes()).hexdigest()
    write_json(run / MANIFEST, manifest)
