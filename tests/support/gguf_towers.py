"""Models that read images as two GGUF files, model and mmproj, in the format of llama.cpp's converter."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import gguf_hybrids
import gguf_traced
import torch
import vision_models
from gguf_files import ALPHABET, add, add_tensor
from gguf_mixtures import yarn
from torch import Tensor
from traced_models import YARN
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from vision_models import CASES, TEMPLATE, VisionCase

Changes = dict[str, Any]
VOCAB_SIZE = 304
_CONTROL, _UNUSED = 3, 5  # types of tokens
_TOWER = "model.vision_tower.", "model.visual.", "model.multi_modal_projector.", "model.embed_vision."
_TEXT = "model.language_model."
_ROTATED = "q_proj.weight", "k_proj.weight"


def _changed(family: str, **changes: Changes) -> VisionCase:
    """Return a case with other sizes of its parts."""
    case = CASES[family]
    parts = {part: case.changes[part] | own for part, own in changes.items()}
    return replace(case, changes=case.changes | parts)


_GEMMA_4 = {"max_position_embeddings": 1024}
WRITTEN = {  # widths differ where files of another kind would pass otherwise
    "gemma3": _changed(
        "gemma3", text_config={"query_pre_attn_scalar": 16}, vision_config={"intermediate_size": 48}
    ),
    "qwen3-vl": _changed("qwen3-vl", vision_config={"intermediate_size": 48}),
    "qwen3.5": _changed("qwen3.5", vision_config={"intermediate_size": 48}),
    "mistral3": _changed(
        "mistral3",
        text_config={
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        },
    ),
    "mistral3 of llama": _changed(
        "mistral3",
        text_config={
            "model_type": "mistral",
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma4": _changed("gemma4", text_config=_GEMMA_4, vision_config={"use_clipped_linears": True}),
    "gemma4-e": _changed("gemma4-e", text_config=_GEMMA_4, vision_config={"standardize": True}),
}
for _family in ("gemma4", "gemma4-e"):
    _settings = WRITTEN[_family].settings | {"max_soft_tokens": 280}
    WRITTEN[_family] = replace(WRITTEN[_family], settings=_settings)


def _vocabulary(case: VisionCase) -> Changes:
    """Return the vocabulary of `checkpoints.save_tokenizer` with a chat template."""
    roles = ["<|user|>", "<|assistant|>", "<|system|>"]
    marks = ["<|end|>", "<|begin|>", *roles, *case.tokens]
    padding = ["th", *(f"[PAD{index}]" for index in range(len(ALPHABET) + len(marks) + 1, VOCAB_SIZE))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*ALPHABET, *marks, *padding],
        "tokenizer.ggml.token_type": [1] * len(ALPHABET) + [_CONTROL] * len(marks) + [_UNUSED] * len(padding),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.chat_template": TEMPLATE.replace("IMAGE", case.mark),
    }


def _gemma3(vision: Any, config: Any, _: Any) -> Changes:
    merged = vision.image_size // vision.patch_size // isqrt(config.mm_tokens_per_image)
    return {
        "clip.projector_type": "gemma3",
        "clip.vision.image_size": vision.image_size,
        "clip.vision.projector.scale_factor": merged,
        "clip.vision.attention.layer_norm_epsilon": vision.layer_norm_eps,
        "clip.use_gelu": True,
    }


def _qwen(vision: Any, config: Any, processor: Any) -> Changes:
    levels = getattr(vision, "deepstack_visual_indexes", ())
    return {
        "clip.projector_type": "qwen3vl_merger",
        "clip.vision.image_size": isqrt(vision.num_position_embeddings) * vision.patch_size,
        "clip.vision.spatial_merge_size": vision.spatial_merge_size,
        "clip.vision.attention.layer_norm_epsilon": config.text_config.rms_norm_eps,
        "clip.vision.is_deepstack_layers": [level in levels for level in range(vision.depth)],
        # Small ones, which the converter does not write.
        "clip.vision.image_min_pixels": processor.size["shortest_edge"],
        "clip.vision.image_max_pixels": processor.size["longest_edge"],
        "clip.use_gelu": True,
    }


def _siglip_tensors(name: str, x: Tensor, _: Any) -> Iterator[tuple[str, Tensor]]:
    if ".head." not in name:
        name = name.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        yield name, x + 1 if "soft_emb_norm" in name else x


def _qwen_tensors(name: str, x: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    module, _, end = name.rpartition(".")
    module, _, own = module.rpartition(".")
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", x[:, :, 0]
        yield "v.patch_embd.weight.1", x[:, :, 1]
    elif ".deepstack_merger_list." in name:
        level = config.vision_config.deepstack_visual_indexes[int(module.rpartition(".")[2])]
        yield f"v.deepstack.{level}.{own.replace('linear_', '')}.{end}", x
    elif module == "visual.merger":
        yield f"{ {'norm': 'v.post_ln', 'linear_fc1': 'mm.0', 'linear_fc2': 'mm.2'}[own] }.{end}", x
    else:
        yield name, x


def _pixtral(vision: Any, config: Any, processor: Any) -> Changes:
    return {
        "clip.projector_type": "pixtral",
        "clip.vision.image_size": processor.size["longest_edge"],
        "clip.vision.spatial_merge_size": config.spatial_merge_size,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        f"clip.use_{vision.hidden_act}": True,
    }


def _gemma4(vision: Any, config: Any, _: Any) -> Changes:
    return {
        "clip.vision.projector_type": "gemma4v",
        "clip.vision.image_size": 224,
        "clip.vision.projector.scale_factor": vision.pooling_kernel_size,  # the converter's models have 3
        "clip.vision.attention.layer_norm_epsilon": vision.rms_norm_eps,
    }


def _pixtral_tensors(name: str, x: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    heads = config.vision_config.num_attention_heads
    is_rotated = name.endswith(_ROTATED)
    yield name, gguf_files.permuted(x, len(x) // heads) if is_rotated else x


def _gemma4_tensors(name: str, x: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    name = name.replace("vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    name = name if name.startswith("vision_model") else f"model.{name}"
    name += ".weight" * name.endswith("position_embedding_table")
    if name.endswith("patch_embedder.input_proj.weight"):
        size = config.vision_config.patch_size
        x = x.view(len(x), size, size, 3).permute(0, 3, 1, 2)
    yield name, x[None] if x.dim() == 0 else x


Entries = Callable[[Any, Any, Any], Changes]
Tensors = Callable[[str, Tensor, Any], Iterator[tuple[str, Tensor]]]
_OF: dict[str, tuple[Entries, Tensors]] = {
    "gemma3": (_gemma3, _siglip_tensors),
    "qwen3-vl": (_qwen, _qwen_tensors),
    "qwen3.5": (_qwen, _qwen_tensors),
    "mistral3": (_pixtral, _pixtral_tensors),
    "mistral3 of llama": (_pixtral, _pixtral_tensors),
    "gemma4": (_gemma4, _gemma4_tensors),
    "gemma4-e": (_gemma4, _gemma4_tensors),
}
_SUFFIXES = ".weight", ".bias", ".input_min", ".input_max", ".output_min", ".output_max"


def write_files(
    folder: Path, family: str, type_name: str = "F32", *, is_old: bool = False
) -> tuple[Path, Path]:
    """Write a random model as a folder and as two GGUF files in it; return the files, model and mmproj.

    Args:
        type_name: type of the tower's matrices; the folder gets the dequantised values.
        is_old: the matrices of MLPs have each other's names, as in the first files of Gemma 3.
    """
    vision_models.save(folder, family, case=WRITTEN[family])
    make: Any = AutoModelForImageTextToText
    model = make.from_pretrained(folder, dtype=torch.float32)
    paths = folder / "model.gguf", folder / "mmproj-F16.gguf"
    _write_text(paths[0], family, model)
    write_tower(paths[1], family, model, type_name, is_old=is_old)
    model.save_pretrained(folder)
    return paths


def _write_text(path: Path, family: str, model: Any) -> None:
    case, text = WRITTEN[family], model.config.text_config
    parameters = {
        name.replace(_TEXT, "model."): value
        for name, value in model.state_dict().items()
        if not name.startswith(_TOWER)
    }
    tokens, metadata = _vocabulary(case), Changes()
    if family.startswith("gemma4"):
        gguf_hybrids.write_parameters(path, "gemma4", text, parameters, tokens)
        return
    if family.startswith("mistral3"):
        _write_mistral(path, "llama" if "llama" in family else "mistral3", text, parameters, tokens)
        return
    if family == "gemma3":
        pattern = [kind == "sliding_attention" for kind in text.layer_types]
        entries = gguf_traced.entries_of(family, text) | tokens
        entries["gemma3.attention.sliding_window_pattern"] = pattern
        gguf_traced.write_text(path, family, text, parameters, entries)
        return
    sections = text.rope_parameters["mrope_section"]
    metadata["rope.dimension_sections"] = [*sections, 0]
    if family == "qwen3-vl":
        metadata["n_deepstack_layers"] = len(model.config.vision_config.deepstack_visual_indexes)
        own = {f"qwen3vl.{key}": value for key, value in metadata.items()}
        entries = gguf_files.entries_of(text, "qwen3vl") | own | tokens
        gguf_traced.write_text(path, "qwen3vl", text, parameters, entries)
        return
    gguf_hybrids.write_parameters(path, "qwen35", text, parameters, tokens, metadata=metadata)


def _write_mistral(
    path: Path, architecture: str, text: Any, parameters: dict[str, Tensor], tokens: Changes
) -> None:
    rope, more = text.rope_parameters, Changes()
    if architecture == "mistral3":
        more = yarn({key: rope[key] for key in rope if "mscale" not in key}) | {
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    entries = gguf_files.entries_of(text, architecture) | tokens
    entries |= {f"{architecture}.{key}": value for key, value in more.items()}
    in_order = {
        name: gguf_files.permuted(x, text.head_dim) if name.endswith(_ROTATED) else x
        for name, x in parameters.items()
    }
    gguf_traced.write_text(path, architecture, text, in_order, entries)


def write_tower(
    path: Path,
    family: str,
    model: Any,
    type_name: str = "F32",
    *,
    is_old: bool = False,
    changes: Changes | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> None:
    """Write a model's vision tower, beside a folder of it; see `write_files`.

    Args:
        changes: changed entries, by full name; None leaves an entry out.
        tensors: further tensors.
    """
    entries_of, tensors_of = _OF[family]
    config, vision = model.config, model.config.vision_config
    kinds: Any = AutoImageProcessor
    processor = kinds.from_pretrained(path.parent, backend="pil")
    writer = gguf.GGUFWriter(None, "clip")
    entries = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.vision.projection_dim": config.text_config.hidden_size,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": vision.hidden_size,
        "clip.vision.feed_forward_length": vision.intermediate_size,
        "clip.vision.block_count": vision.num_hidden_layers,
        "clip.vision.attention.head_count": vision.num_attention_heads,
        "clip.vision.image_mean": list(map(float, processor.image_mean)),
        "clip.vision.image_std": list(map(float, processor.image_std)),
    }
    for key, value in (entries | entries_of(vision, config, processor) | (changes or {})).items():
        if value is not None:
            add(writer, key, value)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 3)
    for name, value in model.state_dict().items():
        if not name.startswith(_TOWER):
            continue
        if ".input_m" in name or ".output_m" in name:  # they start without limits
            value.fill_(-1.5 if name.endswith("_min") else 1.5)
        for stored, x in tensors_of(name.removeprefix("model."), value, config):
            known = (
                stored if stored.startswith(("v.", "mm.")) else table.get_name(stored, try_suffixes=_SUFFIXES)
            )
            assert known is not None, stored
            if is_old:
                up, down = (".ffn_up.", ".ffn_down.")[:: 1 if ".ffn_up." in known else -1]
                known = known.replace(up, down)
            is_matrix = x.dim() == 2 and "position_embd" not in known
            add_tensor(writer, known, x, type_name if is_matrix and not x.shape[-1] % 32 else "F32")
            if is_matrix and type_name != "F32" and not x.shape[-1] % 32:
                x.copy_(_stored(writer, known, x, type_name))
    for name, value in (tensors or {}).items():
        add_tensor(writer, name, value, "F32")
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(writer: Any, name: str, x: Tensor, type_name: str) -> Tensor:
    raw = torch.from_numpy(writer.tensors[-1][name].tensor).view(torch.uint8)
    numbers: Tensor = gguf_hybrids.STORED[type_name].dequantised(raw.flatten(1)).view(x.shape)
    return numbers
