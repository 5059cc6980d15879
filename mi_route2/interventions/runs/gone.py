"""Why a run is not there any more: one sentence a run, of the last few thousand."""

from collections.abc import Mapping

REMEMBERED = 4096


class Gone:
    """Reasons by run. The oldest are forgotten first."""

    def __init__(self, reasons: Mapping[str, str]):
        self._reasons = dict(reasons)

    def put(self, reasons: Mapping[str, str]) -> None:
        """Remember why runs went."""
        for run, reason in reasons.items():
            self._reasons.pop(run, None)
            self._reasons[run] = reason
        for run in list(self._reasons)[: max(0, len(self._reasons) - REMEMBERED)] if reasons else ():
            del self._reasons[run]

    def forget(self, run: str) -> None:
        """The run is there again."""
        self._reasons.pop(run, None)

    def why(self, run: str) -> str | None:
        """The reason; ``None`` where nothing is known of such a run."""
        return self._reasons.get(run)


def dropped(run: str) -> str:
    """The reason of a run that somebody deleted."""
    return f"run {run!r} was dropped"


def evicted(run: str, nbytes: int, budget: int) -> str:
    """The reason of a run that memory had no room for."""
    return (
        f"run {run!r} of {nbytes} bytes was evicted, the least recently used of a memory of {budget} bytes: raise the budget, give "
        "the store a folder, or lease the run as long as it is needed"
    )


def invalid(run: str, old: str, new: str) -> str:
    """The reason of a run that a change of the weights ended."""
    return f"run {run!r} is invalid: it was captured with weights {old[:12]}, and the model now has {new[:12]}; capture it again"
