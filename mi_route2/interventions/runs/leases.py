"""Who needs which run for how long."""

from collections.abc import Callable


class Leases:
    """Leases of ``seconds``, by run and owner. An owner that never comes back loses its own by time.

    Taking a lease again renews it once half of its time is over; before, it costs a look-up and no more.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]):
        if seconds <= 0:
            raise ValueError(f"lease_seconds={seconds} cannot be: a lease lasts longer than that")
        self._seconds, self._clock = seconds, clock
        self._ends: dict[str, dict[str, float]] = {}
        self._swept = clock()

    def take(self, run: str, owner: str) -> None:
        """Give ``owner`` a lease of ``run``, or renew it."""
        now = self._clock()
        owners = self._ends.setdefault(run, {})
        if owners.get(owner, now) - now <= self._seconds / 2:
            owners[owner] = now + self._seconds
        if now - self._swept > self._seconds / 2:
            self._sweep(now)

    def release(self, owner: str) -> None:
        """End every lease of ``owner``."""
        for owners in self._ends.values():
            owners.pop(owner, None)
        self._sweep(self._clock())

    def forget(self, run: str) -> None:
        """End every lease of ``run``."""
        self._ends.pop(run, None)

    def holds(self, run: str) -> bool:
        """Whether someone has a lease of ``run`` now."""
        now = self._clock()
        return any(end > now for end in self._ends.get(run, {}).values())

    def __len__(self) -> int:
        """Leases that have not ended."""
        self._sweep(self._clock())
        return sum(map(len, self._ends.values()))

    def _sweep(self, now: float) -> None:
        kept = {run: {owner: end for owner, end in owners.items() if end > now} for run, owners in self._ends.items()}
        self._ends, self._swept = {run: owners for run, owners in kept.items() if owners}, now
