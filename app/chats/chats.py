"""All that belongs to the chats of one server, put together."""

from pathlib import Path

from neo_desktop.app.chats.answers import Answers
from neo_desktop.app.chats.news import News
from neo_desktop.app.chats.store import ChatStore
from neo_desktop.app.chats.worker import FunctionThread
from neo_desktop.app.chats.writing import GrowingAnswer
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web.events import Hub


class Chats:
    """The store, the thread that it lives in, the answers under way, and the news of them.

    Args:
        host: has the model.
        hub: passes news on.
        folder: the user's data folder.

    Raises:
        StoreError: the chats cannot be kept there.
    """

    def __init__(self, host: ModelHost, hub: Hub, folder: Path) -> None:
        growing: dict[str, GrowingAnswer] = {}
        self.store = ChatStore(folder)
        self.worker = FunctionThread("chats")
        self.news = News(host, self.store, self.worker, growing, hub)
        self.answers = Answers(host, self.store, self.worker, growing, self.news)

    async def close(self) -> None:
        """End all answers, save them and close the file."""
        await self.answers.close()
        self.news.close()
        await self.worker(self.store.close)
        self.worker.close()
