# ruff: noqa: E501 - wordings read best on one line
"""What the guide can talk about: one Topic per thing that has one correct answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """One thing to ask and its answer.

    `questions` and `names` are patterns: `{a|b|}` stands for one of its alternatives. A topic with
    `names` ("KV cache", "kv cache") is also asked for in every wording of `DEFINITION_PATTERNS`.
    `answers` are equally good; `more` is the reply to "tell me more" right after one of them.
    """

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    names: tuple[str, ...] = ()
    more: str = ""
    weight: float = 1.0


def term(
    names: tuple[str, ...], answer: str, more: str = "", questions: tuple[str, ...] = (), weight: float = 1.0
) -> Topic:
    """Return a topic that is mostly asked for by name."""
    return Topic(questions=questions, answers=(answer,), names=names, more=more, weight=weight)


DEFINITION_PATTERNS = (
    "{what is|what's|whats|what are|wat is} {a |an |the |}@",
    "{what is|what's|whats|what are} {a |the |}@ {exactly|here|about|in neo-desktop|in this app|in an llm|for|good for}",
    "{what exactly is|what on earth is|so what is|remind me what is|and what is} {a |the |}@",
    "@",
    "@ {explained|meaning|definition|please|info|in short|in simple words|in plain english}",
    "{explain|define|describe|clarify} {to me |}{the term |the idea of |what is |}@",
    "{explain|describe} @ {to me|briefly|in one sentence|simply|like i'm five|in simple terms|to a beginner}",
    "{can|could|would} you {please |}{explain|define|describe} {what |}@ {is|means|to me|for me|}",
    "{what does|what do} @ {mean|do|stand for|refer to}",
    "{what is meant by|what do you mean by|meaning of|the meaning of|definition of|eli5|eli5:} @",
    "{tell me|tell me something|talk to me|teach me|i want to know|i'd like to learn} about @",
    "{i don't|i do not|i dont} {understand|get|know} {what |}@ {is|means|}",
    "{how does|how do} {the |}@ work",
    "{why does|why do} @ matter",
    "{why is|why are} {the |}@ {important|interesting|needed|useful|there}",
    "{do you know|can you tell me|could you tell me|please tell me} what {a |the |}@ {is|means|does}",
    "{i keep reading|i keep hearing|i read|someone talked|people talk} about @, what is {that|it}",
    "{i see|i saw|there is} @ {on the page|in the docs|in the readme|in the settings}, what {is it|does it mean}",
    "{help me understand|give me a definition of|what should i know about|in a nutshell, what is} @",
    "{what about|and|how about|and what about} @",
    "@{, | - |: }{please explain|what is it|what does that mean|can you explain|tell me more|what's this|what is this about}",
    "{what can you tell me about|i've never heard of|give me {a short|a quick|a simple} {explanation|definition|summary} of} @",
    "{i wonder|i'd like to know|i want to know|i am curious} what {the |a |}@ {is|means|does}",
    "{how would you {explain|describe} @|in what way {does|do} @ help|what role does @ play|what's up with {the |}@|who needs @}",
    "{what would you say|can you say what|do you understand what|could someone tell me what} {a |the |}@ {is|means}",
    "{what happens|what is done|what goes on} {in|with|during} {the |a |}@",
    "what is the {point|purpose|use|role|idea} of {a |the |}@",
    "@{.|,| -|:|} {meaning|definition|explanation|description}{ pls| plz| please| wanted|}",
    "@{,|} {huh|eh|hm|what|and that is|say what|in other words}",
    "{i would like|i'd like|may i have|can i get|i need|could i get} {an explanation|a definition|a description|an introduction} {of|to|for} @",
    "@, {i would like|i'd like|i need} {an explanation|a definition|to understand that|to know more}",
    "{explain|describe|introduce} @ to {my grandmother|my mother|a child|a kid|my boss|someone new|a layman|a newcomer}",
    "{so |ok |}@ {means|is|are} what{ exactly|}",
    "{got|have|is there} {a|any} {definition|explanation|description} {for|of} @",
    "@ {101|basics|for dummies|for beginners|in a sentence|in a few words|quickly}",
    "{what sort of thing|what kind of thing} is {a |the |}@",
    "{the term|the word|the phrase|the concept of} @{, what is that| - what is it|, please explain|}",
    "@{ = |= | =|=}?",
    "@{?|??|???| ?|!|...| -}",
    "{?|what|wtf|wth|um|eh|erm} @{?|}",
    "{define|explain|meaning|definition|info|describe|tell}{:|;| -|,|} @",
    "@{, | - |; |. |: }{its meaning|what for|in short|define|explain|never heard of it|no idea what it is|why|short for what|what's the idea|i don't get it|help|tell me}",
    "{whats|what's|what is|what was|what would be|what are|wot is|what r} {this |that |these |those |}@{ thing| stuff| business|}{ again| anyway| then| exactly| even| in plain words|}",
    "{what does|whats|what do} {the word |the term |the letters |the abbreviation |}@ {mean|stand for|actually mean|signify|say|stands for|short for}{ here| again|}",
    "{no idea|not sure|i forgot|i wonder|i'm not sure|i can't remember|nobody told me|please remind me} what {a |the |}@ {is|means|does|was}",
    "{got a question about|question about|question on|one thing about|some words on|a word on|info about|regarding|concerning|about|as for|on the topic of} @",
    "{what|how} {is|are|does|do} {a |the |}@ {used|needed|there|good} for",
    "{why|when|where} {do|would|should|does} {i|we|one|somebody|the engine|you|people} {need|use|want|care about|have|talk about|hear about} {a |the |}@",
    "{can|could} {someone|you|anyone} {break down|sum up|summarise|put in plain words|shed light on|enlighten me about|help me with} @{ please| for me|}",
    "{explain|describe|what is|define} {a |the |}@ {like i am five|to my grandmother|to my kids|for dummies|for a layman|as if i were ten|without jargon|in one line|to my dad}",
    "{i|we} {hear|read|see|heard|saw|stumbled over|came across} {the word |the term |something about |}@ {everywhere|often|all the time|in a talk|in the docs|somewhere}{, what is it|, explain|, what's that about|}",
    "{the|this|that} @ {thing|stuff|concept|idea|word}{, what's that| - explain|, what does it mean|, huh|}",
    "{is|are} {a |the |}@ {something good|important|a problem|hard to understand|complicated|worth knowing}",
    "{teach|school|educate|brief|enlighten} me {on|about|in} @",
    "{give|show|tell} me {the meaning|the gist|an idea|a summary|the short version|a hint|a definition|an overview|the basics} of @",
)
