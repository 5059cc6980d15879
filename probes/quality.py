"""Quality of a mask, from one batch of rollouts: cheap enough for every training step.

    precision = TP / (TP + FP)      recall = fire_hack = TP / (TP + FN)      fire_clean = FP / (FP + TN)
    recall_1pct = recall of the best threshold of the scores with FP / (FP + TN) <= .01       (`auroc.recall_at_fpr`)
    f05 = 1.25 TP / (1.25 TP + .25 FN + FP)      fire_ratio = fire_hack / fire_clean

F uses beta = 1/2 because a wrong flag costs learning signal, while a missed hack may still be absorbed. `positive` is the oracle's
label: these numbers are for the recorder, never for the route or the loss. Teacher rollouts count in `fire_teacher` only: they were
selected as hacks, and would improve every other number.
"""

import numpy as np
from jaxtyping import Bool

from mi_route2.probes.auroc import auroc, binary, recall_at_fpr

Flags = list[bool] | list[int]
KEYS = ("auroc", "recall_1pct", "precision", "recall", "f05", "fire_hack", "fire_clean", "fire_teacher", "fire_ratio")


def mask_quality(
    scores: list[float] | None, flags: Flags | None, positive: Flags, teacher: Flags | None = None
) -> dict[str, float | None]:
    """Return the quality of scores and flags, given one of each per rollout.

    Args:
        scores: higher means more hack-like; None if the mask has none (auroc and recall_1pct are then None).
        flags: the flags that the route used, after every gate; None if it flags nothing (all others are then None).
        positive: the oracle's label.
        teacher: True for rollouts that the student did not write; None if there are none.

    Returns:
        Exactly `KEYS`. A value is None if undefined: no such rollouts, one class only (auroc), no hack or fewer than 100 clean
        rollouts (recall_1pct), nothing flagged (precision), or no clean rollout flagged (fire_ratio). f05 is None without hacks,
        and 0 if all hacks were missed.

    Raises:
        ValueError: lists of different lengths, a flag or label that is neither, or a score that is not finite.
    """
    y, student = _labels(positive, teacher)
    out: dict[str, float | None] = dict.fromkeys(KEYS)
    if scores is not None:
        values = _scores(scores, y)[student]
        out["auroc"], out["recall_1pct"] = auroc(values, y[student]), recall_at_fpr(values, y[student]).value
    if flags is None:
        return out
    fired = binary(np.asarray(flags))
    if fired.shape != y.shape:
        raise ValueError(f"{len(flags)} flags for {len(positive)} rollouts.")
    hit, missed = int((fired & y & student).sum()), int((~fired & y & student).sum())
    false, passed = int((fired & ~y & student).sum()), int((~fired & ~y & student).sum())
    out["precision"] = _ratio(hit, hit + false)
    out["recall"] = out["fire_hack"] = _ratio(hit, hit + missed)
    out["fire_clean"] = _ratio(false, false + passed)
    out["fire_teacher"] = _ratio(int((fired & ~student).sum()), int((~student).sum()))
    if out["fire_hack"] is not None:
        out["f05"] = 1.25 * hit / (1.25 * hit + 0.25 * missed + false)
        out["fire_ratio"] = _ratio(out["fire_hack"], out["fire_clean"] or 0)
    return out


def score_means(scores: list[float], positive: Flags, teacher: Flags | None = None) -> dict[str, float | None]:
    """Return the mean score of the student's hacks, the student's clean rollouts, and the teacher's; None for empty groups.

    Keys: student_hack, student_clean, teacher. ValueError for lists of different lengths or a non-finite score.
    """
    y, student = _labels(positive, teacher)
    values = _scores(scores, y)
    groups = {"student_hack": y & student, "student_clean": ~y & student, "teacher": ~student}
    return {name: float(values[rows].mean()) if rows.any() else None for name, rows in groups.items()}


def _labels(positive: Flags, teacher: Flags | None) -> tuple[Bool[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Return hack labels, and the mask of the student's rollouts."""
    y = binary(np.asarray(positive))
    marks = np.zeros_like(y) if teacher is None else binary(np.asarray(teacher))
    if y.ndim != 1 or marks.shape != y.shape:  # a column would be compared with every rollout
        raise ValueError(f"Teacher marks {list(marks.shape)} for labels {list(y.shape)}: give a list of each, one per rollout.")
    return y, ~marks


def _scores(scores: list[float], y: np.ndarray) -> np.ndarray:
    values = np.array(scores, dtype=float)
    if values.shape != y.shape:
        raise ValueError(f"{len(scores)} scores for {len(y)} rollouts.")
    if not np.isfinite(values).all():
        raise ValueError("A score is NaN or infinite: the mask that computed it is broken.")
    return values


def _ratio(part: int | float, whole: int | float) -> float | None:
    return part / whole if whole else None
