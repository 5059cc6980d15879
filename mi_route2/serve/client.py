"""Client of the server, for Python: sweeps that come back as the ``Grid`` of ``mi_route2.patching``, completions, steering, runs.

    study = PatchStudy("http://127.0.0.1:8000", token)
    grid = study.sweep(clean, corrupt, answer=" Mary", foil=" John", sites="resid_pre")
    for chunk in study.stream("Once upon a time", readings=True, monitors=[...]): ...

A refusal of the server is raised as ``ServerError`` with its sentence. A tensor, an array or a list of numbers may stand wherever
the interface takes a vector.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import torch
from torch import Tensor

from mi_route2.patching.grid import Cell, Grid
from mi_route2.patching.question import Span
from mi_route2.patching.targets import Target
from mi_route2.sites import Site
from mi_route2.tensor_files import pack

ENDS = "[DONE]"
Progress = Callable[[list[Cell], int], object]
"""Function of the cells that have just come, and the number of all cells."""


class ServerError(RuntimeError):
    """The server's refusal. ``status`` is that of HTTP, ``code`` a word for programs, ``param`` the field that it is about."""

    def __init__(self, message: str, status: int, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON: tensors and arrays packed, sites by name."""
    if isinstance(value, np.ndarray | Tensor) and not value.ndim:
        return value.item()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value, value.dtype.newbyteorder("=")))
    if isinstance(value, Tensor):
        if value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"a vector is of real numbers, not of {value.dtype}: give one of them")
        return pack(value if value.is_floating_point() else value.double())
    if isinstance(value, Site | Target):
        return str(value)
    if isinstance(value, Span):
        return {"text": value.text, "occurrence": value.occurrence}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, list | tuple | range) else value


def _ids(prompt: Any) -> Any:
    return prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else _plain(prompt)


def _refused(response: httpx.Response) -> ServerError:
    try:
        error = response.json()["error"]
        return ServerError(error["message"], response.status_code, error.get("code"), error.get("param"))
    except (ValueError, KeyError, TypeError):
        return ServerError(f"the server answered {response.status_code} without a reason", response.status_code)


def _json(response: httpx.Response) -> Any:
    """Return the content of an answer; ``ServerError`` if it is a refusal."""
    if not response.is_success:
        raise _refused(response)
    return response.json()


def _unreachable(url: str, error: Exception) -> ServerError:
    return ServerError(f"no server answers at {url} ({error}): start one with python -m mi_route2.serve", 0, "unreachable")


def _completion(prompt: Any, fields: Mapping[str, Any], stream: bool) -> dict[str, Any]:
    return {"prompt": _ids(prompt), **{name: _plain(value) for name, value in fields.items()}, "stream": stream}


class PatchStudy:
    """Client of a server; see the module. It is a context that closes its connections.

    Args:
        base_url: Address that the server printed.
        token: Token, if the server needs one.
        timeout: Seconds to wait for the next bytes of an answer.
        transport: Transport of httpx, to reach an application in another way.

    Raises (by every method):
        ServerError: The server refused, failed, or does not answer.

    Examples:
        >>> with PatchStudy("http://127.0.0.1:8000") as study:  # doctest: +SKIP
        ...     grid = study.sweep(clean, corrupt, answer=" Mary", foil=" John")
    """

    def __init__(
        self, base_url: str = "http://127.0.0.1:8000", token: str | None = None, *, timeout: float = 600.0, transport: Any = None
    ):
        self.base_url = base_url.rstrip("/")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        patience = httpx.Timeout(timeout, connect=10.0)
        self._http = httpx.Client(base_url=self.base_url, headers=headers, timeout=patience, transport=transport)

    def __enter__(self) -> "PatchStudy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        try:
            response = self._http.request(method, path, json=body, params=query)
        except httpx.TransportError as error:
            raise _unreachable(self.base_url, error) from error
        return _json(response)

    def _events(self, path: str, body: Any) -> Iterator[tuple[str, Any]]:
        """Yield the events of a stream; ``ServerError`` for an error event, or a stream that broke off."""
        name = "message"
        try:
            with self._http.stream("POST", path, json=body) as response:
                if not response.is_success:
                    response.read()
                    raise _refused(response)
                for line in response.iter_lines():
                    field, _, data = line.partition(":")
                    if field == "event":
                        name = data.strip()
                    elif field == "data":
                        if data.strip() == ENDS:
                            return
                        value = json.loads(data)
                        if isinstance(value, dict) and (error := value.get("error")):
                            raise ServerError(error["message"], 200, error.get("code"), error.get("param"))
                        yield name, value
                        name = "message"
        except httpx.TransportError as error:
            raise _unreachable(self.base_url, error) from error
        raise ServerError("the connection ended before the answer did: is the server still running?", 0, "broken")

    def sweep(
        self,
        clean: str | Sequence[int] | Tensor,
        corrupt: str | Sequence[int] | Tensor,
        answer: int | str | None = None,
        foil: int | str | None = None,
        sites: Any = "resid_pre",
        positions: Any = None,
        *,
        progress: Progress | None = None,
        **fields: Any,
    ) -> Grid:
        """Return the grid of a sweep; arguments are those of ``mi_route2.patching.sweep``.

        Args:
            clean: Prompt whose values are patched in.
            corrupt: Prompt that is run.
            answer: One token.
            foil: One token, for ``logit_diff``.
            sites: Sites, points, globs or heads.
            positions: Positions of the corrupt prompt; all if ``None``.
            progress: Called with the cells as they come.
            **fields: ``metric``, ``alpha``, ``heads``, ``together``, ``at``, ``replicas``; ``method``, ``steps``.
        """
        named = [sites] if isinstance(sites, str | Site | Target) else list(sites)
        body = {"clean": _ids(clean), "corrupt": _ids(corrupt), "sites": _plain(named), "stream": True}
        if positions is not None:
            single = isinstance(positions, int | np.integer | str | Span)
            body["positions"] = _ids([positions] if single else positions if hasattr(positions, "tolist") else list(positions))
        fields = {"answer": answer, "foil": foil, **fields}
        body |= {name: _plain(value) for name, value in fields.items() if value is not None}
        rows, places, total = list[Target](), list[int | None](), 0
        for name, value in self._events("/v1/patch_sweep", body):
            if name == "start":
                rows = [Target.parse(row) for row in value["rows"]]
                places, total = value["positions"], value["total"]
            elif name == "cell" and progress is not None:
                progress([Cell(rows[i], places[j], v) for i, j, v in value["cells"]], total)
            elif name == "summary":
                return Grid.from_json(value["grid"])
        raise ServerError("the server ended the sweep without a summary: is it still running?", 0, "broken")

    def edges(self, clean: Any, corrupt: Any, **fields: Any) -> dict[str, Any]:
        """Return the strongest edges as node-link data (``graph``), their number, and the ``faithfulness`` of circuits.

        ``fields`` are those of ``mi_route2.patching.edges``, and ``k`` edges to return; ``kept`` are sizes of circuits.
        """
        return self._call("POST", "/v1/edges", _plain({"clean": _ids(clean), "corrupt": _ids(corrupt), **fields}))

    def cell(self, clean: Any, corrupt: Any, site: Any, position: int | None = None, **fields: Any) -> dict[str, Any]:
        """Return the completion with one value patched in (``text``), and its most likely first tokens (``top``)."""
        body = {"clean": _ids(clean), "corrupt": _ids(corrupt), "site": str(site), "position": position, **fields}
        return self._call("POST", "/v1/patch_cell", _plain(body))

    def complete(self, prompt: str | Sequence[int] | Tensor, **fields: Any) -> dict[str, Any]:
        """Return a completion as OpenAI words it, with interventions in ``fields``; see /docs of the server."""
        return self._call("POST", "/v1/completions", _completion(prompt, fields, False))

    def stream(self, prompt: str | Sequence[int] | Tensor, **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a completion as they come. Closing the iterator cancels the rest."""
        for _, chunk in self._events("/v1/completions", _completion(prompt, fields, True)):
            yield chunk

    def steer(self, **fields: Any) -> dict[str, Any]:
        """Register ``vectors``, or hold steering under a ``name``; return the names."""
        return self._call("POST", "/v1/steering/set", _plain(fields))

    def unsteer(self, **fields: Any) -> dict[str, Any]:
        """Remove ``vectors``, the configuration ``name``, or everything; return the remaining state."""
        return self._call("POST", "/v1/steering/clear", _plain(fields))

    def scale(self, request: int, scale: float) -> None:
        """Scale the steering vectors of a running request; its number is in each chunk, ``chunk["mi_route2"]["request"]``."""
        self._call("POST", f"/v1/streams/{request}/scale", {"scale": scale})

    def threshold(self, request: int, monitor: str, threshold: float) -> None:
        """Move the threshold of a running request's monitor."""
        self._call("POST", f"/v1/streams/{request}/threshold", {"monitor": monitor, "threshold": threshold})

    def runs(self) -> list[str]:
        """Return the names of the captured runs."""
        return self._call("GET", "/v1/runs")["runs"]

    def drop(self, run: str) -> None:
        """Delete a captured run."""
        self._call("DELETE", f"/v1/runs/{quote(run, safe='')}")
