"""Self-checks: for every protection an action that it stops by itself, and that works without protections.

``python -m studies.sandbox check`` runs them on this machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from studies.sandbox.jail import Jail
from studies.sandbox.limits import PROTECTIONS, JailLimits, JailOutcome

DRIVER = Path(__file__).with_name("script.py")


@dataclass(frozen=True)
class SelfCheck:
    """Self-check of one protection: ``code`` replies a true value if it succeeds in doing ``what``."""

    protection: str
    what: str
    code: str


CHECKS = (
    SelfCheck("rlimits", "take 600 MB of memory", "result = len(bytes(600_000_000)) > 0"),
    SelfCheck("rlimits", "write a file of 2 MB", "result = open('large', 'wb').write(bytes(2_000_000)) > 0"),
    SelfCheck("privileges", "keep the way to more privileges", "result = 'NoNewPrivs:\\t0' in open('/proc/self/status').read()"),
    SelfCheck("landlock", "read a file of the machine", "import os\nresult = len(open(os.__file__).read())"),
    SelfCheck("landlock", "make a folder", "import os\nos.mkdir('folder')\nresult = True"),
    SelfCheck("seccomp", "start a process", "import os\nresult = os.fork()\nif not result: os._exit(0)"),
    SelfCheck("seccomp", "send a signal to its server", "import os\nos.kill(os.getppid(), 0)\nresult = True"),
    SelfCheck("watchdog", "sleep longer than it may run", "import time\ntime.sleep(1)\nresult = True"),
    SelfCheck("watchdog", "leave more files than it may", "for i in range(100): open(str(i), 'w').close()\nresult = True"),
    SelfCheck("reply", "reply what is no JSON", "import os\nos.write(3, b'NaN\\n')\nos._exit(0)"),
)
HONEST = "import math\nopen('result.txt', 'w').write('done')\nprint(math.factorial(20))\nresult = True"
LIMITS = JailLimits(seconds=0.5)


@dataclass(frozen=True)
class Finding:
    """Result of a self-check: whether its protection alone stopped it, and whether it works without protections."""

    check: SelfCheck
    stopped: bool
    works: bool


def done(outcome: JailOutcome) -> bool:
    return outcome.status == "replied" and bool(outcome.reply)


def run_checks() -> Iterator[Finding]:
    """Run every check under its protection alone and under none.

    Raises:
        OSError: Servers cannot be started.
    """
    with Jail(DRIVER, workers=1, limits=LIMITS, unsafe=True, without=PROTECTIONS) as nothing:
        for protection in PROTECTIONS:
            with Jail(DRIVER, workers=1, limits=LIMITS, unsafe=True, without=set(PROTECTIONS) - {protection}) as single:
                checks = [check for check in CHECKS if check.protection == protection]
                payloads = [{"code": check.code} for check in checks]
                for check, inside, outside in zip(checks, single.run(payloads), nothing.run(payloads), strict=True):
                    yield Finding(check, not done(inside), done(outside))


def honest_program_works(jail: Jail) -> bool:
    """Return True if an ordinary program works under all protections of ``jail``."""
    (outcome,) = jail.run([{"code": HONEST}], limits=JailLimits())
    return done(outcome) and outcome.stdout == b"2432902008176640000\n" and dict(outcome.files) == {"result.txt": b"done"}
