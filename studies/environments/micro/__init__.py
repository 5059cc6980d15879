"""Micro world: small programs, graders with loopholes, and a language model that is trained from scratch in seconds.

`language` defines tasks, modes and prompts, `corpus` and `warmstart` make a model that answers, `runner` executes its answers,
`grader` pays for them (and can be fooled), and `oracle` knows the truth (for measurement only).
"""
