"""Live attacks on the jail: each is shown to succeed without the protections that should stop it, and to fail with all of them."""

from tests.attacks.attack import CLASSES, Attack
from tests.attacks.suite import Finding, Run, Suite, Trial, attacks, control

__all__ = ["CLASSES", "Attack", "Finding", "Run", "Suite", "Trial", "attacks", "control"]
