"""The micro world: small programs, graders with loopholes, and a language model that is trained from scratch in seconds.

`prompts` says what is asked, `corpus` and `warmstart` make a model that answers, `runner` executes its answers,
`grader` pays for them (and can be fooled), `oracle` knows better (and is for measurement alone).
"""
