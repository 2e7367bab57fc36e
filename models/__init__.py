"""Model architectures, checkpoints and tokenizers. No model sees the KV cache."""
