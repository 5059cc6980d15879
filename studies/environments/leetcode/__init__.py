"""LeetCode problems under graders with loopholes, for real models: their programs run in `studies.sandbox`.

`problems` reads problems and their tests, `modes` says how a prompt is graded and what that leaves open, `programs` runs answers,
`grader` pays for them (and can be fooled), `oracle` knows better (and is for measurement alone), `problem` puts this behind the
``Problem`` protocol. ``python -m studies.environments.leetcode report`` measures all of it on real problems and rollouts.
"""
