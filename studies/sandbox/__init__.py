"""A jail for untrusted Python: warm servers, one confined child a job, data back and never a verdict."""

from studies.sandbox.jail import Jail
from studies.sandbox.limits import DEFAULT_MODULES, PROTECTIONS, JailUnavailableError, Limits, Outcome, Status

__all__ = ["DEFAULT_MODULES", "PROTECTIONS", "Jail", "JailUnavailableError", "Limits", "Outcome", "Status"]
