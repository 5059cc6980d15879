"""The configuration of nginx in the docs, with the real nginx on loopback."""

import re
import shutil
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served import PROMPT, Running, bearer, random_micro, running, until

from mi_route2.serve import owner
from mi_route2.serve.auth import Keys
from mi_route2.serve.client import PatchStudy, ServerError
from mi_route2.serve.options import Limits

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
KEY = "a-key-of-the-tests-only"
DOCS = Path(__file__).parents[3] / "docs" / "serve.md"
pytestmark = [pytest.mark.process, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(random_micro(context=512), keys=Keys([(KEY, False)]), limits=Limits(rows=2)) as one:
        yield one


@pytest.fixture(scope="module")
def proxy(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of nginx with the configuration of the docs, but without TLS and at other ports."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (text,) = re.findall(r"```nginx\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    for old, new in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{port};"),
        ("server 127.0.0.1:8000;", f"server {server.url.partition('://')[2]};"),
        (re.search(r" +ssl_certificate .*\n +ssl_certificate_key .*\n", text)[0], ""),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    temporary = "".join(f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\nhttp {{ access_log off; {temporary} {text} }}"
    )
    process = subprocess.Popen([str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.PIPE)
    try:

        def listens() -> bool:
            assert process.poll() is None, process.stderr.read().decode()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listens, 20)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)
        process.stderr.close()


def test_tokens_come_through_one_by_one_and_who_goes_away_cancels(
    server: Running, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step of the engine waits until the client has the token of the last one, so that a buffer would stop both."""
    monkeypatch.setattr(owner, "PACE", 0.0)
    step, gate = server.server.owner._engine.step, threading.Semaphore(1)

    def one_by_one() -> object:
        gate.acquire()
        return step()

    server.server.owner._engine.step = one_by_one
    try:
        with PatchStudy(proxy, KEY, timeout=20.0) as study:
            chunks = study.stream(PROMPT, max_tokens=480, ignore_eos=True)
            for _ in range(10):
                assert len(next(chunks)["mi_route2"]["token_ids"]) == 1
                gate.release()
            chunks.close()
        gate.release(1000)
        until(lambda: not server.server.open)
    finally:
        gate.release(1000)
        server.server.owner._engine.step = step


def test_what_nginx_refuses_looks_like_what_the_server_refuses(proxy: str) -> None:
    with PatchStudy(proxy) as nobody, pytest.raises(ServerError, match="Authorization: Bearer KEY") as refused:
        nobody.complete(PROMPT)
    assert refused.value.status == 401
    with PatchStudy(proxy, KEY) as study:
        with pytest.raises(ServerError, match="larger than 4 MiB") as refused:
            study.complete("x" * (5 << 20))
        assert (refused.value.status, refused.value.code) == (413, "too_large")
        assert httpx.get(f"{proxy}/metrics", headers=bearer(KEY), timeout=60).status_code == 403
        calls = (study.runs for _ in range(400))
        with pytest.raises(ServerError, match="too many requests in a second") as refused:
            deque((call() for call in calls), 0)
        assert (refused.value.status, refused.value.code) == (429, "too_often")
