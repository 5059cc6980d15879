"""Jail for untrusted Python: run each job in a confined child process and return its data, never a verdict."""

from studies.sandbox.jail import SCRIPT_DRIVER, Jail
from studies.sandbox.limits import DEFAULT_MODULES, PROTECTIONS, JailLimits, JailOutcome, JailUnavailableError, Status

__all__ = ["DEFAULT_MODULES", "PROTECTIONS", "SCRIPT_DRIVER", "Jail", "JailLimits", "JailOutcome", "JailUnavailableError", "Status"]
