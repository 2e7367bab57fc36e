# ruff: noqa: E501 - wordings read best on one line
"""Words about models and machines, and what the guide is made of."""

from .topic import Topic, term

SIZE = "I have about 5.5 million parameters in 6 layers."

TOPICS = (
    term(
        (
            "attention",
            "self-attention",
            "self attention",
            "the attention mechanism",
            "attention heads",
            "multi-head attention",
        ),
        "Attention lets each token look back at earlier tokens: its query is compared with their keys, and their values are mixed accordingly.",
        "Keys and values of earlier tokens come from the KV cache.",
        weight=1.5,
    ),
    term(
        (
            "GQA",
            "grouped-query attention",
            "grouped query attention",
            "gqa",
            "MQA",
            "multi-query attention",
            "kv heads",
        ),
        "GQA, grouped-query attention, lets several query heads share one key-value head, so that the KV cache is smaller. I use it too: 4 query heads share 2 KV heads.",
    ),
    term(
        ("head", "attention head", "head_dim", "head dimension", "a head in attention"),
        "A head is one of several parallel attention computations in a layer; head_dim is the length of its vectors, 64 in my case.",
    ),
    term(
        ("layer", "layers", "a transformer layer", "model layers", "a layer", "transformer block"),
        "A layer is one stage of a model: attention followed by a small feed-forward network. I have 6; Llama-2-7B has 32.",
    ),
    term(
        (
            "parameters",
            "parameter",
            "weights",
            "model weights",
            "a parameter",
            "the weights",
            "model parameters",
        ),
        "Parameters, or weights, are the numbers that a model learned. A 7B model has 7 billion of them; I have about 5.5 million.",
        weight=1.5,
    ),
    Topic(
        questions=(
            "{how big|how large|how small|how tiny} are you{ really| exactly|}",
            "how many {parameters|weights|layers|neurons} {do you have|have you got|have you|are in you|does this model have|does the built-in model have|do you consist of}",
            "{are you|is this} {a |}{big|large|small|tiny|little|huge} {model|language model|llm|one|}",
            "{how many|number of|count of} {parameters|layers|weights|heads} {do you have|you have|inside you|in you|of yours|are inside|has the guide|has this model}",
            "{your|what is your|what's your} {size|model size|parameter count|architecture|number of layers}",
            "{what are you made of|describe your architecture|what architecture are you|which architecture do you have|how are you built|what's inside you}",
            "{tell me about|describe|info about|facts about} {your model|the built-in model|your size|your layers|your weights|the builtin model}",
            "how much {memory|space|disk} do you {need|take|use}",
        ),
        names=("the built-in model", "the builtin model", "built-in guide"),
        answers=(
            f"{SIZE} I am a Llama-style model with a context of 2,048 tokens, and my fp16 weights take about 11 MB.",
        ),
        more="4 query heads share 2 key-value heads, the hidden size is 256 and the vocabulary has 3,072 tokens.",
        weight=2,
    ),
    Topic(
        questions=(
            "how were you {trained|made|built|created|taught|developed}",
            "{where|how|what} did you learn{ this| english| that| from| all this|}",
            "{what|which} {data|texts|text|corpus} {were you trained on|did you learn from|do you know|was used to train you}",
            "{where|how} did you {get|acquire|gain|obtain} {your|this|all this|that} {knowledge|information|data|facts|wisdom}",
            "{how do you|why do you|how come you} know {all this|these things|that|so much about neo-desktop|this}",
            "{your training|your training data|how long did your training take|who trained you|how did they train you|how long were you trained}",
        ),
        answers=(
            "I was trained from scratch in less than an hour on two CPU cores, on a text that the project's own scripts write.",
        ),
    ),
    Topic(
        questions=(
            "{why are you|why is this model|why are your answers} so {small|tiny|simple|short|limited|little}",
            "{what are|tell me} your {limits|limitations|weaknesses}",
            "{should|can|may|must} i {believe|trust|take for granted} {everything|all|anything} {you say|you tell me|you write|that you answer}",
            "{how good|how reliable|how accurate|how trustworthy} are {you|your answers|your replies}",
            "{can i|should i} {trust|believe|rely on} {you|your answers|what you say}",
            "{are you|is that|are your answers} {sure|certain|correct|reliable|right|always right|accurate|true}",
            "{do you|can you} {make mistakes|get things wrong|hallucinate|lie|err}",
            "{what can't you do|what can you not do|what don't you know|what are you bad at}",
        ),
        answers=(
            "I am tiny, so that the first start needs no download: I know this app and small sums, and I may be wrong. For more, start `neo-desktop --model DIRECTORY`.",
        ),
        weight=1.5,
    ),
    term(
        (
            "LLM",
            "large language model",
            "language model",
            "llms",
            "a language model",
            "an llm",
            "large language models",
            "AI model",
        ),
        "A large language model predicts the next token of a text again and again. Trained on very much text, it can answer questions.",
        weight=1.5,
    ),
    term(
        (
            "AI",
            "artificial intelligence",
            "machine learning",
            "a neural network",
            "neural network",
            "neural networks",
            "deep learning",
        ),
        "A neural network is a chain of simple computations whose numbers were learned from examples. Language models are large ones; I am a tiny one.",
    ),
    term(
        ("transformer", "the transformer architecture", "transformers", "a transformer model"),
        "A transformer is the kind of neural network behind language models: a stack of layers, each with attention and a feed-forward part.",
    ),
    term(
        ("embedding", "embeddings", "an embedding", "the embedding matrix", "tied embeddings"),
        "An embedding is the vector of numbers that stands for a token inside the model.",
    ),
    term(
        (
            "RoPE",
            "rope",
            "rotary position embedding",
            "rope scaling",
            "rotary embeddings",
            "positional encoding",
        ),
        "RoPE turns queries and keys by an angle that depends on the position, so that attention knows how far apart two tokens are.",
    ),
    term(
        ("softmax", "the softmax", "softmax function"),
        "Softmax turns scores into probabilities that add up to 1. Attention uses it, and so does the choice of the next token.",
    ),
    term(
        ("inference", "model inference", "running a model", "llm inference"),
        "Inference is running a trained model to get answers; training is how it learned. neo-desktop does inference only.",
    ),
    term(
        ("prompt", "a prompt", "the prompt", "prompts", "prompting"),
        "A prompt is the text that you give to a model: your message, with the earlier chat and the system prompt before it.",
    ),
    term(
        ("chat template", "chat_template", "the chat template", "prompt template"),
        "A chat template turns a chat into the exact text that a model was trained on, with its special tokens. It comes with the checkpoint.",
    ),
    term(
        ("GPU", "gpu", "graphics card", "a GPU", "video card", "the gpu"),
        "A GPU is a processor with very fast memory of its own, good at doing many computations at once. Its memory is often too small for large models.",
        weight=1.5,
    ),
    term(
        ("CPU", "cpu", "processor", "the cpu", "a CPU"),
        "The CPU is the computer's main processor. Beside it lies the large main memory, and neo-desktop can compute attention there.",
        weight=1.5,
    ),
    term(
        ("RAM", "main memory", "host memory", "the computer's memory", "system memory"),
        "RAM, or main memory, is the computer's large working memory next to the CPU. neo-desktop's CPU-cache lives there.",
    ),
    term(
        ("VRAM", "vram", "GPU memory", "video memory", "graphics memory", "gpu ram"),
        "VRAM is the GPU's own memory: fast but small. It must hold the model's weights and the GPU-cache.",
    ),
    term(
        ("PCIe", "pcie", "the bus", "PCI Express", "pci bus"),
        "PCIe is the bus between CPU and GPU. It is far slower than the GPU's memory, so it is better to move little data over it.",
    ),
    term(
        ("CUDA", "cuda", "the nvidia driver", "cuda driver"),
        "CUDA is NVIDIA's platform for computing on its GPUs; neo-desktop uses it through PyTorch. The README tells how to choose a build for an older driver.",
    ),
    term(
        ("PyTorch", "torch", "pytorch"),
        "PyTorch is the library for tensors that neo-desktop uses for the linear layers of a model.",
    ),
    term(
        ("AVX-512", "avx2", "avx", "AVX512", "simd", "vector instructions"),
        "AVX2 and AVX-512 are CPU instructions that compute many numbers at once. The native attention kernel picks the best that your CPU has.",
    ),
    term(
        ("llama", "Llama 3", "llama 2", "mistral", "qwen", "Qwen3", "qwen2.5", "the llama family"),
        "Llama, Mistral and Qwen are families of open language models. neo-desktop runs Llama 2 and 3, Mistral, Qwen2.5 and Qwen3.",
    ),
    term(
        ("speculative decoding", "draft model", "speculation", "mixture of experts", "MoE", "beam search"),
        "That is a technique which neo-desktop does not use: it decodes one token per step and request, with dense models.",
    ),
)
