"""Asks an application directly, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from pollux.service.rest import create_app

from .fake_service import TOKEN, FakeService

URL = "http://127.0.0.1:7333"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
DOCUMENT = {"command": "python train.py", "working_dir": "/work", "max_gpus": 4, "env": {"KEY": "hush"}}


def ask(service: FakeService, method: str, path: str, *, headers: dict[str, str] | None = None, **more: Any):
    """One request with the token; other `headers` replace it."""

    async def go() -> httpx.Response:
        app = create_app(service, TOKEN)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client:
            return await client.request(method, path, headers=BEARER if headers is None else headers, **more)

    return asyncio.run(go())
