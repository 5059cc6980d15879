"""Two residual lanes, depth recurrence, Tap-In, score-first training, Muon and GPTQ: a public record's claims, tested by hooks."""
