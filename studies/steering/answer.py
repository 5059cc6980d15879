"""The comparison of a monitored quarantine with a deleted one, under a rule that was fixed before any rollout was judged.

Better: by paired 95% intervals it hacks no more (held out) and solves more, or it hacks less and solves no less. Worse: the
reverse. If both intervals exclude 0 and the two differences favor opposite sides, the verdict is a trade; if neither excludes 0, it
is no difference. The comparison is made at the operating threshold, and with always on too: if always on does as well as the
monitor relative to deletion, the monitor contributes nothing. The other thresholds are shown as a frontier; how many of them look
better by their means alone is counted, but none is selected.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from studies.steering.cells import DELETED, ON
from studies.steering.results import ROUNDING, Estimate, Study

MECHANISMS = ("forward", "early", "next token", "latch")
"""Ways in which a probe may close a quarantine; ``open`` is the reverse, a control."""
SUBJECTS = ("absorb", "route2-full")


def verdict(difference: Mapping[str, Estimate]) -> str:
    """Return the verdict on a paired difference; the rule is in the module's docstring."""
    hack, solve = difference["hack_held"].direction, difference["solve"].direction
    if not hack and not solve:
        return "no difference"
    if hack <= 0 and solve >= 0:
        return "better"
    if hack >= 0 and solve <= 0:
        return "worse"
    return "a trade: hacks and solves " + ("more" if hack > 0 else "less")


def comparisons(study: Study) -> list[dict[str, Any]]:
    """Return every cell of the operating threshold, and the ends, compared with deletion and with always on; paired."""
    rows = []
    for subject in SUBJECTS:
        cells = study.cells(subject, "quarantine")
        for reference in (DELETED, ON):
            for cell in cells:
                if cell.get("quantile", study.settings.operating) != study.settings.operating or cell["name"] == reference:
                    continue
                difference = study.estimates(subject, "quarantine", cell["name"], minus=reference)
                entry = {"subject": subject, "reference": reference, **cell, "verdict": verdict(difference)}
                rows.append(entry | {metric: asdict(each) for metric, each in difference.items()})
    return rows


def against_random(study: Study) -> list[dict[str, Any]]:
    """Return the probe minus the mean of the random probes under the same mechanism; paired."""
    rows = []
    for subject in SUBJECTS:
        cells = [c for c in study.cells(subject, "quarantine") if c.get("quantile") == study.settings.operating]
        for how in MECHANISMS:
            probed = [c for c in cells if c["how"] == how and c["probe"] == "probe"]
            random = [c for c in cells if c["how"] == how and str(c["probe"]).startswith("haar")]
            if not probed or not random:
                continue
            a = study.values(subject, "quarantine", probed[0]["name"])
            others = [study.values(subject, "quarantine", each["name"]) for each in random]
            row = {m: study.draws.estimate(a[m] - sum(each[m] for each in others) / len(others)) for m in a}
            entry = {"subject": subject, "how": how, "random": len(random), "verdict": verdict(row)}
            rows.append(entry | {m: asdict(each) for m, each in row.items()})
    return rows


def frontier_counts(study: Study) -> dict[str, dict[str, int]]:
    """Return, by subject, how many thresholds and mechanisms of the real probe were tried, and how many look better than deletion.

    They look better if by their means they hack no more and solve no less, and are not equal in both; or by their intervals.
    """
    counts = {}
    for subject in SUBJECTS:
        tried = [c for c in study.cells(subject, "quarantine") if c["how"] in MECHANISMS and c["probe"] == "probe"]
        rows = [study.estimates(subject, "quarantine", c["name"], minus=DELETED) for c in tried]
        means = [(row["hack_held"].mean, row["solve"].mean) for row in rows]
        by_mean = sum(hack <= ROUNDING and solve >= -ROUNDING and max(-hack, solve) > ROUNDING for hack, solve in means)
        sure = sum(verdict(row) == "better" for row in rows)
        counts[subject] = {"tried": len(tried), "better_by_means": by_mean, "better_by_intervals": sure}
    return counts


def sentences(study: Study) -> str:
    """Return the text of answer.md: the answer for each model, by the mechanisms that a probe may use."""
    rows = comparisons(study)
    counts, lines = frontier_counts(study), []
    for subject in SUBJECTS:
        lines.append(f"- **{subject}**, at the threshold that was fixed before:")
        for reference, text in ((DELETED, "a deleted quarantine"), (ON, "one that is always on")):
            compared = [row for row in rows if (row["subject"], row["reference"]) == (subject, reference)]
            gated = [row for row in compared if row.get("probe") == "probe" and row["how"] in MECHANISMS]
            said = [f"{row['how']} **{row['verdict']}**" for row in gated]
            always = [f" (always on, without any monitor: {row['verdict']})" for row in compared if row["name"] == ON]
            lines.append(f"    - next to {text}: {', '.join(said)}{''.join(always)}")
        count = counts[subject]
        lines.append(
            f"    - over all {count['tried']} thresholds and mechanisms {count['better_by_means']} look better than deletion by "
            f"their means, and {count['better_by_intervals']} by their intervals (uncorrected)"
        )
    return "\n".join(lines) + "\n"
