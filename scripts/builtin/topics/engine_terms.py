# ruff: noqa: E501 - wordings read best on one line
"""The engine's words: caches, batches, policies and the figures that it reports."""

from .topic import Topic, term

TOPICS = (
    term(
        (
            "KV cache",
            "kv cache",
            "KV-cache",
            "key-value cache",
            "key value cache",
            "kvcache",
            "cache of keys and values",
            "the cache",
        ),
        "The KV cache holds the keys and values of all earlier tokens, so that each new token need not compute them again. "
        "It grows with every token of every chat.",
        "For Llama-2-7B in fp16 it takes half a megabyte per token, so long chats soon need more memory than a small GPU has left.",
        (
            "{why does|what makes} the {kv cache|cache} {grow|get bigger|need so much memory|take memory|fill up}",
            "what is {stored|kept|saved|inside|in} {in |}the {kv cache|cache}",
            "where are {keys and values|the keys and values|k and v} {kept|stored|saved}",
        ),
        2.5,
    ),
    term(
        (
            "paged KV cache",
            "paged attention",
            "PagedAttention",
            "paging",
            "paged cache",
            "a paged kv cache",
            "pages in the cache",
        ),
        "A paged KV cache is cut into small blocks of equal size that are given to requests one by one, so that no memory is "
        "reserved for tokens that may never come.",
        "A block table tells for each request which blocks hold its tokens, in order.",
    ),
    term(
        (
            "block",
            "a KV block",
            "cache block",
            "block table",
            "block size",
            "blocks",
            "kv blocks",
            "the block table",
        ),
        "A block is a small piece of the KV cache that holds a fixed number of tokens. Each request's block table lists its "
        "blocks in order.",
        "Blocks are freed when a request finishes or is cancelled, and then serve another request.",
        ("{who owns|what happens to|when are} {the |}blocks{ freed|}",),
    ),
    term(
        (
            "prefix reuse",
            "prefix caching",
            "prefix cache",
            "shared prefix",
            "reuse of prefixes",
            "prompt caching",
            "prompt cache",
        ),
        "Prefix reuse: when two requests begin with the same text, the KV blocks of that beginning are computed once and shared.",
        "Blocks are found by a hash of their tokens and counted by reference, so that the last user frees them.",
        (
            "{what happens when|what if} {two requests|two chats|many prompts} {start with|share} the same {text|prompt|system prompt|beginning}",
        ),
    ),
    term(
        ("batch", "batch size", "batching", "a batch", "the batch size", "batches", "batched requests"),
        "A batch is the set of requests that the model works on in one step. A larger batch size gives more tokens per second, "
        "because the weights are read once for all of them.",
        "Its limit is memory: each request in the batch needs room for its KV cache. That is why offloading pays.",
        (
            "why {is|are} {a |}{bigger|larger|big} {batch|batches} {faster|better|good}",
            "{how large|how big} {should|can} {the|a|my} batch{ size|} be",
        ),
        2.5,
    ),
    term(
        (
            "continuous batching",
            "dynamic batching",
            "in-flight batching",
            "iteration-level batching",
            "iteration level scheduling",
        ),
        "Continuous batching lets requests join and leave the batch at every step, instead of waiting for the slowest one.",
        "A finished request makes room at once, so short answers never wait for long ones.",
        ("{when can|how does} a {new |}request join{ the batch| a running batch|}",),
    ),
    term(
        ("prefill", "the prefill phase", "prefilling", "prompt processing", "prompt phase"),
        "Prefill is the first phase of a request: the whole prompt is read at once and its KV cache is filled. It is bound by computing speed.",
        "It decides the time to first token. After it comes decode, one token per step.",
        ("{how is|how does the model read} {the |a |my }prompt{ read| processed|}",),
        1.5,
    ),
    term(
        ("decode", "decoding", "the decode phase", "decode step", "token generation", "decode iteration"),
        "Decode is the phase after prefill: the model makes one new token per step for each request. It is bound by memory bandwidth.",
        "Each step reads all weights and the request's whole KV cache, which is why a larger batch pays.",
        (
            "{why|how come} is {decode|decoding|generation} {slow|slower than prefill|memory-bound|memory bound}",
        ),
        1.5,
    ),
    Topic(
        questions=(
            "{what is|what's|explain|tell me} the difference between {prefill and decode|decode and prefill|prefill and decoding|reading the prompt and writing}",
            "{prefill|decode} {vs|versus|or|and|compared to} {prefill|decode|decoding}",
            "{compare|contrast} {prefill and decode|decode and prefill}",
        ),
        answers=(
            "Prefill reads the whole prompt at once and is bound by computing speed; decode makes one token per step and is bound by memory bandwidth.",
        ),
    ),
    term(
        (
            "chunked prefill",
            "prefill chunking",
            "prompt chunks",
            "prefill in chunks",
            "chunked prompts",
            "chunking",
        ),
        "Chunked prefill cuts a long prompt into pieces, so that other requests keep decoding while it is read.",
        "",
        ("{why|how} {are|is} {long prompts|a long prompt|the prompt} {cut|split|chunked}{ into pieces|}",),
    ),
    term(
        ("token", "tokens", "a token", "the word token"),
        "A token is a piece of text, a word or a part of one: models read and write tokens. In English about three quarters of a word.",
        "My own vocabulary has 3,072 tokens; real models have 32,000 to 150,000.",
        (
            "how {long|big} is a token",
            "how many {letters|characters|words} {are in|has|is} a token",
            "is a token {a|one} word",
        ),
        1.5,
    ),
    term(
        (
            "tokenizer",
            "tokeniser",
            "a tokenizer",
            "BPE",
            "byte-pair encoding",
            "byte pair encoding",
            "tokenization",
            "the vocabulary",
            "vocab size",
        ),
        "A tokenizer cuts text into tokens and puts them together again. Byte-pair encoding, BPE, builds its tokens from pieces that often stand together.",
    ),
    term(
        (
            "context length",
            "context window",
            "context",
            "the context size",
            "context len",
            "ctx",
            "maximum context",
            "long context",
        ),
        "The context length is how many tokens a model can look at: the prompt and the answer together. Mine is 2,048 tokens.",
        "A prompt that is longer than the context is refused with a clear error. Long contexts need a large KV cache.",
        (
            "{how long|how large|how big} {is your context|can a chat be|can my prompt be|may a prompt be|can the prompt be}",
            "{what happens if|what if} {my prompt|the prompt|the chat} is {too long|longer than the context}",
            "{what is|what's} the {longest|largest|maximum} {text|prompt|chat|input|message|document} {you can|i can|it can|the model can} {read|handle|take|send|process|write}",
            "how {much text|many tokens} can {you|the model} {read|remember|see|handle}",
        ),
        2,
    ),
    term(
        (
            "offloading",
            "KV offloading",
            "offload",
            "cpu offloading",
            "kv cache offloading",
            "offloading to the cpu",
        ),
        "Offloading keeps part of the KV cache in the computer's main memory and computes its attention on the CPU, next to the "
        "data. So more requests fit than the GPU's memory allows.",
        "Only queries, keys, values and attention outputs would have to cross the bus, not the cache itself.",
        (
            "{why|when} {does|is|should i use} offloading{ help| useful| a good idea| pay|}",
            "{what is|what's|what does it} {offloaded|moved to the cpu|gained by offloading}",
            "{how|in what way} {can|does|could|will} {the cpu|main memory|the processor|ram} {help|assist|support|relieve} {the gpu|a full gpu|when the gpu is full|if the gpu has no room|my small gpu}",
            "how can {main memory|the cpu|ram} help {the|my|a small} gpu",
        ),
        2.5,
    ),
    term(
        (
            "NEO",
            "neo",
            "the NEO paper",
            "the neo technique",
            "neo in neo-desktop",
            "the NEO idea",
            "the name neo",
        ),
        "NEO is the technique behind neo-desktop: part of the KV cache and its decode attention move from the GPU to the CPU, so that "
        "the GPU's batch can grow.",
        "In NEO two sub-batches take turns, so that the CPU's attention hides behind the GPU's work.",
        (
            "{why is it called|where does the name come from|what does the name mean|why the name} {neo-desktop|neo|}",
        ),
        1.5,
    ),
    term(
        (
            "sub-batch",
            "sub-batches",
            "subbatch",
            "sub batch",
            "two sub-batches",
            "asymmetric pipelining",
            "pipelining",
        ),
        "A sub-batch is one of up to two parts of a step's batch. In the NEO technique one runs on the GPU while the CPU computes the attention of the other.",
    ),
    term(
        ("policy", "policies", "--policy", "the policy option", "placement policy", "which policy"),
        "A policy decides where requests live: `gpu-only` keeps all on the device, and `auto`, the default, may place requests in "
        "the CPU-cache when the GPU-cache is full. Both give the same tokens.",
        "",
        (
            "{which|what} {policy|policies} {should i use|is the default|are there|is best|is used|can i choose|exist}",
            "{how do i|how can i} {choose|change|set} {the|a} policy",
        ),
        1.5,
    ),
    term(
        (
            "gpu-only",
            "the gpu-only policy",
            "gpu only",
            "policy gpu-only",
            "--policy gpu-only",
            "gpu-only mode",
        ),
        "With the policy `gpu-only` all requests keep their KV cache on the device, and what does not fit waits. It gives the same tokens as `auto`.",
    ),
    term(
        ("auto policy", "the auto policy", "policy auto", "--policy auto", "the policy auto", "auto mode"),
        "With the policy `auto`, the default, requests may be placed in the CPU-cache when the GPU-cache is full. The tokens are the same as with `gpu-only`.",
    ),
    term(
        (
            "CPU attention",
            "attention on the CPU",
            "cpu attention",
            "paged cpu attention",
            "the native kernel",
            "native kernel",
            "the cpu kernel",
        ),
        "CPU attention means that a native kernel computes decode attention on the CPU, where the KV cache of that request lies. "
        "It uses AVX2 or AVX-512, as the CPU allows.",
        "Its limit is the bandwidth of main memory; `neo-desktop bench --suite cpu-attention` shows how close it comes.",
    ),
    term(
        ("GPU-cache", "gpu cache", "the gpu-cache", "gpu_cache_tokens", "device pool", "the device cache"),
        "The GPU-cache is the part of the KV cache in the GPU's own memory: fast, but small. Attention for it is computed on the GPU.",
        "",
        ("{how large|how big} is the gpu-cache",),
    ),
    term(
        ("CPU-cache", "cpu cache for kv", "the cpu-cache", "cpu_cache_tokens", "host pool", "the host cache"),
        "The CPU-cache is the part of the KV cache in the computer's main memory: large, and its attention is computed on the CPU.",
        "",
        ("{how large|how big} is the cpu-cache",),
    ),
    Topic(
        questions=(
            "{what is|what's|explain} the difference between {the |}{gpu-cache and cpu-cache|cpu-cache and gpu-cache|gpu cache and cpu cache|gpu-cache and the cpu-cache}",
            "{gpu-cache|gpu cache} {vs|versus|or|and} {cpu-cache|cpu cache}",
            "{what are|why are there|name} the two {caches|pools|kv pools|places of the kv cache}",
        ),
        answers=(
            "The GPU-cache lies in the GPU's memory, fast but small; the CPU-cache lies in main memory, large, with attention computed on the CPU.",
        ),
    ),
    term(
        ("preemption", "preempted", "preempt", "a preempted request", "pre-emption", "preempting"),
        "Preemption: when memory runs out, a request is set aside, its blocks are freed, and it continues later. It is never lost.",
    ),
    term(
        ("scheduler", "the scheduler", "scheduling", "the engine's scheduler"),
        "The scheduler decides at every step which requests run, how much of their prompts is read, and where their KV cache lives.",
    ),
    term(
        (
            "TTFT",
            "ttft",
            "time to first token",
            "time-to-first-token",
            "first token time",
            "first token latency",
        ),
        "TTFT, time to first token, is how long you wait from sending a message until the first token of the answer appears.",
        "It is mostly the time of prefill, plus any waiting in the queue.",
        (
            "how long {does it take|do i wait} {until|for|before} the {first token|answer starts|answer begins}",
            "why {is the|does the} {first token|ttft} {slow|late|take so long|high}",
        ),
        1.5,
    ),
    term(
        (
            "TPOT",
            "tpot",
            "time per output token",
            "time-per-output-token",
            "ITL",
            "inter-token latency",
            "time between tokens",
        ),
        "TPOT, time per output token, is the average time between two tokens of an answer once it has begun.",
        "A TPOT of 50 ms is 20 tokens per second.",
        weight=1.5,
    ),
    term(
        (
            "tokens per second",
            "tok/s",
            "token/s",
            "tps",
            "tokens/s",
            "tokens a second",
            "the token rate",
            "t/s",
        ),
        "Tokens per second tells how fast an answer is written. You read about 5 to 10 tokens per second.",
        "",
        ("how {fast|quickly} {are the|do the} {tokens|answers} {come|made|generated}",),
        1.5,
    ),
    term(
        ("throughput", "total throughput", "the throughput", "engine throughput"),
        "Throughput is how many tokens per second the engine makes for all requests together. A larger batch raises it.",
        "Latency is the other side: how long a single user waits.",
    ),
    term(
        ("latency", "response time", "the latency", "delay"),
        "Latency is how long one user waits: for the first token, TTFT, and for each token after it, TPOT.",
    ),
    Topic(
        questions=(
            "{what is|what's|explain} the difference between {latency and throughput|throughput and latency}",
            "{latency|throughput} {vs|versus|or|and|compared to} {latency|throughput}",
        ),
        answers=(
            "Latency is how long one user waits; throughput is how many tokens per second all users get together.",
        ),
    ),
    term(
        ("memory bandwidth", "bandwidth", "memory bound", "memory-bound", "the bandwidth of memory", "gb/s"),
        "Memory bandwidth is how many gigabytes per second can be read. Decode reads all weights for each step, so bandwidth limits its speed.",
        "A GPU reads hundreds of gigabytes per second, a desktop CPU some tens.",
    ),
    term(
        (
            "quantisation",
            "quantization",
            "4-bit",
            "int8",
            "int4",
            "quantised models",
            "quantized models",
            "8 bit weights",
            "q4",
        ),
        "Quantisation stores weights with fewer bits, which saves memory but loses some accuracy. neo-desktop runs models at full accuracy, without it.",
        "",
        (
            "{do i need|must i|should i|can i|does it|do you} {to |}{quantise|quantize|use quantisation|use quantization|support quantization} {my model|models|a model|the model|}",
            "{does|will} {it|the model} lose {accuracy|quality}",
            "what does full accuracy mean",
        ),
        1.5,
    ),
    term(
        (
            "dtype",
            "the dtype",
            "data type",
            "fp16",
            "bf16",
            "fp32",
            "float16",
            "bfloat16",
            "float32",
            "half precision",
            "precision",
            "--dtype",
        ),
        "The dtype is the number format of weights: fp32 takes 4 bytes, fp16 and bf16 take 2. bf16 has fp32's range with fewer digits.",
        "Older GPUs such as the T4 have no bf16: there fp16 is used.",
        (
            "{what is|what's|explain} the difference between {fp16 and bf16|bf16 and fp16|fp16 and fp32|fp32 and bf16}",
            "{fp16|bf16|fp32} {vs|versus|or} {bf16|fp16|fp32}",
            "{which|what} dtype {should i use|is used|is best|do you use}",
        ),
        1.5,
    ),
)
