"""A probe that loads is the probe that was saved; any other file is refused with a reason."""

import json

import pytest
import torch

from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.direction import DirectionFitter, DirectionProbe
from mi_route2.probes.store import FORMAT, load_probe, save_probe
from mi_route2.tensor_files import write_tensors

WEIGHT = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DIRECTION = DirectionFitter(WEIGHT).fit().direction


@pytest.mark.parametrize(
    "probe",
    [DirectionProbe(DIRECTION, "cosine"), DirectionProbe(DIRECTION, "projection"), AffineProbe(WEIGHT, -0.3)],
    ids=["cosine", "projection", "affine"],
)
def test_a_saved_probe_scores_the_same_bit_for_bit(tmp_path, probe):
    h = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 4, dtype=torch.bool)
    save_probe(tmp_path / "probe.safetensors", probe, {"layer": "blocks.1"})
    loaded, about = load_probe(tmp_path / "probe.safetensors")
    assert type(loaded) is type(probe)
    assert about == {"layer": "blocks.1"}
    assert torch.equal(loaded.score_tokens(h), probe.score_tokens(h))
    assert torch.equal(loaded.score_rollouts(h, mask), probe.score_rollouts(h, mask))
    assert [file.name for file in tmp_path.iterdir()] == ["probe.safetensors"]


HEADER = {"format": FORMAT, "kind": "affine", "settings": "{}", "about": "{}"}
BIAS = torch.zeros(1, dtype=torch.float64)
TENSORS = {"weight": WEIGHT, "bias": BIAS}
COSINE = {**HEADER, "kind": "direction", "settings": json.dumps({"score": "cosine"})}


def test_the_untouched_file_loads(tmp_path):
    """So that every refusal below is due to its one change."""
    for header, tensors in ((HEADER, TENSORS), (COSINE, {"direction": DIRECTION})):
        write_tensors(tmp_path / "p", tensors, header)
        load_probe(tmp_path / "p")


@pytest.mark.parametrize(
    ("header", "tensors", "fault"),
    [
        ({**HEADER, "format": "something else"}, TENSORS, "format"),
        ({}, TENSORS, "format"),
        ({**HEADER, "kind": "mlp"}, TENSORS, "not one of direction, affine"),
        ({**HEADER, "settings": "{"}, TENSORS, "not JSON"),
        ({**HEADER, "about": "[1]"}, TENSORS, "not a JSON object"),
        ({**HEADER, "settings": '{"score": "cosine"}'}, TENSORS, "settings"),
        (HEADER, {"weight": WEIGHT}, r"expected \['bias', 'weight'\]"),
        (HEADER, {**TENSORS, "extra": 2 * WEIGHT}, "extra"),
        (HEADER, {**TENSORS, "weight": WEIGHT[:, None]}, r"\(6, 1\)"),
        (HEADER, {**TENSORS, "weight": WEIGHT[:0]}, r"\(0,\)"),
        (HEADER, {**TENSORS, "bias": 2 * WEIGHT}, r"expected \(1,\)"),
        (HEADER, {**TENSORS, "weight": WEIGHT * torch.inf}, "finite"),
        (HEADER, {**TENSORS, "bias": BIAS * torch.nan}, "finite"),
        (HEADER, {**TENSORS, "weight": WEIGHT.float()}, "float64"),
        (COSINE, {"direction": 2 * DIRECTION}, "unit vector"),
        (COSINE, {"direction": DIRECTION * torch.nan}, "finite"),
        ({**COSINE, "settings": '{"score": "dot"}'}, {"direction": DIRECTION}, "cosine, projection"),
        ({**COSINE, "settings": "{}"}, {"direction": DIRECTION}, "settings"),
    ],
)
def test_a_file_that_is_not_exactly_a_probe_is_refused_with_the_reason(tmp_path, header, tensors, fault):
    path = tmp_path / "probe.safetensors"
    write_tensors(path, tensors, header)
    with pytest.raises(ValueError, match=fault):
        load_probe(path)


def test_the_same_probe_gives_the_same_bytes(tmp_path):
    about = {"layer": "blocks.1", "labels": "oracle", "note": "a"}
    for name in ("a", "b"):
        save_probe(tmp_path / name, AffineProbe(WEIGHT, -0.3), dict(about))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_cut_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "probe.safetensors"
    save_probe(path, AffineProbe(WEIGHT, 0.0))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="safetensors"):
        load_probe(path)
    path.write_bytes(b"not a probe")
    with pytest.raises(ValueError, match="safetensors"):
        load_probe(path)


def test_only_known_probes_are_saved_and_only_finite_ones_exist(tmp_path):
    class Other:
        def score_tokens(self, h):
            return h[..., 0]

        def score_rollouts(self, h, mask):
            return h[:, 0, 0]

    with pytest.raises(ValueError, match="cannot be saved"):
        save_probe(tmp_path / "p", Other())
    with pytest.raises(TypeError, match=r"about must be dict\[str, str\] \| None, not dict"):
        save_probe(tmp_path / "p", AffineProbe(WEIGHT, 0.0), {"auroc": 0.9})  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="NaN or infinite"):
        AffineProbe(WEIGHT, float("nan"))
