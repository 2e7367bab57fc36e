# ruff: noqa: E501 - wordings read best on one line
"""Other words for the same thing, in any question: what the guide must learn to look through."""

import re
from random import Random

from .patterns import expand

HOW_TO = re.compile(
    r"^(how do i|how can i|how to|how would i|how does one|how should i|can i|where do i)\b (?!i\b)"
)
HOW_TO_FRAMES = (
    "{what do i have to do to|what must i do to|what do i need to do to|what should i do to|what does it take to}",
    "{tell me how to|show me how to|explain how to|teach me to|teach me how to|can you tell me how to|could you show me how to}",
    "{what's|what is|which is} {the|the best|the right|the easiest|a good|the correct} way to",
    "{is there a way to|is it possible to|is there any way to|any way to|any chance to|any idea how to|do you know how to}",
    "{i want to|i need to|i would like to|i'd like to|i have to|i am trying to|i'm trying to|let me|help me|help me to|i wish to}",
    "{steps to|instructions to|guide to|a way to|the way to|how could i|how might i|how am i supposed to|how does someone|in what way can i|how do you|how do we|how can one}",
)
WORDS = {
    "show": "{display|print|list|tell me|give}",
    "change": "{alter|modify|adjust|set|switch}",
    "start": "{launch|begin|open|fire up|kick off|bring up|boot}",
    "stop": "{end|halt|quit|finish|terminate|interrupt}",
    "use": "{work with|employ|utilise|utilize|try|make use of}",
    "run": "{execute|operate|start|launch|use}",
    "load": "{open|bring in|import|read in|load up|put in}",
    "choose": "{pick|select|decide on}",
    "measure": "{test|gauge|find out|determine}",
    "computer": "{machine|pc|laptop|box|desktop|workstation|notebook|system}",
    "machine": "{computer|pc|box|laptop|system|hardware}",
    "app": "{program|application|software|tool|thing|product|package}",
    "program": "{app|application|software|tool|product}",
    "gpu": "{graphics card|video card|nvidia card|gpu|card}",
    "graphics card": "{gpu|video card|nvidia card|geforce}",
    "model": "{llm|language model|ai model|model|network}",
    "models": "{llms|language models|ai models|networks}",
    "checkpoint": "{set of weights|model folder|model directory|download}",
    "answer": "{reply|response|output|message|text}",
    "answers": "{replies|responses|outputs|texts}",
    "reply": "{answer|response}",
    "message": "{text|post|line|prompt}",
    "question": "{query|thing i asked|prompt}",
    "people": "{users|persons|folks|friends|colleagues|guys}",
    "users": "{people|persons|clients|folks}",
    "at once": "{simultaneously|at the same time|in parallel|concurrently|together}",
    "at the same time": "{simultaneously|at once|in parallel|together}",
    "slow": "{sluggish|so slow|laggy|not fast|slowly}",
    "fast": "{quick|speedy|rapid|quickly}",
    "faster": "{quicker|speedier|more quickly}",
    "speed": "{rate|pace|performance}",
    "big": "{large|huge|long|high|great}",
    "small": "{tiny|little|limited|short|low}",
    "long": "{large|big|lengthy}",
    "need": "{require|have to have|must have|want}",
    "needed": "{required|necessary|mandatory|a must|essential}",
    "full": "{exhausted|used up|filled|all taken|at its limit}",
    "free": "{gratis|free of cost|without charge}",
    "private": "{confidential|secret|safe|protected}",
    "send": "{upload|transmit|give|pass|leak}",
    "data": "{information|text|words|stuff}",
    "made": "{built|created|developed|programmed|coded}",
    "created": "{made|built|developed|designed}",
    "internet": "{web|net|network|online world}",
    "picture": "{image|photo|screenshot|drawing|jpg}",
    "pictures": "{images|photos|screenshots|graphics}",
    "files": "{documents|pdfs|attachments|spreadsheets}",
    "a file": "{a document|a pdf|an attachment|this pdf|my document}",
    "tell me": "{let me know|say|inform me|i want to hear|please tell me|share}",
    "explain": "{clarify|describe|tell me about|shed light on|define|elaborate on|spell out}",
    "mean": "{signify|stand for|say|imply}",
    "why": "{how come|for what reason|why exactly|why on earth}",
    "better": "{smarter|stronger|superior|cleverer|brighter}",
    "get": "{obtain|receive|have|find}",
    "want": "{would like|wish|desire}",
    "difference": "{distinction|contrast|gap}",
    "install": "{set up|deploy|put|get}",
    "error": "{failure|problem|fault|crash|bug}",
    "wrong": "{incorrect|mistaken|false|not right}",
    "work": "{function|operate|run|do}",
    "support": "{handle|accept|understand|work with|take|know}",
    "supported": "{accepted|handled|allowed|compatible|working|known}",
    "is busy": "{is taken|is in use already|is occupied|is used by something else}",
    "joke": "{gag|funny story|witty line}",
    "talk": "{speak|chat|converse}",
    "learn": "{find out|study|get to know}",
    "remember": "{recall|keep in mind|memorise|know}",
    "trust": "{believe|rely on|depend on|count on}",
    "great": "{excellent|wonderful|brilliant|lovely|fantastic}",
    "write": "{compose|draft|type|produce|make up}",
    "important": "{relevant|a big deal|essential|crucial|so significant}",
    "which": "{what|which kind of|which of the}",
    "maximum": "{largest|longest|highest|greatest}",
    "option": "{flag|switch|argument|parameter|setting}",
    "command": "{instruction|subcommand|line|thing to type}",
    "hardware": "{machine|gpu and cpu|equipment|components}",
    "exactly": "{precisely|really|actually|technically|basically}",
    "buy": "{purchase|get|order}",
    "good": "{fine|decent|nice|suitable|ok|good enough}",
    "bad": "{poor|terrible|awful|horrible}",
    "someone": "{somebody|anyone|another person|more than one person}",
    "kind of": "{sort of|type of}",
    "today": "{this day|right now|at the moment}",
    "can you": "{could you|would you|are you able to|will you|please|can you please}",
    "does it": "{does this|will it|does neo-desktop|does this app|would it}",
    "is it": "{is this|is neo-desktop|would it be|is the thing}",
    "what happens": "{what goes on|what does it do|what will happen|what takes place}",
}
_KNOWN = re.compile(r"\b(" + "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True)) + r")\b")


def reworded(rng: Random, text: str) -> str:
    """Return the question in other words: frames and synonyms."""
    if (match := HOW_TO.match(text)) is not None and rng.random() < 0.35:
        text = f"{expand(rng, rng.choice(HOW_TO_FRAMES))} {text[match.end() :]}"
    return _KNOWN.sub(lambda found: expand(rng, WORDS[found[0]]) if rng.random() < 0.3 else found[0], text)
