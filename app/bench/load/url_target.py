"""Any server that speaks OpenAI's API for completions, measured with OpenAI's own client."""

import json
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx2
import openai
from openai.types import Completion

from neo_desktop.app.bench.load.target import Prompt, TargetError, Usage
from neo_desktop.app.bench.words import say
from neo_desktop.app.web.open_files import allow_open_files

CONNECT_TIMEOUT_S = 10.0
MOST_IDLE_CONNECTIONS = 32  # each is looked at for every new request
KEEP_ALIVE_S = 2.0  # a connection idle for longer is not used again: the server may be about to close it
MAX_CONNECTIONS = 16_384  # each is an open file
PROBE_WORDS = 100
PROBE_OUTPUT_TOKENS = 4
# Common, short, and one or two tokens each to most tokenizers.
_TEXT = """
able about above across add after again air all almost along also always among answer any area arm ask baby
back ball bank base bear beat bed been before begin behind best between big bird black blood blue boat body
bone book born both box boy bread break bright bring brother brown build burn busy buy call came can
"""
WORDS = _TEXT.split()

EXTRAS: dict[str, Any] = {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HINTS = {
    401: ": give the key that the server wants",
    403: ": give a key that the server accepts",
    404: ": check the address, which usually ends with /v1, and the model's name",
}
_BAD_REQUEST = (openai.BadRequestError, openai.UnprocessableEntityError)


class UrlTarget:
    """Prompts are random common words; how many tokens a word makes is learnt from one request at the start.

    Every request asks for its usage, and not to end early (`ignore_eos`). A server that knows neither is
    asked without; `notes` say so.

    Args:
        url: as people write it: "http://localhost:8000", "https://host/v1"; /v1 is added to a bare address.
        api_key: None for servers that want none.
        model: None: the first that the server lists.

    Raises:
        ValueError: the address is none of HTTP, or has a user name in it.
    """

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        parts = _address(url)
        self.url = (url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1").rstrip("/")
        allow_open_files(MAX_CONNECTIONS)
        idle = {"max_keepalive_connections": MOST_IDLE_CONNECTIONS, "keepalive_expiry": KEEP_ALIVE_S}
        http = openai.DefaultAsyncHttpxClient(
            limits=httpx2.Limits(**idle),  # type: ignore[arg-type]
            trust_env=parts.hostname not in LOOPBACK,  # a proxy knows nothing of this computer's servers
        )
        self._client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=api_key or "none",
            max_retries=0,
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT_S),
            http_client=http,
        )
        self._model = model
        self._extras = dict(EXTRAS)
        self._counts_tokens = False
        self._tokens_per_word = 1.0
        self.notes: tuple[str, ...] = ()  # what was found out about the server
        # Not seeded: a server may still have the prompts of an earlier run in its cache.
        self._random = random.Random()

    @property
    def model(self) -> str:
        """The model's name; known once started."""
        return self._model or ""

    async def start(self) -> None:
        """Find the model, what the server can do, and how many tokens a word makes; see `Target.start`."""
        if self._model is None:
            with self._errors():
                listed = await self._client.models.list()
            if not listed.data:
                raise TargetError(f"{self.url} lists no model: name the one to use")
            self._model = listed.data[0].id
        usage = await self._probe()
        if self._counts_tokens:
            self._tokens_per_word = max(usage.prompt_tokens, 1) / PROBE_WORDS
        takes_it = "extra_body" in self._extras
        self.notes = say(
            "server",
            counts_tokens=self._counts_tokens,
            tokens_per_word=self._tokens_per_word,
            takes_it=takes_it,
            ignores_it=not takes_it or (self._counts_tokens and usage.output_tokens < PROBE_OUTPUT_TOKENS),
        )

    def make_prompt(self, tokens: int) -> str:
        """Return random words."""
        return self._words(max(round(tokens / self._tokens_per_word), 1))

    async def stream(self, prompt: Prompt, max_tokens: int) -> AsyncGenerator[Usage | None]:
        """Yield once per event with text; see `Target.stream`."""
        assert isinstance(prompt, str)
        usage: Usage | None = None
        num_texts = 0
        is_complete = False
        asked: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens}
        with self._errors():
            events: openai.AsyncStream[Completion] = await self._client.completions.create(
                **asked, **self._extras, temperature=0.0, stream=True
            )
            async with events:
                async for event in events:
                    if event.usage is not None:
                        details = event.usage.prompt_tokens_details
                        cached = 0 if details is None else details.cached_tokens or 0
                        usage = Usage(event.usage.prompt_tokens, cached, event.usage.completion_tokens)
                    for choice in event.choices:
                        is_complete |= choice.finish_reason is not None
                        if choice.text:
                            num_texts += 1
                            yield None
        if not is_complete:
            raise TargetError(f"{self.url} ended the stream in the middle of an answer", "stream cut off")
        self._counts_tokens = usage is not None
        yield usage or Usage(len(prompt.split()), 0, max(num_texts, 1))

    def stats(self) -> None:
        """Nothing is known of a server's engine."""

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _probe(self) -> Usage:
        """Send one request; leave out, one after the other, what the server may not take."""
        for left_out in ((), ("extra_body",), ("stream_options",), tuple(EXTRAS)):
            self._extras = {name: value for name, value in EXTRAS.items() if name not in left_out}
            try:
                asked = self.stream(self._words(PROBE_WORDS), PROBE_OUTPUT_TOKENS)
                *_, usage = [part async for part in asked]
            except TargetError as error:
                if left_out == tuple(EXTRAS) or not isinstance(error.__cause__, _BAD_REQUEST):
                    raise
            else:
                break
        assert usage is not None
        return usage

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=count))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the client's errors into ours."""
        try:
            yield
        except openai.APIStatusError as error:
            raise self._status_error(error) from error
        except openai.APITimeoutError as error:
            raise TargetError(
                f"{self.url} did not answer within {CONNECT_TIMEOUT_S:g} s: is the server running?",
                "no connection",
            ) from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            reason = "no connection" if isinstance(cause, httpx2.ConnectError) else "connection lost"
            hint = "is the server running at this address?" if reason == "no connection" else "did it stop?"
            raise TargetError(
                f"{self.url}: {reason} ({str(cause) or type(cause).__name__}): {hint}", reason
            ) from error
        except openai.APIError as error:  # told in the stream itself
            raise TargetError(f"{self.url}: {error.message}", "error in the stream") from error
        except json.JSONDecodeError as error:
            raise TargetError(f"{self.url} sent what is not JSON ({error})", "not JSON") from error

    def _status_error(self, error: openai.APIStatusError) -> TargetError:
        status = error.status_code
        # The server's own words, in one short line.
        said = error.body.get("message") if isinstance(error.body, dict) else None
        text = " ".join(str(said or error.response.reason_phrase or "no reason given").split())[:200]
        message = f"{error.request.url} answered HTTP {status} ({text}){HINTS.get(status, '')}"
        # Too many requests, no room, or a request that cannot be served: none of it has been computed.
        return TargetError(message, f"HTTP {status}", is_refusal=status in (400, 413, 422, 429, 503))


def _address(url: str) -> SplitResult:
    """Return the address in parts; raises ValueError where it is none, or holds what a report should not."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half a bracket
        is_address = False
    if not is_address:
        raise ValueError(f"{url!r} is no address of a server: write it like http://localhost:8000/v1")
    if parts.username is not None:
        raise ValueError("the address holds a user name, which would stand in the report: give an API key")
    return parts
