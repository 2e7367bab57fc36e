"""Small Gemma 4 models with an assistant, and what the assistant of transformers drafts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from traced_models import FAMILIES, SIZES, save
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM

WINDOW = "sliding_attention"
_SHARED: tuple[str, ...] = (
    "num_key_value_heads",
    "num_global_key_value_heads",
    "head_dim",
    "global_head_dim",
)
_SHARED += ("attention_k_eq_v", "sliding_window", "vocab_size_per_layer_input")


@dataclass(frozen=True)
class Pair:
    """A model and its assistant, in torch and as folders."""

    model: Any
    assistant: Any
    path: Path
    draft_path: Path

    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """Return the tokens that the assistant drafts after `token_ids`, by transformers' way of calling it.

        The model has computed all tokens but the last one. Layers with a window keep the newest KV alone, as
        the cache of transformers does.
        """
        tokens, window = torch.tensor(token_ids), self.model.config.sliding_window
        position = torch.tensor([[len(token_ids) - 1]])
        with torch.no_grad():
            out = self.model.model(tokens[None, :-1], use_cache=False, return_shared_kv_states=True)
            states = {kind: tuple(pair) for kind, pair in out.shared_kv_states.items()}
            states[WINDOW] = tuple(each[:, :, -window:] for each in states[WINDOW])
            hidden, token, drafted = out.last_hidden_state[:, -1:], tokens[None, -1:], list[int]()
            for _ in range(count):
                embedded = self.model.get_input_embeddings()(token)
                found = self.assistant(
                    inputs_embeds=torch.cat((embedded, hidden), dim=-1),
                    position_ids=position,
                    shared_kv_states=states,
                )
                token, hidden = found.logits.argmax(dim=-1), found.last_hidden_state
                drafted.append(int(token))
        return drafted

    def last_hidden(self, token_ids: Tensor) -> Tensor:
        """Return the model's hidden states [n, hidden] of tokens [n]."""
        with torch.no_grad():
            states: Tensor = self.model.model(token_ids[None], use_cache=False).last_hidden_state[0]
        return states


def save_pair(folder: Path, family: str = "gemma4", *, has_clusters: bool = False, **changes: Any) -> Pair:
    """Write a model and an assistant with random weights.

    Args:
        changes: to the assistant's configuration; those of its text begin with "text_".
    """
    model_type, settings = FAMILIES[family]
    path, draft_path = save(folder / "model", model_type, settings), folder / "assistant"
    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(path, dtype=torch.float32).eval()
    text = {key: settings[key] for key in _SHARED if key in settings} | {
        "vocab_size": SIZES["vocab_size"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": settings["num_attention_heads"],
        "num_hidden_layers": 3,
        "layer_types": [WINDOW, WINDOW, "full_attention"],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": SIZES["max_position_embeddings"],
    }
    text |= {key.removeprefix("text_"): value for key, value in changes.items() if key.startswith("text_")}
    others = {key: value for key, value in changes.items() if not key.startswith("text_")}
    own = {"backbone_hidden_size": SIZES["hidden_size"], "use_ordered_embeddings": has_clusters}
    own |= {"num_centroids": 30, "centroid_intermediate_top_k": 4}
    torch.manual_seed(5)
    built: Any = Gemma4AssistantForCausalLM
    config = Gemma4AssistantConfig(text_config=dict(text, model_type="gemma4_text"), **(own | others))
    assistant = built(config).eval()
    for parameter in assistant.parameters():
        torch.nn.init.normal_(parameter, mean=0.8 * (parameter.dim() < 2), std=0.3)
    if has_clusters:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(SIZES["vocab_size"]))
    assistant.save_pretrained(draft_path)
    return Pair(model, assistant, path, draft_path)
