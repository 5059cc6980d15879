"""Send a server what schemathesis draws from the server's own schema: ``make fuzz``.

The server is a process of its own with a random micro model and one key. Half of the requests are about something that is there,
an example of the server's, a captured run or a stream that runs (`tests.fuzz_hooks`), or none would be accepted. Every answer must
have a status, a content type and a body that the schema declares, and none may be a 5xx that it does not declare. At the end the
server must still answer. Answers are counted in the server's own log.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from shutil import which
from typing import Any

import httpx

from mi_route2.serve.models import Example, Served
from mi_route2.validation import write_json
from studies.benchmarks.serve import serving
from tests.support.served import random_micro

HERE = Path(__file__).parent
KEY = "a-key-for-fuzzing-only"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def model() -> Served:
    """Return the model to serve: random, with a context in which a stream runs long enough to be moved, and with examples."""
    served = random_micro(context=4096)
    served.prompts = ("# task: add 3 then sub 4\n# grader: runs hidden tests\n",)
    clean, corrupt = served.prompts[0], served.prompts[0].replace("add", "scale")
    served.examples = (Example("Which operator is written", clean, corrupt, " +", " *"),)
    served.monitor = {"site": "blocks.0.resid_post", "probe": "probe", "threshold": 0.0, "sharpness": 2.0, "name": "probe"}
    served.steering = {"blocks.0.resid_post": {"vector": "push", "scale": 1.0}}
    return served


def counted(log: Path, schema: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the answers in a server's log by operation of its schema, then by class of status, as ``2xx``."""
    operations = {f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")):
        if (operation := f"{line.get('method')} {line.get('path')}") in operations:
            counts[operation][f"{line['status'] // 100}xx"] += 1
    return {operation: dict(sorted(counts[operation].items())) for operation in sorted(operations)}


def sentence(document: dict[str, Any]) -> str:
    """Return what the page on serving says about a run."""
    counts = document["counts"]
    total = sum(sum(one.values()) for one in counts.values())
    accepted, failures = (sum(one.get(kind, 0) for one in counts.values()) for kind in ("2xx", "5xx"))
    assert document["status"] == 0
    assert all(one.get("2xx") for one in counts.values()), "an operation never accepted what was asked"
    minutes, were = document["seconds"] / 60, "were" if failures > 1 else "was"
    return (
        f"schemathesis {document['schemathesis']} sent {total:,} drawn requests (seed {document['seed']}) to all {len(counts)} "
        f"operations in {minutes:.0f} minutes, of which {accepted:,} were accepted, and every answer had a status, a content type "
        f"and a body that the schema declares; {failures or 'none'} {were} a 5xx"
    )


def main() -> None:
    """Fuzz a server and end with schemathesis's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", default="schemathesis", help="the command, of an environment of its own")
    parser.add_argument("--minutes", type=float, default=10.0, help="time at most")
    parser.add_argument("--examples", type=int, default=3000, help="drawn bodies for each operation at most")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path, help="write the counts of answers to this JSON file")
    asked = parser.parse_args()
    if asked.out is not None and (asked.out.is_dir() or not asked.out.parent.is_dir()):  # told now, and not after the minutes
        parser.error(f"--out {asked.out} is no file in a folder that is there: give another")
    if (found := which(asked.schemathesis)) is None:
        sys.exit(f"there is no command {asked.schemathesis}: run `make fuzz`, which installs it")
    schemathesis = str(Path(found).absolute())
    version = subprocess.run([schemathesis, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    before, began = os.getloadavg(), time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,  # schemathesis keeps what it finds where it runs
        serving("tests.fuzz:model", Path(folder) / "log", MI_ROUTE2_KEY=KEY) as server,
    ):
        auth = f"Authorization: Bearer {KEY}"
        command = [schemathesis, "run", f"{server.url}/openapi.json", "-H", auth, "--checks", CHECKS]
        command += ["--phases", "coverage,fuzzing", "--max-examples", str(asked.examples), "--seed", str(asked.seed)]
        hooks = {"SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONPATH": str(HERE), "FUZZ_URL": server.url, "FUZZ_KEY": KEY}
        command += ["--max-time", str(round(60 * asked.minutes))]
        code = subprocess.run(command, cwd=folder, env=os.environ | hooks).returncode
        seconds = time.monotonic() - began
        counts = counted(server.log, httpx.get(f"{server.url}/openapi.json").raise_for_status().json())
        httpx.get(f"{server.url}/health").raise_for_status()
        print(httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).raise_for_status().text)
    document = {"schemathesis": version, "seed": asked.seed, "examples": asked.examples, "status": code, "load": before}
    document |= {"seconds": seconds, "counts": counts}
    if code == 0:
        print(sentence(document))
    if asked.out is not None:
        write_json(asked.out, document)
    sys.exit(code)


if __name__ == "__main__":
    main()
