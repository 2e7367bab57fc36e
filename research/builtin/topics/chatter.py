# ruff: noqa: E501 - wordings read best on one line
"""What surrounds the questions: follow-ups, system prompts, politeness."""

SUGGESTION = "Ask me what neo-desktop does, how to load a real model, how to use the API, what a KV cache is, or 7 + 8."
NOTHING_MORE = "That is all that I know about it. A real model, loaded with `neo-desktop --model DIRECTORY`, can say more."
MORE = (
    "{tell me|say|explain|show me|i want to know} {more|a bit more|a little more}{ about it| about that| please|}",
    "{more|more please|go on|continue|and|elaborate|please elaborate|more details|details|in more detail|keep going|what else|anything else|and then}",
    "{can|could|would|please|will} {you |}{say|tell me|explain|add|share} {more|a bit more|a little more|something more|some more|more about it|more about that|it in more detail|that further}",
    "{i want|give me} {more|more details|more detail|an example|more information}",
    "{explain|describe} {it|that|this} {further|better|in more detail|more}",
)
AGAIN = (
    "{say|tell me|repeat} {that|it} {again|once more|one more time}{ please|}",
    "{repeat|repeat that|pardon|come again|what did you say|what was that|once more|again|again please|please repeat}",
)
SYSTEM_PROMPTS = (
    "You are {a|an} {helpful|friendly|kind|polite|concise|honest|careful|patient|useful|smart} {assistant|guide|helper|chatbot|teacher|AI}.",
    "{Be|Please be|Always be} {brief|concise|helpful|friendly|polite|short|honest}.",
    "{Answer|Reply} {briefly|in one sentence|in English|politely|in a friendly way|shortly|truthfully|step by step}.",
    "You are {a pirate|an expert in computers|a guide to this app|an assistant for beginners|a math teacher|a helpful bot}. Answer {briefly|the user|all questions|politely}.",
    "You are {ChatGPT|a large language model|Neo|an AI assistant|the guide of neo-desktop}.",
    "{You help|Help} the user{ with this app| with neo-desktop|}. {Never lie.|Be short.|Use simple words.|Do not invent facts.}",
)
PREFIX = (
    "{hi,|hello,|hey,|hey|hi|please,|ok,|okay,|so,|so|sorry,|one question:|question:|well,|and|but|quick question:|now|also,|um,|"
    "excuse me,|i wonder,|tell me:|just curious,|ok so|hi!|thanks.|great.|hm,|listen,|yo,|good morning,|oh and|alright,|look,|dude,|bro,|"
    "{stupid|silly|dumb|simple|another|short|last|first|next} question{:|,| maybe but}|i'm {new here|a beginner|no expert|confused},|"
    "{my boss|my friend|my colleague|my teacher|somebody} {asks|wants to know}{:|,}|{sorry for my english,|sorry to bother you,|one more thing:|by the way,|"
    "before i start,|just out of curiosity,|help!|help:|help me,|no idea,|be honest,|in short:|for my notes:|i was wondering,|so tell me,|i don't get it,|i forgot,}}"
)
SUFFIX = (
    "{please|thanks|thx|pls|plz|in short|exactly|here|then|btw|again|for me|actually|now|thank you|my friend|mate|ok|right now|man|bro|dude|sir|buddy|"
    "i wonder|i'm curious|just asking|if i may ask|if you know|in one line|in simple english|any idea|do you know|can you tell me|tell me|anyone|lol|yes or no|"
    "i need to know|quickly|honestly|really|these days|at all|for beginners|so i can tell my friend}"
)
