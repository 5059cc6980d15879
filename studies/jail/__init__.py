"""A jail for untrusted Python: warm servers, one confined child a job, data back and never a verdict."""

from studies.jail.jail import Jail
from studies.jail.limits import DEFAULT_MODULES, PROTECTIONS, JailUnavailableError, Limits, Outcome, Status

__all__ = ["DEFAULT_MODULES", "PROTECTIONS", "Jail", "JailUnavailableError", "Limits", "Outcome", "Status"]
