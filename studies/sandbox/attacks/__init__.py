"""Live attacks on the jail: each shown to work where nothing stops it, and to fail where everything does."""

from studies.sandbox.attacks.attack import CLASSES, Attack
from studies.sandbox.attacks.suite import Finding, Run, Suite, Trial, attacks, control

__all__ = ["CLASSES", "Attack", "Finding", "Run", "Suite", "Trial", "attacks", "control"]
"""What the runner and the tests use."""
