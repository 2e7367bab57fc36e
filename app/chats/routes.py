"""The routes of chats and their messages, under /api."""

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from neo_desktop.app.chats.bodies import ChangeBody, NewChatBody, QuestionBody
from neo_desktop.app.chats.chats import Chats
from neo_desktop.app.chats.database import StoreError
from neo_desktop.app.chats.errors import BeingAnsweredError, NotFoundError, NotPossibleError
from neo_desktop.app.web.body import parse
from neo_desktop.app.web.errors import ApiError


def routes(chats: Chats) -> APIRouter:
    """Chats, questions and answers."""
    router = APIRouter()
    store, work, answers, news = chats.store, chats.worker, chats.answers, chats.news

    @router.get("/chats")
    async def list_chats(query: str = "") -> JSONResponse:
        return JSONResponse(await news.list_view(query[:1000]))

    @router.post("/chats")
    async def new_chat(request: Request) -> JSONResponse:
        body = await parse(request, NewChatBody)
        chat = await work(store.create, body.settings.settings())
        news.list_changed()
        return JSONResponse(await news.whole_view(chat))

    @router.get("/chats/{chat_id}")
    async def one_chat(chat_id: str) -> JSONResponse:
        return JSONResponse(await news.whole_view(await work(store.chat, chat_id)))

    @router.patch("/chats/{chat_id}")
    async def change_chat(chat_id: str, request: Request) -> JSONResponse:
        body = await parse(request, ChangeBody)
        settings = None if body.settings is None else body.settings.settings()
        chat = await work(store.change, chat_id, title=body.title, settings=settings, leaf_id=body.leaf_id)
        news.chat_changed(chat)
        if body.title is not None:
            news.list_changed()
        return JSONResponse(news.chat_view(chat))

    @router.delete("/chats/{chat_id}", status_code=204)
    async def delete_chat(chat_id: str) -> None:
        answers.stop_chat(chat_id)
        await work(store.delete, chat_id)
        news.list_changed()

    @router.post("/chats/{chat_id}/restore")
    async def restore_chat(chat_id: str) -> JSONResponse:
        chat = await work(store.restore, chat_id)
        news.list_changed()
        return JSONResponse(await news.whole_view(chat))

    @router.post("/chats/{chat_id}/messages")
    async def ask(chat_id: str, request: Request) -> JSONResponse:
        body = await parse(request, QuestionBody)
        if not body.text.strip() and not body.attachment_ids:
            raise ApiError(400, "the question is empty", param="text")
        question, answer = await answers.ask(chat_id, body.parent_id, body.text, body.attachment_ids)
        return JSONResponse(
            {"question": await news.node_view(question), "answer": await news.node_view(answer)}
        )

    @router.post("/messages/{message_id}/retry")
    async def retry(message_id: str) -> JSONResponse:
        return JSONResponse(await news.node_view(await answers.retry(message_id)))

    @router.post("/messages/{message_id}/continue")
    async def resume(message_id: str) -> JSONResponse:
        return JSONResponse(await news.node_view(await answers.resume(message_id)))

    @router.post("/messages/{message_id}/stop")
    async def stop(message_id: str) -> JSONResponse:
        return JSONResponse(await news.node_view(await answers.stop(message_id)))

    return router


def install_errors(app: FastAPI) -> None:
    """Let the errors of chats have the shape of all others."""

    @app.exception_handler(NotFoundError)
    async def not_found(_: Request, error: NotFoundError) -> JSONResponse:
        return ApiError(404, str(error), code="not_found").response()

    @app.exception_handler(BeingAnsweredError)
    async def being_answered(_: Request, error: BeingAnsweredError) -> JSONResponse:
        return ApiError(409, str(error), code="being_answered").response()

    @app.exception_handler(NotPossibleError)
    async def not_possible(_: Request, error: NotPossibleError) -> JSONResponse:
        return ApiError(400, str(error)).response()

    @app.exception_handler(StoreError)
    async def not_stored(_: Request, error: StoreError) -> JSONResponse:
        return ApiError(507, str(error), code="not_stored").response()
