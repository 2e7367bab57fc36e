"""The services that the page shows and drives."""

from dataclasses import dataclass
from pathlib import Path

from neo_desktop.app.chats.chats import Chats
from neo_desktop.app.live.feed import EngineFeed
from neo_desktop.app.news import News
from neo_desktop.app.page.selftest import SelfTest
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.shelf.model_shelf import ModelShelf


@dataclass(frozen=True, slots=True)
class PageServices:
    """One server's services, for the page; `trouble` says why this computer's GPU cannot be used."""

    host: ModelHost
    news: News
    chats: Chats
    engine: EngineFeed
    shelf: ModelShelf
    selftest: SelfTest
    data_folder: Path
    trouble: str | None
