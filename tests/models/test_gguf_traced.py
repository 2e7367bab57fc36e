"""GGUF files of architectures without a native decoder: traced models, with the tokens of transformers."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import logits_of_all
from gguf_traced import VOCAB_SIZE, WRITTEN, write_traced

from neo_desktop.app.shelf.checkpoint_summary import summarize
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError, UnsupportedModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.registry import check_model, load_model, stages_of
from neo_desktop.models.stored_form import stored_form
from neo_desktop.models.traced.config import with_long_factors
from neo_desktop.models.traced.spec import examined

CPU = torch.device("cpu")
ARCHITECTURES = sorted({architecture for architecture, _, _ in WRITTEN.values()} | {"olmo3"})


def expected_logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")  # torch's attention ignores score caps
    with torch.no_grad():
        found: torch.Tensor = model(token_ids[None]).logits[0]
    return found


def logits(path: Path, token_ids: torch.Tensor, *, keep: bool = False) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    form = stored_form(check_model(checkpoint, config), config) if keep else DENSE
    decoder = load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=form)
    return logits_of_all(decoder, token_ids, stages=stages_of(decoder, None))


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", WRITTEN)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path, model = write_traced(tmp_path, family)
    token_ids = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1))
    expected = expected_logits(model, token_ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(path, token_ids), expected, rtol=1e-4, atol=1e-4)
    assert summarize(path).is_by_transformers
    config = open_checkpoint(path).config()
    assert config.num_parameters == sum(weight.numel() for weight in model.parameters())


def test_files_with_longrope_serve_the_whole_context(tmp_path: Path) -> None:
    """Logits beyond the original context are those of transformers, once the long factors are chosen."""
    path, model = write_traced(tmp_path, "phi3 long")
    checkpoint = open_checkpoint(path)
    short = checkpoint.config()
    whole = with_long_factors(short)
    assert (short.max_context_tokens, whole.max_context_tokens) == (128, 256)
    token_ids = torch.randint(3, VOCAB_SIZE, (140,), generator=torch.Generator().manual_seed(1))
    decoder = load_model(checkpoint, whole, dtype=torch.float32, device=CPU)
    found = logits_of_all(decoder, token_ids, stages=stages_of(decoder, None))
    torch.testing.assert_close(found, expected_logits(model, token_ids), rtol=1e-4, atol=1e-4)


def test_factors_of_another_number_are_refused(tmp_path: Path) -> None:
    path, _ = write_traced(tmp_path, "phi3 long", tensors={"rope_factors_long.weight": torch.ones(5)})
    with pytest.raises(ModelError, match=r"rope_factors_long\.weight that are not valid factors"):
        open_checkpoint(path).config()


@pytest.mark.sample(1)
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("family", ["gemma2", "granite", "phi3"])  # a tied head, rows in order, fused rows
def test_matrices_stay_as_they_are_stored(family: str, type_name: str, tmp_path: Path) -> None:
    path, model = write_traced(
        tmp_path,
        family,
        type_name,
        sizes={"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8},
    )
    token_ids = torch.randint(3, VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(1))
    expected = expected_logits(model, token_ids)
    summary = summarize(path)
    assert summary.form.kept_types == {type_name}
    off = torch.linalg.vector_norm(logits(path, token_ids, keep=True) - expected)
    assert off <= 0.1 * torch.linalg.vector_norm(expected)  # matmul inputs are rounded to 8 bits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gemma2.attention.causal": False}, r"sets attention.causal.*neo-desktop\[llamacpp\]"),
        ({"gemma2.rope.scaling.type": "yarn"}, "sets rope.scaling.type"),
        ({"gemma2.rope.dimension_count": 8}, "rope.dimension_count other than"),
        ({"gemma2.attention.value_length": 8}, "values of another size"),
        ({"gemma2.attention.head_count": 3}, "cannot"),  # transformers' own words
        ({"gemma2.feed_forward_length": 99, "gemma2.expert_count": 2}, "sets expert_count"),
    ],
)
def test_what_is_not_known_is_left_to_llama_cpp(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = write_traced(tmp_path, "gemma2", metadata=changes)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(path).config()
    assert summarize(path).needs_llamacpp


def test_a_tensor_of_another_model_is_left_to_llama_cpp(tmp_path: Path) -> None:
    path, _ = write_traced(tmp_path, "gemma2", tensors={"rope_factors_long.weight": torch.ones(16)})
    with pytest.raises(UnsupportedModelError, match=r"rope_factors_long\.weight, which Gemma2ForCausalLM"):
        open_checkpoint(path).weights()
    assert summarize(path).needs_llamacpp


def test_without_transformers_it_is_left_to_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write_traced(tmp_path, "gemma2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    examined.cache_clear()
    with pytest.raises(UnsupportedModelError, match=r"install 'neo-desktop\[transformers\]'"):
        open_checkpoint(path).config()


def test_defaults_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Old files lack the keys for windows and caps."""
    keys = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")
    path, _ = write_traced(
        tmp_path, "gemma2", metadata={"gemma2.context_length": 8192} | {f"gemma2.{key}": None for key in keys}
    )
    config = open_checkpoint(path).config()
    assert config.attention_softcap == 50
    assert config.layer_windows == (4096, None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", [True, False])
def test_a_head_of_its_own_is_used(keep: bool, tmp_path: Path) -> None:
    """Configurations of this family tie the head by default."""
    path, model = write_traced(tmp_path, "starcoder2", "Q8_0", sizes={"tie_word_embeddings": False})
    token_ids = torch.randint(3, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(1))
    expected = expected_logits(model, token_ids)
    off = torch.linalg.vector_norm(logits(path, token_ids, keep=keep) - expected)
    assert off <= (0.1 if keep else 1e-4) * torch.linalg.vector_norm(expected)
