"""Files that change while a run goes on: the manifest says what the run was made of."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import tiny_job, tiny_settings

from studies.environments.micro import warmstart
from studies.environments.micro.pairs import make_pairs
from studies.environments.micro.settings import get_world
from studies.environments.micro.warmstart import cached_at, warm_start
from studies.environments.protocol import write_pairs
from studies.training.arms import ARMS, CANARIES
from studies.training.build import build_canary
from studies.training.job import DEPLOYED, FULL, Job, build_pairs, finished_policy
from studies.training.manifest import MANIFEST
from studies.training.recorder import Recorder
from studies.training.run import run_job
from studies.training.settings import ChatModel
from studies.training.worlds import base_model, data_hash, open_world, weights_hash

pytestmark = pytest.mark.study


def test_a_run_is_certified_with_the_pairs_that_it_read(tmp_path: Path, cache: Path) -> None:
    mine, settings = tmp_path / "mine.toml", tiny_settings()
    old, new = make_pairs(get_world("strong"), 1, 4), make_pairs(get_world("strong"), 2, 4)
    write_pairs(old, mine)

    def made(arm: str = "route2-act") -> Job:
        return Job(tmp_path / settings.folder, cache, settings, 0, ARMS[arm], mine)

    job, other = made(), made("filter-canary")
    before, identity = job.pairs_hash, other.identity

    note = Recorder.note

    def edit(recorder: Recorder, *given: Any) -> Any:
        write_pairs(new, mine)  # as a user may, who has an idea
        return note(recorder, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Recorder, "note", edit)
        run_job(job)
    assert json.loads((job.folder / MANIFEST).read_text())["pairs_sha256"] == before
    with pytest.raises(ValueError, match=r"with other persona pairs: give the --pairs that it was made with \(or none,"):
        _ = made().finished  # the run of the new pairs is another
    with open_world(settings) as (world, _), pytest.raises(ValueError, match=r"mine.toml was changed since this run was begun"):
        build_pairs(job, world, "hack")
    assert other.identity == identity  # with the runs of its canary, which are of the same pairs
    mine.unlink()
    assert [canary.pairs_hash for canary in other.canaries] == [before] * 6


def test_a_base_model_that_was_trained_again_is_not_taken_for_that_of_a_finished_arm(tmp_path: Path, cache: Path) -> None:
    """By other code: its settings are the same, and so is the name of its file."""
    own = shutil.copytree(cache, tmp_path / "warmstarts")
    job = tiny_job(tmp_path, CANARIES["canary-10"], cache=own)
    canary = tiny_job(tmp_path, replace(ARMS["filter-canary"], canaries=("canary-10",)), cache=own)
    run_job(job)
    finished_policy(job)
    made_of = get_world(job.settings.world), job.settings.warm, 0, own
    base = warm_start(*made_of, progress=False)
    with torch.no_grad():
        base.unembed.weight *= 1.1
    warmstart._save(base, *cached_at(*made_of))
    for load, name in ((lambda: finished_policy(job), FULL), (lambda: build_canary(canary), DEPLOYED)):
        with pytest.raises(ValueError) as refused:
            load()
        assert str(refused.value) == (
            f"{job.folder / name} was trained on another base model than the one in {own}, which was made again since: put the "
            f"former one back, or delete {job.folder} and run this arm again"
        )


def test_a_problems_data_are_those_of_the_settings(tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text("{}")
    chat = ChatModel("nowhere", "0", data=str(data), data_hash=data_hash(data))
    settings = tiny_settings(world="leetcode", chat=chat)
    data.write_text("{ }")
    with (
        pytest.raises(ValueError, match=r"tasks.jsonl was changed \(its hash is .*put it back, or run on the new data"),
        open_world(settings),
    ):
        pass
    data.unlink()
    with pytest.raises(ValueError, match=r"its hash is that of nothing"), open_world(settings):
        pass
    assert tiny_job(tmp_path, "vanilla").pairs_hash is None


def test_a_chat_model_is_that_of_the_settings(tmp_path: Path) -> None:
    """Hours may lie between the command, which hashes the folder, and the worker that reads it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def save() -> None:
        sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path / "chat")

    save()
    chat = ChatModel(str(tmp_path / "chat"), weights_hash(tmp_path / "chat"), device="cpu")
    settings = tiny_settings(world="leetcode", chat=chat)
    assert base_model(settings, 0, tmp_path, torch.float32).training is False
    save()  # other random weights
    with pytest.raises(ValueError, match=r"chat was changed \(its hash is .*put it back, or run on the new model into another"):
        base_model(settings, 0, tmp_path, torch.float32)
