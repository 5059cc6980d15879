"""The record's claims as data: each has a measurement and the rule that turns the measurement into a verdict."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from scipy.stats import norm

from studies.common.stats import LEVEL, POWER, detectable, power
from studies.lanes.report import estimates
from studies.lanes.report.estimates import ClaimEstimate, Measure
from studies.lanes.study import LanesStudy

Verdict = Literal["exact", "supported", "claimed size excluded", "not testable here", "null", "contradicted"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Rule = Literal["identity", "higher", "lower"]


@dataclass(frozen=True)
class Claim:
    """One claim of the table.

    Attributes:
        id: Short identifier.
        group: Topic of the claim.
        words: The claim in words.
        record: The record's own number or words for it; empty for claims of our own.
        rule: `identity`, or the side of `reference` on which the claim puts the measured value.
        measure: The measurement.
        reference: The value that the measured one is compared with.
        size: The claimed effect, as a distance from the reference in the measured unit; None without a number.
        premise: What the claim takes for granted, as a measurement that has to be above 0: a gain that can be halved. If it is not
            shown, the claim is not testable, whatever was measured. Its note is what the row says then.
    """

    id: str
    group: str
    words: str
    record: str
    rule: Rule
    measure: Measure
    reference: float = 0.0
    size: float | None = None
    premise: Measure | None = None


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its estimate, its rule's verdict, and what `floor` and `needed` say about the power behind it."""

    claim: Claim
    estimate: ClaimEstimate
    verdict: Verdict
    floor: float | None
    needed: int | None

    @property
    def underpowered(self) -> bool:
        return self.needed is not None and self.estimate.n < self.needed

    def as_dict(self) -> dict[str, Any]:
        claim = {name: value for name, value in vars(self.claim).items() if name not in ("measure", "premise")}
        outcome = {"verdict": self.verdict, "floor": self.floor, "needed": self.needed, "underpowered": self.underpowered}
        return {**claim, **outcome, "measured": asdict(self.estimate)}


def verdict(rule: Rule, estimate: ClaimEstimate, reference: float = 0.0, size: float | None = None) -> Verdict:
    """Return the verdict of an estimate on a claim, under the claim's rule.

    Raises:
        ValueError: If the rule is `identity` and the estimate does not say whether the identity holds.
    """
    if rule == "identity":
        if estimate.holds is None:
            raise ValueError("the rule 'identity' needs an estimate with `holds` set to True or False")
        return "exact" if estimate.holds else "contradicted"
    if estimate.low is None or estimate.high is None:
        return "not testable here" if size else "null"
    least, most = (
        (estimate.low - reference, estimate.high - reference)
        if rule == "higher"
        else (reference - estimate.high, reference - estimate.low)
    )  # distance on the claimed side
    if most < 0:
        return "contradicted"
    if size is not None and most < size:
        return "claimed size excluded"
    if least > 0:
        return "supported"
    smallest = floor(estimate)
    return "not testable here" if size is not None and (smallest is None or smallest > size) else "null"


def deviation(estimate: ClaimEstimate) -> float | None:
    """Return the standard deviation of the values; None for fewer than two."""
    values = [value for value in estimate.each if value is not None]
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def floor(estimate: ClaimEstimate) -> float | None:
    """Return the smallest effect that is detected with probability `POWER`, given this spread and number of values.

    None for fewer than two values.
    """
    spread = deviation(estimate)
    return None if spread is None else detectable(estimate.n, spread)


def needed(estimate: ClaimEstimate, size: float | None) -> int | None:
    """Return the smallest number of values that detects an effect of `size` with probability `POWER`, given this spread.

    None without a size, or if fewer than two values show no spread.
    """
    spread = deviation(estimate)
    if not size or spread is None:
        return None
    z = float(norm.ppf((1 + LEVEL) / 2) + norm.ppf(POWER))
    n = max(2, math.ceil((z * spread / size) ** 2))  # the number for a known spread: a t-test needs at least as many
    while spread and power(n, math.sqrt(n) * size / spread) < POWER:
        n += 1
    return n


def judge(study: LanesStudy, claims: Sequence[Claim]) -> list[JudgedClaim]:
    """Return every claim with its estimate and verdict, in the order of the table.

    What is taken for granted has to be supported itself.
    """
    rows = []
    for claim in claims:
        estimate = claim.measure(study)
        outcome = verdict(claim.rule, estimate, claim.reference, claim.size)
        premise = None if claim.premise is None else claim.premise(study)
        if premise is not None and verdict("higher", premise) != "supported":
            outcome, estimate = "not testable here", replace(estimate, note=f"{estimate.note}; {premise.note}")
        rows.append(JudgedClaim(claim, estimate, outcome, floor(estimate), needed(estimate, claim.size)))
    return rows


LANES, LOOP, QUANT, TTT, HINT = "two lanes", "loop", "optimizer and quantisation", "test-time training", "Tap-In"
DROPPED = "tried and dropped: worse, with hints and test-time training"
LEARNT = "what the models have learnt"
HALVED = 0.75
"""Below it what is left of a gain is nearer to a half than to all of it."""

# fmt: off
CLAIMS: tuple[Claim, ...] = (
    Claim("unigram", LEARNT, "Control: two lanes are better than a table of single bytes",
          "", "lower", estimates.against_table("shipped", "unigram")),
    Claim("bigram", LEARNT, "Control: two lanes are better than a table of pairs of bytes, counted on all of the training text",
          "", "lower", estimates.against_table("shipped", "bigram")),
    Claim("symmetry", LANES, "Lanes that start equal receive equal gradients, as shipped",
          "the two partials are equal", "identity", estimates.worst("shipped", "largest", "relative difference")),
    Claim("stays", LANES,
          "Lanes that start equal stay near-identical as shipped (apart by less than a tenth of the way that they went)",
          "near-identical throughout", "lower", estimates.routed("shipped", "apart", "of the way from 1"), reference=0.1),
    Claim("z2", LANES, "Control: so it is in the wiring z2, in gradient",
          "", "identity", estimates.worst("z2", "largest", "relative difference")),
    Claim("z2-exchange", LANES, "Control: exchanging the lanes of z2 leaves the loss as it is",
          "", "identity", estimates.worst("z2", "exchange", "nats")),
    Claim("z2-stays", LANES, "Control: lanes of z2 that start equal stay equal over training",
          "", "identity", estimates.stays("z2", "symmetric")),
    Claim("gauge", LANES, "Control: moving weight between the lanes of gauge leaves the loss as it is",
          "", "identity", estimates.worst("gauge", "gauge", "nats")),
    Claim("zero-init", LANES, "Control: with output projections at 0 no routing scalar that weights a sublayer has a gradient",
          "", "identity", estimates.worst("shipped", "at_zero_init", "nats", tolerance=0.0)),
    Claim("gptj", LANES, "Control: all scalars at 1 and no skip behind the fork is a GPT-J block",
          "", "identity", estimates.gptj_gap),
    Claim("scalars", LANES, "Roughly half of the routing scalars are gauge, as shipped",
          "roughly half of 66", "identity", estimates.gauge_share("shipped")),
    Claim("scalars-z2", LANES, "Control: so it is in the wiring z2",
          "", "identity", estimates.gauge_share("z2")),
    Claim("path-sum", LANES, "Control: direct and cascading paths add up to the gradient",
          "", "identity", estimates.path_sums),
    Claim("closed-form", LANES, "Control: the direct path is the product of routing scalars that theory says",
          "", "identity", estimates.closed_form),
    Claim("direct", LANES, "The direct path is of order 1: more than half of the gradient at the first layer behind the fork",
          "order-1 term", "higher", estimates.direct_share("shipped"), reference=0.5),
    Claim("direct-more", LANES, "It is a larger part of the gradient than in the record's baseline",
          "an exemption from a tax", "higher", estimates.direct_share("shipped", "gptj")),
    Claim("direct-trained", LANES, "Ours: so it is on the trained models",
          "", "higher", estimates.direct_share_trained),
    Claim("lanes", LANES, "Two lanes are better than the record's baseline, before quantisation",
          "-.00308 BPB", "lower", estimates.bpb("shipped", "gptj"), size=0.00308),
    Claim("lanes-quantised", LANES, "The same after quantisation",
          "-.00396 BPB", "lower", estimates.bpb_quantized("shipped", "gptj"), size=0.00396),
    Claim("before-quantisation", LANES, "Most of that gain is there before quantisation",
          ".00308 of .00396", "higher", estimates.before_quantization, size=0.00308 - 0.00396 / 2),
    Claim("frozen", LANES, "The gain shows up with the routing frozen at its start",
          "would also show up", "lower", estimates.bpb("frozen", "gptj"), size=0.00308),
    Claim("length", LANES, "Longer training narrows the gain",
          "would narrow the gap", "higher", estimates.narrows, size=0.00308, premise=estimates.early_gain),
    Claim("learned", LANES, "Ours: learned routing is better than frozen, from (1, 1)",
          "", "lower", estimates.bpb("shipped", "frozen"), size=0.00308),
    Claim("persists", LANES, "The asymmetric pattern is there at the end of training",
          "still prefers the pattern", "higher", estimates.routed("asymmetric", "pattern", "of its start")),
    Claim("pattern", LANES, "Ours: from the equal start the same pattern is learned",
          "", "higher", estimates.routed("shipped", "pattern", "of that start")),
    Claim("asymmetric", LANES, "The asymmetric start is better than the symmetric one",
          "free", "lower", estimates.bpb("asymmetric", "shipped")),
    Claim("halves", TTT, "Two lanes halve what test-time training gains",
          "-.00558 to -.00294", "lower", estimates.gain_left("shipped", "gptj"),
          reference=HALVED, size=HALVED - 0.00294 / 0.00558, premise=estimates.gain_of("gptj")),
    Claim("controls", TTT, "Controls alone give most of the gain (70%), each scope at its best rate",
          ".00310 of .00444", "higher", estimates.controls("controls")),
    Claim("controls-shared", TTT, "The same at one rate, that of all parameters",
          ".00310 of .00444", "higher", estimates.controls("shared")),
    Claim("combined", TTT, "Hints and test-time training together improve bits per byte",
          "-.00330 BPB", "lower", estimates.combined, size=0.0033),
    Claim("lanes-combined", TTT, "Two lanes are better than the record's baseline with both",
          "-.00132 BPB", "lower", estimates.as_submitted("shipped", "gptj"), size=0.00132),
    Claim("amplification-2", LOOP, "Errors grow by 1.67 over two passes at rho = .63",
          "1.67", "identity", estimates.amplified(2)),
    Claim("amplification-3", LOOP, "Errors grow by 1.96 over three passes at rho = .63",
          "1.96", "identity", estimates.amplified(3)),
    Claim("contraction", LOOP, "The loop contracts: a pass multiplies an error by less than 1",
          "rho .63", "lower", estimates.contraction, reference=1.0, size=0.37),
    Claim("contraction-alone", LOOP, "Ours: it contracts in its first pass, where no skip is mixed in yet",
          "", "lower", estimates.contraction_without_skips, reference=1.0),
    Claim("wide", LOOP, "A wide loop is better than a narrow one of the same depth, quantised",
          "-.0007 BPB", "lower", estimates.bpb_quantized("wide", "narrow"), size=0.0007),
    Claim("wide-gap", LOOP, "That gain is there after quantisation alone: the wide loop's quantisation gap is narrower",
          "all of -.0007 BPB", "lower", estimates.gap("wide", "narrow"), size=0.0007),
    Claim("wide-embeddings", LOOP, "A wide loop with embeddings of passes is better than a narrow one, quantised",
          "-.00124 BPB", "lower", estimates.bpb_quantized("wide-embeddings", "narrow"), size=0.00124),
    Claim("narrow-embeddings", LOOP, "Embeddings of passes help a narrow loop less, quantised",
          "-.0005 BPB", "lower", estimates.bpb_quantized("narrow-embeddings", "narrow"), size=0.0005),
    Claim("embeddings-gap", LOOP, "Embeddings of passes narrow the quantisation gap",
          ".0131 to .0114", "lower", estimates.gap("wide-embeddings", "wide"), size=0.0017),
    Claim("head-bias", LOOP,
          "A bias on the keys of one head, 192 parameters in the record, recovers about half of the embeddings' gain",
          "half of -.00124 BPB", "lower", estimates.bpb("wide-head-bias", "wide"), size=0.00062),
    Claim("momentum", QUANT, "Momentum .98 is better than .99",
          "-.00108 BPB", "lower", estimates.bpb("momentum-98", "momentum-99"), size=0.00108),
    Claim("momentum-95", QUANT, "Ours: momentum .98 is better than .95",
          "", "lower", estimates.bpb("momentum-98", "shipped")),
    Claim("clip-lambda", QUANT, "No Hessian clip is better than .175",
          "-.0006 BPB", "lower", estimates.calibration("few", "clipped"), size=0.0006),
    Claim("batches", QUANT, "Fewer calibration batches (16 for 64) lose less than the .0006 that the record counts elsewhere",
          "no meaningful loss", "lower", estimates.calibration("few", "many"), reference=0.0006, size=0.0006),
    Claim("clip", QUANT, "A clip of 13.1 for 12.85 makes the file smaller",
          "absorbs 66 scalars", "lower", estimates.bytes_by_clip),
    Claim("bytes", QUANT, "Control: bytes are within 5% of the Gaussian estimate",
          "", "lower", estimates.bytes_predicted, reference=0.05),
    Claim("gptq", QUANT, "Control: GPTQ is better than rounding to nearest",
          "", "lower", estimates.calibration("few", "nearest")),
    Claim("tapin", HINT, "Hints from the text behind improve bits per byte",
          "-.001 BPB", "lower", estimates.hints("new", "plain"), size=0.001),
    Claim("cross", HINT, "Hints from outside of the window are better weighted with .12 than with .06",
          "-7.7e-5 BPB", "lower", estimates.hints("new", "old"), size=7.7e-5),
)
# fmt: on
"""The claims in the order of the table: id, group, words, the record's own number, rule, measure."""
