"""Two residual lanes, depth recurrence, Tap-In, score-first training, Muon and GPTQ: tests of a public record's claims."""
