"""The self-test's routes below /api, and its news."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict

from neo_desktop.app.selftest import SelfTest, SelfTestError
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web.body import parse
from neo_desktop.app.web.errors import ApiError
from neo_desktop.app.web.events import Hub

# A report is a page of its own, shown in a frame: it needs its styles and pictures, and nothing else.
REPORT_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Start(BaseModel):
    """The body of a start: which suites, all of them without."""

    model_config = ConfigDict(extra="forbid", strict=True)

    suites: list[str] | None = None


def selftest_routes(selftest: SelfTest, host: ModelHost, hub: Hub) -> APIRouter:
    """Return the routes, and let the hub tell what changes."""
    router = APIRouter()
    selftest.listeners.append(lambda: hub.publish("selftest", selftest.view()))

    async def view() -> dict[str, Any]:
        return selftest.view()

    hub.greet("selftest", view)

    @router.get("/selftest")
    async def state() -> dict[str, Any]:
        return selftest.view()

    @router.post("/selftest/start", status_code=202)
    async def start(request: Request) -> dict[str, Any]:
        body = await parse(request, Start)
        if host.loading is not None:
            raise ApiError(409, f"{host.loading.name} is being loaded: wait for it, or stop that first")
        if host.has_weights and host.service.idle_since_s is None:
            raise ApiError(409, "an answer is being written: wait for it, or stop it first")
        try:
            selftest.start(body.suites, host.rest)
        except SelfTestError as error:
            raise ApiError(409, str(error)) from None
        except ValueError as error:
            raise ApiError(400, str(error), param="suites") from None
        return selftest.view()

    @router.post("/selftest/stop")
    async def stop() -> dict[str, Any]:
        await selftest.stop()
        return selftest.view()

    @router.get("/selftest/report")
    async def report(name: str | None = None) -> FileResponse:
        page = selftest.report(name)
        if page is None:
            raise ApiError(404, "there is no such report")
        return FileResponse(page, media_type="text/html", headers=REPORT_HEADERS)

    return router
