"""What the page sends."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from neo_desktop.app.chats.messages import Settings
from neo_desktop.app.web.errors import ApiError
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.sampling_params import SamplingParams

MAX_TEXT_CHARS = 2_000_000
MAX_TITLE_CHARS = 200
MAX_ATTACHMENTS = 20

Count = Annotated[int, Field(le=2**31 - 1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SettingsBody(_Body):
    """How a chat is answered; what is left out or null is the model's own."""

    system_prompt: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: Count | None = None
    seed: int | None = None

    def settings(self) -> Settings:
        """The settings; ApiError names the field that is out of range."""
        settings = Settings(**self.model_dump())
        try:
            SamplingParams(**settings.sampling())
        except SettingError as error:
            raise ApiError(400, str(error), param=error.field) from error
        return settings


class NewChatBody(_Body):
    """POST /chats."""

    settings: SettingsBody = SettingsBody()


class ChangeBody(_Body):
    """PATCH /chats/{id}."""

    title: Annotated[str, Field(min_length=1, max_length=MAX_TITLE_CHARS)] | None = None
    settings: SettingsBody | None = None
    leaf_id: str | None = None


class QuestionBody(_Body):
    """POST /chats/{id}/messages."""

    parent_id: str | None = None
    text: Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
    attachment_ids: Annotated[list[str], Field(max_length=MAX_ATTACHMENTS)] = []


class PresetBody(_Body):
    """PUT /presets/{name}."""

    text: Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
