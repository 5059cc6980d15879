"""The parts of the Hub's HTTP API that huggingface_hub calls to create, fill, list and read a model repository.

    uvicorn hub:app, with HF_ENDPOINT at its address

As on the Hub, safetensors go to the large-file storage: announced in a batch, put by their hash, then named in the commit.
"""

import base64
import hashlib
import json
from typing import Any

import yaml
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

app = FastAPI()
repos: dict[str, dict[str, bytes]] = {}
blobs: dict[str, bytes] = {}
TOKEN = "Bearer hf_test"


def commit_of(repo: str) -> str:
    """The hash of a repository's content, in place of git's."""
    return hashlib.sha1(repr(sorted(repos[repo].items())).encode()).hexdigest()


def missing(what: str) -> Response:
    return Response(status_code=404, headers={"X-Error-Code": what, "X-Error-Message": what})


@app.post("/api/repos/create")
async def create(request: Request) -> Any:
    if request.headers.get("authorization") != TOKEN:
        return Response(status_code=401)
    body = await request.json()
    repo = f"{body['organization']}/{body['name']}"
    known, repos[repo] = repo in repos, repos.get(repo, {})
    return JSONResponse({"url": f"{request.base_url}{repo}"}, 409 if known else 200)


@app.post("/api/validate-yaml")
async def validate(request: Request) -> Any:
    front = (await request.json())["content"].split("---\n")[1]
    errors = [] if {"library_name", "base_model"} <= yaml.safe_load(front).keys() else [{"message": "no library or base model"}]
    return JSONResponse({"errors": errors, "warnings": []}, 400 if errors else 200)


@app.post("/api/models/{repo:path}/preupload/{revision}")
async def preupload(request: Request, repo: str) -> Any:
    modes = {True: "lfs", False: "regular"}
    files = [(each["path"], modes[each["path"].endswith(".safetensors")]) for each in (await request.json())["files"]]
    return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in files]}


@app.post("/{repo:path}.git/info/lfs/objects/batch")
async def batch(request: Request, repo: str) -> Any:
    objects = (await request.json())["objects"]
    return {"objects": [{**each, "actions": {"upload": {"href": f"{request.base_url}lfs/{each['oid']}"}}} for each in objects]}


@app.put("/lfs/{oid}")
async def put(request: Request, oid: str) -> Response:
    data = await request.body()
    if hashlib.sha256(data).hexdigest() != oid:
        return Response(status_code=400)
    blobs[oid] = data
    return Response()


@app.post("/api/models/{repo:path}/commit/{revision}")
async def commit(request: Request, repo: str) -> Any:
    for line in (await request.body()).splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "file":
            repos[repo][value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            repos[repo][value["path"]] = blobs[value["oid"]]
    return {"commitUrl": f"{request.base_url}{repo}/commit/{commit_of(repo)}", "commitOid": commit_of(repo)}


@app.get("/api/models/{repo:path}/revision/{revision}")
async def info(repo: str) -> Any:
    return {"id": repo, "sha": commit_of(repo), "siblings": []} if repo in repos else missing("RepoNotFound")


@app.get("/api/models/{repo:path}/tree/{revision}")
async def tree(repo: str) -> Any:
    files = repos[repo].items()
    return [{"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for path, data in files]


@app.api_route("/{repo:path}/resolve/{revision}/{path}", methods=["GET", "HEAD"])
async def resolve(request: Request, repo: str, path: str) -> Response:
    if path not in repos.get(repo, {}):
        return missing("EntryNotFound")
    data = repos[repo][path]
    headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit_of(repo), "Content-Length": str(len(data))}
    return Response(b"" if request.method == "HEAD" else data, headers=headers)
