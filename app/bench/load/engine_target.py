"""An engine of this process, with the thread that serves it in `neo-desktop serve`, but without HTTP."""

import random
from collections.abc import AsyncGenerator

from neo_desktop.app.bench.load.target import Prompt, TargetError, Usage
from neo_desktop.app.service import EngineService
from neo_desktop.app.service_errors import ServiceBusyError, ServiceError
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.errors import ContextLengthError
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.stats import EngineStats


class EngineTarget:
    """Prompts are random token ids; answers have exactly as many tokens as are asked for.

    Args:
        engine: closed in the end; nobody else may call it meanwhile.
        seed: of the prompts.
    """

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self._engine = engine
        self._service = EngineService(engine)
        self._random = random.Random(seed)

    @property
    def model(self) -> str:
        """The model's name."""
        return self._engine.model_name

    @property
    def notes(self) -> tuple[str, ...]:
        """How the figures differ from a server's."""
        return (
            "The client runs in the engine's process: there is no HTTP, and it takes a little of the "
            "engine's time.",
        )

    async def start(self) -> None:
        """Start the engine's thread."""
        await self._service.start()

    def make_prompt(self, tokens: int) -> list[int]:
        """Return random token ids."""
        return self._random.choices(range(self._engine.config.vocab_size), k=tokens)

    async def stream(self, prompt: Prompt, max_tokens: int) -> AsyncGenerator[Usage | None]:
        """Yield once per iteration that brought a token; see `Target.stream`."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        try:
            async with await self._service.submit([prompt], params) as generation:
                async for _, output in generation:
                    if output.tokens:
                        yield None
        except ContextLengthError as error:
            raise TargetError(str(error), "longer than the context", is_refusal=True) from None
        except ServiceBusyError as error:
            raise TargetError(str(error), "too many requests wait", is_refusal=True) from None
        except ServiceError as error:
            raise TargetError(str(error)) from None
        yield Usage(output.num_prompt_tokens, output.num_cached_tokens, output.num_output_tokens)

    def stats(self) -> EngineStats:
        """Return the counters as of the last iteration."""
        return self._service.stats

    async def close(self) -> None:
        """End the engine's thread and drop weights and caches."""
        try:
            await self._service.stop()
        finally:
            self._engine.close()
