"""The Self-test view: runs `neo-desktop bench` and shows its reports."""

import asyncio
from typing import Any

import gradio as gr
from markupsafe import Markup

from neo_desktop.app.application import PageServices
from neo_desktop.app.news import SELFTEST
from neo_desktop.app.selftest import SUITES, SelfTest, SelfTestError
from neo_desktop.ui.following import QUIET, follow_topic
from neo_desktop.ui.html import button, panel, progress, tag
from neo_desktop.ui.refusals import telling


def selftest_view(services: PageServices) -> None:
    """Build the view."""
    selftest = services.selftest
    with gr.Column(elem_classes="side-by-side"):
        gr.Markdown(
            "# Self-test\nMeasures this computer: what it can run, how fast, and what offloading gains. "
            "The loaded model gives its memory back first. A question meanwhile loads it again and disturbs "
            "the figures."
        )
        suites = gr.CheckboxGroup(list(SUITES), value=list(SUITES), label="What to measure")
        start = gr.Button("Start", variant="primary")
    shown = panel(elem_id="selftest")
    report = panel(elem_id="report")

    async def begin(chosen: list[str]) -> None:
        with telling():
            selftest.start(chosen)

    async def act(event: gr.EventData) -> Any:
        asked: dict[str, str] = event._data
        if asked["act"] == "stop":
            await selftest.stop()
            return gr.skip()
        with telling():
            page = selftest.page(asked["name"])
            if page is None:
                raise SelfTestError("there is no such report any more")
        html = await asyncio.to_thread(page.read_text, "utf-8")
        return tag("iframe", sandbox="", title="Report", srcdoc=html)  # it runs no script and reaches nothing

    follow_topic(shown, services.news, SELFTEST, lambda: selftest_html(selftest))
    start.click(begin, [suites], None, **QUIET)
    shown.act(act, None, [report], **QUIET)


def selftest_html(selftest: SelfTest) -> Markup:
    """Return the state of the run, and the list of reports."""
    parts: list[Markup] = []
    run = selftest.running
    if run is not None:
        stop = None if run.is_stopping else button("Stop", "stop")
        parts.append(progress("Measuring", run.share, run.what, stop))
    elif selftest.error:
        parts.append(tag("p", selftest.error, class_="error", role="alert"))
    if names := selftest.reports():
        reports = [tag("li", button(_date(name), "report", name=name)) for name in names]
        parts += [tag("h2", "Reports"), tag("ul", reports, class_="reports")]
    return tag("div", parts, class_="view")


def _date(name: str) -> str:
    """Return when the report of this name was begun: "2026-11-22 20:15"."""
    return f"{name[:10]} {name[11:13]}:{name[13:15]}"
