"""Which architectures of transformers run by their own code, cut into stages: a small random model of each.

    python -m scripts.traced_architectures                    all that have no decoder here
    python -m scripts.traced_architectures phi olmo bloom     some, by the model_type of config.json

Each is tried in a process of its own with a time limit. Its greedy tokens are compared with those of
transformers (float32, eager attention, no KV cache). It runs with the same tokens, is refused with a
sentence, cannot be made small by the sizes below, or something is wrong: other tokens, or an error that is
no sentence.
"""

import argparse
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

VOCAB, LAYERS = 300, 4
NEW_TOKENS, PROMPTS = 12, (1, 7, 40)
MOST_PARAMETERS = 10_000_000
SIZES = {
    "hidden_size d_model n_embd n_embed word_embed_proj_dim input_hidden_size embedding_size": 64,
    "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim n_inner dim_ff": 128,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers": LAYERS,
    "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim dim_head kv_channels": 16,
    "vocab_size vocab_size_per_layer_input": VOCAB,
    "max_position_embeddings n_positions max_seq_len n_ctx": 256,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok moe_topk moe_k": 2,
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size": 64,
    "q_lora_rank kv_lora_rank": 32,
    "qk_nope_head_dim qk_rope_head_dim v_head_dim": 16,
    "n_group topk_group": 1,
    "sliding_window attention_window_size": 9,
    "mamba_d_ssm": 64,
    "mamba_n_heads mamba_d_head": 8,
    "rotary_dim": 8,
}
COMPUTED = ("head_dim", "num_key_value_heads")  # sizes that may be None
ALWAYS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _is_derived(config: Any, name: str) -> bool:
    """Return whether a size follows from others."""
    if name == "head_dim" and hasattr(config, "qk_rope_head_dim"):
        return True
    found = getattr(type(config), name, None)
    return isinstance(found, property) and found.fset is None


def small(model_type: str) -> Any:
    """Return a small configuration of a type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - large

    usual = CONFIG_MAPPING[model_type]()
    sizes = {
        name: size
        for names, size in SIZES.items()
        for name in names.split()
        if (getattr(usual, name, None) is not None or (name in COMPUTED and hasattr(usual, name)))
        and not _is_derived(usual, name)
    }
    if hasattr(usual, "qk_rope_head_dim"):  # keys and values of a latent: each head has its own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if hasattr(usual, "is_decoder"):
        sizes["is_decoder"] = True
    config = CONFIG_MAPPING[model_type](**sizes, **ALWAYS)
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds) <= {"sliding_attention", "full_attention"} and sizes.get("sliding_window"):
        config.layer_types = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return config


def save(folder: Path, model_type: str) -> None:
    """Write a checkpoint with random weights, of which each counts."""
    import torch  # noqa: PLC0415 - large
    from tokenizers import Tokenizer, models  # noqa: PLC0415 - likewise
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - likewise

    config, make = small(model_type), AutoModelForCausalLM
    with torch.device("meta"):
        outline = make.from_config(config)
    if sum(parameter.numel() for parameter in outline.parameters()) > MOST_PARAMETERS:
        raise ValueError("it has sizes of other names")
    torch.manual_seed(0)
    model = make.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        wide = parameter.dim() > 1
        mean = 0.0 if wide or name.endswith("bias") else 0.8
        torch.nn.init.normal_(parameter, mean=mean, std=0.2 if wide else 0.1)
    model.eval().save_pretrained(folder)
    Tokenizer(models.BPE(vocab={f"<{n}>": n for n in range(VOCAB)}, merges=[])).save(
        str(folder / "tokenizer.json")
    )


def greedy(folder: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return what transformers chooses, and the logarithm of each one's probability."""
    import torch  # noqa: PLC0415 - large
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - likewise

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens, logprobs = list(prompt), []
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            scores = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.log_softmax(-1)[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


def compared(outputs: list[Any], wanted: list[tuple[list[int], list[float]]]) -> tuple[str, str]:
    """Return "runs" or "wrong" for completions beside what `greedy` gave, and what there is to say."""
    for output, (tokens, logprobs) in zip(outputs, wanted, strict=True):
        if list(output.token_ids) != tokens:
            return "wrong", f"{list(output.token_ids)} instead of {tokens}"
        found = [token.logprob.logprob for token in output.tokens if token.logprob is not None]
        off = max(abs(a - b) for a, b in zip(found, logprobs, strict=True))
        if not off < 1e-3:
            return "wrong", f"logarithms of probabilities differ by {off:.4f}"
    return "runs", f"{len({token for tokens, _ in wanted for token in tokens})} different tokens"


def tried(folder: Path, model_type: str) -> tuple[str, str]:
    """Return how a type does ("runs", "refused", "not made", "wrong"), and what there is to say."""
    import torch  # noqa: PLC0415 - large

    from neo_desktop.engine.engine import Engine  # noqa: PLC0415 - likewise
    from neo_desktop.engine.predict.cost_model import ZeroCostModel  # noqa: PLC0415 - likewise
    from neo_desktop.engine.sampling_params import SamplingParams  # noqa: PLC0415 - likewise
    from neo_desktop.models.json_file import ModelError  # noqa: PLC0415 - likewise
    from neo_desktop.models.traced.config import read_traced  # noqa: PLC0415 - likewise

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in PROMPTS]
    try:
        save(folder, model_type)
        read_traced(folder)
        wanted = [greedy(folder, prompt) for prompt in prompts]
    except ModelError as error:
        return "refused", str(error).replace(str(folder), "")
    except Exception as error:  # of whatever kind: it is other people's code
        return "not made", f"{type(error).__name__}: {error}"
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    try:
        with Engine.from_pretrained(
            folder,
            cost_model=ZeroCostModel(),
            device="cpu",
            dtype="float32",
            policy="gpu-only",
            gpu_cache_tokens=512,
            cpu_cache_tokens=512,
            max_batch_requests=8,
            max_batch_tokens=32,
        ) as engine:
            outputs = engine.generate(prompts, params)
    except ModelError as error:
        return "refused", str(error).replace(str(folder), "")
    except Exception:  # likewise
        return "wrong", traceback.format_exc()
    return compared(outputs, wanted)


def _child(model_type: str, results: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    with TemporaryDirectory() as folder:
        results.send(tried(Path(folder), model_type))


def within(model_type: str, seconds: float) -> tuple[str, str]:
    """Try a type in a process of its own; see `tried`."""
    context = get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(model_type, theirs))
    child.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            found: tuple[str, str] = ours.recv()
            return found
        return "wrong", f"not done within {seconds:.0f} s"
    except EOFError:
        child.join()
        return "wrong", f"its process ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()


def main() -> None:
    """Try all, print a line for each as it ends, and then the groups."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("types", nargs="*", help="of config.json; default: all without a decoder of ours")
    parser.add_argument("--seconds", type=float, default=240.0, help="for each")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    get_context("forkserver").set_forkserver_preload(
        ["transformers", "neo_desktop.engine.engine", "torch.export", "torch._dynamo"]
    )
    import transformers  # noqa: PLC0415 - large
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    from neo_desktop.models.families import FAMILIES  # noqa: PLC0415 - large

    written = {family.model_type for family in FAMILIES}
    types = args.types or sorted(
        model_type
        for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if model_type not in written and name.endswith(("ForCausalLM", "LMHeadModel"))
    )
    groups: dict[str, list[str]] = {}
    with TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as threads:
        os.environ["NEO_DESKTOP_CACHE"] = cache
        for model_type, (group, said) in zip(
            types, threads.map(lambda each: within(each, args.seconds), types), strict=True
        ):
            groups.setdefault(group, []).append(model_type)
            print(f"{model_type}: {group}: {said}", flush=True)
    print(f"\ntransformers {transformers.__version__}")
    for group, names in groups.items():
        print(f"{group} ({len(names)}): {', '.join(names)}")
    sys.exit("wrong" in groups)


if __name__ == "__main__":
    main()
