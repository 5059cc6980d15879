"""Send a server what schemathesis draws from the server's own schema: ``make fuzz``.

The server is a process of its own with the micro model and one key. Every answer must have a status, a content type and a body that
the schema declares, and none may be a 5xx that it does not declare. At the end the server must still answer.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import which

import httpx

from mi_route2.serve.process import serving

KEY = "a-key-for-fuzzing-only"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main() -> None:
    """Fuzz a server and end with schemathesis's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", default="schemathesis", help="the command, of an environment of its own")
    parser.add_argument("--minutes", type=float, default=10.0, help="time at most")
    parser.add_argument("--examples", type=int, default=40, help="drawn bodies for each operation and kind")
    parser.add_argument("--seed", type=int, default=17)
    asked = parser.parse_args()
    if (found := which(asked.schemathesis)) is None:
        sys.exit(f"there is no command {asked.schemathesis}: run `make fuzz`, which installs it")
    with (
        tempfile.TemporaryDirectory() as folder,  # schemathesis keeps what it finds where it runs
        serving("micro", Path(folder) / "log", MI_ROUTE2_KEY=KEY) as server,
    ):
        auth = f"Authorization: Bearer {KEY}"
        command = [str(Path(found).absolute()), "run", f"{server.url}/openapi.json", "-H", auth, "--checks", CHECKS]
        command += ["--phases", "coverage,fuzzing", "--max-examples", str(asked.examples), "--seed", str(asked.seed)]
        code = subprocess.run([*command, "--max-time", str(round(60 * asked.minutes))], cwd=folder).returncode
        httpx.get(f"{server.url}/health").raise_for_status()
        print(httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).raise_for_status().text)
    sys.exit(code)


if __name__ == "__main__":
    main()
