"""The page's named functions, for `gradio_client`."""

from collections.abc import AsyncIterator

from gradio.events import api

from neo_desktop.app.chats.messages import Settings
from neo_desktop.app.news import chat_topic, text_topic
from neo_desktop.app.page.services import PageServices
from neo_desktop.ui.refusals import telling


def add_api(services: PageServices) -> None:
    """Offer `chat` and `models`."""
    chats = services.chats

    async def chat(message: str, chat_id: str = "") -> AsyncIterator[dict[str, str]]:
        """Ask in a chat, "" for a new one; yields {"chat_id", "text", "thought", "state"} as it grows."""
        with telling():
            present = await (chats.chat(chat_id) if chat_id else chats.create(Settings()))
            _, answer = await chats.answers.ask(present.entry.id, present.leaf_id, message)
            with services.news.follow(text_topic(answer.chat_id), chat_topic(answer.chat_id)) as grown:
                while True:
                    grown.clear()
                    now = chats.present(answer)
                    if now is answer and not grown.is_set():
                        whole = await chats.chat(answer.chat_id)
                        now = next(one for one in whole.messages if one.id == answer.id)
                    yield {name: getattr(now, name) for name in ("chat_id", "text", "thought", "state")}
                    if not now.is_live:
                        return
                    await grown.wait()

    async def models() -> list[dict[str, object]]:
        """Return the models on this computer; `name` is what `chat` loads with."""
        await services.shelf.look()
        return [
            {"name": one.model.name, "runnable": one.refusal is None, "reason": one.refusal}
            for one in services.shelf.models
        ]

    api(chat, api_name="chat")
    api(models, api_name="models")
