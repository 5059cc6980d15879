"""LeetCode problems under graders with loopholes, for real models; their programs run in `studies.sandbox`.

`problems` reads problems and their tests, `modes` defines how a prompt is graded and its loophole, `programs` runs answers,
`grader` pays for them (and can be fooled), `oracle` knows the truth (for measurement only), `problem` implements the ``Problem``
protocol.
"""
