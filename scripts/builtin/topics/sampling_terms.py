# ruff: noqa: E501 - wordings read best on one line
"""The settings of an answer: temperature, top-p, seed, system prompt, and how the answer arrives."""

from .topic import term

TOPICS = (
    term(
        ("temperature", "the temperature setting", "temp", "sampling temperature", "temperature 0"),
        "Temperature sets how adventurous the choice of tokens is: 0 always takes the likeliest token, higher values vary more.",
        "Use 0 for facts and code, about 0.7 for free text.",
        (
            "{which|what} temperature {should i use|is good|is best|to use}",
            "{how do i|how to} get {the same|more varied|less random|more creative} answers",
        ),
        1.5,
    ),
    term(
        ("top-p", "top p", "top_p", "nucleus sampling", "min-p", "min_p"),
        "Top-p keeps only the likeliest tokens whose probabilities add up to p, and samples among them. 1 keeps all.",
    ),
    term(
        ("top-k", "top k", "top_k", "topk"),
        "Top-k keeps only the k likeliest tokens and samples among them.",
    ),
    term(
        (
            "sampling",
            "sampling settings",
            "greedy decoding",
            "greedy",
            "greedy sampling",
            "sampling parameters",
        ),
        "Sampling is the choice of the next token from the model's probabilities: greedy takes the likeliest; temperature, top-p and top-k allow variety.",
    ),
    term(
        ("repetition penalty", "presence penalty", "frequency penalty", "penalties", "repetition_penalty"),
        "These penalties make tokens that were already used less likely, so that an answer repeats itself less.",
        "",
        ("{how do i|how to} stop {the model|it} {repeating|from repeating}{ itself|}",),
    ),
    term(
        ("seed", "the seed", "random seed", "sampling seed"),
        "The seed starts the random choice of tokens: the same seed and settings give the same answer again.",
        "",
        ("{how do i|how can i} {reproduce|repeat exactly|get again} {an answer|the same answer|a result}",),
    ),
    term(
        ("system prompt", "the system prompt", "system message", "a system message", "system instructions"),
        "The system prompt is an instruction before the chat that tells the model how to behave. Set it in the settings of the page. I am too small to follow one well.",
        "",
        ("{where|how} do i {set|change|write} {the|a} system {prompt|message}",),
    ),
    term(
        (
            "stop string",
            "stop sequence",
            "stop strings",
            "stop token",
            "stop words",
            "the stop parameter",
            "stop sequences",
        ),
        "A stop string ends the answer as soon as the model writes it.",
    ),
    term(
        (
            "max tokens",
            "max_tokens",
            "maximum tokens",
            "the max tokens setting",
            "maximum answer length",
            "answer length",
        ),
        "max_tokens is the largest number of tokens that an answer may have; then it ends, even in mid-sentence.",
        "",
        (
            "{why|how come} {is my|was the|does the} answer {cut off|end|stop|cut} {in the middle|early|suddenly|}",
            "how do i get {longer|shorter} answers",
        ),
    ),
    term(
        ("logprobs", "log probabilities", "logits", "a logit"),
        "Logits are the model's raw scores for every possible next token; log probabilities are the same after softmax, as logarithms.",
    ),
    term(
        ("streaming", "token streaming", "stream", "server-sent events", "SSE", "streamed answers"),
        "Streaming sends each token as soon as it is made, so that you can read along. In the API set stream to true.",
    ),
)
