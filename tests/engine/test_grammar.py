"""Outputs follow their grammars with every token, and other requests of the batch are unaffected."""

import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
from checkpoints import save_checkpoint
from cost_models import machine
from seeds import seeds
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine import grammar as grammars
from neo_desktop.engine.errors import EngineError
from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.request import FinishReason
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.models.tokenizer import ByteTokenizer, Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["small", "large", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = grammars.from_json_schema(SCHEMA)
HOT = {"temperature": 1.5, "max_tokens": 400, "seed": 3}


@pytest.fixture(scope="module")
def guide() -> Iterator[Engine]:
    with Engine.from_pretrained(device="cpu", policy="gpu-only", gpu_cache_tokens=16_384) as engine:
        yield engine


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, one token per byte, and more logits than token ids."""
    return save_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def check_json(text: str, schema: dict[str, Any] = SCHEMA) -> None:
    jsonschema.validate(json.loads(text), schema)


def test_hot_outputs_are_valid_json_and_do_not_touch_the_requests_beside_them(guide: Engine) -> None:
    free = [
        SamplingParams(max_tokens=40, temperature=0.0),
        SamplingParams(max_tokens=40, temperature=1.2, seed=5, top_p=0.9),
        SamplingParams(max_tokens=40, temperature=0.7, seed=6, repetition_penalty=1.2, logprobs=2),
    ]
    prompts = ["What is", "A block holds", "Why"]
    expected = guide.generate(prompts, free)
    outputs = guide.generate([*prompts, "A person:"], [*free, SamplingParams(grammar=JSON, n=4, **HOT)])
    assert outputs[:3] == expected
    assert len({output.text for output in outputs[3:]}) > 1
    for output in outputs[3:]:
        assert output.finish_reason is FinishReason.STOP
        check_json(output.text)
    alone = guide.generate(["A person:"], SamplingParams(grammar=JSON, n=4, **HOT))
    assert [output.token_ids for output in alone] == [output.token_ids for output in outputs[3:]]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 3, "seed": 1},
        {"temperature": 1.0, "top_p": 0.1, "min_p": 0.5, "seed": 1},
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 2.0, "seed": 1},
        {"temperature": 0.001, "seed": 1, "logit_bias": {5: 100.0}},
        {"temperature": 1.0, "seed": 1, "ignore_eos": True},
    ],
)
def test_every_way_of_sampling_obeys(guide: Engine, settings: dict[str, Any]) -> None:
    params = SamplingParams(grammar=JSON, max_tokens=400, **settings)
    (output,) = guide.generate(["A person:"], params)
    assert output.finish_reason is FinishReason.STOP
    check_json(output.text)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_policies_moves_and_preemptions_change_no_token(
    llama: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine plans the next iteration during the current one, as beside a GPU."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(256, (length,), generator=generator).tolist() for length in (1, 33, 7, 90, 64)]
    params = [SamplingParams(grammar=JSON, temperature=1.0, seed=i, max_tokens=160) for i in range(4)]
    params.append(SamplingParams(temperature=1.0, seed=9, max_tokens=160, ignore_eos=True))
    with Engine.from_pretrained(llama, device="cpu", policy="gpu-only", gpu_cache_tokens=4096) as roomy:
        expected = [roomy.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    with (
        Engine.from_pretrained(
            llama,
            device="cpu",
            policy=policy,
            gpu_cache_tokens=288,
            cpu_cache_tokens=288,
            cost_model=machine(cpu_token_ms=1e-6, offload_ms=0.0),
        ) as engine,
        ThreadPoolExecutor(1) as device,
    ):
        start = engine.executor.start
        monkeypatch.setattr(engine.executor, "start", lambda plan: device.submit(start(plan)).result)
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
        assert stats.num_preemptions + stats.num_moves > 0, "the test did not reach what it is about"
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for output in outputs[:4]:
        assert output.finish_reason is FinishReason.STOP
        check_json(output.text)


@pytest.mark.parametrize("pattern", ["[a-c]{3,5}-[0-9]{2}", "(yes|no)", "x?", r"\d{4}-\d\d-\d\d"])
def test_a_regular_expression_matches_the_whole_output(guide: Engine, pattern: str) -> None:
    params = SamplingParams(grammar=grammars.from_regex(pattern), n=8, **HOT)
    outputs = guide.generate(["Say:"], params)
    assert all(re.fullmatch(pattern, output.text) for output in outputs)
    assert {output.finish_reason for output in outputs} == {FinishReason.STOP}


def test_an_output_may_end_early_only_where_its_grammar_may(guide: Engine) -> None:
    """A bias favors the model's end token; it comes as soon as the grammar allows it."""
    (end,) = guide.eos_token_ids[:1]
    grammar = grammars.from_lark('start: "abc" ("!")*')
    params = SamplingParams(grammar=grammar, logit_bias={end: 100.0}, max_tokens=50, temperature=1.0)
    (output,) = guide.generate(["Say:"], params)
    assert output.text == "abc"
    assert output.token_ids[-1] == end


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [('{"a": [1, null, {"b": "c"}]}', True), ("{}", True), ("[1]", False), ('"a"', False), ("{a", False)],
)
def test_any_json_is_an_object(text: str, is_allowed: bool) -> None:
    compiler = GrammarCompiler(ByteTokenizer(), 257, (256,))
    state = compiler.start(grammars.any_json())
    compiler.close()
    assert all(state.accept(byte) for byte in text.encode()) == is_allowed
    assert state.is_complete or not is_allowed


def test_a_grammar_can_begin_after_a_text_such_as_the_end_of_a_thought(guide: Engine) -> None:
    bias = dict.fromkeys(guide.tokenizer.encode(".", add_special_tokens=False), 8.0)
    params = SamplingParams(
        grammar=JSON, grammar_after=".", n=4, temperature=1.0, seed=2, max_tokens=600, logit_bias=bias
    )
    outputs = guide.generate(["Think:"], params)
    for output in outputs:
        thought, _, answer = output.text.partition(".")
        assert thought != output.text
        assert output.finish_reason is FinishReason.STOP
        check_json(answer[answer.index("{") :])


def test_log_probabilities_are_those_of_the_model_not_of_the_grammar(guide: Engine) -> None:
    free = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
    forced = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3, grammar=grammars.from_regex("zebra"))
    (plain,), (bound,) = (guide.generate(["What is"], params) for params in (free, forced))
    assert bound.tokens[0].top_logprobs == plain.tokens[0].top_logprobs
    assert bound.text.startswith("z")
    assert bound.tokens[0].logprob is not None
    assert bound.tokens[0].logprob.logprob < plain.tokens[0].top_logprobs[-1].logprob


def test_biases_force_and_forbid_tokens(guide: Engine) -> None:
    free = guide.generate(["What is"], SamplingParams(max_tokens=5, temperature=0.0))[0]
    forbidden = SamplingParams(max_tokens=5, temperature=0.0, logit_bias={free.token_ids[0]: -100})
    forced = SamplingParams(max_tokens=5, temperature=1.0, logit_bias={77: 100.0})
    plain = SamplingParams(max_tokens=5, temperature=0.0)
    without, only, same = guide.generate(["What is"] * 3, [forbidden, forced, plain])
    assert free.token_ids[0] not in without.token_ids
    assert only.token_ids == (77,) * 5
    assert same.token_ids == free.token_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {5: 101}}, "logit_bias must be between -100 and 100"),
        ({"logit_bias": {-1: 1}}, "logit_bias must be at least 0"),
        ({"logit_bias": {10**15: 1}}, "logit_bias holds token id 1000000000000000, which is outside"),
        ({"stop_token_ids": [10**15]}, "stop_token_ids holds token id 1000000000000000, which is outside"),
        ({"grammar": ""}, "grammar must be text"),
        ({"grammar_after": "x"}, "grammar_after needs a grammar"),
        ({"grammar": "no grammar"}, "grammar cannot be used: "),
        ({"grammar": "x" * 10**7}, "grammar has 10000000 characters"),
        ({"grammar": grammars.from_regex("(((")}, "grammar cannot be used: .*unclosed group"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    guide: Engine, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        guide.generate(["Hello"], SamplingParams(max_tokens=3, **settings))
    assert not guide.has_work


def test_what_is_no_schema_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for schema in ("{", False, [], {"enum": [{1, 2}]}, {"enum": deep}):
        with pytest.raises(ValueError, match=r"^grammar "):
            grammars.from_json_schema(schema)  # type: ignore[arg-type]


def test_a_grammar_that_becomes_too_costly_ends_its_request_alone(guide: Engine) -> None:
    costly = SamplingParams(grammar=grammars.from_regex("[xyz]{60}a{1000000}"), max_tokens=100)
    plain = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    guide.add("costly", guide.prepare("Hello", costly))
    guide.add("plain", guide.prepare("Hello", plain))
    ends = {}
    while guide.has_work:
        ends |= {output.request_id: output for output in guide.step() if output.finish_reason}
    assert ends["costly"].finish_reason is FinishReason.DEAD_END
    assert "grammar cannot be followed any further" in (ends["costly"].error or "")
    assert ends["plain"].num_output_tokens == 30
    with pytest.raises(EngineError, match="grammar"):
        guide.generate(["Hello"], costly)


def lark_chain(length: int = 6000) -> str:
    """Return rules that overflow the stack."""
    rules = (f'r{i}: r{i + 1} "b"' for i in range(length))
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


def schema_chain(length: int = 3500) -> str:
    """Return definitions that overflow the stack."""
    definitions: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return grammars.from_json_schema(
        {"$ref": "#/$defs/a0", "$defs": definitions | {f"a{length}": {"type": "null"}}}
    )


def costly_intersection() -> str:
    """Return a grammar that would take half a minute and gigabytes."""
    patterns = [{"pattern": f"(.*{letter}.*)"} for letter in "abcdefghijklmnopqrst"]
    return grammars.from_json_schema({"type": "string", "allOf": patterns})


@pytest.mark.parametrize("make", [lark_chain, schema_chain, costly_intersection])
def test_grammars_made_to_do_harm_are_refused_and_others_go_on(make: Callable[[], str]) -> None:
    grammar = make()
    compiler = GrammarCompiler(ByteTokenizer(), 257, (256,))
    try:
        with pytest.raises(ValueError, match="grammar cannot be used: it is too complex"):
            compiler.compile(grammar)
        assert compiler.start(JSON).accept(ord("{"))
    finally:
        compiler.close()


def test_long_texts_go_on_and_a_grammar_that_failed_once_begins_anew() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), 257, (256,))
    long = grammars.from_json_schema({"type": "string", "maxLength": 50_000})
    costly = grammars.from_regex("[xyz]{60}a{1000000}")
    try:
        state = compiler.start(long)
        for byte in b'"' + b"x" * 8_000 + b'"':
            state.allowed_tokens()
            assert state.accept(byte)
        for _ in range(2):
            state, num_tokens = compiler.start(costly), 0
            while state.accept(ord("x")):
                state.allowed_tokens()
                num_tokens += 1
            assert 30 < num_tokens <= 60
    finally:
        compiler.close()


def sentence_pieces() -> Tokenizer:
    """Return a Llama 2 style vocabulary: a space before every text, bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁{", '"', "{", "}", ":", ",", "n", "a", "m", "e", "na", "me", "name", '▁"', "1", "12"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("n", "a"), ("m", "e"), ("na", "me"), ("▁", "{"), ("▁", '"'), ("1", "2")]
    vocabulary.setdefault("2", len(vocabulary))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, {"eos_token": "</s>", "bos_token": "<s>"})


def walk(tokenizer: Tokenizer, grammar: str, seed: int, *, vocab_size: int, eos: tuple[int, ...]) -> str:
    """Draw a text of allowed tokens, uniformly."""
    drawing = random.Random(seed)
    compiler = GrammarCompiler(tokenizer, vocab_size, eos)
    state = compiler.start(grammar)
    compiler.close()
    token_ids: list[int] = []
    while not state.is_complete:
        bits = np.unpackbits(np.frombuffer(state.allowed_tokens(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:vocab_size]).tolist()
        assert allowed
        assert all(tokenizer.token_bytes(token_id) for token_id in allowed), "an id without a token"
        token_ids.append(drawing.choice(allowed))
        assert state.accept(token_ids[-1])
        assert len(token_ids) < 1000
    return tokenizer.decode(token_ids)


@pytest.mark.parametrize("make", [sentence_pieces, ByteTokenizer])
@pytest.mark.parametrize("seed", seeds(2, 3))
def test_every_kind_of_tokenizer_gives_the_text_that_was_meant(
    make: Callable[[], Tokenizer], seed: int
) -> None:
    tokenizer = make()
    vocab_size = tokenizer.vocab_size + 40
    for eos in (tokenizer.eos_token_ids, ()):
        check_json(walk(tokenizer, JSON, seed, vocab_size=vocab_size, eos=eos))
        text = '{"name":"12ä"}'
        grammar = grammars.from_json_schema({"const": text})
        assert json.loads(walk(tokenizer, grammar, seed, vocab_size=vocab_size, eos=eos)) == text


def test_special_tokens_are_no_text() -> None:
    """The grammar allows its characters, not the token itself, which would end the output or vanish."""
    grammar = grammars.from_json_schema({"const": "a<|end|>b"})
    tokenizer = ByteTokenizer()
    text = walk(tokenizer, grammar, 0, vocab_size=tokenizer.vocab_size, eos=tokenizer.eos_token_ids)
    assert text == '"a<|end|>b"'
