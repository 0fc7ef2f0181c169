"""The REST API: `create_app` serves the table of `routes` for one `Service`.

One method for each route, which says what is special about it. Reading parameters and bodies, the token, the errors
and the encoding are the same for all, and live elsewhere. Everything runs in the loop of the service.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import pollux
from pollux.core import Job, JobId, NodeId, ProfileRegistry, dumps
from pollux.service import openapi, requests, views
from pollux.service.auth import Guard, check_token
from pollux.service.patience import Patience
from pollux.service.problems import Refused, answer_to, answer_to_http, fault, json_answer, told
from pollux.service.routes import NEXT_OFFSET, ROUTES, RouteSpec
from pollux.wire import api, jobspec

if TYPE_CHECKING:
    from pollux.service.service import Service

RETRY_AFTER_S = 1
"""What is advised while the service recovers."""
NO_ID = JobId("?")
"""A job that is only checked."""


def create_app(service: Service, token: str, patience: Patience | None = None) -> Starlette:
    """The application for one service; whoever asks must know the token."""
    answers = Answers(service)
    by_path: dict[str, dict[str, RouteSpec]] = {}
    for route in ROUTES:
        by_path.setdefault(route.path, {})[route.method] = route
    app = Starlette(
        routes=[Route(path, _endpoint(answers, found), methods=list(found)) for path, found in by_path.items()],
        exception_handlers={HTTPException: answer_to_http},
        middleware=[
            Middleware(
                Guard,
                token=check_token(token),
                host=service.options.host,
                open_paths=[route.path for route in ROUTES if route.is_open],
            )
        ],
    )
    app.router.redirect_slashes = False
    app.state.patience = patience or Patience()
    return app


def _endpoint(answers: Answers, found: dict[str, RouteSpec]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await answers.to(request, found["GET" if request.method == "HEAD" else request.method])

    return endpoint


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose path and query have been read."""

    request: Request
    path: dict[str, str]
    query: dict[str, Any]


class Answers:
    """What each route of the table answers: the method of its name."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def to(self, request: Request, route: RouteSpec) -> Response:
        """The answer, whatever happens."""
        try:
            asked = Asked(request, request.path_params, requests.query(request, route))
            if route.changes and self._service.is_recovering:
                raise Refused(
                    503,
                    "The service has just been started and finds out what runs. It takes orders in a moment.",
                    headers={"Retry-After": str(RETRY_AFTER_S)},
                )
            answer = await getattr(self, route.name)(asked)
            return answer if isinstance(answer, Response) else json_answer(answer, route.status)
        except Exception as error:
            return answer_to(error)

    async def health(self, _asked: Asked) -> api.Health:
        service = self._service
        status = "ending" if service.is_ending else "recovering" if service.is_recovering else "ok"
        return api.Health(status, pollux.__version__)

    async def openapi(self, _asked: Asked) -> dict[str, Any]:
        return openapi.document()

    async def job_schema(self, _asked: Asked) -> dict[str, Any]:
        return jobspec.json_schema()

    async def cluster(self, _asked: Asked) -> api.ClusterView:
        return views.cluster_view(self._service, time.time())

    async def drain_node(self, asked: Asked) -> api.ClusterView:
        self._service.drain(NodeId(asked.path["node"]))
        return await self.cluster(asked)

    async def undrain_node(self, asked: Asked) -> api.ClusterView:
        self._service.undrain(NodeId(asked.path["node"]))
        return await self.cluster(asked)

    async def submit_job(self, asked: Asked) -> Response:
        request = jobspec.parse(await requests.document(asked.request))
        if asked.query["dry_run"]:
            request = self._service.check(request)
            view = views.job_view(Job(request.spec(NO_ID, ""), time.time()), None, time.time())
            return json_answer(dataclasses.replace(view, id=JobId("")))
        job = self._service.submit(request)
        return json_answer(self._view(job), 201, {"Location": f"/v1/jobs/{job.id}"})

    async def list_jobs(self, asked: Asked) -> api.JobList:
        state = self._service.scheduler.state
        team, phase = asked.query["team"], asked.query["phase"]
        jobs = [*state.jobs.values()]
        if asked.query["all"] or phase is not None:
            jobs = sorted((*state.ended.values(), *jobs), key=lambda job: job.sequence)
        wanted = (
            job for job in jobs if (team is None or job.spec.team == team) and (phase is None or job.phase == phase)
        )
        return api.JobList(tuple(map(self._view, wanted)))

    async def job(self, asked: Asked) -> api.JobDetail:
        job = self._find(asked.path["job"])
        report, waits_for = self._service.report_of(job.id), self._service.waits_for(job)
        return views.job_detail(job, report, time.time(), waits_for, self._service.scheduler.state.cluster)

    async def pause_job(self, asked: Asked) -> api.JobView:
        return self._view(self._service.pause(self._find(asked.path["job"]).id))

    async def resume_job(self, asked: Asked) -> api.JobView:
        return self._view(self._service.resume(self._find(asked.path["job"]).id))

    async def cancel_job(self, asked: Asked) -> api.JobView:
        return self._view(self._service.cancel(self._find(asked.path["job"]).id))

    async def scale_job(self, asked: Asked) -> api.JobView:
        wanted = await requests.body_of(asked.request, api.ScaleRequest)
        return self._view(self._service.scale(self._find(asked.path["job"]).id, wanted.min_gpus, wanted.max_gpus))

    async def list_logs(self, asked: Asked) -> api.LogList:
        return api.LogList(await self._service.logs(self._find(asked.path["job"]).id))

    async def read_log(self, asked: Asked) -> Response:
        job, node, replica = self._find(asked.path["job"]), NodeId(asked.path["node"]), asked.path["replica"]
        part = await self._service.read_log(job.id, node, replica, asked.query["offset"], asked.query["limit"])
        return PlainTextResponse(part.text.encode("utf-8", "replace"), headers={NEXT_OFFSET: str(part.next_offset)})

    async def events(self, asked: Asked) -> api.EventPage:
        log, after, limit = self._service.log, asked.query["after"], asked.query["limit"]
        job = None if asked.query["job"] is None else self._find(asked.query["job"]).id
        give_up_at = asyncio.get_running_loop().time() + asked.query["wait_s"]
        while True:
            seen = log.last_number
            found = log.events(after, limit, job, last=asked.query["last"])
            left_s = give_up_at - asyncio.get_running_loop().time()
            if found or left_s <= 0:
                break
            await self._service.wait_for_event(seen, left_s)
            if log.last_number == seen:  # too late, or the service ends
                break
        is_cut = len(found) == limit and asked.query["last"] is None
        # Up to `seen` there is nothing else about this job: the next question need not search there again.
        return api.EventPage(tuple(map(views.event_view, found)), found[-1].number if is_cut else seen)

    async def list_kinds(self, _asked: Asked) -> api.KindList:
        return views.kind_list(self._service.scheduler.state.pool.kinds)

    async def export_kinds(self, _asked: Asked) -> Response:
        registry = ProfileRegistry(self._service.scheduler.state.pool.kinds, f"pollux {pollux.__version__}")
        return Response(dumps(registry), media_type="application/json")

    async def import_kinds(self, asked: Asked) -> api.KindList:
        self._service.import_kinds(await requests.registry(asked.request), replaces=asked.query["replace"])
        return await self.list_kinds(asked)

    async def shutdown(self, asked: Asked) -> api.Health:
        wanted = (await requests.body_of(asked.request, api.ShutdownRequest)).jobs
        if wanted not in ("stop", "leave"):
            faults = [fault("jobs", wanted, "is not one of the values it may have", "Give stop or leave")]
            raise Refused(422, told("The body", 1), faults)
        self._service.end(stop_jobs=wanted == "stop")
        return api.Health("ending", pollux.__version__)

    def _view(self, job: Job) -> api.JobView:
        return views.job_view(job, self._service.report_of(job.id), time.time(), self._service.waits_for(job))

    def _find(self, text: str) -> Job:
        """By its id or its name. Of jobs of one name the one that has not ended is meant, else the latest."""
        state = self._service.scheduler.state
        job = state.job(JobId(text))
        if job is not None:
            return job
        present = [job for job in state.jobs.values() if job.spec.name == text]
        if len(present) > 1:
            ids = ", ".join(job.id for job in present)
            raise Refused(409, f"{len(present)} jobs are called {text!r}: {ids}. Say which by its id.")
        ended = [job for job in state.ended.values() if job.spec.name == text]
        found = present or sorted(ended, key=lambda job: job.sequence)
        return found[-1] if found else self._service.job(JobId(text))
