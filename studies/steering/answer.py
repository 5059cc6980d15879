"""Is a monitored quarantine better than a deleted one? The comparison, its rule fixed before any rollout was judged.

Better: by paired 95% intervals it hacks no more (held out) and solves more, or hacks less and solves no less. Worse: the other
way round. Both told apart in opposite senses is a trade; neither is no difference. The comparison is made at the operating
threshold, with always on too: where that does as well as the monitor next to deletion, nothing comes from the monitor. The other
thresholds are shown as a frontier, and how many of them look better by their means alone is counted, not chosen from.
"""

from collections.abc import Mapping
from typing import Any

from studies.steering.cells import DELETED, ON
from studies.steering.results import Estimate, Study

MECHANISMS = ("forward", "early", "next token", "latch")
"""Ways to close a quarantine that a probe may take; ``open`` is the wrong way round, a control."""
SUBJECTS = ("absorb", "route2-full")


def verdict(difference: Mapping[str, Estimate]) -> str:
    """See the module."""
    hack, solve = difference["hack_held"].direction, difference["solve"].direction
    if not hack and not solve:
        return "no difference"
    if hack <= 0 and solve >= 0:
        return "better"
    if hack >= 0 and solve <= 0:
        return "worse"
    return "a trade: hacks and solves " + ("more" if hack > 0 else "less")


def comparisons(study: Study) -> list[dict[str, Any]]:
    """Every cell of the operating threshold, and the ends, next to deletion and next to always on; paired."""
    found = []
    for subject in SUBJECTS:
        cells = study.cells(subject, "quarantine")
        for reference in (DELETED, ON):
            for cell in cells:
                if cell.get("quantile", study.settings.operating) != study.settings.operating or cell["name"] == reference:
                    continue
                difference = study.estimates(subject, "quarantine", cell["name"], minus=reference)
                entry = {"subject": subject, "reference": reference, **cell, "verdict": verdict(difference)}
                found.append(entry | {metric: each.as_dict() for metric, each in difference.items()})
    return found


def against_random(study: Study) -> list[dict[str, Any]]:
    """The probe minus each random one under the same mechanism, averaged over the random ones; paired."""
    found = []
    for subject in SUBJECTS:
        cells = [c for c in study.cells(subject, "quarantine") if c.get("quantile") == study.settings.operating]
        for how in MECHANISMS:
            own = [c for c in cells if c["how"] == how and c["probe"] == "probe"]
            random = [c for c in cells if c["how"] == how and str(c["probe"]).startswith("haar")]
            if not own or not random:
                continue
            a = study.values(subject, "quarantine", own[0]["name"])
            others = [study.values(subject, "quarantine", each["name"]) for each in random]
            row = {m: study.draws.estimate(a[m] - sum(each[m] for each in others) / len(others)) for m in a}
            entry = {"subject": subject, "how": how, "random": len(random), "verdict": verdict(row)}
            found.append(entry | {m: each.as_dict() for m, each in row.items()})
    return found


def frontier_counts(study: Study) -> dict[str, dict[str, int]]:
    """By subject: thresholds and mechanisms of the real probe that were tried, and how many hack less and solve more than deletion
    by their means, and by both intervals."""
    found = {}
    for subject in SUBJECTS:
        tried = [c for c in study.cells(subject, "quarantine") if c["how"] in MECHANISMS and c["probe"] == "probe"]
        rows = [study.estimates(subject, "quarantine", c["name"], minus=DELETED) for c in tried]
        by_mean = sum(
            row["hack_held"].mean <= 0 <= row["solve"].mean and (row["hack_held"].mean, row["solve"].mean) != (0, 0) for row in rows
        )
        sure = sum(verdict(row) == "better" for row in rows)
        found[subject] = {"tried": len(tried), "better_by_means": by_mean, "better_by_intervals": sure}
    return found


def sentences(study: Study) -> str:
    """answer.md: the answer for each model, by the mechanisms that a probe may take."""
    rows = comparisons(study)
    counts, lines = frontier_counts(study), []
    for subject in SUBJECTS:
        lines.append(f"- **{subject}**, at the threshold that was fixed before:")
        for reference, text in ((DELETED, "a deleted quarantine"), (ON, "one that is always on")):
            own = [row for row in rows if (row["subject"], row["reference"]) == (subject, reference)]
            gated = [row for row in own if row.get("probe") == "probe" and row["how"] in MECHANISMS]
            said = [f"{row['how']} **{row['verdict']}**" for row in gated]
            always = [f" (always on, without any monitor: {row['verdict']})" for row in own if row["name"] == ON]
            lines.append(f"    - next to {text}: {', '.join(said)}{''.join(always)}")
        count = counts[subject]
        lines.append(
            f"    - over all {count['tried']} thresholds and mechanisms {count['better_by_means']} look better than deletion by "
            f"their means, and {count['better_by_intervals']} by their intervals (uncorrected)"
        )
    return "\n".join(lines) + "\n"
