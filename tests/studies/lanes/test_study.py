"""A study is its parts: they are checked, resumed to the same bytes, and refused where they are damaged."""

import json
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hinted import mixed_scores
from tiny_lanes import FEW

from studies.lanes.arms import ARMS
from studies.lanes.measures import Noted, Subject, excerpt, routing, usual_weights
from studies.lanes.quantization.gptq import QuantizedWeights, collect_hessians, dequantized, quantize
from studies.lanes.quantization.size import HEADER, pack
from studies.lanes.scoring.bpb import bpb, score
from studies.lanes.scoring.tapin import Mixing
from studies.lanes.scoring.ttt import adapt
from studies.lanes.scoring.ttt import trained as trained_by
from studies.lanes.settings import LanesSettings, open_text
from studies.lanes.study import LanesJob, jobs_of, load, run_job, run_study, trained
from studies.lanes.text import BOS

pytestmark = pytest.mark.process


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def arms_of(settings: LanesSettings, folder: Path, texts: Path) -> list[LanesJob]:
    """The jobs of two arms."""
    return [job for job in jobs_of(settings, folder, texts, [0], FEW) if job.arm is not None]


def whole(job: LanesJob, part: str) -> bool:
    try:
        return job.read(part) is not None
    except ValueError:
        return False


def test_a_run_that_was_cut_ends_in_the_same_bytes(study: Path, tiny: LanesSettings, texts: Path, tmp_path: Path) -> None:
    """Some of the parts lost, and what a killed worker leaves behind beside them; what is there is not made again."""
    out, rng = tmp_path, random.Random(0)
    jobs = arms_of(tiny, out / tiny.folder, texts)
    for job in jobs:
        for part in job.part_names:
            source = LanesJob(tiny, study, texts, job.name, job.seed).path(part)
            for path in (source, source.with_suffix(".safetensors")):
                if path.exists() and rng.random() < 0.5:
                    job.path(part).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, job.path(part).parent)
    place = out / tiny.folder / "arms" / FEW[0] / "seed-0"
    place.mkdir(parents=True, exist_ok=True)
    (place / ".bpb.json.123.tmp").write_text("{")
    left = [job.path(p) for job in jobs for p in job.part_names if whole(job, p)]
    assert 1 < len(left) < len(jobs[0].part_names + jobs[1].part_names) - 1
    missing = [job.path(p) for job in jobs for p in job.part_names if job.path(p).exists() and not whole(job, p)]
    for path in missing:  # a JSON file is written last: without its tensors it was damaged, not cut
        path.unlink()
    inodes = [path.stat().st_ino for path in left]
    for job in jobs:
        run_job(job)
    assert all(job.finished for job in jobs)
    assert [path.stat().st_ino for path in left] == inodes
    own, uncut = files(out / tiny.folder), files(study)
    assert [name for name in own if own[name] != uncut.get(name)] == []


def test_a_study_with_a_damaged_part_neither_runs_nor_reports(
    study: Path, tiny: LanesSettings, texts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / tiny.folder
    shutil.copytree(study, folder)
    path = folder / "arms" / "shipped" / "seed-0" / "bpb.json"
    raw = json.loads(path.read_text())
    raw["content"]["bpb"] -= 1
    path.write_text(json.dumps(raw))
    for use in (lambda: load(folder), lambda: run_study(tiny, [0], tmp_path, text=texts, workers=1, quiet=True)):
        with pytest.raises(ValueError, match=r"bpb.json or the tensors beside it are damaged"):
            use()
    path.unlink()
    with pytest.raises(ValueError, match="is missing because the run was interrupted"):
        load(folder)


def test_what_was_trained_is_what_is_measured(study: Path, tiny: LanesSettings) -> None:
    """The stored weights give the stored number, through another forward than the one that trained them."""
    job = LanesJob(tiny, study, None, "wide-embeddings", 0)
    found = job.read("train")
    assert found is not None
    model = trained(job)
    assert all(torch.equal(value, found[1][f"weights.{name}"]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="does not exist: run the study first"):
        trained(replace(job, seed=7))


@pytest.fixture(scope="module")
def subject(study: Path, tiny: LanesSettings, texts: Path) -> Subject:
    return Subject(tiny, open_text(texts), ARMS["shipped"], 0, trained(LanesJob(tiny, study, None, "shipped", 0)))


def content(study: Path, part: str) -> dict[str, Any]:
    """What was measured on the arm of ``subject``."""
    return json.loads((study / "arms" / "shipped" / "seed-0" / f"{part}.json").read_text())["content"]


def test_every_run_at_test_time_is_the_one_that_its_name_says(study: Path, subject: Subject) -> None:
    """Each again, by itself, at the best rate of the tuning texts; with hints mixed in for good where they were only noted."""
    found = content(study, "ttt")
    for scope, rate in found["rates"].items():
        gains = {row["rate"]: row["gain"] for row in found["tuning"] if row["scope"] == scope}
        assert gains[rate] == max(gain for gain in gains.values() if gain is not None)
    usual = LanesSettings("0" * 64).evaluation
    assert usual.tune // usual.tune_piece > 5
    evaluation, model, mixing = subject.settings.evaluation, subject.model, Mixing(cross=0.12)
    tuning = excerpt(subject.corpus, "tune", evaluation.tune, evaluation.tune_piece, 0)
    tokens = excerpt(subject.corpus, "test", evaluation.adapted, evaluation.adapted_piece, 0)
    hints = Noted(tokens, evaluation, {}).hints
    rate = found["rates"]["controls"]
    assert found["rates"]["all"] == 0.1
    runs = {"plain": ("none", 0.0), "all": ("all", 0.1), "controls": ("controls", rate), "shared": ("controls", 0.1)}
    with dequantized(model, usual_weights(subject)):
        plain = adapt(model, tuning, replace(evaluation.ttt, scope="none")).bpb
        for row in found["tuning"]:
            run = adapt(model, tuning, replace(evaluation.ttt, scope=row["scope"], rate=row["rate"]))
            assert row["gain"] == pytest.approx(plain - run.bpb, abs=1e-9)
        for name, (scope, rate) in runs.items():
            own = replace(evaluation.ttt, scope=scope, rate=rate)
            assert found["bpb"][name] == pytest.approx(adapt(model, tokens, own).bpb, abs=1e-9)
            mixed = mixed_scores(lambda watch, own=own: adapt(model, tokens, own, watch=watch), tokens, hints, mixing)
            assert found["hinted"][name] == pytest.approx(bpb(mixed, tokens), abs=1e-9)
    sizes = [sum(p.numel() for p in trained_by(model, scope).values()) for scope in ("controls", "all")]
    assert found["share"] == sizes[0] / sizes[1]


def test_every_quantisation_and_every_mixture_is_the_one_that_its_name_says(study: Path, subject: Subject) -> None:
    evaluation, model = subject.settings.evaluation, subject.model
    found, tapped = content(study, "calibrations"), content(study, "tapin")
    usual = evaluation.gptq

    def weights(batches: int, **changes: Any) -> QuantizedWeights:
        return quantize(
            model, collect_hessians(model, subject.calibration(batches), batches), replace(usual, batches=batches, **changes)
        )

    variants = {
        "few": weights(1),
        "many": weights(2),
        "clipped": weights(1, clip_lambda=0.175),
        "nearest": weights(1, method="nearest"),
    }
    for name, own in variants.items():
        with dequantized(model, own):
            assert found[name] == pytest.approx(subject.bpb(), abs=1e-9)
    for point in found["points"]:
        assert point["bytes"] == HEADER + len(pack(weights(1, k=point["k"]), evaluation.compressor))
    assert [point["k"] for point in found["points"]] == list(evaluation.clips)
    tokens = subject.test
    hints = Noted(tokens, evaluation, {}).hints
    scored = partial(score, model, tokens, window=evaluation.window, stride=evaluation.stride)
    for name, mixing in {"within": Mixing(cross=0.0), "old": Mixing(cross=0.06), "new": Mixing(cross=0.12)}.items():
        scores = mixed_scores(lambda watch: scored(watch=watch), tokens, hints, mixing)
        assert tapped["bpb"][name] == pytest.approx(bpb(scores, tokens), abs=1e-9)
    assert tapped["bpb"]["plain"] == pytest.approx(subject.bpb(), abs=1e-9)
    pairs = list(zip(hints.token.tolist(), tokens.tolist()[1:]))
    offered = [pair for pair in pairs if pair[0] >= 0]
    assert tapped["hints"]["offered"] == pytest.approx(len(offered) / len(pairs))
    assert tapped["hints"]["right"] == pytest.approx(sum(hint == token for hint, token in offered) / len(offered))


def test_routing_is_read_off_the_layers_whose_lanes_both_reach_the_end(subject: Subject) -> None:
    content, _ = routing(subject)
    post = subject.model.post.detach()[4]  # of the two layers behind the fork, the last one's lane 0 is thrown away
    attn, mlp = float(post[0, 0] - post[0, 1]) / 0.6, float(post[1, 1] - post[1, 0]) / 0.6
    assert content["by_sublayer"] == pytest.approx({"attn": attn, "mlp": mlp}, rel=1e-4)
    assert content["pattern"] == pytest.approx((attn + mlp) / 2, rel=1e-4)
    assert content["apart"] == pytest.approx(float((post[:, 0] - post[:, 1]).abs().mean() / (post - 1).abs().mean()), rel=1e-4)


def test_test_text_is_pieces_that_the_seed_draws(texts: Path) -> None:
    corpus = open_text(texts)
    whole_split = bytes(t for t in corpus.stream("test").tolist() if t != BOS)
    first, again, other = (excerpt(corpus, "test", 192, 96, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first[::96].tolist() == [BOS, BOS]
    for run in bytes(t if t != BOS else 0 for t in first.tolist()).split(b"\0"):
        assert run in whole_split
